"""`EvalCallback`: lm-eval on every checkpoint, beside the run."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..child_process import BackgroundJobs
from ..staging import allowed_seconds, clear_staged, stage
from .harness import EvaluationOptions, require_lm_eval, run_on, write_results


class EvalCallback(TrainerCallback):
    """Evaluates each saved checkpoint in a process of its own while training goes on; at rank 0.

        trainer.add_callback(EvalCallback(["gsm8k_heldout"], limit=50))

    Results go to `evaluation.json` in the checkpoint and in `output_dir`, from there to the model's card, and as
    `lm_eval/<task>/<metric>` to the log history. A checkpoint that comes while another one is evaluated is left out,
    but for the last. At the end of training rank 0 waits for the last evaluation, in a run of several processes at most
    a quarter of `link_timeout_seconds`; the process ends with it.

    Args:
        tasks: see `EvaluationOptions.tasks`.
        options: further fields of `EvaluationOptions`. By default a GPU is used where there is one: the one that rank 0
            trains on, so that both must fit.

    Raises:
        ValueError, NotImplementedError: tasks that cannot be run.
        ImportError: lm-eval is missing.
    """

    def __init__(self, tasks: list[str] | tuple[str, ...], **options):
        self.options = EvaluationOptions(tuple(tasks), **options)
        self.options.resolved()
        require_lm_eval()
        self.jobs = BackgroundJobs("evaluations")
        self._finished: list[tuple[int, dict]] = []

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            clear_staged(Path(args.output_dir), "eval")

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not state.is_world_process_zero or not folder.is_dir():
            return
        if self.jobs.busy and state.global_step < state.max_steps:
            return
        staged, step = stage(folder, "eval"), state.global_step

        def evaluate() -> None:
            try:
                evaluation = run_on(staged, self.options)
            finally:
                shutil.rmtree(staged)
            write_results(Path(args.output_dir), evaluation)
            with contextlib.suppress(FileNotFoundError):  # the checkpoint may have been rotated away
                write_results(folder, evaluation)
            self._finished.append((step, evaluation))

        self.jobs.submit(evaluate, lambda error: f"the evaluation of step {step} failed: {error}")

    def on_log(self, args, state, control, **kwargs):
        self._write_logs(state)

    def on_train_end(self, args, state, control, **kwargs):
        self.jobs.wait(allowed_seconds(args))
        self._write_logs(state)

    def _write_logs(self, state) -> None:
        while self._finished:
            step, evaluation = self._finished.pop(0)
            values = {
                f"lm_eval/{task}/{metric}": entry["value"]
                for task, metrics in evaluation["results"].items()
                for metric, entry in metrics.items()
            }
            state.log_history.append({"step": step, **values})
