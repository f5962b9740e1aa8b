"""Socket bytes of known transfers between forked gloo ranks, and of the planner's formulas."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from hf_meshadapt.config import BoundaryConfig, MeshConfig
from hf_meshadapt.figures import StepMeter, gather
from hf_meshadapt.mesh import MeshGroups, MeshTopology
from hf_meshadapt.metering import UNKNOWN_PEER, SocketMeter
from hf_meshadapt.planner import (
    GLOO_MESSAGE_BYTES,
    LinkBytes,
    ModelShape,
    all_gather_links,
    all_reduce_links,
    byte_plan,
)
from tests.equality import mesh_trainer, tiny_model
from tests.launch import run_ranks
from tests.runs import DENSE, fork

SENDER_HEADERS, RECEIVER_HEADERS = 96, 48  # bytes per message; their sum is GLOO_MESSAGE_BYTES


def spent(meter: SocketMeter, axis: str, action) -> dict[int, int]:
    """Bytes per peer that `action` sends on an axis; collective over WORLD."""
    before = meter.read().get(axis, {})
    action()
    # Gloo returns once the kernel has the data: let it leave, everywhere, before reading.
    dist.barrier()
    time.sleep(0.1)
    after = meter.read().get(axis, {})
    dist.barrier()
    return {peer: count - before.get(peer, 0) for peer, count in after.items() if count != before.get(peer, 0)}


def known_sends(rank: int) -> dict:
    dist.init_process_group("gloo")
    everyone = list(range(dist.get_world_size()))
    meter = SocketMeter()
    with meter.axis("pipeline"):
        pipeline = dist.new_group(everyone)
    with meter.axis("data_parallel"):
        data_parallel = dist.new_group([0, 1])
    meter.resolve_peers()

    def transfer(group, size_bytes, times):
        for _ in range(times):
            if rank == 0:
                dist.send(torch.zeros(size_bytes, dtype=torch.uint8), 1, group=group)
            elif rank == 1:
                dist.recv(torch.zeros(size_bytes, dtype=torch.uint8), 0, group=group)

    counts = {
        "big": spent(meter, "pipeline", lambda: transfer(pipeline, 4_000_000, 3)),
        "small": spent(meter, "data_parallel", lambda: transfer(data_parallel, 1, 100)),
        "other axis": spent(meter, "pipeline", lambda: transfer(data_parallel, 1000, 1)),
    }
    counts["axes"] = {axis: sorted(peers) for axis, peers in meter.read().items() if axis != "other"}
    return counts


@pytest.mark.parametrize("world_size", [2, 3])
def test_known_sends_land_on_their_axis_and_peer(tmp_path, world_size):
    counts = run_ranks(known_sends, world_size, tmp_path)
    assert SENDER_HEADERS + RECEIVER_HEADERS == GLOO_MESSAGE_BYTES
    assert counts[0]["big"] == {1: 12_000_000 + 3 * SENDER_HEADERS}
    assert counts[1]["big"] == {0: 3 * RECEIVER_HEADERS}
    assert counts[0]["small"] == {1: 100 + 100 * SENDER_HEADERS}
    assert counts[1]["small"] == {0: 100 * RECEIVER_HEADERS}
    assert all(count["other axis"] == {} for count in counts)
    for rank, count in enumerate(counts):
        others = [peer for peer in range(world_size) if peer != rank]
        assert count["axes"]["pipeline"] == others
        assert count["axes"].get("data_parallel", []) == [peer for peer in others if peer < 2 and rank < 2]
    assert all(count["big"] == {} for count in counts[2:])


ALL_REDUCE_BYTES = (400_000, 20_000_000)
FEW_VALUES = (1, 2, 3, 5, 10, 31)  # float64, as the figures on the axis `control` are


def collectives(rank: int) -> dict:
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    meter = SocketMeter()
    with meter.axis("data_parallel"):
        group = dist.new_group(list(range(world_size)))
    meter.resolve_peers(group)

    def gather():
        parts = [torch.zeros(1000) for _ in range(world_size)]
        dist.all_gather(parts, torch.zeros(1000), group=group)

    counts = {}
    for size_bytes in ALL_REDUCE_BYTES:
        tensor = torch.zeros(size_bytes // 4)
        counts[size_bytes] = spent(meter, "data_parallel", lambda tensor=tensor: dist.all_reduce(tensor, group=group))
    counts["gather"] = spent(meter, "data_parallel", gather)
    for num_values in FEW_VALUES:
        few = torch.zeros(num_values, dtype=torch.float64)
        counts[num_values] = spent(meter, "data_parallel", lambda few=few: dist.all_reduce(few, group=group))
    return counts


def framed(links: list[LinkBytes]) -> float:
    return sum(link.bytes + link.messages * GLOO_MESSAGE_BYTES for link in links)


def check_links(links: list[LinkBytes], counts: list[dict[int, int]]) -> None:
    """Each link's bytes within 3% of what its sender's socket counted, and the sum with all headers within 0.1%."""
    for link in links:
        counted = counts[link.from_rank][link.to_rank] - link.messages * SENDER_HEADERS
        # A ring's only other traffic on this connection: headers in answer to the peer's messages, at two ranks.
        counted -= link.messages * RECEIVER_HEADERS if len(links) == 2 else 0
        assert counted == pytest.approx(link.bytes, rel=0.03), link
    assert sum(sum(peers.values()) for peers in counts) == pytest.approx(framed(links), rel=1e-3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_send_what_the_planner_says(tmp_path, world_size):
    counts = run_ranks(collectives, world_size, tmp_path)
    ranks = list(range(world_size))
    for size_bytes in ALL_REDUCE_BYTES:
        links = list(all_reduce_links("data_parallel", ranks, size_bytes))
        check_links(links, [count[size_bytes] for count in counts])
    check_links(list(all_gather_links("control", ranks, 4000)), [count["gather"] for count in counts])
    for num_values in FEW_VALUES:
        links = list(all_reduce_links("control", ranks, 8 * num_values, 8))
        assert sum(sum(count[num_values].values()) for count in counts) == pytest.approx(framed(links))


PACKED_PLAN = byte_plan(
    ModelShape(hidden_size=512, vocab_size=10, num_layers=3, chunk_parameters=(1, 1, 1)),
    MeshConfig(stages=3, microbatches=4),
    BoundaryConfig("random_mask", mask_ratio=0.9),
    sequences=8,
    length=32,
)


def packed_pipeline(rank: int) -> list[dict[int, int]]:
    """Two steps of torch's own GPipe over stages that exchange (rows, length, kept) float32 tensors."""
    dist.init_process_group("gloo")
    meter = SocketMeter()
    groups = MeshGroups(MeshTopology(3, 1, rank), "gloo", 60.0, meter)
    meter.resolve_peers(groups.save)
    kept = PACKED_PLAN.boundary.num_kept(512)
    sample = torch.zeros(2, 32, kept, requires_grad=True)
    stage = PipelineStage(
        torch.nn.Linear(kept, kept), rank, 3, torch.device("cpu"), sample, sample.clone(), group=groups.pipeline
    )
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: (output - target).square().sum())
    batch = torch.ones(8, 32, kept)

    def step():
        schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if rank == 2 else {}))

    return [spent(meter, "pipeline", step) for _ in range(2)]


def test_a_pipeline_step_sends_what_the_planner_says(tmp_path):
    counts = run_ranks(packed_pipeline, 3, tmp_path)
    for link in (link for link in PACKED_PLAN.links if link.axis == "pipeline"):
        # Each connection also answers the peer's messages, of which there are as many.
        planned = link.bytes + link.messages * GLOO_MESSAGE_BYTES
        first, second = (step[link.to_rank] for step in counts[link.from_rank])
        assert second == planned, link
        # A schedule's first step begins with torch's vote on static shapes: one int32 each way.
        assert first == planned + 4 + GLOO_MESSAGE_BYTES, link
    total = sum(sum(second.values()) for _, second in counts)
    assert total == PACKED_PLAN.axis_bytes("pipeline") + PACKED_PLAN.framing_bytes("pipeline")


def mesh_groups(rank: int) -> dict:
    dist.init_process_group("gloo")
    topology = MeshTopology(stages=2, replicas=2, rank=rank)
    meter, steps = SocketMeter(), StepMeter()
    groups = MeshGroups(topology, "gloo", 60.0, meter)
    meter.resolve_peers(groups.save)
    peers = {axis: sorted(counts) for axis, counts in meter.read().items()}
    meter.take_axis_bytes()

    steps.start_step()
    neighbour = topology.rank_of(topology.replica, 1 - topology.stage)
    activation = torch.zeros(1_000_000, dtype=torch.uint8)
    if topology.is_first:
        dist.send(activation, neighbour, group=groups.pipeline)
    else:
        dist.recv(activation, neighbour, group=groups.pipeline)
    dist.all_reduce(torch.zeros(500_000), group=groups.data_parallel)
    with steps.waiting():
        time.sleep(0.2)
    steps.add_tokens(100)
    steps.end_step()
    dist.barrier(groups.save)

    def reduce(mine):
        total = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(total, group=groups.save)
        return total.tolist()

    return {"peers": peers, "logs": gather(steps.take(), meter.take_axis_bytes(), reduce, stages=2).logs()}


def test_mesh_groups_tell_the_meter_their_axes_and_logs_add_up_over_ranks(tmp_path):
    results = run_ranks(mesh_groups, 4, tmp_path)
    for rank, result in enumerate(results):
        other_stage, other_replica = [rank ^ 1], [rank ^ 2]
        peers = result["peers"]
        assert set(peers.pop("other")) <= {UNKNOWN_PEER, 0, 1, 2, 3}
        assert peers == {
            "pipeline": other_stage,
            "tied": other_stage,
            "data_parallel": other_replica,
            "control": sorted(other_stage + other_replica),
            "save": [peer for peer in range(4) if peer != rank],
        }
    logs = results[0]["logs"]
    assert all(result["logs"] == logs for result in results)
    # Two replicas of 100 tokens; each sends one megabyte forward, each stage all-reduces two over two ranks.
    assert logs["bytes_per_token_pipeline"] == pytest.approx(2 * 1_000_000 / 200, rel=0.01)
    assert logs["bytes_per_token_data_parallel"] == pytest.approx(2 * 2 * 2_000_000 / 200, rel=0.03)
    by_axis = sum(value for key, value in logs.items() if key.startswith("bytes_per_token_"))
    assert logs["bytes_per_token"] == pytest.approx(by_axis)
    assert 0.0 < logs["wait_share"] <= 1.0


STEPS_PER_LOG = 5
# Stages agree on norms, replicas on token counts; replicas that step apart on the mean norm too.
SYNCS = {"allreduce": {}, "streaming_diloco": {"dp_sync": "streaming_diloco", "sync_every": 4}}


def train_for_figures(rank: int, folder: Path, sync: str) -> dict[str, tuple[list[float], float]]:
    """By axis, bytes per step of each log, and as planned with all headers. The weights are bfloat16."""
    settings = DENSE | dict(max_steps=3 * STEPS_PER_LOG, logging_steps=STEPS_PER_LOG, gradient_accumulation_steps=1)
    settings |= dict(pipeline_stages=2, data_parallel_replicas=2, num_rows=100, **SYNCS[sync])
    trainer = mesh_trainer(tiny_model("llama").to(torch.bfloat16), 2, str(folder), **settings)
    trainer.train()
    plan = trainer.engine.plan(2, 16, 1)
    logs = [log for log in trainer.state.log_history if "bytes_per_token_control" in log]
    return {
        axis: (
            [log[f"bytes_per_token_{axis}"] * plan.tokens for log in logs],
            plan.axis_bytes(axis) + plan.framing_bytes(axis),
        )
        for axis in ("control", *(("data_parallel",) if sync == "allreduce" else ()))
    }


@pytest.mark.parametrize("sync", SYNCS)
def test_every_step_sends_what_is_planned(tmp_path, sync):
    for axis, ((start, *later), planned) in fork(train_for_figures, 4, folder=tmp_path, sync=sync)[0].items():
        assert later == pytest.approx([planned] * len(later), rel=1e-6 if axis == "control" else 0.01), axis
        assert start < 2 * planned  # the first steps agree on a little more
