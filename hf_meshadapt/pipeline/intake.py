"""From what the user gave, a name or a model, to this rank's part of it, once it is known to split and to fit."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from ..config import MeshConfig
from ..memory import RankWeights
from .assembly import cut_model, load_model, outline_model
from .footprint import outline_weights
from .layout import ModelLayout, find_layout
from .split_check import check_split


def take_model(
    model,
    dtype: str,
    mesh: MeshConfig,
    stage: int,
    check_memory: Callable[[RankWeights, ModelLayout], None] = lambda weights, layout: None,
) -> tuple[nn.Module, ModelLayout, list[range]]:
    """Loads (from a name or folder) or cuts in place (a whole model) the part of one stage, if it can be cut at all.

    Args:
        dtype: `auto`, `float32` or `bfloat16`; the last two for names only.
        check_memory: is told what this rank will hold, before weights are read or moved; raises if that is too much.

    Returns:
        The model with the parts of other stages removed, where its parts are, and the layers of every chunk.

    Raises:
        NotImplementedError: not a Hugging Face causal language model, or one that cannot be cut.
        ValueError: `dtype` is given for a model that has its own.
    """
    named = isinstance(model, (str, os.PathLike))
    if not named and not hasattr(model, "config"):
        raise NotImplementedError(f"{type(model).__name__} is not a Hugging Face model: it has no config")
    if not named and dtype != "auto":
        raise ValueError(
            f"model_dtype={dtype!r}: has no effect on a model that is loaded already. Give the model's name instead, "
            "or leave model_dtype at auto"
        )
    whole = outline_model(str(model)) if named else model
    layout = find_layout(whole)
    if layout.head is None:
        raise NotImplementedError(
            f"{type(whole).__name__} has no output head, so no language model's loss: load it with "
            "AutoModelForCausalLM"
        )
    check_split(whole, mesh)
    check_memory(outline_weights(whole, mesh, stage, _stored_dtype(whole, dtype) if named else None), layout)
    return load_model(str(model), whole, mesh, stage, dtype) if named else cut_model(model, mesh, stage)


def _stored_dtype(outline: nn.Module, dtype: str) -> torch.dtype:
    stored = getattr(outline.config, "dtype", None) or torch.float32
    return stored if dtype == "auto" else getattr(torch, dtype)
