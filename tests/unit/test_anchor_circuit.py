"""The anchor's loop, with a link of lists."""

import itertools

import pytest
import torch

from hf_meshadapt.anchor.circuit import AnchorCircuit
from hf_meshadapt.anchor.fast_link import Source
from hf_meshadapt.anchor.messages import Message, MessageError
from hf_meshadapt.anchor.snapshot import SnapshotEncoder


def weights(version: int, stage: int) -> dict[str, torch.Tensor]:
    shared = torch.full((4,), float(version))  # a tied matrix, on all stages
    return {"tied": shared, f"layers.{stage}": torch.arange(200.0) + version + stage}


class ListLink:
    """Hands out messages in order; done after the last."""

    def __init__(self, sources: list[tuple[int, int]], messages: list[Message], newer_waits=()):
        self.sources = tuple(Source(stage, index, "", 0) for stage, index in sources)
        self.messages, self.sent, self.norms, self.flushed = list(messages), [], [], 0
        self._newer_waits = list(newer_waits)
        self.done = False

    @property
    def newer_waits(self) -> bool:
        return self._newer_waits.pop(0) if self._newer_waits else False

    def take(self, timeout_seconds):
        self.done = not self.messages
        return self.messages.pop(0) if self.messages else None

    def send(self, stage, fields, tensors):
        self.norms.append(fields["gradient_norm"])
        self.sent.append((stage, fields["version"], fields["num_batches"], tensors))
        return True

    def flush(self, timeout_seconds):
        self.flushed += 1


def snapshots(order: list[tuple[int, int]]) -> list[Message]:
    """Messages of (stage, version), in this order."""
    encoders = {stage: SnapshotEncoder(stage, full_bits=32) for stage, _ in order}
    return [encoders[stage].encode(version, weights(version, stage)) for stage, version in order]


def double(held, batch):
    return {name: 2 * tensor * batch for name, tensor in held.items()}


def run(link, batches=None, gradients=double, **arguments) -> AnchorCircuit:
    circuit = AnchorCircuit(link, gradients, itertools.count(1) if batches is None else batches, dict, **arguments)
    circuit.run()
    return circuit


def test_a_pass_runs_when_all_stages_hold_one_version():
    link = ListLink([(0, 0), (1, 0)], snapshots([(0, 0), (1, 0), (0, 10), (0, 20), (1, 20), (1, 30)]))
    circuit = run(link)
    assert [(stage, version) for stage, version, _, _ in link.sent] == [(0, 0), (1, 0), (0, 20), (1, 20)]
    assert circuit.num_priors == 2 and link.flushed == 2
    for stage, version, num_batches, tensors in link.sent:
        assert tensors.keys() == weights(version, stage).keys()
        expected = double(weights(version, stage), num_batches)
        torch.testing.assert_close(tensors[f"layers.{stage}"], expected[f"layers.{stage}"], atol=0.5, rtol=0)


def test_a_prior_says_the_norm_of_the_whole_gradient():
    link = ListLink([(0, 0), (1, 0)], snapshots([(0, 3), (1, 3)]))
    run(link, batches=itertools.repeat(1))
    parts = {**weights(3, 0), **weights(3, 1)}  # the matrix that both stages hold once
    norm = float(torch.cat([2 * tensor for tensor in parts.values()]).norm())
    assert link.norms == [pytest.approx(norm, rel=1e-6)] * 2


def test_gradients_of_several_batches_are_averaged():
    link = ListLink([(0, 0)], snapshots([(0, 0)]))
    circuit = run(link, anchor_batches=4, num_batches=100)
    assert circuit.num_batches == 104 and link.sent[0][2] == 104
    torch.testing.assert_close(link.sent[0][3]["layers.0"], 2 * 2.5 * weights(0, 0)["layers.0"])


def test_slices_are_put_together():
    encoders = [SnapshotEncoder(0, 32, 8, index, 3) for index in range(3)]
    messages = [encoder.encode(0, weights(0, 0)) for encoder in reversed(encoders)]
    link = ListLink([(0, 1), (0, 0), (0, 2)], messages)
    run(link, batches=iter([1]))
    for name, tensor in weights(0, 0).items():
        assert torch.equal(link.sent[0][3][name], 2 * tensor)
    with pytest.raises(ValueError, match="do not make up its weights"):
        run(ListLink([(0, 0)], [SnapshotEncoder(0, 32, 8, 0, 2).encode(0, weights(0, 0))]))


def test_a_version_is_passed_over_once_where_newer_ones_wait():
    order = [(0, 0), (0, 10), (0, 20), (0, 30)]
    link = ListLink([(0, 0)], snapshots(order), newer_waits=[True, True, False, False])
    run(link)
    assert [version for _, version, _, _ in link.sent] == [10, 20, 30]


def test_a_fast_circuit_that_resumed_counts_from_there():
    messages = snapshots([(0, 50)]) + snapshots([(0, 20), (0, 30)])
    link = ListLink([(0, 0)], messages)
    run(link)
    assert [version for _, version, _, _ in link.sent] == [50, 20, 30]


def test_gradients_that_are_not_finite_are_not_sent(caplog):
    link = ListLink([(0, 0)], snapshots([(0, 0), (0, 1)]))
    run(link, batches=iter([float("nan"), 1.0]))
    assert [version for _, version, _, _ in link.sent] == [1]
    assert "no prior of step 0: gradients are not finite: tied" in caplog.text


def test_errors_name_what_is_wrong():
    def lacking(held, batch):
        return {"tied": held["tied"]}

    with pytest.raises(ValueError, match=r"lack layers.0, which stage 0 trains"):
        run(ListLink([(0, 0)], snapshots([(0, 0)])), gradients=lacking)
    with pytest.raises(ValueError, match="ended after 0 batches"):
        run(ListLink([(0, 0)], snapshots([(0, 0)])), batches=iter([]))
    with pytest.raises(MessageError, match="difference from step 0"):
        run(ListLink([(0, 0)], snapshots([(0, 0), (0, 1)])[1:]))
    with pytest.raises(ValueError, match="anchor_batches=0"):
        AnchorCircuit(ListLink([], []), double, iter([]), dict, anchor_batches=0)
