"""The package on a GPU that is pretended: nothing mixes devices, results are those of the CPU, and waits are few."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn

from hf_meshadapt.anchor.circuit import mean_gradients, norm, not_finite
from hf_meshadapt.anchor.snapshot import Layout, SnapshotDecoder, SnapshotEncoder
from hf_meshadapt.anchoring.passes import weights_in_place
from hf_meshadapt.boundary.coder import BoundaryCoder
from hf_meshadapt.boundary.fitting import BoundaryFit, fit_boundary
from hf_meshadapt.boundary.module import BoundaryReceive, BoundarySend
from hf_meshadapt.boundary.observer import Observer
from hf_meshadapt.boundary.predictor import project_embedding
from hf_meshadapt.boundary.sequence_coder import FIRST, PADDING, TARGET, TOKEN
from hf_meshadapt.checkpoint import load_stage_weights
from hf_meshadapt.checkpoint_state import (
    capture_rng,
    load_optimizer_state,
    load_rank_state,
    optimizer_state_by_name,
    restore_rng,
    save_rank_state,
)
from hf_meshadapt.config import CODECS, BoundaryConfig
from hf_meshadapt.data_parallel.clock import SyncClock
from hf_meshadapt.data_parallel.exchange import InProcess, OverGroup
from hf_meshadapt.data_parallel.hook import BucketHook
from hf_meshadapt.data_parallel.outer_wires import DenseWire, Int8Wire
from hf_meshadapt.data_parallel.powersgd import PowerSGD
from hf_meshadapt.data_parallel.tied import TiedSum
from hf_meshadapt.data_trainer import barriers_without_a_device
from hf_meshadapt.gradients import clip_coefficient, nonfinite_cause, scale_gradients, squared_norm, sum_tied
from hf_meshadapt.ledger import Ledger
from hf_meshadapt.mesh import MeshGroups, MeshTopology
from hf_meshadapt.pipeline.microbatch import batch_digest, pad_rows, token_kinds
from hf_meshadapt.pipeline.sequential import split_rows
from hf_meshadapt.spectral.compressor import GradientCompressor
from hf_meshadapt.spectral.config import RULES, SpectralConfig
from hf_meshadapt.spectral.optimizer import SpectralCorrection
from hf_meshadapt.waiting import within

from ..equality import mesh_trainer, summary, tiny_model
from ..pretended_cuda import CUDA, CudaTensor, PretendedCuda, forget_waits, move, on_both, trainer_there

ROWS, LENGTH, HIDDEN, VOCAB = 2, 12, 64, 31


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kinds() -> torch.Tensor:
    kind = torch.full((ROWS, LENGTH), TOKEN, dtype=torch.int8)
    kind[:, 0], kind[1, 5], kind[:, 3:5], kind[1, 10:] = FIRST, FIRST, TARGET, PADDING
    return kind


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


# What is pretended ---------------------------------------------------------------------------------------------------


def test_what_a_gpu_refuses_is_refused():
    with PretendedCuda():
        there = torch.ones(3, device="cuda")
        for mixed in (lambda: there + torch.ones(3), lambda: torch.cat([torch.ones(3), there]), there.numpy):
            with pytest.raises((RuntimeError, TypeError)):
                mixed()
        assert (there + torch.tensor(1.0)).device == there[torch.tensor([0, 2])].device == CUDA
        assert there.cpu().numpy().sum() == 3 and there.cpu().data_ptr() != there.data_ptr()


# Boundaries ----------------------------------------------------------------------------------------------------------


def observe(device, gradients: bool = True):
    """A calibration's sums over three passes, the second held out, and the token features."""
    table = project_embedding(draw(VOCAB, HIDDEN, seed=2).to(device), 8)
    observer = Observer(HIDDEN, table, device)
    for step in range(3):
        observer.held_out = step == 1
        hidden = draw(ROWS, LENGTH, HIDDEN, seed=step).to(device).requires_grad_()
        leaving = observer(hidden, tokens().to(device), kinds())
        if gradients:
            leaving.square().sum().backward()
    return observer.moments(), table


def test_calibrations(one_thread):
    def calibrate(device):
        moments, table = observe(device)
        fit = fit_boundary(moments, transforms=True)
        again = BoundaryFit.from_state({name: tensor.to(device) for name, tensor in fit.state().items()})
        return table, moments.tensors(), vars(again.forward), vars(again.backward), again.weights, again.felt

    on_both(calibrate)


VARIANTS = {
    **{codec: {"codec": codec} for codec in CODECS},
    "random_mask, filled": {"codec": "random_mask", "predictor": "mean"},
    "transform, whole bits": {"codec": "transform", "entropy_coded": False, "predictor": "token"},
    "quantize, not rotated": {"codec": "quantize", "rotated": False},
    "topk, error feedback": {"codec": "topk", "error_feedback": True},
}
# These look at values on the host, whose parts of the work numba and dictionaries do.
ON_THE_HOST = ("transform", "aq_sgd", "topk, error feedback")


@pytest.mark.parametrize("exact_first", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_boundaries(variant, exact_first, one_thread):
    options = {"mask_ratio": 0.5} if VARIANTS[variant]["codec"] == "random_mask" else {"budget": 0.3}
    options |= {"wire_dtype": "bfloat16"} if variant == "none" else {}
    config = BoundaryConfig(**VARIANTS[variant], **options, exact_first_token=exact_first)
    state = fit_boundary(observe(torch.device("cpu"))[0], transforms=True).state()
    if config.predictor == "mean":
        state["weights"] = state["weights"][-1:]
    elif config.predictor == "none":
        state["weights"] = torch.zeros(1, HIDDEN)

    def cross(device):
        """Twice, as an epoch after another."""
        table = draw(VOCAB, 8, seed=3).to(device, torch.bfloat16)
        send, receive = BoundarySend(config, 0, HIDDEN), BoundaryReceive(config, 0, HIDDEN)
        for end in (send, receive) if config.needs_calibration else ():
            end.set_fit(BoundaryFit.from_state({name: part.to(device) for name, part in state.items()}), table)
        found, ids, kind = [], tokens().to(device), kinds()
        for visit in range(2):
            hidden = draw(ROWS, LENGTH, HIDDEN, seed=visit).to(device).requires_grad_()
            for end in (send, receive):
                end.first_visit = config.codec == "aq_sgd" and visit == 0
            packed = send(hidden, 5, ids, kind)
            arrived = receive(packed, 5, ids, kind, LENGTH, torch.float32)
            (arrived * draw(ROWS, LENGTH, HIDDEN, seed=9).to(device)).sum().backward()
            found += [*packed, arrived, hidden.grad]
            if visit == 0:
                forget_waits()  # for what is made once
        if config.remembers_samples:
            held = [m for end in (send, receive) for m in end.coder.messages.values()]
            assert held and not any(isinstance(message, CudaTensor) for message in held)
        return found

    waits = on_both(cross)
    assert variant in ON_THE_HOST or waits == []


def test_boundaries_take_kinds_of_the_device_too():
    def cross(device):
        coder = BoundaryCoder(BoundaryConfig("topk", budget=0.3), HIDDEN, BoundaryFit.empty(HIDDEN), None)
        hidden, ids, kind = draw(ROWS, LENGTH, HIDDEN).to(device), tokens().to(device), kinds().to(device)
        return coder.decode(coder.encode(hidden, ids, kind), ids, kind)

    assert on_both(cross)


# Data-parallel axis --------------------------------------------------------------------------------------------------

SHAPES = {"wide": torch.Size((12, 40)), "bias": torch.Size((9,)), "tall": torch.Size((50, 10))}


def gradients(device, seed: int) -> dict[str, torch.Tensor]:
    return {name: draw(*shape, seed=seed).to(device) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("kind", ["powersgd", "bfloat16", "int8", "tied"])
def test_aggregators(kind, one_thread):
    def aggregate(device):
        exchange, replicas = InProcess(2), [gradients(device, 1), gradients(device, 2)]
        if kind == "tied":
            wire = TiedSum(SHAPES["tall"], 2, torch.bfloat16, exchange, device=device)
        elif kind == "powersgd":
            wire = PowerSGD(SHAPES, 2, torch.bfloat16, 2, device)
        else:
            wire = Int8Wire(SHAPES) if kind == "int8" else DenseWire(SHAPES, torch.bfloat16)

        def average():
            if kind == "tied":
                return wire.sum(0, [mine["tall"] for mine in replicas])
            return wire.aggregate(replicas, exchange)

        first = average()
        wire.load_state_dict({name: tensor.cpu() for name, tensor in wire.state_dict().items()})
        forget_waits()
        return first, average(), wire.state_dict()

    assert on_both(aggregate) == []


def test_the_hook_of_gradient_buckets(one_thread):
    """Without DDP, whose buckets come from C++."""

    def run(device):
        parameters, found = gradients(device, 0), []  # only who they are matters
        aggregator = PowerSGD(SHAPES, 2, torch.float32, 1, device)
        hook = BucketHook(parameters, lambda mine: aggregator.aggregate([mine], InProcess(1)))
        for names in (["wide", "bias"], ["tall"]):
            buffer = torch.cat([draw(*SHAPES[name], seed=4).to(device).flatten() for name in names])
            pieces = buffer.split([SHAPES[name].numel() for name in names])
            bucket = mock.Mock()
            bucket.buffer.return_value, bucket.is_last.return_value = buffer, names == ["tall"]
            bucket.parameters.return_value = [parameters[name] for name in names]
            bucket.gradients.return_value = [piece.view(SHAPES[name]) for name, piece in zip(names, pieces)]
            found.append(hook.on_bucket(None, bucket))
        return [future.value() for future in found]

    on_both(run)


def test_clocks_of_synchronisations_begin_when_the_pass_before_has_ended():
    log = []
    with PretendedCuda() as mode, mock.patch.object(mode, "waits", log):
        clock = SyncClock(lambda: log.append("clock") or 0.0)
        with clock.synchronising(CUDA):
            log.append("work")
        exchange = OverGroup.__new__(OverGroup)
        exchange.group, exchange.num_replicas, exchange.clock, exchange.chunk_bytes = None, 2, clock, None
        with mock.patch.object(dist, "all_reduce", lambda *_, **__: log.append("sent")):
            exchange.sum([torch.ones(3, device="cuda")])
    assert log == ["stream", "clock", "work", "clock", "stream", "clock", "sent", "stream", "clock"]


# Optimizers ----------------------------------------------------------------------------------------------------------

INNER = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def make_blocks(device) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(12, 10), nn.Linear(10, 8))
    return move(blocks) if device == CUDA else blocks


@pytest.mark.parametrize(
    ("rule", "inner"),
    [*((rule, "adamw") for rule in RULES), ("diagonal", "fused"), ("blend", "fused"), ("blend", "sgd")],
)
def test_corrected_steps(rule, inner, one_thread):
    config = SpectralConfig(rule, **({} if rule == "none" else {"matrix_rank": 4, "refresh_steps": 1}))

    def train(device):
        blocks = make_blocks(device)
        optimizer = SpectralCorrection(INNER[inner](blocks.parameters()), blocks.named_parameters(), config)
        optimizer.measures = True
        compressor = GradientCompressor(config)
        for step in range(4):
            blocks(draw(5, 12, seed=step).to(device)).square().sum().backward()
            if step < 2:
                sent = compressor.compress({name: p.grad for name, p in blocks.named_parameters()})
                optimizer.priors.receive({name: value.to("cpu") for name, value in sent.items()}, step, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:  # as a checkpoint has it
                tensors, plain = optimizer.spectral_state()
                optimizer.load_spectral_state({name: t.cpu() for name, t in tensors.items()}, plain)
        return list(blocks.parameters()), optimizer.spectral_state(), optimizer.alignment

    on_both(train)


def test_gradients_over_a_pipeline(one_thread):
    def arithmetic(device):
        blocks = make_blocks(device)
        parameters = list(blocks.parameters())
        blocks(draw(5, 12).to(device)).square().sum().backward()
        norm = squared_norm(parameters).sqrt()
        assert not isinstance(norm, CudaTensor) and norm.dtype == torch.float64
        scale_gradients(parameters, clip_coefficient(norm, 0.1))
        first, last = (make_blocks(device)[0].weight for _ in range(2))
        first.grad, last.grad = draw(10, 12, seed=1).to(device), draw(10, 12, seed=2).to(device)
        sum_tied(first, last)
        cause = nonfinite_cause(blocks.named_parameters(), None)
        return float(norm), cause, [parameter.grad for parameter in (*parameters, first, last)]

    assert len([wait for wait in on_both(arithmetic) if "gradients.py" in wait and "cpu" in wait]) == 1


# Batches -------------------------------------------------------------------------------------------------------------


def test_batches_are_cut_without_waiting():
    labels = torch.where(torch.arange(LENGTH) > 3, tokens(), -100)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 9:] = 0
    pairs = mask[:, None, :, None] * mask[:, None, None, :]
    positions = torch.arange(LENGTH).remainder(5).expand(ROWS, LENGTH).contiguous()

    def cut(device):
        found, batch = [], {"input_ids": tokens().to(device), "labels": labels.to(device)}
        for further in ({}, {"attention_mask": mask}, {"attention_mask": pairs}, {"position_ids": positions}):
            padded = pad_rows(batch | {name: value.to(device) for name, value in further.items()}, 4)
            found += [token_kinds(padded), batch_digest(padded), split_rows(padded, 2)]
        return found

    assert on_both(cut) == []


# Anchor --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_snapshots(bits):
    def send(device):
        encoder, decoder, layout = SnapshotEncoder(0, delta_bits=bits), SnapshotDecoder(), Layout(dict(SHAPES))
        for version in range(3):
            message = encoder.encode(version, gradients(device, version))
            assert not any(isinstance(tensor, CudaTensor) for tensor in message.tensors.values())
            decoder.decode(message)
        assert torch.equal(decoder.reference, encoder.reference)
        return layout.unpack(layout.pack(gradients(device, 0))), decoder.reference.to(device)

    on_both(send)


def test_what_an_anchor_makes_of_its_passes(one_thread):
    def passes(device):
        blocks, snapshot = (
            make_blocks(device),
            {n: p.detach().clone() for n, p in make_blocks("cpu").named_parameters()},
        )
        with weights_in_place(list(blocks.named_parameters()), snapshot):
            blocks(draw(5, 12).to(device)).square().sum().backward()
            made = {name: parameter.grad for name, parameter in blocks.named_parameters()}
        mean = mean_gradients(iter([made, made]), 2)
        first = next(iter(mean))
        return mean, norm(mean), not_finite(mean), not_finite(mean | {first: mean[first] / 0})

    assert len([wait for wait in on_both(passes) if wait.startswith("tolist in anchor/circuit.py")]) == 3


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
def test_optimizer_state_returns_to_its_device(inner, tmp_path):
    def resume(device):
        optimizers = []
        for _ in range(2):
            blocks = make_blocks(device)
            optimizers.append((blocks, INNER[inner](blocks.parameters())))
        for blocks, optimizer in optimizers[:1]:
            blocks(draw(5, 12).to(device)).sum().backward()
            optimizer.step()
        tensors, scalars = optimizer_state_by_name(optimizer, blocks.named_parameters())
        blocks, resumed = optimizers[1]
        stored = {name: tensor.cpu() for name, tensor in tensors.items()}
        load_optimizer_state(resumed, list(blocks.named_parameters()), stored, scalars)
        blocks(draw(5, 12).to(device)).sum().backward()
        resumed.step()
        states = [resumed.state[parameter] for parameter in blocks.parameters()]
        counters = [state["step"].device for state in states if "step" in state]
        assert all((counter == CUDA) == (inner == "fused" and device == CUDA) for counter in counters)
        return [tensor for state in states for name, tensor in state.items() if name != "step"]

    on_both(resume)


def test_weights_and_further_state_are_written_and_read(tmp_path):
    def save_and_load(device):
        whole = tiny_model("llama", num_layers=1)
        model = move(whole) if device == CUDA else whole
        tensors = {"features": draw(3, 4).to(device)}
        save_rank_state(tmp_path / device.type, 0, rng=capture_rng(), scheduler={}, tensors=tensors)
        state = load_rank_state(tmp_path / device.type, 0)
        tiny_model("llama", num_layers=1, seed=1).save_pretrained(tmp_path / device.type)
        load_stage_weights(model, list(model.state_dict()), tmp_path / device.type)
        restore_rng(state.rng)
        return list(model.parameters()), state.tensors["features"].to(device)

    on_both(save_and_load)


def test_random_states_of_a_gpu():
    with (
        PretendedCuda(),
        mock.patch("torch.cuda.is_initialized", lambda: True),
        mock.patch("torch.cuda.is_available", lambda: True),
    ):
        state = capture_rng()
        assert not isinstance(state["cuda"], CudaTensor)
        with mock.patch("torch.cuda.set_rng_state") as restored:
            restore_rng(state)
    assert torch.equal(restored.call_args.args[0], state["cuda"])


# Whole runs ----------------------------------------------------------------------------------------------------------


def test_a_run_of_the_emulated_mesh(tmp_path, one_thread):
    options = dict(
        preset="anchored", anchor=True, anchor_every=1, prior_rank=4, calibration_tokens=128, pipeline_stages=2,
        data_parallel_replicas=2, dp_sync="streaming_diloco", sync_every=1, outer_wire="powersgd", matrix_rank=2,
        max_steps=2, gradient_accumulation_steps=1, eval_steps=2,
    )  # fmt: skip

    def train(where) -> tuple[dict, list[str]]:
        with where as mode:
            trainer = mesh_trainer(tiny_model("llama_tied", num_layers=2), 2, str(tmp_path), num_rows=16, **options)
            trainer.train()
            for name, parameter in trainer.engine.parts.named_trainable():
                assert (parameter.device == CUDA) == isinstance(mode, PretendedCuda), name
            return summary(trainer, trainer.engine.parts.model.state_dict()), mode and mode.waits

    (expected, _), (found, waits) = train(contextlib.nullcontext()), train(trainer_there())
    for figure in ("loss", "grad_norm", "eval_loss"):
        assert found[figure] == expected[figure]
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name].as_subclass(torch.Tensor), weight), name
    assert waits.count("stream") >= 2  # the meter's, for what the optimizer has enqueued


def test_probes_run_under_autocast(tmp_path):
    """Attention kernels that take no float32 must be able to."""
    trainer = mesh_trainer(tiny_model("llama", num_layers=2), 4, str(tmp_path), pipeline_stages=2)
    for stage in trainer.engine.parts.stages.values():
        stage.autocast = mock.MagicMock()
        stage.probe()
        stage.autocast.assert_called_once()


# Threads, groups, meters ---------------------------------------------------------------------------------------------


def test_threads_have_the_gpu_of_the_thread_that_starts_them():
    chosen = []
    exchange = OverGroup.__new__(OverGroup)
    exchange.timeout_seconds = 10.0
    with (
        mock.patch("torch.cuda.is_initialized", lambda: True),
        mock.patch("torch.cuda.current_device", lambda: 3),
        mock.patch("torch.cuda.set_device", lambda device: chosen.append((threading.get_ident(), device))),
    ):
        threads = [within(10.0, threading.get_ident), exchange.launch(threading.get_ident)()]
    assert chosen == [(thread, 3) for thread in threads] and threading.get_ident() not in threads


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_nccl_groups_meet_when_they_are_made(backend):
    made, met = [], []

    def new_group(ranks, backend, **_):
        made.append(SimpleNamespace(ranks=ranks, backend=backend))
        return made[-1]

    def all_reduce(tensor, group):
        assert tensor.is_cuda
        met.append(group)

    with PretendedCuda(), mock.patch.multiple(dist, new_group=new_group, all_reduce=all_reduce):
        groups = MeshGroups(MeshTopology(3, 2, rank=4), backend, 10.0)
    mine = [groups.pipeline, groups.data_parallel]  # a stage between has no tied group
    assert met == (mine if backend == "nccl" else [])
    assert groups.control.backend == groups.save.backend == "gloo" and groups.pipeline.backend == backend


def test_bytes_that_sockets_do_not_carry_are_not_told():
    for counts in (True, False):
        ledger = Ledger(counts_bytes=counts)
        figures = ledger.take(lambda values: values, stages=1, alone=False)
        assert (figures.axis_bytes is not None) == (counts and ledger.sockets.available)


def test_barriers_name_no_device():
    calls = []
    state = PartialState(cpu=True)
    with mock.patch.object(state, "num_processes", 2), mock.patch.object(dist, "barrier", lambda: calls.append(1)):
        with barriers_without_a_device():
            PartialState().wait_for_everyone()
        assert calls == [1] and "wait_for_everyone" not in vars(state)
