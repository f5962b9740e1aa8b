"""The progress bar of a mesh run: loss, speed, traffic and waiting beside the steps."""

from __future__ import annotations

from transformers.trainer_callback import ProgressCallback

# Log key, and how the bar writes it; `figures.Figures.logs` makes all but the loss.
_POSTFIX = {
    "loss": "loss {:.4g}",
    "tokens_per_second": "{:,.0f} tok/s",
    "bytes_per_token": "{:,.0f} B/tok",
    "wait_share": "wait {:.0%}",
    "prior_age_steps": "prior {:.0f} steps old",
}


class MeshProgressCallback(ProgressCallback):
    """transformers' progress bar with the latest mesh figures behind it, on rank 0.

    The line of every log stays as transformers writes it. Figures that a log lacks keep their last value.
    """

    def __init__(self, max_str_len: int = 100):
        super().__init__(max_str_len)
        self._latest: dict[str, float] = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=logs, **kwargs)
        if self.training_bar is None:  # other ranks, and logs outside training
            return
        self._latest.update({key: logs[key] for key in _POSTFIX if key in logs})
        shown = [text.format(self._latest[key]) for key, text in _POSTFIX.items() if key in self._latest]
        self.training_bar.set_postfix_str(", ".join(shown))
