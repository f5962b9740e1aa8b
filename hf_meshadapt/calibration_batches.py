"""What the boundaries are calibrated on: the first rows of the training set, the same on all stages of a pipeline."""

from __future__ import annotations

import itertools

import torch

from .batches import drawn_alike, sound, source_of, tensors_of
from .pipeline.microbatch import Batch, batch_digest, pad_rows


def calibration_batches(trainer, dataloader) -> list[Batch]:
    """Batches of the first rows of a loader's data set, read apart from the run's own data order, on their device.

    Every replica looks at rows of its own, all at the same number of batches. Collective over a pipeline.

    Args:
        trainer: the `MeshAdaptTrainer`.

    Raises:
        ValueError: the data set is empty, a batch cannot be run, or the stages have read different ones.
    """
    engine, seed, step = trainer.engine, trainer.args.seed, trainer.state.global_step
    rows, local = trainer._rows(training=True), engine.local_replicas
    everyone = rows * engine.mesh.replicas
    batches, digest, left = [], torch.zeros(2, dtype=torch.long), trainer.args.calibration_tokens
    with drawn_alike(engine, seed, step):
        source = iter(source_of(dataloader))
    while left > 0:
        with drawn_alike(engine, seed, step, len(batches)):
            examples = list(itertools.islice(source, everyone // trainer.rows_per_example))
            if not batches:  # a small dataset
                examples = list(itertools.islice(itertools.cycle(examples), everyone // trainer.rows_per_example))
            if len(examples) < everyone // trainer.rows_per_example:
                break
            batch = tensors_of(sound(dataloader.collate_fn(examples), engine))
        left -= batch["labels"].numel()
        digest = digest + batch_digest(batch).cpu()
        batch = pad_rows(batch, everyone)
        mine = {name: value[rows * local[0] : rows * (local[-1] + 1)] for name, value in batch.items()}
        batches.append(trainer._prepare_inputs(mine))
    if not batches:
        raise ValueError("train_dataset is empty: boundaries cannot be calibrated on it. Give it at least one row")
    engine.agree_on_batches(digest, f"for the calibration before step {step}")
    return batches
