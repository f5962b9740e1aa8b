"""Which parameter belongs to which model chunk, so that every weight is trained, counted and saved exactly once."""

from __future__ import annotations

import torch
from torch import nn

from .layout import ModelLayout
from .stage import StageModule


def leftover_names(model: nn.Module, layout: ModelLayout) -> list[str]:
    """Parameters outside layers, input embedding and head: final norm, position table and the like."""
    prefixes = tuple(f"{name}." for name in (layout.layers, layout.embedding, layout.head) if name)
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return [name for name in names if not name.startswith(prefixes)]


def leftover_claims(stages: dict[int, StageModule]) -> dict[int, list[str]]:
    """The leftover parameters on which each of these chunks' outputs depends, by chunk."""
    return {
        chunk: used_parameters(stage, leftover_names(stage.model, stage.layout)) for chunk, stage in stages.items()
    }


def leftover_owners(
    model: nn.Module, layout: ModelLayout, claims: dict[int, list[str]], num_chunks: int
) -> dict[str, int]:
    """The chunk that owns each leftover parameter: the one whose output depends on it; chunk 0 for the unused.

    Args:
        model: one of the pipeline's models; leftover parameters are on all of them.
        claims: `leftover_claims` of all chunks.

    Raises:
        NotImplementedError: a parameter is used by several chunks; it would drift apart.
    """
    owner: dict[str, int] = {}
    for chunk in range(num_chunks):
        for name in claims[chunk]:
            if name in owner:
                raise NotImplementedError(
                    f"{type(model).__name__} cannot be cut into {num_chunks} chunks: {name} is used by chunk "
                    f"{owner[name]} and by chunk {chunk}. Use pipeline_stages=1"
                )
            owner[name] = chunk
    return {name: owner.get(name, 0) for name in leftover_names(model, layout)}


def owned_names(stage: StageModule, chunk: int, num_chunks: int, leftovers: dict[str, int]) -> list[str]:
    """Names of the chunk's own parameters, in the model's order.

    A tied head counts as owned by the last chunk here, since it is trained there; it is not saved (`saved_names`).
    """
    layout = stage.layout
    prefixes = [f"{layout.layers}.{index}." for index in stage.span]
    if chunk == 0:
        prefixes.append(f"{layout.embedding}.")
    if chunk == num_chunks - 1 and layout.head and not (layout.tied and num_chunks == 1):
        prefixes.append(f"{layout.head}.")
    own = tuple(prefixes)
    names = (name for name, _ in stage.model.named_parameters(remove_duplicate=False))
    return [name for name in names if name.startswith(own) or leftovers.get(name) == chunk]


def saved_names(stage: StageModule, chunk: int, num_chunks: int) -> list[str]:
    """State-dict entries that this chunk writes to a checkpoint: its parameters and persistent buffers, each once."""
    layout = stage.layout
    tied_copy = layout.tied and num_chunks > 1
    names = [name for name in stage.owned_names if not (tied_copy and name == layout.head_weight)]
    layers = tuple(f"{layout.layers}.{index}." for index in stage.span)
    parameters = {name for name, _ in stage.model.named_parameters(remove_duplicate=False)}
    for name in stage.model.state_dict():
        in_layers = name.startswith(f"{layout.layers}.")
        if name not in parameters and (name.startswith(layers) if in_layers else chunk == 0):
            names.append(name)
    return names


def used_parameters(stage: StageModule, names: list[str]) -> list[str]:
    """Which of the model's parameters take part in what leaves the chunk."""
    parameters = dict(stage.model.named_parameters(remove_duplicate=False))
    frozen = [parameters[name] for name in names if not parameters[name].requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        if not names:
            return []
        leaving = stage.probe()
        if not leaving.requires_grad:
            return []
        gradients = torch.autograd.grad(leaving.sum(), [parameters[name] for name in names], allow_unused=True)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    return [name for name, gradient in zip(names, gradients) if gradient is not None]
