"""Ranks that die, hang, fail or never come: the others end by themselves in time, with an error that says whom they
waited for, where and when.

Many cases run side by side: they wait far more than they compute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_meshadapt.checkpoint_folder import last_whole_checkpoint

from ..failing import (
    BREAK_AT_STEP,
    HARD_DEADLINE_SECONDS,
    LINK_TIMEOUT_SECONDS,
    MARGIN_SECONDS,
    Case,
    Ended,
    check,
    run_to_the_end,
    train,
)
from ..launch import fork_rank, free_port, rank_environment, start_ranks

ADAPTIVE = dict(preset="anchored", boundary_budget=0.4, calibration_tokens=300, calibration_every=2)
ADAPTIVE |= dict(boundary_target_step_seconds=60.0)
POWERSGD = dict(dp_sync="powersgd", matrix_rank=4)
DILOCO = dict(dp_sync="diloco", sync_every=1)
STREAMING = dict(dp_sync="streaming_diloco", sync_every=1)
KILLED = [
    Case("SIGKILL", "train", "the gradient of microbatch 0 from rank 1", victim=1, stages=2),
    Case("SIGKILL", "train", "the activation of microbatch 0 from rank 0", victim=0, stages=2, schedule="1f1b"),
    Case("SIGKILL", "train", "the activation of microbatch 0 from rank 0", victim=0, stages=2, schedule="interleaved"),
    Case("SIGKILL", "train", "the other replicas' gradients from rank 1", victim=1, stages=2, replicas=2),
    Case("SIGKILL", "train", "the gradient of microbatch 0 from rank 3", 3, stages=2, replicas=2, schedule="1f1b"),
    Case("SIGKILL", "train", "from rank 2", victim=2, stages=2, replicas=2, schedule="interleaved"),
    Case("SIGKILL", "train", "the other replicas' gradients from rank 0", victim=0, stages=1, replicas=2),
    # The link is down before a receive is posted.
    Case("SIGKILL", "train", "the gradient of microbatch 0 from rank 1", victim=1, stages=2, lag_seconds=0.5),
    Case("SIGKILL", "train", "microbatch 0 from rank 0", 0, stages=2, schedule="interleaved", lag_seconds=0.5),
    Case("SIGKILL", "counts", "the other replicas' sums from rank 0", victim=0, stages=1, replicas=2),
    Case("SIGKILL", "tied", "the tied embedding from rank 1", victim=1, stages=2),
    Case("SIGKILL", "norm", "gradient norms from rank 0", victim=0, stages=2),
    Case("SIGKILL", "train", "the other replicas' gradients from rank 1", 1, stages=2, replicas=2, fields=POWERSGD),
    Case("SIGKILL", "sync", "the other replicas' weights from rank 0", victim=0, stages=1, replicas=2, fields=DILOCO),
    Case("SIGKILL", "logs", "Trainer's exchange with rank 1", victim=1, stages=2),
    Case("SIGKILL", "figures", "the last steps' figures from rank 0", victim=0, stages=2),
    Case("SIGKILL", "evaluate", "an exchange with rank 0", victim=0, stages=2),
    Case("SIGKILL", "groups", "the process groups shared with rank 0", victim=0, stages=2),
    Case("SIGKILL", "probe", "a probe of the link from rank 0", victim=0, stages=2, fields=ADAPTIVE),
    Case("raise", "forward", "the other replicas' sums from rank 1", victim=1, stages=2, replicas=2),
    Case("raise", "forward", "from rank 0", victim=0, stages=2, schedule="interleaved"),
    Case("raise", "norm", "gradient norms from rank 0", victim=0, stages=2, schedule="1f1b"),
]


@pytest.mark.parametrize("case", KILLED, ids=str)
def test_a_rank_that_dies_or_raises_ends_the_others_at_once(case, tmp_path):
    (ended,) = run_to_the_end([case], tmp_path)
    check(case, ended, within_seconds=MARGIN_SECONDS)
    if case.how == "raise":  # its own error is not taken for a lost link
        own = (tmp_path / "0" / f"error-{case.victim}.txt").read_text()
        assert "RuntimeError: a fault of this rank alone" in own and "LinkError" not in own


SAVED = {"save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize("where", ["save", "train"])
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_kill_the_last_checkpoint_is_whole(where, victim, tmp_path):
    awaited = "saving together with" if where == "save" else "microbatch 0 from"
    case = Case("SIGKILL", where, awaited, victim=victim, stages=2, fields=SAVED)
    (ended,) = run_to_the_end([case], tmp_path)
    check(case, ended, within_seconds=MARGIN_SECONDS)
    # Killed in the save of step 2, or in the step after it.
    last = BREAK_AT_STEP - 1 if where == "save" else BREAK_AT_STEP
    assert last_whole_checkpoint(tmp_path / "0" / "out").name == f"checkpoint-{last}"


STOPPED = [
    Case("SIGSTOP", "train", "the other replicas' gradients from rank 1", victim=1, stages=2, replicas=2),
    Case("SIGSTOP", "train", "the activation of microbatch 0 from rank 0", 0, stages=2, schedule="interleaved"),
    Case("SIGSTOP", "counts", "the other replicas' sums from rank 0", victim=0, stages=1, replicas=2),
    Case("SIGSTOP", "norm", "gradient norms from rank 1", victim=1, stages=2, schedule="1f1b"),
    Case("SIGSTOP", "sync", "the other replicas' weights from rank 1", 1, stages=1, replicas=2, fields=STREAMING),
    Case("SIGSTOP", "logs", "Trainer's exchange with rank 0", victim=0, stages=2),
    Case("SIGSTOP", "groups", "the store of rank 0 .* did not answer", victim=0, stages=2),
    Case("SIGSTOP", "evaluate", "an exchange with rank 1", victim=1, stages=2),
    Case("SIGSTOP", "probe", "a probe of the link to rank 1", victim=1, stages=2, fields=ADAPTIVE),
    Case("SIGSTOP", "save", "saving together with rank 1", victim=1, stages=2, fields=SAVED),
]


def test_a_rank_that_hangs_ends_the_others_after_the_deadline(tmp_path):
    """Its connections stay open: only the deadline tells."""
    for case, ended in zip(STOPPED, run_to_the_end(STOPPED, tmp_path)):
        check(case, ended, within_seconds=LINK_TIMEOUT_SECONDS + MARGIN_SECONDS)
        assert min(end.seconds for end in ended.values()) > LINK_TIMEOUT_SECONDS - 1.0, case


def come(rank: int, absent: int, folder: Path) -> None:
    from hf_meshadapt import MeshAdaptArguments

    if rank == absent:
        return
    started = time.monotonic()
    try:
        MeshAdaptArguments(
            output_dir=str(folder), pipeline_stages=2, use_cpu=True, link_timeout_seconds=LINK_TIMEOUT_SECONDS
        )
    finally:
        (folder / f"seconds-{rank}").write_text(str(time.monotonic() - started))


def test_a_rank_that_never_comes_is_missed_in_time(tmp_path):
    absences = [(2, 0), (2, 1), (4, 0), (4, 3)]
    folders = [tmp_path / f"{world}-{absent}" for world, absent in absences]
    runs = [start_ranks(come, world, where, absent, where) for (world, absent), where in zip(absences, folders)]
    for (world, absent), where, run in zip(absences, folders, runs):
        for rank in (rank for rank in range(world) if rank != absent):
            process = run.processes[rank]
            process.join(HARD_DEADLINE_SECONDS)
            hung = process.is_alive()
            process.kill()
            assert not hung and process.exitcode == 1
            error = (where / f"error-{rank}.txt").read_text()
            assert re.search(
                rf"LinkError: rank {rank} waited at start-up for all {world} ranks to meet at 127\.0\.0\.1:\d+.*"
                rf"\(deadline 6 s\).*all {world} processes.*MASTER_ADDR.*ddp_timeout",
                error,
            ), error
            if rank == 0:
                assert f"{world - 1}/{world} clients joined" in error
            seconds = float((where / f"seconds-{rank}").read_text())
            assert LINK_TIMEOUT_SECONDS - 1.0 < seconds < LINK_TIMEOUT_SECONDS + MARGIN_SECONDS


# The interpreter starts many seconds after the forked rank.
PATIENT = {"ddp_timeout": 60}
# With the rank that is a real interpreter; the other is forked.
REAL = [
    (Case("SIGSTOP", "train", "the other replicas' gradients from rank 1", 1, 1, replicas=2, fields=PATIENT), 0),
    (Case("SIGSTOP", "train", "the gradient of microbatch 0 from rank 1", victim=1, stages=2, fields=PATIENT), 0),
    (Case("raise", "train", "", victim=1, stages=1, replicas=2, fields=PATIENT), 1),
]
PROGRAM = """
import sys, pathlib
from tests.distributed.test_failures import REAL, train
rank, index, folder = sys.argv[1:]
train(int(rank), REAL[int(index)][0], pathlib.Path(folder))
"""


@pytest.mark.parametrize(
    "index",
    [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)],
    ids=[str(case) for case, _ in REAL],
)
def test_a_real_interpreter_exits_after_a_failure(index, tmp_path):
    """Forked ranks skip the interpreter's own end, where gloo's threads are joined and its groups destroyed."""
    (case, rank), port = REAL[index], free_port()
    with (tmp_path / "error").open("w") as error:
        interpreter = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(index), str(tmp_path)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **rank_environment(rank, 2, port)},
            stdout=subprocess.DEVNULL,
            stderr=error,
        )
    forked = fork_rank(1 - rank, train, 2, port, tmp_path, case, tmp_path)
    try:
        code = interpreter.wait(HARD_DEADLINE_SECONDS)
        ended = Ended(code, (tmp_path / "error").read_text(), time.time() - float((tmp_path / "broken").read_text()))
        if case.how == "raise":
            assert code == 1 and "RuntimeError: a fault of this rank alone" in ended.error
            assert ended.seconds < MARGIN_SECONDS
        else:
            check(case, {rank: ended}, within_seconds=LINK_TIMEOUT_SECONDS + MARGIN_SECONDS)
    finally:
        for process in (interpreter, forked):
            process.kill()
