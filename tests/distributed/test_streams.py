"""Data that is not the same at every look: streams, and collators that draw random numbers."""

from __future__ import annotations

import tempfile

import pytest
import torch
from transformers import TrainerCallback

from hf_meshadapt.sampling import CountingCollator, Repeat, ReplicaStream

from ..equality import collate_fixed, mesh_trainer, tiny_model
from ..matrix.data import SizedStream, Stream, masked_at_random
from ..runs import fork


class Unsettle(TrainerCallback):
    """Puts every rank's generator into another state, as dropout does."""

    def __init__(self, rank: int):
        self.rank = rank

    def on_step_end(self, args, state, control, **kwargs):
        torch.rand(self.rank + 1)

    on_epoch_begin = on_step_end


def train(rank: int, *, data: dict, collator=collate_fixed, **options) -> dict:
    options = {"max_steps": 7, "learning_rate": 1e-2, "eval_steps": 3, "link_timeout_seconds": 30, **options}
    trainer = mesh_trainer(
        tiny_model("llama"), 4, tempfile.mkdtemp(), 21, collator, pipeline_stages=2, trainer={}, **options
    )
    for name, value in data.items():
        setattr(trainer, name, value)
    trainer.add_callback(Unsettle(rank))
    trainer.train()
    state = trainer.engine.parts.model.state_dict()
    logs = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    return {"weights": {name: state[name].clone() for name in trainer.engine.parts.saved_names()}, "eval_loss": logs}


def assert_equals_emulated(num_ranks: int, **options) -> None:
    ranks = fork(train, num_ranks, **options)
    emulated = train(0, data_parallel_replicas=num_ranks // 2, **options)
    for result in ranks:
        assert result["eval_loss"] == pytest.approx(emulated["eval_loss"], rel=1e-6)
        for name, tensor in result["weights"].items():
            assert torch.equal(tensor, emulated["weights"][name]), name


def test_coded_boundaries_on_a_stream():
    """The calibration looks at the stream's first rows."""
    data = {"train_dataset": Stream(21), "eval_dataset": Stream(9, 2)}
    assert_equals_emulated(4, data=data, preset="anchored", calibration_tokens=600)


@pytest.mark.parametrize("workers", [0, 1])
def test_stages_draw_the_same_random_numbers_for_the_data(workers):
    """The first stage reads the inputs, the last one the labels: they must be masked alike."""
    assert_equals_emulated(2, data={}, collator=masked_at_random, dataloader_num_workers=workers)


@pytest.mark.parametrize("num_rows", [1, 5, 12, 13])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_share_a_stream_in_rounds(num_rows, replicas):
    source = SizedStream(num_rows)
    shares = [list(ReplicaStream(source, 2, replicas, replica)) for replica in range(replicas)]
    assert {len(share) for share in shares} == {len(ReplicaStream(source, 2, replicas, 0))}
    rounds = len(shares[0]) // 2
    order = [row for index in range(rounds) for share in shares for row in share[2 * index : 2 * index + 2]]
    assert all(row is expected for row, expected in zip(order, source.rows))
    repeats = order[num_rows:]
    assert all(isinstance(row, Repeat) for row in repeats) and len(repeats) < 2 * replicas
    batch = CountingCollator(collate_fixed)(shares[-1][-2:])
    assert batch["num_real_rows"] == sum(not isinstance(row, Repeat) for row in shares[-1][-2:])
    assert len(batch["labels"]) == 2


def test_a_stream_without_a_length_has_none():
    with pytest.raises(TypeError):
        len(ReplicaStream(Stream(3), 2, 2, 0))
