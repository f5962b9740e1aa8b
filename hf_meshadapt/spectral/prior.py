"""The running mean of one parameter's anchor gradients. Pure: an update returns a new prior."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .factors import Factors, compress, concatenate_and_recompress


@dataclass(frozen=True)
class AnchorPrior:
    """Bias-corrected exponential mean of anchor gradients, as factors or, for vectors, whole.

    After n gradients g_1..g_n: mean = sum_i (1 - beta) beta^(n-i) g_i / (1 - beta^n), cut to `rank` on every arrival.

    Attributes:
        name, shape: of the parameter.
        rank: of the factors; 0: the mean is held whole.
        beta: decay, in [0, 1).
        mean: float32; None before the first arrival.
        num_updates: n.
        version: of the newest gradient in the mean.
        step: optimizer steps that had been taken when the weights of that gradient were copied.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    beta: float
    mean: Factors | Tensor | None = None
    num_updates: int = 0
    version: int | None = None
    step: int | None = None

    def age_steps(self, now: int) -> int:
        """Optimizer steps taken since the weights that the newest gradient belongs to."""
        assert self.step is not None and now >= self.step, (self.name, now, self.step)
        return now - self.step

    def update(self, gradient: Factors | Tensor, version: int, step: int) -> AnchorPrior:
        """The prior with one more gradient in it: factors of any rank, or the gradient itself."""
        num_updates = self.num_updates + 1
        weight = (1 - self.beta) / (1 - self.beta**num_updates)
        mean = self._mixed(gradient, weight) if self.rank else self._lerped(gradient, weight)
        return replace(self, mean=mean, num_updates=num_updates, version=version, step=step)

    def _mixed(self, gradient: Factors | Tensor, weight: float) -> Factors:
        if isinstance(gradient, Tensor):
            gradient = compress(gradient, self.rank, self.name, warm_start=self.mean)
        if self.mean is None or weight == 1:
            return concatenate_and_recompress([(1.0, gradient)], self.rank, self.name, warm_start=gradient)
        parts = [(weight, gradient), (1 - weight, self.mean)]
        heavier = gradient if weight >= 0.5 else self.mean
        return concatenate_and_recompress(parts, self.rank, self.name, warm_start=heavier)

    def _lerped(self, gradient: Tensor, weight: float) -> Tensor:
        return gradient.float() if self.mean is None else self.mean.lerp(gradient.float(), weight)
