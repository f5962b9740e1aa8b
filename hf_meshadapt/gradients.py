"""Gradient arithmetic over a pipeline: the norm over all stages, and tied copies kept equal. Pure tensor functions."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def squared_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Sum of squared gradient entries of one chunk, float64 scalar on the CPU."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    # Norms per tensor first, in the gradients' dtype, as torch's own clipping does.
    norms = torch.stack(torch._foreach_norm(gradients)).double()
    return norms.square().sum().cpu()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> float:
    """What every gradient is multiplied by so that the norm is at most `max_norm`; 1 if it already is."""
    return min(1.0, max_norm / (float(norm) + 1e-6))


def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiplies all gradients in place."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def sum_tied(first: torch.nn.Parameter, last: torch.nn.Parameter) -> None:
    """Gives both copies of a tied embedding the sum of their gradients, in one process."""
    total = sum((p.grad for p in (first, last) if p.grad is not None), torch.zeros_like(first))
    first.grad, last.grad = total, total.clone()
