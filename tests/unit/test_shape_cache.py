"""How many batch shapes a pipeline keeps buffers for, and what it says when there are more."""

from __future__ import annotations

from hf_meshadapt.pipeline.shape_cache import ShapeCache
from tests.runs import collect_warnings


def test_the_least_recently_used_shape_goes_first():
    cache, made = ShapeCache(2), []

    def get(shape: int) -> str:
        return cache.get(shape, lambda: made.append(shape) or f"for {shape}")

    for shape in (1, 2, 1, 3, 1, 2):
        assert get(shape) == f"for {shape}"
        assert len(cache) <= 2
    assert made == [1, 2, 3, 2]  # 3 pushed 2 out, since 1 was used in between


def test_an_old_shape_is_gone_before_the_next_is_made():
    cache = ShapeCache(1)
    cache.get(1, str)
    assert cache.get(2, lambda: len(cache)) == 0


def test_one_warning_names_the_remedy():
    warnings, cache = collect_warnings(), ShapeCache(2)
    cache.get(1, str)
    cache.get(2, str)
    assert not warnings
    for shape in range(9):
        cache.get(shape, str)
    (warning,) = warnings
    assert "more than 2 shapes" in warning and "pad_to_multiple_of" in warning


def test_keep_drops_the_others():
    cache, made = ShapeCache(3), []
    for shape in (1, 2, 3):
        cache.get(shape, str)
    cache.keep(lambda shape: shape != 2)
    assert len(cache) == 2
    for shape in (1, 3, 2):
        cache.get(shape, lambda shape=shape: made.append(shape))
    assert made == [2]
