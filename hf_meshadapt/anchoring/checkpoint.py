"""Anchor state in a checkpoint, by parameter name, so that another mesh shape can resume with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from ..checkpoint_folder import MESH_STATE, read_json
from ..checkpoint_state import save_pair
from ..spectral.factors import from_tensors, to_tensors
from . import fits as boundary_fits
from .prior import Prior


@dataclass(frozen=True)
class AnchorState:
    """What one stage keeps, or what several stages' files hold of one stage's parameters.

    Attributes:
        spectral: as `SpectralCorrection.spectral_state` returns it.
        pending: priors that had come and were not in use yet, by version.
        reference: version and values of the weights that the anchor holds, by name; None: it would begin anew.
        plain: further values for JSON, equal on all stages.
    """

    spectral: tuple[dict[str, Tensor], dict]
    pending: dict[int, Prior]
    reference: tuple[int, dict[str, Tensor]] | None
    plain: dict


def save_anchor_files(folder: Path, stage: int, state: AnchorState) -> list[Path]:
    """Writes one stage's state; returns the files written."""
    spectral, spectral_plain = state.spectral
    tensors = {f"spectral/{key}": tensor for key, tensor in spectral.items()}
    pending = []
    for version, prior in state.pending.items():
        tensors |= {f"pending-{version}/{key}": tensor for key, tensor in to_tensors(prior.values).items()}
        fits = {f"fits-{version}/{key}": tensor for key, tensor in boundary_fits.to_tensors(prior.fits).items()}
        tensors |= fits
        pending.append({"version": version, "gradient_norm": prior.gradient_norm, "num_batches": prior.num_batches})
    version = None
    if state.reference is not None:
        version, values = state.reference
        tensors |= {f"reference/{key}": tensor for key, tensor in to_tensors(values).items()}
    plain = {"spectral": spectral_plain, "pending": pending, "reference_version": version, "run": state.plain}
    return save_pair(folder / MESH_STATE / f"anchor-stage-{stage:05d}", tensors, plain)


def load_anchor_files(folder: Path, names: set[str], boundaries: list[int]) -> AnchorState | None:
    """State of the named parameters out of whatever stages' files there are; None where there are none.

    Args:
        boundaries: receiving chunks of those whose fits are wanted.

    What some of them lack of a pending prior or of the reference (on another machine) is left out as a whole.
    """
    paths = sorted((folder / MESH_STATE).glob("anchor-stage-*.json"))
    if not paths:
        return None
    files = [read_json(path) for path in paths]
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path.with_suffix(".safetensors"), framework="pt") as stored:
            keys = stored.keys()
            wanted = [key for key in keys if key.startswith("fits-") or key.split("/")[-2] in names]
            tensors.update((key, stored.get_tensor(key)) for key in wanted)
    plain = files[0]["spectral"]
    held = {name: counts for file in files for name, counts in file["spectral"]["priors"]["held"].items()}
    spectral = plain | {"priors": plain["priors"] | {"held": held}}
    pending = {entry["version"]: _pending_prior(entry, tensors, boundaries) for entry in files[0]["pending"]}
    reference, version = from_tensors(_under("reference/", tensors)), files[0]["reference_version"]
    return AnchorState(
        spectral=(_under("spectral/", tensors), spectral),
        pending=pending,
        reference=(version, reference) if version is not None and set(reference) == names else None,
        plain=files[0]["run"],
    )


def _pending_prior(entry: dict, tensors: dict[str, Tensor], boundaries: list[int]) -> Prior:
    version = entry["version"]
    fits, _ = boundary_fits.from_tensors(_under(f"fits-{version}/", tensors))
    values = from_tensors(_under(f"pending-{version}/", tensors))
    return Prior(**entry, values=values, fits={chunk: fit for chunk, fit in fits.items() if chunk in boundaries})


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
