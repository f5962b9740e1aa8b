"""The anchor's loop: newest snapshots in, unmasked passes, priors out. What it works with is handed in."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .fast_link import Source
from .messages import Message
from .schedule import NO_VERSION, agree
from .snapshot import SnapshotDecoder

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
Tensors = dict[str, Tensor]


class CircuitLink(Protocol):
    """What the loop needs of a link; see `anchor_link.AnchorLink`, where errors and deadlines are."""

    done: bool
    sources: tuple[Source, ...]
    newer_waits: bool

    def take(self, timeout_seconds: float) -> Message | None: ...

    def send(self, stage: int, fields: dict, tensors: Tensors) -> bool: ...

    def flush(self, timeout_seconds: float) -> None: ...


@dataclass(frozen=True)
class Work:
    """What the passes over one snapshot made.

    Attributes:
        names: of the parameters whose gradients they are.
        gradient_norm: of all gradients together.
        broken: names of those that are not finite.
        tensors_of: names of one stage's parameters to the tensors of its prior.
    """

    names: Set[str]
    gradient_norm: float
    broken: list[str]
    tensors_of: Callable[[Iterable[str]], Tensors]


class Calibrating(Protocol):
    """What the loop needs of whoever fits boundaries on what its passes see; see `anchoring.calibrator.Calibrator`."""

    wants_more: bool  # passes, before it can fit

    def take(self, message: Message) -> None:
        """Takes what the fast circuit put beside a snapshot, if anything, out of it."""

    def begin(self, version: int) -> bool:
        """Whether fits are due with the prior of this version; then the passes to come are looked at."""

    def gradients(self, weights: Tensors, batch: Any) -> Tensors: ...

    def tensors_by_stage(self, version: int) -> dict[int, Tensors]:
        """Further tensors of this version's priors; none where none are due."""


class AnchorCircuit:
    """Runs until the fast circuit says that it is done.

    Args:
        link: to the fast circuit.
        gradients: (weights, batch) to the gradients of that batch's loss by parameter name. Weights are float32 views
            of the anchor's copy, which it must not write to.
        batches: the anchor's own data, without an end.
        compress: gradients by name to the tensors of a prior, under names that the fast circuit's end understands. A
            prior says the norm of all gradients together too, as `gradient_norm`.
        anchor_batches: passes per snapshot, whose gradients are averaged.
        flush_seconds: deadline of a prior's way to its stage.
        num_batches: that earlier runs took from the data; `batches` begins after them.
        calibrator: fits the boundaries of the fast circuit; None where they are not the anchor's business.

    Raises:
        ValueError: `anchor_batches` below 1.

    Attributes:
        num_priors: sent, counted once for all stages.
        num_batches: taken from the data.
    """

    def __init__(
        self,
        link: CircuitLink,
        gradients: Callable[[Tensors, Any], Tensors],
        batches: Iterator[Any],
        compress: Callable[[Tensors], Tensors],
        anchor_batches: int = 1,
        flush_seconds: float = 600.0,
        num_batches: int = 0,
        calibrator: Calibrating | None = None,
    ):
        if anchor_batches < 1:
            raise ValueError(f"anchor_batches={anchor_batches} must be at least 1")
        self._link, self._gradients, self._batches, self._compress = link, gradients, batches, compress
        self._anchor_batches, self._flush_seconds = anchor_batches, flush_seconds
        self._calibrator = calibrator
        self._decoders: dict[tuple[int, int], SnapshotDecoder] = {}
        self._last_version = NO_VERSION
        self.num_priors = 0
        self.num_batches = num_batches

    def run(self) -> None:
        """The loop.

        Raises:
            LinkError: the fast circuit could not be reached, refused the anchor, or took too long to take a prior.
            MessageError: it sent what does not fit.
            ValueError: the data ended, or gradients lack a parameter.
        """
        passed_over = False
        while not self._link.done:
            message = self._link.take(POLL_SECONDS)
            if message is not None:
                self._decode(message)
            sources = self._link.sources  # once a round: a lost link changes them
            version = self._whole_version(sources)
            # Not "newer": a fast circuit that resumed from a checkpoint counts from there.
            if version in (NO_VERSION, self._last_version):
                continue
            if self._link.newer_waits and not passed_over:
                passed_over = True  # once: who decodes slower than snapshots come would never get to a pass
                continue
            passed_over, self._last_version = False, version
            self._answer(version, self._weights(sources))

    def _decode(self, message: Message) -> None:
        if self._calibrator is not None:
            self._calibrator.take(message)
        key = message.fields["stage"], message.fields["slice"]
        self._decoders.setdefault(key, SnapshotDecoder()).decode(message)

    def _whole_version(self, sources: tuple[Source, ...]) -> int:
        """The version that all sources' weights have, `NO_VERSION` while they differ."""
        keys = [(source.stage, source.slice) for source in sources]
        if not all(key in self._decoders for key in keys):
            return NO_VERSION
        return agree([[self._decoders[key].version] for key in keys])

    def _answer(self, version: int, stages: dict[int, Tensors]) -> None:
        whole = {name: tensor for weights in stages.values() for name, tensor in weights.items()}
        work = self.work(version, whole)
        if work.broken:
            logger.warning("no prior of step %d: gradients are not finite: %s", version, ", ".join(work.broken[:3]))
            return
        fields = {"version": version, "num_batches": self.num_batches, "gradient_norm": work.gradient_norm}
        further = {} if self._calibrator is None else self._calibrator.tensors_by_stage(version)
        self._link.flush(self._flush_seconds)
        if self._link.done:
            return
        sent = False
        for stage, weights in stages.items():
            missing = [name for name in weights if name not in work.names]
            if missing:
                raise ValueError(f"the anchor's gradients lack {', '.join(missing[:3])}, which stage {stage} trains")
            tensors = work.tensors_of(weights) | further.get(stage, {})
            if self._link.send(stage, fields, tensors):
                sent = True
            elif not self._link.done:
                logger.warning("stage %d is not connected: it gets no prior of step %d", stage, version)
        self.num_priors += sent

    def work(self, version: int, weights: Tensors) -> Work:
        """The passes over a snapshot of the whole model."""
        gradients = self.mean_gradients(version, weights)

        def tensors_of(names: Iterable[str]) -> Tensors:
            return self._compress({name: gradients[name] for name in names})

        return Work(gradients.keys(), norm(gradients), not_finite(gradients), tensors_of)

    def _weights(self, sources: tuple[Source, ...]) -> dict[int, Tensors]:
        """By stage and name, the slices put together."""
        parts_of: dict[int, list[tuple[int, SnapshotDecoder]]] = {}
        for source in sources:
            decoder = self._decoders[source.stage, source.slice]
            parts_of.setdefault(source.stage, []).append((source.slice, decoder))
        weights = {}
        for stage, parts in sorted(parts_of.items()):
            blocks = torch.cat([decoder.reference for _, decoder in sorted(parts, key=lambda part: part[0])])
            layout = parts[0][1].layout
            if len(blocks) != layout.num_blocks:
                raise ValueError(
                    f"the slices of stage {stage} do not make up its weights: are all sources of one run?"
                )
            weights[stage] = layout.unpack(blocks)
        return weights

    def mean_gradients(self, version: int, weights: Tensors) -> Tensors:
        """Mean over the next `anchor_batches` batches; the calibrator looks on."""
        return run_passes(version, weights, self._next_batch, self._gradients, self._anchor_batches, self._calibrator)

    def _next_batch(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            raise ValueError(f"the anchor's data ended after {self.num_batches} batches: repeat it without an end")
        self.num_batches += 1
        return batch


def run_passes(
    version: int,
    weights: Tensors,
    next_batch: Callable[[], Any],
    gradients: Callable[[Tensors, Any], Tensors],
    num_passes: int,
    calibrator: Calibrating | None,
) -> Tensors:
    """Mean gradients of the first `num_passes` batches, float32; the calibrator looks at these and may want more.

    The others' gradients count for nothing, so that a prior is of `anchor_batches` whether or not fits are due.
    """
    due = calibrator is not None and calibrator.begin(version)
    one_pass = calibrator.gradients if due else gradients
    mean = mean_gradients((one_pass(weights, next_batch()) for _ in range(num_passes)), num_passes)
    while due and calibrator.wants_more:
        one_pass(weights, next_batch())
    return mean


def mean_gradients(passes: Iterable[Tensors], num_passes: int) -> Tensors:
    """Mean of so many passes' gradients by name, float32."""
    total: Tensors = {}
    for gradients in passes:
        for name, gradient in gradients.items():
            share = gradient.detach().float() / num_passes
            total[name] = total[name] + share if name in total else share
    return total


def not_finite(gradients: Tensors) -> list[str]:
    """Names of gradients that are not finite throughout."""
    finite = [gradient.isfinite().all() for gradient in gradients.values()]
    # One copy to the host for all.
    return [name for name, whole in zip(gradients, torch.stack(finite).tolist()) if not whole] if finite else []


def norm(gradients: Tensors) -> float:
    """Norm over all gradients, whatever their order."""
    norms = [gradient.norm() for gradient in gradients.values()]
    return math.sqrt(math.fsum(norm**2 for norm in torch.stack(norms).tolist())) if norms else 0.0
