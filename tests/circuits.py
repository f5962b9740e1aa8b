"""Both circuits of a training run: fast ranks and, as a launch of its own, their anchor."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from hf_meshadapt.anchor.handshake import SECRET_VARIABLE
from tests.equality import mesh_trainer, tiny_model
from tests.launch import rank_environment
from tests.runs import SaveAt, collect_warnings, fork

ROWS, NUM_ROWS = 4, 21
SECRET = "a secret of the tests"
FAST = dict(
    eval_strategy="no", learning_rate=1e-2, gradient_accumulation_steps=1, link_timeout_seconds=60.0, logging_steps=1
)


def free_ports(count: int) -> int:
    """The first of so many neighbouring free ports."""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError(f"no {count} neighbouring ports are free")


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


def serve(kind: str, folder: Path, options: dict) -> None:
    """The anchor's launch: one process, of another process group, that knows nothing of the fast ranks' launcher."""
    os.setsid()
    for name in rank_environment(0, 1, 0):
        os.environ.pop(name, None)
    os.environ[SECRET_VARIABLE] = SECRET
    torch.set_num_threads(1)
    gc.freeze()
    try:
        trainer = mesh_trainer(tiny_model(kind), ROWS, str(folder), NUM_ROWS, **{**FAST, **options}, circuit="anchor")
        output = trainer.train()
        assert output.global_step == 0 and trainer.evaluate() == {} and trainer.mesh_report() == {}
        trainer.save_model()
        (folder / f"anchor-{os.getpid()}.txt").write_text(str(trainer.anchoring.circuit.num_priors))
    except BaseException:
        (folder / f"anchor-error-{os.getpid()}.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def start_anchor(kind: str, folder: Path, **options) -> multiprocessing.Process:
    folder.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=serve, args=(kind, folder, options))
    process.start()
    return process


@contextmanager
def anchor(kind: str, folder: Path, **options):
    """An anchor that must end by itself, without an error, once the fast circuit has."""
    process = start_anchor(kind, folder, **options)
    try:
        yield process
        process.join(30)
        errors = "\n".join(path.read_text() for path in folder.glob("anchor-error-*.txt"))
        assert process.exitcode == 0, f"exit code {process.exitcode}\n{errors}"
    finally:
        process.kill()
        process.join()


def run_both(folder: Path, num_ranks: int, kind: str, **options) -> list[dict]:
    """Fast ranks with an anchor beside them; their results in rank order."""
    endpoint = f"127.0.0.1:{free_ports(options['pipeline_stages'])}"
    of_run = {name: options[name] for name in ("resume", "save_at", "hook", "dropout") if name in options}
    options = {name: value for name, value in options.items() if name not in of_run} | {"fast_endpoint": endpoint}
    with anchor(kind, folder, **options) as process:
        ranks = fork(train_fast, num_ranks, folder=folder, kind=kind, **of_run, **options)
        # It leads a process group of its own.
        assert process.pid not in {rank[name] for rank in ranks for name in ("pid", "process_group")}
        return ranks
