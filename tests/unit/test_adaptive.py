"""How the measurements of all ranks become one model of a step, and what a rank takes for its computation."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from hf_meshadapt.adaptive import PassTimer, Workload, step_time
from hf_meshadapt.config import BoundaryConfig, MeshConfig
from hf_meshadapt.figures import StepMeter


def engine_of(mesh: MeshConfig, **boundary) -> SimpleNamespace:
    return SimpleNamespace(
        mesh=mesh,
        boundary=BoundaryConfig("transform", target_step_seconds=1.0, **boundary),
        busy_seconds=None,
        step_meter=StepMeter(),
        device=torch.device("cpu"),
    )


WORK = Workload(rows=8, length=16, accumulation=3, busy_seconds=0.5)


def test_the_slowest_replica_of_every_link_and_the_busiest_rank_count():
    engine = engine_of(MeshConfig(stages=3, replicas=2, microbatches=4))
    everyone = [
        {"busy": 0.5, "rates": [[0, 0, 1e-6]]},
        {"busy": 0.7, "rates": [[0, 1, 2e-6], [1, 0, 3e-6]]},
        {"busy": 0.1, "rates": [[1, 1, 4e-6]]},
        {"busy": 0.2, "rates": [[0, 0, 9e-6]]},
        {"busy": 0.2, "rates": [[0, 1, 1e-6], [1, 0, 8e-6]]},
        {"busy": 0.2, "rates": [[1, 1, 1e-6]]},
    ]
    model = step_time(engine, everyone, WORK)
    assert list(model.seconds_per_byte) == [(9e-6, 2e-6), (8e-6, 4e-6)]
    assert model.fixed_seconds == pytest.approx(3 * 0.7 * (1 + 2 / 4))
    assert (model.microbatches, model.accumulation, model.stages) == (4, 3, 3)


def test_interleaved_boundaries_go_over_the_links_of_their_stages():
    mesh = MeshConfig(stages=2, chunks_per_rank=2, microbatches=4, schedule="interleaved")
    facts = {"busy": 1.0, "rates": [[0, 0, 1e-6], [0, 1, 2e-6], [1, 0, 3e-6], [1, 1, 4e-6]]}
    model = step_time(engine_of(mesh), [facts], WORK)
    assert list(model.seconds_per_byte) == [(1e-6, 2e-6), (3e-6, 4e-6), (1e-6, 2e-6)]
    assert model.fixed_seconds == pytest.approx(3 * (1 + 1 / 8))


def test_a_given_rate_is_that_of_all_links():
    model = step_time(engine_of(MeshConfig(stages=3), link_bits_per_second=8e6), [{"busy": 0.0, "rates": []}], WORK)
    assert list(model.seconds_per_byte) == [(1e-6, 1e-6)] * 2


def test_waits_are_no_computation_and_the_first_pass_does_not_count():
    engine = engine_of(MeshConfig(stages=2, emulated=False))
    timer = PassTimer(engine)
    for seconds in (0.2, 0.03, 0.03):
        with timer.timing(), engine.step_meter.waiting():
            time.sleep(0.05)
        with timer.timing():
            time.sleep(seconds)
    assert max(timer.seconds[::2]) < 0.04 and min(timer.seconds[1::2]) >= 0.03
    timer.seconds = [0.9, 0.3, 0.4]
    assert timer.busy_seconds() == 0.4
    engine.mesh = MeshConfig(stages=2, replicas=2, emulated=True)
    assert timer.busy_seconds() == pytest.approx(0.1)  # one process does the work of four
    engine.busy_seconds = 7.0
    assert timer.busy_seconds() == 7.0
