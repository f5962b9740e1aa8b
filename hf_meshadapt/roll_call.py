"""Whether all ranks have come to a call that needs all of them, told by torch's key-value store.

No process group is used: ranks that are elsewhere may be in a collective of their own there, which a message of ours would
be taken for.
"""

from __future__ import annotations

import atexit
import contextlib
import time

import torch.distributed as dist

from .pipeline.torch_internals import default_store

PREFIX = "hf_meshadapt/roll_call"
PAUSE_SECONDS = 0.01  # between two looks; it doubles
LONGEST_PAUSE_SECONDS = 0.25
# Rank 0 stays so long at most for the others to see that all have come: a rank that dies in between never says so.
STAY_SECONDS = 5.0


def missing_ranks(call: str, rank: int, num_ranks: int, timeout_seconds: float) -> dict[int, bool]:
    """Ranks that have not come to `call`, and whether each has ended; empty once all have come.

    Waits for them until the deadline, or until one of them has ended. Rank 0, whose end may take the store away, comes back
    when the others have seen that all have come: a script may end with this call.

    Args:
        call: names this call, on all ranks alike and no other.

    Raises:
        DistStoreError, DistNetworkError: the store is gone, with the process that keeps it.
    """
    store, deadline, pause = default_store(), time.monotonic() + timeout_seconds, PAUSE_SECONDS
    keys = [f"{PREFIX}/{call}/{peer}" for peer in range(num_ranks)]
    store.set(keys[rank], "here")
    while not store.check(keys):  # not its `wait`, which writes a line to stderr whenever it ends in vain
        missing = {peer: store.check([_ended(peer)]) for peer in range(num_ranks) if not store.check([keys[peer]])}
        if any(missing.values()) or (missing and time.monotonic() > deadline):
            return missing
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    seen = f"{PREFIX}/{call}/seen"
    store.add(seen, 1)
    if rank == 0:
        leaves = time.monotonic() + STAY_SECONDS
        while store.add(seen, 0) < num_ranks and time.monotonic() < leaves:
            time.sleep(PAUSE_SECONDS)
    return {}


def leave_world_at_exit(rank: int) -> None:
    """Takes all groups down before the interpreter goes: gloo's threads would otherwise outlive it and abort it.

    Before that it lets the others' roll calls know that this rank has ended.
    """

    def leave() -> None:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the store may be gone already
                tell_the_end(rank)
            dist.destroy_process_group()

    atexit.register(leave)


def tell_the_end(rank: int) -> None:
    default_store().set(_ended(rank), "ended")


def _ended(rank: int) -> str:
    return f"{PREFIX}/ended/{rank}"
