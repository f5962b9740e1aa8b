"""One pass over an evaluation set: mean loss, and where they are the model's predictions and the metrics from them.

Logits appear on the last stage and, whole, never leave its process. What `preprocess_logits_for_metrics` makes of them
goes from the last stages of the other replicas to that of replica 0, the judge: it computes the metrics, of which all
ranks get the same dict.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping

import torch
from transformers.trainer_pt_utils import EvalLoopContainer, nested_concat
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, has_length

from .batches import each_drawn_alike, num_real, sound, source_of, tensors_of, without_repeats
from .engine import MeshEngine
from .pipeline.microbatch import batch_digest, pad_rows
from .trainer_checks import refuse_foreign_loader


def evaluation_loop(
    trainer, dataloader, *, predicts: bool, loss_only: bool, ignore_keys: list[str], prefix: str
) -> tuple[EvalLoopOutput, int]:
    """Runs the data set through the mesh, uncoded. Collective over all ranks.

    Args:
        trainer: the `MeshAdaptTrainer`.
        predicts: as `Trainer.predict` does it: predictions are returned, and labels need not be there.
        loss_only: no predictions, no metrics.
        ignore_keys: entries of the model's output that are left out of the predictions.
        prefix: of the metrics' names.

    Returns:
        Metrics on all ranks; predictions and labels on those that hold them (see `MeshAdaptMixin.predict`). Then the
        number of batches.
    """
    engine = trainer.engine
    refuse_foreign_loader(dataloader, engine, trains=False)
    keeps = not loss_only and "logits" not in ignore_keys
    predictions = Predictions(trainer, predicts) if keeps and engine.holds_output else None
    rounds: list[torch.Tensor] = []
    digest = torch.zeros(2, dtype=torch.long)
    labelled = True
    for batch, labelled, is_last in read(trainer, dataloader, predicts):
        outputs: list[torch.Tensor] = []
        figures = run_batch(trainer, batch, outputs if predictions else None)
        rounds.append(figures)
        digest = digest + batch_digest(batch).cpu()
        if predictions:
            predictions.add(batch, outputs, figures, is_last=is_last, labelled=labelled)
        trainer.control = trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
    if not rounds:
        raise ValueError("the evaluation dataset is empty: there is no loss to average. Give it at least one row")
    engine.agree_on_batches(digest, "in an evaluation")
    sums = engine.from_last_stage(engine.sum_over_replicas(torch.stack(rounds)))
    uses = trainer.compute_metrics is not None or trainer.preprocess_logits_for_metrics is not None
    metrics = shared_metrics(engine, predictions) if keeps and uses else {}
    if labelled:
        metrics["loss"] = mean_loss(sums)
    source = source_of(dataloader)
    output = EvalLoopOutput(
        predictions=predictions and predictions.predictions.get_arrays(),
        label_ids=predictions and predictions.labels.get_arrays(),
        metrics={name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": metrics[name] for name in metrics},
        num_samples=len(source) if has_length(source) else int(sums[:, 2].sum()),
    )
    return output, len(rounds)


def read(trainer, dataloader, predicts: bool) -> Iterator[tuple[dict, bool, bool]]:
    """The loader's batches on their device, with labels; whether the labels are the data set's; whether it is the last."""
    for batch in each_drawn_alike(dataloader, trainer.engine, trainer.args.seed):
        labelled = "labels" in batch or not predicts
        if not labelled and isinstance(batch.get("input_ids"), torch.Tensor):
            batch = {**batch, "labels": torch.full_like(batch["input_ids"], -100)}
        batch = trainer._prepare_inputs(sound(batch, trainer.engine))
        trainer._look_for_short([batch], trainer._rows(training=False) * len(trainer.engine.local_replicas))
        is_last = trainer.accelerator.gradient_state.end_of_dataloader
        yield without_repeats(batch, dataloader, trainer.engine) if is_last else batch, labelled, is_last


def run_batch(trainer, batch: dict, outputs: list[torch.Tensor] | None) -> torch.Tensor:
    """Summed loss (0 where the last chunk is elsewhere), predicted tokens and rows of a batch, (3,) float64.

    Args:
        outputs: takes the logits of every microbatch, in order of rows, where the last chunk is.
    """
    tokens, rows = trainer._count_labels(batch["labels"]), trainer._rows(training=False)
    everyone = rows * len(trainer.engine.local_replicas)
    keep = None if outputs is None else lambda output: outputs.append(output.logits)
    loss = trainer.engine.eval_batch(pad_rows(tensors_of(batch), everyone), rows, keep)
    return torch.tensor([float(loss), float(tokens), num_real(batch)], dtype=torch.float64)


def mean_loss(rounds: torch.Tensor) -> float:
    """Loss as a single-process Trainer with all replicas' rows in one batch reports it: mean over a batch's tokens,
    then over batches, weighed by their rows; batches without a label are left out.

    Args:
        rounds: summed loss, tokens and rows of every batch, (batches, 3).
    """
    loss, tokens, rows = rounds[rounds[:, 1] > 0].T
    return float((loss / tokens * rows).sum() / rows.sum())


def shared_metrics(engine: MeshEngine, predictions: Predictions | None) -> dict:
    """The judge's metrics on all ranks, as JSON gives them back.

    Raises:
        RuntimeError: a function of the person's failed, or returned what is not JSON; on all ranks, so that none waits.
    """
    outcomes = engine.from_last_stages(predictions and predictions.outcome())
    errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
    if errors:
        raise RuntimeError(errors[0]) from (predictions and predictions.failure)
    return outcomes[0]["metrics"]


class Predictions:
    """What the last stage's outputs amount to over a data set.

    Without `preprocess_logits_for_metrics` every last stage keeps its own replica's rows; with it, the judge gets all
    replicas' rows in the order of the data set and the others keep none.
    """

    def __init__(self, trainer, predicts: bool):
        self.engine, self.args, self.compute_metrics = trainer.engine, trainer.args, trainer.compute_metrics
        self.preprocess = trainer.preprocess_logits_for_metrics
        self.predicts = predicts
        containers = (EvalLoopContainer(self.args.eval_do_concat_batches, padding_index=-100) for _ in range(4))
        self.predictions, self.labels, self.inputs, self.losses = containers
        self.metrics: dict | None = None
        self.failure: Exception | None = None
        self._failed_in = ""
        self._num_rounds = 0

    def add(self, batch: dict, outputs: list[torch.Tensor], figures: torch.Tensor, *, is_last: bool, labelled: bool):
        """Takes a batch's logits (rows, T, vocabulary), microbatch by microbatch, and hands on what is made of them."""
        row = {"figures": figures}
        with self._failing("preprocess_logits_for_metrics"):
            if num_real(batch) and self.failure is None:
                row = self._row(batch, outputs, labelled) | row
            flat = dict(flatten(row))
        if self.failure is not None:
            flat = dict(flatten({"figures": figures}))  # the other replicas wait for as many messages
        gathered = self.engine.gather_to_first(flat) if self.preprocess else [flat]
        if self.failure is not None:
            return
        with self._failing("preprocess_logits_for_metrics"):
            # A replica without rows sends its figures only. Replica 0 always has rows, of the same make as the others'.
            rows = [unflatten(row, flat) for flat in gathered if len(flat) > 1]
            if rows:
                self._take(rows, is_last)

    def _row(self, batch: dict, outputs: list[torch.Tensor], labelled: bool) -> dict:
        inputs = {name: value[: num_real(batch)] for name, value in tensors_of(batch).items()}
        logits = torch.cat(outputs)[: num_real(batch)]
        if self.args.bf16:
            logits = logits.float()  # as accelerate makes a model's outputs
        labels = inputs["labels"] if labelled else None
        row = {"predictions": self.preprocess(logits, labels) if self.preprocess else logits}
        if labelled:
            row["labels"] = labels
        if "inputs" in self.args.include_for_metrics:
            # Trainer shows the whole batch to a function that sees one at a time.
            row["inputs"] = inputs if self.args.batch_eval_metrics else inputs["input_ids"]
        return row

    @contextlib.contextmanager
    def _failing(self, function: str) -> Iterator[None]:
        """Keeps the first error of the person's own code, within the context, until all ranks can hear of it."""
        try:
            yield
        except Exception as error:
            if self.failure is None:
                self.failure, self._failed_in = error, function

    def _take(self, rows: list[dict], is_last: bool) -> None:
        joined = {name: concatenated([row[name] for row in rows]) for name in rows[0] if name != "figures"}
        loss, tokens, count = torch.stack([row["figures"] for row in rows]).sum(0)
        joined["losses"] = (loss / tokens).float().repeat(int(count))
        if not self.args.batch_eval_metrics or self.predicts:
            self._store(joined)
        if self.args.batch_eval_metrics and self.compute_metrics is not None and "labels" in joined:
            self._compute(joined, compute_result=is_last)

    def _store(self, joined: dict) -> None:
        for name, container in self._containers().items():
            if name in joined and not (name == "inputs" and self.args.batch_eval_metrics):
                container.add(joined[name])
        self._num_rounds += 1
        every = self.args.eval_accumulation_steps
        if every is not None and self._num_rounds % every == 0:
            for container in self._containers().values():
                container.to_cpu_and_numpy()

    def _containers(self) -> dict[str, EvalLoopContainer]:
        return {name: getattr(self, name) for name in ("predictions", "labels", "inputs", "losses")}

    def _compute(self, joined: dict, **more) -> None:
        wanted = self.args.include_for_metrics
        shown = {"losses": joined["losses"] if "loss" in wanted else None, "inputs": joined.get("inputs")}
        with self._failing("compute_metrics"):
            self.metrics = self.compute_metrics(
                EvalPrediction(joined["predictions"], joined["labels"], **shown), **more
            )

    def outcome(self) -> dict:
        """`{"metrics": ...}`, of the judge alone, or `{"error": ...}`."""
        computes = self.failure is None and self.compute_metrics is not None and self.engine.is_judge
        if computes and not self.args.batch_eval_metrics:
            arrays = {name: container.get_arrays() for name, container in self._containers().items()}
            if arrays["labels"] is not None:
                self._compute(arrays)
        if self.failure is None:
            with self._failing("compute_metrics"):
                return json.loads(json.dumps({"metrics": denumpify_detensorize(self.metrics or {})}))
        where = f" ({self.engine.topology.describe()})" if self.engine.groups else ""
        return {"error": f"{self._failed_in}: {type(self.failure).__name__}: {self.failure}{where}"}


def concatenated(trees: list):
    """Rows of several replicas as one, padded as Trainer pads them."""
    joined, *others = trees
    for tree in others:
        joined = nested_concat(joined, tree, padding_index=-100)
    return joined


def flatten(tree, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dicts, tuples and lists by their path."""
    if isinstance(tree, (Mapping, tuple, list)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from flatten(value, f"{path}/{key}")
    else:
        yield path, torch.as_tensor(tree)


def unflatten(like, flat: dict[str, torch.Tensor], path: str = ""):
    """Inverse of `flatten`, in the shape of another tree."""
    if isinstance(like, Mapping):
        return {key: unflatten(value, flat, f"{path}/{key}") for key, value in like.items()}
    if isinstance(like, (tuple, list)):
        return type(like)(unflatten(value, flat, f"{path}/{index}") for index, value in enumerate(like))
    return flat[path]
