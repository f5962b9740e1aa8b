"""Work that a run hands to a process of its own: uploads and evaluations, which must not hold up or take down the run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

logger = logging.getLogger(__name__)

# What launchers set: with it a child would take itself for a rank and wait for the others.
LAUNCHER_NAMES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
}
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


class ChildFailed(RuntimeError):
    """A child process ended with an error; the message is what it said last."""


def child_environment(**changes: str | None) -> dict[str, str]:
    """This process's environment without the launcher's part, in which this package can be imported.

    Args:
        changes: variables to set; None leaves one as it is.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }
    package_parent = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package_parent, kept.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path} | {name: value for name, value in changes.items() if value is not None}


def run_child(arguments: list[str], timeout_seconds: float | None = None, **environment: str | None) -> str:
    """Runs `python -m hf_meshadapt ...` to its end and returns what it printed.

    Raises:
        ChildFailed: it failed, or ran longer than `timeout_seconds` and was ended.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hf_meshadapt", *arguments],
            env=child_environment(**environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildFailed(f"meshadapt {arguments[0]} took longer than {timeout_seconds:g} s and was ended") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        said = [line for line in said if line.startswith("error: ")] or said[-1:]
        raise ChildFailed(said[-1].removeprefix("error: ") if said else f"exit code {done.returncode}")
    return done.stdout


class BackgroundJobs:
    """Runs jobs one after the other in a thread; their failures are logged and never raised.

    The interpreter ends only when the thread has, so that no job is lost at the end of a script.
    """

    def __init__(self, name: str):
        self.name = name
        self._executor: ThreadPoolExecutor | None = None  # a thread only where there is something to do
        self._pending: list[Future] = []

    @property
    def busy(self) -> bool:
        return any(not future.done() for future in self._pending)

    def submit(self, job: Callable[[], object], on_failure: Callable[[Exception], str]) -> Future:
        """Queues a job; its future gives the job's result, or None when it failed.

        Args:
            on_failure: turns the job's exception into what is logged.
        """

        def run():
            try:
                return job()
            except Exception as error:  # whatever it is, the run that handed the job over goes on
                logger.error(on_failure(error))
                return None

        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=self.name)
        self._pending = [future for future in self._pending if not future.done()]
        self._pending.append(self._executor.submit(run))
        return self._pending[-1]

    def wait(self, timeout_seconds: float | None) -> bool:
        """Waits for all jobs; False when the time was over before."""
        return not wait(self._pending, timeout_seconds).not_done
