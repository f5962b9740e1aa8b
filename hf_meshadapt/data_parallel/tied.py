"""Keeps the two copies of a tied embedding, on the first and the last stage, equal at less than the matrix's size. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Size, Tensor

from .powersgd import PowerSGD

if TYPE_CHECKING:
    from .exchange import Exchange

NAME = "tied"


class TiedSum:
    """Sum of both ends' gradients in low rank with error feedback: the same bits at both, so that the copies stay equal.

    Args:
        shape: of the embedding.
        matrix_rank, dtype: as for `PowerSGD`.
        exchange: of the two ends of one pipeline.
        num_replicas: pipelines in this process whose gradients differ.
    """

    def __init__(
        self,
        shape: Size,
        matrix_rank: int,
        dtype: torch.dtype,
        exchange: Exchange,
        num_replicas: int = 1,
        device: torch.device | str = "cpu",
    ):
        self.exchange = exchange
        self._aggregators = [
            PowerSGD({NAME: shape}, matrix_rank, dtype, exchange.num_local, device) for _ in range(num_replicas)
        ]

    def sum(self, replica: int, gradients: list[Tensor | None]) -> Tensor:
        """The sum over both ends, float32.

        Args:
            replica: of this process.
            gradients: of the ends in this process, first stage first; None is zero.
        """
        average = self._aggregators[replica].aggregate([{NAME: gradient} for gradient in gradients], self.exchange)
        return average[NAME] * self.exchange.num_replicas

    def restart(self) -> None:
        for aggregator in self._aggregators:
            aggregator.restart()

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"{replica}/{name}": tensor
            for replica, aggregator in enumerate(self._aggregators)
            for name, tensor in aggregator.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for replica, aggregator in enumerate(self._aggregators):
            prefix = f"{replica}/"
            aggregator.load_state_dict({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})
