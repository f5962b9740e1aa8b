"""Tiny preference training runs, made the same way for TRL's DPOTrainer and for the mesh."""

from __future__ import annotations

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from hf_meshadapt import MeshAdaptDPOConfig, MeshAdaptDPOTrainer
from tests.equality import COMMON, summary, tiny_model
from tests.sft import Words, tokenizer

# Large steps, so that the reference and the trained model differ.
SHORT = dict(max_steps=3, eval_steps=2, bf16=False, learning_rate=1e-2, lr_scheduler_type="constant", warmup_steps=0)
SIZES = dict(per_device_train_batch_size=4, per_device_eval_batch_size=4)
NUM_PAIRS, NUM_EVAL_PAIRS = 24, 8  # all batches full


def pairs(num_pairs: int, seed: int) -> Dataset:
    words = Words(seed)
    rows = [{"prompt": words(2, 5) + " ", "chosen": words(2, 6), "rejected": words(1, 5)} for _ in range(num_pairs)]
    return Dataset.from_list(rows)


def train_single(folder: str, **options) -> dict:
    """TRL's own trainer in one process."""
    args = DPOConfig(
        output_dir=folder,
        precompute_ref_log_probs=True,
        **{**COMMON, **SHORT, **SIZES, **options},
    )
    trainer = DPOTrainer(
        tiny_model("llama"),
        args=args,
        train_dataset=pairs(NUM_PAIRS, 1),
        eval_dataset=pairs(NUM_EVAL_PAIRS, 2),
        processing_class=tokenizer(),
    )
    trainer.train()
    return summary(trainer, trainer.model.state_dict())


def mesh_trainer(folder: str, model=None, **overrides) -> MeshAdaptDPOTrainer:
    """Two stages: this rank's, or emulated without a launcher.

    Args:
        overrides: of `MeshAdaptDPOConfig`, and `trainer`: a dict of further constructor arguments.
    """
    others = {
        "train_dataset": pairs(NUM_PAIRS, 1),
        "eval_dataset": pairs(NUM_EVAL_PAIRS, 2),
        "processing_class": tokenizer(),
        **overrides.pop("trainer", {}),
    }
    mesh = dict(pipeline_stages=2, preset="dense")
    args = MeshAdaptDPOConfig(output_dir=folder, **{**COMMON, **SHORT, **SIZES, **mesh, **overrides})
    return MeshAdaptDPOTrainer(model or tiny_model("llama"), args, **others)


def mesh_outcome(trainer: MeshAdaptDPOTrainer) -> dict:
    state = trainer.engine.parts.model.state_dict()
    return summary(trainer, {name: state[name] for name in trainer.engine.parts.saved_names()})
