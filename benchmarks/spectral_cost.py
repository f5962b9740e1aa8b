"""What the spectral correction costs, against a whole training step of SmolLM2-135M, by tokens per step and rank.

A step is forward, backward (in microbatches of 512 tokens) and AdamW, float32. The correction is that of all 210
matrices by `SpectralCorrection.step` around an optimizer that does nothing: ten steps from one version to the next,
the first of which takes the version in and, with the following ones, recompresses it. Steps and corrections are timed
in turns, so that a busy machine slows both, and every correction finds fresh gradients and cold caches.

ratio_to_step is the mean over the ten steps; refresh_ratio what a step with a slice of the refresh takes more than one
without, the largest median. Targets at rank 64: ratio_to_step under 0.12 at 512 tokens and 0.02 at 4096, refresh_ratio
under 0.1.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import print_table, quartiles, write_result
from benchmarks.pack_cost import seconds
from hf_meshadapt.spectral.compressor import GradientCompressor
from hf_meshadapt.spectral.config import SpectralConfig
from hf_meshadapt.spectral.optimizer import SpectralCorrection

SEED, MICROBATCH, ANCHOR_EVERY = 0, 512, 10


class Still(torch.optim.Optimizer):
    """Takes no step, so that the time of a step around it is the correction's."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        pass


def backward(model, num_tokens: int) -> None:
    """Adds up the gradients of random tokens."""
    model.zero_grad()
    for start in range(0, num_tokens, MICROBATCH):
        ids = torch.randint(model.config.vocab_size, (1, min(MICROBATCH, num_tokens - start)))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


class Correction:
    """The correction of one model's gradients at one rank, anchors included."""

    def __init__(self, model, matrix_rank: int):
        self.config = SpectralConfig(matrix_rank=matrix_rank)
        self.optimizer = SpectralCorrection(Still(model.parameters()), model.named_parameters(), self.config)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        self.sent = GradientCompressor(self.config).compress(gradients)
        self.version = 0
        self.optimizer.priors.update(self.sent, version=0, step=0)

    def step(self, arrives: bool) -> None:
        if arrives:
            self.version += 1
            self.optimizer.priors.receive(self.sent, self.version, step=self.optimizer.num_steps)
        self.optimizer.step()

    def cycle(self, gradients: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        """Seconds of each step from one version to the next; gradients and copies of them, to begin anew from."""
        samples = []
        for step in range(ANCHOR_EVERY):
            for gradient, kept in gradients:
                gradient.copy_(kept)
            samples.append(seconds(lambda arrives=step == 0: self.step(arrives)))
        return samples


def measure(model, num_tokens: int, ranks: list[int], repetitions: int) -> list[dict]:
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def train() -> None:
        backward(model, num_tokens)
        adamw.step()

    train()
    corrections = {rank: Correction(model, rank) for rank in ranks}
    steps, cycles = [], {rank: [] for rank in ranks}
    for _ in range(repetitions):
        steps.append(seconds(train))
        gradients = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
        for rank, correction in corrections.items():
            cycles[rank].append(correction.cycle(gradients))
    return [row(num_tokens, corrections[rank], steps, cycles[rank]) for rank in ranks]


def row(num_tokens: int, correction: Correction, steps: list[float], cycles: list[list[float]]) -> dict:
    config = correction.config
    step_low, step_median, step_high = quartiles(steps)
    by_step = [statistics.median(samples) for samples in zip(*cycles)]
    apply_median = statistics.median(by_step[config.refresh_steps :])
    return {
        "tokens": num_tokens,
        "matrix_rank": config.matrix_rank,
        "rule": config.rule,
        "num_matrices": len(correction.optimizer.priors.held),
        "anchor_every": ANCHOR_EVERY,
        "refresh_steps": config.refresh_steps,
        "compute_dtype": "float32",
        "threads": torch.get_num_threads(),
        "ratio_to_step": statistics.mean(by_step) / step_median,
        "apply_ratio": apply_median / step_median,
        "refresh_ratio": (max(by_step) - apply_median) / step_median,
        "correction_seconds_mean": statistics.mean(by_step),
        "apply_seconds_median": apply_median,
        "step_seconds_median": step_median,
        "step_seconds_quartiles": [step_low, step_high],
        "correction_seconds": cycles,
        "step_seconds": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="runs/models/smollm2-135m-instruct", help="folder of the model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    if not Path(arguments.model).is_dir():
        parser.error(f"--model {arguments.model} is not a folder: make it with examples/prepare_smollm2.py")
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    rows = []
    for num_tokens in arguments.tokens:
        rows += measure(model, num_tokens, arguments.ranks, arguments.repetitions)
    shown = [
        "correction_seconds_mean",
        "apply_seconds_median",
        "step_seconds_median",
        "ratio_to_step",
        "refresh_ratio",
    ]
    print_table(rows, ["tokens", "matrix_rank", *shown])
    print(write_result("spectral_cost", rows, [SEED]).name)


if __name__ == "__main__":
    main()
