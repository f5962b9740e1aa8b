"""Where the parts of a Hugging Face causal language model are, whatever they are called, and how to cut them out.

A chunk keeps the model's real forward. Layers that belong elsewhere are replaced by modules that let the hidden state
pass, so rotary tables, causal and sliding masks and per-layer types are computed by the model's own code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ModelLayout:
    """Dotted names of a model's parts.

    Attributes:
        layers: the ModuleList of decoder layers.
        embedding: the input embedding.
        head: the output head, None if the model has none.
        num_layers: decoder layers in the whole model.
        tied: input embedding and output head are one matrix.
        hidden_size: width of the hidden state between layers.
        embedding_size: width of the input embedding; another one where the model projects it (OPT-350m).
        embedding_weight, head_weight: the matrices' own names, within an adapter where one wraps them; the latter is
            None without a head.
        num_positions: tokens that a learned position table has entries for, None without one.
    """

    layers: str
    embedding: str
    head: str | None
    num_layers: int
    tied: bool
    hidden_size: int
    vocab_size: int
    embedding_size: int
    embedding_weight: str
    head_weight: str | None
    num_positions: int | None = None


class ForeignLayer(nn.Module):
    """Stands where another chunk's layer is and lets the hidden state pass.

    Plain attributes of the replaced layer (attention type, layer index) are kept, since base models read them.
    """

    def __init__(self, replaced: nn.Module | None = None, returns_tuple: bool = False):
        super().__init__()
        self.returns_tuple = returns_tuple
        for name, value in vars(replaced).items() if replaced is not None else ():
            if not name.startswith("_") and isinstance(value, (str, int, float, bool, type(None))):
                self.__dict__.setdefault(name, value)

    def forward(self, *args, **kwargs):
        hidden = self.passed(args[0] if args else kwargs["hidden_states"])
        return (hidden,) if self.returns_tuple else hidden

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class AbsentLayer(ForeignLayer):
    """Rests where another rank's layer was. No chunk's view has it, so that only a call of the model itself arrives here.

    Args:
        place: names the rank's stage.
    """

    def __init__(self, replaced: nn.Module, place: str):
        super().__init__(replaced)
        self._place = place

    def forward(self, *args, **kwargs):
        raise NotImplementedError(forward_refusal(self._place))


class ForeignMatrix(nn.Identity):
    """Stands where another chunk's input embedding or output head is.

    It has an empty `weight`, since some models (Mamba) cast the hidden state to its dtype.
    """

    def __init__(self, replaced: nn.Module):
        super().__init__()
        weight = replaced.weight
        # What stood in on meta for another stage's matrix must not leave a tensor there.
        device = "cpu" if weight.is_meta else weight.device
        self.register_buffer("weight", torch.empty(0, dtype=weight.dtype, device=device), persistent=False)


class AbsentEmbedding(ForeignMatrix):
    """Rests where the input embedding was; chunks after the first begin with a hidden state and never call it."""

    def __init__(self, replaced: nn.Module, place: str):
        super().__init__(replaced)
        self._place = place

    def forward(self, *args, **kwargs):
        raise NotImplementedError(forward_refusal(self._place))


def forward_refusal(place: str) -> str:
    """What calling the model of a rank, and not its stages, is answered."""
    return (
        f"a forward of the model on {place}: the model of a rank is a part of the whole. Call trainer.evaluate() or "
        "trainer.predict() on all ranks, or save it by trainer.save_model() on all ranks and load it with "
        "AutoModelForCausalLM.from_pretrained"
    )


def _replace_matrix(model: nn.Module, name: str) -> None:
    model.set_submodule(name, ForeignMatrix(model.get_submodule(name)))


def _replace_embedding(model: nn.Module, name: str, place: str) -> None:
    model.set_submodule(name, AbsentEmbedding(model.get_submodule(name), place))


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _weight_name(model: nn.Module, module: nn.Module) -> str:
    """The name of the parameter that is the module's `weight`: further down where an adapter wraps a matrix."""
    prefix, weight = _name_of(model, module), getattr(module, "weight", None)
    names = (name for name, parameter in module.named_parameters(remove_duplicate=False) if parameter is weight)
    return f"{prefix}.{next(names, 'weight')}"


def find_layout(model: nn.Module) -> ModelLayout:
    """Finds the parts by structure, not by architecture name.

    Raises:
        NotImplementedError: the model has no single list of decoder layers, or no input embedding.
    """
    config = model.config.get_text_config()
    num_layers = getattr(config, "num_hidden_layers", None)
    # Shallowest first: a mixture of experts holds lists of the same length deeper down.
    lists = sorted(
        (name.count("."), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    )
    if not lists or (len(lists) > 1 and lists[0][0] == lists[1][0]):
        found = ", ".join(name for _, name in lists) or "none"
        raise NotImplementedError(
            f"{type(model).__name__} cannot be cut into stages: expected one list of {num_layers or 'as many'} "
            f"decoder layers{'' if num_layers else ' as config.num_hidden_layers says'}, found {found}"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(embedding, "weight", None) is None:
        raise NotImplementedError(f"{type(model).__name__} cannot be cut into stages: it names no input embedding")
    head_weight = getattr(head, "weight", None)
    return ModelLayout(
        layers=lists[0][1],
        embedding=_name_of(model, embedding),
        head=_name_of(model, head) if head is not None else None,
        num_layers=num_layers,
        tied=head_weight is not None and head_weight is embedding.weight,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        embedding_size=embedding.weight.shape[-1],
        embedding_weight=_weight_name(model, embedding),
        head_weight=_weight_name(model, head) if head is not None else None,
        num_positions=_learned_positions(model, embedding),
    )


def _learned_positions(model: nn.Module, embedding: nn.Module) -> int | None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not embedding)
    # Some keep rows before the first (OPT: two).
    return positions if any(table.num_embeddings in (positions, (positions or 0) + 2) for table in tables) else None


def parameters_per_layer(model: nn.Module, layout: ModelLayout) -> float:
    """Mean number of parameters that one token meets in a decoder layer; works on meta tensors.

    Of the experts of a mixture, which transformers keeps as one (experts, ., .) tensor, these are the chosen few.
    """
    config = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((number for name in names if (number := getattr(config, name, None))), None)
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    total = 0.0
    for parameter in model.get_submodule(layout.layers).parameters():
        of_experts = experts and parameter.ndim == 3 and parameter.shape[0] == experts
        total += parameter.numel() * (chosen / experts if of_experts else 1)
    return total / max(1, layout.num_layers)


def prune(
    model: nn.Module, layout: ModelLayout, spans: list[range], is_first: bool, is_last: bool, place: str = "a stage"
) -> None:
    """Removes in place what belongs to other ranks: foreign layers, input embedding, output head.

    A tied embedding stays on the last stage until `untie_head` has given the head its own copy.

    Args:
        place: names the stage to whoever calls what is left as if it were the whole.
    """
    local = {index for span in spans for index in span}
    layers = model.get_submodule(layout.layers)
    for index in range(layout.num_layers):
        if index not in local:
            layers[index] = AbsentLayer(layers[index], place)
    if not is_first and not (is_last and layout.tied):
        _replace_embedding(model, layout.embedding, place)
    if not is_last and layout.head is not None:
        _replace_matrix(model, layout.head)


def fill_in(model: nn.Module, outline: nn.Module, layout: ModelLayout) -> None:
    """Puts an outline's parts where `prune` took a model's own away, so that it looks whole again; in place.

    Args:
        outline: the whole model on meta; its parts are handed over.
        layout: of the outline.
    """
    layers, outlined = model.get_submodule(layout.layers), outline.get_submodule(layout.layers)
    for index, layer in enumerate(layers):
        if isinstance(layer, ForeignLayer):
            layers[index] = outlined[index]
    for name in (layout.embedding, layout.head):
        if isinstance(model.get_submodule(name), ForeignMatrix):
            model.set_submodule(name, outline.get_submodule(name))
    if layout.tied:
        model.get_submodule(layout.head).weight = model.get_submodule(layout.embedding).weight


def untie_head(model: nn.Module, layout: ModelLayout, drop_embedding: bool, place: str = "a stage") -> None:
    """Gives the output head a weight of its own with the same values.

    The two copies are kept equal by summing their gradients: on a mesh they live on the two ends of the pipeline, and
    the emulated mesh holds both so that it accumulates gradients in the same order.
    """
    holder = model.get_submodule(layout.head_weight.rpartition(".")[0])
    tied = holder.weight
    holder.weight = nn.Parameter(tied.detach().clone(), requires_grad=tied.requires_grad)
    if drop_embedding:
        _replace_embedding(model, layout.embedding, place)
