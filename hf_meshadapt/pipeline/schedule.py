"""Pipeline schedules that post every receive before they compute, and whose waits have a deadline and a name.

gloo is a rendezvous: nothing flows until the receiver has posted, and torch's schedules post each receive just before
they need it, so that a slow link idles while both ends compute. Here all receives of a step are posted first, and
every send starts at once; no order of forward and backward passes can then deadlock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch.distributed as dist

from ..config import MeshConfig
from ..waiting import Waiter
from .torch_internals import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from .wire_stage import WireStage

# An action is ("F" | "B", microbatch), and where it matters of which chunk ("F" | "B", chunk, microbatch).
Action = tuple[str, int]
ChunkAction = tuple[str, int, int]
# What `Waiter.wait` takes: works, our chunk, the peer's, what is awaited.
Transfer = tuple[list[dist.Work], int, int, str]


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


def interleaved_order(num_microbatches: int, stage: int, num_stages: int, chunks_per_rank: int) -> list[ChunkAction]:
    """What torch's interleaved 1F1B does on one rank, in rounds of as many microbatches per chunk as there are stages.

    Needs a number of microbatches that is a multiple of the rounds, as torch does.
    """
    rounds = max(1, num_microbatches // num_stages)
    per_round = num_microbatches // rounds
    total = num_microbatches * chunks_per_rank
    warmup = min(total, (chunks_per_rank - 1) * per_round + 2 * (num_stages - 1 - stage))

    def action(kind: str, number: int) -> ChunkAction:
        turn = number // per_round % chunks_per_rank
        local = turn if kind == "F" else chunks_per_rank - 1 - turn
        microbatch = number // (per_round * chunks_per_rank) * per_round + number % per_round
        return kind, local * num_stages + stage, microbatch

    order = [action("F", number) for number in range(warmup)]
    for number in range(total):
        if warmup + number < total:
            order.append(action("F", warmup + number))
        order.append(action("B", number))
    return order


def rank_order(mesh: MeshConfig, stage: int) -> list[ChunkAction]:
    """A rank's passes of one step, in order."""
    if mesh.stages == 1:
        return [(kind, 0, i) for i in range(mesh.microbatches) for kind in "FB"]
    if mesh.schedule == "interleaved":
        return interleaved_order(mesh.microbatches, stage, mesh.stages, mesh.chunks_per_rank)
    return [(kind, stage, i) for kind, i in ORDERS[mesh.schedule](mesh.microbatches, stage, mesh.stages)]


class EarlyReceives:
    """Mixin over torch's schedules that runs the passes of one step with all receives posted first.

    Args:
        stages: this rank's chunks.
        plans: what every rank of the pipeline does, in order.
        waiter: waits and names.
    """

    def prepare(self, stages: list[WireStage], plans: list[list[ChunkAction]], waiter: Waiter) -> None:
        self.chunks, self.plans, self.waiter = {stage.stage_index: stage for stage in stages}, plans, waiter

    def naming_neighbours(self) -> AbstractContextManager:
        """Names this rank's neighbours in the errors of exchanges that torch makes, such as the first over a stage."""
        stage = next(iter(self.chunks.values()))
        near = {neighbour for chunk in self.chunks for neighbour in (chunk - 1, chunk + 1)}
        peers = sorted({self.waiter.describe(chunk) for chunk in near if 0 <= chunk < stage.num_stages})
        return self.waiter.naming(self.waiter.describe(stage.stage_index), f"an exchange with {' or '.join(peers)}")

    def run_passes(self, arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs) -> None:
        arrivals, sends = self._post_receives(), []
        for kind, chunk, i in self.plans[next(iter(self.chunks.values())).group_rank]:
            stage = self.chunks[chunk]
            if kind == "F":
                self._wait(arrivals.get((kind, chunk, i)))
                output = stage.forward_one_chunk(i, arg_mbs[i], kwarg_mbs[i], save_forward_output=return_outputs)
                ops, awaited = stage.get_fwd_send_ops(i), f"sending the activation of microbatch {i} to"
                sends.append(self._start(ops, chunk, chunk + 1, awaited))
                self._maybe_compute_loss(stage, output, target_mbs, i, loss_kwargs)
            elif self._has_backward:
                self._wait(arrivals.get((kind, chunk, i)))
                loss = self._maybe_get_loss(stage, i)
                stage.backward_one_chunk(i, loss=loss, last_backward=i == self._n_microbatches - 1)
                ops, awaited = stage.get_bwd_send_ops(i), f"sending the gradient of microbatch {i} to"
                sends.append(self._start(ops, chunk, chunk - 1, awaited))
        for transfer in sends:
            self._wait(transfer)
        self._update_losses(list(self.chunks.values()), losses)

    def _post_receives(self) -> dict[ChunkAction, Transfer]:
        """All receives, by the action that needs them."""
        arrivals = {}
        # In the order in which each peer sends: messages of several chunks share a link and carry no name.
        for kind, sender, i in itertools.chain.from_iterable(self.plans):
            chunk = sender + 1 if kind == "F" else sender - 1
            if chunk in self.chunks:
                stage = self.chunks[chunk]
                ops = stage.get_fwd_recv_ops(i) if kind == "F" else stage.get_bwd_recv_ops(i)
                what = "activation" if kind == "F" else "gradient"
                arrivals[kind, chunk, i] = self._start(ops, chunk, sender, f"the {what} of microbatch {i} from")
        return arrivals

    def _start(self, ops: list[dist.P2POp], chunk: int, peer: int, awaited: str) -> Transfer:
        # Over a link that is down already this fails, before any wait.
        with self.waiter.naming(self.waiter.describe(chunk), f"{awaited} {self.waiter.describe(peer)}"):
            works = [
                op.op(
                    op.tensor,
                    group=op.group,
                    tag=op.tag,
                    **{"group_dst" if op.op is dist.isend else "group_src": op.group_peer},
                )
                for op in ops
            ]
        return works, chunk, peer, awaited

    def _wait(self, transfer: Transfer | None) -> None:
        if transfer is not None:  # the first chunk gets no activation, the last no gradient
            self.waiter.wait(*transfer)


class EarlyReceiveSchedule(EarlyReceives, ScheduleGPipe):
    """GPipe or 1F1B with all receives posted first.

    Args:
        stage: this rank's stage.
        order: the sequence of passes, one of `ORDERS`.
        waiter: waits and names.
    """

    def __init__(self, stage: WireStage, n_microbatches: int, loss_fn: Callable, order: str, waiter: Waiter):
        super().__init__(stage, n_microbatches, loss_fn=loss_fn, scale_grads=False)
        ranks = range(stage.num_stages)
        plans = [[(kind, s, i) for kind, i in ORDERS[order](n_microbatches, s, stage.num_stages)] for s in ranks]
        self.prepare([stage], plans, waiter)

    def _step_microbatches(
        self,
        arg_mbs: list | None = None,
        kwarg_mbs: list | None = None,
        target_mbs: list | None = None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict | None = None,
    ) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        with self.naming_neighbours():
            self._initialize_stage(arg_mbs[0], kwarg_mbs[0], target_mbs[0] if target_mbs else None, loss_kwargs)
        self.run_passes(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)


class EarlyReceiveInterleaved(EarlyReceives, ScheduleInterleaved1F1B):
    """Interleaved 1F1B in torch's order of passes, with all receives posted first."""

    def __init__(self, stages: list[WireStage], n_microbatches: int, loss_fn: Callable, waiter: Waiter):
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, scale_grads=False)
        plans = [
            [
                (action.computation_type.value, action.stage_index, action.microbatch_index)
                for action in order
                if action
            ]
            for _, order in sorted(self.pipeline_order.items())
        ]
        self.prepare(stages, plans, waiter)

    def _step_microbatches(
        self,
        arg_mbs: list | None = None,
        kwarg_mbs: list | None = None,
        target_mbs: list | None = None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict | None = None,
    ) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        with self.naming_neighbours():
            self._initialize_stages(arg_mbs[0], kwarg_mbs[0], target_mbs[0] if target_mbs else None, loss_kwargs)
        self.run_passes(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)


class NamedSteps:
    """Mixin over torch's own schedules: a failed exchange within them names this rank's neighbours and the step.

    For NCCL, which works off a link's messages one by one: a send would wait behind the receives posted first.
    """

    def _step_microbatches(self, *args, **kwargs) -> None:
        with self.naming_neighbours():
            super()._step_microbatches(*args, **kwargs)


class NamedGPipe(NamedSteps, EarlyReceives, ScheduleGPipe):
    """torch's GPipe."""


class Named1F1B(NamedSteps, EarlyReceives, Schedule1F1B):
    """torch's 1F1B, which needs as many microbatches as stages."""


class NamedInterleaved(NamedSteps, EarlyReceives, ScheduleInterleaved1F1B):
    """torch's interleaved 1F1B."""


def make_schedule(order: str, stages: list[WireStage], count: int, loss_fn: Callable, waiter: Waiter):
    """The schedule of this rank's chunks: early receives over gloo, torch's own over NCCL.

    Args:
        order: gpipe, 1f1b or interleaved.
        count: microbatches.
    """
    if stages[0].host_wire:
        if order == "interleaved":
            return EarlyReceiveInterleaved(stages, count, loss_fn, waiter)
        return EarlyReceiveSchedule(stages[0], count, loss_fn, order, waiter)
    if order == "interleaved":
        schedule = NamedInterleaved(stages, count, loss_fn=loss_fn, scale_grads=False)
    else:
        torch_class = Named1F1B if order == "1f1b" and count >= stages[0].num_stages else NamedGPipe
        schedule = torch_class(stages[0], count, loss_fn=loss_fn, scale_grads=False)
    schedule.prepare(stages, [], waiter)
    return schedule
