"""What coding a boundary costs a middle stage, against that stage's own forward and backward pass, by codec.

A middle stage decodes an activation, codes the next one, decodes a gradient and codes the next one. Stage and boundary
are timed in turns, as in `pack_cost`. Target: a ratio under 0.05 in every row. `ratio_to_memory` is to the floor that
memory sets: the four states and gradients that are read or written, copied once.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.common import print_table, quartiles, write_result
from benchmarks.pack_cost import BATCH, LENGTH, SEED, STAGES, seconds, stage_pass
from hf_meshadapt.boundary.fitting import fit_boundary
from hf_meshadapt.boundary.module import BoundaryReceive, BoundarySend
from hf_meshadapt.boundary.observer import Observer
from hf_meshadapt.boundary.predictor import project_embedding
from hf_meshadapt.boundary.sequence_coder import FIRST, TARGET, TOKEN
from hf_meshadapt.config import BoundaryConfig

VOCABULARY = 4096
CODECS = {
    "transform": BoundaryConfig(
        "transform", wire_dtype="bfloat16", budget=0.05, exact_first_token=True, predictor="token"
    ),
    "transform, whole bits": BoundaryConfig(
        "transform", wire_dtype="bfloat16", budget=0.05, exact_first_token=True, predictor="token", entropy_coded=False
    ),
    "quantize 4 bit": BoundaryConfig("quantize", bits=4, rotated=True),
    "topk": BoundaryConfig("topk", budget=0.05),
}


def observed(config: BoundaryConfig, hidden_size: int) -> tuple[Observer, tuple[torch.Tensor, ...]]:
    """What a calibration saw of states whose spectrum falls as in a real model, and (states, token_ids, kind, scale)."""
    table = project_embedding(torch.randn(VOCABULARY, hidden_size), 64)
    token_ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    kind = torch.full((BATCH, LENGTH), TOKEN, dtype=torch.int8)
    kind[:, LENGTH // 2 :], kind[:, 0] = TARGET, FIRST
    scale = torch.linspace(1, 8, hidden_size).pow(-1.5)
    states = torch.randn(BATCH, LENGTH, hidden_size) * scale
    observer = Observer(hidden_size, table if config.predictor == "token" else None, "cpu")
    observer(states.clone().requires_grad_(), token_ids, kind).backward(torch.randn_like(states) * scale)
    return observer, (states, token_ids, kind, scale)


def boundary_pass(config: BoundaryConfig, hidden_size: int, dtype: torch.dtype):
    """One receive and one send, forward and backward."""
    observer, (states, token_ids, kind, scale) = observed(config, hidden_size)
    fit = fit_boundary(
        observer.moments(), transforms=config.codec == "transform", predicted=config.predictor != "none"
    )
    receive, send = BoundaryReceive(config, 0, hidden_size), BoundarySend(config, 0, hidden_size)
    for end in (receive, send):
        end.set_fit(fit, observer.table)
    payload, carrier = send(states.to(dtype), 0, token_ids, kind)
    gradient = torch.randn(BATCH, LENGTH, hidden_size, dtype=dtype) * scale.to(dtype)
    coded = send_gradient(receive, (payload, carrier), token_ids, kind, dtype, gradient)

    def run() -> None:
        arriving = carrier.detach().requires_grad_()
        hidden = receive((payload, arriving), 0, token_ids, kind, LENGTH, dtype)
        _, leaving = send(hidden, 0, token_ids, kind)
        leaving.backward(coded)

    return run


def send_gradient(receive, packed, token_ids, kind, dtype, gradient) -> torch.Tensor:
    """A coded gradient such as comes back over the wire."""
    carrier = packed[1].detach().requires_grad_()
    receive((packed[0], carrier), 0, token_ids, kind, LENGTH, dtype).backward(gradient)
    return carrier.grad


def measure(codec: str, hidden_size: int, repetitions: int) -> dict:
    torch.manual_seed(SEED)
    stage, boundary = (
        stage_pass(hidden_size, torch.bfloat16),
        boundary_pass(CODECS[codec], hidden_size, torch.bfloat16),
    )
    stage(), boundary()
    states = [torch.randn(BATCH, LENGTH, hidden_size, dtype=torch.bfloat16) for _ in range(4)]

    def copy_states() -> None:
        for state in states:
            state.clone()

    samples = [(seconds(stage), seconds(boundary), seconds(copy_states)) for _ in range(repetitions)]
    stage_seconds, coding_seconds, copy_seconds = map(list, zip(*samples))
    low, median, high = quartiles(coding_seconds)
    stage_low, stage_median, stage_high = quartiles(stage_seconds)
    return {
        "codec": codec, "hidden_size": hidden_size, "device": "cpu", "compute_dtype": "bfloat16",
        "tokens": BATCH * LENGTH, "threads": torch.get_num_threads(), "ratio_to_stage": median / stage_median,
        "ratio_to_memory": median / quartiles(copy_seconds)[1],
        "coding_seconds_median": median, "coding_seconds_quartiles": [low, high],
        "stage_seconds_median": stage_median, "stage_seconds_quartiles": [stage_low, stage_high],
        "coding_seconds": coding_seconds, "stage_seconds": stage_seconds,
        "copy_seconds": copy_seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    repetitions = parser.parse_args().repetitions
    rows = [measure(codec, hidden_size, repetitions) for hidden_size in STAGES for codec in CODECS]
    print_table(
        rows,
        ["codec", "hidden_size", "coding_seconds_median", "stage_seconds_median", "ratio_to_stage", "ratio_to_memory"],
    )
    print(write_result("boundary_cost", rows, [SEED]).name)


if __name__ == "__main__":
    main()
