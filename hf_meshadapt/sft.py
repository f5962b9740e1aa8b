"""`MeshAdaptSFTTrainer`: TRL prepares the data, the mesh trains. Needs the extra `trl`.

Source: `SFTTrainer` of trl 1.16, whose rows, labels and losses it keeps.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import torch

from .arguments import MeshAdaptArguments
from .batches import num_real
from .boundary.sequence_coder import PADDING
from .extras import how_to_install
from .pipeline.microbatch import token_kinds
from .sft_checks import refuse_arguments, refuse_options, refuse_packing
from .trainer import MeshAdaptMixin

try:
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ModuleNotFoundError(f"MeshAdaptSFTTrainer needs trl: {how_to_install('trl')}", name="trl") from error


@dataclass
class MeshAdaptSFTConfig(SFTConfig, MeshAdaptArguments):
    """The fields and defaults of `SFTConfig` (bf16 and gradient checkpointing on, learning rate 2e-5), and the mesh's.

    TRL comes first: it decides on bf16 before the mesh chooses its wire dtype.
    """

    # SFTConfig brings TrainingArguments' own along, which would win over the mesh's.
    ddp_timeout: int | None = field(
        default=None, metadata=MeshAdaptArguments.__dataclass_fields__["ddp_timeout"].metadata
    )

    def __post_init__(self):
        refuse_options(self)
        super().__post_init__()

    def to_dict(self) -> dict:
        # As in MeshAdaptArguments: these are no secrets.
        return super().to_dict() | {"eos_token": self.eos_token, "pad_token": self.pad_token}


class MeshAdaptSFTTrainer(MeshAdaptMixin, SFTTrainer):
    """TRL's SFTTrainer over a pipeline mesh: text, `messages` and `prompt` with `completion`, packed or not.

    Losses and weights are those of SFTTrainer in one process. Of what SFTTrainer logs beside them, `num_tokens` is
    logged in training; `entropy` and `mean_token_accuracy` are not, since they need the logits of every step, which only
    the last stage has, nor is `aux_loss`, which is refused.

    Args:
        model: as for `MeshAdaptTrainer`. Given a name, the dtype is `model_dtype`, by default the checkpoint's own, where
            SFTTrainer takes float32.
        args: `MeshAdaptSFTConfig`.

    Everything else is as for SFTTrainer.
    """

    stands_in_for = SFTTrainer

    def __init__(self, model=None, args: MeshAdaptSFTConfig | None = None, *positional, **kwargs):
        if not isinstance(args, MeshAdaptSFTConfig):
            raise ValueError(f"args must be MeshAdaptSFTConfig, not {type(args).__name__}: change that name too")
        names = list(inspect.signature(SFTTrainer.__init__).parameters)[3:]
        refuse_arguments(model, args, {**dict(zip(names, positional)), **kwargs})
        self._num_tokens = 0  # of this process's replicas
        super().__init__(model, args, *positional, **kwargs)
        if self.padding_free:  # TRL's word for packing that keeps sequences apart; it takes no collator but its own
            refuse_packing(self.model, args)
            self.data_collator = PackedCollator(self.data_collator.pad_token_id, args.pad_to_multiple_of)

    def get_batch_samples(self, epoch_iterator, num_batches: int, device):
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._num_tokens += sum(count_tokens(batch) for batch in batches)
        return batches, num_items

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["num_tokens"] = int(self.engine.sum_over_replicas(torch.tensor(self._num_tokens)))
        super().log(logs, start_time)


class PackedCollator:
    """Pads rows of packed sequences, each row by itself, and starts the positions of every sequence at 0.

    TRL makes one row of them all, which could not be cut into microbatches. There is no attention mask: without one
    transformers lets a sequence attend to itself only, as told by the positions.

    Args:
        pad_token_id: what fills rows up.
        pad_to_multiple_of: rows are padded to a multiple of it, None to the longest.
    """

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int | None = None):
        self.pad = DataCollatorForLanguageModeling(
            pad_token_id, return_position_ids=True, pad_to_multiple_of=pad_to_multiple_of
        )

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """Rows with `input_ids`, `labels` and, where packed, `seq_lengths` to tensors (B, T) each."""
        batch = self.pad(rows)
        del batch["attention_mask"]
        batch["labels"][batch["position_ids"] == 0] = -100  # a sequence does not predict the next one's first token
        return batch


def count_tokens(batch: dict) -> int:
    """Tokens of a batch, without padding and repeated rows."""
    return int((token_kinds(batch)[: num_real(batch)] != PADDING).sum())
