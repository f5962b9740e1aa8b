"""What a chunk computes of a model that also holds the other chunks' parts, as in the emulated mesh."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt.config import MeshConfig
from hf_meshadapt.pipeline.split_run import cut_apart
from tests.architectures import VOCAB, make_architecture, make_batch

NUM_STAGES = 3


@pytest.fixture(params=["llama", "gpt2", "nemotron"])  # the last one's head is a matrix of its own
def chunks_and_calls(request):
    """Chunks of an emulated mesh in their order, the model's output head, and a list that grows when it is called."""
    (parts,) = cut_apart(make_architecture(request.param), MeshConfig(stages=NUM_STAGES, emulated=True))
    head, calls = parts.model.get_output_embeddings(), []
    head.register_forward_hook(lambda *args: calls.append(args))
    return [parts.stages[chunk] for chunk in range(NUM_STAGES)], head, calls


def test_only_the_last_chunks_forward_calls_the_output_head(chunks_and_calls):
    chunks, head, calls = chunks_and_calls
    batch = make_batch()
    passing, labels = (batch.pop("input_ids"),), batch["labels"]
    num_calls = []
    for chunk in chunks:
        passing = chunk(*passing, num_items=(labels[:, 1:] != -100).sum(), **batch)
        num_calls.append(len(calls))
    assert num_calls == [0, 0, 1]
    passing.backward()  # the last chunk's loss still reaches the head
    assert head.weight.grad.any() and len(calls) == 1


def test_only_the_last_chunks_probe_calls_the_output_head(chunks_and_calls):
    chunks, head, calls = chunks_and_calls
    num_calls = []
    for chunk in chunks:
        leaving = chunk.probe()
        num_calls.append(len(calls))
    assert num_calls == [0, 0, 1] and leaving.shape[-1] == head.weight.shape[0]


def test_the_whole_model_has_its_head_again_after_a_chunk_ran_or_raised(chunks_and_calls):
    chunks, head, calls = chunks_and_calls
    model = chunks[0].model
    chunks[0].probe()
    assert model.get_output_embeddings() is head
    with pytest.raises(IndexError):
        chunks[0](torch.full((1, 4), VOCAB))
    assert model.get_output_embeddings() is head
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert len(calls) == 1
