"""Type and range of single argument fields: what torch would refuse later, or compute nonsense with."""

from __future__ import annotations

import math
import numbers

from .presets import user_error

KINDS = {
    "int": (numbers.Integral, "a whole number"),
    "float": (numbers.Real, "a number"),
    "str": (str, "a text"),
    "bool": (bool, "True or False"),
    "dict": (dict, "a dict"),
    "None": (type(None), "None"),
}
# Trainer's own numbers, which it takes as they are: least and largest value, and a remedy.
RANGES = {
    "per_device_train_batch_size": (1, math.inf, "Use 1 or more"),
    "per_device_eval_batch_size": (1, math.inf, "Use 1 or more"),
    "gradient_accumulation_steps": (1, math.inf, "Use 1 for a step after every batch"),
    "dataloader_num_workers": (0, math.inf, "Use 0 to read in the training process"),
    "seed": (0, 2**32 - 1, "Try 42"),
    "learning_rate": (0.0, math.inf, "Try 2e-5"),
    "weight_decay": (0.0, math.inf, "Use 0 for none"),
    "adam_beta1": (0.0, math.nextafter(1.0, 0.0), "Try 0.9"),
    "adam_beta2": (0.0, math.nextafter(1.0, 0.0), "Try 0.999"),
    "adam_epsilon": (0.0, math.inf, "Try 1e-8"),
    "label_smoothing_factor": (0.0, 1.0, "Use 0 for none"),
}


def check_type(name: str, value, annotation: str) -> None:
    """Raises ValueError where a value is none of the types of an annotation such as `int | None`."""
    kinds = [KINDS[part] for part in annotation.split(" | ")]
    # To Python True is a whole number, to a person it is a mistake.
    if not any(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for kind, _ in kinds):
        words = [word for _, word in kinds]
        raise user_error(name, value, f"must be {' or '.join(words)}", f"It is of type {type(value).__name__}")


def check_range(name: str, value) -> None:
    """Raises ValueError where one of `RANGES` is no number or outside."""
    least, most, remedy = RANGES[name]
    check_type(name, value, "int" if isinstance(least, int) else "float")
    if not (least <= value <= most and value < math.inf):
        bounds = f"must be at least {least}" if most == math.inf else f"must lie in [{least}, {most}]"
        raise user_error(name, value, bounds, remedy)
