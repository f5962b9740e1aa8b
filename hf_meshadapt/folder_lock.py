"""One run at a time writes checkpoints into a folder: two would delete each other's half-written ones.

The operating system holds the lock for a process and lets go of it when that ends, however it ends: a file that a killed
run left says who had it and locks nothing. Where a filesystem has no locks, nobody is kept out.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # not on Windows
    fcntl = None

LOCK_NAME = ".meshadapt-lock"
PATIENCE_SECONDS = 1.0  # for others who only look whether somebody holds it
RETRY_SECONDS = 0.05


class FolderLock:
    """The folders that this process keeps for its own run; used with `with`, at whose end others are let in.

    What a process holds is never refused to itself, nor to a second one of these.
    """

    def __init__(self):
        self._held: dict[Path, int] = {}

    def hold(self, folder: Path) -> None:
        """Keeps other runs out of an existing folder until the end.

        Raises:
            ValueError: another run holds it.
        """
        folder = folder.resolve()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while folder not in self._held:
            try:
                descriptor = _locked(folder / LOCK_NAME)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(_refusal(folder)) from None
                time.sleep(RETRY_SECONDS)
                continue
            if descriptor is None:
                return
            self._held[folder] = descriptor
            with contextlib.suppress(OSError):  # it only says who holds it
                _write_owner(descriptor)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_) -> None:
        for folder, descriptor in self._held.items():
            with contextlib.suppress(OSError):  # somebody has deleted the folder
                (folder / LOCK_NAME).unlink()
            os.close(descriptor)
        self._held.clear()

    def refuse_held(self, folder: Path) -> None:
        """Raises ValueError where another run holds the folder."""
        # In this order: a process that opens and closes a file which it has locked lets go of it.
        if folder.resolve() not in self._held and is_held(folder):
            raise ValueError(_refusal(folder))


def is_held(folder: Path) -> bool:
    """Whether some other process holds a folder now."""
    path = folder / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, AttributeError):
        return False
    finally:
        os.close(descriptor)
    return False


def _locked(path: Path) -> int | None:
    """A descriptor by which this process alone holds the file; None where there are no locks, or no writing.

    Raises:
        BlockingIOError: another process holds it, or has just let go of it.
    """
    if fcntl is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        raise FileNotFoundError  # another run has removed it between the two, and a third has made a new one
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, (BlockingIOError, FileNotFoundError)):
            raise BlockingIOError(f"another run holds {path}, or has just let go of it") from error
        return None


def _write_owner(descriptor: int) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    os.truncate(descriptor, 0)
    os.write(descriptor, json.dumps(owner).encode())


def _refusal(folder: Path) -> str:
    try:
        owner = json.loads((folder / LOCK_NAME).read_text())
        who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "which does not say who it is"
    return (
        f"output_dir={folder}: another run saves its checkpoints there ({who}), and each would delete the other's. Give "
        "this run an output_dir of its own, or end that one first"
    )
