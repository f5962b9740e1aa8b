"""At start-up: is this architecture, cut into stages, still the same model? Found out on a tiny clone, by running it."""

from __future__ import annotations

import copy
import inspect
import logging

import torch
from torch import nn

from ..config import MeshConfig
from ..random_states import random_states_kept
from .layout import find_layout
from .microbatch import Batch
from .refusals import refuse_unsplittable
from .split_run import Outcome, cut_apart, run_parts, run_whole
from .tiny_clone import tiny_clone

logger = logging.getLogger(__name__)

ROWS, LENGTH = 2, 12
MAX_CHUNKS = 3  # a first, a middle and a last one: more add nothing
# Cut or whole, the same operations run on the same values in float32; all that may differ is an order of sums.
LOSS_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 2e-5  # of the gradient's norm
NOISE = 1e-7  # of the norm of all gradients: some are zero but for rounding (the bias of a key projection)
NAMED_DIFFERENCES = 3


def check_split(model: nn.Module, mesh: MeshConfig) -> None:
    """Cuts a tiny clone of the model as the run would and compares loss and gradients with the whole clone.

    Runs on the CPU and leaves random states as they were. Where no tiny clone can be made it warns and lets pass.

    Args:
        model: the whole model; may be on meta.

    Raises:
        NotImplementedError: the model is refused by name, its forward takes no `num_items_in_batch`, or the clone cannot
            be cut or gives other results.
    """
    layout = find_layout(model)
    if layout.head is None:
        return
    refuse_unsplittable(model, layout, mesh.num_chunks)
    _refuse_loss_without_count(model)
    if mesh.num_chunks == 1:
        return
    # Everything runs on the CPU.
    with random_states_kept(), torch.enable_grad():
        chunks = min(mesh.num_chunks, MAX_CHUNKS, layout.num_layers)
        # One layer more than chunks, so that one of them runs two.
        clone = tiny_clone(model, layout, num_layers=chunks + 1)
        if clone is None:
            logger.warning("%s: no tiny clone of it could be made, so its split is not checked", type(model).__name__)
            return
        _check_clone(clone, MeshConfig(stages=chunks, emulated=mesh.emulated))


def _check_clone(clone: nn.Module, mesh: MeshConfig) -> None:
    name = type(clone).__name__
    batch = _batch(clone.config.get_text_config().vocab_size)
    items = (batch["labels"][:, 1:] != -100).sum()
    # Copied before it runs: some models keep tensors of their last pass, which cannot be copied.
    template = copy.deepcopy(clone)
    try:
        whole = run_whole(clone, batch, items)
    except Exception as error:  # the model's own code, on a configuration that nobody asked it to run
        logger.warning("%s: a tiny clone of it does not run (%s), so its split is not checked", name, error)
        return
    if not whole.loss.isfinite():
        logger.warning("%s: a tiny clone of it has no finite loss, so its split is not checked", name)
        return
    ranks = cut_apart(template, mesh)
    try:
        split = run_parts(ranks, batch, items)
    except Exception as error:
        raise NotImplementedError(
            f"{name} cannot be cut into stages: a tiny clone of it runs whole, but not in {mesh.stages} stages "
            f"({type(error).__name__}: {error}). Use pipeline_stages=1"
        ) from error
    found = differences(split, whole)
    if found:
        more = f" and {len(found) - NAMED_DIFFERENCES} more" if len(found) > NAMED_DIFFERENCES else ""
        raise NotImplementedError(
            f"{name} cannot be cut into stages: a tiny clone of it, cut in {mesh.stages}, differs from the whole: "
            f"{'; '.join(found[:NAMED_DIFFERENCES])}{more}. Use pipeline_stages=1"
        )


def differences(split: Outcome, whole: Outcome) -> list[str]:
    """What differs, in words: the loss first, then gradients in the model's order; empty if they agree."""
    found = _loss_difference(split, whole)
    total = sum(g.square().sum().item() for g in whole.gradients.values() if g is not None) ** 0.5
    for name, expected in whole.gradients.items():
        if name not in split.gradients:
            found.append(f"no stage owns {name}")
            continue
        gradient = split.gradients[name]
        norm, other = (0.0 if g is None else g.norm().item() for g in (expected, gradient))
        off = (gradient - expected).norm().item() if norm and other else max(norm, other)
        if not off <= GRADIENT_TOLERANCE * max(norm, other) + NOISE * total:
            found.append(f"gradient of {name} has norm {other:.4g} instead of {norm:.4g}, {off:.2g} apart")
    return found


def _loss_difference(split: Outcome, whole: Outcome) -> list[str]:
    got, expected = split.loss.item(), whole.loss.item()
    if abs(got - expected) <= LOSS_TOLERANCE * abs(expected):
        return []
    return [f"loss {got:.6g} instead of {expected:.6g}"]


def _batch(vocab_size: int) -> Batch:
    """Random tokens; the second row is padded."""
    tokens = torch.randint(2, vocab_size, (ROWS, LENGTH))
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask.bool(), tokens, -100)}


def _refuse_loss_without_count(model: nn.Module) -> None:
    parameters = inspect.signature(model.forward).parameters
    if "num_items_in_batch" not in parameters and all(p.kind != p.VAR_KEYWORD for p in parameters.values()):
        raise NotImplementedError(
            f"{type(model).__name__}: its forward takes no num_items_in_batch, by which the loss is divided. Give it "
            "**kwargs and compute the loss with self.loss_function(..., **kwargs)"
        )
