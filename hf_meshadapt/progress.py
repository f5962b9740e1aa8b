"""What a mesh run shows while it trains: a progress bar with loss, speed, traffic and waiting, and news of its anchor."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

# Log key, and how the bar writes it; `figures.Figures.logs` makes all but the loss.
_POSTFIX = {
    "loss": "loss {:.4g}",
    "tokens_per_second": "{:,.0f} tok/s",
    "bytes_per_token": "{:,.0f} B/tok",
    "wait_share": "wait {:.0%}",
}


def show_progress(trainer) -> None:
    """Puts the mesh's progress bar in the place of transformers', and news of the anchor beside whatever shows progress."""
    phase, status = (lambda: trainer.anchoring.phase()), (lambda: trainer.anchoring.status())
    tells_news = trainer.args.anchor and _shows_lines(trainer)
    if any(type(callback) is ProgressCallback for callback in trainer.callback_handler.callbacks):
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(MeshProgressCallback(status))
    if tells_news:
        trainer.add_callback(AnchorNews(phase, status))


def tell(trainer, text: str) -> None:
    """Writes a line to stdout, at rank 0 and above a progress bar, where anything shows progress and `log_level` is no
    higher than a warning."""
    if trainer.is_world_process_zero() and _shows_lines(trainer):
        tqdm.write(text)


def _shows_lines(trainer) -> bool:
    shown = {type(callback) for callback in trainer.callback_handler.callbacks}
    shows_progress = shown & {ProgressCallback, MeshProgressCallback, PrinterCallback}
    return bool(shows_progress) and trainer.args.get_process_log_level() <= logging.WARNING


class MeshProgressCallback(ProgressCallback):
    """transformers' progress bar with the latest mesh figures behind it, on rank 0.

    The line of every log stays as transformers writes it. Figures that a log lacks keep their last value.

    Args:
        status: says how it goes with the anchor; empty without one.
    """

    def __init__(self, status: Callable[[], str] = str, max_str_len: int = 100):
        super().__init__(max_str_len)
        self.status = status
        self._latest: dict[str, float] = {}

    def on_step_end(self, args, state, control, **kwargs):
        if self.training_bar is not None and self.status():  # other figures come with the logs
            self._show()
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=logs, **kwargs)
        if self.training_bar is None:  # other ranks, and logs outside training
            return
        self._latest.update({key: logs[key] for key in _POSTFIX if key in logs})
        self._show()

    def _show(self) -> None:
        shown = [text.format(self._latest[key]) for key, text in _POSTFIX.items() if key in self._latest]
        self.training_bar.set_postfix_str(", ".join([*shown, *filter(None, [self.status()])]))


class AnchorNews(TrainerCallback):
    """Writes a line, at rank 0, whenever it goes otherwise with the anchor than before, whatever `logging_steps` is.

    Args:
        phase: in words that change seldom.
        status: with the prior's version and age.
        write: takes a line; by default it goes to stdout, above a progress bar.
    """

    def __init__(self, phase: Callable[[], str], status: Callable[[], str], write: Callable[[str], None] = tqdm.write):
        self.phase, self.status, self.write = phase, status, write
        self._phase = ""

    def on_train_begin(self, args, state, control, **kwargs):
        self._phase = ""

    def on_step_end(self, args, state, control, **kwargs):
        phase = self.phase() if state.is_world_process_zero else self._phase
        if phase == self._phase:
            return
        self._phase, status = phase, self.status()
        self.write(f"step {state.global_step}: {phase}" + (f" ({status})" if status != phase else ""))
