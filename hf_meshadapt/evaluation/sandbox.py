"""Runs a Python program that nobody has read, in a process with limits.

The limits stop accidents (endless loops, all memory, full disks, fork bombs), not an attacker: use a container or a
machine that may be harmed. The process has no environment, an empty folder of its own, and where the kernel allows it no
network.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

MEMORY_BYTES = 2 * 1024**3
FILE_BYTES = 1024**2
NUM_FILES = 32
SECONDS = 10.0
REACHED_END = 42  # an exit code that no program ends with by calling exit()
CLONE_NEWUSER_AND_NEWNET = 0x10000000 | 0x40000000


def passes(program: str, timeout_seconds: float = SECONDS) -> bool:
    """Whether the program reaches its end in time, within the limits and without an error or an exit of its own."""
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(timeout_seconds)],
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(program.encode(), timeout_seconds)
            return process.returncode == REACHED_END
        except subprocess.TimeoutExpired:
            return False
        finally:
            end_group(process)


def limit_this_process(seconds: float) -> None:
    """Takes memory, time, files and if possible the network from the process that calls it."""
    cpu_seconds = max(1, int(seconds) + 1)
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, NUM_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    try:
        import ctypes

        ctypes.CDLL(None).unshare(CLONE_NEWUSER_AND_NEWNET)
    except (OSError, AttributeError):
        pass  # not Linux
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))  # no children; root is exempt from this one


def end_group(process: subprocess.Popen) -> None:
    """Ends the process and whatever it has started in its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    # Limits are set here rather than between fork and exec, where a parent with threads may be stuck for ever.
    source = sys.stdin.read()
    limit_this_process(float(sys.argv[1]))
    exec(compile(source, "program", "exec"), {"__name__": "__main__"})
    sys.exit(REACHED_END)
