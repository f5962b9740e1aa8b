"""What really crosses the sockets: masks cut the pipeline axis as planned, and replicas sync once per optimizer step."""

import pytest

from ..traffic import run


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_masked_bytes_on_sockets(stages, exact, tmp_path):
    dense = run(tmp_path / "dense", stages, 1, wire_dtype="bfloat16")
    masked = run(tmp_path / "masked", stages, 1, mask_ratio=0.95, wire_dtype="bfloat16", exact_first_token=exact)
    ratio = masked["measured"]["pipeline"][-1] / dense["measured"]["pipeline"][-1]
    planned = masked["planned"]["pipeline"] / dense["planned"]["pipeline"]
    assert ratio <= (planned + 0.006 if exact else 0.056), (ratio, planned)
    for result in (dense, masked):
        for measured in result["measured"]["pipeline"]:
            assert measured == pytest.approx(result["planned"]["pipeline"] + result["framing"]["pipeline"], rel=0.03)


@pytest.mark.parametrize("stages", [1, 2])
def test_one_gradient_sync_per_optimizer_step(stages, tmp_path):
    """torch's pipeline stage would reduce at every accumulation step: three times the bytes."""
    result = run(tmp_path, stages, 2)
    for measured in result["measured"]["data_parallel"]:
        assert measured == pytest.approx(result["planned"]["data_parallel"], rel=0.03)
