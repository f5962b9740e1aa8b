"""BoundarySend and BoundaryReceive against a dense masked tensor, forward and backward; coded ends: test_coder.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.boundary.fitting import BoundaryFit
from hf_meshadapt.boundary.module import BoundaryReceive, BoundarySend, wire_tensors
from hf_meshadapt.boundary.prf import boundary_key, kept_indices, microbatch_key
from hf_meshadapt.boundary.sequence_coder import FIRST, TOKEN
from hf_meshadapt.config import BoundaryConfig

KEY = microbatch_key(0, 1, 0, 2, 3)
BOUNDARY = 1
VOCAB, FEATURES = 11, 3


def masked(ratio: float, **fields) -> BoundaryConfig:
    return BoundaryConfig("random_mask", mask_ratio=ratio, **fields)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_ends(config: BoundaryConfig, hidden_size: int) -> tuple[BoundarySend, BoundaryReceive]:
    ends = BoundarySend(config, BOUNDARY, hidden_size), BoundaryReceive(config, BOUNDARY, hidden_size)
    if config.predictor != "none":
        num_features = 1 if config.predictor == "mean" else 2 * FEATURES + 1
        fit = BoundaryFit(torch.randn(num_features, hidden_size) * 3, None, None, 0.0)
        table = torch.randn(VOCAB, FEATURES, dtype=torch.bfloat16)
        for end in ends:
            end.set_fit(fit, table)
    return ends


def kinds(length: int, starts: list[list[int]] | None) -> torch.Tensor | None:
    """Rows whose sequences begin at `starts`."""
    if starts is None:
        return None
    kind = torch.full((len(starts), length), TOKEN, dtype=torch.int8)
    for row, positions in zip(kind, starts):
        row[positions] = FIRST
    return kind


def sent_mask(config: BoundaryConfig, batch, length, hidden_size, starts) -> torch.Tensor:
    """Which entries travel, (B, T, H) bool, entry by entry."""
    num_kept = config.num_kept(hidden_size)
    kept = kept_indices(boundary_key(KEY, BOUNDARY), batch * length, hidden_size, num_kept, "cpu").tolist()
    mask = torch.zeros(batch, length, hidden_size, dtype=torch.bool)
    for row in range(batch):
        left, exact = config.values_per_sequence(length, hidden_size), []
        if config.exact_first_token:
            # First tokens take at most half of the row's values, or one does; a row without any begins at 0.
            most = max(1, left // 2 // hidden_size)
            exact = sorted(starts[row] if starts else [])[:most] or [0]
        for position in exact:
            mask[row, position] = True
            left -= hidden_size
        for turn in range(num_kept):
            for position in range(length):
                if position not in exact and left > 0:
                    mask[row, position, kept[row * length + position][turn]] = True
                    left -= 1
        assert left == 0
    return mask


def oracle(hidden, mask, fill, config: BoundaryConfig, dtype) -> torch.Tensor:
    on_wire = hidden.to(getattr(torch, config.wire_dtype)).to(dtype)
    return torch.where(mask, on_wire, fill.to(dtype))


def check_against_oracle(config, batch, length, hidden_size, dtype, starts):
    send, receive = make_ends(config, hidden_size)
    hidden = torch.randn(batch, length, hidden_size, dtype=dtype, requires_grad=True)
    copy = hidden.detach().clone().requires_grad_()
    weight = torch.randn(batch, length, hidden_size, dtype=dtype)
    token_ids = torch.randint(VOCAB, (batch, length))
    kind = kinds(length, starts)

    (packed,) = send(hidden, KEY, token_ids, kind)
    packed.retain_grad()
    received = receive((packed,), KEY, token_ids, kind, length, dtype)
    (received * weight).sum().backward()

    mask = sent_mask(config, batch, length, hidden_size, starts)
    fill = torch.zeros(()) if config.predictor == "none" else receive.coder.predict(token_ids, kind)
    expected = oracle(copy, mask, fill, config, dtype)
    (expected * weight).sum().backward()

    assert packed.dtype == packed.grad.dtype == getattr(torch, config.wire_dtype)
    (on_wire,) = wire_tensors(config, hidden_size, batch, length, True, "meta")
    assert (packed.shape, packed.dtype) == (on_wire.shape, on_wire.dtype)
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
    predictor=st.sampled_from(["none", "mean", "token"]),
    data=st.data(),
)
def test_equals_the_oracle(batch, length, hidden_size, mask_ratio, wire_dtype, dtype, exact, predictor, data):
    torch.manual_seed(0)
    config = masked(mask_ratio, exact_first_token=exact, predictor=predictor, wire_dtype=wire_dtype)
    starts = st.lists(st.integers(0, length - 1), unique=True, max_size=4)  # none: it continues a sequence
    rows = st.none() | st.lists(starts, min_size=batch, max_size=batch)
    check_against_oracle(config, batch, length, hidden_size, dtype, data.draw(rows))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("starts", [[[0], [5], [15]], [[0, 6, 9], [], [3]]], ids=["one start", "packed"])
def test_equals_the_oracle_at_the_size_of_a_real_model(exact, wire_dtype, starts):
    torch.manual_seed(0)
    config = masked(0.95, exact_first_token=exact, predictor="mean", wire_dtype=wire_dtype)
    check_against_oracle(config, 3, 16, 576, torch.float32, starts)


def test_layout_with_an_exact_first_token():
    """The other tokens' kept values in order, then the exact token."""
    config = masked(0.75, exact_first_token=True)
    hidden = torch.randn(2, 4, 8)
    (packed,) = BoundarySend(config, BOUNDARY, 8)(hidden, KEY, None, kinds(4, [[2], [0]]))
    kept = kept_indices(boundary_key(KEY, BOUNDARY), 8, 8, 2, "cpu").view(2, 4, 2)
    values = hidden.gather(2, kept)
    assert torch.equal(packed[0], torch.cat([values[0, [0, 1, 3]].flatten(), hidden[0, 2]]))
    assert torch.equal(packed[1], torch.cat([values[1, 1:].flatten(), hidden[1, 0]]))


def test_all_first_tokens_of_a_packed_row_are_exact_as_long_as_they_take_half_of_the_values():
    config = masked(
        0.5, exact_first_token=True
    )  # 9 x 32 + 64 = 352 values in a row of ten: two and a half tokens' half
    send, receive = make_ends(config, 64)
    hidden, kind = torch.randn(3, 10, 64), kinds(10, [[0, 3, 7], [2, 5], [4]])
    (packed,) = send(hidden, KEY, None, kind)
    assert packed.shape == (3, 352)
    received = receive((packed,), KEY, None, kind, 10, torch.float32)
    exact = (received == hidden).all(dim=2)
    assert [row.nonzero().squeeze(1).tolist() for row in exact] == [[0, 3], [2, 5], [4]]
    # What a second whole token takes, the eight others lack alike: 4 of 32 values each.
    others = (received != 0).sum(2)[0][~exact[0]]
    assert others.tolist() == [28] * 8


def test_packed_gradient_is_the_dense_gradient_on_the_sent_entries():
    config = masked(0.9, exact_first_token=True, wire_dtype="bfloat16")
    send, receive = make_ends(config, 64)
    kind = kinds(5, [[1], [0, 2], []])
    (wire,) = wire_tensors(config, 64, 3, 5, True, "cpu")
    packed = torch.randn(wire.shape).bfloat16().requires_grad_()
    gradient = torch.randn(3, 5, 64)
    receive((packed,), KEY, None, kind, 5, torch.float32).backward(gradient)
    assert torch.equal(packed.grad, send(gradient, KEY, None, kind)[0])


@pytest.mark.parametrize("predictor", ["mean", "token"])
def test_no_gradient_reaches_the_fill(predictor):
    config = masked(0.5, predictor=predictor)
    _, receive = make_ends(config, 8)
    receive.coder.fit.weights.requires_grad_()
    (packed,) = wire_tensors(config, 8, 1, 3, True, "cpu")
    packed = torch.randn(packed.shape, requires_grad=True)
    receive((packed,), KEY, torch.tensor([[1, 2, 3]]), None, 3, torch.float32).sum().backward()
    assert receive.coder.fit.weights.grad is None
    assert torch.equal(packed.grad, torch.ones_like(packed))


@pytest.mark.parametrize("exact", [False, True])
def test_second_derivative(exact):
    send, receive = make_ends(masked(0.5, exact_first_token=exact), 4)
    hidden = torch.randn(1, 2, 4, requires_grad=True)

    def loss(hidden):
        return (receive(send(hidden, KEY), KEY, None, None, 2, torch.float32) ** 3).sum()

    (first,) = torch.autograd.grad(loss(hidden), hidden, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), hidden)
    mask = sent_mask(send.config, 1, 2, 4, None)
    torch.testing.assert_close(second, torch.where(mask, 6 * hidden.detach(), torch.zeros(())))


UNCODED = [
    (BoundaryConfig(wire_dtype="bfloat16"), True),
    (BoundaryConfig(wire_dtype="bfloat16"), False),
    (masked(0.95, exact_first_token=True, predictor="mean", wire_dtype="bfloat16"), False),
    (
        BoundaryConfig("transform", exact_first_token=True, predictor="token", wire_dtype="bfloat16", budget=0.05),
        False,
    ),
]


@pytest.mark.parametrize("config,training", UNCODED, ids=lambda value: getattr(value, "codec", str(value)))
def test_dense_when_evaluating_or_not_coded(config, training):
    """Without a calibration too: it comes from such passes."""
    send, receive = BoundarySend(config, 0, 32).train(training), BoundaryReceive(config, 0, 32).train(training)
    hidden = torch.randn(2, 3, 32, requires_grad=True)
    packed = send(hidden)
    assert [p.shape for p in packed] == [(2, 3, 32)]
    assert packed[0].dtype == torch.bfloat16
    received = receive(packed, 0, None, None, 3, torch.float32)
    assert torch.equal(received, hidden.bfloat16().float())
    received.sum().backward()
    assert torch.equal(hidden.grad, torch.ones_like(hidden))


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("codec", ["none", "random_mask", "transform"])
@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16"])
def test_wire_tensors_agree_with_the_byte_count(codec, exact, coded, wire_dtype):
    config = BoundaryConfig(codec, 0.9, exact_first_token=exact, wire_dtype=wire_dtype, budget=0.05)
    tensors = wire_tensors(config, 576, 4, 17, coded, "cpu")
    assert all(len(tensor) == 4 for tensor in tensors)
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if coded and codec == "transform":  # the carrier's gradient travels back
        assert sizes == [4 * config.sequence_bytes(17, 576, way) for way in ("forward", "backward")]
    else:
        dense_bytes = 4 * 17 * 576 * config.wire_bytes
        assert sizes == [4 * config.sequence_bytes(17, 576, "forward") if coded else dense_bytes]


def test_boundaries_and_microbatches_send_different_entries():
    config = masked(0.9)
    hidden = torch.arange(576.0).expand(1, 4, 576)
    sends = [BoundarySend(config, boundary, 576) for boundary in range(2)]
    packed = [sends[0](hidden, KEY)[0], sends[1](hidden, KEY)[0], sends[0](hidden, microbatch_key(0, 1, 0, 2, 4))[0]]
    assert not any(torch.equal(packed[i], packed[j]) for i, j in [(0, 1), (0, 2), (1, 2)])
    assert torch.equal(packed[0], sends[0](hidden, KEY)[0])


@pytest.mark.parametrize("codec", ["random_mask", "transform"])
@pytest.mark.parametrize("receiver_codes", [False, True])
def test_ends_in_different_modes_are_refused(codec, receiver_codes):
    config = BoundaryConfig(codec, mask_ratio=0.9, budget=0.05)
    receive = BoundaryReceive(config, 1, 32).train(receiver_codes)
    packed = wire_tensors(config, 32, 2, 3, not receiver_codes, "cpu")
    mode = "train" if receiver_codes else "eval"
    with pytest.raises(ValueError, match=f"boundary 1 received tensors of shapes .* {mode} mode for sequences of 3"):
        receive(packed, KEY, None, None, 3, torch.float32)


@pytest.mark.parametrize("codec,predictor", [("random_mask", "mean"), ("random_mask", "token"), ("transform", "mean")])
def test_coding_before_a_calibration_is_refused(codec, predictor):
    config = BoundaryConfig(codec, 0.5, predictor=predictor, budget=0.1)
    packed = wire_tensors(config, 6, 1, 20, True, "cpu")
    message = f"boundary 3 needs a calibration .*codec {codec}, predictor {predictor}.*run one, or load the state"
    with pytest.raises(RuntimeError, match=message):
        BoundaryReceive(config, 3, 6)(packed, KEY, None, None, 20, torch.float32)
    if config.straight_through:
        with pytest.raises(RuntimeError, match=message):
            BoundarySend(config, 3, 6)(torch.randn(1, 20, 6), KEY, None, None)
