"""How large a rank's part of a model is, found out without memory: on meta tensors, and on fake ones that run.

A fake tensor has shape, dtype and device but no data. Running a chunk's own forward and backward on fakes, and
counting the storages that live, gives the bytes that the same passes allocate on the device, whatever the
architecture, attention kernel or autocast.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..boundary.module import wire_tensors
from ..config import BoundaryConfig, DataParallelConfig, MeshConfig
from ..memory import ChunkFootprint, RankWeights, check_fits, parts, resident_plan, table_bytes
from .assembly import ModelParts, cut_model, local_chunks, own_parts, plan_spans, wrap_chunks
from .layout import ModelLayout, find_layout
from .ownership import leftover_claims, leftover_names
from .stage import StageModule
from .torch_internals import fake_mode

logger = logging.getLogger(__name__)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are alive, and the most there were; what `known` holds is not counted."""

    def __init__(self, known: list[torch.Tensor]):
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for leaf in tree_iter(output):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return
        self._sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def take_peak(self) -> int:
        """Most bytes since the last call."""
        peak, self.peak = self.peak, self.live
        return peak


def device_memory(device: torch.device) -> tuple[int, int | None]:
    """Bytes of a rank's device and how many are free; on the CPU its share of the machine's, without the latter."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_here, None


def check_resident(
    weights: RankWeights,
    layout: ModelLayout,
    mesh: MeshConfig,
    boundary: BoundaryConfig,
    stage: int,
    optimizer: str,
    device: torch.device,
    where: str,
    sync: DataParallelConfig,
) -> None:
    """Refuses what a rank will hold, activations apart, if its device is smaller.

    Args:
        where: names the rank in messages.

    Raises:
        ValueError: with the figures.
    """
    ends = sum((chunk > 0) + (chunk < mesh.num_chunks - 1) for chunk in local_chunks(mesh, stage))
    # Token features are sized when they are made; without them this is still a lower bound.
    tables = table_bytes(boundary, layout.hidden_size, layout.vocab_size, features=0, ends=ends)
    plan = resident_plan(weights, mesh, optimizer, tables, sync)
    logger.info("%s will hold %s, and activations", where, parts(plan))
    check_fits(plan, *device_memory(device), where)


def outline_weights(
    whole: nn.Module, mesh: MeshConfig, stage: int, dtype: torch.dtype | None = None, freeze_tied: bool = False
) -> RankWeights:
    """What a rank will hold of a model, before anything is loaded or cut.

    Args:
        whole: the whole model; may be on meta.
        dtype: of the weights; by default each as it is.
        freeze_tied: a matrix that is embedding and head at once will not be trained.
    """
    layout = find_layout(whole)
    spans, chunks = plan_spans(whole, layout, mesh), local_chunks(mesh, stage)
    prefixes = [f"{layout.layers}.{index}." for chunk in chunks for index in spans[chunk]]
    ends = [f"{layout.embedding}."] if 0 in chunks else []
    ends += [f"{layout.head}."] if mesh.num_chunks - 1 in chunks and layout.head else []
    leftovers = set(leftover_names(whole, layout))
    frozen = {layout.embedding_weight, layout.head_weight} if freeze_tied and layout.tied else set()
    held, own = tuple(prefixes + ends), []
    seen: set[int] = set()
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        # Only over several chunks a tied matrix is held twice.
        if (name.startswith(held) or name in leftovers) and (mesh.num_chunks > 1 or id(parameter) not in seen):
            seen.add(id(parameter))
            size = parameter.numel() * (dtype or parameter.dtype).itemsize
            own.append((size, parameter.requires_grad and name not in frozen))
    trainable = [size for size, trained in own if trained]
    buffers = sum(b.numel() * b.element_size() for n, b in whole.named_buffers() if not n.startswith(layout.layers))
    return RankWeights(sum(size for size, _ in own) + buffers, sum(trainable), max(trainable, default=0))


def rank_footprint(
    whole: nn.Module,
    mesh: MeshConfig,
    stage: int,
    rows: int,
    length: int,
    *,
    dtype: torch.dtype = torch.float32,
    wire_dtype: str = "float32",
    device: str = "cpu",
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> tuple[RankWeights, dict[int, ChunkFootprint]]:
    """What a rank of a pipeline, or the only rank, holds of a model, and what its chunks' passes take, nothing coded.

    Args:
        whole: the whole model, or its outline on meta; left as it is.
        rows: of a microbatch.
        length: padded tokens per row.
        dtype: of the weights.
        device: whose kernels are to be counted.

    Raises:
        NotImplementedError: an emulated mesh of several chunks, or a model whose code reads tensors' values.
    """
    if mesh.emulated and mesh.num_chunks > 1:
        raise NotImplementedError("the emulated mesh holds the whole model and saves no memory: plan it as one stage")
    boundary = BoundaryConfig(wire_dtype=wire_dtype)
    try:
        with fake_mode(), torch.device(device):
            model = _fake(whole, dtype)
            for name, parameter in whole.named_parameters():
                model.get_parameter(name).requires_grad_(parameter.requires_grad)
            cut = cut_model(model.train(), mesh, stage)
            stages = wrap_chunks(*cut, mesh, boundary, stage, autocast)
            # Other ranks' claims are not known here: what is left over and unclaimed counts for chunk 0.
            claims = {chunk: [] for chunk in range(mesh.num_chunks)}
            parts = own_parts(*cut, stages, claims | (leftover_claims(stages) if mesh.num_chunks > 1 else {}))
            chunks = {c: _run_chunk(parts, module, boundary, rows, length) for c, module in stages.items()}
            return _weights(parts), chunks
    except RuntimeError as error:  # also what fake tensors raise when their data is asked for
        raise NotImplementedError(
            f"{type(whole).__name__}: its passes cannot be planned without data ({type(error).__name__}: {error})"
        ) from error


def _fake(whole: nn.Module, dtype: torch.dtype) -> nn.Module:
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)  # fake parameters cannot be converted in place
        return type(whole)(copy.deepcopy(whole.config))
    finally:
        torch.set_default_dtype(default)


def _weights(parts: ModelParts) -> RankWeights:
    tensors = [*parts.model.parameters(), *parts.model.buffers()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    trainable = [p.numel() * p.element_size() for _, p in parts.named_trainable()]
    return RankWeights(sum(storages.values()), sum(trainable), max(trainable, default=0))


def _run_chunk(
    parts: ModelParts, stage: StageModule, boundary: BoundaryConfig, rows: int, length: int
) -> ChunkFootprint:
    """Two microbatches: the first makes the gradients, the second finds them there."""
    tokens = torch.zeros(rows, length, dtype=torch.long)
    inputs = {"attention_mask": torch.ones_like(tokens), "labels": tokens, "num_items": torch.ones(())}
    wire = wire_tensors(boundary, parts.layout.hidden_size, rows, length, False, tokens.device.type)
    known = [tokens, *inputs.values(), *wire, *parts.model.parameters(), *parts.model.buffers()]
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    live = LiveBytes(known)
    peaks = []
    with live:
        for _ in range(2):
            start = live.live
            live.take_peak()
            arriving = (tokens,) if stage.is_first else tuple(t.detach().requires_grad_() for t in wire)
            output = stage(*arriving, **inputs)
            held, forward = live.live - start, live.take_peak() - start
            leaving = output if stage.is_last else output[0]
            torch.autograd.backward(leaving, None if stage.is_last else torch.empty_like(leaving))
            peaks.append(live.take_peak() - start)
            sent = [0 if stage.is_last else _bytes(leaving), 0 if stage.is_first else _bytes(arriving[0])]
            del output, leaving, arriving
    gradients = sum(_bytes(parameter) for parameter in trained)
    return ChunkFootprint(held, forward, peaks[0], peaks[1], *sent, gradients)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
