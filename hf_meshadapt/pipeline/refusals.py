"""Models whose stages would need more from each other than one hidden state: refused by name, before anything runs.

What is not known here by name, the start-up check of `split_check` finds by running it.
"""

from __future__ import annotations

from torch import nn

from .layout import ModelLayout

# What a model puts out for each layer when its configuration asks for it.
PARTIAL_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")


def refuse_unsplittable(model: nn.Module, layout: ModelLayout, num_chunks: int) -> None:
    """Works on meta tensors.

    Raises:
        NotImplementedError: the model cannot be cut into so many chunks; says why and what to do.
    """
    refuse_partial_outputs(model.config.get_text_config())
    if num_chunks < 2:
        return
    reasons = [*config_reasons(model.config.get_text_config()), *shared_weights(model, layout)]
    if reasons:
        raise NotImplementedError(
            f"{type(model).__name__} cannot be cut into {num_chunks} model chunks: {'; '.join(reasons)}"
        )


def config_reasons(config) -> list[str]:
    """What a configuration asks for that one hidden state cannot carry over a boundary, with the remedy."""
    reasons = []
    if shared := getattr(config, "num_kv_shared_layers", 0):
        reasons.append(
            f"num_kv_shared_layers={shared}: the last {shared} layers read keys and values of earlier layers, which do "
            "not cross a boundary. Use pipeline_stages=1"
        )
    if width := getattr(config, "hidden_size_per_layer_input", 0):
        reasons.append(
            f"hidden_size_per_layer_input={width}: every layer reads an embedding of the tokens of its own, which only "
            "the first stage has. Use pipeline_stages=1"
        )
    if (copies := getattr(config, "altup_num_inputs", 1)) > 1:
        reasons.append(
            f"altup_num_inputs={copies}: {copies} hidden states pass from layer to layer, a boundary carries one. Use "
            "pipeline_stages=1"
        )
    return reasons


def refuse_partial_outputs(config) -> None:
    """Refuses outputs, and the losses made of them, that are of all layers: a stage has only its own."""
    for name in PARTIAL_OUTPUTS:
        if getattr(config, name, False):
            more = "; the auxiliary loss over all routers is then left out (router_aux_loss_coef=0.0 with TRL)"
            raise NotImplementedError(
                f"config.{name}=True: a stage has those of its own layers only. Set it to False on the model's "
                f"config{more if 'router' in name else ''}"
            )


def shared_weights(model: nn.Module, layout: ModelLayout) -> list[str]:
    """A parameter that two layers have in common: stages would train a copy of it each, or count it twice."""
    first: dict[int, str] = {}
    for index, layer in enumerate(model.get_submodule(layout.layers)):
        for name, parameter in layer.named_parameters():
            full = f"{layout.layers}.{index}.{name}"
            if first.setdefault(id(parameter), full) != full:
                return [f"{full} and {first[id(parameter)]} are one weight. Use pipeline_stages=1"]
    return []
