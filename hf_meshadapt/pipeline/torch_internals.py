"""Every private name of torch.distributed.pipelining that the package leans on, in one place.

`tests/unit/test_torch_internals.py` fails when a new torch version moves one of them or changes what is assumed of it.
"""

from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._utils import flatten_args
from torch.distributed.pipelining.stage import _RecvInfo as RecvInfo

__all__ = ["PipelineStage", "RecvInfo", "ScheduleGPipe", "ScheduleInterleaved1F1B", "flatten_args"]
