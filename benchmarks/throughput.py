"""Tokens per second of real ranks over slow links: dense training, with compressed gradients, with coded boundaries.

    sudo python -m benchmarks.throughput

Two stages and two replicas, a network namespace per rank and one link each (`slow_links`), at several rates. Two CPU cores
compute for all four ranks: the rates at which links bound a step are lower than with GPUs, and the model is chosen to
compute little for its bytes. What the figures tell is whether time follows bytes, and from which rate on; not what a GPU
does at that rate.

A step's time is the mean over whole rounds of outer steps, after a calibration and a step that makes schedules.
`speedup` is tokens per second over the dense run's at the same rate; `bytes_ratio` is what a dense run's busiest kind of
rank sends over what this one's does, by the sockets: the speed-up if nothing but links took time. Runs that are in the
results already are kept; `--only` and `--mbits` choose some. Writes the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import mean

from tests.launch import run_ranks

from .common import print_table, read_rows, write_result
from .quality_table import marked
from .slow_links import SlowLinks, slow_links

NAME, SEED = "throughput", 0
PAGE = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- throughput: sudo python -m benchmarks.throughput -->\n", "<!-- throughput ends -->"
STAGES, REPLICAS, ROWS, LENGTH, VOCABULARY = 2, 2, 16, 128, 256
SKIPPED_STEPS, ROUND = 1, 10
MBITS = (2.0, 10.0, 50.0)
MODEL = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
ROUNDS = {"dp_sync": "streaming_diloco", "outer_wire": "powersgd", "sync_every": ROUND, "num_fragments": 2}
CONFIGURATIONS: dict[str, dict] = {
    "dense": {"preset": "dense"},
    "dense, PowerSGD": {"preset": "dense", "dp_sync": "powersgd"},
    "masks 95%, PowerSGD": {"preset": "paper", "anchor": False, "dp_sync": "powersgd"},
    "masks 95%, Streaming DiLoCo": {"preset": "paper", "anchor": False, **ROUNDS},
    "coded 5%, PowerSGD": {"preset": "anchored", "dp_sync": "powersgd", "calibration_tokens": 8192},
    "coded 5%, Streaming DiLoCo": {"preset": "anchored", **ROUNDS, "calibration_tokens": 8192},
}
# No outer steps: every step sends the same.
STEPS = {
    name: ROUND if options.get("dp_sync") == "streaming_diloco" else 3 for name, options in CONFIGURATIONS.items()
}


def train(rank: int, links: SlowLinks, folder: str, name: str) -> dict:
    """Seconds of every step that counts on this rank, and what it sent in them by axis."""
    links.enter(rank)
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer

    torch.manual_seed(SEED)
    ids = torch.randint(3, VOCABULARY, (ROWS * REPLICAS * 4, LENGTH)).tolist()
    rows = Dataset.from_list([{"input_ids": row, "labels": row, "attention_mask": [1] * LENGTH} for row in ids])
    args = MeshAdaptArguments(
        output_dir=folder, pipeline_stages=STAGES, per_device_train_batch_size=ROWS, pipeline_microbatches=4,
        max_steps=SKIPPED_STEPS + STEPS[name] + 1, bf16=True, use_cpu=True, seed=SEED, logging_strategy="no",
        save_strategy="no", report_to="none", disable_tqdm=True, link_timeout_seconds=900, **CONFIGURATIONS[name],
    )  # fmt: skip
    trainer = MeshAdaptTrainer(model=LlamaForCausalLM(LlamaConfig(**MODEL)), args=args, train_dataset=rows)
    engine, seen = trainer.engine, []
    end = engine.end_step

    def end_step() -> None:
        end()
        sent = {axis: sum(peers.values()) for axis, peers in engine.sockets.read().items()}
        seen.append((time.perf_counter(), sent))

    engine.end_step = end_step
    trainer.train()
    times, sent = zip(*seen[SKIPPED_STEPS - 1 : SKIPPED_STEPS + STEPS[name]])
    return {
        "seconds": [later - earlier for earlier, later in zip(times, times[1:])],
        "sent_bytes": {axis: count - sent[0].get(axis, 0) for axis, count in sent[-1].items()},
    }


def measure(name: str, mbits: float) -> dict:
    """One row; all but `speedup` and `bytes_ratio`."""
    with slow_links(STAGES * REPLICAS, mbits * 1e6) as links, tempfile.TemporaryDirectory() as folder:
        options = (links, str(Path(folder, "run")), name)
        ranks = run_ranks(train, STAGES * REPLICAS, Path(folder), *options, timeout_seconds=3000)
    tokens = REPLICAS * ROWS * LENGTH * STEPS[name]
    axes = sorted({axis for rank in ranks for axis in rank["sent_bytes"]})
    return {
        "configuration": name, "mbits": mbits, "stages": STAGES, "replicas": REPLICAS, "steps": STEPS[name],
        "tokens_per_second": tokens / mean(sum(rank["seconds"]) for rank in ranks),
        "bytes_per_token": {axis: sum(rank["sent_bytes"].get(axis, 0) for rank in ranks) / tokens for axis in axes},
        "busiest_rank_bytes_per_token": max(sum(rank["sent_bytes"].values()) for rank in ranks) / tokens,
        "ranks": ranks,
    }  # fmt: skip


def compared(rows: list[dict]) -> list[dict]:
    """With what each gains over dense training at its rate."""
    dense = {row["mbits"]: row for row in rows if row["configuration"] == "dense"}
    busiest = "busiest_rank_bytes_per_token"
    return [
        row
        | {
            "speedup": row["tokens_per_second"] / dense[row["mbits"]]["tokens_per_second"],
            "bytes_ratio": dense[row["mbits"]][busiest] / row[busiest],
        }
        for row in rows
        if row["mbits"] in dense
    ]


def table(rows: list[dict]) -> str:
    """Markdown: tokens per second by configuration and rate, and how many times those of dense training."""
    cells = {(row["configuration"], row["mbits"]): row for row in rows}
    rates = sorted({row["mbits"] for row in rows}, reverse=True)
    columns = ["", *(f"{rate:g} Mbit/s" for rate in rates), "bytes of the busiest rank"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in CONFIGURATIONS:
        found = [cells.get((name, rate)) for rate in rates]
        if found[-1] is not None:
            saved = f"1/{found[-1]['bytes_ratio']:.0f}"
            lines.append(f"| {' | '.join([name, *map(speed_text, found), saved])} |")
    return "\n".join(lines) + "\n"


def speed_text(row: dict | None) -> str:
    return "-" if row is None else f"{row['tokens_per_second']:.0f} ({row['speedup']:.1f}x)"


def with_table(page: str, rows: list[dict]) -> str:
    """The page with its table anew."""
    return marked(page, BEGIN, END, table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbits", type=float, nargs="+", default=MBITS, help="rates of every link")
    parser.add_argument("--only", nargs="+", choices=list(CONFIGURATIONS), default=list(CONFIGURATIONS))
    options = parser.parse_args()
    rows = read_rows(NAME)
    done = {(row["configuration"], row["mbits"]) for row in rows}
    for mbits in options.mbits:
        for name in CONFIGURATIONS:
            if name in options.only and (name, mbits) not in done:
                rows.append(measure(name, mbits))
                write_result(NAME, compared(rows), [SEED], command=f"python -m benchmarks.{NAME}")
                print(json.dumps({key: rows[-1][key] for key in ("configuration", "mbits", "tokens_per_second")}))
    PAGE.write_text(with_table(PAGE.read_text(), compared(rows)))
    shown = ["mbits", "configuration", "tokens_per_second", "speedup", "bytes_ratio"]
    print_table(compared(rows), shown)


if __name__ == "__main__":
    main()
