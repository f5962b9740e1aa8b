"""The communication hook itself: over several buckets, dtypes and accumulation steps, against replicas in one process."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_meshadapt.config import DataParallelConfig
from hf_meshadapt.data_parallel.base import ChunkParameters
from hf_meshadapt.data_parallel.exchange import InProcess, OverGroup
from hf_meshadapt.data_parallel.hook import PowerSGDSynchronizer
from hf_meshadapt.pipeline.replicas import wrap_data_parallel
from tests.launch import run_ranks

CONFIG = DataParallelConfig("powersgd", matrix_rank=2)
NUM_REPLICAS, NUM_STEPS = 2, 3


class Mixed(nn.Module):
    """Float32 and bfloat16 layers, which DDP keeps in buckets apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(40, 30), nn.Linear(30, 50).bfloat16()
        self.third = nn.Linear(50, 20)

    def forward(self, inputs):
        return self.third(self.second(self.first(inputs).bfloat16()).float())


def loss_of(model: nn.Module, replica: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return model(torch.randn(8, 40, generator=generator)).square().mean()


def chunk_of(model: nn.Module) -> dict[int, ChunkParameters]:
    return {0: ChunkParameters(0, dict(model.named_parameters()), {})}


def train_rank(rank: int) -> tuple[list[dict[str, torch.Tensor]], list[tuple[bool, bool]]]:
    """Gradients after every step, and per bucket whether it was the last and whether its future was complete at once."""
    dist.init_process_group("gloo")
    model = Mixed()
    synchronizer = PowerSGDSynchronizer(CONFIG, OverGroup(dist.group.WORLD, 60.0), chunk_of(model), [])
    module = DistributedDataParallel(model, bucket_cap_mb=0.004, init_sync=False)
    on_bucket, seen = synchronizer.hook(0), []

    def watch(state, bucket):
        future = on_bucket(state, bucket)
        seen.append((bucket.is_last(), future.done()))
        return future

    module.register_comm_hook(None, watch)
    gradients = []
    for step in range(NUM_STEPS):
        module.zero_grad()
        with module.no_sync():
            loss_of(module, rank, 2 * step).backward()
        loss_of(module, rank, 2 * step + 1).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return gradients, seen


def test_all_buckets_are_averaged_with_the_last_as_in_one_process(tmp_path):
    ranks = run_ranks(train_rank, NUM_REPLICAS, tmp_path)
    torch.set_num_threads(1)
    models = [Mixed() for _ in range(NUM_REPLICAS)]
    expected = PowerSGDSynchronizer(CONFIG, InProcess(NUM_REPLICAS), chunk_of(models[0]), [])
    for step in range(NUM_STEPS):
        for replica, model in enumerate(models):
            model.zero_grad()
            for accumulation in range(2):
                loss_of(model, replica, 2 * step + accumulation).backward()
        averages = expected.average(0, [{name: p.grad for name, p in model.named_parameters()} for model in models])
        for gradients, _ in ranks:
            for name, average in averages.items():
                assert gradients[step][name].dtype == average.dtype
                assert torch.equal(gradients[step][name], average), name
    for _, seen in ranks:
        assert seen.count((True, True)) == NUM_STEPS  # one sync per optimizer step, by the last bucket
        assert set(seen) == {(True, True), (False, False)} and len(seen) > 2 * NUM_STEPS


class Coded(nn.Module):
    """Returns what a coded boundary sends: bytes, and a carrier for the gradient that comes back."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs, uses_all: bool):
        hidden = self.used(inputs)
        hidden = self.sometimes(hidden) if uses_all else hidden
        return hidden.detach().to(torch.uint8), hidden


def leave_out(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of the second layer, which replica 0 uses in the first pass and nobody in the second."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    model = Coded()
    module, gradients = wrap_data_parallel(model, dist.group.WORLD), []
    for used_by in (0, None):
        module.zero_grad()
        module(torch.ones(2, 6), rank == used_by)[-1].sum().backward()
        gradients.append((model.used.weight.grad.clone(), model.sometimes.weight.grad.clone()))
    return gradients


def test_a_pass_that_leaves_a_parameter_out_stops_nobody(tmp_path):
    first, second = run_ranks(leave_out, 2, tmp_path)
    for ours, theirs in zip(first, second):
        assert all(map(torch.equal, ours, theirs))
    assert first[0][1].any() and not first[1][1].any() and first[1][0].any()
