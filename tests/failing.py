"""Runs in which one rank dies, hangs or raises at a chosen place, and what must be true of the other ranks' ends."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hf_meshadapt import adaptive, engine, mesh_checkpoint

from .equality import mesh_trainer, tiny_model
from .launch import start_ranks

LINK_TIMEOUT_SECONDS = 6.0
# Ranks wait in turn for one another's ends, and the machine may be busy.
MARGIN_SECONDS = 8.0
HARD_DEADLINE_SECONDS = 60.0
BREAK_AT_STEP = 2


@dataclass
class Case:
    """One run in which one rank fails.

    Attributes:
        how: a signal that the victim sends itself, or `raise`.
        where: what the victim is about to do when it fails, a key of `PLACES`.
        awaited: what its neighbour says that it waited for.
        lag_seconds: how long after the victim the others get there.
    """

    how: str
    where: str
    awaited: str
    victim: int
    stages: int
    replicas: int = 1
    schedule: str = "gpipe"
    fields: dict = field(default_factory=dict)
    lag_seconds: float = 0.0

    def __str__(self):
        late = "-late" if self.lag_seconds else ""
        return f"{self.how}-{self.where}-{self.stages}x{self.replicas}-{self.schedule}{late}"

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.stages * self.replicas) if rank != self.victim]


# Where a rank can fail: the object and method that it is about to enter.
PLACES = {
    "train": lambda trainer: (trainer.engine, "train_batch"),
    "forward": lambda trainer: (next(iter(trainer.engine.parts.stages.values())), "forward"),
    "counts": lambda trainer: (trainer.engine, "sum_over_replicas"),
    "tied": lambda trainer: (trainer.engine, "sum_tied_gradients"),
    "norm": lambda trainer: (trainer.engine, "_pipeline_norm"),
    "sync": lambda trainer: (trainer.engine.replication.synchronizer, "end_step"),
    "logs": lambda trainer: (trainer, "_maybe_log_save_evaluate"),
    "figures": lambda trainer: (trainer.engine, "take_logs"),
    "evaluate": lambda trainer: (trainer.engine, "eval_batch"),
    "save": lambda trainer: (mesh_checkpoint, "save_stage"),
    "groups": lambda trainer: (engine, "MeshGroups"),
    "probe": lambda trainer: (adaptive, "measure_links"),
}


def train(rank: int, case: Case, folder: Path) -> None:
    def fail() -> None:
        (folder / "broken").write_text(str(time.time()))
        if case.how == "raise":
            raise RuntimeError("a fault of this rank alone")
        os.kill(os.getpid(), signal.Signals[case.how])

    act = fail if rank == case.victim else lambda: time.sleep(case.lag_seconds)
    if case.where == "groups":
        act_at(None, *PLACES["groups"](None), act)
    chunks = 2 if case.schedule == "interleaved" else 1
    trainer = mesh_trainer(
        tiny_model("llama_tied"),
        4,
        str(folder / "out"),
        max_steps=6,
        gradient_accumulation_steps=1,
        pipeline_stages=case.stages,
        pipeline_schedule=case.schedule,
        pipeline_chunks_per_rank=chunks,
        link_timeout_seconds=LINK_TIMEOUT_SECONDS,
        eval_steps=2,
        **case.fields,
    )
    if case.where != "groups":
        act_at(trainer, *PLACES[case.where](trainer), act)
    trainer.train()


def act_at(trainer, owner, name: str, act: Callable[[], None]) -> None:
    """Calls `act` before a method, in the step in which to fail or, while there is no trainer, at once."""
    entered = getattr(owner, name)

    def wrapped(*args, **kwargs):
        if trainer is None or trainer.state.global_step >= BREAK_AT_STEP:
            act()
        return entered(*args, **kwargs)

    setattr(owner, name, wrapped)


@dataclass
class Ended:
    """How a rank ended: exit code, its traceback, seconds since the fault."""

    code: int
    error: str
    seconds: float


def run_to_the_end(cases: list[Case], folder: Path) -> list[dict[int, Ended]]:
    """Runs all cases at once and returns how the survivors of each ended; fails if one did not."""
    folders = [folder / str(index) for index in range(len(cases))]
    runs = [
        start_ranks(train, case.stages * case.replicas, where, case, where).processes
        for case, where in zip(cases, folders)
    ]
    ends: list[dict[int, float]] = [{} for _ in cases]
    deadline = time.time() + HARD_DEADLINE_SECONDS
    try:
        while time.time() < deadline and any(len(end) < len(case.survivors) for end, case in zip(ends, cases)):
            for case, processes, end in zip(cases, runs, ends):
                for rank in case.survivors:
                    if rank not in end and not processes[rank].is_alive():
                        end[rank] = time.time()
            time.sleep(0.02)
    finally:
        for process in (process for processes in runs for process in processes):
            process.kill()
            process.join()
    results = []
    for case, where, processes, end in zip(cases, folders, runs, ends):
        errors = {
            rank: "".join(path.read_text() for path in where.glob(f"error-{rank}.txt")) for rank in case.survivors
        }
        assert (where / "broken").exists(), f"{case}: the fault did not happen\n" + "\n".join(errors.values())
        broken = float((where / "broken").read_text())
        assert sorted(end) == case.survivors, f"{case}: only ranks {sorted(end)} ended"
        results.append({r: Ended(processes[r].exitcode, errors[r], end[r] - broken) for r in case.survivors})
    return results


NAMED = (
    r"LinkError: rank {rank} \(stage {stage} of replica {replica}\) waited for .+ rank \d \(stage \d of replica \d\)"
)


def check(case: Case, ended: dict[int, Ended], within_seconds: float) -> None:
    for rank, end in ended.items():
        assert end.code == 1, f"{case}: rank {rank} ended with {end.code}\n{end.error}"
        named = NAMED.format(rank=rank, stage=rank % case.stages, replica=rank // case.stages)
        when = "at start-up" if case.where == "groups" else f"at step {BREAK_AT_STEP}"
        assert re.search(rf"{named}.* {when}\b", end.error), f"{case}: rank {rank}\n{end.error}"
        assert end.seconds < within_seconds, f"{case}: rank {rank} took {end.seconds:.1f} s"
    whole = "\n".join(end.error for end in ended.values())
    assert re.search(case.awaited, whole), f"{case}: {case.awaited} not in\n{whole}"
