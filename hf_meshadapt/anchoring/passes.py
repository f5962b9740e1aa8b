"""The anchor's passes: gradients of the uncoded loss at weights that are not the model's own at the moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..anchor.budget import LEAST_CHOSEN
from ..batches import checked, source_of, tensors_of
from ..pipeline.microbatch import batch_digest
from .data import AnchorBatches, StreamBatches, anchor_batches


class AnchorPasses:
    """Runs uncoded passes: through all stages in this process, or as one stage of an anchor of several processes.

    They run in evaluation mode. Dropout would add noise to what shall denoise, and draw random numbers that the training
    passes of the same process then miss.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._named = trainer.engine.parts.stored_trainable()

    def batches(self, dataloader, seed: int, num_taken: int) -> AnchorBatches | StreamBatches:
        """The anchor's batches, by the data set and the collator of the trainer's loader."""
        args = self._trainer.args
        rows, config, every = args.per_device_train_batch_size, args.anchor_config(), 1
        if config is not None:  # None: gradients as an anchor would take them, for a diagnosis
            # Of a stream, so that it goes through it as fast as a replica does, whose batches are so many for one of ours.
            # Not by an interval that is chosen: the anchor's own launch does not know it.
            anchor_every = config.anchor_every or LEAST_CHOSEN
            every = max(1, anchor_every * args.gradient_accumulation_steps // config.anchor_batches)
        return anchor_batches(source_of(dataloader), dataloader.collate_fn, rows, seed, num_taken, every)

    def gradients(self, weights: dict[str, Tensor], batch) -> dict[str, Tensor]:
        """Gradients of the mean-token loss of a batch by parameter name, the copies of a tied matrix summed.

        Of this process's parameters; collective over the stages of an anchor of several. The model's weights and gradients
        are as before afterwards.

        Args:
            weights: of every trainable parameter by name; not written to.
        """
        trainer = self._trainer
        batch = trainer._prepare_inputs(tensors_of(checked(batch)))
        num_items = trainer._count_labels(batch["labels"]).to(trainer.engine.device, torch.float32).clamp(min=1)
        trainer.engine.agree_on_length(batch["labels"].shape[1])
        with weights_in_place(self._named, weights):
            trainer.engine.runner.backward_uncoded(batch, len(batch["labels"]), num_items)
            self._agree(batch)
            gradients: dict[str, Tensor] = {}
            for name, parameter in self._named:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return gradients

    def _agree(self, batch) -> None:
        """Over the stages of an anchor of several processes: they read the same, and copies have one gradient."""
        engine = self._trainer.engine
        if engine.groups is not None:
            engine.agree_on_batches(batch_digest(batch), "for a prior")
            engine.sum_tied_gradients()


@contextlib.contextmanager
def weights_in_place(named: list[tuple[str, nn.Parameter]], weights: dict[str, Tensor]) -> Iterator[None]:
    """Within it, parameters hold other weights and no gradients; nothing is copied where dtype and device fit."""
    held = [(parameter, parameter.data, parameter.grad) for _, parameter in named]
    try:
        for name, parameter in named:
            parameter.grad = None
            parameter.data = weights[name].to(parameter.device, parameter.dtype)
        yield
    finally:
        for parameter, data, gradient in held:
            parameter.data, parameter.grad = data, gradient
