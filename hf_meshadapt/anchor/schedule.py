"""When snapshots are taken and priors applied, how old they are, and what that costs: pure, the same on all ranks.

Steps count optimizer steps taken so far. A version is the step of the snapshot that a prior was computed from.

Free-running, each rank puts `held_versions` and `ready` into a message that the pipeline exchanges in every step anyway,
and all decide alike: `agree` which prior to apply, `snapshot_due` whether to take a snapshot. Deterministic, the step
alone decides, and the fast circuit waits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

NO_VERSION = -1
# In place of an interval that is not chosen yet: the snapshot before the first step is then the only one.
UNDECIDED = 2**62


def agree(held_versions: Sequence[Collection[int]], applied_version: int = NO_VERSION) -> int:
    """The newest version that all stages hold and have not applied, `NO_VERSION` where there is none.

    Not the least of the stages' newest: a stage that an anchor's end cut off may lack a version that others hold.

    Args:
        held_versions: of each stage, those of priors that have arrived; `NO_VERSION` entries are padding.
    """
    common = set.intersection(*map(set, held_versions)) if held_versions else set()
    return max((version for version in common if version > applied_version), default=NO_VERSION)


def tell(version: int, has_fits: bool) -> float:
    """A version as stages tell each other that they hold it: the half says that it brings fits too."""
    return version + 0.5 * has_fits


def agree_on_next(told: Sequence[Sequence[float]], applied_version: int = NO_VERSION) -> int:
    """As `agree`, but never past a version with fits: they are rare, while priors follow each other.

    Args:
        told: of each stage, what it holds as `tell` writes it.
    """
    held = [[math.floor(number) for number in numbers] for numbers in told]
    newest = agree(held, applied_version)
    common = set.intersection(*map(set, held)) if held else set()
    with_fits = {math.floor(number) for numbers in told for number in numbers if number % 1} & common
    return min((version for version in with_fits if version > applied_version), default=newest)


@dataclass(frozen=True)
class AnchorSchedule:
    """When things happen.

    Attributes:
        anchor_every: steps from one snapshot to the next, K.
        deterministic: a prior is applied exactly K steps after its snapshot, however long that takes.
        max_staleness_steps: an older prior is not used; None for no limit.

    Raises:
        ValueError: a value that cannot work.
    """

    anchor_every: int
    deterministic: bool = False
    max_staleness_steps: int | None = None

    def __post_init__(self):
        if self.anchor_every < 1:
            raise ValueError(f"anchor_every={self.anchor_every} must be at least 1")
        if self.max_staleness_steps is not None and self.max_staleness_steps < self.anchor_every:
            raise ValueError(
                f"max_staleness_steps={self.max_staleness_steps} must be at least anchor_every={self.anchor_every}: "
                "a younger prior cannot be had"
            )

    def snapshot_due(self, step: int, last_version: int, ready: Sequence[bool]) -> bool:
        """Whether to take a snapshot before step `step` + 1.

        Args:
            last_version: of the last snapshot, `NO_VERSION` before the first.
            ready: of each source, whether its link is up and has nothing on the way; no influence when deterministic.
        """
        if self.deterministic:
            return step % self.anchor_every == 0
        rested = last_version == NO_VERSION or step - last_version >= self.anchor_every
        return rested and all(ready)

    def due_version(self, step: int) -> int:
        """Deterministic: the version to apply from step `step` + 1 on, `NO_VERSION` where none begins there."""
        assert self.deterministic, "a free-running version is due when all stages hold it: agree"
        version = step - self.anchor_every
        return version if version >= 0 and version % self.anchor_every == 0 else NO_VERSION

    def is_live(self, step: int, version: int) -> bool:
        """Whether a prior may still be used in step `step` + 1."""
        if version == NO_VERSION:
            return False
        return self.max_staleness_steps is None or step - version <= self.max_staleness_steps


class AnchorHistory:
    """What has happened so far: the figures for logs, card and resume.

    Attributes:
        last_version: of the last snapshot.
        applied_version: of the prior in use.
        num_snapshots, num_applied: how many there were.
        num_steps, num_live_steps: steps, and those with a prior in use.
        age_sum_steps: of the priors in use, over all live steps.
    """

    FIELDS = (
        "last_version",
        "applied_version",
        "first_version",
        "num_snapshots",
        "num_applied",
        "num_steps",
        "num_live_steps",
        "age_sum_steps",
    )

    def __init__(self):
        self.last_version = self.applied_version = self.first_version = NO_VERSION
        self.num_snapshots = self.num_applied = 0
        self.num_steps = self.num_live_steps = self.age_sum_steps = 0

    def took_snapshot(self, step: int) -> None:
        assert step > self.last_version, f"snapshot of step {step} after that of {self.last_version}"
        if self.first_version == NO_VERSION:
            self.first_version = step
        self.last_version = step
        self.num_snapshots += 1

    def applied(self, version: int) -> None:
        assert version > self.applied_version, f"prior of step {version} after that of {self.applied_version}"
        self.applied_version = version
        self.num_applied += 1

    def stepped(self, step: int, live: bool) -> None:
        """Counts step `step` + 1, with or without a prior."""
        self.num_steps += 1
        if live:
            self.num_live_steps += 1
            self.age_sum_steps += self.age_steps(step)

    def age_steps(self, step: int) -> int:
        """Age of the prior in use."""
        assert self.applied_version != NO_VERSION, "no prior has been applied"
        return step - self.applied_version

    @property
    def mean_age_steps(self) -> float | None:
        return self.age_sum_steps / self.num_live_steps if self.num_live_steps else None

    @property
    def effective_anchor_every(self) -> float | None:
        """Steps between snapshots as they came: the greater of `anchor_every` and what a snapshot's transfer takes."""
        if self.num_snapshots < 2:
            return None
        return (self.last_version - self.first_version) / (self.num_snapshots - 1)

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.FIELDS}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name in self.FIELDS:
            setattr(self, name, int(state[name]))


@dataclass(frozen=True)
class AnchorTraffic:
    """What one round of the anchor sends.

    Attributes:
        snapshot_bytes: of each source, a difference to the anchor.
        prior_bytes: of each stage, from the anchor.
        fit_bytes: of each stage, what comes with a prior that calibrates its boundaries; () where none does.
        calibration_every: optimizer steps after which the next prior brings fits.
    """

    snapshot_bytes: tuple[int, ...]
    prior_bytes: tuple[int, ...]
    fit_bytes: tuple[int, ...] = ()
    calibration_every: int = 1

    def bytes_per_step(self, anchor_every: int, replicas: int = 1) -> float:
        """Of the anchor axis, both directions, spread over the steps of a round; first snapshots come on top.

        Args:
            replicas: that get every prior; the first passes it on to the others.
        """
        returned = (self.returned_per_step(stage, anchor_every) for stage in range(len(self.prior_bytes)))
        return sum(self.snapshot_bytes) / anchor_every + replicas * sum(returned)

    def returned_per_step(self, stage: int, anchor_every: int) -> float:
        """Bytes of a stage's priors and fits, spread over the steps of a round."""
        prior_bytes = self.prior_bytes[stage] / anchor_every
        if not self.fit_bytes:
            return prior_bytes
        # Fits come with a prior, so that their interval is a whole number of rounds.
        rounds = math.ceil(self.calibration_every / anchor_every)
        return prior_bytes + self.fit_bytes[stage] / (rounds * anchor_every)

    def round_seconds(self, link_bits_per_second: float) -> float:
        """What the slowest transfer takes, every source with a link of this rate in each direction."""
        return 8 * max((*self.snapshot_bytes, *self.prior_bytes), default=0) / link_bits_per_second


def interval_warning(
    traffic: AnchorTraffic,
    anchor_every: int,
    step_seconds: float,
    link_bits_per_second: float,
    pass_seconds: float = 0.0,
) -> str | None:
    """What to tell a user whose `anchor_every` is too small for the link or the anchor; None where all is well.

    Args:
        step_seconds: of one optimizer step of the fast circuit.
        link_bits_per_second: what the anchor link may use, its rate limit where it has one.
        pass_seconds: of the anchor's passes for one prior. They overlap with transfers, so the slower of the two counts.
    """
    transfer_seconds = traffic.round_seconds(link_bits_per_second)
    needed_seconds = max(transfer_seconds, pass_seconds)
    if needed_seconds <= anchor_every * step_seconds:
        return None
    needed_steps = math.ceil(needed_seconds / step_seconds)
    largest_bytes = max((*traffic.snapshot_bytes, *traffic.prior_bytes), default=0)
    if transfer_seconds >= pass_seconds:
        rate = f"{link_bits_per_second / 1e6:g} Mbit/s"
        cause = f"sending {largest_bytes / 1e6:.1f} MB at {rate} takes {transfer_seconds:.1f} s"
    else:
        cause = f"the anchor's passes take {pass_seconds:.1f} s"
    return (
        f"anchor_every={anchor_every} is too small for the link: {cause}, {anchor_every} steps of {step_seconds:.2f} s "
        f"take {anchor_every * step_seconds:.1f} s. Snapshots will be about {needed_steps} steps apart; set "
        f"anchor_every={needed_steps}, or send fewer bits per weight and factors of a lower rank"
    )
