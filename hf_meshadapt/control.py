"""What a callback of a person's own wants on one rank, all ranks do: to stop, save, evaluate and log are collective."""

from __future__ import annotations

import torch
import torch.distributed as dist

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
# Callbacks of these libraries decide alike on all ranks.
KNOWN = {"transformers", "accelerate", "trl", "peft", "hf_meshadapt"}


def agree_on_control(trainer) -> None:
    """Sets every flag of `trainer.control` that some rank has set. Collective, where there is a callback of a person's own:
    one by its clock, or by a file that only one machine has, sets it on some ranks, and the others would wait."""
    engine = trainer.engine
    if engine.groups is None or not any(map(_is_own, trainer.callback_handler.callbacks)):
        return
    wanted = torch.tensor([getattr(trainer.control, flag) for flag in FLAGS], dtype=torch.uint8)
    with engine.naming("what callbacks decided on"):
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=engine.groups.save)
    for flag, value in zip(FLAGS, wanted.tolist()):
        setattr(trainer.control, flag, bool(value))


def _is_own(callback) -> bool:
    return type(callback).__module__.split(".")[0] not in KNOWN
