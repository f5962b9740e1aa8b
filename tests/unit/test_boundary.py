"""BoundarySend and BoundaryReceive against a dense masked tensor, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.boundary.module import BoundaryReceive, BoundarySend, packed_shape
from hf_meshadapt.boundary.prf import boundary_key, kept_indices, microbatch_key
from hf_meshadapt.config import BoundaryConfig

KEY = microbatch_key(0, 1, 0, 2, 3)
BOUNDARY = 1


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_ends(config: BoundaryConfig, hidden_size: int) -> tuple[BoundarySend, BoundaryReceive]:
    send, receive = BoundarySend(config, BOUNDARY, hidden_size), BoundaryReceive(config, BOUNDARY, hidden_size)
    if config.predictor == "mean":
        receive.set_fill_from(torch.cat([torch.randn(hidden_size, dtype=torch.float64) * 3, torch.ones(1)]))
    return send, receive


def sent_mask(config: BoundaryConfig, batch, length, hidden_size, first_token) -> torch.Tensor:
    """Which entries travel, (B, T, H) bool, entry by entry."""
    kept = kept_indices(
        boundary_key(KEY, BOUNDARY), batch * length, hidden_size, config.num_kept(hidden_size), "cpu"
    ).tolist()
    mask = torch.zeros(batch, length, hidden_size, dtype=torch.bool)
    for sequence in range(batch):
        first = 0 if first_token is None else first_token[sequence].item()
        for position in range(length):
            if config.exact_first_token and position == first:
                mask[sequence, position] = True
            else:
                mask[sequence, position, kept[sequence * length + position]] = True
    return mask


def oracle(hidden, mask, fill, config: BoundaryConfig, dtype) -> torch.Tensor:
    on_wire = hidden.to(getattr(torch, config.wire_dtype)).to(dtype)
    return torch.where(mask, on_wire, fill.to(dtype))


def check_against_oracle(config, batch, length, hidden_size, dtype, first_token):
    send, receive = make_ends(config, hidden_size)
    hidden = torch.randn(batch, length, hidden_size, dtype=dtype, requires_grad=True)
    copy = hidden.detach().clone().requires_grad_()
    weight = torch.randn(batch, length, hidden_size, dtype=dtype)

    packed = send(hidden, KEY, first_token)
    packed.retain_grad()
    received = receive(packed, KEY, first_token, length, dtype)
    (received * weight).sum().backward()

    mask = sent_mask(config, batch, length, hidden_size, first_token)
    expected = oracle(copy, mask, receive.fill, config, dtype)
    (expected * weight).sum().backward()

    assert packed.dtype == packed.grad.dtype == getattr(torch, config.wire_dtype)
    assert packed.shape == send.packed_shape(batch, length, True) == receive.packed_shape(batch, length, True)
    assert packed[0].numel() == config.values_per_sequence(length, hidden_size)
    assert received.dtype == dtype
    assert torch.equal(received, expected)
    assert torch.equal(hidden.grad, copy.grad)
    assert not hidden.grad[~mask].any()


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 4),
    length=st.integers(1, 9),
    hidden_size=st.integers(1, 80),
    mask_ratio=st.sampled_from([0.001, 0.3, 0.5, 0.9, 0.95, 0.999]),
    wire_dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    exact=st.booleans(),
    predictor=st.sampled_from(["none", "mean"]),
    data=st.data(),
)
def test_equals_the_oracle(batch, length, hidden_size, mask_ratio, wire_dtype, dtype, exact, predictor, data):
    torch.manual_seed(0)
    config = BoundaryConfig(mask_ratio, 0, exact, predictor, wire_dtype)
    positions = st.none() | st.lists(st.integers(0, length - 1), min_size=batch, max_size=batch).map(torch.tensor)
    check_against_oracle(config, batch, length, hidden_size, dtype, data.draw(positions))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_equals_the_oracle_at_the_size_of_a_real_model(exact, wire_dtype):
    torch.manual_seed(0)
    config = BoundaryConfig(0.95, 0, exact, "mean", wire_dtype)
    check_against_oracle(config, 3, 16, 576, torch.float32, torch.tensor([0, 5, 15]))


def test_layout_with_an_exact_first_token():
    """The other tokens' kept values in order, then the exact token."""
    config = BoundaryConfig(mask_ratio=0.75, exact_first_token=True)
    hidden = torch.randn(2, 4, 8)
    packed = BoundarySend(config, BOUNDARY, 8)(hidden, KEY, torch.tensor([2, 0]))
    kept = kept_indices(boundary_key(KEY, BOUNDARY), 8, 8, 2, "cpu").view(2, 4, 2)
    values = hidden.gather(2, kept)
    assert torch.equal(packed[0], torch.cat([values[0, [0, 1, 3]].flatten(), hidden[0, 2]]))
    assert torch.equal(packed[1], torch.cat([values[1, 1:].flatten(), hidden[1, 0]]))


def test_packed_gradient_is_the_dense_gradient_on_the_sent_entries():
    config = BoundaryConfig(mask_ratio=0.9, exact_first_token=True, wire_dtype="bfloat16")
    send, receive = make_ends(config, 64)
    first_token = torch.tensor([1, 0, 3])
    packed = torch.randn(send.packed_shape(3, 5, True)).bfloat16().requires_grad_()
    gradient = torch.randn(3, 5, 64)
    receive(packed, KEY, first_token, 5, torch.float32).backward(gradient)
    assert torch.equal(packed.grad, send(gradient, KEY, first_token))


def test_no_gradient_reaches_the_fill():
    _, receive = make_ends(BoundaryConfig(mask_ratio=0.5, predictor="mean"), 8)
    receive.fill.requires_grad_()
    packed = torch.randn(receive.packed_shape(1, 3, True), requires_grad=True)
    receive(packed, KEY, None, 3, torch.float32).sum().backward()
    assert receive.fill.grad is None


@pytest.mark.parametrize("exact", [False, True])
def test_second_derivative(exact):
    send, receive = make_ends(BoundaryConfig(mask_ratio=0.5, exact_first_token=exact), 4)
    hidden = torch.randn(1, 2, 4, requires_grad=True)

    def loss(hidden):
        return (receive(send(hidden, KEY), KEY, None, 2, torch.float32) ** 3).sum()

    (first,) = torch.autograd.grad(loss(hidden), hidden, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), hidden)
    mask = sent_mask(send.config, 1, 2, 4, None)
    torch.testing.assert_close(second, torch.where(mask, 6 * hidden.detach(), torch.zeros(())))


@pytest.mark.parametrize("mask_ratio, training", [(0.95, False), (0.0, True), (0.0, False)])
def test_dense_when_evaluating_or_not_masked(mask_ratio, training):
    config = BoundaryConfig(mask_ratio, exact_first_token=True, predictor="mean", wire_dtype="bfloat16")
    send, receive = BoundarySend(config, 0, 32).train(training), BoundaryReceive(config, 0, 32).train(training)
    hidden = torch.randn(2, 3, 32, requires_grad=True)
    packed = send(hidden, KEY)
    assert packed.shape == (2, 3, 32) == send.packed_shape(2, 3, masked=training)
    assert packed.dtype == torch.bfloat16
    received = receive(packed, KEY, None, 3, torch.float32)
    assert torch.equal(received, hidden.bfloat16().float())
    received.sum().backward()
    assert torch.equal(hidden.grad, torch.ones_like(hidden))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("mask_ratio", [0.0, 0.5, 0.95])
def test_packed_shape_agrees_with_the_byte_count(mask_ratio, exact, masked):
    config = BoundaryConfig(mask_ratio, exact_first_token=exact)
    shape = packed_shape(config, 576, 4, 17, masked)
    assert shape[0] == 4
    assert torch.Size(shape).numel() == 4 * config.values_per_sequence(17, 576, masked)
    assert BoundarySend(config, 0, 576).packed_shape(4, 17, masked) == shape


def test_boundaries_and_microbatches_send_different_entries():
    config = BoundaryConfig(mask_ratio=0.9)
    hidden = torch.arange(576.0).expand(1, 4, 576)
    sends = [BoundarySend(config, boundary, 576) for boundary in range(2)]
    packed = [sends[0](hidden, KEY), sends[1](hidden, KEY), sends[0](hidden, microbatch_key(0, 1, 0, 2, 4))]
    assert not any(torch.equal(packed[i], packed[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    assert torch.equal(packed[0], sends[0](hidden, KEY))


def test_ends_in_different_modes_are_refused():
    send, receive = make_ends(BoundaryConfig(mask_ratio=0.9), 32)
    receive.eval()
    with pytest.raises(ValueError, match="boundary 1 received values of shape .* eval mode"):
        receive(send(torch.randn(2, 3, 32), KEY), KEY, None, 3, torch.float32)


class TestCalibration:
    config = BoundaryConfig(mask_ratio=0.5, predictor="mean")

    def test_mean_of_the_observed_tokens(self):
        receive = BoundaryReceive(self.config, 0, 6)
        assert torch.equal(receive.calibration_sums(), torch.zeros(7, dtype=torch.float64))
        batches = [torch.randn(2, 5, 6), torch.randn(3, 4, 6).bfloat16()]
        masks = [torch.rand(hidden.shape[:2]) > 0.4 for hidden in batches]
        for hidden, mask in zip(batches, masks):
            receive.observe(hidden.requires_grad_(), mask)
        tokens = torch.cat([hidden.detach()[mask].double() for hidden, mask in zip(batches, masks)])
        sums = receive.calibration_sums()
        assert sums.dtype == torch.float64 and not sums.requires_grad
        torch.testing.assert_close(sums, torch.cat([tokens.sum(0), torch.tensor([float(len(tokens))]).double()]))
        # Two replicas that saw the same add up to the same mean.
        receive.set_fill_from(2 * sums)
        assert receive.calibrated and receive.fill.dtype == torch.float32
        torch.testing.assert_close(receive.fill, tokens.mean(0).float())
        assert not receive.calibration_sums().any()

    def test_sums_stay_in_float64_when_the_module_is_cast(self):
        receive = BoundaryReceive(self.config, 0, 6)
        receive.observe(torch.randn(2, 5, 6), torch.ones(2, 5, dtype=torch.bool))
        sums = receive.calibration_sums()
        assert torch.equal(receive.bfloat16().calibration_sums(), sums)

    def test_masked_forward_before_calibration_is_refused(self):
        receive = BoundaryReceive(self.config, 3, 6)
        packed = torch.randn(receive.packed_shape(1, 2, True))
        with pytest.raises(RuntimeError, match="boundary 3 .* never calibrated"):
            receive(packed, KEY, None, 2, torch.float32)

    def test_no_token_is_refused(self):
        receive = BoundaryReceive(self.config, 0, 6)
        receive.observe(torch.randn(1, 2, 6), torch.zeros(1, 2, dtype=torch.bool))
        with pytest.raises(ValueError, match="no token"):
            receive.set_fill_from(receive.calibration_sums())

    def test_state_dict_keeps_the_calibration(self):
        _, receive = make_ends(self.config, 6)
        other = BoundaryReceive(self.config, 0, 6)
        other.load_state_dict(receive.state_dict())
        assert other.calibrated and torch.equal(other.fill, receive.fill)
