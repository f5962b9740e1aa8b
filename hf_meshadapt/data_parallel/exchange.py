"""How replicas' messages meet: in this process, or over a process group. All that an aggregator knows of either."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import finish_kernels, like_this_thread
from .clock import SyncClock
from .pacing import chunks

Result = TypeVar("Result")


class Exchange(ABC):
    """Sums or gathers flat messages, of which every replica of this process gives one.

    Attributes:
        num_replicas: of all processes together.
        num_local: in this process.
        clock: of what is exchanged through it.
    """

    num_replicas: int
    num_local: int
    clock: SyncClock

    @abstractmethod
    def sum(self, messages: list[Tensor]) -> Tensor:
        """Sum over all replicas, in the messages' dtype, the same bits everywhere. May overwrite the messages."""

    @abstractmethod
    def gather(self, messages: list[Tensor]) -> list[Tensor]:
        """All replicas' messages, in replica order."""

    @abstractmethod
    def launch(self, function: Callable[[], Result]) -> Callable[[], Result]:
        """Runs what communicates through this exchange while the caller goes on; one at a time.

        Returns:
            What waits for the result.
        """


class InProcess(Exchange):
    """All replicas are here: the emulated mesh, and what tests compare with."""

    def __init__(self, num_replicas: int):
        self.num_replicas = self.num_local = num_replicas
        self.clock = SyncClock()

    def sum(self, messages):
        return torch.stack(messages).sum(0)

    def gather(self, messages):
        return messages

    def launch(self, function):
        result = function()
        return lambda: result


class OverGroup(Exchange):
    """One replica is here, the others are the members of a group.

    Args:
        group: used by nobody else while something is launched.
        timeout_seconds: deadline of a wait for what was launched; each collective has the group's own.
        chunk_bytes: messages go in pieces of this size, one after the other; None sends each whole.
    """

    num_local = 1

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float, chunk_bytes: int | None = None):
        self.group, self.timeout_seconds, self.chunk_bytes = group, timeout_seconds, chunk_bytes
        self.num_replicas = dist.get_world_size(group)
        self.clock = SyncClock()

    def sum(self, messages):
        (message,) = messages
        # gloo waits for kernels that have not ended, and would be charged with their time.
        finish_kernels(message.device)
        with self.clock.exchanging(message.nbytes * 2 * (self.num_replicas - 1) / self.num_replicas):
            for piece in self._pieces(message):
                dist.all_reduce(piece, group=self.group)
            finish_kernels(message.device)
        return message

    def gather(self, messages):
        (message,) = messages
        gathered = [torch.empty_like(message) for _ in range(self.num_replicas)]
        finish_kernels(message.device)
        with self.clock.exchanging(message.nbytes * (self.num_replicas - 1)):
            for piece, *places in zip(self._pieces(message), *map(self._pieces, gathered)):
                dist.all_gather(places, piece, group=self.group)
            finish_kernels(message.device)
        return gathered

    def _pieces(self, message: Tensor) -> Iterable[Tensor]:
        return [message] if self.chunk_bytes is None else chunks(message, self.chunk_bytes)

    def launch(self, function):
        outcome: Future[Result] = Future()
        function = like_this_thread(function)

        def run() -> None:
            try:
                with torch.no_grad():
                    outcome.set_result(function())
            except BaseException as error:
                outcome.set_exception(error)

        def wait() -> Result:
            try:
                return outcome.result(self.timeout_seconds)
            except FutureTimeoutError as error:
                raise dist.DistError(f"a sum over replicas took more than {self.timeout_seconds:g} s") from error

        threading.Thread(target=run, daemon=True).start()  # a daemon does not keep the process from ending
        return wait
