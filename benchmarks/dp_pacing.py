"""How long a pipeline waits while a fragment of Streaming DiLoCo travels over the same slow links, paced and in one piece.

Two stages and two replicas, a network namespace per rank, one 20 Mbit/s link each (`slow_links`), over which a rank sends
activations and gradients (masked, under a kB) and its fragments (8 MB). Pacing is `sync_chunk_bytes`. A step's figure is
what its waits for small messages add up to: activations and gradients, token counts, gradient norms; not those for a
fragment. Steps that begin while one is on its way are told from the others. Runs of both kinds take turns. Waits for a
link hardly depend on what else the machine does, unlike the compute between them.

pipeline_wait_ratio is the median of the steps with a fragment on its way with the default pieces, over that in one piece.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path
from statistics import median

from tests.equality import COMMON, Rows, collate_fixed
from tests.launch import run_ranks
from tests.traffic import wide_model

from .common import print_table, quartiles, write_result
from .slow_links import SlowLinks, slow_links

NAME = "dp_pacing"
STAGES, REPLICAS, ROWS = 2, 2, 2
HIDDEN, LAYERS = 512, 4
PACED, WHOLE = 256 * 1024, 1 << 30
# Little computation and a long transfer: 8 MB, 3.4 s at 20 Mbit/s, in which many steps begin.
SYNC = {
    "dp_sync": "streaming_diloco", "sync_every": 20, "num_fragments": 1, "overlap_steps": 19, "outer_wire": "float32",
}  # fmt: skip
BOUNDARY = {"preset": "dense", "mask_ratio": 0.95, "pipeline_microbatches": 2}


def train(rank: int, links: SlowLinks, folder: str, chunk_bytes: int, steps: int) -> list[tuple[float, bool]]:
    """Of each step: seconds that it waited for small messages, whether a fragment was on its way when it began."""
    links.enter(rank)
    from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer

    settings = COMMON | BOUNDARY | SYNC | {"max_steps": steps, "eval_strategy": "no", "gradient_accumulation_steps": 1}
    args = MeshAdaptArguments(
        output_dir=folder, pipeline_stages=STAGES, per_device_train_batch_size=ROWS, sync_chunk_bytes=chunk_bytes,
        **settings,
    )  # fmt: skip
    model = wide_model(HIDDEN, LAYERS)
    trainer = MeshAdaptTrainer(model=model, args=args, train_dataset=Rows(200), data_collator=collate_fixed)
    watch = Watch(trainer.engine)
    trainer.train()
    return watch.steps[2:-1]  # the first make schedules, the last synchronises everything


class Watch:
    """Notes what every step of an engine waits for.

    Attributes:
        steps: of each step, seconds that it waited for small messages, whether a fragment was on its way when it began.
    """

    def __init__(self, engine):
        self.steps: list[tuple[float, bool]] = []
        self._waits: list[float] = []
        self._travelling = threading.Event()
        self._began_with, self._awaits_fragment = False, False
        synchronizer, meter = engine.replication.synchronizer, engine.step_meter
        self._launch, self._sync, self._end = synchronizer.exchange.launch, synchronizer.end_step, engine.end_step
        self._add_wait = meter.add_wait
        synchronizer.exchange.launch, synchronizer.end_step = self.launch, self.end_sync
        meter.add_wait = engine.waiter.on_wait = self.add_wait
        engine.end_step = self.end_step

    def launch(self, function):
        self._travelling.set()

        def watched():
            try:
                return function()
            finally:
                self._travelling.clear()

        return self._launch(watched)

    def end_sync(self, final: bool) -> None:
        self._awaits_fragment = True
        self._sync(final)

    def add_wait(self, seconds: float) -> None:
        if not self._awaits_fragment:
            self._waits.append(seconds)
        self._awaits_fragment = False
        self._add_wait(seconds)

    def end_step(self) -> None:
        self._end()
        self.steps.append((sum(self._waits), self._began_with))
        self._waits.clear()
        self._began_with = self._travelling.is_set()


def measure(rate_bits_per_second: float, chunk_bytes: int, steps: int) -> list[tuple[float, bool]]:
    """Of all ranks' steps."""
    with slow_links(STAGES * REPLICAS, rate_bits_per_second) as links, tempfile.TemporaryDirectory() as folder:
        options = (links, str(Path(folder, "run")), chunk_bytes, steps)
        ranks = run_ranks(train, STAGES * REPLICAS, Path(folder), *options, timeout_seconds=600)
    return [step for steps_of_rank in ranks for step in steps_of_rank]


def figures(steps: list[tuple[float, bool]]) -> dict:
    busy, idle = ([seconds for seconds, travels in steps if travels == wanted] for wanted in (True, False))
    return {
        "wait_seconds_with_fragment": median(busy), "wait_seconds_quartiles": quartiles(busy),
        "wait_seconds_without": median(idle), "num_steps_with_fragment": len(busy), "num_steps_without": len(idle),
        "wait_seconds_samples_with_fragment": busy,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbits", type=float, default=20.0, help="rate of every link")
    parser.add_argument("--steps", type=int, default=59, help="optimizer steps of a run")
    parser.add_argument("--repetitions", type=int, default=2, help="runs of each kind")
    options = parser.parse_args()
    samples: dict[int, list[tuple[float, bool]]] = {PACED: [], WHOLE: []}
    for _ in range(options.repetitions):
        for chunk_bytes, steps in samples.items():
            steps += measure(options.mbits * 1e6, chunk_bytes, options.steps)
    paced, whole = figures(samples[PACED]), figures(samples[WHOLE])
    row = {
        "mbits": options.mbits, "sync_chunk_bytes": PACED, **SYNC, "hidden_size": HIDDEN, "steps": options.steps,
        "pipeline_wait_ratio": paced["wait_seconds_with_fragment"] / whole["wait_seconds_with_fragment"],
        "paced": paced, "whole": whole,
        "note": "bound by waits for the links, which other work on the machine's cores changes little",
    }  # fmt: skip
    table = [{"pieces": name, **row[name]} for name in ("paced", "whole")]
    print_table(table, ["pieces", "wait_seconds_with_fragment", "wait_seconds_without", "num_steps_with_fragment"])
    print("pipeline_wait_ratio", round(row["pipeline_wait_ratio"], 3))
    write_result(NAME, [row], seeds=[COMMON["seed"]])


if __name__ == "__main__":
    main()
