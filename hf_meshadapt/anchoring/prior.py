"""One version of a stage's prior on its way: from the link's message, and to the other replicas as one vector."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..anchor.messages import Message
from ..spectral.factors import Factors, from_tensors
from ..spectral.prior import AnchorPrior
from . import fits as boundary_fits
from .fits import Fit

WIRE_DTYPE = torch.bfloat16
Values = dict[str, Factors | Tensor]


@dataclass(frozen=True)
class Prior:
    """One stage's gradients of one snapshot.

    Attributes:
        version: optimizer steps that had been taken at the snapshot.
        gradient_norm: of the whole model's gradient, before it was compressed.
        num_batches: of the anchor's data, taken so far.
        values: by parameter name, as `Priors.receive` takes them.
        fits: of the stage's boundaries, by receiving chunk; empty where none came with this version.
    """

    version: int
    gradient_norm: float
    num_batches: int
    values: Values
    fits: dict[int, Fit] = field(default_factory=dict)


def read_prior(message: Message, held: Mapping[str, AnchorPrior]) -> Prior:
    """The prior that a message brings.

    Args:
        held: priors of this stage's parameters, whose form the message must have.

    Raises:
        ValueError: it has no norm, or tensors of other names, shapes or dtypes. Fits are for the caller to check.
    """
    norm = message.fields.get("gradient_norm")
    if not isinstance(norm, float) or not math.isfinite(norm):
        raise ValueError(f"gradient_norm={norm!r} of the prior of step {message.fields['version']} is no number")
    fits, tensors = boundary_fits.from_tensors(message.tensors)
    shapes = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    wanted = {key: (shape, WIRE_DTYPE) for key, shape in wire_shapes(held).items()}
    if shapes != wanted:
        wrong = sorted(key for key in shapes.keys() | wanted.keys() if shapes.get(key) != wanted.get(key))
        raise ValueError(
            f"the prior of step {message.fields['version']} differs in {len(wrong)} tensors from what this stage expects, "
            f"for example {wrong[0]}: {shapes.get(wrong[0])} for {wanted.get(wrong[0])}. Give both circuits the same "
            "model, correction_rule and prior_rank"
        )
    return Prior(message.fields["version"], norm, message.fields["num_batches"], from_tensors(tensors), fits)


def wire_shapes(held: Mapping[str, AnchorPrior]) -> dict[str, tuple[int, ...]]:
    """Shapes of a prior's tensors in order, under the names of `factors.to_tensors`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, prior in held.items():
        if prior.rank:
            rows, columns = prior.shape
            shapes |= {f"{name}/u": (rows, prior.rank), f"{name}/s": (prior.rank,), f"{name}/v": (columns, prior.rank)}
        else:
            shapes[f"{name}/whole"] = prior.shape
    return shapes


HEADER_ITEMS = 3  # float64: version, gradient_norm, num_batches


def payload_bytes(held: Mapping[str, AnchorPrior]) -> int:
    """Bytes of `pack` for a prior without fits."""
    return 8 * HEADER_ITEMS + WIRE_DTYPE.itemsize * sum(map(math.prod, wire_shapes(held).values()))


def pack(prior: Prior | None, held: Mapping[str, AnchorPrior]) -> Tensor:
    """A prior, or the word that there is none, as one uint8 vector of `payload_bytes`; fits, if any, follow."""
    payload = torch.zeros(payload_bytes(held), dtype=torch.uint8)
    header, values = _parts(payload)
    if prior is None:
        header[0] = -1
        return payload
    header.copy_(torch.tensor([prior.version, prior.gradient_norm, prior.num_batches], dtype=torch.float64))
    pieces = [piece for name in held for piece in _pieces(prior.values[name])]
    if pieces:
        torch.cat([piece.flatten() for piece in pieces], out=values)
    if prior.fits:
        fits = save({name: tensor.contiguous() for name, tensor in boundary_fits.to_tensors(prior.fits).items()})
        payload = torch.cat([payload, torch.frombuffer(bytearray(fits), dtype=torch.uint8)])
    return payload


def unpack(payload: Tensor, held: Mapping[str, AnchorPrior]) -> Prior | None:
    """Undoes `pack`."""
    payload, rest = payload.split([payload_bytes(held), len(payload) - payload_bytes(held)])
    header, values = _parts(payload)
    version, norm, num_batches = header.tolist()
    if version < 0:
        return None
    shapes = wire_shapes(held)
    pieces = values.split([math.prod(shape) for shape in shapes.values()])
    tensors = {key: piece.view(shape) for (key, shape), piece in zip(shapes.items(), pieces)}
    fits = boundary_fits.from_tensors(load(rest.numpy().tobytes()))[0] if len(rest) else {}
    return Prior(int(version), norm, int(num_batches), from_tensors(tensors), fits)


def _parts(payload: Tensor) -> tuple[Tensor, Tensor]:
    return payload[: 8 * HEADER_ITEMS].view(torch.float64), payload[8 * HEADER_ITEMS :].view(WIRE_DTYPE)


def _pieces(value: Factors | Tensor) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)
