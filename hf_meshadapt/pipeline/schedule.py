"""Pipeline schedules that post every receive before they compute, and whose waits have a deadline and a name.

gloo is a rendezvous: nothing flows until the receiver has posted, and torch's schedules post each receive just before
they need it, so that a slow link idles while both ends compute. Here all receives of a step are posted first, and
every send starts at once; no order of forward and backward passes can then deadlock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from .torch_internals import ScheduleGPipe, ScheduleInterleaved1F1B
from .wire_stage import WireStage

# An action is ("F" | "B", microbatch).
Action = tuple[str, int]


def gpipe_order(num_microbatches: int, stage: int, num_stages: int) -> list[Action]:
    """All forward passes, then all backward passes."""
    return [("F", i) for i in range(num_microbatches)] + [("B", i) for i in range(num_microbatches)]


def one_forward_one_backward_order(num_microbatches: int, stage: int, num_stages: int) -> list[Action]:
    """As many forwards as there are stages from here on, then alternating, so that few activations are held."""
    warmup = min(num_microbatches, num_stages - stage)
    order: list[Action] = [("F", i) for i in range(warmup)]
    for i in range(num_microbatches):
        order.append(("B", i))
        if warmup + i < num_microbatches:
            order.append(("F", warmup + i))
    return order


ORDERS: dict[str, Callable[[int, int, int], list[Action]]] = {
    "gpipe": gpipe_order,
    "1f1b": one_forward_one_backward_order,
}


class LinkError(RuntimeError):
    """A wait for another rank failed or passed its deadline; says who waited for whom, where and when."""


class Waiter:
    """Waits for communication with a deadline and adds up the time spent.

    Args:
        describe: names a stage, as `rank 3 (stage 1 of replica 1)`.
        timeout_seconds: deadline of one wait.
        on_wait: is told the seconds of every wait.
    """

    def __init__(self, describe: Callable[[int], str], timeout_seconds: float, on_wait: Callable[[float], None]):
        self.describe = describe
        self.timeout_seconds = timeout_seconds
        self.on_wait = on_wait
        self.step = 0

    def wait(self, works: list[dist.Work], stage: int, peer: int, awaited: str) -> None:
        """Waits for `awaited`, a transfer between pipeline stage `stage` (ours) and `peer`."""
        started = time.monotonic()
        try:
            for work in works:
                if not work.wait(timedelta(seconds=self.timeout_seconds)):
                    raise RuntimeError("timed out")
        except RuntimeError as error:
            raise self.failure(self.describe(stage), f"{awaited} with {self.describe(peer)}", error) from error
        self.on_wait(time.monotonic() - started)

    def failure(self, who: str, awaited: str, error: Exception) -> LinkError:
        """The error of a wait that failed."""
        return LinkError(
            f"{who} waited for {awaited} at step {self.step} (deadline {self.timeout_seconds:g} s): {error}. Check that "
            "the peer still runs and that its link is up; training resumes from the last checkpoint"
        )


class EarlyReceiveSchedule(ScheduleGPipe):
    """GPipe or 1F1B with all receives posted first.

    Args:
        stage: this rank's stage.
        order: the sequence of passes, one of `ORDERS`.
        waiter: waits and names.
    """

    def __init__(self, stage: WireStage, n_microbatches: int, loss_fn: Callable, order: str, waiter: Waiter):
        super().__init__(stage, n_microbatches, loss_fn=loss_fn, scale_grads=False)
        self._order = ORDERS[order](n_microbatches, stage.stage_index, stage.num_stages)
        self._waiter = waiter

    def _step_microbatches(
        self,
        arg_mbs: list | None = None,
        kwarg_mbs: list | None = None,
        target_mbs: list | None = None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict | None = None,
    ) -> None:
        stage, count = self._stage, self._n_microbatches
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0], target_mbs[0] if target_mbs else None, loss_kwargs)

        activations = [_start(stage.get_fwd_recv_ops(i)) for i in range(count)]
        gradients = [_start(stage.get_bwd_recv_ops(i)) for i in range(count)]
        sends: list[tuple[list[dist.Work], int, str]] = []
        before, after, here = stage.stage_index - 1, stage.stage_index + 1, stage.stage_index
        for kind, i in self._order:
            if kind == "F":
                self._waiter.wait(activations[i], here, before, f"the activation of microbatch {i}")
                output = stage.forward_one_chunk(i, arg_mbs[i], kwarg_mbs[i], save_forward_output=return_outputs)
                sends.append((_start(stage.get_fwd_send_ops(i)), after, f"sending the activation of microbatch {i}"))
                self._maybe_compute_loss(stage, output, target_mbs, i, loss_kwargs)
            elif self._has_backward:
                self._waiter.wait(gradients[i], here, after, f"the gradient of microbatch {i}")
                loss = self._maybe_get_loss(stage, i)
                stage.backward_one_chunk(i, loss=loss, last_backward=i == count - 1)
                sends.append((_start(stage.get_bwd_send_ops(i)), before, f"sending the gradient of microbatch {i}"))
        for works, peer, awaited in sends:
            self._waiter.wait(works, here, peer, awaited)
        self._update_losses(stage, losses)


def _start(ops: list[dist.P2POp]) -> list[dist.Work]:
    return [
        op.op(
            op.tensor,
            group=op.group,
            tag=op.tag,
            **{"group_dst" if op.op is dist.isend else "group_src": op.group_peer},
        )
        for op in ops
    ]


class NamedInterleavedSchedule(ScheduleInterleaved1F1B):
    """torch's interleaved 1F1B; a failed wait names this rank and step (torch waits inside its own runtime)."""

    def __init__(self, stages: list[WireStage], n_microbatches: int, loss_fn: Callable, waiter: Waiter):
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, scale_grads=False)
        self._waiter = waiter

    def _step_microbatches(self, *args, **kwargs) -> None:
        try:
            super()._step_microbatches(*args, **kwargs)
        except RuntimeError as error:
            here = self._stages[0].group_rank
            peers = sorted({(here - 1) % self.pp_group_size, (here + 1) % self.pp_group_size})
            names = " or ".join(self._waiter.describe(peer) for peer in peers)
            raise LinkError(
                f"{self._waiter.describe(here)} failed in the interleaved schedule at step {self._waiter.step}, "
                f"exchanging with {names}: {error}"
            ) from error
