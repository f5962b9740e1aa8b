"""An optimizer that a person made for the whole model: on a rank it keeps what the rank has of the model."""

from __future__ import annotations

import torch
from torch import nn


def parameter_ids(model) -> set[int]:
    """Ids of a model's parameters, none of a model's name."""
    return {id(parameter) for parameter in model.parameters()} if isinstance(model, nn.Module) else set()


def drop_foreign(optimizer: torch.optim.Optimizer | None, whole: set[int], part: nn.Module) -> None:
    """Takes out of an optimizer what a cut has taken out of its model, which would stay in memory with it.

    Groups keep their places, those without parameters too: schedulers count them. What never was the model's stays.

    Args:
        optimizer: None where there is none yet.
        whole: `parameter_ids` of the model before it was cut.
        part: what is left of it.
    """
    foreign = whole - parameter_ids(part)
    for group in optimizer.param_groups if optimizer is not None and foreign else ():
        keeps = [id(parameter) not in foreign for parameter in group["params"]]
        for parameter, kept in zip(group["params"], keeps):
            if not kept:
                optimizer.state.pop(parameter, None)
        for entry in {"params", "param_names"} & group.keys():
            group[entry] = [value for value, kept in zip(group[entry], keeps) if kept]
