"""What must be alike on all ranks, in a few kilobytes, and what differs between them, in words. Pure functions.

A fingerprint is {kind: {name: value}} with short texts as values. What only some ranks hold, such as the weights of a
stage, is compared between those; versions, arguments and the model's configuration must be there on all.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata

import torch
from torch.utils.data import IterableDataset

from . import __version__
from .random_states import random_states_kept

Fingerprint = dict[str, dict[str, str]]

# Kinds, and what to do about a difference.
REMEDIES = {
    "version": "Install the same versions on all machines",
    "argument": "Start all ranks with the same arguments",
    "train_dataset": "Give all ranks the same rows in the same order: each takes its own share of them",
    "eval_dataset": "Give all ranks the same rows in the same order: each takes its own share of them",
    "config": "Give all ranks the same model",
    "weight": "Load the same checkpoint on all ranks; weights that are made at random, new rows of an embedding too, need "
    "a set_seed before",
}
PACKAGES = ("torch", "transformers", "accelerate")
COMPLETE_KINDS = ("version", "argument", "config")
# Arguments that machines may choose for themselves: where files go, what is reported, how one rank uses its device.
LOCAL_ARGUMENTS = {
    *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "ddp_timeout", "link_timeout_seconds"),
    *("report_to", "run_name", "project", "disable_tqdm", "local_rank", "use_cpu", "debug", "skip_memory_metrics"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_empty_cache_steps", "tf32", "push_to_hub"),
    *("activation_checkpointing", "activation_checkpointing_kwargs", "dataloader_multiprocessing_context"),
    *("dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
}
LOCAL_PREFIXES = ("log_", "logging_dir", "hub_", "push_to_hub_", "trackio_")
# Where a model came from says nothing about what it is.
CONFIG_ORIGIN = ("_name_or_path", "_commit_hash", "transformers_version")
# Parts of the trainer whose presence decides which exchanges a rank takes part in.
DECISIVE_PARTS = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func", "model_init", "optimizers")

NUM_ROWS = 8  # of a data set
NUM_ENTRIES = 64  # of a tensor
LONGEST_VALUE = 80
NAMED_DIFFERENCES = 8
NAMED_RANKS = 8


def launch_fingerprint(arguments: Mapping, parts: Mapping) -> Fingerprint:
    """What is known before the model is read.

    Args:
        arguments: `TrainingArguments.to_dict()`.
        parts: what the trainer was given, by parameter name.
    """
    given = {name: readable(parts.get(name) is not None) for name in DECISIVE_PARTS}
    return {
        "version": versions(),
        "argument": argument_fingerprint(arguments) | {f"{name} given": value for name, value in given.items()},
        "train_dataset": dataset_fingerprint(parts.get("train_dataset")),
        "eval_dataset": eval_fingerprint(parts.get("eval_dataset")),
    }


def model_fingerprint(
    config: Mapping, state: Mapping[str, torch.Tensor], stored_names: Mapping[str, str]
) -> Fingerprint:
    """A model's configuration and the weights that are here.

    Args:
        config: `PretrainedConfig.to_dict()`.
        state: the model's `state_dict()`.
        stored_names: the other name of an entry that is another's copy.
    """
    weights = {
        stored_names.get(name, name): tensor_fingerprint(tensor)
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
    }
    return {
        "config": {name: readable(value) for name, value in config.items() if name not in CONFIG_ORIGIN},
        "weight": weights,
    }


def versions() -> dict[str, str]:
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "hf_meshadapt": __version__,
        # Local labels (+cpu, +cu128) differ between machines of one mesh.
        **{name: metadata.version(name).partition("+")[0] for name in PACKAGES},
    }


def argument_fingerprint(arguments: Mapping) -> dict[str, str]:
    """The arguments that change arithmetic or control flow."""
    return {
        name: readable(value)
        for name, value in arguments.items()
        if name not in LOCAL_ARGUMENTS and not name.startswith(LOCAL_PREFIXES)
    }


def eval_fingerprint(datasets) -> dict[str, str]:
    """Of one data set, or of a dict of them."""
    if not isinstance(datasets, Mapping):
        return dataset_fingerprint(datasets)
    prints = {"names": readable(list(datasets))}
    for key, dataset in datasets.items():
        prints |= {f"{name} of {key!r}": value for name, value in dataset_fingerprint(dataset).items()}
    return prints


def dataset_fingerprint(dataset) -> dict[str, str]:
    """Type, length, columns and some rows of a data set; a stream's rows stay where they are.

    Where rows differ each time they are read, being drawn at random, they are left out.
    """
    prints = {"type": type(dataset).__name__}
    if dataset is None:
        return prints
    if (length := length_of(dataset)) is not None:
        prints["length"] = str(length)
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, (list, tuple)):
        prints["columns"] = readable(list(columns))
    if length and is_indexed(dataset):
        with random_states_kept():
            first, again = (
                {f"row {place}": row_fingerprint(dataset, place) for place in spread(length, NUM_ROWS)}
                for _ in range(2)
            )
        prints |= first if first == again else {}
    return prints


def length_of(dataset) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def is_indexed(dataset) -> bool:
    """Whether rows can be read without taking them from a stream; torch's streams inherit a `__getitem__`."""
    return hasattr(type(dataset), "__getitem__") and not isinstance(dataset, IterableDataset)


def row_fingerprint(dataset, place: int) -> str:
    try:
        row = dataset[place]
    except Exception as error:  # the data set's own code, on this rank perhaps only: let all ranks hear of it
        return f"unreadable ({type(error).__name__}: {error})"
    columns = f"columns {', '.join(map(str, row))} " if isinstance(row, Mapping) else ""
    return shortened(f"{columns}{digest(row)}")


def tensor_fingerprint(tensor: torch.Tensor) -> str:
    """Shape, dtype and a digest of some entries, the first and last ones among them."""
    tensor = tensor.detach()
    sizes = "x".join(map(str, tensor.shape)) or "scalar"
    places = torch.tensor(spread(tensor.numel(), NUM_ENTRIES), dtype=torch.long, device=tensor.device)
    entries = tensor.reshape(-1)[places] if tensor.numel() else tensor
    return f"{sizes} {str(tensor.dtype).removeprefix('torch.')} {digest(entries)}"


def spread(count: int, most: int) -> list[int]:
    """At most `most` places out of `count`: the first and last quarter of them in a row, the others evenly between.

    What was appended (rows of an embedding, of a data set) is seen even where it is little.
    """
    if count <= most:
        return list(range(count))
    ends = most // 4
    inner = most - 2 * ends
    between = [ends + (count - 2 * ends) * (2 * index + 1) // (2 * inner) for index in range(inner)]
    return [*range(ends), *between, *range(count - ends, count)]


def digest(value) -> str:
    """64 bits of nested dicts, sequences, tensors, arrays and plain values; of any other object its type's name."""
    sha = hashlib.sha256()
    for piece in pieces(value):
        sha.update(len(piece).to_bytes(8, "little"))
        sha.update(piece)
    return sha.hexdigest()[:16]


def pieces(value) -> Iterable[bytes]:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from pieces(value[key])
    elif isinstance(value, (list, tuple)):
        if all(isinstance(entry, (int, float, str)) for entry in value):
            yield json.dumps(value).encode()
            return
        yield f"sequence {len(value)}".encode()
        for entry in value:
            yield from pieces(entry)
    elif isinstance(value, bytes):
        yield value
    elif hasattr(value, "dtype") and hasattr(value, "tolist"):  # numpy
        yield f"array {value.dtype}".encode()
        yield from pieces(value.tolist())
    else:
        yield readable(value).encode()


def readable(value) -> str:
    """Canonical JSON, cut where it is long; objects by their type, since their addresses differ."""
    return shortened(json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__))


def shortened(text: str) -> str:
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[: LONGEST_VALUE // 2]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def differences(everyone: list[Fingerprint]) -> dict[str, list[str]]:
    """By kind, what differs between ranks: both values and who holds them. Empty if nothing does.

    Args:
        everyone: fingerprints in rank order.
    """
    found: dict[str, list[str]] = {}
    for kind in dict.fromkeys(itertools.chain.from_iterable(everyone)):
        prints = [fingerprint.get(kind, {}) for fingerprint in everyone]
        for name in dict.fromkeys(itertools.chain.from_iterable(prints)):
            holders: dict[str, list[int]] = {}
            for rank, values in enumerate(prints):
                if name in values or kind in COMPLETE_KINDS:
                    holders.setdefault(values.get(name, "missing"), []).append(rank)
            if len(holders) > 1:
                said = " and ".join(f"{value} on {ranks_in_words(ranks)}" for value, ranks in holders.items())
                found.setdefault(kind, []).append(f"{name} is {said}")
    return found


def ranks_in_words(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:NAMED_RANKS]))
    more = f" and {len(ranks) - NAMED_RANKS} more" if len(ranks) > NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def refuse_differences(everyone: list[Fingerprint]) -> None:
    """Raises ValueError where ranks differ: names what, both values, which ranks, and the remedy."""
    texts = []
    for kind, found in differences(everyone).items():
        more = f"; and {len(found) - NAMED_DIFFERENCES} more" if len(found) > NAMED_DIFFERENCES else ""
        texts.append(f"{kind} {'; '.join(found[:NAMED_DIFFERENCES])}{more}. {REMEDIES[kind]}.")
    if texts:
        raise ValueError(f"the ranks of this run do not fit together: {' '.join(texts)}")
