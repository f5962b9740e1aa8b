"""The data-parallel wrapping of a chunk."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .torch_internals import fix_buckets


def wrap_data_parallel(stage: nn.Module, group: dist.ProcessGroup | None, hook: Callable | None = None) -> nn.Module:
    """DDP over the replicas of this chunk; the bare chunk where there is one replica or nothing to train.

    Args:
        hook: what averages its gradients in the place of an all-reduce.
    """
    if group is None or dist.get_world_size(group) == 1 or not any(p.requires_grad for p in stage.parameters()):
        return stage
    # Replicas start from the same checkpoint, and boundaries' buffers are agreed on elsewhere: nothing to broadcast.
    with warnings.catch_warnings():
        # The suggested successor would still broadcast buffers once.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        wrapped = DistributedDataParallel(stage, process_group=group, broadcast_buffers=False, init_sync=False)
    fix_buckets(wrapped)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped
