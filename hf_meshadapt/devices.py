"""What GPUs ask of code that the CPU does not: work that runs on while Python goes on, and a device for each thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def finish_kernels(device: torch.device | str) -> None:
    """Waits until a device has computed what this thread has given it so far: before a clock is read."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize()


def like_this_thread(function: Callable[[], Result]) -> Callable[[], Result]:
    """The function, to be called in a new thread, which would have the first GPU for its own and, on the CPU, the machine's
    number of threads, which sum in other orders."""
    num_threads = torch.get_num_threads()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> Result:
        torch.set_num_threads(num_threads)
        if device is not None:
            torch.cuda.set_device(device)
        return function()

    return run
