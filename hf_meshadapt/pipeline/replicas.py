"""The data-parallel wrapping of a chunk."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .torch_internals import fix_buckets


class _Reach(torch.autograd.Function):
    """Its first input, with an edge of the graph to each of the others, over which no gradient comes."""

    @staticmethod
    def forward(ctx, output: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.num_parameters = len(parameters)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * ctx.num_parameters


def reach_parameters(stage: nn.Module) -> None:
    """Lets every backward pass reach all trainable parameters of a chunk, those too that its forward did not use.

    DDP waits until a pass has reached all of them: a replica whose data leaves one out, an expert without tokens say,
    would let the others wait to their deadline. It is averaged as a gradient of zeros. `find_unused_parameters` would do
    for one more message a step.
    """
    trainable = [parameter for parameter in stage.parameters() if parameter.requires_grad]

    def hook(module: nn.Module, inputs, output):
        if not torch.is_grad_enabled():
            return output
        if isinstance(output, Tensor):
            return _Reach.apply(output, *trainable)
        *others, last = output  # of a coded boundary's tensors the last is the one that a gradient comes back for
        return *others, _Reach.apply(last, *trainable)

    stage.register_forward_hook(hook)


def wrap_data_parallel(stage: nn.Module, group: dist.ProcessGroup | None, hook: Callable | None = None) -> nn.Module:
    """DDP over the replicas of this chunk; the bare chunk where there is one replica or nothing to train.

    Args:
        hook: what averages its gradients in the place of an all-reduce.
    """
    if group is None or dist.get_world_size(group) == 1 or not any(p.requires_grad for p in stage.parameters()):
        return stage
    reach_parameters(stage)
    # Replicas start from the same checkpoint, and boundaries' buffers are agreed on elsewhere: nothing to broadcast.
    with warnings.catch_warnings():
        # The suggested successor would still broadcast buffers once.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        wrapped = DistributedDataParallel(stage, process_group=group, broadcast_buffers=False, init_sync=False)
    fix_buckets(wrapped)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped
