"""A torch pipeline stage whose traffic is staged through host memory, and which syncs gradients only when told to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from .torch_internals import PipelineStage, RecvInfo


class WireStage(PipelineStage):
    """`PipelineStage` for static shapes.

    Three differences from torch's:
    - with `host_wire`, receive buffers and sent tensors live in (pinned) host memory, since gloo moves host memory
      only, while computation stays on the stage's device. On the CPU both are the same memory. Copies are waited for:
      whoever is handed a buffer may read it at once.
    - `sync_gradients` gates the data-parallel reduction. torch prepares DDP's reducer on the last microbatch of every
      schedule step, no_sync or not, so that without the gate each gradient-accumulation step would communicate.
    - only the first tensor between two stages travels forward. A second one is a carrier (see boundary/coder.py): the
      receiving stage makes its own, and only its gradient travels, backward.
    """

    def __init__(self, *args, host_wire: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self.host_wire = host_wire
        self.sync_gradients = True

    @property
    def _stages_through_host(self) -> bool:
        return self.host_wire and torch.device(self.device).type != "cpu"

    @contextlib.contextmanager
    def _voting_on_the_host(self) -> Iterator[None]:
        """Within it torch's start-up messages, which it makes on the stage's device, are made where the wire takes them."""
        device = self.device
        if self.host_wire:
            self.device = torch.device("cpu")
        try:
            yield
        finally:
            self.device = device

    def _warmup_forward_vote(self, *args, **kwargs) -> torch.Tensor:
        with self._voting_on_the_host():
            return super()._warmup_forward_vote(*args, **kwargs)

    def _warmup_backward_result(self, *args, **kwargs) -> torch.Tensor:
        with self._voting_on_the_host():
            return super()._warmup_backward_result(*args, **kwargs)

    def _host_buffers(self, infos: tuple[RecvInfo, ...]) -> tuple[RecvInfo, ...]:
        if self._stages_through_host:
            for info in infos:
                if info.buffer is not None:
                    info.buffer = pinned_like(info.buffer)
        return infos

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for infos in self.args_recv_info.values():
            self._host_buffers(infos[:1])  # a carrier stays on the device: it is not received

    def _create_grad_recv_info(self, act_send_info: dict) -> tuple[RecvInfo, ...]:
        return self._host_buffers(super()._create_grad_recv_info(act_send_info))

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        # A fresh leaf per microbatch: the buffer itself stays free of autograd and is reused in the next step.
        requires_grad = self.has_backward and torch.is_grad_enabled()
        arrived = (info.buffer.detach().to(self.device) for info in self.args_recv_info[fwd_chunk_id])
        return tuple(tensor.requires_grad_(requires_grad and tensor.is_floating_point()) for tensor in arrived)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor | None, ...]:
        infos = self.grad_recv_info[bwd_chunk_id]
        return tuple(info.buffer if info.buffer is None else info.buffer.to(self.device) for info in infos)

    def _to_host(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops:
            op.tensor = op.tensor.contiguous()
            if self._stages_through_host:
                op.tensor = pinned_like(op.tensor).copy_(op.tensor)
        return ops

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return super().get_fwd_recv_ops(fwd_chunk_id)[:1]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._to_host(super().get_fwd_send_ops(fwd_chunk_id)[:1])

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._to_host(super().get_bwd_send_ops(bwd_chunk_id))

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False) -> None:
        super().backward_one_chunk(
            bwd_chunk_id,
            loss=loss,
            full_backward=full_backward,
            last_backward=last_backward and self.sync_gradients,
        )


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor in host memory that a GPU copies from and to directly; torch keeps such memory for the next one."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
