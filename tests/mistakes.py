"""Arguments and data sets as people may bring them, right and wrong, and what may come of them."""

from __future__ import annotations

import contextlib
import math
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import torch
import transformers
from hypothesis import strategies as st
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening

import hf_meshadapt
from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer
from hf_meshadapt.config import CODECS
from tests.equality import VOCAB, Rows, collate, tiny_model

# Where an error may come from.
OURS = Path(hf_meshadapt.__file__).parent
TRANSFORMERS = Path(transformers.__file__).parent
VALIDATORS = {
    TRANSFORMERS / name for name in ("training_args.py", "trainer.py", "trainer_utils.py", "utils/generic.py")
}
FLAGS = (None, True, False)

FIELDS = {
    "preset": ("anchored", "dense", "paper", "none"),
    "pipeline_stages": (1, 2, 3, 5, 0, -1, 2.0, "2", None),
    "data_parallel_replicas": (None, 1, 2, 0, 1.5),
    "pipeline_chunks_per_rank": (1, 2, 0, None),
    "pipeline_microbatches": (None, 1, 2, 3, 0, "all"),
    "pipeline_schedule": ("gpipe", "1f1b", "interleaved", "zigzag"),
    "pipeline_split": (None, "1,3", "2,2", "0,4", "x", "", [1, 3]),
    "boundary_codec": (None, *CODECS, "zip"),
    "boundary_budget": (None, 0.05, 0.4, 1.0, 1e-6, 0.0, 1.5, -1.0, math.nan, "5%"),
    "boundary_target_step_seconds": (None, 10.0, 1e-9, 0.0, math.inf),
    "link_bits_per_second": (None, 1e6, 0.0, math.nan),
    "forward_share": (None, 0.5, 0.99, 0.0, 1.0),
    "loss_weighted": FLAGS,
    "entropy_coded": FLAGS,
    "boundary_bits": (None, 1, 2, 4, 8, 5, 0, 2.0),
    "boundary_rotated": FLAGS,
    "boundary_error_feedback": FLAGS,
    "calibration_tokens": (None, 1, 64, 0, 1.5),
    "calibration_every": (None, 0, 1, -1),
    "mask_ratio": (None, 0.0, 0.5, 0.95, 0.999, 1.0, -0.1, math.nan, "0.5"),
    "mask_seed": (None, 3, -1, 2**70, "x"),
    "exact_first_token": (*FLAGS, "yes"),
    "boundary_predictor": (None, "none", "mean", "token", "oracle"),
    "wire_dtype": (None, "float32", "bfloat16", "float16", "int8", torch.float32),
    "wire_backend": (None, "gloo", "nccl", "mpi"),
    "model_dtype": ("auto", "float32", "int8"),
    "dp_sync": (None, "allreduce", "powersgd", "diloco", "streaming_diloco", "gossip"),
    "sync_every": (None, 1, 2, 0, 2.5, "30"),
    "matrix_rank": (None, 4, 0, 8.5, True),
    "tied_embeddings": ("sync", "freeze", None),
    "check_replicas_every": (None, 1, 0, 2.5),
    "anchor": (None, False, "yes"),
    "link_timeout_seconds": (600.0, 5, 0.0, math.inf, math.nan, None),
    "ddp_timeout": (None, 60, 0),
    "per_device_train_batch_size": (1, 2, 3, 4, 6, 0, -2, 2.0),
    "per_device_eval_batch_size": (1, 3, 4, 0, None),
    "gradient_accumulation_steps": (1, 2, 5, 0, -1),
    "max_steps": (1, 2, 0, -1),
    "num_train_epochs": (1, 0.5, 0),
    "learning_rate": (1e-3, 0.0, -1.0),
    "seed": (7, 0, -1),
    "max_grad_norm": (1.0, 0.0, -1.0),
    "optim": ("adamw_torch", "sgd", "adafactor", "lomo", "magic"),
    "lr_scheduler_type": ("linear", "cosine", "magic"),
    "bf16": (True, False),
    "gradient_checkpointing": (True, False),
    "label_smoothing_factor": (0.0, 0.1, 2.0),
    "neftune_noise_alpha": (None, 5.0),
    "dataloader_drop_last": (True, False),
    "remove_unused_columns": (True, False),
    "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_rebalance", "magic"),
    "eval_strategy": ("no", "steps", "epoch"),
    "eval_steps": (1, 0),
    "logging_steps": (1, 0),
    "warmup_steps": (0, 1, -1),
    "data_seed": (None, 1),
    "label_names": (None, ["labels"], ["target"]),
    "include_num_input_tokens_seen": ("no", "all", "non_padding"),
}


class Table(torch.utils.data.Dataset):
    """Rows by index."""

    def __init__(self, rows: list):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream(IterableDataset):
    def __init__(self, rows: list):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def plain(num_rows: int = 6, length: int = 8) -> list[dict]:
    return [{"input_ids": list(range(3 + i, 3 + i + length)), "labels": list(range(3 + i, 3 + i + length))}
            for i in range(num_rows)]  # fmt: skip


def changed(place: int = 1, **columns) -> list[dict]:
    """Plain rows, one of them otherwise."""
    rows = plain()
    rows[place] |= columns
    return rows


def everywhere(**columns) -> list[dict]:
    return [{**row, **columns} for row in plain()]


def without(*columns: str) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in columns} for row in plain()]


ROWS = {
    "plain": plain,
    "empty": lambda: [],
    "one row": lambda: plain(1),
    "many rows": lambda: plain(23),
    "ragged": lambda: [*plain(3), *plain(3, 5)],
    "one token": lambda: plain(6, 1),
    "two tokens": lambda: plain(6, 2),
    "no token": lambda: plain(6, 0),
    "a row without tokens": lambda: changed(input_ids=[], labels=[]),
    "too long": lambda: [{"input_ids": [5] * 100, "labels": [5] * 100} for _ in range(4)],
    "no labels": lambda: without("labels"),
    "no tokens": lambda: without("input_ids"),
    "no label counts": lambda: everywhere(labels=[-100] * 8),
    "one row counts": lambda: [*everywhere(labels=[-100] * 8), *plain(1)],
    "only the first token counts": lambda: everywhere(labels=[5] + [-100] * 7),
    "text": lambda: [{"text": "Hello"} for _ in range(4)],
    "text beside tokens": lambda: everywhere(text="Hello"),
    "numbers beside tokens": lambda: everywhere(weight=0.5),
    "tokens as text": lambda: everywhere(input_ids="Hello"),
    "tokens as floats": lambda: everywhere(input_ids=[0.5] * 8),
    "labels as floats": lambda: everywhere(labels=[0.5] * 8),
    "labels as one number": lambda: everywhere(labels=1),
    "labels shorter": lambda: everywhere(labels=[5] * 7),
    "mask shorter": lambda: everywhere(attention_mask=[1] * 5),
    "mask of nothing": lambda: everywhere(attention_mask=[0] * 8),
    "nested tokens": lambda: everywhere(input_ids=[[5] * 8], labels=[[5] * 8]),
    "missing value": lambda: changed(labels=None),
    "missing column": lambda: [*plain(3), *without("labels")[:3]],
    "token too large": lambda: changed(input_ids=[VOCAB] * 8),
    "last token too large": lambda: changed(place=5, input_ids=[5] * 7 + [10**6]),
    "token below zero": lambda: changed(input_ids=[-1] * 8),
    "label too large": lambda: changed(labels=[VOCAB] * 8),
    "label below zero": lambda: changed(labels=[-1] * 8),
    "positions": lambda: everywhere(position_ids=list(range(8))),
    "positions too large": lambda: everywhere(position_ids=[1000] * 8),
    "embeddings": lambda: everywhere(inputs_embeds=[[0.1] * 32] * 8),
    "a cache": lambda: everywhere(use_cache=True, past_key_values=1),
    "names of the mesh": lambda: everywhere(key=1, kind=2, num_items=3),
    "lists instead of rows": lambda: [[1, 2, 3] for _ in range(4)],
    "numbers instead of rows": lambda: list(range(6)),
}
CONTAINERS: dict[str, Callable] = {
    "table": Table,
    "list": list,
    "stream": Stream,
    "datasets": datasets.Dataset.from_list,
    "datasets stream": lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
}


def padding(rows):
    """A person's own collator."""
    return collate([{name: torch.as_tensor(value) for name, value in row.items()} for row in rows])


COLLATORS: dict[str, Callable] = {
    "default": lambda: None,
    "padding": lambda: padding,
    "flattening": DataCollatorWithFlattening,
    "returns nothing": lambda: lambda rows: None,
}


@st.composite
def mistakes(draw) -> dict:
    """What one run is given: up to five fields and a data set, each right or wrong."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True))
    args = {name: draw(st.sampled_from(FIELDS[name])) for name in names}
    if draw(st.booleans()):
        args.setdefault("pipeline_stages", 2)
    return {
        "args": args,
        "rows": draw(st.sampled_from(sorted(ROWS))) if draw(st.booleans()) else "plain",
        "container": draw(st.sampled_from(sorted(CONTAINERS))),
        "collator": draw(st.sampled_from(sorted(COLLATORS))) if draw(st.booleans()) else "default",
        "evaluates": draw(st.booleans()),
    }


def run(
    folder: str, *, args: dict, rows: str, container: str, collator: str, evaluates: bool, seconds: int = 30
) -> str:
    """`trained`, or `refused: ...` where an error says so that is meant for a person.

    Raises:
        AssertionError: another error, or one from a place where nobody meant it; or it took longer than `seconds`.
    """
    try:
        data = CONTAINERS[container](ROWS[rows]())
    except Exception:
        return "no such data set"  # of the library's own making
    settings = {
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "log_level": "error",
    }
    settings |= {"max_steps": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    try:
        with deadline(seconds):
            arguments = MeshAdaptArguments(output_dir=folder, **{**settings, **args})
            trainer = MeshAdaptTrainer(
                model=tiny_model("llama"),
                args=arguments,
                train_dataset=data,
                eval_dataset=data if evaluates else Rows(4),
                data_collator=COLLATORS[collator](),
            )
            trainer.train()
            if evaluates:
                trainer.evaluate()
    except (ValueError, NotImplementedError) as error:
        where = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if where.is_relative_to(OURS) or where in VALIDATORS:
            return f"refused: {error}"
        raise AssertionError(f"{type(error).__name__} of {where}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    return "trained"


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    def late(*_):
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
