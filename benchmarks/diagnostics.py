"""Can priors help here? `meshadapt diagnose` on SmolLM2-135M and GSM8K, and how coded training bears pruning.

    python examples/prepare_smollm2.py
    python -m benchmarks.diagnostics

Gradients: the pretrained model, whose gradients fine-tuning meets, and the same architecture with new weights; four anchor
gradients, five steps apart, 4 emulated stages. Pruning: the runs of `benchmarks.boundary_quality` by dense boundaries, by
the default preset and by random masks, each pruned after 40 steps; one seed. Draws docs/diagnostics.png.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from . import boundary_quality as boundaries
from .common import read_rows, write_result

NAME, SEED = "diagnostics", 0
PICTURE = Path(__file__).parents[1] / "docs" / "diagnostics.png"
STARTS = ("pretrained", "from scratch")
TRAINED = ("dense", "transform_5", "mask95_mean")
STAGES, LEARNING_RATE, PRUNING_ROWS = 4, 1e-4, 8


def diagnosis(start: str, data) -> dict:
    """One row of gradients, as `hf_meshadapt.diagnosing.diagnose` gives them."""
    from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorForSeq2Seq, set_seed

    from hf_meshadapt.diagnosing import DiagnosisOptions, diagnose

    tokenizer, train, _ = data
    set_seed(SEED)
    if start == "pretrained":
        model = AutoModelForCausalLM.from_pretrained(boundaries.MODEL, dtype="float32")
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(boundaries.MODEL)).float()
    options = DiagnosisOptions(stages=STAGES, learning_rate=LEARNING_RATE, calibration_tokens=4096, seed=SEED)
    return {"measure": "gradients", "start": start} | diagnose(
        model, train, DataCollatorForSeq2Seq(tokenizer), options
    )


def pruning(name: str, data) -> dict:
    """Held-out loss of a model trained by one of `boundary_quality.CONFIGURATIONS`, by the share that is pruned."""
    from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq

    from hf_meshadapt.pruning import pruned_losses

    tokenizer, _, held_out = data
    with tempfile.TemporaryDirectory() as folder:
        args = boundaries.arguments(folder, name, STAGES, LEARNING_RATE, SEED)
        trainer = boundaries.make_trainer(args, data)
        trainer.train()
        trainer.save_model(folder)
        del trainer
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    collator = DataCollatorForSeq2Seq(tokenizer)
    rows = [held_out[i] for i in range(len(held_out))]
    batches = [collator(rows[start : start + PRUNING_ROWS]) for start in range(0, len(rows), PRUNING_ROWS)]
    losses = pruned_losses(model, batches)
    return {
        "measure": "pruning",
        "configuration": name,
        "losses": {str(share): loss for share, loss in losses.items()},
    }


def draw_all(rows: list[dict]) -> None:
    from hf_meshadapt.diagnosing import draw

    gradients = next((row for row in rows if row.get("start") == "pretrained"), None)
    if gradients is not None:
        pruned = {row["configuration"]: row["losses"] for row in rows if row["measure"] == "pruning"}
        draw(gradients | ({"pruning": pruned} if pruned else {}), PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*STARTS, *TRAINED], default=[*STARTS, *TRAINED])
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows, data = read_rows(NAME), boundaries.load_data("gsm8k")
    done = {row.get("start", row.get("configuration")) for row in rows}
    for name in options.only:
        if name not in done:
            rows.append(diagnosis(name, data) if name in STARTS else pruning(name, data))
            write_result(NAME, rows, [SEED], command=f"python -m benchmarks.{NAME}")
    draw_all(rows)


if __name__ == "__main__":
    main()
