"""What the stages of a pipeline agree on about gradients: their norm, whether it is finite, and tied embeddings."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .agreements import Agreements
from .gradients import clip_coefficient, nonfinite_cause, scale_gradients, squared_norm

NOT_STEPPED = (
    "The optimizer has not stepped, weights are as they were. Lower learning_rate, clip with max_grad_norm, or look at the "
    "data of this step; the last checkpoint can be resumed"
)


class PipelineGradients(Agreements):
    """Base of `MeshEngine`, whose parts, replicas and figures it reads."""

    def gradient_norm(self) -> torch.Tensor:
        """Norm of the gradient over the whole pipeline, a tied embedding counted once; float64 scalar on the CPU.

        Where replicas step apart, the mean of their norms.

        Raises:
            ValueError: the stages have read different batches; on all of them, before the optimizer steps.
            FloatingPointError: it is not finite, as it is whenever the loss is not; on all ranks, before the optimizer
                steps. Where replicas step apart, also for whatever has stopped another one.
        """
        return self._mean_norm([self._pipeline_norm() for _ in self.replication.local.turns()])

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clips over the whole pipeline, each replica that steps apart by itself; returns `gradient_norm` of before."""
        parameters = [parameter for _, parameter in self.parts.named_trainable()]
        found = []
        for _ in self.replication.local.turns():
            norm, fault = self._pipeline_norm()
            if fault is None:
                scale_gradients(parameters, clip_coefficient(norm, max_norm))
            found.append((norm, fault))
        return self._mean_norm(found)

    def _mean_norm(self, found: list[tuple[torch.Tensor, Exception | None]]) -> torch.Tensor:
        """Mean over all replicas of what `_pipeline_norm` found on those of this process; raises the first fault."""
        norms, faults = zip(*found)
        norm, fault = norms[0], next((fault for fault in faults if fault is not None), None)
        if self.data_parallel.steps_apart:
            # Logs must be the same on all ranks. A fault makes the sum not finite: nothing else travels between such
            # replicas at every step, and those without a fault would wait for the others until their deadline.
            norm = self.sum_over_replicas(torch.stack(norms).sum()) / self.mesh.replicas
            if fault is None and not norm.isfinite():
                fault = FloatingPointError(
                    f"at step {self.waiter.step} another replica's gradient norm is not finite, or its stages have read "
                    f"different batches: its own error says which, and where. On {self.topology.describe()} all is well; "
                    f"it stops too. {NOT_STEPPED}"
                )
        if fault is not None:
            raise fault
        return norm

    def _pipeline_norm(self) -> tuple[torch.Tensor, Exception | None]:
        """Norm over the stages of one replica, and what must stop the run; then the norm is not finite."""
        # Gathered and summed in stage order rather than all-reduced, so that every rank, and the emulated mesh, gets
        # the same bits.
        owned = map(self.parts.parameters_of, self.parts.stages)
        mine = torch.stack([squared_norm(parameter for _, parameter in named) for named in owned])
        if self.groups is None or self.mesh.num_chunks == 1:
            self.figures_of = [self.figures]
            return mine.sum().sqrt(), self._nonfinite_fault(mine)
        message = torch.cat([mine, self._digest.cpu().double(), self.figures])
        gathered = [torch.empty_like(message) for _ in range(self.mesh.stages)]
        with self._waiting("the other stages' gradient norms from", self._pipeline):
            dist.all_gather(gathered, message, group=self.groups.control)
        sizes = [len(mine), len(self._digest), len(self.figures)]
        norms, digests, figures = torch.stack(gathered).split(sizes, dim=1)
        self.figures_of = list(figures)
        try:
            self.refuse_unlike_batches(digests, f"in step {self.waiter.step}")
        except ValueError as unlike:
            return torch.full((), torch.nan, dtype=torch.float64), unlike
        # Chunk c is entry c // stages of stage c % stages.
        squared = norms.T.reshape(-1)
        return squared.sum().sqrt(), self._nonfinite_fault(squared)

    def _nonfinite_fault(self, squared: torch.Tensor) -> FloatingPointError | None:
        """Says where squared gradient norms of all chunks are not finite, if they are not."""
        if squared.isfinite().all():
            return None
        norms = ", ".join(f"{float(n.sqrt()):g} on stage {c % self.mesh.stages}" for c, n in enumerate(squared))
        loss = float(self._step_loss) if self.holds_output else None
        where = "" if self.mesh.emulated else f"on {self.topology.describe()} "
        return FloatingPointError(
            f"at step {self.waiter.step} the gradient norm is not finite ({norms}); "
            f"{where}{nonfinite_cause(self.parts.named_trainable(), loss)}. {NOT_STEPPED}"
        )

    def sum_tied_gradients(self) -> None:
        """Gives the copies of a tied embedding the sum of their gradients; collective over their ranks."""
        copies = self.parts.tied_copies()
        if not copies:
            return
        ends = self.topology.tied_ranks(self.topology.replica)
        with self._waiting("the other end's gradient of the tied embedding from", ends):
            for replica in self.replication.local.turns():
                self.replication.sum_tied(replica, copies)
