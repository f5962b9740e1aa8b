"""Error of the transform codec on activations and gradients of SmolLM2-135M: entropy coded against whole bits.

Boundaries are fitted on the first tokens of the training set, uncoded, as the trainer does, and errors measured on batches
that follow. Errors of activations are weighed as the loss feels them (the transform's own metric), relative to the energy
of what is coded.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field, replace

from torch import Tensor

from benchmarks.boundary_quality import MODEL, PROBLEMS, load_data
from benchmarks.common import print_table, write_result
from hf_meshadapt.boundary.coder import BoundaryCoder
from hf_meshadapt.boundary.fitting import BoundaryFit, fit_boundary
from hf_meshadapt.boundary.observer import Observer
from hf_meshadapt.boundary.predictor import project_embedding
from hf_meshadapt.boundary.sequence_coder import PADDING
from hf_meshadapt.config import BoundaryConfig
from hf_meshadapt.pipeline.microbatch import token_kinds

LAYERS = (7, 15, 22)  # the boundaries of four stages come after these
BUDGETS = (0.025, 0.05, 0.1)
CODED = BoundaryConfig(
    "transform", wire_dtype="bfloat16", exact_first_token=True, predictor="token", forward_share=0.8
)


@dataclass
class Boundary:
    """What passes one boundary: observed first, then kept for the comparison."""

    observer: Observer
    batch: dict[str, Tensor] = field(default_factory=dict)
    kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] | None = None  # hidden, gradient, token ids, kinds

    def __call__(self, _, __, output):
        hidden = output[0] if isinstance(output, tuple) else output
        ids, kind = self.batch["input_ids"], token_kinds(self.batch)
        if self.kept is None:
            hidden = self.observer(hidden, ids, kind)
        else:
            states = hidden.detach()
            hidden.register_hook(lambda gradient: self.kept.append((states, gradient, ids, kind)))
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def passes(model, boundaries: list[Boundary], batches) -> None:
    for batch in batches:
        for boundary in boundaries:
            boundary.batch = batch
        model(**batch).loss.backward()
        model.zero_grad()


def errors(config: BoundaryConfig, fit: BoundaryFit, table: Tensor, kept) -> dict[str, float]:
    """Squared error over squared size of what is coded, by direction."""
    coder = BoundaryCoder(config, table_width(fit), fit, table)
    wrong, whole = dict.fromkeys(("forward", "backward"), 0.0), dict.fromkeys(("forward", "backward"), 0.0)
    for hidden, gradient, ids, kind in kept:
        coded = kind != PADDING
        coded[:, 0] = False  # travels whole
        expected = coder.predict(ids, kind)
        decoded = coder.decode(coder.encode(hidden, ids, kind), ids, kind)
        back = coder.decode_gradient(coder.encode_gradient(gradient, kind), kind)
        felt = fit.forward.analysis.T
        wrong["forward"] += float(((decoded - hidden)[coded] @ felt).square().sum())
        whole["forward"] += float(((hidden - expected)[coded] @ felt).square().sum())
        wrong["backward"] += float((back - gradient)[coded].square().sum())
        whole["backward"] += float(gradient[coded].square().sum())
    return {direction: wrong[direction] / whole[direction] for direction in wrong}


def table_width(fit: BoundaryFit) -> int:
    return fit.weights.shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration_batches", type=int, default=20)
    parser.add_argument("--batches", type=int, default=4)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq

    tokenizer, train, _ = load_data("gsm8k")
    collate, count = DataCollatorForSeq2Seq(tokenizer), options.calibration_batches + options.batches
    batches = [dict(collate([train[row] for row in range(PROBLEMS * i, PROBLEMS * (i + 1))])) for i in range(count)]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    table = project_embedding(model.get_input_embeddings().weight)
    boundaries = [Boundary(Observer(model.config.hidden_size, table, "cpu")) for _ in LAYERS]
    for layer, boundary in zip(LAYERS, boundaries):
        model.model.layers[layer].register_forward_hook(boundary)
    fitting = batches[: options.calibration_batches]
    for held_out, part in ((False, fitting[2:]), (True, fitting[:2])):
        for boundary in boundaries:
            boundary.observer.held_out = held_out
        passes(model, boundaries, part)
    for boundary in boundaries:
        boundary.kept = []
    passes(model, boundaries, batches[options.calibration_batches :])
    rows = []
    for layer, boundary in zip(LAYERS, boundaries):
        fit = fit_boundary(boundary.observer.moments(), transforms=True)
        for budget in BUDGETS:
            coded = replace(CODED, budget=budget)
            entropy, whole_bits = (
                errors(replace(coded, entropy_coded=flag), fit, table, boundary.kept) for flag in (True, False)
            )
            for direction in ("forward", "backward"):
                rows.append(
                    {
                        "layer": layer, "budget": budget, "direction": direction,
                        "error_entropy_coded": entropy[direction], "error_whole_bits": whole_bits[direction],
                        "ratio": entropy[direction] / whole_bits[direction],
                    }
                )  # fmt: skip
    print_table(rows, list(rows[0]))
    print(write_result("codec_error", rows, []).name)


if __name__ == "__main__":
    main()
