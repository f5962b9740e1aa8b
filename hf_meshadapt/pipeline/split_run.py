"""Cuts a model into all of its stages in one process and runs them against the whole: what tests and checks compare."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from ..config import BoundaryConfig, MeshConfig
from .assembly import ModelParts, cut_model, own_parts, wrap_chunks
from .microbatch import Batch
from .ownership import leftover_claims


@dataclass
class Outcome:
    """One forward and backward.

    Attributes:
        loss: scalar.
        gradients: by parameter name; None where backward reached a parameter not at all.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


def cut_apart(whole: nn.Module, mesh: MeshConfig) -> list[ModelParts]:
    """What every rank of one pipeline holds, each cut from a copy of its own; nothing is coded at the boundaries.

    Raises:
        NotImplementedError: the model cannot be cut.
    """
    ranks = [0] if mesh.emulated else list(range(mesh.stages))
    cuts = [cut_model(copy.deepcopy(whole), mesh, stage) for stage in ranks]
    wrapped = [wrap_chunks(*cut, mesh, BoundaryConfig(), stage) for stage, cut in zip(ranks, cuts)]
    claims: dict[int, list[str]] = {}
    for stages in wrapped if mesh.num_chunks > 1 else ():
        claims |= leftover_claims(stages)
    return [own_parts(*cut, stages, claims) for cut, stages in zip(cuts, wrapped)]


def run_whole(model: nn.Module, batch: Batch, num_items: torch.Tensor) -> Outcome:
    """Loss and gradients of the unsplit model.

    Args:
        batch: `input_ids`, `labels` and other model inputs, (B, T) each.
        num_items: what the summed token loss is divided by.
    """
    model.zero_grad(set_to_none=True)
    loss = model(**batch, num_items_in_batch=num_items, use_cache=False).loss
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return Outcome(loss.detach(), {name: parameter.grad for name, parameter in named})


def run_parts(ranks: list[ModelParts], batch: Batch, num_items: torch.Tensor) -> Outcome:
    """Loss and gradients of all ranks' chunks, one after the other in one graph; `batch` as for `run_whole`."""
    stages = {chunk: stage for parts in ranks for chunk, stage in parts.stages.items()}
    for parts in ranks:
        parts.model.zero_grad(set_to_none=True)
    inputs = {name: value for name, value in batch.items() if name != "input_ids"}
    passing = (batch["input_ids"],)
    for chunk in sorted(stages):
        passing = stages[chunk](*passing, num_items=num_items, **inputs)
    passing.backward()
    return Outcome(passing.detach(), collect_gradients(ranks))


def collect_gradients(ranks: list[ModelParts]) -> dict[str, torch.Tensor | None]:
    """Gradients of all ranks under the whole model's names; those of a tied embedding's two copies summed, under both.

    Raises:
        AssertionError: two chunks own one parameter.
    """
    gradients: dict[str, torch.Tensor | None] = {}
    for parts in ranks:
        for stage in parts.stages.values():
            for name in stage.owned_names:
                assert name not in gradients, f"{name} is owned twice"
                gradients[name] = parts.model.get_parameter(name).grad
    if ranks[0].untied:
        ends = (ranks[0].layout.embedding_weight, ranks[0].layout.head_weight)
        both = [gradient for name in ends if (gradient := gradients.get(name)) is not None]
        gradients |= dict.fromkeys(ends, sum(both) if both else None)
    return gradients
