"""Trainer's data methods over a mesh: batches are sharded by replica, not by rank, and counted over replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.utils.data import RandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from .batches import (
    agreed_num_items,
    checked,
    drawn_alike,
    num_real,
    shard_by_replica,
    tensors_of,
    warn_of_short,
    without_repeats,
)
from .sampling import EpochSampler
from .trl_data import refuse_emptied


class DataMixin:
    """Base of `MeshAdaptMixin`."""

    _told_of_short = False

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        # The placement that Trainer passes on is accelerate's default.
        accelerator.prepare_data_loader = lambda loader, *_, **__: shard_by_replica(loader, accelerator, self.engine)

    def _get_train_sampler(self, train_dataset=None):
        sampler = self._over_replicas(super()._get_train_sampler(train_dataset))
        if isinstance(sampler, RandomSampler) and self.accelerator.use_seedable_sampler:
            return sampler  # accelerate seeds it
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSampler(sampler, seed) if hasattr(sampler, "generator") else sampler

    def _get_eval_sampler(self, eval_dataset):
        return self._over_replicas(super()._get_eval_sampler(eval_dataset))

    def _prepare_dataset(self, dataset, processing_class, args, *others):
        """TRL's: rank 0 goes first, the others find what it cached."""
        with self.engine.naming("the prepared data set from"), barriers_without_a_device():
            prepared = super()._prepare_dataset(dataset, processing_class, args, *others)
        refuse_emptied(dataset, prepared, name=others[-1], max_length=args.max_length)
        return prepared

    def _over_replicas(self, sampler):
        if isinstance(sampler, LengthGroupedSampler) and not self.engine.mesh.emulated:
            sampler.batch_size *= self.engine.mesh.replicas  # one order for all of them
        return sampler

    def get_tp_size(self) -> int:
        """Ranks that read the same batch, as Trainer's batch arithmetic wants to know."""
        return 1 if self.engine.mesh.emulated else self.engine.mesh.stages

    def get_batch_samples(self, epoch_iterator, num_batches: int, device):
        with drawn_alike(self.engine, self.args.seed, self.state.global_step):
            batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = [checked(batch) for batch in batches]
        rows = self._rows(training=True) * len(self.engine.local_replicas)
        self._look_for_short(batches, rows)
        if batches and self.accelerator.gradient_state.end_of_dataloader:
            # Not of the loader in use: on a resume it skips batches and does not know its size.
            batches[-1] = without_repeats(batches[-1], self.callback_handler.train_dataloader, self.engine)
        step = self.state.global_step
        return batches, agreed_num_items(batches, self._count_labels, self.engine, self.anchoring, step, rows)

    def _look_for_short(self, batches: list[dict], rows: int) -> None:
        """Warns, once, of a batch with fewer rows that is not the last of its loader."""
        state = self.accelerator.gradient_state
        if self._told_of_short or not state.in_dataloader:  # a loader of the person's own does not tell of its end
            return
        others = batches[:-1] if state.end_of_dataloader else batches
        self._told_of_short = any(warn_of_short(batch, rows, self.engine) for batch in others)

    def _get_num_items_in_batch(self, batch_samples, device):
        return None  # counted in get_batch_samples, over replicas instead of WORLD

    def _count_labels(self, labels: torch.Tensor) -> torch.Tensor:
        # Trainer's own rule: for some architectures (GPT-2) it counts position 0 although the loss leaves it out.
        return (labels[..., 1:] if self._loss_shifts_labels else labels).ne(-100).sum()

    def _track_num_input_tokens(self, inputs) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(
            {name: value[: num_real(inputs)] for name, value in tensors_of(inputs).items()}
        )
        # Trainer sums over all ranks, and the stages of a pipeline read the same tokens.
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.get_tp_size()


@contextlib.contextmanager
def barriers_without_a_device() -> Iterator[None]:
    """Within it accelerate's barriers name no device: it takes a rank's place on its machine for one, and where ranks share
    a GPU there is none of this number."""
    state = PartialState()
    if state.num_processes > 1:
        state.wait_for_everyone = dist.barrier
    try:
        yield
    finally:
        vars(state).pop("wait_for_everyone", None)
