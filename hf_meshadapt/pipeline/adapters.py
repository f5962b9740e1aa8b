"""Adapters of the peft library on the modules of a stage: which are taken, and how they are put on.

peft puts adapters into the model that it wraps, so that cutting that model cuts them with it: every chunk trains the
adapters of its own layers. peft is imported only where an adapter is wanted.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

from ..extras import how_to_install

# Of LoraConfig: what would need more of the model than a stage's own modules, and the reason.
WHOLE_MODEL_FIELDS = {
    "alora_invocation_tokens": "peft finds where it begins from the token ids of a forward that stages do not call",
    "arrow_config": "it routes between several adapters",
    "ensure_weight_tying": "the adapter of embedding and output head would be one, and they are on two stages",
    "layer_replication": "it changes the list of layers that stages are cut from",
    "monteclora_config": "its loss has a further term that stages do not compute",
    "target_parameters": "adapters of single parameters are not tested over stages. Use target_modules",
    "trainable_token_indices": "its tokens are those of embedding and output head, which are on two stages",
}
# Draw numbers on the CPU and look at no weights: a stage makes them as the whole model would.
DRAWN_INITS = (True, False, "gaussian", "orthogonal")


def is_adapted(model) -> bool:
    """Whether this is a `PeftModel`."""
    peft = sys.modules.get("peft")  # whoever has one has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def check_adapters(model, peft_config) -> None:
    """Refuses what cannot be trained over stages, before anything is loaded.

    Args:
        model: a name, a model or a `PeftModel`.
        peft_config: as given to the trainer; None where the model brings its adapters, or has none.

    Raises:
        NotImplementedError: adapters that are not a stage's own; says why.
        ValueError: not a configuration, two of them, or nothing to train.
    """
    if not is_adapted(model) and getattr(model, "peft_config", None) is not None:
        raise NotImplementedError(
            f"{type(model).__name__} with peft_config: adapters that are inside of a model which is no PeftModel "
            "(add_adapter, PeftMixedModel) are not saved as peft reads them. Give the PeftModel of get_peft_model, the "
            "trainer's peft_config, or the merged model (merge_and_unload)"
        )
    if peft_config is not None:
        _check_given(model, peft_config)
    elif is_adapted(model):
        _check_model(model)


def _check_given(model, peft_config) -> None:
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(peft_config, peft.PeftConfig):
        raise ValueError(
            f"peft_config is a {type(peft_config).__name__}: give a LoraConfig of peft ({how_to_install('peft')})"
        )
    if is_adapted(model):
        raise ValueError("peft_config and a PeftModel: the model has adapters already. Give one of the two")
    _check_config(peft_config)
    if isinstance(model, (str, os.PathLike)) and peft_config.init_lora_weights not in DRAWN_INITS:
        raise NotImplementedError(
            f"init_lora_weights={peft_config.init_lora_weights!r} with a model's name: it is made from the weights, of "
            f"which a stage has its own only. Give the loaded model, or one of {', '.join(map(str, DRAWN_INITS))}"
        )


def _check_model(model) -> None:
    names = list(model.peft_config)
    if len(names) != 1:
        raise NotImplementedError(
            f"{type(model).__name__} with {len(names)} adapters ({', '.join(names)}): a checkpoint holds one. Delete the "
            "others (delete_adapter)"
        )
    _check_config(model.peft_config[names[0]])
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise ValueError(f"{type(model).__name__}: its adapter is merged and would not train. Call unmerge_adapter()")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has nothing to train: it was loaded for inference. Load it with is_trainable=True"
        )


def _check_config(config) -> None:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning:
        raise NotImplementedError(
            f"peft_type={kind}: it trains virtual tokens that all layers see, not matrices of single layers, so that no "
            "stage owns it. Use LoraConfig"
        )
    if kind != "LORA":
        raise NotImplementedError(f"peft_type={kind}: not tested over stages, it may share weights. Use LoraConfig")
    for name, reason in WHOLE_MODEL_FIELDS.items():
        if getattr(config, name, None):
            raise NotImplementedError(f"{name}={getattr(config, name)!r} of LoraConfig: {reason}")


def add_adapters(model: nn.Module, config, seed: int) -> nn.Module:
    """`get_peft_model` after `manual_seed(seed)`, other random numbers left as they were; changes the model in place.

    Parts of the model may be on meta: peft draws first values on the CPU, in the order of the modules, whatever device
    they go to. The adapters of parts that are not on meta are then those of the whole model.
    """
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return get_peft_model(model, config)


def stored_adapter_names(adapter: nn.Module, owned: list[str]) -> dict[str, str]:
    """The name that peft gives an entry in `adapter_model.safetensors`, by its name in the wrapped model.

    Args:
        adapter: the `PeftModel`, its model pruned.
        owned: names of the entries that this rank owns; others may be here too, such as another stage's final norm.
    """
    from peft import get_peft_model_state_dict

    state = adapter.state_dict()
    (name,) = adapter.peft_config
    stored = {id(tensor): key for key, tensor in get_peft_model_state_dict(adapter, state, name).items()}
    prefix = next(key for key, module in adapter.named_modules() if module is adapter.get_base_model())
    held = {key: id(state[f"{prefix}.{key}"]) for key in owned}
    return {key: stored[tensor] for key, tensor in held.items() if tensor in stored}
