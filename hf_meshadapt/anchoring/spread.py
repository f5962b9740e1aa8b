"""An anchor of several processes: rank 0 holds the link, every rank runs the passes of its own stage of the model.

The others do what rank 0 says: wait on, work on a snapshot, end. While it waits for the link, it says so every second, so
that the others' deadline is about rank 0 and not about the fast circuit. Weights go out and priors come back as flat
tensors; names and shapes are agreed on before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ..anchor.circuit import AnchorCircuit, Tensors, Work, mean_gradients, norm, not_finite
from ..metering import exchange_json
from .passes import AnchorPasses
from .prior import WIRE_DTYPE

WAIT, WORK, DONE = range(3)
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

    def tell(self, task: int, version: int = 0, num_batches: int = 0) -> None:
        """Rank 0 to all others."""
        self._last_word = time.monotonic()
        with self._engine.naming(f"the anchor to take the word of rank {FIRST}, by", self._ranks):
            dist.broadcast(torch.tensor([task, version, num_batches]), group=self._group, group_src=FIRST)

    def beat(self) -> None:
        """Tells the others to wait on, where the last word is a second old."""
        if time.monotonic() - self._last_word >= BEAT_SECONDS:
            self.tell(WAIT)

    def hear(self) -> tuple[int, int, int]:
        """Task, version and the anchor's position in the data, from rank 0."""
        words = torch.zeros(3, dtype=torch.int64)
        with self._engine.naming("the anchor's next task from", [FIRST, self._engine.topology.rank]):
            dist.broadcast(words, group=self._group, group_src=FIRST)
        task, version, num_batches = words.tolist()
        return task, version, num_batches

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
        told = {
            "norm": None if broken else norm(mine),
            "broken": broken,
            "tensors": [[key, list(tensor.shape)] for key, tensor in tensors.items()],
        }
        with self._engine.naming("the anchor's gradients of", self._ranks):
            everyone = exchange_json(told, self._group)
        broken = [name for other in everyone for name in other["broken"]]
        if broken:
            return Work(self._names, math.nan, broken, lambda names: {})
        whole = self._gather_tensors(tensors, [other["tensors"] for other in everyone])

        def tensors_of(names: Iterable[str]) -> Tensors:
            wanted = set(names)
            return {key: tensor for key, tensor in whole.items() if key.rpartition("/")[0] in wanted}

        return Work(self._names, math.sqrt(math.fsum(other["norm"] ** 2 for other in everyone)), [], tensors_of)

    @property
    def _names(self) -> set[str]:
        return {name for shapes in self._shapes for name in shapes}

    def _gather_tensors(self, mine: Tensors, shapes: list[list]) -> Tensors:
        whole = dict(mine)
        with self._engine.naming("the anchor's priors of", self._ranks):
            if not self.is_first:
                if mine:
                    flat = torch.cat([tensor.reshape(-1) for tensor in mine.values()]).cpu()
                    dist.send(flat.view(torch.uint8), group=self._group, group_dst=FIRST)
                return whole
            for rank in self._ranks[1:]:
                count = sum(math.prod(shape) for _, shape in shapes[rank])
                if count:
                    flat = torch.empty(count, dtype=WIRE_DTYPE)
                    dist.recv(flat.view(torch.uint8), group=self._group, group_src=rank)
                    whole |= split(flat, shapes[rank])
        return whole


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

    def work(self, version, weights):
        self._ranks.tell(WORK, version, self.num_batches)
        return self._ranks.gather(self.mean_gradients(version, self._ranks.scatter(weights)))


def follow(ranks: AnchorRanks, passes: AnchorPasses, make_batches: Callable, anchor_batches: int) -> None:
    """What the other ranks do until the fast circuit has finished.

    Args:
        make_batches: position in the data to the batches from there on.

    Raises:
        LinkError: rank 0, or another one, is lost.
    """
    batches = None
    while (words := ranks.hear())[0] != DONE:
        task, _, num_batches = words
        if task == WAIT:
            continue
        if batches is None or batches.num_taken != num_batches:
            batches = make_batches(num_batches)
        weights = ranks.receive()
        gradients = (passes.gradients(weights, next(batches)) for _ in range(anchor_batches))
        ranks.gather(mean_gradients(gradients, anchor_batches))


def split(flat: Tensor, shapes: Iterable[tuple[str, list[int]]]) -> Tensors:
    """Undoes the joining of tensors of these shapes, in order."""
    shapes = list(shapes)
    pieces = flat.split([math.prod(shape) for _, shape in shapes])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes, pieces)}
