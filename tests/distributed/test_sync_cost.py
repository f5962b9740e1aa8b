"""The time of synchronisations over processes: all of them are seen, and a run is warned once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_meshadapt.sync_cost import TIMED_STEPS, WARM_UP_STEPS
from tests.equality import mesh_trainer, tiny_model
from tests.runs import DENSE, collect_warnings, fork

# Messages that are large enough to tell a rate, of a tiny model.
POWERSGD = dict(dp_sync="powersgd", matrix_rank=24)
STREAMING = dict(dp_sync="streaming_diloco", sync_every=4, num_fragments=1, overlap_steps=1, outer_wire="int8")


def train(rank: int, *, folder: Path, **sync) -> tuple[list[str], int, float | None]:
    warnings, settings = collect_warnings(), DENSE | dict(max_steps=TIMED_STEPS + 1, num_rows=100)
    settings |= dict(gradient_accumulation_steps=1, **sync)
    trainer = mesh_trainer(tiny_model("llama"), 4, str(folder), pipeline_stages=1, **settings)
    assert trainer.engine.sync_cost.saved_bytes > 0
    trainer.engine.sync_cost.saved_bytes = 0.0  # then no computation pays, however fast this machine is
    trainer.train()
    clock = trainer.engine.replication.synchronizer.exchange.clock
    assert 0 < clock.exchange_seconds < clock.sync_seconds
    return warnings, clock.num_syncs, clock.seconds_per_byte


@pytest.mark.parametrize("sync", [POWERSGD, STREAMING], ids=lambda sync: sync["dp_sync"])
def test_every_sync_is_timed_and_the_warning_comes_once(tmp_path, sync):
    for rank, (warnings, num_syncs, seconds_per_byte) in enumerate(fork(train, 2, folder=tmp_path, **sync)):
        (warning,) = warnings
        assert f"dp_sync='{sync['dp_sync']}' costs rank {rank} (stage 0 of replica {rank}) more time" in warning
        assert seconds_per_byte > 0
        # After the warm-up: one a step; or one after every fourth step and one after the last.
        steps = TIMED_STEPS + 1 - WARM_UP_STEPS
        assert num_syncs == (steps if sync is POWERSGD else 5 + 1)
