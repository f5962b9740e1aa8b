"""PowerSGD in the last backward pass of an optimizer step, as a communication hook of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .base import GradientSynchronizer
from .powersgd import Gradients, PowerSGD


class BucketHook:
    """Collects the buckets of one backward pass and averages all their gradients with the last one.

    Two messages then carry the whole chunk, not two per parameter or bucket. DDP waits for the futures of the earlier
    buckets at the end of the pass, when they are complete.

    Args:
        parameters: of the module, by name.
        average: makes averages, by name, of gradients by name.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], average: Callable[[Gradients], dict[str, Tensor]]):
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._average = average
        self._pending: list[tuple[torch.futures.Future, Tensor]] = []
        self._gradients: dict[str, Tensor] = {}

    # DDP insists on the name `bucket` and would compare annotations, which are strings here, with types.
    def on_bucket(self, state, bucket):
        buffer = bucket.buffer()
        future = torch.futures.Future(devices=[buffer.device] if buffer.device.type == "cuda" else None)
        self._pending.append((future, buffer))
        names = (self._names[id(parameter)] for parameter in bucket.parameters())
        self._gradients.update(zip(names, bucket.gradients()))  # views of the buffer
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        pending, gradients = self._pending, self._gradients
        self._pending, self._gradients = [], {}
        for name, average in self._average(gradients).items():
            gradients[name].copy_(average)
        for future, buffer in pending:
            future.set_result(buffer)


class PowerSGDSynchronizer(GradientSynchronizer):
    """Averages gradients in low rank at every optimizer step; one `PowerSGD` per chunk."""

    def __init__(self, config, exchange, chunks, weights):
        super().__init__(config, exchange, chunks, weights)
        dtype = getattr(torch, config.factor_dtype)
        self._aggregators = {}
        for index, chunk in chunks.items():
            shapes = {name: parameter.shape for name, parameter in chunk.parameters.items()}
            device = next((p.device for p in chunk.parameters.values()), "cpu")
            self._aggregators[index] = PowerSGD(shapes, config.matrix_rank, dtype, exchange.num_local, device)

    def hook(self, chunk: int) -> Callable:
        return BucketHook(
            self.chunks[chunk].parameters, lambda gradients: self._aggregate(chunk, [gradients])
        ).on_bucket

    def _aggregate(self, chunk: int, gradients: list[Gradients]) -> dict[str, Tensor]:
        aggregator = self._aggregators[chunk]
        with self.exchange.clock.synchronising(aggregator.device):
            return aggregator.aggregate(gradients, self.exchange)

    def average(self, chunk: int, gradients: list[Gradients]) -> Gradients:
        parameters, averages = self.chunks[chunk].parameters, self._aggregate(chunk, gradients)
        return {name: average.to(parameters[name].dtype) for name, average in averages.items()}

    def restart(self) -> None:
        for aggregator in self._aggregators.values():
            aggregator.restart()

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"{chunk}/{name}": tensor
            for chunk, aggregator in self._aggregators.items()
            for name, tensor in aggregator.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for chunk, aggregator in self._aggregators.items():
            prefix = f"{chunk}/"
            mine = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
            aggregator.load_state_dict(mine)
