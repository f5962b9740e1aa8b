"""What a synchronisation sends, from shapes alone. Pure arithmetic that the planner and the aggregators share."""

from __future__ import annotations

import math
from collections.abc import Iterable

Shape = tuple[int, ...]

INT8_BLOCK = 256  # values that share a scale
INT8_SCALE_BYTES = 4  # a float32


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Rows and columns of a parameter taken for a matrix: all dims but the last are rows."""
    return math.prod(shape[:-1]), shape[-1]


def is_compressed(shape: Shape, matrix_rank: int) -> bool:
    """Whether factors of this rank are smaller than the parameter; then the rank is below both its sides."""
    if len(shape) < 2:
        return False
    rows, columns = matrix_shape(shape)
    return matrix_rank * (rows + columns) < rows * columns


def powersgd_values(shapes: Iterable[Shape], matrix_rank: int) -> tuple[int, int]:
    """Values in the two messages of a PowerSGD sync: the factors of the smaller sides; those of the larger and the rest."""
    first = second = 0
    for shape in shapes:
        if is_compressed(shape, matrix_rank):
            first += matrix_rank * min(matrix_shape(shape))
            second += matrix_rank * max(matrix_shape(shape))
        else:
            second += math.prod(shape)
    return first, second


def int8_bytes(num_values: int) -> int:
    """Bytes of values quantised to 8 bits in blocks."""
    return num_values + -(-num_values // INT8_BLOCK) * INT8_SCALE_BYTES
