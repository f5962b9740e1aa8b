"""What every codec of tokens must pass, and tokens to try it on."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from hf_meshadapt.boundary.sequence_coder import FIRST, PADDING, TARGET, TOKEN

# Odd, prime, powers of two, and those of real models' kinds: 9 x 64, 3 x 256.
SIZES = (2, 3, 7, 8, 24, 32, 64, 97, 192, 576)
TILED_SIZES = (8, 24, 32, 64, 96, 192, 576)


def round_trip(codec, tokens: torch.Tensor, bytes_per_token: int) -> torch.Tensor:
    """Codes and decodes: right shapes and types, the same bytes again, tokens independent of each other."""
    packed = codec.encode(tokens, bytes_per_token)
    assert packed.dtype == torch.uint8 and packed.shape == (len(tokens), bytes_per_token)
    assert torch.equal(codec.encode(tokens.clone(), bytes_per_token), packed)
    decoded = codec.decode(packed)
    assert decoded.dtype == torch.float32 and decoded.shape == tokens.shape
    # As it lies in a sequence's buffer: one row, at an odd place.
    wire = torch.cat([packed.new_zeros(1), packed[-1]])[1:].view(1, bytes_per_token)
    torch.testing.assert_close(codec.decode(wire), decoded[-1:], rtol=1e-5, atol=1e-6 * float(decoded.abs().max()))
    return decoded


def kinds(longest: int) -> st.SearchStrategy[list[list[int]]]:
    """What every position is: up to three rows of one length, in any order that kinds can have."""
    return st.integers(1, longest).flatmap(
        lambda length: st.lists(
            st.lists(st.sampled_from([PADDING, TOKEN, FIRST, TARGET]), min_size=length, max_size=length),
            min_size=1,
            max_size=3,
        )
    )


@st.composite
def tokens(draw, sizes=SIZES) -> torch.Tensor:
    """(N, H) float32: Gaussian, with outliers, constant, or with zeros; of any magnitude that a model has."""
    num_tokens, hidden_size = draw(st.integers(1, 4)), draw(st.sampled_from(sizes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    made = torch.randn(num_tokens, hidden_size, generator=generator)
    kind = draw(
        st.sampled_from(("gaussian", "outlier", "two outliers", "constant", "sparse", "zero token", "shifted"))
    )
    if kind == "outlier":
        made[:, hidden_size // 2] *= 1000
    elif kind == "two outliers":
        made[:, 0], made[:, hidden_size - 1] = 300.0, -200.0
    elif kind == "constant":
        made[:] = made[:, :1]
    elif kind == "sparse":
        made *= torch.rand(made.shape, generator=generator) < 0.2
    elif kind == "zero token":
        made[0] = 0.0
    elif kind == "shifted":
        made += 20.0
    return made * 10.0 ** draw(st.integers(-10, 4))
