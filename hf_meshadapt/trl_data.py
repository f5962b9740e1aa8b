"""Data sets that leave TRL nothing to prepare, or nothing of which is left when TRL has prepared them."""

from __future__ import annotations


def given_datasets(trainer_arguments: dict) -> list[tuple[str, object]]:
    """The data sets to train and to evaluate on, each with its name: `eval_dataset` may be a dict of them."""
    evaluated = trainer_arguments.get("eval_dataset")
    parts = evaluated.items() if isinstance(evaluated, dict) else [(None, evaluated)]
    named = [("eval_dataset" if key is None else f"eval_dataset[{key!r}]", part) for key, part in parts]
    return [("train_dataset", trainer_arguments.get("train_dataset")), *named]


def refuse_empty(trainer_arguments: dict) -> None:
    """Raises ValueError for a data set without rows, of which TRL would read the first one with a bare StopIteration."""
    for name, dataset in given_datasets(trainer_arguments):
        if hasattr(dataset, "__len__") and not len(dataset):
            raise ValueError(f"{name} is empty. Give it at least one row")


def refuse_emptied(given, prepared, *, name: str, max_length: int | None) -> None:
    """Raises ValueError where TRL's preparation has left nothing of a data set that had rows.

    Args:
        given, prepared: the data set before and after; streams, of unknown length, are not looked at.
        name: as TRL calls it, such as `train`.
    """
    if not (hasattr(given, "__len__") and hasattr(prepared, "__len__")) or len(prepared) or not len(given):
        return
    raise ValueError(
        f"{name}_dataset is empty after TRL prepared it: at max_length={max_length} none of its {len(given)} rows has a "
        "token left that counts in the loss. Raise max_length, shorten the prompts, or set truncation_mode='keep_end'"
    )
