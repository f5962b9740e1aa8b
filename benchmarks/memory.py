"""Peak memory of every rank against the plan, over 1, 2 and 4 stages.

Measured: what torch's CPU allocator reports to the profiler from the first training step to the last, over the
weights that a rank holds when training begins. Planned: `hf_meshadapt.memory`, from the configuration alone.
Boundaries are dense. Target: planned within 10% of measured in every row.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer
from hf_meshadapt.memory import memory_plan
from hf_meshadapt.pipeline.footprint import rank_footprint
from hf_meshadapt.pipeline.schedule import rank_order
from tests.launch import run_ranks

from .common import print_table, write_result

SEED, VOCAB, ROWS, LENGTH, STEPS = 0, 8192, 8, 256, 2
SIZES = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6}
MODELS = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, intermediate_size=1024, num_key_value_heads=2, tie_word_embeddings=True, **SIZES)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, bos_token_id=1, eos_token_id=2, **SIZES)
    ),
}
# model, stages, schedule, microbatches, accumulation steps, optimizer
CASES = [
    ("llama", 1, "gpipe", 4, 1, "adamw_torch_fused"),
    ("llama", 2, "gpipe", 4, 1, "adamw_torch_fused"),
    ("llama", 4, "gpipe", 4, 1, "adamw_torch_fused"),
    ("llama", 4, "1f1b", 8, 1, "adamw_torch_fused"),
    ("llama", 2, "1f1b", 8, 2, "sgd"),
    ("gpt2", 1, "gpipe", 4, 2, "adamw_torch"),
    ("gpt2", 2, "1f1b", 8, 1, "adamw_torch"),
    ("gpt2", 4, "1f1b", 4, 1, "adamw_torch"),
]
COLUMNS = ["model", "stages", "schedule", "rank", "planned_bytes", "measured_bytes", "planned_over_measured"]


class Measure(TrainerCallback):
    """Counts allocations while training runs."""

    def __init__(self):
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.weights = self.peak = 0

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        tensors = [*model.parameters(), *model.buffers()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.weights = sum(storages.values())
        self.profile.__enter__()

    def on_train_end(self, *args, **kwargs):
        self.profile.__exit__(None, None, None)
        events = [event for event in self.profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        self.peak = self.weights + peak


def measure_rank(rank: int, case: tuple, folder: str) -> dict:
    """One rank's row."""
    name, stages, schedule, microbatches, accumulation, optimizer = case
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    data = [torch.randint(3, VOCAB, (LENGTH,), generator=generator) for _ in range(ROWS * accumulation * STEPS)]
    args = MeshAdaptArguments(
        output_dir=folder, preset="dense", pipeline_stages=stages, pipeline_schedule=schedule, optim=optimizer,
        pipeline_microbatches=microbatches, gradient_accumulation_steps=accumulation, max_steps=STEPS, use_cpu=True,
        per_device_train_batch_size=ROWS, report_to="none", save_strategy="no", disable_tqdm=True, seed=SEED,
        dataloader_pin_memory=False,
    )  # fmt: skip
    meter = Measure()
    trainer = MeshAdaptTrainer(
        model=MODELS[name](), args=args, train_dataset=data, data_collator=collate, callbacks=[meter]
    )
    plan = planned(name, trainer.engine.mesh, trainer.engine.topology.stage, accumulation, optimizer)
    trainer.train()
    return {
        "model": name, "stages": stages, "schedule": schedule, "microbatches": microbatches,
        "accumulation": accumulation, "optimizer": optimizer, "rank": rank, "planned_bytes": plan.peak_bytes,
        "measured_bytes": meter.peak, "planned_over_measured": plan.peak_bytes / meter.peak,
    }  # fmt: skip


def planned(name: str, mesh, stage: int, accumulation: int, optimizer: str):
    """From an outline without weights, as before loading."""
    with torch.device("meta"):
        outline = MODELS[name]()
    weights, chunks = rank_footprint(outline, mesh, stage, ROWS // mesh.microbatches, LENGTH)
    return memory_plan(weights, chunks, rank_order(mesh, stage), mesh, optimizer=optimizer, accumulation=accumulation)


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.stack(rows)
    mask = torch.ones_like(ids)
    mask[0, -LENGTH // 8 :] = 0  # padding, so that masks are made as in a real run
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", type=int, help="only this one, and write nothing")
    chosen = parser.parse_args().case
    rows = []
    for case in CASES if chosen is None else [CASES[chosen]]:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(measure_rank, case[1], Path(folder), case, folder, timeout_seconds=300)
        rows += ranks
        print_table(
            ranks, ["model", "stages", "schedule", "rank", "planned_bytes", "measured_bytes", "planned_over_measured"]
        )
    if chosen is None:
        write_result("memory", rows, seeds=[SEED])


if __name__ == "__main__":
    main()
