"""What the engine asks of a data-parallel synchronisation, and the dense one that all others are measured by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..config import DataParallelConfig
from .powersgd import Gradients

if TYPE_CHECKING:
    from .exchange import Exchange


@dataclass(frozen=True)
class ChunkParameters:
    """What a synchronizer has to know of one model chunk.

    Attributes:
        stage: of the pipeline, whose rank has the chunk.
        parameters: trainable ones, by name, in the model's order.
        layers: by name, which of the model's layers a parameter is in; what is in none is missing.
        tied: names of copies of a tied embedding.
    """

    stage: int
    parameters: dict[str, nn.Parameter]
    layers: dict[str, int]
    tied: frozenset[str] = frozenset()


class GradientSynchronizer:
    """Keeps the replicas of this process's chunks one model.

    Either gradients are averaged in the last backward pass of an optimizer step (`hook` in a process per replica,
    `average` where all replicas are in this one), or replicas step apart and weights are averaged by `end_step`.

    Args:
        config: how.
        exchange: with the other replicas.
        chunks: of this process, by index.
        weights: of each replica of this process, by name over all chunks; they share memory with the parameters of the
            replica that is in the model.
    """

    steps_apart = False

    def __init__(
        self,
        config: DataParallelConfig,
        exchange: Exchange,
        chunks: dict[int, ChunkParameters],
        weights: list[dict[str, Tensor]],
    ):
        self.config, self.exchange, self.chunks, self.weights = config, exchange, chunks, weights

    def hook(self, chunk: int) -> Callable | None:
        """Communication hook for the chunk's DistributedDataParallel; None for its own all-reduce."""
        return None

    def average(self, chunk: int, gradients: list[Gradients]) -> Gradients:
        """The replicas' gradients averaged, as the hook does it, where all replicas are in this process."""
        raise NotImplementedError(f"{type(self).__name__} does not average gradients")

    def parts(self) -> dict[int, list[list[tuple[int, ...]]]]:
        """By stage, the shapes of parameters that are exchanged together."""
        parts: dict[int, list[list[tuple[int, ...]]]] = {}
        for chunk in self.chunks.values():
            parts.setdefault(chunk.stage, []).append([tuple(p.shape) for p in chunk.parameters.values()])
        return parts

    def end_step(self, final: bool) -> None:
        """To be called on all replicas after every optimizer step; `final` after the last of the run."""

    def finish(self) -> None:
        """Makes all replicas' weights the model's; for runs that ended early. Collective over replicas."""

    def outer_weights(self) -> contextlib.AbstractContextManager:
        """Within it the model has the weights that the replicas last agreed on, where they step apart."""
        return contextlib.nullcontext()

    def agreed(self) -> dict[str, Tensor]:
        """By name, what all replicas must hold bit for bit between steps: the weights, or the outer model's."""
        return {name: p.detach() for chunk in self.chunks.values() for name, p in chunk.parameters.items()}

    def restart(self) -> None:
        """Starts anew from the weights that the model now has, the same on all replicas."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs of this process, weights of replicas that step apart excepted.

        The tensors themselves or views of them, not copies: later steps change them.
        """
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state_dict` gave on a mesh of the same shape; exact."""
        assert not state


class AllReduce(GradientSynchronizer):
    """The dense average that DistributedDataParallel makes."""

    def average(self, chunk: int, gradients: list[Gradients]) -> Gradients:
        """Divided by the number of replicas, then summed in replica order, as DDP does; zeros where none has one."""
        averages: Gradients = {}
        for name, parameter in self.chunks[chunk].parameters.items():
            parts = [mine[name] / len(gradients) for mine in gradients if mine[name] is not None]
            averages[name] = torch.stack(parts).sum(0) if parts else torch.zeros_like(parameter)
        return averages
