"""What an anchor costs the training loop that must not wait for it, by what the anchor does meanwhile.

A tiny model over two stages and the anchor, a launch of its own. Layouts: `apart`, the anchor has a core that no rank
uses (on two cores both ranks share the other one); `shared`, only where there is no third core: each rank has a core of its
own and the anchor shares the second one's, where it runs (SCHED_IDLE) only while the rank does not. Timed on every rank
and step: the whole period of the loop from one optimizer step to the next, the calls to the anchor circuit in it
(`begin_step`, `end_step`), also by the thread's own clock, which leaves out what other processes on the core took, and
what the correction adds to the optimizer's step, which is no part of either target (benchmarks/spectral_cost.py is about
it, and in steps as short as these it is large).

anchor_share is calls over period, of the same step. median_ratio and p99_ratio are periods, less the correction, over
those of the layout's runs without an anchor, one before and one after the others. Targets: anchor_share under 0.01
(median and p99), median_ratio within 1.05, p99_ratio within 1.5. They are for a quiet machine:

    python -m benchmarks.anchor_isolation --steps 500
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from hf_meshadapt.anchor.handshake import SECRET_VARIABLE
from tests.circuits import FAST, SECRET, free_ports, serve
from tests.equality import mesh_trainer, tiny_model
from tests.launch import start_ranks

from .common import print_table, write_result

NAME, KIND, ROWS, NUM_ROWS, STAGES = "anchor_isolation", "llama", 4, 200, 2
# Absent: priors are asked for, and no anchor ever comes. The others act on an anchor that is there from the first step.
LAYOUTS = ("apart", "shared")
STATES = ("none", "absent", "live", "slow", "stopped", "killed", "restarted")
SLOW_SECONDS = 2.0
SKIPPED_STEPS = 5  # they make schedules and the optimizer's state
NUM_RESTARTS = 3
DEADLINE_SECONDS = 900.0


class Timed:
    """Adds up the seconds within methods of one object, of the clock on the wall and of the thread's, until taken."""

    def __init__(self):
        self.seconds = self.thread_seconds = 0.0

    def wrap(self, owner, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args, **kwargs):
            started, thread_started = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self.thread_seconds += time.thread_time() - thread_started

        setattr(owner, name, timed)

    def take(self) -> tuple[float, float]:
        seconds, self.seconds, self.thread_seconds = (self.seconds, self.thread_seconds), 0.0, 0.0
        return seconds


def train(rank: int, progress, cores: list[int], folder: str, awaits_anchor: bool, options: dict) -> dict:
    """Seconds of every step of this rank; `progress` is told how many steps rank 0 has taken."""
    os.environ[SECRET_VARIABLE] = SECRET
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    trainer = mesh_trainer(tiny_model(KIND), ROWS, folder, NUM_ROWS, **{**FAST, "logging_steps": 10**6, **options})
    anchoring, engine = trainer.anchoring, trainer.engine
    calls, correcting, rows = Timed(), Timed(), []
    start, end = anchoring.start, engine.end_step
    calls.wrap(anchoring, "begin_step")
    calls.wrap(anchoring, "end_step")

    def start_and_watch(dataloader) -> None:
        start(dataloader)
        if awaits_anchor and anchoring.link is not None:
            anchoring.link.wait_until_ready(60)
        if trainer.args.anchor:
            correcting.wrap(anchoring.optimizer, "_correct")
            correcting.wrap(anchoring.optimizer.priors, "advance")
        rows.append((time.perf_counter(), 0.0, 0.0, 0.0))

    def end_step() -> None:
        end()
        rows.append((time.perf_counter(), *calls.take(), correcting.take()[0]))
        if rank == 0:
            progress.value = len(rows) - 1

    anchoring.start, engine.end_step = start_and_watch, end_step
    trainer.train()
    report = trainer.mesh_report()["anchor"] or {}
    times, in_calls, in_calls_on_thread, in_corrections = (np.array(column) for column in zip(*rows))
    return {
        "period": np.diff(times)[SKIPPED_STEPS:], "calls": in_calls[1 + SKIPPED_STEPS :],
        "calls_on_thread": in_calls_on_thread[1 + SKIPPED_STEPS :],
        "correction": in_corrections[1 + SKIPPED_STEPS :], "live_steps": report.get("num_live_steps", 0),
        "priors": report.get("num_priors", 0),
    }  # fmt: skip


def cores_of(layout: str) -> tuple[list[int], int]:
    """Cores of the ranks, by rank and around again, and the anchor's."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores if layout == "shared" else cores[:-1])[:STAGES], cores[-1]


def run_anchor(core: int, shares_core: bool, pass_seconds: float, folder: Path, options: dict) -> None:
    """The anchor's launch, in a process of its own; its passes take so much longer."""
    os.sched_setaffinity(0, {core})
    if shares_core:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    from hf_meshadapt.anchoring.passes import AnchorPasses

    gradients = AnchorPasses.gradients

    def slow(*args):
        time.sleep(pass_seconds)
        return gradients(*args)

    AnchorPasses.gradients = slow
    serve(KIND, folder, options)


class AnchorProcess:
    """The anchor of one run, and what is done to it."""

    def __init__(self, state: str, core: int, shares_core: bool, folder: Path, options: dict):
        self.arguments = (core, shares_core, SLOW_SECONDS if state == "slow" else 0.0, folder, options)
        self.process = None
        if state not in ("none", "absent"):
            self.start()

    def start(self) -> None:
        self.process = multiprocessing.get_context("fork").Process(target=run_anchor, args=self.arguments)
        self.process.start()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def restart(self) -> None:
        self.kill()
        self.start()

    def plan(self, state: str, steps: int) -> list[tuple[int, str]]:
        """What happens to it after which step."""
        if state == "restarted":
            return [(steps * (i + 1) // (NUM_RESTARTS + 1), "restart") for i in range(NUM_RESTARTS)]
        return [(steps // 4, {"stopped": "stop", "killed": "kill"}[state])] if state in ("stopped", "killed") else []


@contextlib.contextmanager
def anchor_of(*arguments) -> Iterator[AnchorProcess]:
    anchor = AnchorProcess(*arguments)
    try:
        yield anchor
    finally:
        anchor.kill()


def run(state: str, layout: str, steps: int, anchor_every: int) -> list[dict]:
    """The ranks' timings of one run."""
    cores, anchor_core = cores_of(layout)
    options = {"max_steps": steps + SKIPPED_STEPS, "pipeline_stages": STAGES}
    if state != "none":
        endpoint = f"127.0.0.1:{free_ports(STAGES)}"
        options |= {"anchor": True, "anchor_every": anchor_every, "prior_rank": 8, "fast_endpoint": endpoint}
    progress = multiprocessing.get_context("fork").Value("l", 0)
    place = (anchor_core, anchor_core in cores)
    with tempfile.TemporaryDirectory() as name, anchor_of(state, *place, Path(name), options) as anchor:
        awaits = anchor.process is not None
        ranks = (progress, cores, name, awaits, options)
        processes = start_ranks(train, STAGES, Path(name), *ranks).processes
        try:
            disturb(anchor, anchor.plan(state, steps), progress, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
        errors = "\n".join(path.read_text() for path in Path(name).glob("*error-*.txt"))
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"the run with an anchor that is {state} failed\n{errors}")
        return [torch.load(Path(name, f"result-{rank}.pt"), weights_only=False) for rank in range(STAGES)]


def disturb(anchor: AnchorProcess, plan: list[tuple[int, str]], progress, processes) -> None:
    """Does to the anchor what is planned, until the fast ranks have ended."""
    plan, deadline = list(plan), time.monotonic() + DEADLINE_SECONDS
    while any(process.is_alive() for process in processes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the fast ranks still ran after {DEADLINE_SECONDS:g} s")
        if plan and progress.value >= plan[0][0]:
            getattr(anchor, plan.pop(0)[1])()
        time.sleep(0.01)


def measure(layout: str, options: argparse.Namespace) -> list[dict]:
    """The rows of one layout."""
    size = (options.steps, options.anchor_every)
    runs = [(state, run(state, layout, *size)) for state in ("none", *options.states, "none")]
    bare = [rank for state, ranks in runs if state == "none" for rank in ranks]
    baseline = np.concatenate([rank["period"] for rank in bare])
    kept = {"none": bare} | {state: ranks for state, ranks in runs if state != "none"}
    return [{"layout": layout} | figures(state, ranks, baseline, *size) for state, ranks in kept.items()]


def figures(state: str, ranks: list[dict], baseline: np.ndarray, steps: int, anchor_every: int) -> dict:
    kinds = ("period", "calls", "calls_on_thread", "correction")
    period, calls, on_thread, correction = (np.concatenate([r[kind] for r in ranks]) for kind in kinds)
    rest, share, thread_share = period - correction, calls / period, on_thread / period
    return {
        "anchor_state": state, "steps": steps, "num_samples": len(period), "anchor_every": anchor_every,
        "anchor_share_median": float(np.median(share)), "anchor_share_p99": float(np.percentile(share, 99)),
        "thread_share_median": float(np.median(thread_share)),
        "thread_share_p99": float(np.percentile(thread_share, 99)),
        "median_ratio": float(np.median(rest) / np.median(baseline)),
        "p99_ratio": float(np.percentile(rest, 99) / np.percentile(baseline, 99)),
        "period_seconds_median": float(np.median(period)), "period_seconds_p99": float(np.percentile(period, 99)),
        "calls_seconds_median": float(np.median(calls)), "calls_seconds_p99": float(np.percentile(calls, 99)),
        "correction_seconds_median": float(np.median(correction)), "num_live_steps": ranks[0]["live_steps"],
        "num_priors": ranks[0]["priors"], "period_microseconds": microseconds(period),
        "calls_microseconds": microseconds(calls), "calls_on_thread_microseconds": microseconds(on_thread),
        "correction_microseconds": microseconds(correction),
    }  # fmt: skip


def microseconds(seconds: np.ndarray) -> list[int]:
    return np.round(1e6 * seconds).astype(int).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="timed optimizer steps of a run")
    parser.add_argument("--anchor-every", type=int, default=10)
    parser.add_argument("--states", nargs="+", choices=STATES[1:], default=list(STATES[1:]))
    third = len(os.sched_getaffinity(0)) > STAGES
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS[:1] if third else LAYOUTS))
    parser.add_argument("--no-result", action="store_true", help="print only")
    options = parser.parse_args()
    rows = [row for layout in options.layouts for row in measure(layout, options)]
    shown = [
        "anchor_share_median",
        "anchor_share_p99",
        "thread_share_p99",
        "median_ratio",
        "p99_ratio",
        "num_live_steps",
    ]
    print_table(rows, ["layout", "anchor_state", *shown])
    if not options.no_result:
        write_result(NAME, rows, seeds=[7])


if __name__ == "__main__":
    main()
