"""What a new calibration costs: making the fit of a boundary, where it was observed, and setting it at one end.

An anchor makes fits beside its passes, off the critical path; every stage sets them at its ends of boundaries between two
steps. Timed in turns with a pass of a middle stage over 512 tokens, which `set_ratio_to_pass` is to.
"""

from __future__ import annotations

import argparse

import torch

from benchmarks.boundary_cost import CODECS, observed
from benchmarks.common import print_table, quartiles, write_result
from benchmarks.pack_cost import BATCH, LENGTH, SEED, STAGES, seconds, stage_pass
from hf_meshadapt.anchoring.fits import to_wire
from hf_meshadapt.boundary.fitting import BoundaryFit, fit_boundary
from hf_meshadapt.boundary.module import BoundaryReceive

NAME, CODEC = "fit_cost", "transform"


def measure(hidden_size: int, repetitions: int) -> dict:
    torch.manual_seed(SEED)
    config, stage = CODECS[CODEC], stage_pass(hidden_size, torch.bfloat16)
    observer, _ = observed(config, hidden_size)
    receive = BoundaryReceive(config, 0, hidden_size)
    moments = observer.moments()
    sent = to_wire(fit_boundary(moments, transforms=True, predicted=True).state(), config)

    def make_fit() -> None:
        fit_boundary(moments, transforms=True, predicted=True)

    def set_fit() -> None:
        received = BoundaryFit.from_state({name: tensor.float() for name, tensor in sent.items()})
        receive.set_fit(received, observer.table)

    stage(), set_fit()
    samples = [(seconds(stage), seconds(make_fit), seconds(set_fit)) for _ in range(repetitions)]
    stage_seconds, make_seconds, set_seconds = map(list, zip(*samples))
    stage_median, make_median, set_median = (quartiles(one)[1] for one in (stage_seconds, make_seconds, set_seconds))
    return {
        "codec": CODEC, "hidden_size": hidden_size, "device": "cpu", "tokens": BATCH * LENGTH,
        "threads": torch.get_num_threads(),
        "fit_bytes": sum(tensor.nbytes for tensor in sent.values()),
        "make_seconds_median": make_median, "set_seconds_median": set_median, "stage_seconds_median": stage_median,
        "set_ratio_to_pass": set_median / stage_median,
        "make_seconds": make_seconds, "set_seconds": set_seconds, "stage_seconds": stage_seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    repetitions = parser.parse_args().repetitions
    rows = [measure(hidden_size, repetitions) for hidden_size in STAGES]
    shown = ["hidden_size", "fit_bytes", "make_seconds_median", "set_seconds_median", "set_ratio_to_pass"]
    print_table(rows, shown)
    print(write_result(NAME, rows, [SEED]).name)


if __name__ == "__main__":
    main()
