"""Tiny models with adapters, and what peft itself makes of them."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.equality import mesh_trainer, plain_trainer, summary, tiny_model

SEED = 7  # of COMMON
# Large enough steps for adapters to move.
RUN = dict(max_steps=10, learning_rate=1e-3, eval_steps=10, num_rows=45)


def lora(**options) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **options})


def adapted_model(kind: str, num_layers: int = 4, **options) -> PeftModel:
    """A `PeftModel` whose adapters do something from the start: in a fresh one B is zero, and A gets no gradient."""
    model = get_peft_model(tiny_model(kind, num_layers), lora(**options))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return model


def train_plain(model, rows: int, folder: Path, num_rows: int = 90, **overrides) -> dict:
    """transformers' own Trainer in one process; also saves the adapter to `folder / "saved"`."""
    trainer = plain_trainer(model, rows, str(folder), num_rows, **overrides)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    return summary(trainer, trained_weights(model.get_base_model()))


def train_over_mesh(rank: int, *, model, rows: int, folder: Path, **options) -> dict:
    """MeshAdaptTrainer on this rank; the adapter goes to `folder / "saved"`.

    Args:
        model: a model, a name, or a function that makes one on this rank.
    """
    resume = options.pop("resume", None)
    model = model() if callable(model) and not isinstance(model, torch.nn.Module) else model
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="peft")
        trainer = mesh_trainer(model, rows, str(folder), **options)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(folder / "saved"))
    parts = trainer.engine.parts
    return summary(trainer, trained_weights(parts.model)) | {"names": parts.adapter_names}


def trained_weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}
