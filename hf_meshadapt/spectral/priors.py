"""The priors of all parameters of one rank: one version at a time, taken in over several optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .config import SpectralConfig, prior_rank
from .factors import Factors, from_tensors, to_tensors
from .prior import AnchorPrior


@dataclass
class Arrival:
    """Anchor gradients that are being taken in: `updated` has those that are done."""

    gradients: Mapping[str, Factors | Tensor]
    version: int
    step: int
    updated: dict[str, AnchorPrior]
    num_slices_done: int = 0


class Priors:
    """Priors by parameter name, all of the same version.

    `receive` only keeps what arrived. Each `advance`, one per optimizer step, takes in a slice of it, and all priors
    change to the new version together with the last one. When that is depends on the arrival alone and not on the
    parameters, so that all stages and replicas, and the emulated mesh, change at the same step, those with no parameter
    that gets a prior too.

    Args:
        named_parameters: all that may get a prior; only names, shapes and devices are kept.
        config: of the correction.
        embeddings: see `config.kind_of`.

    Attributes:
        version: of what is held; None before the first.
        step: optimizer steps that had been taken when that version's weights were copied; None before the first.

    Raises:
        NotImplementedError: see `config.prior_rank`.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, Tensor]], config: SpectralConfig, embeddings: Collection[str] = ()
    ) -> None:
        self.config = config
        self.embeddings = frozenset(embeddings)
        self.held: dict[str, AnchorPrior] = {}
        self.version: int | None = None
        self.step: int | None = None
        self._devices: dict[str, torch.device] = {}
        self._arrival: Arrival | None = None
        for name, parameter in named_parameters:
            self.add(name, parameter)

    def add(self, name: str, parameter: Tensor) -> None:
        """Holds a prior for a parameter too, from the next version on."""
        shape = tuple(parameter.shape)
        rank = prior_rank(self.config, name, shape, self.embeddings)
        if rank is not None:
            self.finish()
            self.held[name] = AnchorPrior(name, shape, rank, self.config.beta)
            self._devices[name] = parameter.device

    def age_steps(self, now: int) -> int | None:
        """Age of what is held, after `now` optimizer steps; None before the first version."""
        return None if self.step is None else now - self.step

    def get(self, name: str) -> Factors | Tensor | None:
        """The mean of a parameter's anchor gradients; None where there is none."""
        prior = self.held.get(name)
        return None if prior is None else prior.mean

    # Taking in --------------------------------------------------------------------------------------------------------

    def receive(
        self,
        gradients: Mapping[str, Factors | Tensor],
        version: int,
        step: int,
        clip_coefficient: float = 1.0,
        checked: bool = False,
    ) -> None:
        """Begins to take in a version; an earlier one that is still being taken in is finished first.

        Args:
            gradients: of the mean-token loss, unclipped, for every parameter in `held`: factors of any rank or the
                gradient itself, any float dtype and device. For `control_variate` uncoded minus coded gradients.
            version: above that of every earlier call.
            step: optimizer steps that had been taken when the anchor's weights were copied.
            clip_coefficient: what clipping with the fast gradients' limit makes of these, by their norm over the whole
                model. Only where `SpectralConfig.adds_prior`; filters take nothing but directions and ratios.
            checked: `check` has passed these gradients, and nobody writes to them any more: they are not copied.

        Raises:
            ValueError: gradients of other parameters, of other shapes or not finite, or an old version. What is held
                stays as it is.
        """
        newest = self.version if self._arrival is None else self._arrival.version
        if newest is not None and version <= newest:
            raise ValueError(
                f"prior version {version} came after {newest}: number versions upwards, over restarts too"
            )
        if clip_coefficient != 1.0 and not self.config.adds_prior:
            raise ValueError(f"clip_coefficient={clip_coefficient} has no effect with rule={self.config.rule!r}")
        if not checked:
            self.check(gradients, version)
            gradients = {name: value.to(torch.float32, copy=True) for name, value in gradients.items()}
        self.finish()
        if clip_coefficient != 1.0:
            gradients = {
                name: value.float() * clip_coefficient if isinstance(value, Tensor)
                else value.to(torch.float32).scaled(clip_coefficient)
                for name, value in gradients.items()
            }  # fmt: skip
        self._arrival = Arrival(gradients, version, step, {})

    def check(self, gradients: Mapping[str, Factors | Tensor], version: int) -> None:
        """Raises ValueError for gradients that `receive` would not take, but for old versions."""
        if set(gradients) != set(self.held):
            missing, foreign = sorted(set(self.held) - set(gradients)), sorted(set(gradients) - set(self.held))
            raise ValueError(
                f"prior version {version} lacks {missing[:3]} and has foreign {foreign[:3]} ({len(missing)} and "
                f"{len(foreign)} in all): anchor and fast circuit must train the same parameters by the same rule"
            )
        for name, value in gradients.items():
            _check_form(self.held[name], value)
        pieces = [piece for value in gradients.values() for piece in ([value] if isinstance(value, Tensor) else value)]
        if not torch.nn.utils.get_total_norm(pieces, math.inf).isfinite():  # the largest entry: one call for all
            raise ValueError(f"prior version {version} is not finite: the anchor's pass overflowed, leave it out")

    def advance(self) -> None:
        """Takes in the next slice of what arrived, if anything did; call once per optimizer step."""
        arrival = self._arrival
        if arrival is None:
            return
        names = list(self.held)
        done, total = arrival.num_slices_done, self.config.refresh_steps
        for name in names[len(names) * done // total : len(names) * (done + 1) // total]:
            gradient = arrival.gradients[name].to(self._devices[name], torch.float32)
            arrival.updated[name] = self.held[name].update(gradient, arrival.version, arrival.step)
        arrival.num_slices_done += 1
        if arrival.num_slices_done == total:
            self.held, self._arrival = arrival.updated, None
            self.version, self.step = arrival.version, arrival.step

    @property
    def taking_in(self) -> bool:
        """A version is being taken in."""
        return self._arrival is not None

    def finish(self) -> None:
        """Takes in the rest of what arrived, at once."""
        while self._arrival is not None:
            self.advance()

    def update(self, gradients: Mapping[str, Factors | Tensor], version: int, step: int, **options) -> None:
        """`receive` and `finish`."""
        self.receive(gradients, version, step, **options)
        self.finish()

    # State ------------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict]:
        """Everything but the config: tensors for safetensors, and a dict for JSON.

        A version that is being taken in is saved as it arrived, with the number of slices done.
        """
        means = {name: prior.mean for name, prior in self.held.items() if prior.mean is not None}
        tensors = {f"held/{key}": tensor for key, tensor in to_tensors(means).items()}
        counts = {
            name: {"num_updates": prior.num_updates, "version": prior.version, "step": prior.step}
            for name, prior in self.held.items()
        }
        arrival, pending = self._arrival, None
        if arrival is not None:
            tensors |= {f"arriving/{key}": tensor for key, tensor in to_tensors(arrival.gradients).items()}
            pending = {"version": arrival.version, "step": arrival.step, "num_slices_done": arrival.num_slices_done}
        newest = {"version": self.version, "step": self.step}
        return tensors, {"held": counts, "newest": newest, "arriving": pending}

    def load_state(self, tensors: Mapping[str, Tensor], plain: Mapping) -> None:
        """Puts a saved state in place; entries of parameters that are not held here are left out.

        Raises:
            ValueError: a parameter has no saved prior, or one of another shape or rank.
        """
        missing = sorted(set(self.held) - set(plain["held"]))
        if missing:
            raise ValueError(
                f"no saved prior for {missing[:3]} ({len(missing)} in all): use the correction_rule it was saved with"
            )
        means, gradients = self._saved(tensors, "held/"), self._saved(tensors, "arriving/")
        held = {}
        for name, prior in self.held.items():
            held[name] = replace(prior, mean=means.get(name), **plain["held"][name])
            _check_saved(held[name])
        pending = plain["arriving"]
        if pending is not None and set(gradients) != set(held):
            raise ValueError("saved priors are incomplete: a version that was arriving lacks gradients")
        self.held, self._arrival = held, None
        newest = plain.get("newest") or _newest_of(plain["held"].values())
        self.version, self.step = newest["version"], newest["step"]
        if pending is not None:
            self._arrival = Arrival(gradients, pending["version"], pending["step"], {})
            for _ in range(pending["num_slices_done"]):
                self.advance()

    def _saved(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Factors | Tensor]:
        values = from_tensors(
            {k.removeprefix(prefix): tensor for k, tensor in tensors.items() if k.startswith(prefix)}
        )
        return {name: value.to(self._devices[name]) for name, value in values.items() if name in self.held}


def _check_form(prior: AnchorPrior, value: Factors | Tensor) -> None:
    """ValueError unless an arriving gradient has the parameter's shape, whole or in factors of one rank."""
    if isinstance(value, Tensor):
        found, wanted = [tuple(value.shape)], [prior.shape]
    elif not prior.rank:
        raise ValueError(f"prior of {prior.name} came as factors, but vectors are sent whole")
    else:
        rank, (rows, columns) = value.s.numel(), prior.shape
        found, wanted = [tuple(factor.shape) for factor in value], [(rows, rank), (rank,), (columns, rank)]
    if found != wanted:
        raise ValueError(
            f"prior of {prior.name} has shapes {found}, not {wanted}: do both sides train the same model?"
        )


def _newest_of(counts: Iterable[Mapping]) -> dict:
    """`newest` out of the parameters' own, for a state that lacks it."""
    found = [(one["version"], one["step"]) for one in counts if one["version"] is not None]
    return dict(zip(("version", "step"), max(found, default=(None, None))))


def _check_saved(prior: AnchorPrior) -> None:
    if (prior.mean is None) != (prior.num_updates == 0):
        raise ValueError(f"saved prior of {prior.name} is incomplete: {prior.num_updates} updates")
    if prior.mean is None:
        return
    rank = 0 if isinstance(prior.mean, Tensor) else len(prior.mean.s)
    if tuple(prior.mean.shape) != prior.shape or rank != prior.rank:
        raise ValueError(
            f"saved prior of {prior.name} has shape {tuple(prior.mean.shape)} and rank {rank}, not {prior.shape} and "
            f"{prior.rank}: resume with the prior_rank and correction_rule it was saved with"
        )
