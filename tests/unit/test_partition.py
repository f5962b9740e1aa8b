import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_meshadapt.pipeline.partition import chunk_spans, split_layers


def slowest(split, head: float, embedding: float) -> float:
    costs = [float(layers) for layers in split]
    costs[0] += embedding
    costs[-1] += head
    return max(costs)


@given(st.integers(1, 9), st.integers(1, 5), st.floats(0, 9), st.floats(0, 3))
def test_split_is_optimal(num_layers, num_chunks, head, embedding):
    if num_chunks > num_layers:
        with pytest.raises(ValueError, match=f"{num_layers} layers"):
            split_layers(num_layers, num_chunks, head, embedding)
        return
    split = split_layers(num_layers, num_chunks, head, embedding)
    assert sum(split) == num_layers and min(split) >= 1 and len(split) == num_chunks
    cuts = itertools.combinations(range(1, num_layers), num_chunks - 1)
    every = ([b - a for a, b in itertools.pairwise((0, *cut, num_layers))] for cut in cuts)
    assert slowest(split, head, embedding) == min(slowest(other, head, embedding) for other in every)


def test_known_splits():
    assert split_layers(7, 3) == (2, 2, 3)
    assert split_layers(30, 2, head_cost=8) == (19, 11)  # SmolLM2-135M: its head costs eight layers


def test_spans_cover_every_layer_once():
    assert chunk_spans((2, 3, 2), 7) == [range(0, 2), range(2, 5), range(5, 7)]
    for wrong in [(2, 3), (7, 1), (8, 0)]:
        with pytest.raises(ValueError, match="pipeline_split"):
            chunk_spans(wrong, 7)
