"""What Trainer's data loaders give, made fit for a mesh: sharded by replica, labelled, repeats known as such."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import has_length

from .agreements import Agreements
from .data_checks import IGNORED, NamingCollator, check_tokens, range_fault, row_fault, token_range
from .engine import MeshEngine
from .fingerprints import is_indexed, spread
from .pipeline.microbatch import mask_rows
from .random_states import random_states_kept
from .sampling import REAL_ROWS, CountingCollator, ReplicaStream

logger = logging.getLogger(__name__)

# Of a training set, at most, in search of a label.
NUM_SAMPLED_ROWS = 32
# From labels (B, T) to how many of them are predicted, scalar.
CountLabels = Callable[[torch.Tensor], torch.Tensor]


def shard_by_replica(loader: DataLoader, accelerator: Accelerator, ranks: Agreements) -> DataLoader:
    """In place of `Accelerator.prepare_data_loader`: the ranks of a pipeline read the same rows."""
    replicas = 1 if ranks.mesh.emulated else ranks.mesh.replicas
    streams = isinstance(loader.dataset, IterableDataset)
    if loader.num_workers:
        # Worker processes draw by this generator and their rank: let both be the same on all stages.
        loader.generator = torch.Generator().manual_seed(torch.initial_seed())
        if isinstance(loader.worker_init_fn, functools.partial):
            loader.worker_init_fn = functools.partial(loader.worker_init_fn, rank=ranks.topology.replica)
    if streams and replicas > 1:
        loader = _stream_loader(loader, replicas, ranks.topology.replica)
    else:
        loader.collate_fn = NamingCollator(loader.collate_fn)
    loader = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1 if streams else replicas,
        process_index=0 if streams else ranks.topology.replica,
        put_on_device=accelerator.device_placement,
        # Seeds are equal on all ranks; synchronising generators would be a collective on WORLD.
        rng_types=[],
        dispatch_batches=False,
        even_batches=True,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
    )
    if isinstance(loader.batch_sampler, BatchSamplerShard):
        # Where accelerate looks for it to set the epoch of a loader that skips batches (a resume).
        loader.batch_sampler.sampler = loader.batch_sampler.batch_sampler.sampler
    return loader


def _stream_loader(loader: DataLoader, replicas: int, replica: int) -> DataLoader:
    kept = ("num_workers", "pin_memory", "multiprocessing_context", "prefetch_factor", "worker_init_fn", "in_order")
    kept = (*kept, "generator")
    return DataLoader(
        ReplicaStream(loader.dataset, loader.batch_size, replicas, replica),
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate_fn=CountingCollator(NamingCollator(loader.collate_fn)),
        persistent_workers=loader.persistent_workers,
        **{name: getattr(loader, name) for name in kept},
    )


@contextlib.contextmanager
def drawn_alike(ranks: Agreements, *numbers: int) -> Iterator[None]:
    """Within it, data sets and collators draw random numbers (torch's, numpy's, Python's: masked language modelling,
    augmentation) from these numbers.

    The stages of a pipeline fetch the same batch each for itself, and their generators are in different states: dropout
    drew from them, or some ranks are new since the checkpoint. One stage keeps the process's, as Trainer does.
    """
    if ranks.mesh.num_chunks == 1:
        yield
        return
    seed = 0
    for number in (*numbers, ranks.topology.replica):
        seed = (seed * 1_000_003 + number) % 2**63
    with random_states_kept(seed):
        yield


def each_drawn_alike(loader: Iterable[dict], ranks: Agreements, seed: int) -> Iterator[dict]:
    """The loader's batches, each fetched under `drawn_alike`."""
    iterator = iter(loader)
    for index in itertools.count():
        with drawn_alike(ranks, seed, index):
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def source_of(loader: Iterable[dict]):
    """The data set that a loader reads, its stream over replicas unwrapped; None for a loader that tells of none."""
    dataset = getattr(loader, "dataset", None)
    return dataset.source if isinstance(dataset, ReplicaStream) else dataset


def checked(batch) -> dict:
    """The batch as a dict, its repeats without labels.

    Raises:
        ValueError: it has no labels or no tokens that a model could take, or an entry that is no tensor with a row per
            sequence.
        NotImplementedError: it has labels that are shifted already.
    """
    batch = dict(batch)
    if "labels" not in batch:
        raise ValueError(
            f"the batch has no labels (only {', '.join(batch) or 'nothing'}): use a data collator that makes them, such as "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    if "shift_labels" in batch:
        raise NotImplementedError(
            "shift_labels in the batch: repeated rows would keep them. Let the collator give labels, which the model shifts"
        )
    labels = batch["labels"]
    rows = len(labels) if isinstance(labels, torch.Tensor) and labels.dim() else 0
    for name, value in batch.items():
        if name != REAL_ROWS and not (isinstance(value, torch.Tensor) and value.dim() and len(value) == rows):
            what = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"batch entry {name} ({what}): only tensors with one row for each of the {rows} sequences can be cut into "
                "microbatches. Leave it out in the data collator, or set remove_unused_columns=True"
            )
    batch = check_tokens(batch)
    return mask_rows(batch, num_real(batch)) if REAL_ROWS in batch else batch


def sound(batch, engine: MeshEngine) -> dict:
    """The batch as `checked` gives it, if the model's tables have its tokens, labels and positions. Where ranks read other
    rows it is `agreed_num_items` that tells all of them.

    Raises:
        ValueError: they are not, or as `checked`.
    """
    batch = checked(batch)
    layout = engine.parts.layout
    if fault := range_fault(token_range(batch).cpu(), layout.vocab_size, layout.num_positions):
        raise ValueError(fault)
    return batch


def agreed_num_items(
    batches: list[dict], count_labels: CountLabels, engine: MeshEngine, anchoring, step: int, rows: int
) -> torch.Tensor:
    """Predicted tokens of an optimizer step over all replicas, on the CPU; 1 where there are none, so that such a step
    has loss 0 and no gradient. Trainer would divide by 0 and make every weight NaN.

    Args:
        batches: this process's, `checked`.
        step: optimizer steps taken so far.
        rows: of a batch, at most.

    Raises:
        ValueError: a batch of some replica has a token, label or position outside the model's tables, or too many rows; on
            all ranks.
    """
    count, fault = torch.zeros((), dtype=torch.long), None
    if batches:
        facts = [torch.stack([count_labels(batch["labels"]), *token_range(batch)]) for batch in batches]
        facts = torch.stack(facts).cpu()  # one copy to the host
        count = facts[:, 0].sum()
        layout = engine.parts.layout
        faults = (range_fault(extremes, layout.vocab_size, layout.num_positions) for extremes in facts[:, 1:])
        fault = next(filter(None, faults), None) or row_fault(max(len(batch["labels"]) for batch in batches), rows)
    count, num_faults = anchoring.sum_over_replicas(torch.stack([count, torch.tensor(int(fault is not None))]))
    if num_faults:
        raise ValueError(fault or "another replica's batch cannot be run: see its error")
    if batches and not count and engine.topology.rank == 0:
        logger.warning(
            "At step %d no row of any replica has a label that counts: the loss is 0 and the optimizer steps without a "
            "gradient. Filter such rows out, or look at whether truncation cuts the completions off",
            step,
        )
    return count.clamp(min=1)


def refuse_unlabelled(loader: DataLoader, rows: int, count_labels: CountLabels, engine: MeshEngine) -> None:
    """Looks at some rows of a training set that has indices, batch by batch, until it finds a label.

    Args:
        rows: of a batch.

    Raises:
        ValueError: there is none, or what was looked at cannot be trained on; on all ranks, which read the same rows.
    """
    source = source_of(loader)
    if not has_length(source) or not is_indexed(source):
        return
    places = spread(len(source), NUM_SAMPLED_ROWS)
    with random_states_kept():
        for start in range(0, len(places), rows):
            batch = sound(loader.collate_fn([source[place] for place in places[start : start + rows]]), engine)
            if count_labels(batch["labels"]):
                return
    raise ValueError(
        f"train_dataset: none of the {len(places)} rows that were looked at has a label that counts, all are {IGNORED}. "
        "Let the labels of what shall be learnt be its tokens; look at the completion mask, and whether truncation cuts "
        "the completions off"
    )


def warn_of_short(batch: dict, rows: int, engine: MeshEngine) -> bool:
    """Whether a batch has fewer rows than `rows`, of which it then warns."""
    found = len(batch["labels"])
    if found < rows and engine.topology.stage == 0:
        logger.warning(
            "The data collator made a batch of %d rows where the batch size makes room for %d: copies that count for "
            "nothing fill it up, and cost as much as what they copy. Of a collator that joins examples into one row "
            "(DataCollatorWithFlattening) set the batch size to the rows that it makes, or pack the examples beforehand, "
            "as packing of MeshAdaptSFTConfig does",
            found,
            rows,
        )
    return found < rows


def num_real(batch: dict) -> int:
    """Rows of the batch that are rows of the data set."""
    return batch.get(REAL_ROWS, len(batch["labels"]))


def tensors_of(batch: dict) -> dict[str, torch.Tensor]:
    """The batch as the model takes it."""
    return {name: value for name, value in batch.items() if name != REAL_ROWS}


def without_repeats(batch: dict, loader: DataLoader, ranks: Agreements) -> dict:
    """A loader's last batch, with labels only on rows that the sampler did not repeat to fill up every replica's."""
    if ranks.mesh.emulated or ranks.mesh.replicas == 1 or REAL_ROWS in batch:
        return batch
    if loader._drop_last or not has_length(loader.dataset):
        return batch
    remainder, rows = len(loader.dataset) % loader.total_batch_size, len(batch["labels"])
    if not remainder:
        return batch
    # A collator may make several rows of an example, such as the two of a pair.
    remainder *= max(1, rows // (loader.total_batch_size // ranks.mesh.replicas))
    real = min(rows, max(0, remainder - ranks.topology.replica * rows))
    return {**mask_rows(batch, real), REAL_ROWS: real}
