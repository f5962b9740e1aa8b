"""Waits between ranks: each has a deadline, and the error of one that fails names who waited for whom, where and when."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from .devices import like_this_thread

CONNECT_RETRY_SECONDS = 0.2
# Waits that have a deadline of their own should end first: they say more.
GRACE_SECONDS = 3.0

Result = TypeVar("Result")


class LinkError(RuntimeError):
    """A wait for another rank failed or passed its deadline; says who waited for whom, where and when."""


def lost_link(error: BaseException | None) -> BaseException | None:
    """The communication failure that an error is or stems from; None for an error of the computation itself.

    gloo raises plain RuntimeErrors, which only the source file that they quote tells from others, and torch's pipeline
    stages wrap what a backward pass raised, DDP's all-reduce included.
    """
    while error is not None:
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            return error
        error = error.__cause__
    return None


def reason(error: BaseException) -> str:
    """What happened, without gloo's source file and advice."""
    text = re.sub(r"\[\S*/gloo/\S*\] ", "", str(error))
    return re.sub(r" This is typically caused by[^\n]*", "", text).strip().rstrip(".?")


class Waiter:
    """Waits for communication with a deadline and adds up the time spent.

    Args:
        describe: names a stage, as `rank 3 (stage 1 of replica 1)`.
        timeout_seconds: deadline of one wait.
        on_wait: is told the seconds of every wait.

    Attributes:
        step: optimizer steps taken so far, None before training.
    """

    def __init__(self, describe: Callable[[int], str], timeout_seconds: float, on_wait: Callable[[float], None]):
        self.describe = describe
        self.timeout_seconds = timeout_seconds
        self.on_wait = on_wait
        self.step: int | None = None

    def wait(self, works: list[dist.Work], stage: int, peer: int, awaited: str) -> None:
        """Waits for `awaited` (`the activation of microbatch 0 from`), a transfer of stage `stage` (ours) and `peer`."""
        started = time.monotonic()
        try:
            for work in works:
                if not work.wait(timedelta(seconds=self.timeout_seconds)):
                    raise RuntimeError("timed out")
        except RuntimeError as error:
            raise self.failure(self.describe(stage), f"{awaited} {self.describe(peer)}", error) from error
        self.on_wait(time.monotonic() - started)

    @contextmanager
    def naming(self, who: str, awaited: str) -> Iterator[None]:
        """Within it, a lost link becomes a `LinkError` of this name; whatever else is raised passes."""
        try:
            yield
        except LinkError:
            raise
        except RuntimeError as error:
            lost = lost_link(error)
            if lost is None:
                raise
            raise self.failure(who, awaited, lost) from error

    def failure(self, who: str, awaited: str, error: BaseException) -> LinkError:
        """The error of a wait that failed."""
        return LinkError(
            f"{who} waited for {awaited} {self._when} (deadline {self.timeout_seconds:g} s): {reason(error)}. Check that "
            "the peer still runs and that its link is up; training resumes from the last checkpoint"
        )

    def absence(self, call: str, who: str, absent: str) -> LinkError:
        """The error of a call that all ranks must make and not all have made."""
        return LinkError(
            f"{call} is collective in a mesh, where each rank holds a part of the model. {who} called it {self._when}; not "
            f"called in time (deadline {self.timeout_seconds:g} s) by {absent}. Call it on every rank, not under `if "
            "trainer.is_world_process_zero()` or the like: rank 0 alone writes what is written once"
        )

    @property
    def _when(self) -> str:
        return "at start-up" if self.step is None else f"at step {self.step}"


def within(timeout_seconds: float, function: Callable[[], Result]) -> Result:
    """Runs what uses torch's key-value store, whose client waits for ever when the store's host hangs.

    Raises:
        DistStoreError: it took longer; the thread that runs it is left behind.
    """
    outcome: Future[Result] = Future()
    function = like_this_thread(function)

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # a daemon does not keep the process from ending
    wait([outcome], timeout_seconds + GRACE_SECONDS)
    if not outcome.done():
        raise dist.DistStoreError(f"the store of rank 0 or the launcher did not answer for {timeout_seconds:g} s")
    return outcome.result()


def join_world(backend: str | None, timeout_seconds: float) -> None:
    """Forms the process group of all ranks that the launcher started, where that has not been done yet.

    Args:
        backend: any but gloo is left to TrainingArguments, which gives it its deadline.

    Raises:
        LinkError: a rank did not come in time; says which address was tried and how many ranks were awaited.
        ValueError: the launcher gave a port at which nobody can be met.
    """
    if dist.is_initialized():
        return
    refuse_bad_port(os.environ.get("MASTER_PORT", ""))
    if backend != "gloo":
        return
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, num_ranks, host, port = (os.environ.get(name, "") for name in names)
    try:
        if rank != "0" and host and port:
            _await_listener(host, port, timeout_seconds)
        deadline = timedelta(seconds=timeout_seconds)
        within(timeout_seconds, lambda: dist.init_process_group(backend, timeout=deadline))
    except (RuntimeError, OSError) as error:
        raise LinkError(
            f"rank {rank} waited at start-up for all {num_ranks} ranks to meet at {host}:{port}, where rank 0 or the "
            f"launcher listens (deadline {timeout_seconds:g} s): {reason(error)}. Check that all {num_ranks} processes "
            "were started with this MASTER_ADDR and MASTER_PORT and that the port is reachable; that each can reach the "
            "others on all TCP ports, for they connect to each other on further ones; and, where machines have several "
            "network interfaces, that GLOO_SOCKET_IFNAME names the one to use (`meshadapt env` lists them). Allow more "
            "time with ddp_timeout"
        ) from error


def refuse_bad_port(port: str) -> None:
    """Raises ValueError for a MASTER_PORT at which ranks can never meet; one that is not set is torch's to miss."""
    number = port.strip()
    if port and not (number.isascii() and number.isdecimal() and 0 < int(number) < 2**16):
        raise ValueError(
            f"MASTER_PORT={port}: must be a port number, 1 to 65535, the same on all machines. Give torchrun "
            "--master_port 29500 or another free one (0 lets each process look for a port of its own), or, on one "
            "machine, --standalone"
        )


def _await_listener(host: str, port: str, timeout_seconds: float) -> None:
    """Waits until someone listens. torch would wait too, but up to twice the deadline, and print stack traces."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(1.0, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(CONNECT_RETRY_SECONDS)
