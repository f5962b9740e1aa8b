"""Rows for a trial, out of a file, a folder or a data set of the Hub, split into rows to train on and rows held out."""

from __future__ import annotations

import hashlib
from pathlib import Path

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError
from pyarrow import ArrowException

from ..json_lines import read_json_lines

# What a row may be made of, in order of preference; TRL's SFTTrainer knows them all.
FORMS: tuple[tuple[str, ...], ...] = (("messages",), ("prompt", "completion"), ("text",))
BUILDERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".csv": "csv", ".parquet": "parquet"}


def load_rows(source: str, config: str | None = None, split: str | None = None) -> Dataset:
    """The rows of one split, with the columns of one of `FORMS`; some may be empty.

    Args:
        source: a file (`BUILDERS` by its suffix), a folder of such files, or the name of a data set on the Hub. A text
            file gives a row for every line that is not empty.
        config: of a data set of the Hub.
        split: of a folder or of a data set of the Hub; None is `train`.

    Raises:
        ValueError: nothing there, no such split, an argument without effect, a file that is broken, or none of the forms.
    """
    path = Path(source)
    try:
        if path.is_file():
            dataset = _of_file(path, config, split)
        elif path.is_dir():
            dataset = _of_folder(path, config, split or "train")
        else:
            dataset = _of_hub(source, config, split or "train")
    except (DatasetsError, ArrowException) as error:
        for file in [path] if path.is_file() else sorted(path.rglob("*.jsonl")):
            if file.suffix == ".jsonl":
                read_json_lines(file)  # names the line, where that is it
        raise ValueError(
            f"--data={source}: {_cause(error)}. Look at the file, or leave out what is not data"
        ) from error
    form = form_of(dataset.column_names, source)
    return dataset.select_columns(list(form))


def draw_rows(dataset: Dataset, num_rows: int, seed: int) -> Dataset:
    """At most so many rows, drawn by `seed`, less those that are empty: only what is drawn is looked at."""
    if len(dataset) > num_rows:
        dataset = dataset.shuffle(seed).select(range(num_rows))
    return dataset.filter(lambda row: all(row.values()))


def _of_file(path: Path, config: str | None, split: str | None) -> Dataset:
    if path.suffix not in BUILDERS:
        raise ValueError(f"--data={path}: cannot be read as {path.suffix or 'what it is'}; give {_known()}")
    if path.stat().st_size == 0:
        raise ValueError(f"--data={path}: the file is empty. Give at least two rows")
    for option, value in (("--data-config", config), ("--split", split)):
        if value is not None:
            raise ValueError(f"{option}={value}: has no effect with a file, which is read whole. Leave it out")
    return load_dataset(BUILDERS[path.suffix], data_files=str(path), split="train")


def _of_folder(path: Path, config: str | None, split: str) -> Dataset:
    if not any(file.suffix in BUILDERS for file in path.rglob("*")):
        raise ValueError(f"--data={path}: the folder has no data; put {_known()} there")
    if config is not None:
        raise ValueError(f"--data-config={config}: has no effect with a folder. Leave it out")
    return load_dataset(str(path), split=split)


def _of_hub(source: str, config: str | None, split: str) -> Dataset:
    try:
        return load_dataset(source, config, split=split)
    except (FileNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"--data={source}: neither a file or folder here, nor a data set that could be loaded from the Hub "
            f"({error}). Look at the spelling and the connection"
        ) from error


def _cause(error: BaseException) -> str:
    """What an error of `datasets` came from: its own words are that something went wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"cannot be read ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__})"


def _known() -> str:
    return "a " + ", ".join(BUILDERS) + " file"


def form_of(columns: list[str], source: str) -> tuple[str, ...]:
    """The first of `FORMS` that the columns have.

    Raises:
        ValueError: none of them.
    """
    for form in FORMS:
        if set(form) <= set(columns):
            return form
    forms = ", ".join(" with ".join(form) for form in FORMS)
    raise ValueError(f"--data={source} has columns {', '.join(columns)}: need {forms}. Rename yours")


def hold_out(dataset: Dataset, num_held_out: int) -> tuple[Dataset, Dataset]:
    """Rows to train on and rows held out, by the hash of each row's content: equal rows fall on the same side.

    Args:
        num_held_out: at most so many, and at most a fifth of all rows.

    Raises:
        ValueError: fewer than two different rows.
    """
    digests = [hashlib.blake2b(repr(row).encode(), digest_size=8).hexdigest() for row in dataset]
    distinct = sorted(set(digests))
    if len(distinct) < 2:
        raise ValueError(f"the data set has {len(distinct)} different rows: give at least 2, one of them to hold out")
    chosen = set(distinct[: min(num_held_out, max(1, len(distinct) // 5))])
    held_out = [index for index, digest in enumerate(digests) if digest in chosen]
    training = [index for index, digest in enumerate(digests) if digest not in chosen]
    return dataset.select(training), dataset.select(held_out)
