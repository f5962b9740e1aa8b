"""How the coded tokens of a sequence share a fixed number of bytes: against a token-by-token reading of the rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.boundary.sequence_coder import FIRST, PADDING, TOKEN, SequenceCoder, divide_bytes
from hf_meshadapt.boundary.transform import DISTORTION, GAIN_BYTES, TransformCodec, allocate_bits, fit_tables
from tests.token_codecs import kinds
from tests.unit.test_transform import random_covariance

HIDDEN = 6
WHOLE_BYTES = 2 * HIDDEN


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class FirstEntries:
    """Sends a token's first entries, whole numbers below 256, one byte each."""

    def encode(self, tokens: torch.Tensor, bytes_per_token: int) -> torch.Tensor:
        assert bytes_per_token > 0 and len(tokens) > 0 and tokens.dtype == torch.float32
        values = torch.nn.functional.pad(tokens, (0, max(0, bytes_per_token - HIDDEN)))
        return values[:, :bytes_per_token].to(torch.uint8)

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        assert packed.dtype == torch.uint8
        return torch.nn.functional.pad(packed[:, :HIDDEN], (0, max(0, HIDDEN - packed.shape[1]))).float()


def make(num_bytes: int, exact_first: bool = True, codec=None, **options) -> SequenceCoder:
    return SequenceCoder(codec or FirstEntries(), HIDDEN, lambda length: num_bytes, exact_first, **options)


def tokens_of(kind: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and base whose difference a byte holds."""
    base = torch.randint(-50, 50, (*kind.shape, HIDDEN)).float()
    return base + torch.randint(256, base.shape), base


def expected(hidden, base, kind, num_bytes: int, exact_first: bool) -> torch.Tensor:
    """One sequence, (T, H): first tokens whole while they take half of the bytes (one takes all, if it fits), the rest
    shared equally by the other real tokens."""
    firsts = [t for t, k in enumerate(kind.tolist()) if k == FIRST] if exact_first else []
    firsts = firsts[: max(1, num_bytes // 2 // WHOLE_BYTES)]
    if len(firsts) * WHOLE_BYTES > num_bytes:
        firsts = []
    others = [t for t, k in enumerate(kind.tolist()) if k != PADDING and t not in firsts]
    share = (num_bytes - len(firsts) * WHOLE_BYTES) // len(others) if others else 0
    decoded = base.clone()
    decoded[firsts] = hidden[firsts].bfloat16().float()
    decoded[others, :share] = hidden[others, :share]
    return decoded


@settings(max_examples=300, deadline=None)
@given(kinds(8), st.integers(1, 60).map(lambda pairs: 2 * pairs), st.booleans())
def test_equals_the_token_by_token_oracle(rows, num_bytes, exact_first):
    torch.manual_seed(0)
    kind = torch.tensor(rows, dtype=torch.int8)
    hidden, base = tokens_of(kind)
    packed = make(num_bytes, exact_first).encode(hidden, base, kind)
    assert packed.shape == (len(kind), num_bytes) and packed.dtype == torch.uint8
    # The other end has a coder of its own and knows base and kind only.
    decoded = make(num_bytes, exact_first).decode(packed, base, kind)
    rows = [expected(*row, num_bytes, exact_first) for row in zip(hidden, base, kind)]
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, torch.stack(rows))


def test_padding_costs_nothing_and_does_not_show():
    kind = torch.tensor([[PADDING, PADDING, FIRST, TOKEN, TOKEN, PADDING]])
    hidden, base = tokens_of(kind)
    other = hidden.clone()
    other[kind == PADDING] = 1e30
    coder = make(WHOLE_BYTES + 2 * HIDDEN)
    packed = coder.encode(hidden, base, kind)
    assert torch.equal(packed, coder.encode(other, base, kind))
    # Two tokens share what five would have had to share: all their entries fit.
    decoded = coder.decode(packed, base, kind)
    assert torch.equal(decoded[kind != PADDING], hidden[kind != PADDING])
    assert torch.equal(decoded[kind == PADDING], base[kind == PADDING])


def test_all_first_tokens_of_a_packed_row_are_exact_as_long_as_they_take_half_of_the_bytes():
    kind = torch.tensor([[FIRST, TOKEN, FIRST, TOKEN, TOKEN, FIRST, TOKEN, TOKEN]])
    base = torch.zeros(1, 8, HIDDEN)
    hidden = torch.randn(1, 8, HIDDEN).abs() * 100
    for num_bytes, exact in ((6 * WHOLE_BYTES, [0, 2, 5]), (4 * WHOLE_BYTES, [0, 2]), (WHOLE_BYTES, [0])):
        coder = make(num_bytes)
        decoded = coder.decode(coder.encode(hidden, base, kind), base, kind)
        whole = (decoded == hidden.bfloat16().float()).all(dim=2)[0]
        assert whole.nonzero().squeeze(1).tolist() == exact


def test_first_tokens_are_like_others_where_none_is_exact():
    kind = torch.tensor([[FIRST, TOKEN]])
    hidden, base = tokens_of(kind)
    coder = make(2 * HIDDEN, exact_first=False)
    assert torch.equal(coder.decode(coder.encode(hidden, base, kind), base, kind), hidden)


@pytest.mark.parametrize("num_bytes", [2, WHOLE_BYTES - 2])
def test_what_does_not_fit_is_left_to_the_base(num_bytes):
    kind = torch.tensor([[FIRST] + [TOKEN] * 20])
    hidden, base = tokens_of(kind)
    coder = make(num_bytes)
    packed = coder.encode(hidden, base, kind)
    assert packed.shape == (1, num_bytes)
    assert torch.equal(coder.decode(packed, base, kind), base)


def test_rows_without_any_token():
    kind = torch.full((2, 3), PADDING)
    hidden, base = tokens_of(kind)
    packed = make(20).encode(hidden, base, kind)
    assert not packed.any()
    assert torch.equal(make(20).decode(packed, base, kind), base)


# With the transform codec --------------------------------------------------------------------------------------------


def transform() -> TransformCodec:
    return TransformCodec(fit_tables(random_covariance(HIDDEN), None, HIDDEN))


@settings(max_examples=200, deadline=None)
@given(kinds(8), st.integers(1, 40).map(lambda pairs: 2 * pairs), st.booleans())
def test_both_ends_agree_whatever_the_transform_codec_has_room_for(rows, num_bytes, exact_first):
    torch.manual_seed(0)
    codec = transform()
    kind = torch.tensor(rows, dtype=torch.int8)
    hidden, base = torch.randn(*kind.shape, HIDDEN), torch.randn(*kind.shape, HIDDEN)
    packed = make(num_bytes, exact_first, codec).encode(hidden, base, kind)
    decoded = make(num_bytes, exact_first, codec).decode(packed, base, kind)
    assert bool(decoded.isfinite().all())
    assert torch.equal(decoded[kind == PADDING], base[kind == PADDING])
    with_room = make(1000, exact_first, codec)
    close = with_room.decode(with_room.encode(hidden, base, kind), base, kind)
    assert bool(((close - hidden)[kind != PADDING].abs() < 0.1).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 150), st.integers(0, 6), st.integers(0, 6), st.floats(0.1, 10), st.floats(0.1, 10))
def test_bytes_go_where_the_loss_feels_least_error(total, num_context, num_targets, context, target):
    """Never worse than any other division, by the codec's own law; as many bytes as there are at most."""
    torch.manual_seed(0)
    codec = transform()

    def error(bytes_per_token: int) -> float:
        bits = allocate_bits(codec.variances, max(0, bytes_per_token - GAIN_BYTES) * 8)
        return sum(float(v) * DISTORTION[b] for v, b in zip(codec.variances, bits))

    def felt(context_bytes: int, target_bytes: int) -> float:
        return num_context * context * error(context_bytes) + num_targets * target * error(target_bytes)

    chosen = divide_bytes(codec, total, (num_context, num_targets), (context, target))
    assert num_context * chosen[0] + num_targets * chosen[1] <= total
    for context_bytes in range(total // num_context + 1 if num_context else 1):
        rest = total - num_context * context_bytes
        target_bytes = rest // num_targets if num_targets else 0
        assert felt(*chosen) <= felt(context_bytes, target_bytes) * (1 + 1e-9) + 1e-12
