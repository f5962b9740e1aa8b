"""Two circuits, each its own launch: the same run as in one process, and what happens when the anchor does not come."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_meshadapt.anchor.handshake import SECRET_VARIABLE

from ..adapters import lora
from ..circuits import (
    FAST,
    NUM_ROWS,
    ROWS,
    anchor,
    free_ports,
    join_anchor,
    paced,
    run_both,
    start_anchor,
    train_fast,
)
from ..equality import mesh_trainer, tiny_model
from ..runs import fork

ANCHOR = dict(anchor=True, anchor_every=3, prior_rank=8, max_steps=8)
# A wide budget for narrow channels, and fits with every prior.
CALIBRATED = dict(
    pipeline_stages=2, preset="anchored", boundary_budget=0.4, calibration_tokens=300, calibration_every=1
)
TWO = dict(pipeline_stages=2)
# Replicas that step apart.
APART = dict(dp_sync="streaming_diloco", sync_every=4, num_fragments=2, overlap_steps=1, outer_wire="int8")
LATE = lora(target_modules=["q_proj", "v_proj"], layers_to_transform=[3])
CASES = {
    "3x1+2": (
        3, "llama_tied",
        dict(
            **CALIBRATED | dict(pipeline_stages=3, wire_dtype="float32"), num_anchors=2, correction_rule="blend",
            anchor_batches=2, tolerance=1e-6, anchor_every=None, anchor_budget=0.5, max_steps=17,
        ),
    ),
    "3x1+2, paper": (
        3, "gpt2",
        dict(
            pipeline_stages=3, preset="paper", wire_dtype="float32", num_anchors=2, boundary_predictor="mean",
            calibration_tokens=300, calibration_every=4, tolerance=1e-6,
        ),
    ),
    "2x1": (2, "llama_tied", dict(**CALIBRATED, correction_rule="blend", anchor_batches=2)),
    "2x2": (4, "llama_tied", CALIBRATED),
    "masked": (
        2, "llama_tied",
        dict(
            pipeline_stages=2, mask_ratio=0.5, correction_rule="blend", anchor_batches=2, anchor_every=None,
            anchor_budget=0.42, max_steps=17,
        ),
    ),
    "masked mean": (
        4, "gpt2",
        dict(pipeline_stages=2, mask_ratio=0.5, boundary_predictor="mean", calibration_tokens=300, calibration_every=4),
    ),
    "interleaved": (
        2, "gpt2",
        dict(**CALIBRATED, pipeline_chunks_per_rank=2, pipeline_schedule="interleaved", anchor_snapshot_bits=4),
    ),
    "1x2": (2, "llama", dict(pipeline_stages=1, correction_rule="anchor_only")),
    # The first stage has nothing to train, and goes by the same priors all the same.
    "late adapters": (2, "llama", dict(**CALIBRATED, trainer={"peft_config": LATE})),
}  # fmt: skip
SLOW = pytest.mark.slow


def assert_same_run(ranks: list[dict], emulated: dict, tolerance: float = 0.0) -> None:
    names = set()
    for rank in ranks:
        names |= rank["weights"].keys()
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, emulated["weights"][name], rtol=0, atol=tolerance, msg=name)
        for name, tensor in rank["fits"].items():
            torch.testing.assert_close(tensor, emulated["fits"][name], rtol=0, atol=tolerance, msg=name)
        for row, other in zip(rank["metrics"], emulated["metrics"], strict=True):
            assert [row.get(name) for name in ("weight", "prior_age_steps", "prior_version")] == [
                other.get(name) for name in ("weight", "prior_age_steps", "prior_version")
            ]
        assert rank["report"]["anchor"] == emulated["report"]["anchor"]
    assert names == emulated["weights"].keys()


@pytest.mark.parametrize("case", ["3x1+2", *(pytest.param(name, marks=SLOW) for name in CASES if name != "3x1+2")])
def test_a_deterministic_run_is_that_of_one_process(case, tmp_path):
    """Bit for bit, but for an anchor that is cut in another way."""
    torch.set_num_threads(1)
    num_ranks, kind, options = CASES[case]
    options = {**ANCHOR, **options}
    tolerance = options.pop("tolerance", 0.0)
    ranks = run_both(tmp_path / "mesh", num_ranks, kind, **options, anchor_deterministic=True)
    options.pop("num_anchors", None)
    replicas = num_ranks // options["pipeline_stages"]
    emulated = train_fast(0, folder=tmp_path, kind=kind, data_parallel_replicas=replicas, **options)
    assert_same_run(ranks, emulated, tolerance)
    assert any(row["weight"] > 0 for row in emulated["metrics"])
    every = options["anchor_every"]
    assert emulated["report"]["anchor"]["anchor_every_chosen"] == (every is None)
    assert 10 < emulated["report"]["anchor"]["anchor_every"] < 23 or every == 3
    # Of eight steps: snapshots before the first, fourth and seventh, two of which come in time; of 17 the first alone.
    asked = options.get("calibration_every")
    expected = {None: 0, 1: 2 if every else 1, 4: 1}[asked]
    assert emulated["report"]["anchor"]["num_calibrations"] == expected


@SLOW
@pytest.mark.parametrize("step,every", [(4, 1), (6, 4)])
def test_a_deterministic_run_resumes_exactly(step, every, tmp_path):
    """Step 4: a prior is being taken in. Step 6: a snapshot is due, and the prior before it has come; so have its fits,
    or a new anchor is told that the last are younger than four steps."""
    torch.set_num_threads(1)
    options = {**ANCHOR, **CALIBRATED, "calibration_every": every, "dropout": 0.2, "anchor_deterministic": True}
    whole = run_both(tmp_path, 2, "llama_tied", save_at=(step,), **options)
    resumed = run_both(tmp_path, 2, "llama_tied", resume=tmp_path / f"checkpoint-{step}", **options)
    for one, other in zip(resumed, whole):
        assert_same_run([one], other | {"metrics": other["metrics"][step:]})


# Free-running ---------------------------------------------------------------------------------------------------------


def steps_of(ranks: list[dict], name: str) -> list:
    """A metric by step, the same on all ranks."""
    first, *others = [[row.get(name) for row in rank["metrics"]] for rank in ranks]
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("sync", [{}, pytest.param(APART, marks=SLOW)], ids=["together", "apart"])
def test_all_ranks_take_a_prior_at_the_same_step_and_its_bytes_are_metered(sync, tmp_path):
    torch.set_num_threads(1)
    options = {**ANCHOR, **CALIBRATED, **sync, "anchor_every": 2, "max_steps": 30}
    ranks = run_both(tmp_path, 4, "llama_tied", hook=paced(0.1), **options)
    versions = [version for version in steps_of(ranks, "prior_version") if version is not None]
    assert versions and versions == sorted(versions)
    assert min(age for age in steps_of(ranks, "prior_age_steps") if age is not None) >= 2
    held: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, tensor in (rank["weights"] | rank["fits"]).items():
            assert torch.equal(held.setdefault(name, tensor), tensor), name
    report = ranks[0]["report"]
    assert all(rank["report"]["anchor"] == report["anchor"] for rank in ranks)
    assert report["anchor"]["num_live_steps"] > 0
    assert ranks[0]["logs"][-2]["anchor_connected"] == 1
    # The first snapshot is whole, twice what later ones are; words between the circuits come on top.
    figures, tokens = report["anchor"], 2 * ROWS * 16 * options["max_steps"]
    sent_bytes = report["bytes_per_token"]["anchor"] * tokens
    snapshot_bytes, prior_bytes = figures["snapshot_bytes"], figures["prior_bytes"] + figures["calibration_bytes"]
    # One with every prior, the last of which may still be on its way into the optimizer.
    assert figures["num_calibrations"] - figures["num_priors"] in (0, 1)
    least = (figures["num_snapshots"] - 1) * snapshot_bytes + 2 * figures["num_priors"] * prior_bytes
    assert least < sent_bytes < 1.5 * least + 6 * (snapshot_bytes + prior_bytes)


def test_without_its_anchor_a_run_is_one_without_priors(tmp_path, capfd):
    """The first step says that it is much beside the pipeline, however rarely it comes, and that no anchor is there; the
    first log that the link is too slow for what is asked of it."""
    torch.set_num_threads(1)
    chosen = {"anchor_every": None, "anchor_budget": 0.2, "max_staleness_steps": 26}
    options = {**ANCHOR, **chosen, "pipeline_stages": 2, "max_steps": 3, "anchor_rate_bits_per_second": 1e4}
    endpoint = f"127.0.0.1:{free_ports(2)}"
    ranks = fork(train_fast, 2, folder=tmp_path, kind="llama_tied", fast_endpoint=endpoint, **options)
    plain = mesh_trainer(
        tiny_model("llama_tied"), ROWS, str(tmp_path), NUM_ROWS, pipeline_stages=2, **FAST, max_steps=3
    )
    plain.train()
    for rank in ranks:
        for name, tensor in rank["weights"].items():
            assert torch.equal(tensor, plain.engine.parts.model.state_dict()[name]), name
    assert steps_of(ranks, "weight") == [0, 0, 0]
    assert ranks[0]["report"]["anchor"]["num_snapshots"] == 0 == ranks[0]["logs"][0]["anchor_connected"]
    much, slow = ranks[0]["warnings"]
    assert slow.startswith("anchor_every=11 is too small for the link") and not ranks[1]["warnings"]
    assert much.startswith("the anchor takes ") and "of what the pipeline would send uncoded" in much
    assert "anchor_every=11 was chosen and is bounded by max_staleness_steps=26" in much
    assert all(rank["report"]["anchor"]["anchor_every"] == 11 for rank in ranks)
    assert capfd.readouterr().out.count("step 1: no anchor connected yet\n") == 1


@SLOW
def test_an_anchor_outlives_a_fast_circuit_that_fails(tmp_path):
    """It serves the next attempt, which resumes; what it computed for the first does not get into it."""
    torch.set_num_threads(1)
    endpoint = f"127.0.0.1:{free_ports(2)}"
    options = {**ANCHOR, "pipeline_stages": 2, "anchor_every": 2, "fast_endpoint": endpoint, "max_steps": 40}
    with anchor("llama_tied", tmp_path, **options) as (process,):
        run = dict(folder=tmp_path, kind="llama_tied", **options)
        assert fork(train_and_fail, 2, save_at=(6,), **run) == ["gave up", "gave up"]
        assert process.is_alive()
        ranks = fork(train_fast, 2, hook=paced(0.1), resume=tmp_path / "checkpoint-6", **run)
    versions = [version for version in steps_of(ranks, "prior_version") if version is not None]
    assert versions and versions == sorted(versions) and max(versions) >= 6
    assert max(steps_of(ranks, "weight")) == 1


def train_and_fail(rank: int, **options) -> str:
    def fail_at_step_12(trainer) -> None:
        paced(0.1)(trainer)
        begin_step = trainer.anchoring.begin_step

        def begin(step: int) -> None:
            if step == 12:
                raise RuntimeError("gave up")
            begin_step(step)

        trainer.anchoring.begin_step = begin

    with pytest.raises(RuntimeError) as caught:
        train_fast(rank, hook=fail_at_step_12, **options)
    return str(caught.value)


@SLOW
@pytest.mark.parametrize("num_anchors,mesh", [(1, TWO), (2, TWO), (1, {"pipeline_stages": 1, **APART})], ids=str)
def test_a_killed_anchor_leaves_the_run_without_priors_and_a_new_one_brings_them(num_anchors, mesh, tmp_path):
    """Its last rank is killed; the others end by themselves, and say why."""
    torch.set_num_threads(1)
    endpoint = f"127.0.0.1:{free_ports(2)}"
    options = {**ANCHOR, **mesh, "anchor_every": 2, "max_staleness_steps": 12, "fast_endpoint": endpoint}
    options |= {"max_steps": 160, "logging_steps": 1}
    started = []

    def watch(trainer) -> None:
        """Rank 0 says what it sees; the test acts on it."""
        end_step = trainer.anchoring.end_step

        def end() -> None:
            end_step()
            if trainer.engine.topology.rank == 0:
                weight = trainer.anchoring.optimizer.metrics()["weight"]
                (tmp_path / "weight").write_text(f"{int(weight > 0)} {trainer.state.global_step}")
            time.sleep(0.05)

        trainer.anchoring.end_step = end

    def await_weight(wanted: str) -> int:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            path = tmp_path / "weight"
            words = path.read_text().split() if path.exists() else []
            if len(words) == 2 and words[0] == wanted:
                return int(words[1])
            time.sleep(0.01)
        raise AssertionError(f"the prior's weight did not become {wanted}")

    def act() -> None:
        await_weight("0")  # it trains before there is an anchor
        started.append(start_anchor("llama_tied", tmp_path / "first", num_anchors, **options))
        steps.append(await_weight("1"))
        os.kill(started[0][-1].pid, signal.SIGKILL)
        for process in started[0]:
            process.join(30)
            assert process.exitcode
        steps.append(await_weight("0"))
        started.append(start_anchor("llama_tied", tmp_path, num_anchors, **options))
        steps.append(await_weight("1"))

    steps: list[int] = []
    with ThreadPoolExecutor() as pool:
        acting = pool.submit(act)
        ranks = fork(train_fast, 2, folder=tmp_path, kind="llama_tied", hook=watch, **options)
        acting.result()
    join_anchor(started[1], tmp_path)
    errors = [path.read_text() for path in (tmp_path / "first").glob("anchor-error-*.txt")]
    assert len(errors) == num_anchors - 1
    assert all("LinkError: rank 0 (stage 0 of replica 0) waited for the anchor" in error for error in errors)
    assert 0 < steps[0] < steps[1] < steps[2] < 160
    weights = steps_of(ranks, "weight")
    assert weights[0] == 0 and 0 in weights[steps[0] : steps[2]] and 1 in weights[steps[2] :]
    connected = [log["anchor_connected"] for log in ranks[0]["logs"] if "anchor_connected" in log]
    assert connected[0] == 0 and 1 in connected and 0 in connected[connected.index(1) :]


def test_a_port_that_is_taken_is_named_on_all_ranks(tmp_path):
    torch.set_num_threads(1)
    with socket.socket() as taken:
        first = free_ports(2)
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        options = {**ANCHOR, "pipeline_stages": 2, "fast_endpoint": f"127.0.0.1:{first}"}
        messages = fork(fail, 2, folder=tmp_path, kind="llama_tied", **options)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"fast_endpoint='127.0.0.1:{first}': stage 1 cannot listen on port {first + 1}")


def fail(rank: int, **options) -> str:
    with pytest.raises(ValueError) as caught:
        train_fast(rank, **options)
    return str(caught.value)


def test_a_missing_secret_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    options = dict(**ANCHOR, pipeline_stages=2, circuit="anchor", fast_endpoint="127.0.0.1:1")
    with pytest.raises(ValueError, match=f"set {SECRET_VARIABLE}"):
        mesh_trainer(tiny_model("llama"), ROWS, str(tmp_path), **options)
