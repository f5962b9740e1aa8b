"""Fits of boundaries on their way from the anchor: their form, their size, and which stage needs which. Pure.

A fit is `BoundaryFit.state`, named tensors; fits are known by the chunk that receives over the boundary. Both ends of a
boundary get the same tensors, since what they exchange is decoded only by who holds the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..boundary.transform import product_dtype
from ..config import BoundaryConfig

PREFIX = "fit"
Fit = dict[str, Tensor]
TRANSFORMS = ("forward", "backward")


def boundaries_of(stage: int, num_stages: int, num_chunks: int) -> list[int]:
    """Receiving chunks of the boundaries that end at a stage, on either side of it."""
    return [chunk for chunk in range(1, num_chunks) if stage in (chunk % num_stages, (chunk - 1) % num_stages)]


def to_wire(fit: Fit, boundary: BoundaryConfig) -> Fit:
    """A fit as it travels: large matrices in the dtype in which products with them are computed anyway."""
    dtype = product_dtype(boundary.wire_dtype)
    return {name: (t.to(dtype) if t.ndim == 2 and len(t) > 2 else t.float()).cpu() for name, t in fit.items()}


def fit_bytes(boundary: BoundaryConfig, hidden_size: int, num_features: int) -> int:
    """Bytes of one fit on the wire; at most, where a transform has as many components as the hidden state channels."""
    size = product_dtype(boundary.wire_dtype).itemsize
    total = (size if num_features > 2 else 4) * num_features * hidden_size
    if boundary.fits_transforms:
        total += 2 * (2 * size * hidden_size**2 + 4 * hidden_size)
    if boundary.predictor == "token":
        total += 4 * 2 * num_features
    return total


def to_tensors(fits: dict[int, Fit]) -> dict[str, Tensor]:
    """`fit/chunk/name` to tensor."""
    return {f"{PREFIX}/{chunk}/{name}": tensor for chunk, fit in fits.items() for name, tensor in fit.items()}


def from_tensors(tensors: dict[str, Tensor]) -> tuple[dict[int, Fit], dict[str, Tensor]]:
    """Undoes `to_tensors`; returns fits, and the tensors that are none's.

    Raises:
        ValueError: a name that is none of `to_tensors`.
    """
    fits: dict[int, Fit] = {}
    others = {}
    for key, tensor in tensors.items():
        prefix, _, rest = key.partition("/")
        chunk, _, name = rest.partition("/")
        if prefix != PREFIX:
            others[key] = tensor
        elif not chunk.isdecimal() or not name:
            raise ValueError(f"{key!r} names no part of a boundary's fit")
        else:
            fits.setdefault(int(chunk), {})[name] = tensor
    return fits, others


def check_fits(
    fits: dict[int, Fit], boundaries: list[int], boundary: BoundaryConfig, hidden_size: int, num_features: int
) -> None:
    """Raises ValueError unless these are whole and finite fits of all these boundaries, or none at all."""
    if fits and sorted(fits) != boundaries:
        raise ValueError(f"there are fits of the boundaries before chunks {sorted(fits)}, not {boundaries}: {REMEDY}")
    for chunk, fit in fits.items():
        shapes = {name: tuple(tensor.shape) for name, tensor in fit.items()}
        wanted = _shapes(fit, boundary, hidden_size, num_features)
        if shapes != wanted:
            wrong = sorted(n for n in shapes.keys() | wanted.keys() if shapes.get(n) != wanted.get(n))[0]
            raise ValueError(
                f"the fit of the boundary before chunk {chunk} has {wrong} of shape {shapes.get(wrong)}, not "
                f"{wanted.get(wrong)}: {REMEDY}"
            )
        if not all(t.is_floating_point() and bool(t.isfinite().all()) for t in fit.values()):
            raise ValueError(f"the fit of the boundary before chunk {chunk} is not finite: leave it out")


REMEDY = "give both circuits the same model and the same arguments of the boundaries"


def _shapes(fit: Fit, boundary: BoundaryConfig, hidden_size: int, num_features: int) -> dict[str, tuple[int, ...]]:
    shapes = {"weights": (num_features, hidden_size), "explained": (), "sensitivity": (2,)}
    if "felt" in fit:  # not where nothing was felt
        shapes["felt"] = (2, num_features)
    for name in TRANSFORMS if boundary.fits_transforms else ():
        # Directions that were never seen are left out, so that their number is the fit's own.
        found = fit.get(f"{name}/variances", torch.empty(0)).numel()
        count = min(max(1, found), hidden_size)
        shapes |= {f"{name}/analysis": (count, hidden_size), f"{name}/synthesis": (hidden_size, count)}
        shapes[f"{name}/variances"] = (count,)
    return shapes
