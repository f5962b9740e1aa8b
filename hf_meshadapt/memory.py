"""What one rank must hold in memory, from sizes alone. Pure arithmetic: no torch, no transformers.

`pipeline.footprint` finds the sizes of a chunk without loading it; `memory_plan` adds them up over the passes of one
step. Bytes are those of tensors: what Python, CUDA's context and the allocator's rounding take comes on top.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from .config import BoundaryConfig, DataParallelConfig, MeshConfig

logger = logging.getLogger(__name__)

# Values that an optimizer keeps per parameter, in the parameter's dtype, by the start of its name in `optim`.
OPTIMIZER_COPIES = {"adamw_torch": 2, "adamw_apex": 2, "adamax": 2, "sgd": 0, "adagrad": 1, "rmsprop": 1}
FEW_BITS = ("8bit", "4bit")  # names of optimizers whose state is quantised end so
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True)
class ChunkFootprint:
    """Bytes of one microbatch's passes through one chunk, over what was there before it.

    Attributes:
        held: kept from the end of the forward pass until the backward pass, what is sent on included.
        forward: most in the forward pass.
        first_backward: most in a backward pass that allocates the gradients, them included.
        backward: most in a backward pass that adds to gradients that are there.
        sent_forward, sent_backward: what goes to the next chunk, and to the one before; 0 at the ends.
        gradients: of the chunk's trainable parameters.
    """

    held: int
    forward: int
    first_backward: int
    backward: int
    sent_forward: int
    sent_backward: int
    gradients: int


@dataclass(frozen=True)
class RankWeights:
    """What a rank holds of the model.

    Attributes:
        weights: bytes of parameters and buffers, frozen ones included.
        trainable: bytes of what its optimizer updates.
        largest: bytes of the largest trainable tensor.
    """

    weights: int
    trainable: int
    largest: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank at the worst moment of a step.

    Attributes:
        weights: parameters and buffers.
        optimizer: optimizer state.
        reducer: the data-parallel reducer's copy of the gradients.
        boundary: tables that boundaries code with, on both ends.
        wire: receive buffers of the pipeline.
        passes: most that gradients, activations in flight and temporaries take together; gradients alone while the
            optimizer steps, if with its temporaries that is more.
        sync: what keeps replicas one model: errors that are fed back, outer weights and momentum, replicas' own weights.
    """

    weights: int
    optimizer: int
    reducer: int
    boundary: int
    wire: int
    passes: int
    sync: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.weights + self.optimizer + self.reducer + self.boundary + self.wire + self.passes + self.sync


def memory_plan(
    rank: RankWeights,
    chunks: dict[int, ChunkFootprint],
    order: Iterable[tuple[str, int, int]],
    mesh: MeshConfig,
    *,
    optimizer: str = "adamw_torch_fused",
    on_cuda: bool = False,
    accumulation: int = 1,
    boundary_bytes: int = 0,
) -> MemoryPlan:
    """Adds up one rank's step.

    Args:
        chunks: footprints of the rank's chunks.
        order: the rank's passes as (`F` or `B`, chunk, microbatch).
        optimizer: as in `TrainingArguments.optim`.
        accumulation: accumulation steps; from the second on gradients are there from the start.
        boundary_bytes: of the rank's boundary tables.
    """
    # The schedules over gloo wait for their sends at the end of a step, so that what was sent stays until then.
    keeps_sent = mesh.wire_backend == "gloo" and mesh.stages > 1 and not mesh.emulated
    passes = passes_bytes(chunks, order, keeps_sent, gradients_there=accumulation > 1)
    gradients = sum(chunk.gradients for chunk in chunks.values())
    received = sum(chunk.sent_forward + chunk.sent_backward for chunk in chunks.values())
    return MemoryPlan(
        weights=rank.weights,
        optimizer=optimizer_copies(optimizer) * rank.trainable,
        reducer=gradients if mesh.replicas > 1 and not mesh.emulated else 0,
        boundary=boundary_bytes,
        # An activation is received per one sent back, and a gradient per one sent on.
        wire=mesh.microbatches * received if mesh.stages > 1 and not mesh.emulated else 0,
        passes=max(passes, gradients + step_bytes(rank, optimizer, on_cuda)),
    )


def sync_bytes(rank: RankWeights, mesh: MeshConfig, sync: DataParallelConfig, optimizer: str) -> int:
    """At least what a synchronizer keeps, all counted in the weights' dtype; some of it is float32 whatever that is."""
    num_local = mesh.replicas if mesh.emulated else 1
    copies = num_local if sync.low_rank and mesh.replicas > 1 else 0  # what factors left out, of each replica
    if sync.steps_apart:
        own = num_local - 1  # replicas beside the one in the model, with weights and optimizer state
        copies += 2 + own * (1 + optimizer_copies(optimizer))  # outer weights and momentum
    return copies * rank.trainable


def resident_plan(
    rank: RankWeights,
    mesh: MeshConfig,
    optimizer: str,
    boundary_bytes: int = 0,
    sync: DataParallelConfig | None = None,
) -> MemoryPlan:
    """What stays there whatever the batches are: a lower bound, known before anything is loaded."""
    sync = sync or DataParallelConfig()
    reduces = mesh.replicas > 1 and not mesh.emulated and not sync.steps_apart
    return MemoryPlan(
        weights=rank.weights,
        optimizer=optimizer_copies(optimizer) * rank.trainable,
        reducer=rank.trainable if reduces else 0,
        boundary=boundary_bytes,
        wire=0,
        passes=rank.trainable,
        sync=sync_bytes(rank, mesh, sync, optimizer),
    )


def passes_bytes(
    chunks: dict[int, ChunkFootprint],
    order: Iterable[tuple[str, int, int]],
    keeps_sent: bool,
    gradients_there: bool = False,
) -> int:
    """Most bytes of gradients, activations and temporaries over the passes of one step."""
    allocated = set(chunks) if gradients_there else set()
    gradients = sum(chunks[index].gradients for index in allocated)
    held = most = 0
    for kind, index, _ in order:
        chunk = chunks[index]
        if kind == "F":
            most = max(most, gradients + held + chunk.forward)
            held += chunk.held
            continue
        held -= chunk.held
        if index in allocated:
            most = max(most, gradients + held + chunk.backward)
        else:
            most = max(most, gradients + held + chunk.first_backward)
            allocated.add(index)
            gradients += chunk.gradients
        if keeps_sent:
            held += chunk.sent_forward + chunk.sent_backward
    return max(most, gradients + held)


def optimizer_copies(optimizer: str) -> int:
    """Values of optimizer state per parameter; 0 for optimizers that are not known here or that quantise it, so that a plan
    stays a lower bound."""
    if optimizer.endswith(FEW_BITS):
        return 0
    return next((copies for name, copies in OPTIMIZER_COPIES.items() if optimizer.startswith(name)), 0)


def step_bytes(rank: RankWeights, optimizer: str, on_cuda: bool) -> int:
    """Temporaries of an optimizer step: torch's AdamW takes the root of the second moment, of all tensors at once on
    CUDA and of one after the other elsewhere; the fused one takes none."""
    if not optimizer.startswith("adamw_torch") or "fused" in optimizer or optimizer.endswith(FEW_BITS):
        return 0
    return rank.trainable if on_cuda else 2 * rank.largest


def table_bytes(boundary: BoundaryConfig, hidden_size: int, vocab_size: int, features: int, ends: int) -> int:
    """Bytes of what a calibrated boundary keeps on a rank.

    Args:
        features: width of the token table, where the predictor is `token`; a token's features are its own, those of
            the previous one and a constant.
        ends: ends of boundaries on the rank.
    """
    rows = 2 * features + 1 if boundary.predictor == "token" else 1
    predictor = 4 * rows * hidden_size
    if boundary.codec == "transform" and boundary.entropy_coded and features:
        predictor += 2 * 2 * 2 * vocab_size  # sensitivities: by kind and place, int16
    # Analysis and synthesis, float32, of both directions; at most, where no component is left out.
    transforms = 2 * 2 * 4 * hidden_size**2 if boundary.fits_transforms else 0
    table = 2 * vocab_size * features if boundary.predictor == "token" else 0
    return ends * (predictor + transforms) + table if boundary.needs_calibration else 0


def check_fits(plan: MemoryPlan, device_bytes: int | None, free_bytes: int | None, where: str) -> None:
    """Refuses a `resident_plan` that cannot fit the device, warns of one that does not fit what is free.

    Args:
        device_bytes, free_bytes: None where unknown.
        where: names the rank in messages.

    Raises:
        ValueError: the plan is larger than the device.
    """
    needed = plan.peak_bytes
    if device_bytes is not None and needed > device_bytes:
        raise ValueError(
            f"{where} needs at least {describe(needed)} ({parts(plan)}), activations not counted, but its device has "
            f"{describe(device_bytes)}. Use more pipeline_stages, model_dtype='bfloat16' or an optim with less state"
        )
    if free_bytes is not None and needed > free_bytes:
        logger.warning(
            "%s needs at least %s (%s), activations not counted, but only %s of its device are free",
            *(where, describe(needed), parts(plan), describe(free_bytes)),
        )


def parts(plan: MemoryPlan) -> str:
    """The plan's parts in words, empty ones left out."""
    named = {
        "weights": plan.weights,
        "optimizer state": plan.optimizer,
        "data-parallel copy": plan.reducer,
        "boundary tables": plan.boundary,
        "receive buffers": plan.wire,
        "gradients and activations": plan.passes,
        "data-parallel state": plan.sync,
    }
    return ", ".join(f"{name} {describe(size)}" for name, size in named.items() if size)


def describe(size: int) -> str:
    scale, unit = next(((scale, unit) for scale, unit in UNITS if size >= scale), (1, "B"))
    return f"{size / scale:.3g} {unit}"
