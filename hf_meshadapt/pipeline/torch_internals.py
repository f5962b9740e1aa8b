"""Every private name of torch's pipelining, DDP and distributed that the package leans on, in one place.

`tests/unit/test_torch_internals.py` fails when a new torch version moves one of them or changes what is assumed of it.
"""

from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._utils import flatten_args
from torch.distributed.pipelining.stage import _RecvInfo as RecvInfo
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "PipelineStage",
    "RecvInfo",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "default_store",
    "fake_mode",
    "fix_buckets",
    "flatten_args",
    "forget_passes",
]


def fix_buckets(module: DistributedDataParallel) -> None:
    """Lays a new module's gradient buckets out once for all, in the order of its parameters. Collective.

    DDP itself does so after its first backward pass, in the order in which gradients came. The last bits of a sum over
    three replicas or more depend on the place in the bucket, so that a resumed run, whose first step would have the
    first layout again, would leave the uninterrupted one.
    """
    module.reducer._push_all_rebuilt_params()
    rebuilt = module.reducer._rebuild_buckets()
    assert rebuilt, "this torch lays buckets out by other rules"


def forget_passes(stage: PipelineStage) -> None:
    """Lets go of what a stage keeps of passes that are over.

    Activations leave with their backward pass. Those of an evaluation have none, and torch drops them only when the
    same stage runs again: a stage of another batch shape would keep them for the rest of the run.
    """
    stage.clear_runtime_states()


def fake_mode():
    """Within it tensors have no data. Imported late: it takes a third of a second and few runs need it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()
