"""Chooses the codec of tokens by the configuration's name, for each direction."""

from __future__ import annotations

from ..config import BoundaryConfig, tile_size
from .projection import BottleneckCodec, SubspaceCodec
from .quantize import QuantizeCodec, TileQuantizeCodec
from .sequence_coder import TokenCodec
from .tah_quant import TahQuantCodec
from .topk import TopKCodec
from .transform import TransformCodec, TransformTables, product_dtype


def make_token_codec(
    config: BoundaryConfig, hidden_size: int, direction: str, tables: TransformTables | None
) -> TokenCodec:
    """Codec of activations or of gradients.

    Args:
        hidden_size: width of a token.
        direction: forward or backward.
        tables: this direction's transform; None where `config.fits_transforms` is not set.

    Raises:
        ValueError: the codec cannot code this hidden size.
    """
    codec, forward = config.codec, direction == "forward"
    if codec == "transform":
        return TransformCodec(tables, product_dtype(config.wire_dtype))
    if codec == "subspace":
        return SubspaceCodec(tables.synthesis)
    if codec == "bottleneck":
        return BottleneckCodec(hidden_size)
    if codec in ("topk", "topk_free_indices"):
        return TopKCodec(hidden_size)
    if codec == "quantize":
        return QuantizeCodec(hidden_size, config.bits, config.rotated)
    if codec == "aq_sgd":
        return QuantizeCodec(hidden_size, config.bits if forward else min(8, 2 * config.bits))
    assert codec == "tah_quant", codec
    if forward:
        return TahQuantCodec(hidden_size)
    return TileQuantizeCodec(hidden_size, tile_size(hidden_size, 32), bits=6)
