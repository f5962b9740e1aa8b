"""How pseudo-gradients travel: whole in a dtype, or as 8-bit blocks. `PowerSGD` is the third way. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Size, Tensor

from .sizes import INT8_BLOCK

if TYPE_CHECKING:
    from .exchange import Exchange


def quantise_blocks(values: Tensor) -> Tensor:
    """8-bit integers of a flat float32 tensor with one float32 scale (largest magnitude / 127) per block, as bytes.

    Returns:
        uint8 (int8_bytes(numel),): the integers, then the scales.
    """
    blocks = torch.nn.functional.pad(values, (0, -len(values) % INT8_BLOCK)).view(-1, INT8_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    integers = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(-127, 127)
    integers = integers.to(torch.int8).flatten()[: len(values)]
    return torch.cat([integers.view(torch.uint8), scales.flatten().view(torch.uint8)])


def restore_blocks(message: Tensor, num_values: int) -> Tensor:
    """Float32 values that `quantise_blocks` made the message of."""
    integers = message[:num_values].view(torch.int8).float()
    scales = message[num_values:].clone().view(torch.float32)  # a copy, since its start need not be aligned
    return integers * scales.repeat_interleave(INT8_BLOCK)[:num_values]


class DenseWire:
    """Averages tensors in one message of `dtype`.

    Args:
        shapes: of all tensors, by name; their order is that of the message.
    """

    def __init__(self, shapes: dict[str, Size], dtype: torch.dtype):
        self.shapes, self.dtype = shapes, dtype

    @torch.no_grad()
    def aggregate(self, tensors: list[dict[str, Tensor]], exchange: Exchange) -> dict[str, Tensor]:
        """The average over all replicas, float32, the same bits on all of them.

        Args:
            tensors: of each replica of this process, by name, float32.
        """
        messages = [(flatten(mine, self.shapes) / exchange.num_replicas).to(self.dtype) for mine in tensors]
        return unflatten(exchange.sum(messages).float(), self.shapes)

    def state_dict(self) -> dict[str, Tensor]:
        return {}  # rounding is not fed back: it is far below what replicas differ by

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert not state

    def restart(self) -> None:
        pass


class Int8Wire(DenseWire):
    """Averages tensors that travel in 8-bit blocks: every replica gets all the others' and sums them in one order."""

    def __init__(self, shapes: dict[str, Size]):
        super().__init__(shapes, torch.uint8)

    @torch.no_grad()
    def aggregate(self, tensors, exchange):
        messages = exchange.gather([quantise_blocks(flatten(mine, self.shapes)) for mine in tensors])
        num_values = sum(shape.numel() for shape in self.shapes.values())
        total = torch.zeros(num_values, device=messages[0].device)
        for message in messages:
            total += restore_blocks(message, num_values) / exchange.num_replicas
        return unflatten(total, self.shapes)


def flatten(tensors: dict[str, Tensor], shapes: dict[str, Size]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in shapes])


def unflatten(flat: Tensor, shapes: dict[str, Size]) -> dict[str, Tensor]:
    pieces = flat.split([shape.numel() for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces)}
