"""How often an anchor may take a snapshot, by what that costs beside the pipeline: pure, the same on all ranks."""

from __future__ import annotations

import math

from .schedule import AnchorTraffic

# Of what the pipeline would send uncoded, what an anchor may take unless its user says otherwise.
ANCHOR_BUDGET = 0.25
# An interval that is chosen is at least so long, and so long where there is no pipeline to compare with.
LEAST_CHOSEN = 10


def longest_interval(max_staleness_steps: int, refresh_steps: int) -> int:
    """The largest `anchor_every` at which every prior that comes on time weighs something to its last step.

    That step is the one before the next prior is in use, 2 `anchor_every` + `refresh_steps` - 2 steps after the snapshot.

    Args:
        max_staleness_steps: age in steps from which on a prior is not used.
        refresh_steps: over which a prior is taken in.
    """
    return (max_staleness_steps - refresh_steps + 1) // 2


def choose_interval(traffic: AnchorTraffic, dense_bytes: float, budget: float, longest: int, replicas: int = 1) -> int:
    """The least `anchor_every` from `LEAST_CHOSEN` on that keeps the budget; `longest` where none up to it does.

    Args:
        dense_bytes: of the pipeline's axis in a step, if nothing were coded; 0 where there is no pipeline: `LEAST_CHOSEN`.
        budget: share of `dense_bytes` that the anchor's axis may take.
        longest: as `longest_interval` gives it; `LEAST_CHOSEN` where it is below that.
        replicas: of the mesh.
    """
    if not dense_bytes:
        return LEAST_CHOSEN
    allowed = range(LEAST_CHOSEN, max(LEAST_CHOSEN, longest) + 1)
    kept = (every for every in allowed if traffic.bytes_per_step(every, replicas) <= budget * dense_bytes)
    return next(kept, allowed[-1])


def bytes_warning(
    anchor_bytes: float,
    dense_bytes: float,
    anchor_every: int,
    budget: float = ANCHOR_BUDGET,
    max_staleness_steps: int | None = None,
) -> str | None:
    """What to tell a user whose anchor costs more than its share of the pipeline; None where all is well.

    Args:
        anchor_bytes: of the anchor's axis in an optimizer step, on average.
        dense_bytes: of the pipeline's axis, if nothing were coded; 0 where there is no pipeline to compare with.
        budget: the share.
        max_staleness_steps: what bounds `anchor_every` where it was chosen; None where it was given.
    """
    share = anchor_bytes / dense_bytes if dense_bytes else 0.0
    if share <= budget:
        return None
    remedy = f"Set anchor_every to {math.ceil(anchor_every * share / budget)}"
    if max_staleness_steps is not None:
        remedy = (
            f"anchor_every={anchor_every} was chosen and is bounded by max_staleness_steps={max_staleness_steps}. Give "
            "anchor_every or a larger anchor_budget if the links bear it"
        )
    return (
        f"the anchor takes {anchor_bytes / 1e6:.3g} MB per step, {share:.0%} of what the pipeline would send uncoded "
        f"({dense_bytes / 1e6:.3g} MB): more than {budget:.0%}. {remedy}, make batches larger or accumulate more of them, "
        "or send fewer bits (anchor_snapshot_bits=4) and factors of a lower prior_rank"
    )


def unused_warning(num_steps: int, anchor_every: int, refresh_steps: int) -> str | None:
    """What to tell a user whose run ends before its first prior is in use; None where all is well.

    Args:
        num_steps: of the run. A prior that comes as late as in a deterministic run is first in use in step
            `anchor_every` + `refresh_steps`.
    """
    first = anchor_every + refresh_steps
    if num_steps >= first:
        return None
    return (
        f"no prior will correct a step of this run: the first is in use in step {first} (anchor_every={anchor_every}), and "
        f"the run has {num_steps} steps. Set anchor_every to {max(1, num_steps // 4)}, or train longer"
    )
