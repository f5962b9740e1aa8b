"""Trainer's evaluation methods over a mesh: uncoded, on all ranks, with one result for all of them."""

from __future__ import annotations

import torch
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from .evaluation_loop import evaluation_loop
from .reports import speed_of


class EvaluationMixin:
    """Base of `MeshAdaptMixin`."""

    _evaluated: tuple[str, int] | None = None  # prefix and batches of the last one, until timed

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        """As Trainer's; call it on all ranks. The anchor circuit evaluates nothing and returns no metrics."""
        if self.args.runs_anchor:
            return {}
        self._call_roll("evaluate()")
        return super().evaluate(*args, **kwargs)

    @torch.no_grad()
    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        """Uncoded; the same metrics on all ranks, see `evaluation_loop.evaluation_loop`."""
        if ignore_keys is None:
            ignore_keys = getattr(self.model.config, "keys_to_ignore_at_inference", [])
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.callback_handler.eval_dataloader = dataloader
        with self.engine.ledger.apart(), self.engine.outer_weights():
            output, num_batches = evaluation_loop(
                self,
                dataloader,
                predicts=description == "Prediction",
                loss_only=self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only,
                ignore_keys=ignore_keys,
                prefix=metric_key_prefix,
            )
        self._evaluated = (metric_key_prefix, num_batches)
        return output

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix: str = "test") -> PredictionOutput:
        """As Trainer's; call it on all ranks. Metrics are returned on all of them, predictions where they are.

        With `preprocess_logits_for_metrics` that is the last stage of replica 0, which then has those of the whole data
        set, in order. Without it every last stage returns those of its own replica's rows: logits do not travel. On the
        other ranks `predictions` and `label_ids` are None. In the emulated mesh the one process returns everything.
        """
        if self.args.runs_anchor:
            raise NotImplementedError("predict() in the anchor circuit: its weights are copies. Use the fast circuit")
        self._call_roll("predict()")
        output = super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)
        self._agree_on_speed(output.metrics)
        return output

    def _call_roll(self, call: str) -> None:
        # Training brings all ranks to the same calls; a script may leave one out on some.
        if not self.is_in_train:
            self.engine.roll_call(call)

    def _agree_on_speed(self, metrics: dict) -> None:
        # Every rank has timed the evaluation by a clock of its own; nobody must decide by different figures.
        if self._evaluated is not None:
            metrics.update(self.engine.from_judge(speed_of(metrics, *self._evaluated)))
            self._evaluated = None
