"""A model of which only the name is known, without its weights: what is counted, checked and cut before any is read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def outline_model(source: str) -> nn.Module:
    """A pretrained causal language model without its weights, on the meta device.

    Args:
        source: Hub id or folder.

    Raises:
        OSError: there is no such model.
        NotImplementedError: it is an adapter, or transformers has no causal language model of its kind.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    folder = Path(source)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise NotImplementedError(
            f"model={source!r}: the folder of an adapter. Load it with AutoPeftModelForCausalLM.from_pretrained(..., "
            "is_trainable=True) and pass the model, or make it part of its model with `meshadapt merge`"
        )
    try:
        config = AutoConfig.from_pretrained(source)
    except OSError as error:
        raise OSError(
            f"model={source!r}: neither a model's folder on this machine, nor could it be had from the Hub. Check the "
            f"name, and what transformers says: {error}"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        raise NotImplementedError(
            f"model={source!r}: {type(config).__name__} belongs to no causal language model. Give one that "
            "AutoModelForCausalLM loads"
        )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
