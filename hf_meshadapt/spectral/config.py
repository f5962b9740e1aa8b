"""Frozen configuration of the spectral correction, and which parameters it holds priors for. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, fields

FILTER_RULES = ("diagonal", "two_sided", "left", "right")
# These put the prior itself into the update, so that its scale must be that of the clipped gradients.
ADDING_RULES = ("blend", "anchor_only")
RULES = (*FILTER_RULES, "blend", "control_variate", "anchor_only", "none")

# Rules that read a field, where not all but `none` do.
READERS = {
    "rule": RULES,
    "alpha": FILTER_RULES,
    "tau": FILTER_RULES,
    "tau_relative": FILTER_RULES,
    "blend_weight": ("blend",),
    "ramp_steps": (*FILTER_RULES, "blend", "control_variate"),
}
# Modules in a ModuleList carry a number: what stands under one belongs to a block.
IN_BLOCK = re.compile(r"(^|\.)\d+\.")


@dataclass(frozen=True)
class SpectralConfig:
    """How anchor priors correct the fast gradients. docs/spectral.md has the formulas.

    Attributes:
        rule: one of `RULES`.
        alpha: filters: share of the gradient that stays as it is, in [0, 1]; 1 is the inner optimizer.
        tau: filters: singular value at which the filter passes half, above 0.
        tau_relative: filters: `tau` is in units of the prior's largest singular value.
        matrix_rank: rank of the factors of every prior, capped by the matrix.
        ema_beta: decay of the mean over anchor gradients, in [0, 1). None: 0.5, and 0 for `anchor_only`, the newest.
        max_staleness: age in steps from which on a prior is not used. Its weight falls from half of it on.
        ramp_steps: steps with a prior over which its weight rises to 1; 0: at once.
        refresh_steps: optimizer steps over which taking in a version is spread; it comes into use after them.
        blend_weight: blend: share of the prior in the mix, in [0, 1].

    Raises:
        ValueError: a value out of range, or a field set that the rule does not read.
    """

    rule: str = "diagonal"
    alpha: float = 0.3
    tau: float = 0.1
    tau_relative: bool = True
    matrix_rank: int = 64
    ema_beta: float | None = None
    max_staleness: int = 50
    ramp_steps: int = 0
    refresh_steps: int = 4
    blend_weight: float = 0.5

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r} must be one of {', '.join(RULES)}")
        for name, low in (("matrix_rank", 1), ("max_staleness", 1), ("ramp_steps", 0), ("refresh_steps", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {low}")
        for name in ("alpha", "blend_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must lie in [0, 1]")
        if not 0 < self.tau < math.inf:
            raise ValueError(f"tau={self.tau!r} must be above 0: with 0 every direction passes. Use a small number")
        if self.ema_beta is not None and not 0 <= self.ema_beta < 1:
            raise ValueError(f"ema_beta={self.ema_beta!r} must lie in [0, 1); 0 keeps the newest anchor gradient only")
        self._refuse_fields_without_effect()

    def _refuse_fields_without_effect(self) -> None:
        for field in fields(self):
            readers = READERS.get(field.name, RULES[:-1])
            if self.rule not in readers and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"{field.name}={getattr(self, field.name)!r} has no effect with rule={self.rule!r}: leave it at "
                    f"{field.default!r} or choose a rule among {', '.join(readers)}"
                )

    @property
    def filters(self) -> bool:
        """The rule reweights the gradient and adds nothing of its own."""
        return self.rule in FILTER_RULES

    @property
    def adds_prior(self) -> bool:
        """The prior itself enters the update, of all parameters: anchor gradients must be clipped as fast ones are."""
        return self.rule in ADDING_RULES

    @property
    def corrects(self) -> bool:
        """Whether a prior would change anything."""
        return not (
            self.rule == "none"
            or (self.filters and self.alpha == 1)
            or (self.rule == "blend" and self.blend_weight == 0)
        )

    @property
    def beta(self) -> float:
        if self.ema_beta is not None:
            return self.ema_beta
        return 0.0 if self.rule == "anchor_only" else 0.5


def kind_of(name: str, shape: tuple[int, ...], embeddings: Collection[str] = ()) -> str:
    """What a parameter is to the correction.

    Args:
        name: as in `named_parameters()` of the model.
        embeddings: names of tables inside numbered modules, which their names do not give away.

    Returns:
        matrix: a 2-D weight of a block. embedding: any other 2-D weight, heads too. vector: norms and biases.
        stack: more dimensions, such as fused experts.
    """
    if len(shape) < 2:
        return "vector"
    if len(shape) > 2:
        return "stack"
    return "matrix" if IN_BLOCK.search(name) and name not in embeddings else "embedding"


def prior_rank(
    config: SpectralConfig, name: str, shape: tuple[int, ...], embeddings: Collection[str] = ()
) -> int | None:
    """Rank of a parameter's prior; 0: held whole; None: it has no prior and stays uncorrected.

    Raises:
        NotImplementedError: `blend` or `anchor_only` with a parameter of more than two dimensions.
    """
    kind = kind_of(name, shape, embeddings)
    if kind == "stack" and config.adds_prior:
        raise NotImplementedError(
            f"rule={config.rule!r} with {name} of shape {shape}: parameters of more than two dimensions have no "
            "prior. Use a filter such as rule='diagonal', which leaves them as they are"
        )
    if config.rule == "none" or (kind != "matrix" and not config.adds_prior):
        return None
    return 0 if kind == "vector" else min(config.matrix_rank, *shape)


def prior_values(config: SpectralConfig, name: str, shape: tuple[int, ...], embeddings: Collection[str] = ()) -> int:
    """Numbers that one version of a parameter's prior is made of: r (m + n + 1) as factors."""
    rank = prior_rank(config, name, shape, embeddings)
    if rank is None:
        return 0
    return rank * (sum(shape) + 1) if rank else math.prod(shape)
