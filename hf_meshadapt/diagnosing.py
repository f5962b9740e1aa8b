"""Whether an anchor's priors can help a model on some data: gradients of a short uncoded training run, measured.

In the emulated mesh, on one device. The run takes AdamW steps without coding. Every `anchor_every` of them the gradient
of another batch is taken as an anchor would, and kept as a prior keeps it; after the last, boundaries of several kinds
code one more batch, whose gradient is held against the prior and against the uncoded gradient of the same batch.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback

from .anchoring.passes import AnchorPasses
from .arguments import MeshAdaptArguments
from .batches import checked, tensors_of
from .diagnostics import (
    cosine,
    effective_rank,
    energy_in_subspace,
    energy_in_top,
    energy_kept,
    quartiles,
    singular_values,
)
from .spectral.compressor import GradientCompressor
from .spectral.config import SpectralConfig, kind_of
from .spectral.correction import correct_
from .spectral.factors import Factors
from .spectral.priors import Priors
from .trainer import MeshAdaptTrainer

TOP_RANKS = (8, 64)
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class DiagnosisOptions:
    """
    Attributes:
        stages: of the emulated pipeline, at least 2: with one there is no boundary.
        rows: of a batch.
        num_anchors: gradients that an anchor would send.
        anchor_every: optimizer steps between two of them.
        mask_ratio: of what random masks leave out; top-k gets the same bytes.
        prior_rank: of the prior.
    """

    stages: int = 2
    rows: int = 4
    num_anchors: int = 4
    anchor_every: int = 5
    learning_rate: float = 2e-5
    mask_ratio: float = 0.95
    prior_rank: int = 64
    calibration_tokens: int = 1024
    seed: int = 0

    def __post_init__(self):
        for name, least in (("stages", 2), ("rows", 1), ("num_anchors", 2), ("anchor_every", 1), ("prior_rank", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}. Use {least} or more")

    def boundaries(self) -> dict[str, dict]:
        """Arguments of what codes the last batch, by name."""
        masks = {"boundary_codec": "random_mask", "mask_ratio": self.mask_ratio}
        return {
            "uncoded": {"boundary_codec": "none"},
            "random mask, zero fill": masks,
            "random mask, mean fill": masks | {"boundary_predictor": "mean", "exact_first_token": True},
            "top-k": {"boundary_codec": "topk", "boundary_budget": 1 - self.mask_ratio},
        }


class AnchorGradients(TrainerCallback):
    """Takes the gradients that an anchor would, before the first step and every so many."""

    def __init__(self, trainer: MeshAdaptTrainer, options: DiagnosisOptions):
        self.passes, self.options = AnchorPasses(trainer), options
        self.named = trainer.engine.parts.stored_trainable()
        self.batches = self.passes.batches(trainer.get_train_dataloader(), options.seed + 1, 0)
        self.gradients: list[Gradients] = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self.options.anchor_every == 0:
            weights = {name: parameter.detach() for name, parameter in self.named}
            self.gradients.append(self.passes.gradients(weights, next(self.batches)))


def diagnose(model: nn.Module, dataset, collator, options: DiagnosisOptions | None = None) -> dict:
    """Trains the model a little, in place, and measures.

    Args:
        model: a whole causal language model.
        dataset: tokenised rows by index, at least one.
        collator: makes batches of them, with labels.

    Returns:
        `matrices`: by measure, quartiles over the matrices of the newest anchor gradient; `staleness`: cosine of anchor
        gradients by how many steps lie between them; `boundaries`: by kind, quartiles over matrices of
        `share_in_prior`, the energy in the prior's subspace, and `kept_by_filter`, what the default correction's
        filter lets through, both also of the error (coded - uncoded; None where there is none); `cosine_to_uncoded`,
        `cosine_to_prior`, and `corrected_cosine_to_uncoded` after the default correction.
    """
    options = options or DiagnosisOptions()
    whole = copy.deepcopy(model)  # a trainer cuts the model that it is given
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, dataset, collator, options, folder, {"boundary_codec": "none"})
        anchors = AnchorGradients(trainer, options)
        trainer.add_callback(anchors)
        trainer.train()
        weights = {name: parameter.detach() for name, parameter in trainer.engine.parts.stored_trainable()}
        batch = next(anchors.batches)
        matrices = [name for name, weight in weights.items() if kind_of(name, tuple(weight.shape)) == "matrix"]
        taken = anchors.gradients
        gradients = [{name: gradient[name] for name in matrices} for gradient in taken]
        # Trainers refer to themselves: without this, models and optimizer states of several would be there at once.
        del trainer, anchors
        clear_device_cache(garbage_collection=True)
        coded = {}
        for kind, boundary in options.boundaries().items():
            changed = copy.deepcopy(whole)
            changed.load_state_dict(weights, strict=False)
            other = make_trainer(changed, dataset, collator, options, folder, boundary)
            gradient = coded_gradient(other, batch)
            coded[kind] = {name: gradient[name] for name in matrices}
            del changed, other, gradient
            clear_device_cache(garbage_collection=True)
    return measure(gradients, coded, prior_of(taken, options), options)


def make_trainer(model, dataset, collator, options: DiagnosisOptions, folder: str, boundary: dict) -> MeshAdaptTrainer:
    """An emulated pipeline around a model, with a boundary of `DiagnosisOptions.boundaries`."""
    args = MeshAdaptArguments(
        output_dir=folder, pipeline_stages=options.stages, per_device_train_batch_size=options.rows,
        max_steps=(options.num_anchors - 1) * options.anchor_every + 1, learning_rate=options.learning_rate,
        lr_scheduler_type="constant", seed=options.seed, save_strategy="no", report_to="none", disable_tqdm=True,
        logging_strategy="no", preset="dense", **boundary,
        calibration_tokens=options.calibration_tokens if "boundary_predictor" in boundary else None,
    )  # fmt: skip
    args.emulation_is_meant = True
    trainer = MeshAdaptTrainer(model=model, args=args, train_dataset=dataset, data_collator=collator)
    trainer.remove_callback(PrinterCallback)
    return trainer


def coded_gradient(trainer: MeshAdaptTrainer, batch) -> Gradients:
    """The gradient that the fast circuit would have of a batch, by name, the copies of a tied matrix summed."""
    engine, args = trainer.engine, trainer.args
    if engine.needs_calibration:
        trainer._calibrate(trainer.get_train_dataloader())
    batch = trainer._prepare_inputs(tensors_of(checked(batch)))
    count = trainer._count_labels(batch["labels"])
    torch.manual_seed(args.seed)  # the same dropout whatever codes
    engine.train_batch(batch, args.per_device_train_batch_size, count, step=0, accumulation=0, sync=True)
    # The copies of a tied matrix have been given the sum each.
    return {name: parameter.grad for name, parameter in engine.parts.stored_trainable()}


def prior_of(gradients: list[Gradients], options: DiagnosisOptions) -> Priors:
    """What the correction would hold after these anchor gradients."""
    config = SpectralConfig(matrix_rank=options.prior_rank)
    priors, compressor = Priors(gradients[0].items(), config), GradientCompressor(config)
    for version, gradient in enumerate(gradients):
        priors.update(compressor.compress(gradient), version, version * options.anchor_every)
    return priors


def measure(
    gradients: list[Gradients], coded: dict[str, Gradients], priors: Priors, options: DiagnosisOptions
) -> dict:
    """See `diagnose`; `gradients` and `coded` are of matrices only."""
    newest = {name: singular_values(gradient) for name, gradient in gradients[-1].items()}
    found = {f"energy in top {rank}": [energy_in_top(s, rank) for s in newest.values()] for rank in TOP_RANKS}
    found["effective rank"] = [effective_rank(s) for s in newest.values()]
    ages = range(1, len(gradients))
    pairs = {age: [cosine(one, other) for one, other in zip(gradients, gradients[age:])] for age in ages}
    means = {name: priors.get(name) for name in gradients[-1]}
    return {
        "num_matrices": len(newest),
        "matrices": {name: quartiles(values) for name, values in found.items()},
        "staleness": {age * options.anchor_every: sum(values) / len(values) for age, values in pairs.items()},
        "boundaries": {kind: measure_boundary(g, coded["uncoded"], means, options) for kind, g in coded.items()},
    }


def measure_boundary(
    gradient: Gradients, uncoded: Gradients, means: dict[str, Factors], options: DiagnosisOptions
) -> dict:
    """Of `measure`, one boundary's part."""
    config, rank = SpectralConfig(matrix_rank=options.prior_rank), options.prior_rank
    errors = {name: matrix - uncoded[name] for name, matrix in gradient.items()}
    corrected = {name: matrix.clone() for name, matrix in gradient.items()}
    for name, matrix in corrected.items():
        correct_(matrix, means[name], config, 1.0)
    parts = {"": gradient, "error_": errors if any(error.any() for error in errors.values()) else None}
    shares = {}
    for part, matrices in parts.items():
        inside = matrices and quartiles(energy_in_subspace(m, means[name], rank) for name, m in matrices.items())
        kept = matrices and quartiles(energy_kept(m, means[name], config) for name, m in matrices.items())
        shares |= {f"{part}share_in_prior": inside, f"{part}kept_by_filter": kept}
    return {
        **shares,
        "cosine_to_uncoded": cosine(gradient, uncoded),
        "corrected_cosine_to_uncoded": cosine(corrected, uncoded),
        "cosine_to_prior": cosine(gradient, {name: prior.dense() for name, prior in means.items()}),
    }


def draw(figures: dict, path: Path) -> None:
    """Writes the measures as a PNG.

    Args:
        figures: of `diagnose`, and with `pruning`, by model what `pruned_losses` gives.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not pyplot: it would choose a backend and keep figures for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pruning = figures.get("pruning")
    figure = Figure(figsize=(15 if pruning else 11, 4), dpi=120, layout="constrained")
    left, middle, right, *last = figure.subplots(1, 4 if pruning else 3)
    shares = {name: values for name, values in figures["matrices"].items() if name.startswith("energy")}
    shown = {kind: values["share_in_prior"] for kind, values in figures["boundaries"].items()}
    for axes, rows, title in (
        (left, shares, "energy of a gradient"),
        (right, shown, "energy in the prior's subspace"),
    ):
        below, above = ([abs(row[end] - row[1]) for row in rows.values()] for end in (0, 2))
        axes.barh(list(rows), [row[1] for row in rows.values()], xerr=[below, above], capsize=3)
        axes.set(title=title, xlabel="share (median, quartiles over matrices)", xlim=(0, 1))
    middle.plot(list(figures["staleness"]), list(figures["staleness"].values()), marker="o")
    middle.set(title="anchor gradients", xlabel="optimizer steps between", ylabel="cosine", ylim=(-1, 1))
    for axes in last:
        for name, losses in pruning.items():
            axes.plot([float(share) for share in losses], list(losses.values()), marker="o", label=name)
        axes.set(title="pruned", xlabel="share of the weights set to zero", ylabel="loss")
        axes.legend()
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})
