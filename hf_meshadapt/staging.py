"""What rank 0 does beside a run with a saved checkpoint: how long the others let it, and files that stay meanwhile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

STAGED_PREFIX = ".staged-"
# Of the deadline of the other ranks' waits: so long rank 0 may be busy while they wait for it. An evaluation and an upload
# can come one after the other, so that it must be well under a half.
SHARE_OF_DEADLINE = 0.25


def allowed_seconds(args) -> float | None:
    """How long rank 0 may wait for something of its own; None in a run of one process, where nobody waits for it.

    Args:
        args: `MeshAdaptArguments`.
    """
    return None if args.launched_ranks == 1 else SHARE_OF_DEADLINE * args.link_timeout_seconds


def stage(folder: Path, purpose: str) -> Path:
    """A second name for a checkpoint's files, which outlives the checkpoint: hard links, or copies where there are none.

    Args:
        purpose: tells two users of one checkpoint apart.

    Returns:
        A hidden folder beside it, for the caller to remove.
    """
    staged = folder.with_name(f"{STAGED_PREFIX}{purpose}-{folder.name}")
    shutil.rmtree(staged, ignore_errors=True)

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    return Path(shutil.copytree(folder, staged, copy_function=link))


def clear_staged(parent: Path, purpose: str) -> None:
    """Removes what a run that was killed left."""
    for left in parent.glob(f"{STAGED_PREFIX}{purpose}-*"):
        shutil.rmtree(left)
