"""From what the user gave, a name or a model, to this rank's part of it, once it is known to split and to fit."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ..config import MeshConfig
from ..memory import RankWeights
from .adapters import add_adapters, is_adapted
from .assembly import ModelParts, cut_model, load_model, load_own, plan_spans
from .footprint import outline_weights
from .layout import ModelLayout, fill_in, find_layout
from .outline import outline_model
from .part import holds_part, refuse_as_whole
from .split_check import check_split

# A model with the parts of other stages removed, where its parts are, and the layers of every chunk.
Cut = tuple[nn.Module, ModelLayout, list[range]]


def take_model(
    model,
    dtype: str,
    mesh: MeshConfig,
    stage: int,
    check_memory: Callable[[RankWeights, ModelLayout], None] = lambda weights, layout: None,
    peft_config=None,
    seed: int = 0,
    freeze_tied: bool = False,
) -> tuple[nn.Module, Cut]:
    """Loads (from a name or folder) or cuts in place (a whole model) the part of one stage, if it can be cut at all.

    Args:
        model: a name, a folder, a model or a `PeftModel`.
        dtype: `auto`, `float32` or `bfloat16`; the last two for names only.
        check_memory: is told what this rank will hold, before weights are read or moved; raises if that is too much.
        peft_config: puts adapters on the model.
        seed: of these adapters' first values, which depend neither on the cut nor on how the model is given.
        freeze_tied: what `check_memory` is told counts a matrix that is embedding and head at once as not trained.

    Returns:
        What is trained: the model with the parts of other stages removed, or the `PeftModel` around it. And the cut:
        that model, where its parts are, and the layers of every chunk.

    Raises:
        NotImplementedError: not a Hugging Face causal language model, or one that cannot be cut.
        ValueError: `dtype` is given for a model that has its own.
    """
    named = isinstance(model, (str, os.PathLike))
    adapter = model if is_adapted(model) else None
    whole = outline_model(str(model)) if named else _loaded(model, dtype)
    layout = _layout_with_head(whole)
    check_split(whole, mesh)
    bare = copy.deepcopy(whole) if named and peft_config is not None else whole
    if peft_config is not None:
        # Of a name only the outline, to be counted and cut: what is loaded gets adapters of its own.
        adapter = add_adapters(whole, copy.deepcopy(peft_config) if named else peft_config, seed)
    stored_dtype = _stored_dtype(whole, dtype) if named else None
    check_memory(outline_weights(whole, mesh, stage, stored_dtype, freeze_tied), layout)
    if not named:
        cut = cut_model(whole, mesh, stage)
    elif peft_config is None:
        cut = load_model(str(model), whole, mesh, stage, dtype)
    else:
        spans = plan_spans(whole, find_layout(whole), mesh)
        loaded = load_own(str(model), bare, layout, spans, mesh, stage, dtype)
        fill_in(loaded, bare, layout)  # adapters draw their first values in turn: all must be there to draw
        adapter = add_adapters(loaded, peft_config, seed)
        cut = cut_model(loaded, mesh, stage)
    if adapter is None:
        return cut[0], cut
    if holds_part(mesh):
        refuse_as_whole(adapter)
    return adapter, cut


def read_part(parts: ModelParts, folder: Path, mesh: MeshConfig, stage: int, dtype: torch.dtype) -> dict:
    """What transformers reads for the parts of a rank from a checkpoint of the same model: state_dict on the CPU.

    Args:
        dtype: of the weights.
    """
    name = str(dtype).removeprefix("torch.")
    return load_own(str(folder), parts.model, parts.layout, parts.spans, mesh, stage, name).state_dict()


def _loaded(model, dtype: str) -> nn.Module:
    """The Hugging Face model that was given, or that a `PeftModel` wraps."""
    model = model.get_base_model() if is_adapted(model) else model
    if not hasattr(model, "config"):
        raise NotImplementedError(f"{type(model).__name__} is not a Hugging Face model: it has no config")
    if dtype != "auto":
        raise ValueError(
            f"model_dtype={dtype!r}: has no effect on a model that is loaded already. Give the model's name instead, "
            "or leave model_dtype at auto"
        )
    return model


def _layout_with_head(whole: nn.Module) -> ModelLayout:
    layout = find_layout(whole)
    if layout.head is None:
        raise NotImplementedError(
            f"{type(whole).__name__} has no output head, so no language model's loss: load it with "
            "AutoModelForCausalLM"
        )
    return layout


def _stored_dtype(outline: nn.Module, dtype: str) -> torch.dtype:
    stored = getattr(outline.config, "dtype", None) or torch.float32
    return stored if dtype == "auto" else getattr(torch, dtype)
