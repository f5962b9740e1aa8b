"""Faults that make a training step's numbers not finite, planted at one step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import TrainerCallback

STEP = 1  # optimizer steps taken before the fault


class At(TrainerCallback):
    """Calls `act` when the step begins that the fault belongs to."""

    def __init__(self, act: Callable[[], None]):
        self.act = act

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == STEP:
            self.act()


def weight_at(layer: int):
    """A NaN in a layer's weight, where that layer is."""

    def plant(trainer) -> None:
        for name, parameter in trainer.engine.parts.named_trainable():
            if name == f"model.layers.{layer}.mlp.up_proj.weight":
                with torch.no_grad():
                    parameter[0, 0] = torch.nan

    return plant


def gradient_at(layer: int):
    """An infinite gradient of a layer's weight; loss and activations are finite."""

    def plant(trainer) -> None:
        for name, parameter in trainer.engine.parts.named_trainable():
            if name == f"model.layers.{layer}.mlp.up_proj.weight":
                parameter.register_hook(lambda gradient: gradient * torch.inf)

    return plant


def infinite_loss(trainer) -> None:
    """Loss without bound and finite gradients, on replica 0 alone where replicas are processes."""
    last = trainer.engine.parts.stages.get(trainer.engine.mesh.num_chunks - 1)
    if last is not None and trainer.engine.topology.replica == 0:
        loss = last._loss
        last._loss = lambda *given: loss(*given) + torch.inf


# The fault, and what the rank where it is says of it.
FAULTS = {
    "weight of stage 0": (weight_at(0), "model.layers.0.mlp.up_proj.weight was not finite before the step"),
    "weight of stage 1": (weight_at(3), "model.layers.3.mlp.up_proj.weight was not finite before the step"),
    "gradient of stage 0": (gradient_at(0), "in the backward pass is that of model.layers.0.mlp.up_proj.weight"),
    "loss": (infinite_loss, "the loss is inf"),
}


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.engine.parts.named_trainable()}


def run_into(trainer, fault: Callable) -> tuple[str, bool]:
    """Trains until the fault stops it: the error's words, and whether the weights are as they were when it was there."""
    before = {}

    def act() -> None:
        fault(trainer)
        before.update(weights(trainer))

    trainer.add_callback(At(act))
    try:
        trainer.train()
    except FloatingPointError as error:
        after = weights(trainer)
        kept = all(torch.equal(after[name].nan_to_num(), tensor.nan_to_num()) for name, tensor in before.items())
        return str(error), kept and trainer.state.global_step == STEP
    raise AssertionError("the run was not stopped")
