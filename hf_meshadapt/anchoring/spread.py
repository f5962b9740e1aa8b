"""An anchor of several processes: rank 0 holds the link, every rank runs the passes of its own stage of the model.

The others do what rank 0 says: wait on, take what the fast circuit told of its boundaries, work on a snapshot, end. While
it waits for the link, it says so every second, so that the others' deadline is about rank 0 and not about the fast circuit.
Weights go out as flat tensors, whose names and shapes are agreed on before; priors and fits of boundaries come back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ..anchor.attachment import only_attachment
from ..anchor.circuit import AnchorCircuit, Tensors, Work, norm, not_finite, run_passes
from ..anchor.messages import Message, decode, encode
from ..metering import exchange_json, gather_tensors
from .calibrator import Calibrator
from .fits import Fit, from_tensors, to_tensors
from .passes import AnchorPasses

WAIT, ATTACHMENT, WORK, DONE = range(4)
BEAT_SECONDS = 1.0
FIRST = 0


class AnchorRanks:
    """What the ranks of an anchor tell each other.

    Args:
        engine: of a pipeline that is the anchor.
        compress: gradients by name to the tensors of a prior.

    Attributes:
        is_first: this is the rank that holds the link.
    """

    def __init__(self, engine, compress: Callable[[Tensors], Tensors]):
        self._engine, self._compress = engine, compress
        self.is_first = engine.topology.is_first
        self._group, self._ranks = engine.groups.control, engine.topology.pipeline_ranks(0)
        named = engine.parts.stored_trainable()
        shapes = engine.share({engine.topology.stage: [[name, list(p.shape)] for name, p in named]})
        self._shapes: list[dict[str, list[int]]] = [dict(shapes[rank]) for rank in self._ranks]
        # The other end has the same gradient of a tied matrix; it is counted and sent there.
        self._copies = set(engine.parts.stored_name_of_copy().values())
        self._last_word = -math.inf

    # What is to be done.

    def tell(self, task: int, *numbers: int) -> None:
        """Rank 0 to all others: what to do, and up to two numbers that belong to it."""
        self._last_word = time.monotonic()
        words = torch.tensor([task, *numbers, 0, 0][:3])
        with self._engine.naming(f"the anchor to take the word of rank {FIRST}, by", self._ranks):
            dist.broadcast(words, group=self._group, group_src=FIRST)

    def beat(self) -> None:
        """Tells the others to wait on, where the last word is a second old."""
        if time.monotonic() - self._last_word >= BEAT_SECONDS:
            self.tell(WAIT)

    def hear(self) -> tuple[int, int, int]:
        """Task and numbers from rank 0: of `WORK` the version and the anchor's position in the data, of `ATTACHMENT` its
        bytes."""
        words = torch.zeros(3, dtype=torch.int64)
        with self._engine.naming("the anchor's next task from", [FIRST, self._engine.topology.rank]):
            dist.broadcast(words, group=self._group, group_src=FIRST)
        task, first, second = words.tolist()
        return task, first, second

    def tell_attachment(self, message: Message) -> None:
        """Rank 0 to all others: what came beside a snapshot."""
        data = torch.frombuffer(bytearray(encode(message)), dtype=torch.uint8)
        self.tell(ATTACHMENT, len(data))
        self._hand_on(data)

    def hear_attachment(self, num_bytes: int) -> Message:
        """What rank 0 tells by it."""
        data = torch.empty(num_bytes, dtype=torch.uint8)
        self._hand_on(data)
        return decode(data.numpy().tobytes(), num_bytes)

    def _hand_on(self, data: Tensor) -> None:
        with self._engine.naming("the anchor to hand on what it was told of boundaries, with", self._ranks):
            dist.broadcast(data, group=self._group, group_src=FIRST)

    # Weights out, priors back.

    def scatter(self, weights: Tensors) -> Tensors:
        """Rank 0 gives every rank the weights of its stage, and keeps its own.

        Args:
            weights: of the whole model by name, float32.

        Raises:
            ValueError: they are of other parameters than the anchor's.
        """
        needed = {name: shape for shapes in self._shapes for name, shape in shapes.items()}
        found = {name: list(tensor.shape) for name, tensor in weights.items()}
        if needed != found:
            wrong = sorted(name for name in needed.keys() | found.keys() if needed.get(name) != found.get(name))
            raise ValueError(
                f"the snapshot differs from the anchor's model in {len(wrong)} parameters, for example {wrong[0]}: "
                f"{found.get(wrong[0])} for {needed.get(wrong[0])}. Give both circuits the same model and peft_config"
            )
        with self._engine.naming("the anchor to take the weights of a snapshot, by", self._ranks):
            for rank, shapes in enumerate(self._shapes):
                if shapes and rank != FIRST:
                    flat = torch.cat([weights[name].reshape(-1) for name in shapes])
                    dist.send(flat, group=self._group, group_dst=rank)
        return {name: weights[name] for name in self._shapes[FIRST]}

    def receive(self) -> Tensors:
        """The weights of this rank's stage."""
        shapes = self._shapes[self._engine.topology.stage]
        flat = torch.empty(sum(map(math.prod, shapes.values())))
        if shapes:
            with self._engine.naming("the weights of a snapshot from", [FIRST, self._engine.topology.rank]):
                dist.recv(flat, group=self._group, group_src=FIRST)
        return split(flat, shapes.items())

    def gather(self, gradients: Tensors) -> Work:
        """What all ranks' gradients make together; the tensors of priors are whole on rank 0 alone."""
        mine = {name: gradient for name, gradient in gradients.items() if name not in self._copies}
        broken = not_finite(mine)
        tensors = {} if broken else self._compress(mine)
        told = {"norm": None if broken else norm(mine), "broken": broken}
        with self._engine.naming("the anchor's gradients of", self._ranks):
            everyone = exchange_json(told, self._group)
        broken = [name for other in everyone for name in other["broken"]]
        if broken:
            return Work(self._names, math.nan, broken, lambda names: {})
        whole = self._gather_tensors(tensors, "the anchor's priors of")

        def tensors_of(names: Iterable[str]) -> Tensors:
            wanted = set(names)
            return {key: tensor for key, tensor in whole.items() if key.rpartition("/")[0] in wanted}

        return Work(self._names, math.sqrt(math.fsum(other["norm"] ** 2 for other in everyone)), [], tensors_of)

    def gather_fits(self, fits: dict[int, Fit]) -> dict[int, Fit]:
        """All ranks' fits, whole on rank 0 alone."""
        return from_tensors(self._gather_tensors(to_tensors(fits), "the anchor's fits of"))[0]

    @property
    def _names(self) -> set[str]:
        return {name for shapes in self._shapes for name in shapes}

    def _gather_tensors(self, mine: Tensors, awaited: str) -> Tensors:
        with self._engine.naming(awaited, self._ranks):
            everyone = gather_tensors(mine, self._group)
        return {name: tensor for tensors in everyone for name, tensor in tensors.items()}


class SpreadCircuit(AnchorCircuit):
    """The anchor's loop on rank 0 of several.

    Args:
        ranks: the anchor's.
        others: see `AnchorCircuit`; `gradients` are of this rank's stage.
    """

    def __init__(self, ranks: AnchorRanks, *others, **named):
        super().__init__(*others, **named)
        self._ranks = ranks

    def run(self):
        super().run()
        self._ranks.tell(DONE)

    def _decode(self, message):
        attachment = only_attachment(message)
        if attachment is not None:
            self._ranks.tell_attachment(attachment)
        super()._decode(message)

    def work(self, version, weights):
        self._ranks.tell(WORK, version, self.num_batches)
        return self._ranks.gather(self.mean_gradients(version, self._ranks.scatter(weights)))


def follow(
    ranks: AnchorRanks, passes: AnchorPasses, calibrator: Calibrator, make_batches: Callable, anchor_batches: int
) -> None:
    """What the other ranks do until the fast circuit has finished.

    Args:
        calibrator: of this rank.
        make_batches: position in the data to the batches from there on.

    Raises:
        LinkError: rank 0, or another one, is lost.
    """
    batches = None
    while (words := ranks.hear())[0] != DONE:
        task, version, num_batches = words
        if task == WAIT:
            continue
        if task == ATTACHMENT:
            calibrator.take(ranks.hear_attachment(num_bytes=version))
            continue
        if batches is None or batches.num_taken != num_batches:
            batches = make_batches(num_batches)
        weights = ranks.receive()
        gradients = run_passes(version, weights, batches.__next__, passes.gradients, anchor_batches, calibrator)
        if not ranks.gather(gradients).broken:
            calibrator.fits(version)


def split(flat: Tensor, shapes: Iterable[tuple[str, list[int]]]) -> Tensors:
    """Undoes the joining of tensors of these shapes, in order."""
    shapes = list(shapes)
    pieces = flat.split([math.prod(shape) for _, shape in shapes])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes, pieces)}
