"""What a trial's runs say of a mesh: gap closed, planned step times, and which run to rent it for. Pure functions."""

from __future__ import annotations

from dataclasses import asdict, dataclass

# Held-out losses that differ by less than this share of what dense training gains are taken for equal.
TIE_SHARE = 0.02
# Of all recipes, so that what they send compares.
WIRE_DTYPE = "bfloat16"
# Dense training must lower the held-out loss by this share of it, else there is nothing to compare with.
LEAST_GAIN_SHARE = 0.005


@dataclass(frozen=True)
class Recipe:
    """One run of a trial.

    Attributes:
        preset: as in `MeshAdaptArguments`.
        boundary_budget: of the preset `anchored`, None for the others.
    """

    preset: str
    boundary_budget: float | None = None

    @property
    def name(self) -> str:
        return self.preset if self.boundary_budget is None else f"{self.preset} {self.boundary_budget:g}"

    def options(self) -> str:
        """The recipe as options of a training script."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return " ".join(f"--{name} {value}" for name, value in given.items())


@dataclass(frozen=True)
class RunFigures:
    """What a run has measured, and what was planned for it.

    Attributes:
        held_out: (step, uncoded held-out loss), the first at step 0.
        training: (step, training loss), coded where the recipe codes.
        step_seconds: mean of an optimizer step here, all stages and replicas in sequence.
        bytes_per_token: planned, by axis, and `calibration`, which is what fitting the boundaries sends.
        link_bytes: planned payload that leaves the busiest rank in a step, and its share of the calibrations.
    """

    recipe: Recipe
    held_out: tuple[tuple[int, float], ...]
    training: tuple[tuple[int, float], ...]
    step_seconds: float
    bytes_per_token: dict[str, float]
    link_bytes: float

    @property
    def num_steps(self) -> int:
        return self.held_out[-1][0]

    @property
    def gradient_share(self) -> float:
        """Share of the bytes that are gradients of weights, which boundaries do not code."""
        gradients = sum(self.bytes_per_token.get(axis, 0.0) for axis in ("tied", "data_parallel"))
        return gradients / sum(self.bytes_per_token.values())

    @property
    def loss(self) -> float:
        """Held out, after the last step."""
        return self.held_out[-1][1]


@dataclass(frozen=True)
class RentedMesh:
    """What a step's time on the mesh to rent depends on, beside the run.

    Attributes:
        bits_per_second: of every rank's uplink.
        speedup: how many times faster a rented device is than this one.
    """

    stages: int
    replicas: int
    microbatches: int
    bits_per_second: float
    speedup: float = 1.0

    def compute_seconds(self, run: RunFigures) -> float:
        """A rank's passes in a step, with the pipeline's idle time.

        A pipeline of K stages is idle for K - 1 of K - 1 + microbatches parts of a step (GPipe, arXiv 1811.06965,
        section 2.3).
        """
        bubble = (self.microbatches + self.stages - 1) / self.microbatches
        return run.step_seconds / (self.stages * self.replicas) * bubble / self.speedup

    def link_seconds(self, run: RunFigures) -> float:
        return 8 * run.link_bytes / self.bits_per_second

    def step_seconds(self, run: RunFigures) -> float:
        """Passes and then bytes, nothing overlapped and no latency."""
        return self.compute_seconds(run) + self.link_seconds(run)


def gap_closed(loss_before: float, dense_loss: float, loss: float) -> float | None:
    """Share of dense training's gain that a run has; None where dense training gained nothing."""
    return (loss_before - loss) / (loss_before - dense_loss) if dense_loss < loss_before else None


def loss_at(curve: tuple[tuple[int, float], ...], step: float) -> float:
    """A curve's value at a step, between two of its points on the straight line, past the last one its own."""
    for (left, before), (right, after) in zip(curve, curve[1:]):
        if step <= right:
            return before + (after - before) * (step - left) / (right - left)
    return curve[-1][1]


def losses_in_equal_time(runs: list[RunFigures], mesh: RentedMesh) -> dict[str, float]:
    """Held-out loss, by the recipe's name, that each run has when the quickest of them has ended on the mesh."""
    deadline = min(mesh.step_seconds(run) * run.num_steps for run in runs)
    return {run.recipe.name: loss_at(run.held_out, deadline / mesh.step_seconds(run)) for run in runs}


@dataclass(frozen=True)
class Recommendation:
    """`recipe` is None where the trial cannot tell."""

    recipe: Recipe | None
    reason: str


def recommend(runs: list[RunFigures], mesh: RentedMesh) -> Recommendation:
    """The run with the lowest held-out loss in equal time; dense where no other is lower by more than a tie.

    Args:
        runs: of the same number of steps; the first of them is dense.
    """
    dense = runs[0]
    before, after = dense.held_out[0][1], dense.loss
    if before - after < LEAST_GAIN_SHARE * before:
        return Recommendation(
            None,
            f"dense training took the held-out loss from {before:.4g} to {after:.4g} in {dense.num_steps} steps, too "
            "little to compare with. Raise --steps, --minutes or --learning-rate",
        )
    losses = losses_in_equal_time(runs, mesh)
    best = min(runs, key=lambda run: losses[run.recipe.name])
    margin, rate = TIE_SHARE * (before - after), f"{mesh.bits_per_second / 1e6:g} Mbit/s"
    if losses[dense.recipe.name] - losses[best.recipe.name] <= margin:
        return Recommendation(
            dense.recipe,
            f"dense is better at {rate}: in the same time no coded run has a held-out loss lower than its "
            f"{losses[dense.recipe.name]:.4g} by more than {margin:.2g}",
        )
    return Recommendation(
        best.recipe,
        f"{best.recipe.name} is better at {rate}: in the same time it has a held-out loss of "
        f"{losses[best.recipe.name]:.4g} and dense training {losses[dense.recipe.name]:.4g}",
    )
