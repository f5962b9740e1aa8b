"""Builds this rank's part of the model: loads only what it owns, cuts it and names who owns which parameter."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..boundary.module import BoundaryReceive, BoundarySend
from ..config import BoundaryConfig, MeshConfig
from .adapters import stored_adapter_names
from .layout import ModelLayout, find_layout, parameters_per_layer, prune, untie_head
from .ownership import leftover_claims, leftover_owners, owned_names, saved_names
from .part import holds_part, place_of, refuse_as_whole
from .partition import chunk_spans, split_layers
from .refusals import refuse_unsplittable
from .stage import StageModule

logger = logging.getLogger(__name__)


@dataclass
class ModelParts:
    """This rank's chunks of one model.

    Attributes:
        model: the Hugging Face model, pruned to this rank's parts (whole in the emulated mesh).
        layout: where its parts are.
        spans: the layers of every chunk of the pipeline.
        stages: this rank's chunks by index.
        num_chunks: chunks in the pipeline.
        adapter: the `PeftModel` around `model`, None where the weights themselves are trained.
        adapter_names: of what this rank saves of it, name in an adapter file by name in `model`.
    """

    model: nn.Module
    layout: ModelLayout
    spans: list[range]
    stages: dict[int, StageModule]
    num_chunks: int
    adapter: nn.Module | None = None
    adapter_names: dict[str, str] = field(default_factory=dict)

    @property
    def untied(self) -> bool:
        """Whether head and embedding were tied and now are two copies that must be kept equal."""
        return self.layout.tied and self.num_chunks > 1

    def parameters_of(self, chunk: int) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters of a chunk, in order, the head's copy of a tied embedding left out."""
        stage = self.stages[chunk]
        named = [(name, self._parameter(name)) for name in stage.owned_names]
        copy = self.layout.head_weight if self.untied else None
        return [(name, parameter) for name, parameter in named if parameter.requires_grad and name != copy]

    def tied_copies(self) -> list[nn.Parameter]:
        """This rank's trainable copies of a tied embedding: input side first."""
        names = []
        if self.untied and 0 in self.stages:
            names.append(self.layout.embedding_weight)
        if self.untied and self.num_chunks - 1 in self.stages:
            names.append(self.layout.head_weight)
        return [parameter for name in names if (parameter := self._parameter(name)).requires_grad]

    def freeze_tied(self) -> None:
        """Leaves the matrix that is embedding and head at once as it is.

        Raises:
            ValueError: there is none.
        """
        if not self.layout.tied:
            raise ValueError(
                f"tied_embeddings='freeze' has no effect: embedding and output head of {type(self.model).__name__} are not "
                "one matrix. Leave it unset"
            )
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in (self.layout.embedding_weight, self.layout.head_weight):
                parameter.requires_grad_(False)

    def saved_names(self) -> list[str]:
        """State-dict entries that this rank writes to a checkpoint."""
        if self.adapter is not None:
            return list(self.adapter_names)
        return [name for chunk, stage in self.stages.items() for name in saved_names(stage, chunk, self.num_chunks)]

    def stored_name_of_copy(self) -> dict[str, str]:
        """Maps a tied head's copy to the name under which a checkpoint holds it; an adapter's holds neither."""
        held = self.untied and self.adapter is None and self.num_chunks - 1 in self.stages
        return {self.layout.head_weight: self.layout.embedding_weight} if held else {}

    def take_adapter(self, adapter: nn.Module) -> None:
        """From now on what is saved and loaded is this `PeftModel`'s adapter."""
        owned = [name for stage in self.stages.values() for name in stage.owned_names]
        self.adapter, self.adapter_names = adapter, stored_adapter_names(adapter, owned)

    def named_owned(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters of this rank's chunks."""
        names = [name for stage in self.stages.values() for name in stage.owned_names]
        return [(name, self._parameter(name)) for name in names]

    def named_trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Everything that this rank's optimizer updates."""
        return [(name, parameter) for name, parameter in self.named_owned() if parameter.requires_grad]

    def stored_trainable(self) -> list[tuple[str, nn.Parameter]]:
        """`named_trainable` under the names that a checkpoint has for them: both copies of a tied matrix have one."""
        copies = self.stored_name_of_copy()
        return [(copies.get(name, name), parameter) for name, parameter in self.named_trainable()]

    def num_parameters(self) -> int:
        """Parameters that no other stage counts, embeddings left out, as `PreTrainedModel.num_parameters` leaves them."""
        embeddings = {f"{name}.weight" for name, part in self.model.named_modules() if isinstance(part, nn.Embedding)}
        parameters = dict(self.model.named_parameters())
        names = parameters.keys() & set(self.saved_names()) - embeddings
        return sum(parameters[name].numel() for name in names)

    def _parameter(self, name: str) -> nn.Parameter:
        return self.model.get_parameter(name)


def local_chunks(mesh: MeshConfig, stage: int) -> list[int]:
    """Chunks that a stage runs; all of them in the emulated mesh."""
    return list(range(mesh.num_chunks)) if mesh.emulated else list(range(stage, mesh.num_chunks, mesh.stages))


def plan_spans(model: nn.Module, layout: ModelLayout, mesh: MeshConfig) -> list[range]:
    """The layers of every chunk: as given, or balanced with the head weighed in layers. Works on meta tensors.

    Raises:
        NotImplementedError: the model cannot be cut.
        ValueError: the split does not fit the number of layers.
    """
    refuse_unsplittable(model, layout, mesh.num_chunks)
    per_layer = parameters_per_layer(model, layout)
    head_parameters = model.get_parameter(layout.head_weight).numel() if layout.head else 0
    head_cost = head_parameters / per_layer if per_layer else 0.0
    layers = mesh.layers_per_chunk or split_layers(layout.num_layers, mesh.num_chunks, head_cost)
    return chunk_spans(layers, layout.num_layers)


def cut_model(model: nn.Module, mesh: MeshConfig, stage: int) -> tuple[nn.Module, ModelLayout, list[range]]:
    """Cuts a whole model down to this rank's parts, in place."""
    layout = find_layout(model)
    spans = plan_spans(model, layout, mesh)
    _prune_for(model, layout, spans, mesh, stage)
    if layout.tied and mesh.num_chunks > 1:
        _untie(model, layout, mesh, stage)
    return model, layout, spans


def load_model(
    source: str, whole: nn.Module, mesh: MeshConfig, stage: int, dtype: str
) -> tuple[nn.Module, ModelLayout, list[range]]:
    """Loads this rank's parts of a pretrained causal language model; other stages' weights are never read.

    Args:
        source: Hub id or folder.
        whole: its `outline.outline_model`.
        dtype: `auto`, `float32` or `bfloat16`.
    """
    layout = find_layout(whole)
    spans = plan_spans(whole, layout, mesh)
    model = load_own(source, whole, layout, spans, mesh, stage, dtype)
    if layout.tied and mesh.num_chunks > 1:
        _untie(model, layout, mesh, stage)
    return model, layout, spans


def load_own(
    source: str, whole: nn.Module, layout: ModelLayout, spans: list[range], mesh: MeshConfig, stage: int, dtype: str
) -> nn.Module:
    """Loads a pretrained model, of it only this rank's parts (all where it runs all); a tied head is tied still.

    Args:
        source, dtype: as for `load_model`.
        whole: a model of its class and configuration, with weights or without.
        layout: of the whole model.
        spans: the layers of every chunk.
    """
    dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    model_class = type(whole)
    if not holds_part(mesh):
        return model_class.from_pretrained(source, config=whole.config, dtype=dtype)

    def build_pruned(self, config, *args, **kwargs):
        model_class.__init__(self, config, *args, **kwargs)
        _prune_for(self, layout, spans, mesh, stage)
        # Where one end of a tie was pruned there is nothing to tie, and from_pretrained would look for it.
        held = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        tied = self.all_tied_weights_keys.items()
        self.all_tied_weights_keys = {target: source for target, source in tied if {target, source} <= held}

    # The class keeps its name, which save_pretrained writes into the config. What is pruned is in the file but not
    # in the model, and is no mistake.
    pruned_class = type(
        model_class.__name__,
        (model_class,),
        {
            "__init__": build_pruned,
            "_keys_to_ignore_on_load_unexpected": [r".*"],
            "__module__": model_class.__module__,
        },
    )
    model = pruned_class.from_pretrained(source, config=whole.config, dtype=dtype)
    model.__class__ = model_class
    return model


def _prune_for(model: nn.Module, layout: ModelLayout, spans: list[range], mesh: MeshConfig, stage: int) -> None:
    if holds_part(mesh):
        chunks, place = local_chunks(mesh, stage), place_of(mesh, stage)
        prune(model, layout, [spans[chunk] for chunk in chunks], 0 in chunks, mesh.num_chunks - 1 in chunks, place)
        refuse_as_whole(model)


def _untie(model: nn.Module, layout: ModelLayout, mesh: MeshConfig, stage: int) -> None:
    chunks = local_chunks(mesh, stage)
    if mesh.num_chunks - 1 in chunks:
        untie_head(model, layout, 0 not in chunks, place_of(mesh, stage))


def build_stages(
    model: nn.Module,
    layout: ModelLayout,
    spans: list[range],
    mesh: MeshConfig,
    boundary: BoundaryConfig,
    stage: int,
    share: Callable[[dict], dict],
    autocast: Callable[[], contextlib.AbstractContextManager],
) -> ModelParts:
    """Wraps this rank's chunks, finds the owner of every parameter and freezes what this rank does not own.

    Args:
        share: merges {chunk: names} over the ranks of the pipeline.
    """
    stages = wrap_chunks(model, layout, spans, mesh, boundary, stage, autocast)
    # The order of collectives is the same on all ranks: every one of them shares, even with nothing to claim.
    claims = share(leftover_claims(stages)) if mesh.num_chunks > 1 else {}
    return own_parts(model, layout, spans, stages, claims)


def wrap_chunks(
    model: nn.Module,
    layout: ModelLayout,
    spans: list[range],
    mesh: MeshConfig,
    boundary: BoundaryConfig,
    stage: int,
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> dict[int, StageModule]:
    """This rank's chunks by index, without parameters of their own yet."""
    last = mesh.num_chunks - 1
    stages = {}
    for chunk in local_chunks(mesh, stage):
        receive = BoundaryReceive(boundary, chunk - 1, layout.hidden_size) if chunk > 0 else None
        send = BoundarySend(boundary, chunk, layout.hidden_size) if chunk < last else None
        stages[chunk] = StageModule(model, layout, spans[chunk], receive, send, autocast)
    return stages


def own_parts(
    model: nn.Module,
    layout: ModelLayout,
    spans: list[range],
    stages: dict[int, StageModule],
    claims: dict[int, list[str]],
) -> ModelParts:
    """Gives each chunk its parameters and freezes what this rank does not own.

    Args:
        claims: `leftover_claims` of all chunks of the pipeline; not read where there is only one.
    """
    num_chunks = len(spans)
    leftovers = leftover_owners(model, layout, claims, num_chunks) if num_chunks > 1 else None
    for chunk, module in stages.items():
        names = owned_names(module, chunk, num_chunks, leftovers) if num_chunks > 1 else all_names(model)
        module.to(next(model.parameters()).device)  # its boundaries; parameters are there
        module.own(names)
    owned = {name for module in stages.values() for name in module.owned_names}
    for name, parameter in model.named_parameters():
        if name not in owned:
            # Another stage's final norm or position table: it gets no gradient here, and DDP would wait for one.
            parameter.requires_grad_(False)
    return ModelParts(model, layout, spans, stages, num_chunks)


def all_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]
