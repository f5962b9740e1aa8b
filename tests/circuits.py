"""Both circuits of a training run: fast ranks and, as a launch of its own, their anchor."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from hf_meshadapt.anchor.handshake import SECRET_VARIABLE
from hf_meshadapt.calibration import boundary_state
from hf_meshadapt.cli.circuits import free_ports
from tests.equality import mesh_trainer, tiny_model
from tests.launch import free_port, rank_environment
from tests.runs import SaveAt, collect_warnings, fork

ROWS, NUM_ROWS = 4, 21
SECRET = "a secret of the tests"
FAST = dict(
    eval_strategy="no", learning_rate=1e-2, gradient_accumulation_steps=1, link_timeout_seconds=60.0, logging_steps=1
)


def train_fast(
    rank: int, *, folder: Path, kind: str, resume=None, save_at=(), hook: Callable | None = None, **options
):
    """One rank of the fast circuit, or the emulated mesh with its anchor.

    Args:
        hook: is shown the trainer before it trains.
    """
    os.environ[SECRET_VARIABLE] = SECRET
    dropout, warnings = options.pop("dropout", 0.0), collect_warnings()
    trainer = mesh_trainer(tiny_model(kind, dropout=dropout), ROWS, str(folder), NUM_ROWS, **{**FAST, **options})
    trainer.add_callback(SaveAt(save_at))
    metrics, end_step = [], trainer.anchoring.end_step

    def end() -> None:
        end_step()
        metrics.append(trainer.anchoring.optimizer.metrics())

    trainer.anchoring.end_step = end
    if hook is not None:
        hook(trainer)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    parts = trainer.engine.parts
    state = parts.model.state_dict()
    return {
        "weights": {name: state[name].clone() for name in [*parts.saved_names(), *parts.stored_name_of_copy()]},
        "fits": boundary_state(trainer.engine),
        "metrics": metrics,
        "logs": trainer.state.log_history,
        "report": trainer.mesh_report(),
        "warnings": warnings,
        "pid": os.getpid(),
        "process_group": os.getpgid(0),
    }


def paced(step_seconds: float) -> Callable:
    """A hook: the fast circuit begins when its anchor is there, and takes its time for a step, as real ones do."""

    def hook(trainer) -> None:
        anchoring = trainer.anchoring
        start, end_step = anchoring.start, anchoring.end_step

        def start_and_wait(dataloader) -> None:
            start(dataloader)
            if anchoring.link is not None:
                anchoring.link.wait_until_ready(60)

        def end() -> None:
            end_step()
            time.sleep(step_seconds)

        anchoring.start, anchoring.end_step = start_and_wait, end

    return hook


def serve(kind: str, folder: Path, options: dict, rank: int = 0, num_ranks: int = 1, port: int = 0) -> None:
    """A rank of the anchor's launch, of another process group, that knows nothing of the fast ranks' launcher."""
    os.setsid()
    for name, value in rank_environment(rank, num_ranks, port).items():
        if num_ranks > 1:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    os.environ[SECRET_VARIABLE] = SECRET
    torch.set_num_threads(1)
    gc.freeze()
    try:
        trainer = mesh_trainer(tiny_model(kind), ROWS, str(folder), NUM_ROWS, **{**FAST, **options}, circuit="anchor")
        output = trainer.train()
        assert output.global_step == 0 and trainer.evaluate() == {} and trainer.mesh_report() == {}
        trainer.save_model()
        if rank == 0:
            (folder / f"anchor-{os.getpid()}.txt").write_text(str(trainer.anchoring.circuit.num_priors))
    except BaseException:
        (folder / f"anchor-error-{os.getpid()}.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def start_anchor(kind: str, folder: Path, num_anchors: int = 1, **options) -> list[multiprocessing.Process]:
    """The ranks of an anchor, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    port, processes = free_port(), []
    for rank in range(num_anchors):
        arguments = (kind, folder, options, rank, num_anchors, port)
        processes.append(multiprocessing.get_context("fork").Process(target=serve, args=arguments))
        processes[-1].start()
    return processes


def join_anchor(processes: list[multiprocessing.Process], folder: Path) -> None:
    """Waits for their end, which must be without an error."""
    for process in processes:
        process.join(30)
    errors = "\n".join(path.read_text() for path in folder.glob("anchor-error-*.txt"))
    codes = [process.exitcode for process in processes]
    assert not any(codes) and None not in codes, f"exit codes {codes}\n{errors}"


@contextmanager
def anchor(kind: str, folder: Path, **options):
    """An anchor that must end by itself, without an error, once the fast circuit has."""
    processes = start_anchor(kind, folder, **options)
    try:
        yield processes
        join_anchor(processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_both(folder: Path, num_ranks: int, kind: str, **options) -> list[dict]:
    """Fast ranks with an anchor of `num_anchors` processes (1) beside them; the fast ranks' results in rank order."""
    endpoint = f"127.0.0.1:{free_ports(options['pipeline_stages'])}"
    of_run = {name: options[name] for name in ("resume", "save_at", "hook", "dropout") if name in options}
    num_anchors = options.pop("num_anchors", 1)
    options = {name: value for name, value in options.items() if name not in of_run} | {"fast_endpoint": endpoint}
    with anchor(kind, folder, num_anchors=num_anchors, **options) as processes:
        ranks = fork(train_fast, num_ranks, folder=folder, kind=kind, **of_run, **options)
        # They lead process groups of their own.
        foreign = {rank[name] for rank in ranks for name in ("pid", "process_group")}
        assert not foreign & {process.pid for process in processes}
        return ranks
