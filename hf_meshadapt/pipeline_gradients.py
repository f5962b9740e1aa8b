"""What the stages of a pipeline agree on about gradients: their norm, whether it is finite, and tied embeddings."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .agreements import Agreements
from .gradients import clip_coefficient, nonfinite_cause, scale_gradients, squared_norm


class PipelineGradients(Agreements):
    """Base of `MeshEngine`, whose parts, replicas and figures it reads."""

    def gradient_norm(self) -> torch.Tensor:
        """Norm of the gradient over the whole pipeline, a tied embedding counted once; float64 scalar on the CPU.

        Where replicas step apart, the mean of their norms.

        Raises:
            ValueError: the stages have read different batches; on all of them, before the optimizer steps.
            FloatingPointError: it is not finite, as it is whenever the loss is not; on all ranks, before the optimizer
                steps.
        """
        return self._mean_norm([self._pipeline_norm() for _ in self.replication.local.turns()])

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clips over the whole pipeline, each replica that steps apart by itself; returns `gradient_norm` of before."""
        parameters = [parameter for _, parameter in self.parts.named_trainable()]
        norms = []
        for _ in self.replication.local.turns():
            norms.append(self._pipeline_norm())
            scale_gradients(parameters, clip_coefficient(norms[-1], max_norm))
        return self._mean_norm(norms)

    def _mean_norm(self, norms: list[torch.Tensor]) -> torch.Tensor:
        if not self.data_parallel.steps_apart:
            return norms[0]
        # Logs must be the same on all ranks.
        return self.sum_over_replicas(torch.stack(norms).sum()) / self.mesh.replicas

    def _pipeline_norm(self) -> torch.Tensor:
        # Gathered and summed in stage order rather than all-reduced, so that every rank, and the emulated mesh, gets
        # the same bits.
        owned = map(self.parts.parameters_of, self.parts.stages)
        mine = torch.stack([squared_norm(parameter for _, parameter in named) for named in owned])
        if self.groups is None or self.mesh.num_chunks == 1:
            self.figures_of = [self.figures]
            return self._finite(mine).sum().sqrt()
        message = torch.cat([mine, self._digest.cpu().double(), self.figures])
        gathered = [torch.empty_like(message) for _ in range(self.mesh.stages)]
        with self._waiting("the other stages' gradient norms from", self._pipeline):
            dist.all_gather(gathered, message, group=self.groups.control)
        sizes = [len(mine), len(self._digest), len(self.figures)]
        norms, digests, figures = torch.stack(gathered).split(sizes, dim=1)
        self.figures_of = list(figures)
        self.refuse_unlike_batches(digests, f"in step {self.waiter.step}")
        # Chunk c is entry c // stages of stage c % stages.
        return self._finite(norms.T.reshape(-1)).sum().sqrt()

    def _finite(self, squared: torch.Tensor) -> torch.Tensor:
        """Squared gradient norms of all chunks, if they are finite."""
        if not squared.isfinite().all():
            norms = ", ".join(f"{float(n.sqrt()):g} on stage {c % self.mesh.stages}" for c, n in enumerate(squared))
            loss = float(self._step_loss) if self.holds_output else None
            where = "" if self.mesh.emulated else f"on {self.topology.describe()} "
            raise FloatingPointError(
                f"at step {self.waiter.step} the gradient norm is not finite ({norms}); "
                f"{where}{nonfinite_cause(self.parts.named_trainable(), loss)}. The optimizer has not stepped, weights are "
                "as they were. Lower learning_rate, clip with max_grad_norm, or look at the data of this step; the last "
                "checkpoint can be resumed"
            )
        return squared

    def sum_tied_gradients(self) -> None:
        """Gives the copies of a tied embedding the sum of their gradients; collective over their ranks."""
        copies = self.parts.tied_copies()
        if not copies:
            return
        ends = self.topology.tied_ranks(self.topology.replica)
        with self._waiting("the other end's gradient of the tied embedding from", ends):
            for replica in self.replication.local.turns():
                self.replication.sum_tied(replica, copies)
