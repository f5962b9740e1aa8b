"""`SpectralCorrection` under transformers' plain Trainer and accelerate: a `create_optimizer` is all it takes."""

from __future__ import annotations

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_meshadapt.spectral.compressor import GradientCompressor
from hf_meshadapt.spectral.config import SpectralConfig
from hf_meshadapt.spectral.optimizer import SpectralCorrection
from tests.equality import COMMON, Rows, collate_fixed, tiny_model

EVERY = 2


class CorrectedTrainer(Trainer):
    spectral = SpectralConfig(matrix_rank=8, refresh_steps=2)

    def create_optimizer(self, *args, **kwargs):
        inner = super().create_optimizer(*args, **kwargs)
        if not isinstance(inner, (SpectralCorrection, AcceleratedOptimizer)):
            self.optimizer = SpectralCorrection(inner, self.model.named_parameters(), self.spectral)
        return self.optimizer


class Anchor(TrainerCallback):
    """Every two steps the gradients of the first weights, so that a resumed run gets the same ones."""

    def __init__(self, config: SpectralConfig):
        self.config = config
        self.metrics = []

    def on_step_begin(self, args, state, control, optimizer, **kwargs):
        step = state.global_step
        if step and step % EVERY == 0 and self.config.rule != "none":
            model = tiny_model("llama", num_layers=2)
            model(**collate_fixed([Rows(8)[i] for i in range(step, step + 2)])).loss.backward()
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            sent = GradientCompressor(self.config).compress(gradients)
            optimizer.optimizer.priors.receive(sent, version=step, step=step - EVERY)

    def on_step_end(self, args, state, control, optimizer, **kwargs):
        self.metrics.append(optimizer.optimizer.metrics())


def run(folder, trainer_class, config: SpectralConfig, resume: str | None = None, **options):
    """Trains 6 steps; returns the model, the callback and the trainer."""
    options = {**COMMON, "max_steps": 6, "eval_strategy": "no", "per_device_train_batch_size": 2, **options}
    args = TrainingArguments(output_dir=str(folder), **options)
    anchor = Anchor(config)
    trainer = trainer_class(
        model=tiny_model("llama", num_layers=2), args=args, train_dataset=Rows(32), data_collator=collate_fixed,
        callbacks=[] if trainer_class is Trainer else [anchor],
    )  # fmt: skip
    trainer.spectral = config
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model, anchor, trainer


def assert_same(one, other) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters()):
        assert torch.equal(a, b), name


def test_rule_none_is_bitwise_plain_trainer(tmp_path):
    plain, _, plain_trainer = run(tmp_path / "plain", Trainer, SpectralConfig(rule="none"))
    model, _, trainer = run(tmp_path / "none", CorrectedTrainer, SpectralConfig(rule="none"))
    assert_same(model, plain)
    assert isinstance(trainer.optimizer, AcceleratedOptimizer)
    logs = [
        [(row.get("loss"), row.get("learning_rate")) for row in t.state.log_history] for t in (trainer, plain_trainer)
    ]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("rule", ["diagonal", "blend"])
def test_priors_are_used_and_a_resumed_run_is_the_uninterrupted_one(tmp_path, rule):
    config = SpectralConfig(rule=rule, matrix_rank=8, refresh_steps=2)
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole, anchor, _ = run(tmp_path, CorrectedTrainer, config, **saving)
    assert [row["weight"] for row in anchor.metrics] == [0, 0, 0, 1, 1, 1]
    assert [row.get("prior_age_steps") for row in anchor.metrics] == [None, None, None, 3, 4, 3]
    in_blocks = sum(parameter.numel() for name, parameter in whole.named_parameters() if "_proj" in name)
    share = in_blocks / sum(parameter.numel() for parameter in whole.parameters())
    assert anchor.metrics[-1]["share_corrected"] == (1 if rule == "blend" else share)
    resumed, again, _ = run(tmp_path, CorrectedTrainer, config, resume=str(tmp_path / "checkpoint-3"), **saving)
    assert_same(resumed, whole)
    assert again.metrics == anchor.metrics[3:]
    untouched, _, _ = run(tmp_path / "none", CorrectedTrainer, SpectralConfig(rule="none"))
    assert not torch.equal(untouched.model.layers[0].mlp.up_proj.weight, whole.model.layers[0].mlp.up_proj.weight)
