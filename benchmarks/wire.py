"""Bytes on the pipeline axis, counted on sockets, against dense at the same wire dtype and against the byte plan.

A 3-stage pipeline of hidden size 576 in bfloat16 wire, 16 tokens a sequence, over gloo on this machine; two steps are
counted after two that set connections up. Short sequences are the worst case for `exact_first_token`, and small
messages for gloo's framing (144 bytes a message), which `planned_over_measured` counts as planned.
"""

import tempfile
from pathlib import Path

from tests.traffic import run

from .common import print_table, write_result

STAGES = 3


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        dense = _pipeline(Path(folder, "dense"))
        for mask_ratio in (0.5, 0.9, 0.95):
            for exact in (False, True):
                name = Path(folder, f"{mask_ratio}-{exact}")
                masked = _pipeline(name, mask_ratio=mask_ratio, exact_first_token=exact)
                rows.append(
                    {
                        "mask_ratio": mask_ratio,
                        "exact_first_token": exact,
                        "pipeline_bytes_ratio": masked["measured"] / dense["measured"],
                        "planned_bytes_ratio": masked["planned"] / dense["planned"],
                        "planned_over_measured": (masked["planned"] + masked["framing"]) / masked["measured"],
                        "measured_bytes_per_step": masked["steps"],
                        "dense_measured_bytes_per_step": dense["steps"],
                        "framing_bytes_per_step": masked["framing"],
                    }
                )
    print_table(rows, ["mask_ratio", "exact_first_token", "pipeline_bytes_ratio", "planned_over_measured"])
    write_result("wire", rows, seeds=[7])


def _pipeline(folder: Path, **boundary) -> dict:
    result = run(folder, STAGES, 1, wire_dtype="bfloat16", **boundary)
    steps = result["measured"]["pipeline"][1:]
    figures = {name: result[name]["pipeline"] for name in ("planned", "framing")}
    return {"measured": sum(steps) / len(steps), "steps": steps, **figures}


if __name__ == "__main__":
    main()
