"""AQ-SGD's steps at the two ends of a boundary: whole at first, then what changed, both ends of one mind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_meshadapt.boundary.aq_sgd import DeltaCoder, mark_first_visit, sample_names
from hf_meshadapt.boundary.fitting import BoundaryFit
from hf_meshadapt.boundary.module import BoundaryReceive, BoundarySend, wire_tensors
from hf_meshadapt.boundary.quantize import QuantizeCodec
from hf_meshadapt.boundary.sequence_coder import FIRST, PADDING, TARGET, TOKEN
from hf_meshadapt.config import BoundaryConfig

HIDDEN = 32
CONFIG = BoundaryConfig(codec="aq_sgd", bits=2, wire_dtype="bfloat16")
KIND = torch.tensor([[FIRST, TOKEN, TARGET, TARGET], [FIRST, TARGET, TARGET, PADDING]])
IDS = torch.tensor([[5, 6, 7, 8], [5, 9, 9, 0]])


class Ends:
    """Both ends of a boundary, and passes through it."""

    def __init__(self, config: BoundaryConfig = CONFIG):
        self.send, self.receive = BoundarySend(config, 0, HIDDEN), BoundaryReceive(config, 0, HIDDEN)
        self.stages = (
            SimpleNamespace(receive=None, send=self.send),
            SimpleNamespace(receive=self.receive, send=None),
        )
        self.first: list[bool] = []

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor = IDS, kind: torch.Tensor = KIND) -> torch.Tensor:
        self.first.append(mark_first_visit(self.stages, ids, kind))
        packed = self.send(hidden, 0, ids, kind)
        expected = wire_tensors(CONFIG, HIDDEN, len(ids), ids.shape[1], not self.first[-1], "cpu")
        assert [(p.shape, p.dtype) for p in packed] == [(e.shape, e.dtype) for e in expected]
        received = self.receive(packed, 0, ids, kind, ids.shape[1], torch.float32)
        names = self.send.coder.messages.keys()
        assert names == self.receive.coder.messages.keys()
        for name in names:  # both machines hold the same m
            assert torch.equal(self.send.coder.messages[name], self.receive.coder.messages[name])
        return received


def quantised(difference: torch.Tensor, bits: int) -> torch.Tensor:
    codec = QuantizeCodec(HIDDEN, bits)
    tokens = difference.reshape(-1, HIDDEN)
    return codec.decode(codec.encode(tokens, codec.natural_bytes(HIDDEN))).view(difference.shape)


def test_a_first_visit_travels_unquantised_and_is_remembered():
    ends, hidden = Ends(), torch.randn(2, 4, HIDDEN)
    assert isinstance(ends.send.coder, DeltaCoder)
    received = ends(hidden)
    assert ends.first == [True]
    assert torch.equal(received, hidden.bfloat16().float())
    messages = list(ends.send.coder.messages.values())
    assert torch.equal(messages[0], hidden[0].bfloat16()) and torch.equal(messages[1], hidden[1, :3].bfloat16())


def test_later_visits_send_the_quantised_change_and_the_receiver_computes_with_the_message():
    ends, hidden = Ends(), torch.randn(2, 4, HIDDEN)
    message = ends(hidden)
    for _ in range(3):
        hidden = hidden + 0.1 * torch.randn_like(hidden)
        expected = message + quantised(hidden - message, 2)
        received = ends(hidden)
        torch.testing.assert_close(received[KIND != PADDING], expected[KIND != PADDING], rtol=0, atol=1e-6)
        message = received.bfloat16().float()  # as it is kept
    assert ends.first == [True, False, False, False]


def test_what_does_not_change_comes_nearer_at_every_visit():
    ends, hidden = Ends(), torch.randn(2, 4, HIDDEN)
    ends(hidden)
    moved = hidden + torch.randn_like(hidden)
    errors = [float((ends(moved) - moved)[KIND != PADDING].norm()) for _ in range(5)]
    assert all(later < 0.7 * earlier for earlier, later in zip(errors, errors[1:]))


def test_the_gradient_is_quantised_by_itself_at_twice_the_bits():
    ends, hidden = Ends(), torch.randn(2, 4, HIDDEN)
    ends(hidden)
    hidden.requires_grad_()
    gradient = torch.randn(2, 4, HIDDEN)
    ends(hidden).backward(gradient)
    expected = quantised(gradient, 4)
    expected[1, 3] = 0.0  # padding
    assert torch.equal(hidden.grad, expected)
    assert CONFIG.token_bytes(HIDDEN, "forward") == 2 + HIDDEN * 2 // 8
    assert CONFIG.token_bytes(HIDDEN, "backward") == 2 + HIDDEN * 4 // 8
    assert BoundaryConfig(codec="aq_sgd", bits=8).token_bytes(HIDDEN, "backward") == 2 + HIDDEN


def test_a_sample_is_known_by_its_real_tokens_however_padded():
    ends, hidden = Ends(), torch.randn(2, 4, HIDDEN)
    ends(hidden)
    left = torch.tensor([[3, 3, 5, 9, 9]])
    kind = torch.tensor([[PADDING, PADDING, FIRST, TARGET, TARGET]])
    assert sample_names(left, kind) == sample_names(IDS[1:], KIND[1:])
    moved = torch.cat([torch.zeros(1, 2, HIDDEN), hidden[1:, :3]], dim=1)
    received = ends(moved, left, kind)
    assert ends.first == [True, False]
    torch.testing.assert_close(received[:, 2:], moved[:, 2:], rtol=2e-2, atol=2e-2)


def test_one_unseen_sample_makes_its_batch_travel_whole():
    ends, hidden = Ends(), torch.randn(2, 4, HIDDEN)
    ends(hidden)
    other = IDS.clone()
    other[0, 2] = 1
    assert torch.equal(ends(hidden, other), hidden.bfloat16().float())
    ends(hidden)
    assert ends.first == [True, True, False]


def test_evaluation_sends_everything_and_remembers_nothing():
    ends = Ends()
    for end in (ends.send, ends.receive):
        end.eval()
    mark_first_visit(ends.stages, IDS, KIND)
    packed = ends.send(torch.randn(2, 4, HIDDEN), 0, IDS, KIND)
    ends.receive(packed, 0, IDS, KIND, 4, torch.float32)
    assert packed[0].shape == (2, 4, HIDDEN) and not ends.send.coder.messages and not ends.receive.coder.messages


def test_a_sample_that_was_never_seen_cannot_be_coded():
    ends = Ends()
    with pytest.raises(KeyError):
        ends.send(torch.randn(2, 4, HIDDEN), 0, IDS, KIND)


# Error feedback ------------------------------------------------------------------------------------------------------


def test_error_feedback_sends_what_was_left_out_the_next_time():
    """EF21 for a constant: every visit sends the next largest entries, until nothing is left."""
    config = BoundaryConfig(codec="topk", budget=0.3, error_feedback=True, wire_dtype="bfloat16")
    send, receive = BoundarySend(config, 0, HIDDEN), BoundaryReceive(config, 0, HIDDEN)
    hidden = torch.randn(2, 4, HIDDEN)
    real, errors = KIND != PADDING, []
    for _ in range(12):
        packed = send(hidden, 0, IDS, KIND)
        received = receive(packed, 0, IDS, KIND, IDS.shape[1], torch.float32)
        errors.append(float((received - hidden)[real].norm() / hidden[real].norm()))
    assert errors[0] > 0.3 and errors[-1] < 0.01
    assert all(after <= before + 1e-3 for before, after in zip(errors, errors[1:]))  # kept in bfloat16


def test_a_sample_that_was_never_seen_starts_from_the_prediction():
    config = BoundaryConfig(
        codec="topk", budget=0.3, error_feedback=True, predictor="mean", exact_first_token=False, wire_dtype="bfloat16"
    )
    fit = BoundaryFit(torch.full((1, HIDDEN), 7.0), None, None, 0.0)
    send, receive = BoundarySend(config, 0, HIDDEN), BoundaryReceive(config, 0, HIDDEN)
    for end in (send, receive):
        end.set_fit(fit, None)
    hidden = torch.full((2, 4, HIDDEN), 7.0)
    received = receive(send(hidden, 0, IDS, KIND), 0, IDS, KIND, IDS.shape[1], torch.float32)
    assert torch.equal(received[KIND != PADDING], hidden[KIND != PADDING])


def test_a_new_calibration_leaves_what_both_ends_remember():
    config = BoundaryConfig(codec="topk", budget=0.3, error_feedback=True, predictor="mean", wire_dtype="bfloat16")
    send, receive = BoundarySend(config, 0, HIDDEN), BoundaryReceive(config, 0, HIDDEN)
    hidden, real, errors = torch.randn(2, 4, HIDDEN), KIND != PADDING, []
    for visit in range(8):
        if visit % 4 == 0:  # another mean each time
            for end in (send, receive):
                end.set_fit(BoundaryFit(torch.full((1, HIDDEN), 0.1 * visit), None, None, 0.0), None)
        received = receive(send(hidden, 0, IDS, KIND), 0, IDS, KIND, IDS.shape[1], torch.float32)
        errors.append(float((received - hidden)[real].norm()))
    assert all(later <= earlier + 1e-3 for earlier, later in zip(errors, errors[1:]))
    other = IDS + 1  # of a new sample the new prediction is what it starts from
    assert torch.equal(send.coder._base(other, KIND), torch.full((2, 4, HIDDEN), 0.4))
