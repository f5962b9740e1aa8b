"""What masking a boundary costs a middle stage, against that stage's own forward and backward pass.

A middle stage unpacks and packs once per microbatch in each direction: one `BoundaryReceive` and one `BoundarySend`,
forward and backward. Each boundary pass follows a stage pass, as in a pipeline: it finds the caches full of the
stage's data, and a busy machine slows both. Target: a ratio under 0.03 in every row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product

import torch
from transformers import LlamaConfig, LlamaModel

from benchmarks.common import print_table, quartiles, write_result
from hf_meshadapt.boundary.fitting import BoundaryFit
from hf_meshadapt.boundary.module import BoundaryReceive, BoundarySend, wire_tensors
from hf_meshadapt.boundary.prf import microbatch_key
from hf_meshadapt.boundary.sequence_coder import FIRST, TOKEN
from hf_meshadapt.config import BoundaryConfig

BATCH, LENGTH, SEED = 4, 128, 0
# One stage of SmolLM2-135M (30 layers over 4 stages) and one of Llama-3.2-1B (16 layers over 8 stages).
STAGES = {
    576: dict(intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=8),
    2048: dict(intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=2),
}
DTYPES = ("float32", "bfloat16")
MASK_RATIOS = (0.95, 0.9)


def stage_pass(hidden_size: int, dtype: torch.dtype) -> Callable[[], None]:
    """Forward and backward of one stage's layers on BATCH x LENGTH hidden states."""
    config = LlamaConfig(hidden_size=hidden_size, vocab_size=8, use_cache=False, **STAGES[hidden_size])
    stage = LlamaModel(config).to(dtype)
    hidden = torch.randn(BATCH, LENGTH, hidden_size, dtype=dtype, requires_grad=True)
    gradient = torch.randn(BATCH, LENGTH, hidden_size, dtype=dtype)

    def run() -> None:
        stage(inputs_embeds=hidden).last_hidden_state.backward(gradient)
        stage.zero_grad()

    return run


def boundary_pass(config: BoundaryConfig, hidden_size: int, dtype: torch.dtype) -> Callable[[], None]:
    """What one middle stage does for its two boundaries: unpack and pack, forward and backward, fresh masks."""
    receive, send = BoundaryReceive(config, 0, hidden_size), BoundarySend(config, 1, hidden_size)
    receive.set_fit(BoundaryFit(torch.ones(1, hidden_size), None, None, 0.0), None)
    (wire,) = wire_tensors(config, hidden_size, BATCH, LENGTH, True, "cpu")
    packed = torch.randn(wire.shape).to(wire.dtype).requires_grad_()
    gradient = torch.randn(wire.shape).to(wire.dtype)
    token_ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    kind = torch.full((BATCH, LENGTH), TOKEN, dtype=torch.int8)
    kind[:, 0] = FIRST
    calls = iter(range(10**9))

    def run() -> None:
        key = microbatch_key(SEED, next(calls), 0, 0, 0)
        hidden = receive((packed,), key, token_ids, kind, LENGTH, dtype)
        (sent,) = send(hidden, key, token_ids, kind)
        sent.backward(gradient)

    return run


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(hidden_size: int, dtype_name: str, repetitions: int) -> list[dict]:
    """One row per boundary configuration, each with interleaved timings of the stage."""
    dtype = getattr(torch, dtype_name)
    stage = stage_pass(hidden_size, dtype)
    rows = []
    for ratio, exact in product(MASK_RATIOS, (False, True)):
        config = BoundaryConfig(
            "random_mask",
            mask_ratio=ratio,
            mask_seed=SEED,
            exact_first_token=exact,
            predictor="mean",
            wire_dtype="bfloat16",
        )
        boundary = boundary_pass(config, hidden_size, dtype)
        stage(), boundary()
        samples = [(seconds(stage), seconds(boundary)) for _ in range(repetitions)]
        rows.append(row(hidden_size, dtype_name, config, *map(list, zip(*samples))))
    return rows


def row(hidden_size: int, dtype_name: str, config: BoundaryConfig, stage: list[float], pack: list[float]) -> dict:
    stage_low, stage_median, stage_high = quartiles(stage)
    pack_low, pack_median, pack_high = quartiles(pack)
    return {
        "hidden_size": hidden_size,
        "num_layers": STAGES[hidden_size]["num_hidden_layers"],
        "compute_dtype": dtype_name,
        "wire_dtype": config.wire_dtype,
        "mask_ratio": config.mask_ratio,
        "exact_first_token": config.exact_first_token,
        "predictor": config.predictor,
        "tokens": BATCH * LENGTH,
        "threads": torch.get_num_threads(),
        "ratio_to_stage": pack_median / stage_median,
        "pack_unpack_seconds_median": pack_median,
        "pack_unpack_seconds_quartiles": [pack_low, pack_high],
        "stage_seconds_median": stage_median,
        "stage_seconds_quartiles": [stage_low, stage_high],
        "pack_unpack_seconds": pack,
        "stage_seconds": stage,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    repetitions = parser.parse_args().repetitions
    torch.manual_seed(SEED)
    rows = []
    for hidden_size, dtype_name in product(STAGES, DTYPES):
        rows += measure(hidden_size, dtype_name, repetitions)
    shown = ["hidden_size", "compute_dtype", "mask_ratio", "exact_first_token"]
    print_table(rows, [*shown, "pack_unpack_seconds_median", "stage_seconds_median", "ratio_to_stage"])
    print(write_result("pack_cost", rows, [SEED]).name)


if __name__ == "__main__":
    main()
