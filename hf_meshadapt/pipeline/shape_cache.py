"""Keeps what was made for the latest batch shapes: a pipeline's buffers are sized once, for one shape each."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)
Made = TypeVar("Made")
MOST_SHAPES = 32


class ShapeCache(Generic[Made]):
    """Least recently used first out, with one warning when that begins.

    Args:
        most: shapes kept.
    """

    def __init__(self, most: int = MOST_SHAPES):
        self.most = most
        self._made: OrderedDict[Hashable, Made] = OrderedDict()
        self._warned = False

    def get(self, shape: Hashable, make: Callable[[], Made]) -> Made:
        """What was made for this shape, now the latest; made if need be."""
        if shape not in self._made:
            self._drop_oldest()
            self._made[shape] = make()
        self._made.move_to_end(shape)
        return self._made[shape]

    def keep(self, wanted: Callable[[Hashable], bool]) -> None:
        """Drops all other shapes."""
        self._made = OrderedDict((shape, made) for shape, made in self._made.items() if wanted(shape))

    def __len__(self) -> int:
        return len(self._made)

    def _drop_oldest(self) -> None:
        # Before the next one is made: their buffers need not exist at the same time.
        if len(self._made) < self.most:
            return
        self._made.popitem(last=False)
        if not self._warned:
            self._warned = True
            logger.warning(
                "batches of more than %d shapes (rows, padded length, training or evaluation): buffers are made anew for "
                "each that has not been seen lately. Pad to fewer lengths: pad_to_multiple_of=64 in the data collator "
                "(MeshAdaptSFTConfig has a field of this name)",
                self.most,
            )
