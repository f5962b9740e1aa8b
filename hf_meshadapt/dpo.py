"""`MeshAdaptDPOTrainer`: preference training on pairs over a mesh. Needs the extra `trl`.

Source: `DPOTrainer` of trl 1.16 with `precompute_ref_log_probs=True`, whose rows and losses it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from datasets import Dataset

from .arguments import MeshAdaptArguments
from .batches import sound
from .dpo_checks import refuse_arguments, refuse_options
from .extras import how_to_install
from .pipeline.microbatch import pad_rows
from .pipeline.stage import LOSS_INPUT_PREFIX
from .preference import IGNORED, PairLoss, is_pair, log_probabilities
from .trainer import MeshAdaptMixin

try:
    from trl import DPOConfig, DPOTrainer
    from trl.trainer.dpo_trainer import DataCollatorForPreference
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ModuleNotFoundError(f"MeshAdaptDPOTrainer needs trl: {how_to_install('trl')}", name="trl") from error

REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


@dataclass
class MeshAdaptDPOConfig(DPOConfig, MeshAdaptArguments):
    """The fields and defaults of `DPOConfig`, and the mesh's; batch sizes count pairs."""

    precompute_ref_log_probs: bool = field(
        default=True,
        metadata={"help": "Must stay True: the log-probabilities of the reference are computed once, over the mesh."},
    )
    # DPOConfig brings TrainingArguments' own along, which would win over the mesh's.
    ddp_timeout: int | None = field(
        default=None, metadata=MeshAdaptArguments.__dataclass_fields__["ddp_timeout"].metadata
    )

    def __post_init__(self):
        if self.anchor is None:
            self.anchor = False  # not the default of preset=paper
        refuse_options(self)
        super().__post_init__()

    def to_dict(self) -> dict:
        return super().to_dict() | {"pad_token": self.pad_token}  # no secret


class MeshAdaptDPOTrainer(MeshAdaptMixin, DPOTrainer):
    """TRL's DPOTrainer over a pipeline mesh: `prompt`, `chosen` and `rejected`, as text or messages.

    The reference is the model as it is given: its log-probabilities are computed at construction, over the mesh, and kept
    in memory. The loss is taken on the last stage, summed over pairs and divided by the pairs of the optimizer step;
    where all batches are full it is that of DPOTrainer in one process. Rewards and accuracies are not logged: they need the
    last stage's numbers in every step.

    Args:
        model: as for `MeshAdaptTrainer`.
        args: `MeshAdaptDPOConfig`.

    Everything else is as for DPOTrainer, by name.
    """

    stands_in_for = DPOTrainer
    rows_per_example = 2

    def __init__(self, model=None, args: MeshAdaptDPOConfig | None = None, **kwargs):
        if not isinstance(args, MeshAdaptDPOConfig):
            raise ValueError(f"args must be MeshAdaptDPOConfig, not {type(args).__name__}: change that name too")
        refuse_arguments(model, kwargs)
        self._stages_built = False
        super().__init__(model, args, **kwargs)
        self._stages_built = True
        self.data_collator = PairCollator(self.data_collator)
        self.train_dataset = self._precompute_ref_logps(self.train_dataset, "train", 0)
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {
                name: self._precompute_ref_logps(dataset, name, 0) for name, dataset in self.eval_dataset.items()
            }
        elif self.eval_dataset is not None:
            self.eval_dataset = self._precompute_ref_logps(self.eval_dataset, "eval", 0)

    def _loss_function(self) -> PairLoss:
        return PairLoss(tuple(self.loss_types), tuple(self.loss_weights), self.beta)

    def _count_labels(self, labels: torch.Tensor) -> torch.Tensor:
        return is_pair(labels).sum()

    def _precompute_ref_logps(self, dataset, name: str, batch_size: int):
        """The data set with the reference's log-probabilities; TRL asks for them before there are stages to run."""
        if not self._stages_built:
            return dataset
        if not isinstance(dataset, Dataset):
            raise NotImplementedError(
                f"{name}_dataset is a {type(dataset).__name__}: reference log-probabilities are computed before training. "
                "Use a datasets.Dataset, which has all rows"
            )
        values = reference_log_probabilities(self, dataset)
        for column, numbers in zip(REFERENCE_COLUMNS, values.T):
            dataset = dataset.add_column(column, numbers.tolist())
        return dataset


class PairCollator:
    """Pads pairs as TRL does and puts the two answers of each next to each other.

    Args:
        pad: TRL's collator, which returns all preferred answers and then all rejected ones.
    """

    def __init__(self, pad: DataCollatorForPreference):
        self.pad = pad

    def __call__(self, pairs: list[dict]) -> dict[str, torch.Tensor]:
        """Pairs of token ids to `input_ids`, `attention_mask` and `labels` (2 x pairs, T) and, where the pairs have the
        reference's log-probabilities, these as a loss input (2 x pairs,)."""
        batch = self.pad(pairs)
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)
        by_answer = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
        rows = {name: torch.stack(value.chunk(2), dim=1).flatten(0, 1) for name, value in by_answer.items()}
        if REFERENCE_COLUMNS[0] in batch:
            reference = torch.stack([batch[name] for name in REFERENCE_COLUMNS], dim=1)
            rows[f"{LOSS_INPUT_PREFIX}reference"] = reference.flatten()
        return rows


@torch.no_grad()
def reference_log_probabilities(trainer: MeshAdaptDPOTrainer, dataset) -> torch.Tensor:
    """Log-probabilities of both answers of every pair to the model as it is, uncoded, float64 (pairs, 2).

    Replicas take batches in turn. Collective over the mesh; all ranks get the same.
    """
    engine, local = trainer.engine, trainer.engine.local_replicas
    rows = trainer._rows(training=False)
    pairs = rows // trainer.rows_per_example
    found = torch.zeros(len(dataset), 2, dtype=torch.float64)
    for start in range(0, len(dataset), pairs * engine.mesh.replicas):
        first = start + pairs * local[0]
        mine = [dataset[place] for place in range(first, min(first + pairs * len(local), len(dataset)))]
        if not mine:
            continue  # the stages of a replica agree on it
        batch = pad_rows(trainer._prepare_inputs(sound(trainer.data_collator(mine), engine)), rows * len(local))
        outputs = log_probabilities_of(engine, batch, rows)
        if engine.holds_output:
            found[first : first + len(mine)] = outputs.view(-1, 2)[: len(mine)]
    return engine.from_last_stage(engine.sum_over_replicas(found))


def log_probabilities_of(engine, batch: dict, rows: int) -> torch.Tensor:
    """Of a batch's rows, float64 on the CPU; nothing where the last stage is elsewhere."""
    kept: list[torch.Tensor] = []

    def keep(output) -> None:
        first = sum(map(len, kept))
        labels = batch["labels"][first : first + len(output.logits)]
        kept.append(log_probabilities(output.logits, labels).double().cpu())

    engine.eval_batch(batch, rows, keep)
    return torch.cat(kept) if kept else torch.zeros(0, dtype=torch.float64)
