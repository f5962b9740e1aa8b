"""One gradient sync by PowerSGD against torch's `powerSGD_hook` at the same rank: time, bytes on sockets, and error.

Two gloo ranks on this machine hold `--layers` layers of SmolLM2-135M as a bare list of parameters, whose gradients are
drawn, not computed, so that a step is little else than the sync. Torch's hook runs with error feedback and warm start,
float32 (it has no other wire), one bucket; ours with factors in float32 and bfloat16. Steps of all are interleaved.
`time_ratio` and `bytes_ratio` are ours over torch's, below 1 where ours is better. `error` is the distance between all
gradients added up and all averages added up, over the former; `error_ratio` is ours over torch's, which sends the
first two steps whole.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import print_table, quartiles, write_result
from hf_meshadapt.config import DataParallelConfig
from hf_meshadapt.data_parallel.base import ChunkParameters
from hf_meshadapt.data_parallel.exchange import OverGroup
from hf_meshadapt.data_parallel.hook import PowerSGDSynchronizer
from hf_meshadapt.metering import SocketMeter
from tests.launch import run_ranks

SEED, NUM_REPLICAS, TORCH_START_STEPS = 0, 2, 2
HIDDEN, INTERMEDIATE, KEY_VALUE, VOCAB = 576, 1536, 192, 49152
RANKS = (4, 16, 32, 64)
DTYPES = ("float32", "bfloat16")
# Of a gradient's energy a few directions, which drift slowly, hold most.
SIGNAL_RANK, NOISE = 8, 0.02


class Stage(nn.Module):
    """Parameters whose gradients are whatever the input holds."""

    def __init__(self, num_layers: int, embedding: bool):
        super().__init__()
        layer = [(HIDDEN, HIDDEN), (KEY_VALUE, HIDDEN), (KEY_VALUE, HIDDEN), (HIDDEN, HIDDEN)]
        layer += [(INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE), (HIDDEN,), (HIDDEN,)]
        shapes = [(VOCAB, HIDDEN)] * embedding + layer * num_layers
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients))


def draw_gradients(stage: Stage, rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    own = torch.Generator().manual_seed(1 + NUM_REPLICAS * step + rank)
    gradients = []
    for weight in stage.weights:
        noise = torch.randn(weight.shape, generator=own)
        if weight.dim() == 2:
            left = torch.randn(weight.shape[0], SIGNAL_RANK, generator=generator)
            right = torch.randn(SIGNAL_RANK, weight.shape[1], generator=generator)
            noise = NOISE * noise + left @ right / SIGNAL_RANK**0.5
        gradients.append(noise)
    return gradients


def wrap(stage: Stage, group) -> DistributedDataParallel:
    # One bucket, so that torch's hook too is called once.
    return DistributedDataParallel(stage, process_group=group, bucket_cap_mb=10_000, init_sync=False)


def with_torchs_hook(stage: Stage, group, matrix_rank: int) -> DistributedDataParallel:
    module = wrap(stage, group)
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=matrix_rank, start_powerSGD_iter=TORCH_START_STEPS, min_compression_rate=1
    )
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return module


def with_our_hook(stage: Stage, group, matrix_rank: int, dtype: str) -> DistributedDataParallel:
    module = wrap(stage, group)
    config = DataParallelConfig("powersgd", matrix_rank=matrix_rank, factor_dtype=dtype)
    chunk = ChunkParameters(0, dict(stage.named_parameters()), {})
    synchronizer = PowerSGDSynchronizer(config, OverGroup(group, 600.0), {0: chunk}, [])
    module.register_comm_hook(None, synchronizer.hook(0))
    return module


class Contestant:
    """One hook, its samples, and what it has applied so far."""

    def __init__(self, module: DistributedDataParallel, meter: SocketMeter):
        self.module, self.meter = module, meter
        self.seconds: list[float] = []
        self.sent_bytes: list[int] = []
        self.applied = [torch.zeros_like(weight) for weight in module.module.weights]

    def step(self, gradients: list[torch.Tensor], counts: bool) -> None:
        self.module.zero_grad()
        loss = self.module(gradients)
        dist.barrier()
        self.meter.take_axis_bytes()
        started = time.perf_counter()
        loss.backward()
        elapsed = time.perf_counter() - started
        dist.barrier()
        if counts:
            self.seconds.append(elapsed)
            self.sent_bytes.append(self.meter.take_axis_bytes().get("data_parallel", 0))
        for applied, weight in zip(self.applied, self.module.module.weights):
            applied += weight.grad


def compete(rank: int, matrix_rank: int, steps: int, layers: int, embedding: bool) -> dict[str, dict]:
    """All hooks in turn on the same gradients."""
    dist.init_process_group("gloo")
    meter = SocketMeter()
    with meter.axis("data_parallel"):
        group = dist.new_group(list(range(NUM_REPLICAS)))
    meter.resolve_peers(group)
    torch.manual_seed(SEED)
    make = {"torch": with_torchs_hook} | {name: functools.partial(with_our_hook, dtype=name) for name in DTYPES}
    contestants = {
        name: Contestant(hook(Stage(layers, embedding), group, matrix_rank), meter) for name, hook in make.items()
    }
    given = [torch.zeros_like(weight) for weight in contestants["torch"].applied]
    for step in range(steps + TORCH_START_STEPS + 1):
        own = [draw_gradients(contestants["torch"].module.module, replica, step) for replica in range(NUM_REPLICAS)]
        for total, *parts in zip(given, *own):
            total += sum(parts) / NUM_REPLICAS
        for contestant in contestants.values():
            contestant.step(own[rank], counts=step > TORCH_START_STEPS)
    norm = torch.stack(torch._foreach_norm(given)).norm()
    return {
        name: {
            "seconds": c.seconds,
            "sent_bytes": c.sent_bytes,
            "error": float(torch.stack(torch._foreach_norm(torch._foreach_sub(c.applied, given))).norm() / norm),
        }
        for name, c in contestants.items()
    }


def rows_of(matrix_rank: int, steps: int, layers: int, embedding: bool) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (matrix_rank, steps, layers, embedding)
        results = run_ranks(compete, NUM_REPLICAS, Path(folder), *arguments, timeout_seconds=3600.0)[0]
    rows, theirs = [], results["torch"]
    for dtype in DTYPES:
        ours = results[dtype]
        (low, median, high), (torch_low, torch_median, torch_high) = (
            quartiles(result["seconds"]) for result in (ours, theirs)
        )
        rows.append(
            {
                "matrix_rank": matrix_rank,
                "factor_dtype": dtype,
                "num_layers": layers,
                "embedding": embedding,
                "time_ratio": median / torch_median,
                "bytes_ratio": sum(ours["sent_bytes"]) / sum(theirs["sent_bytes"]),
                "error_ratio": ours["error"] / theirs["error"],
                "error": ours["error"],
                "seconds_quartiles": [low, median, high],
                "torch_seconds_quartiles": [torch_low, torch_median, torch_high],
                "bytes_per_step": sum(ours["sent_bytes"]) / steps,
                "seconds": ours["seconds"],
                "torch_seconds": theirs["seconds"],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--without_embedding", action="store_true")
    options = parser.parse_args()
    rows = []
    for matrix_rank in options.ranks:
        rows += rows_of(matrix_rank, options.steps, options.layers, not options.without_embedding)
    print_table(rows, ["matrix_rank", "factor_dtype", "time_ratio", "bytes_ratio", "error_ratio", "error"])
    print(write_result("powersgd_vs_torch", rows, [SEED]).name)


if __name__ == "__main__":
    main()
