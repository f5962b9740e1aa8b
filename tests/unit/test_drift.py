"""Comparing replicas: what is hashed, what an error says, and that the emulated mesh compares its tied copies."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt.data_parallel.base import AllReduce
from hf_meshadapt.drift import DriftCheck, ReplicaDriftError, groups_in_words, hash64
from tests.equality import mesh_trainer, tiny_model


def flipped(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """With the lowest bit of one entry changed."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    copy = tensor.clone()
    copy.view(integers).view(-1)[place] ^= 1
    return copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_bit_of_every_tensor_counts(dtype):
    tensors = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(4).to(dtype)}
    whole = hash64(tensors)
    assert whole == hash64({name: tensors[name].clone() for name in ("b", "a")}) and -(2**63) <= whole < 2**63
    for name, tensor in tensors.items():
        for place in range(tensor.numel()):
            assert hash64(tensors | {name: flipped(tensor, place)}) != whole
    assert hash64({"a": tensors["a"].view(5, 3), "b": tensors["b"]}) != whole
    assert hash64({"a": tensors["a"], "c": tensors["b"]}) != whole


def test_words_name_who_holds_the_same():
    assert groups_in_words([7, 7, 5, 7]) == "replicas 0, 1, 3 | replica 2"
    assert groups_in_words([1, 2]) == "replica 0 | replica 1"


def checked(tmp_path, **options):
    settings = dict(pipeline_stages=2, data_parallel_replicas=2, max_steps=3, eval_strategy="no", learning_rate=1e-2)
    return mesh_trainer(tiny_model("llama_tied"), 4, str(tmp_path), 21, check_replicas_every=2, **settings, **options)


@pytest.mark.parametrize("sync", [{}, {"dp_sync": "diloco", "sync_every": 2}], ids=str)
def test_the_emulated_mesh_compares_its_tied_copies(tmp_path, sync):
    trainer = checked(tmp_path, **sync)
    trainer.train()
    assert trainer.engine.drift.passed_step == 2
    agreed = trainer.engine.replication.synchronizer.agreed()
    agreed["lm_head.weight"].copy_(flipped(agreed["lm_head.weight"], 5))
    trainer.engine.drift.end_step(3)  # not due
    with pytest.raises(
        ReplicaDriftError, match=r"after step 4 \(alike at step 2\) the copies of the tied embedding on st"
    ):
        trainer.engine.drift.end_step(4)


class TwoReplicas:
    """Ranks of a stage whose other replica's hashes are given, and another stage whose verdict is."""

    def __init__(self, topology, mesh, others, stage_row):
        self.topology, self.mesh, self.others, self.stage_row = topology, mesh, iter(others), stage_row

    def gather_over_replicas(self, mine):
        return torch.stack([mine, next(self.others)(mine)])

    def gather_over_stages(self, mine):
        return torch.stack([mine, self.stage_row])


def test_a_rank_names_its_own_parameters_and_other_stages(tmp_path):
    engine = checked(tmp_path).engine
    synchronizer = AllReduce(engine.data_parallel, None, engine.replication.synchronizer.chunks, [{}])

    def one_differs(mine):
        return torch.cat([mine[:1] + 1, mine[1:]])

    both = TwoReplicas(engine.topology, engine.mesh, [lambda mine: mine + 1, one_differs], torch.tensor([1, 0]))
    with pytest.raises(ReplicaDriftError) as error:
        DriftCheck(both, synchronizer, 1).end_step(1)
    first = next(iter(synchronizer.agreed()))
    for text in (
        "replicas of stage 0 (ranks 0, 2)",
        "stage 1 (ranks 1, 3)",
        f"1 differ: {first} (replica 0 | replica 1)",
    ):
        assert text in str(error.value)
    never = DriftCheck(None, synchronizer, None)
    never.end_step(1)
