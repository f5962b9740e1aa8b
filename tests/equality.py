"""A tiny training run, made the same way for plain Trainer, the emulated and the distributed mesh."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCAB = 97


def tiny_model(kind: str, num_layers: int = 4, seed: int = 0, dropout: float = 0.0):
    """`llama`, `llama_tied` or `gpt2`, deterministic."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=num_layers, n_head=4, n_positions=64, resid_pdrop=dropout,
            embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=kind == "llama_tied", attention_dropout=dropout,
        max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Rows(torch.utils.data.Dataset):
    """Random token rows of different lengths, some labels masked; padded to one length by `collate`."""

    def __init__(self, num_rows: int, seed: int = 1, low: int = 6, high: int = 17):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(num_rows):
            length = int(torch.randint(low, high, (), generator=generator))
            ids = torch.randint(3, VOCAB, (length,), generator=generator)
            masked = int(torch.randint(0, length // 2, (), generator=generator))
            labels = ids.clone()
            labels[:masked] = -100
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows, multiple: int = 8, left: bool = False):
    longest = max(len(row["input_ids"]) for row in rows)
    length = -(-longest // multiple) * multiple
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        missing = length - len(row["input_ids"])
        sides = (missing, 0) if left else (0, missing)
        pad = torch.nn.functional.pad
        batch["input_ids"].append(pad(row["input_ids"], sides, value=0))
        batch["labels"].append(pad(row["labels"], sides, value=-100))
        batch["attention_mask"].append(pad(torch.ones_like(row["input_ids"]), sides, value=0))
    return {name: torch.stack(values) for name, values in batch.items()}


def collate_fixed(rows):
    """Every batch padded to 16: replicas then see one shape, as one process sees it."""
    return collate(rows, multiple=16)


COMMON = dict(
    max_steps=20,
    gradient_accumulation_steps=2,
    learning_rate=2e-5,
    lr_scheduler_type="cosine",
    warmup_steps=3,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=10,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    seed=7,
    dataloader_num_workers=0,
    dataloader_pin_memory=False,
)


def summary(trainer, state: dict[str, torch.Tensor]) -> dict:
    logs = trainer.state.log_history
    return {
        "loss": [log["loss"] for log in logs if "loss" in log],
        "grad_norm": [float(log["grad_norm"]) for log in logs if "grad_norm" in log],
        "eval_loss": [log["eval_loss"] for log in logs if "eval_loss" in log],
        "weights": {name: tensor.detach().clone() for name, tensor in state.items()},
    }


def plain_trainer(model, rows: int, folder: str, num_rows: int = 90, **overrides) -> Trainer:
    """transformers' own Trainer in one process."""
    arguments = {**COMMON, **overrides}
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=rows, per_device_eval_batch_size=rows, **arguments
    )
    return Trainer(
        model=model,
        args=args,
        train_dataset=Rows(num_rows),
        eval_dataset=Rows(22, seed=2),
        data_collator=collate_fixed,
    )


def train_single(kind: str, num_layers: int, rows_per_step: int, folder: str, num_rows: int = 90, **overrides) -> dict:
    """Plain transformers Trainer in one process."""
    trainer = plain_trainer(tiny_model(kind, num_layers), rows_per_step, folder, num_rows, **overrides)
    trainer.train()
    return summary(trainer, trainer.model.state_dict())


def mesh_trainer(model, rows: int, folder: str, num_rows: int = 90, collator=collate_fixed, **overrides):
    """MeshAdaptTrainer on this rank, or emulated without a launcher.

    Args:
        model: an instance, or the folder of one.
        overrides: `MeshAdaptArguments` fields (dense where they do not say otherwise), and `trainer`: a dict of further
            constructor arguments.
    """
    from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer

    options = overrides.pop("trainer", {})
    arguments = {"preset": "dense", **COMMON, **overrides}
    args = MeshAdaptArguments(
        output_dir=folder, per_device_train_batch_size=rows, per_device_eval_batch_size=rows, **arguments
    )
    data = {"train_dataset": Rows(num_rows), "eval_dataset": Rows(22, seed=2), "data_collator": collator}
    return MeshAdaptTrainer(model=model, args=args, **{**data, **options})


def train_mesh(rank: int, kind: str, num_layers: int, rows: int, folder: str, num_rows: int = 90, **overrides) -> dict:
    """Trains with MeshAdaptTrainer on this rank; weights are this rank's own."""
    dropout = overrides.pop("dropout", 0.0)
    resume = overrides.pop("resume", None)
    trainer = mesh_trainer(tiny_model(kind, num_layers, dropout=dropout), rows, folder, num_rows, **overrides)
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.engine.parts.model.state_dict()
    names = trainer.engine.parts.saved_names()
    return summary(trainer, {name: state[name] for name in names})
