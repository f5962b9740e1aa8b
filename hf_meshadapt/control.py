"""What a callback of a person's own wants on one rank, all ranks do: to stop, save, evaluate and log are collective."""

from __future__ import annotations

import torch
import torch.distributed as dist

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
# Callbacks of these libraries decide alike on all ranks.
KNOWN = {"transformers", "accelerate", "trl", "peft", "hf_meshadapt"}


class ControlAgreement:
    """Sets every flag of a trainer's control that some rank has set.

    A callback that decides by its clock, or by a file that only one machine has, sets it on some ranks, and the others
    would wait. Nothing is exchanged where no rank has a callback of a person's own.
    """

    def __init__(self, trainer):
        """Collective: ranks may have different callbacks."""
        self._trainer = trainer
        own = any(type(one).__module__.split(".")[0] not in KNOWN for one in trainer.callback_handler.callbacks)
        (self._needed,) = self._any_rank([own])

    def agree(self) -> None:
        """Collective, as often as all ranks call it."""
        if self._needed:
            control = self._trainer.control
            for flag, value in zip(FLAGS, self._any_rank([getattr(control, flag) for flag in FLAGS])):
                setattr(control, flag, value)

    def _any_rank(self, mine: list[bool]) -> list[bool]:
        engine = self._trainer.engine
        if engine.groups is None:
            return mine
        found = torch.tensor(mine, dtype=torch.uint8)
        with engine.naming("what callbacks decided on"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=engine.groups.save)
        return [bool(value) for value in found.tolist()]
