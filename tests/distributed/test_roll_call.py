"""Calls that all ranks must make and one of them does not: the others say so, soon and by name."""

from __future__ import annotations

import time
from pathlib import Path

from hf_meshadapt import roll_call
from hf_meshadapt.pipeline.torch_internals import default_store
from hf_meshadapt.waiting import LinkError, join_world
from tests.equality import mesh_trainer, tiny_model
from tests.runs import fork

LINK_TIMEOUT_SECONDS = 3.0


def error_of(call) -> tuple[str, float]:
    """What it says, and after how many seconds."""
    started = time.monotonic()
    try:
        call()
    except LinkError as error:
        return str(error), time.monotonic() - started
    raise AssertionError("the call came back")


def call_on_one_rank(rank: int, *, folder: Path) -> tuple[str, str, float]:
    """Each rank makes a call that the other does not; then rank 0 saves alone; then rank 1 pushes alone and learns that
    rank 0 has ended."""
    trainer = mesh_trainer(
        tiny_model("llama"), 2, str(folder), pipeline_stages=2, max_steps=1, eval_strategy="no",
        link_timeout_seconds=LINK_TIMEOUT_SECONDS,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()  # on all ranks: nothing to say
    trainer.evaluate()
    other, _ = error_of((trainer.evaluate, trainer.mesh_report)[rank])
    if rank == 1:
        time.sleep(LINK_TIMEOUT_SECONDS + 1)
    said, seconds = error_of((trainer.save_model, trainer.push_to_hub)[rank])
    if rank == 0:
        roll_call.tell_the_end(rank)
        time.sleep(LINK_TIMEOUT_SECONDS)
    return other, said, seconds


def test_a_call_that_one_rank_does_not_make_says_which(tmp_path):
    (evaluated, saved, waited_seconds), (reported, pushed, pushed_seconds) = fork(call_on_one_rank, 2, folder=tmp_path)
    for said, call, caller in ((evaluated, "evaluate()", 0), (reported, "mesh_report()", 1)):
        assert said.startswith(f"{call} is collective") and f" rank {caller} (stage {caller} of replica 0) " in said
    assert saved == (
        "save_model() is collective in a mesh, where each rank holds a part of the model. rank 0 (stage 0 of replica 0) "
        "called it at step 1; not called in time (deadline 3 s) by rank 1 (stage 1 of replica 0). Call it on every rank, "
        "not under `if trainer.is_world_process_zero()` or the like: rank 0 alone writes what is written once"
    )
    assert waited_seconds > LINK_TIMEOUT_SECONDS - 0.1
    assert pushed.startswith("push_to_hub() is collective") and "rank 1 (stage 1 of replica 0) called it" in pushed
    assert "by rank 0 (stage 0 of replica 0), which has ended." in pushed
    assert pushed_seconds < LINK_TIMEOUT_SECONDS - 1  # at once, not at the deadline


def end_with_the_call(rank: int) -> float:
    """Rank 0, which keeps the store, comes last and its process ends at once; rank 1 looks again only later.

    Returns the seconds of the call.
    """
    join_world("gloo", 10 * LINK_TIMEOUT_SECONDS)
    if rank == 0:
        time.sleep(LINK_TIMEOUT_SECONDS / 10)
    else:
        roll_call.PAUSE_SECONDS = roll_call.LONGEST_PAUSE_SECONDS = LINK_TIMEOUT_SECONDS / 3
    started = time.monotonic()
    assert roll_call.missing_ranks("the last call", rank, 2, LINK_TIMEOUT_SECONDS) == {}
    return time.monotonic() - started


def test_rank_0_stays_until_the_others_have_seen_that_all_have_come():
    first, second = fork(end_with_the_call, 2)
    assert 0 < first < LINK_TIMEOUT_SECONDS and 0 < second < LINK_TIMEOUT_SECONDS


def die_once_all_have_come(rank: int) -> float:
    """Rank 1 comes and never says that it has seen the others; returns the seconds of rank 0's call."""
    join_world("gloo", 10 * LINK_TIMEOUT_SECONDS)
    started = time.monotonic()
    if rank == 1:
        default_store().set(f"{roll_call.PREFIX}/the last call/1", "here")
        time.sleep(LINK_TIMEOUT_SECONDS)
    else:
        roll_call.STAY_SECONDS = LINK_TIMEOUT_SECONDS / 6
        assert roll_call.missing_ranks("the last call", rank, 2, LINK_TIMEOUT_SECONDS) == {}
    return time.monotonic() - started


def test_rank_0_stays_only_so_long():
    seconds, _ = fork(die_once_all_have_come, 2)
    assert LINK_TIMEOUT_SECONDS / 6 <= seconds < LINK_TIMEOUT_SECONDS
