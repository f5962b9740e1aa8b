"""Runs a function on N forked gloo ranks: seconds instead of the tens of seconds that a real launch takes.

Every rank must report success, a deadline ends all of them, and a rank killed by a signal is a failure.
"""

from __future__ import annotations

import functools
import gc
import os
import time
import traceback
from pathlib import Path

import torch
import torch.multiprocessing as mp

import hf_meshadapt.trainer  # noqa: F401  (what the package imports late is here once, not again in every forked rank)
from hf_meshadapt.boundary.entropy_coder import EntropySequenceCoder
from hf_meshadapt.boundary.sequence_coder import TOKEN
from hf_meshadapt.boundary.transform import fit_tables
from hf_meshadapt.cli.circuits import free_ports


def free_port() -> int:
    return free_ports(1)


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher would set, on one machine and the CPU."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }


@functools.cache
def load_compiled_code() -> None:
    """What numba loads at its first call, a third of a second: here once, not again in every forked rank."""
    coder = EntropySequenceCoder(fit_tables(torch.eye(8), None, 8), 8, lambda length: 64, exact_first=True)
    base, kind = torch.zeros(1, 2, 8), torch.full((1, 2), TOKEN, dtype=torch.int8)
    coder.decode(coder.encode(base, base, kind), base, kind)


def _entry(rank: int, function, world_size: int, port: int, folder: str, args: tuple) -> None:
    os.environ.update(rank_environment(rank, world_size, port))
    torch.set_num_threads(1)
    gc.freeze()  # what the fork inherited is not this rank's garbage; Trainer's full collection would walk all of it
    try:
        result = function(rank, *args)
        torch.save(result, Path(folder, f"result-{rank}.pt"))
    except BaseException:
        Path(folder, f"error-{rank}.txt").write_text(traceback.format_exc())
        raise
    # Forked children must not run the parent's atexit handlers or wait for gloo's destructors.
    os._exit(0)


def fork_rank(rank: int, function, world_size: int, port: int, folder: Path, *args):
    """Starts one rank alone, for a test that starts the others in another way; returns its process."""
    process = mp.get_context("fork").Process(target=_entry, args=(rank, function, world_size, port, str(folder), args))
    process.start()
    return process


def start_ranks(function, world_size: int, folder: Path, *args):
    """Starts `function(rank, *args)` on every rank without init_process_group; returns the process context."""
    load_compiled_code()
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    return mp.start_processes(
        _entry,
        args=(function, world_size, free_port(), str(folder), args),
        nprocs=world_size,
        join=False,
        start_method="fork",
    )


def run_ranks(function, world_size: int, folder: Path, *args, timeout_seconds: float = 120.0) -> list:
    """Returns every rank's result, in rank order.

    Raises:
        AssertionError: a rank raised (its traceback is quoted), died, or outlived the deadline.
    """
    context = start_ranks(function, world_size, folder, *args)
    deadline = time.monotonic() + timeout_seconds
    for process in context.processes:
        process.join(max(0.1, deadline - time.monotonic()))
    hung = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
    for process in context.processes:
        process.kill()
        process.join()
    errors = "\n".join(
        f"--- rank {path.stem.split('-')[1]}\n{path.read_text()}" for path in sorted(folder.glob("error-*.txt"))
    )
    codes = [process.exitcode for process in context.processes]
    assert not hung, f"ranks {hung} still ran after {timeout_seconds} s\n{errors}"
    assert not errors, errors
    assert all(code == 0 for code in codes), f"exit codes {codes}"
    return [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(world_size)]
