"""Gradient arithmetic over a pipeline: the norm over all stages, what is not finite, and tied copies kept equal.

Pure tensor functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def squared_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Sum of squared gradient entries of one chunk, float64 scalar on the CPU."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    # Norms per tensor first, in the gradients' dtype, as torch's own clipping does.
    norms = torch.stack(torch._foreach_norm(gradients)).cpu().double()
    return norms.square().sum()


def clip_coefficient(norm: torch.Tensor | float, max_norm: float) -> float:
    """What every gradient is multiplied by so that the norm is at most `max_norm`; 1 if it already is."""
    return min(1.0, max_norm / (float(norm) + 1e-6))


def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiplies all gradients in place."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def spread_nonfinite(loss: torch.Tensor) -> torch.Tensor:
    """The loss; if it is not finite its gradient will not be either, which an infinite loss alone does not imply.

    Gradients are all that travels between replicas: so each hears of it before its optimizer steps, without a message
    or a look at the device more.
    """
    if loss.requires_grad:
        finite = loss.detach().isfinite()
        loss.register_hook(lambda gradient: torch.where(finite, gradient, torch.nan))
    return loss


def nonfinite_cause(named: Iterable[tuple[str, torch.nn.Parameter]], loss: float | None) -> str:
    """Where numbers first went wrong, as far as one rank can tell, in words.

    Args:
        named: its parameters in the model's order.
        loss: of the step; None where the last stage is elsewhere.
    """
    named = list(named)
    for name, parameter in named:
        if not parameter.isfinite().all():
            return f"{name} was not finite before the step"
    if loss is not None and not math.isfinite(loss):
        return f"the loss is {loss}"
    # The backward pass runs from the last to the first.
    for name, parameter in reversed(named):
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"the first gradient that is not finite in the backward pass is that of {name}"
    return "every gradient is finite here"


def sum_tied(first: torch.nn.Parameter, last: torch.nn.Parameter) -> None:
    """Gives both copies of a tied embedding the sum of their gradients, in one process."""
    total = sum((p.grad for p in (first, last) if p.grad is not None), torch.zeros_like(first))
    first.grad, last.grad = total, total.clone()
