"""DiLoCo and Streaming DiLoCo over replicas in this process, against slow readings of the papers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_meshadapt.config import DataParallelConfig
from hf_meshadapt.data_parallel.base import AllReduce, ChunkParameters
from hf_meshadapt.data_parallel.diloco import (
    DiLoCo,
    StreamingDiLoCo,
    fragment_due,
    fragment_names,
    fragment_offset,
    outer_step,
)
from hf_meshadapt.data_parallel.exchange import InProcess
from hf_meshadapt.data_parallel.outer_wires import DenseWire, Int8Wire, quantise_blocks, restore_blocks
from hf_meshadapt.data_parallel.pacing import chunks
from hf_meshadapt.data_parallel.sizes import int8_bytes

NUM_LAYERS, REPLICAS = 4, 2


def make_chunk(dtype=torch.float32, tied: frozenset = frozenset()) -> ChunkParameters:
    torch.manual_seed(0)
    parameters = {"embedding": nn.Parameter(torch.randn(20, 30).to(dtype))}
    parameters |= {f"layers.{i}": nn.Parameter(torch.randn(16, 24).to(dtype)) for i in range(NUM_LAYERS)}
    return ChunkParameters(0, parameters, {f"layers.{i}": i for i in range(NUM_LAYERS)}, tied)


class Training:
    """Replicas that add drifts of their own, known in advance, to their weights."""

    def __init__(self, sync: str, dtype=torch.float32, tied: frozenset = frozenset(), **config):
        self.chunk = make_chunk(dtype, tied)
        self.weights = [
            {n: p.data.clone() if replica else p.data for n, p in self.chunk.parameters.items()}
            for replica in range(REPLICAS)
        ]
        kind = StreamingDiLoCo if sync == "streaming_diloco" else DiLoCo
        config = DataParallelConfig(sync, **config)
        self.sync = kind(config, InProcess(REPLICAS), {0: self.chunk}, self.weights)

    def drift(self, step: int, replica: int, name: str) -> torch.Tensor:
        seed = 1000 * step + 10 * replica + len(name) + ord(name[-1])
        return 0.01 * torch.randn(self.chunk.parameters[name].shape, generator=torch.Generator().manual_seed(seed))

    def step(self, step: int, final: bool = False) -> None:
        for replica, mine in enumerate(self.weights):
            for name, weight in mine.items():
                weight += self.drift(step, replica, name).to(weight.dtype)
        self.sync.end_step(final)


def test_the_outer_step_is_torchs_nesterov():
    outer, momentum = torch.randn(5, 3), torch.zeros(5, 3)
    parameter = nn.Parameter(outer.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        parameter.grad = torch.randn(5, 3)
        outer_step(outer, momentum, parameter.grad, 0.7, 0.9)
        optimizer.step()
        torch.testing.assert_close(outer, parameter.data, rtol=0, atol=1e-6)


@pytest.mark.parametrize("wire,tolerance", [("float32", 1e-6), ("bfloat16", 1e-3), ("int8", 1e-3)])
def test_diloco_equals_the_papers_algorithm(wire, tolerance):
    training = Training("diloco", sync_every=3, outer_wire=wire)
    start = {name: p.detach().clone() for name, p in training.chunk.parameters.items()}
    for name, weight in start.items():
        momentum, inner = torch.zeros_like(weight), [weight.clone() for _ in range(REPLICAS)]
        start[name] = (weight, momentum, inner)
    for step in range(1, 8):
        training.step(step)
        for name, (outer, momentum, inner) in start.items():
            inner = [mine + training.drift(step, replica, name) for replica, mine in enumerate(inner)]
            if step % 3 == 0:
                delta = sum(outer - mine for mine in inner) / REPLICAS
                momentum = 0.9 * momentum + delta
                outer = outer - 0.7 * (delta + 0.9 * momentum)
                inner = [outer.clone() for _ in range(REPLICAS)]
            start[name] = (outer, momentum, inner)
            for replica, mine in enumerate(inner):
                torch.testing.assert_close(training.weights[replica][name], mine, rtol=0, atol=tolerance)
        same = all(torch.equal(*(mine[name] for mine in training.weights)) for name in start)
        assert same == (step % 3 == 0)


def test_one_step_at_rate_one_without_momentum_is_the_average_gradient():
    """SGD's step on averaged gradients is the average of SGD's steps."""
    config = dict(sync_every=1, outer_wire="float32", outer_learning_rate=1.0, outer_momentum=0.0)
    training = Training("diloco", **config)
    expected = {name: p.detach().clone() for name, p in training.chunk.parameters.items()}
    dense = AllReduce(DataParallelConfig(), InProcess(REPLICAS), {0: training.chunk}, training.weights)
    for step in range(5):
        gradients = [{name: training.drift(step, replica, name) for name in expected} for replica in range(REPLICAS)]
        for name, gradient in dense.average(0, gradients).items():
            expected[name] += gradient
        training.step(step)
        for name in expected:
            torch.testing.assert_close(training.chunk.parameters[name].data, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("overlap,mixing", [(0, 0.0), (1, 0.5), (2, 0.25)])
def test_streaming_equals_the_papers_algorithm(overlap, mixing):
    """Algorithm 2 for every fragment, with its own clock, as plain loops."""
    every, count = 6, 2
    rates = dict(sync_every=every, num_fragments=count, overlap_steps=overlap, mixing=mixing, outer_wire="float32")
    training = Training("streaming_diloco", **rates)
    fragments = fragment_names([training.chunk], count)
    weights = {n: [p.detach().clone() for _ in range(REPLICAS)] for n, p in training.chunk.parameters.items()}
    outer = {name: replicas[0].clone() for name, replicas in weights.items()}
    momentum = {name: torch.zeros_like(weight) for name, weight in outer.items()}
    sent: dict[str, torch.Tensor] = {}
    for step in range(1, 20):
        training.step(step)
        for fragment, names in enumerate(fragments):
            for name in names:
                weights[name] = [mine + training.drift(step, r, name) for r, mine in enumerate(weights[name])]
                if (step - fragment * every // count) % every == 0:
                    sent[name] = sum(outer[name] - mine for mine in weights[name]) / REPLICAS
                if (step - overlap - fragment * every // count) % every == 0 and name in sent:
                    momentum[name] = 0.9 * momentum[name] + sent[name]
                    outer[name] = outer[name] - 0.7 * (sent[name] + 0.9 * momentum[name])
                    weights[name] = [mixing * mine + (1 - mixing) * outer[name] for mine in weights[name]]
                for replica, mine in enumerate(weights[name]):
                    torch.testing.assert_close(training.weights[replica][name], mine, rtol=0, atol=1e-5)
                torch.testing.assert_close(training.sync.outer[name], outer[name], rtol=0, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.data())
def test_every_fragment_is_sent_once_in_a_round_and_evenly_spread(every, data):
    count = data.draw(st.integers(1, every))
    due = [fragment_due(step, count, every) for step in range(every + 1, 2 * every + 1)]
    assert sorted(fragment for fragment in due if fragment is not None) == list(range(count))
    offsets = [fragment_offset(fragment, count, every) for fragment in range(count)] + [every]
    assert all(later - earlier >= every // count for earlier, later in zip(offsets, offsets[1:]))


def test_fragments_take_layers_in_turn():
    names = fragment_names([make_chunk()], 3)
    assert names == [["embedding", "layers.0", "layers.3"], ["layers.1"], ["layers.2"]]


WIRES = ["bfloat16", "int8", "powersgd"]
STREAMING = dict(sync_every=4, num_fragments=2, overlap_steps=1, mixing=0.5)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("sync", ["diloco", "streaming_diloco"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_equals_the_uninterrupted_one(sync, wire, dtype):
    config = dict(outer_wire=wire, matrix_rank=2, **(STREAMING if sync == "streaming_diloco" else dict(sync_every=3)))
    whole = Training(sync, dtype, **config)
    states = {}
    for step in range(1, 12):
        whole.step(step, final=step == 11)
        inner = [{name: weight.clone() for name, weight in mine.items()} for mine in whole.weights]
        states[step] = ({name: tensor.clone() for name, tensor in whole.sync.state_dict().items()}, inner)
    for step in (2, 3, 4, 6):  # a fragment is on its way after 2, 4 and 6
        resumed = Training(sync, dtype, **config)
        state, inner = states[step]
        assert ("in_flight" in state) == (sync == "streaming_diloco" and step % 2 == 0)
        resumed.sync.load_state_dict(state)
        for mine, saved in zip(resumed.weights, inner):
            for name, weight in saved.items():
                mine[name].copy_(weight)
        for later in range(step + 1, 12):
            resumed.step(later, final=later == 11)
            for mine, expected in zip(resumed.weights, states[later][1]):
                assert all(torch.equal(weight, expected[name]) for name, weight in mine.items())
        for name, tensor in whole.sync.state_dict().items():
            assert torch.equal(resumed.sync.state_dict()[name], tensor), name


@pytest.mark.parametrize("sync", ["diloco", "streaming_diloco"])
def test_after_the_last_step_and_after_finish_all_replicas_are_the_outer_model(sync):
    config = STREAMING if sync == "streaming_diloco" else dict(sync_every=100)
    for ends in ("final", "finish"):
        training = Training(sync, **config)
        for step in range(1, 6):
            training.step(step, final=ends == "final" and step == 5)
        if ends == "finish":
            training.sync.finish()
        outer = {name: tensor.clone() for name, tensor in training.sync.outer.items()}
        for mine in training.weights:
            assert all(torch.equal(weight, outer[name]) for name, weight in mine.items())
        training.sync.finish()  # nothing is left to do
        assert all(torch.equal(tensor, outer[name]) for name, tensor in training.sync.outer.items())


def test_outer_weights_are_in_the_model_for_a_while_only():
    training = Training("diloco", torch.bfloat16, sync_every=100)
    before = {name: p.detach().clone() for name, p in training.chunk.parameters.items()}
    training.step(1)
    inner = {name: p.detach().clone() for name, p in training.chunk.parameters.items()}
    with training.sync.outer_weights():
        for name, parameter in training.chunk.parameters.items():
            assert torch.equal(parameter, before[name]) and parameter.dtype == torch.bfloat16
    for name, parameter in training.chunk.parameters.items():
        assert torch.equal(parameter, inner[name])
    training.weights[0]["embedding"] += 1  # what is trained is still in the model
    assert torch.equal(training.chunk.parameters["embedding"], inner["embedding"] + 1)


def test_a_restart_takes_the_models_weights():
    training = Training("streaming_diloco", **STREAMING)
    for step in range(1, 5):
        training.step(step)
    assert training.sync.in_flight is not None
    for parameter in training.chunk.parameters.values():
        parameter.data.fill_(3.0)
    training.sync.restart()
    assert training.sync.in_flight is None and training.sync.steps == 0
    assert all((weight == 3).all() for mine in (*training.weights, training.sync.outer) for weight in mine.values())


@pytest.mark.parametrize("wire", WIRES)
def test_a_tied_copy_travels_alone(wire):
    """What its average is must not depend on what else the stage has."""
    config = dict(sync_every=2, outer_wire=wire, matrix_rank=2)
    ends = [Training("diloco", tied=frozenset({"embedding"}), **config) for _ in range(2)]
    other = ends[1]
    assert [list(wire.shapes) for wire in other.sync.wires[0]][0] == ["embedding"]
    other.chunk = ChunkParameters(0, {"embedding": other.chunk.parameters["embedding"]}, {}, frozenset({"embedding"}))
    other.weights = [{"embedding": mine["embedding"]} for mine in other.weights]
    other.sync = DiLoCo(other.sync.config, InProcess(REPLICAS), {0: other.chunk}, other.weights)
    for step in range(1, 7):
        for end in ends:
            end.step(step)
        assert torch.equal(*(end.weights[0]["embedding"] for end in ends))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 2000), st.floats(1e-30, 1e30))
def test_int8_blocks_are_within_half_a_step(size, scale):
    values = scale * torch.randn(size, generator=torch.Generator().manual_seed(size))
    message = quantise_blocks(values)
    assert message.dtype == torch.uint8 and len(message) == int8_bytes(size)
    restored = restore_blocks(message, size)
    for block, back in zip(values.split(256), restored.split(256)):
        assert (block - back).abs().max() <= block.abs().max() / 127 * 0.501


def test_int8_of_zeros_is_zeros():
    assert torch.equal(restore_blocks(quantise_blocks(torch.zeros(300)), 300), torch.zeros(300))


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_wires_average(num_replicas):
    shapes = {"a": torch.Size((7, 40)), "b": torch.Size((9,)), "c": torch.Size(())}
    tensors = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(num_replicas)]
    for wire, tolerance in (
        (DenseWire(shapes, torch.float32), 1e-6),
        (DenseWire(shapes, torch.bfloat16), 0.03),
        (Int8Wire(shapes), 0.03),
    ):
        for name, average in wire.aggregate(tensors, InProcess(num_replicas)).items():
            expected = sum(mine[name] for mine in tensors) / num_replicas
            torch.testing.assert_close(average, expected, rtol=0, atol=tolerance)


@given(st.integers(1, 200), st.integers(1, 90))
def test_chunks_are_the_message_in_order(size, chunk_bytes):
    message = torch.arange(size, dtype=torch.float32)
    pieces = list(chunks(message, chunk_bytes))
    assert torch.equal(torch.cat(pieces), message)
    assert all(piece.numel() == 1 or 4 * piece.numel() <= chunk_bytes for piece in pieces)
    assert pieces[0].data_ptr() == message.data_ptr()
