"""Orders of passes: each microbatch once each way, no deadlock, few activations held."""

import pytest

from hf_meshadapt.pipeline.schedule import ORDERS


def simulate(order: str, num_microbatches: int, num_stages: int) -> list[int]:
    """Runs all stages by dependency; returns the most activations each held at once. Raises if stuck."""
    plans = [ORDERS[order](num_microbatches, stage, num_stages) for stage in range(num_stages)]
    done: set[tuple[int, str, int]] = set()
    position, held, most = [0] * num_stages, [0] * num_stages, [0] * num_stages
    while any(position[s] < len(plans[s]) for s in range(num_stages)):
        moved = False
        for stage, plan in enumerate(plans):
            if position[stage] == len(plan):
                continue
            kind, i = plan[position[stage]]
            if kind == "F":
                ready = stage == 0 or (stage - 1, "F", i) in done
            else:
                ready = (stage, "F", i) in done and (stage == num_stages - 1 or (stage + 1, "B", i) in done)
            if ready:
                done.add((stage, kind, i))
                position[stage] += 1
                held[stage] += 1 if kind == "F" else -1
                most[stage] = max(most[stage], held[stage])
                moved = True
        assert moved, "deadlock"
    return most


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
def test_orders_run_to_the_end(order, num_microbatches, num_stages):
    for stage in range(num_stages):
        plan = ORDERS[order](num_microbatches, stage, num_stages)
        assert sorted(plan) == sorted((kind, i) for kind in "FB" for i in range(num_microbatches))
        # The gradient accumulates in the same order everywhere, which bit-equality with the emulated mesh needs.
        assert [i for kind, i in plan if kind == "B"] == list(range(num_microbatches))
    most = simulate(order, num_microbatches, num_stages)
    if order == "1f1b":
        assert all(count <= num_stages - stage for stage, count in enumerate(most))
