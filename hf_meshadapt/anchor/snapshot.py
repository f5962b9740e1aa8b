"""Weight snapshots: the first in full, later ones as quantised differences from the copy that the anchor holds.

Both ends hold the same reference, bit by bit. A difference is taken against the reference, so what quantisation left
out of one snapshot is part of the next: an error is that of the last message alone and does not add up (error feedback;
Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; of weights against a shared reference: Tang et al.,
Communication Compression for Decentralized Training, arXiv 1803.06443, "DCD-PSGD").

A snapshot is one vector: all tensors in the order of the first, each padded to whole blocks. Replicas hold the same
weights and share it out: slice i of n is a range of its blocks, so every replica keeps and sends an n-th.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .blockwise import BLOCK_SIZE, CODE_BITS, code_bytes, quantise, restore
from .messages import Message, MessageError

FULL_DTYPES = {16: torch.bfloat16, 32: torch.float32}
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """Where each tensor stands in the vector.

    Args:
        shapes: by name, in order.
    """

    shapes: Shapes

    @property
    def num_blocks(self) -> int:
        return sum(self.blocks_of(name) for name in self.shapes)

    def blocks_of(self, name: str) -> int:
        return -(-math.prod(self.shapes[name]) // BLOCK_SIZE)

    def pack(self, tensors: dict[str, Tensor]) -> Tensor:
        """(num_blocks, BLOCK_SIZE) float32 on the tensors' device.

        Raises:
            ValueError: other names or shapes than the layout's.
        """
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != self.shapes:
            raise ValueError("the snapshot's names or shapes differ from the first one's: a link serves one model")
        parts = []
        for name in self.shapes:
            flat = tensors[name].detach().flatten().float()
            parts.append(torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK_SIZE)))
        return torch.cat(parts).view(-1, BLOCK_SIZE) if parts else torch.zeros(0, BLOCK_SIZE)

    def unpack(self, blocks: Tensor) -> dict[str, Tensor]:
        """Views of the vector by name."""
        tensors, start = {}, 0
        for name, shape in self.shapes.items():
            end = start + self.blocks_of(name)
            tensors[name] = blocks[start:end].flatten()[: math.prod(shape)].view(shape)
            start = end
        return tensors

    def state_tensors(self, version: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """`SnapshotEncoder.state_tensors` of one that sends the whole vector, out of its reference by name."""
        return {"reference": self.pack(tensors), "version": torch.tensor(version)}

    def slice_range(self, index: int, num_slices: int) -> range:
        """Blocks of one slice; slices differ by one block at most and make up the whole."""
        return range(self.num_blocks * index // num_slices, self.num_blocks * (index + 1) // num_slices)


def snapshot_bytes(shapes: Shapes, bits: int, index: int = 0, num_slices: int = 1) -> int:
    """Payload of one slice of a snapshot; headers (names and shapes in a full one) come on top.

    Args:
        bits: 32 or 16 in full, 8 or 4 as a difference.
    """
    num_blocks = len(Layout(shapes).slice_range(index, num_slices))
    return num_blocks * BLOCK_SIZE * bits // 8 if bits in FULL_DTYPES else code_bytes(num_blocks, bits)


def choose_bits(shapes: Shapes, budget_bytes: float, num_slices: int = 1) -> int:
    """The most bits per value of a difference whose largest slice fits in `budget_bytes`.

    Raises:
        ValueError: none does.
    """
    for bits in CODE_BITS:
        size_bytes = snapshot_bytes(shapes, bits, num_slices - 1, num_slices)  # the last is never smaller than others
        if size_bytes <= budget_bytes:
            return bits
    raise ValueError(
        f"a snapshot's budget of {budget_bytes:.0f} bytes is below {size_bytes}, what {CODE_BITS[-1]} bits per weight "
        "take: take snapshots less often (anchor_every), allow the anchor more bytes, or train fewer parameters"
    )


class SnapshotEncoder:
    """The fast circuit's end.

    Args:
        stage: whose weights.
        full_bits: of a value in a full snapshot, 16 or 32.
        delta_bits: of a value in a difference, 8 or 4.
        index, num_slices: which slice this end sends.
        exact: a new anchor gets the reference in float32 and the difference from it, which continues a run exactly,
            instead of a smaller full snapshot of the newest weights.

    Attributes:
        reference: (blocks of the slice, BLOCK_SIZE) float32, what the anchor holds; None before the first snapshot.

    Raises:
        ValueError: bits or slices that there are not.
    """

    def __init__(
        self,
        stage: int,
        full_bits: int = 16,
        delta_bits: int = 8,
        index: int = 0,
        num_slices: int = 1,
        exact: bool = False,
    ):
        if full_bits not in FULL_DTYPES:
            raise ValueError(f"full_bits={full_bits} must be 16 (bfloat16) or 32 (float32)")
        if delta_bits not in CODE_BITS:
            raise ValueError(f"delta_bits={delta_bits} must be one of {CODE_BITS}")
        if not 0 <= index < num_slices:
            raise ValueError(f"slice {index} must be one of {num_slices}, counted from 0")
        self._fields = {"stage": stage, "slice": index, "num_slices": num_slices}
        self._full_bits, self._delta_bits, self._exact = full_bits, delta_bits, exact
        self._layout: Layout | None = None
        self._anchor_holds_it = False
        self.reference: Tensor | None = None
        self.version: int | None = None

    def reset(self) -> None:
        """A new anchor has nothing: the next snapshot begins with all values."""
        self._anchor_holds_it = False
        if not self._exact:
            self._layout = self.reference = self.version = None

    def encode(self, version: int, weights: dict[str, Tensor]) -> Message:
        """The next message; the reference becomes what the anchor makes of it.

        Args:
            weights: by name, floating point, any device.

        Raises:
            ValueError: a weight is not finite, or names or shapes changed; the reference stays as it was.
        """
        layout = self._layout or Layout({name: tuple(tensor.shape) for name, tensor in weights.items()})
        part = layout.slice_range(self._fields["slice"], self._fields["num_slices"])
        blocks = layout.pack(weights)[part.start : part.stop].cpu()
        fields = {**self._fields, "version": version, "value_bits": 0, "code_bits": 0}
        tensors = {}
        if not self._anchor_holds_it:
            bits, values = (self._full_bits, blocks) if self.reference is None else (32, self.reference)
            fields |= {"value_bits": bits, "shapes": [[name, list(shape)] for name, shape in layout.shapes.items()]}
            tensors["values"] = values.to(FULL_DTYPES[bits])
        if self.reference is not None:
            fields |= {"code_bits": self._delta_bits, "base_version": self.version}
            tensors["codes"], tensors["scales"] = quantise(blocks - self.reference, self._delta_bits)
        message = Message("snapshot", fields, tensors)
        reference = advance(self.reference, message)
        if not reference.isfinite().all():
            names = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
            raise ValueError(f"weights are not finite at step {version}: {', '.join(names[:3])}")
        self._layout, self.reference, self.version, self._anchor_holds_it = layout, reference, version, True
        return message

    def state_tensors(self) -> dict[str, Tensor]:
        """What an exact continuation needs; {} before the first snapshot."""
        if self.reference is None:
            return {}
        return {"reference": self.reference.clone(), "version": torch.tensor(self.version)}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continues where `state_tensors` was taken; of use to an `exact` encoder of the same slice of the same model."""
        self.reset()
        if self._exact and tensors:
            self.reference, self.version = tensors["reference"].clone(), int(tensors["version"])


def advance(reference: Tensor | None, message: Message) -> Tensor:
    """The reference after a message: the one arithmetic of both ends."""
    if "values" in message.tensors:
        reference = message.tensors["values"].float()
    if "codes" in message.tensors:
        # Product and sum apart: fused, they would round once, and not on every device.
        codes, scales = message.tensors["codes"], message.tensors["scales"]
        reference = reference + restore(codes, scales, message.fields["code_bits"])
    return reference


class SnapshotDecoder:
    """The anchor's end, for one source.

    Attributes:
        layout: names and shapes of the stage, None before the first snapshot.
        reference: (blocks of the slice, BLOCK_SIZE) float32.
        version: optimizer step of the weights held.
    """

    def __init__(self):
        self.layout: Layout | None = None
        self.reference: Tensor | None = None
        self.version: int | None = None

    def decode(self, message: Message) -> None:
        """Takes the source's next message.

        Raises:
            MessageError: it does not fit the ones before; what is held stays as it was.
        """
        fields = message.fields
        layout = Layout(_read_shapes(fields.get("shapes"))) if fields["value_bits"] else self.layout
        if layout is None or not fields["value_bits"] and fields.get("base_version") != self.version:
            raise MessageError(
                f"a snapshot is a difference from step {fields.get('base_version')!r}, this end holds {self.version}"
            )
        if not fields["slice"] < fields["num_slices"]:
            raise MessageError(f"a snapshot has slice {fields['slice']} of {fields['num_slices']}")
        num_blocks = len(layout.slice_range(fields["slice"], fields["num_slices"]))
        _check_tensors(message, num_blocks)
        reference = advance(self.reference, message)
        self.layout, self.reference, self.version = layout, reference, fields["version"]


def _read_shapes(value: object) -> Shapes:
    if not isinstance(value, list):
        raise MessageError("a full snapshot has no list of shapes")
    shapes: Shapes = {}
    for row in value:
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], list)):
            raise MessageError(f"{row!r} is no name with a shape")
        if not all(type(size) is int and size >= 0 for size in row[1]):
            raise MessageError(f"{row[0]!r} has shape {row[1]!r}")
        shapes[row[0]] = tuple(row[1])
    return shapes


def _check_tensors(message: Message, num_blocks: int) -> None:
    value_bits, code_bits = message.fields["value_bits"], message.fields["code_bits"]
    if value_bits not in (0, *FULL_DTYPES) or code_bits not in (0, *CODE_BITS) or not value_bits + code_bits:
        raise MessageError(f"a snapshot has value_bits={value_bits} and code_bits={code_bits}")
    expected = {}
    if value_bits:
        expected["values"] = (FULL_DTYPES[value_bits], (num_blocks, BLOCK_SIZE))
    if code_bits:
        expected["codes"] = (torch.uint8, (num_blocks, BLOCK_SIZE * code_bits // 8))
        expected["scales"] = (torch.bfloat16, (num_blocks,))
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in message.tensors.items()}
    if found != expected:
        raise MessageError(f"a snapshot has {found}, {expected} was expected")
