"""The two in-graph ends of a boundary: the last module of one chunk and the first of the next.

Training mode masks, evaluation mode sends everything: `module.train()` and `module.eval()` choose, and both ends must
be in the same mode. The pipeline asks `packed_shape` how large its buffers are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_meshadapt.boundary.codecs import Codec, make_codec
from hf_meshadapt.boundary.prf import boundary_key
from hf_meshadapt.config import BoundaryConfig


def packed_shape(config: BoundaryConfig, hidden_size: int, batch: int, length: int, masked: bool) -> tuple[int, ...]:
    """Shape, in the wire dtype, of what one microbatch puts on the wire in each direction.

    (batch, values) when `masked` and the config masks, else (batch, length, hidden_size).
    """
    return make_codec(config, hidden_size, masked).packed_shape(batch, length)


class _BoundaryEnd(nn.Module):
    """What both ends share: codecs and keys. `boundary` b lies between chunk b and chunk b + 1."""

    def __init__(self, config: BoundaryConfig, boundary: int, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.boundary = boundary
        self.hidden_size = hidden_size
        self._codecs = {masked: make_codec(config, hidden_size, masked) for masked in (False, True)}

    @property
    def masked(self) -> bool:
        """Whether the next forward masks."""
        return self.training and self.config.masked

    @property
    def codec(self) -> Codec:
        """The codec of the next forward."""
        return self._codecs[self.masked]

    def packed_shape(self, batch: int, length: int, masked: bool) -> tuple[int, ...]:
        """As the function `packed_shape`, for this boundary."""
        return self._codecs[masked].packed_shape(batch, length)

    def extra_repr(self) -> str:
        return f"boundary={self.boundary}, hidden_size={self.hidden_size}, {self.config}"


class BoundarySend(_BoundaryEnd):
    """Packs a chunk's output for the wire."""

    def forward(self, hidden: Tensor, key: int, first_token: Tensor | None = None) -> Tensor:
        """Pack hidden (B, T, H), any float dtype.

        Args:
            hidden: the chunk's output.
            key: the microbatch's, from `prf.microbatch_key`.
            first_token: int64 (B,) position of each sequence's first real token (left padding moves it); None is 0.

        Returns:
            `packed_shape(B, T, masked)` in the wire dtype. Its gradient is in the wire dtype too, and hidden's
            gradient is zero on every entry that was not sent.
        """
        return self.codec.encode(hidden, boundary_key(key, self.boundary), first_token)


class BoundaryReceive(_BoundaryEnd):
    """Unpacks what the previous chunk sent; with `predictor="mean"` the channel means stand where nothing was sent.

    Buffers: `fill` (H,) float32, the channel means, and `calibrated` () bool.
    """

    def __init__(self, config: BoundaryConfig, boundary: int, hidden_size: int) -> None:
        super().__init__(config, boundary, hidden_size)
        self.register_buffer("fill", torch.zeros(hidden_size))
        self.register_buffer("calibrated", torch.tensor(False))
        # Not a buffer: `module.to(dtype)` would cast the float64 sums.
        self._sums: Tensor | None = None

    def forward(self, packed: Tensor, key: int, first_token: Tensor | None, length: int, dtype: torch.dtype) -> Tensor:
        """Unpack what `BoundarySend` of the same boundary made from the same key and first_token.

        Args:
            packed: `packed_shape(B, length, masked)`, wire dtype.
            key: the microbatch's, from `prf.microbatch_key`.
            first_token: as in `BoundarySend.forward`.
            length: padded tokens per sequence, T.
            dtype: of the result, the dtype in which this chunk computes.

        Returns:
            Hidden (B, T, H). The gradient of packed is hidden's on the sent entries, in the wire dtype.

        Raises:
            ValueError: packed does not have this mode's shape, as when the two ends differ in train/eval mode.
            RuntimeError: masked with predictor "mean" before any calibration.
        """
        self._check_shape(packed, length)
        fill = self._fill().to(packed.device, dtype).expand(packed.shape[0], length, self.hidden_size)
        return self.codec.decode(packed, boundary_key(key, self.boundary), first_token, fill)

    @torch.no_grad()
    def observe(self, hidden: Tensor, token_mask: Tensor) -> None:
        """Add an unmasked pass's tokens to the calibration.

        Args:
            hidden: (B, T, H), any float dtype, as received unmasked.
            token_mask: (B, T) bool, False for padding and for first tokens, whose massive activations would swamp
                the means.
        """
        tokens = hidden[token_mask]
        sums = tokens.sum(0, dtype=torch.float64)
        sums = torch.cat([sums, sums.new_tensor([tokens.shape[0]])])
        self._sums = sums if self._sums is None else self._sums + sums

    def calibration_sums(self) -> Tensor:
        """Channel sums and, last, the token count since the last `set_fill_from`: (H + 1,) float64.

        They add up: the caller may all-reduce them over the replicas before `set_fill_from`.
        """
        if self._sums is None:
            return torch.zeros(self.hidden_size + 1, dtype=torch.float64, device=self.fill.device)
        return self._sums.clone()

    def set_fill_from(self, sums: Tensor) -> None:
        """Make the fill from calibration sums (H + 1,) and start the next calibration from nothing.

        Raises:
            ValueError: the sums hold no token.
        """
        if not sums[-1] > 0:
            raise ValueError(f"boundary {self.boundary}: calibration saw no token, so there is no mean to fill with")
        self.fill.copy_(sums[:-1] / sums[-1])
        self.calibrated.fill_(True)
        self._sums = None

    def _check_shape(self, packed: Tensor, length: int) -> None:
        expected = self.codec.packed_shape(packed.shape[0], length)
        if packed.shape != expected:
            mode = "train" if self.training else "eval"
            raise ValueError(
                f"boundary {self.boundary} received values of shape {tuple(packed.shape)}, expected {expected} in "
                f"{mode} mode for sequences of {length} tokens: check that both ends are in the same mode, with the "
                "same config and padded length"
            )

    def _fill(self) -> Tensor:
        """What stands where nothing was sent: (H,), or () for zero."""
        if not (self.masked and self.config.predictor == "mean"):
            return self.fill.new_zeros(())
        if not self.calibrated:
            raise RuntimeError(
                f"boundary {self.boundary} fills with channel means but was never calibrated: run unmasked passes "
                "through observe() and set_fill_from(), or load a state dict saved after calibration"
            )
        return self.fill
