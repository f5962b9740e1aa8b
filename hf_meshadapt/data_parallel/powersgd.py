"""PowerSGD (Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727): averages matrices as low-rank factors, with error feedback.

Pure: the exchange of messages is passed in, so that replicas in one process and over a network compute the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Size, Tensor

from .sizes import is_compressed, matrix_shape

if TYPE_CHECKING:
    from .exchange import Exchange

Gradients = dict[str, Tensor | None]


def first_factors(shape: tuple[int, int], count: int, matrix_rank: int) -> Tensor:
    """The Qs that power iteration starts from, standard normal (count, larger side, matrix_rank), float32 on the CPU.

    The same for all matrices of a shape in all processes: replicas must agree, and so must the ends of a tied embedding.
    """
    generator = torch.Generator().manual_seed(shape[0] << 32 | shape[1])
    return torch.randn(count, max(shape), matrix_rank, generator=generator)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Orthonormal bases of the columns of (count, rows, rank) matrices, rank <= rows, float32.

    Householder QR, in float32 whatever travelled: unlike Cholesky QR it stays orthonormal when columns are dependent or
    zero, which they are where a gradient's rank is below `matrix_rank`, and then fills the basis up with new directions,
    without which a warm start that once was zero would stay zero.
    """
    return torch.linalg.qr(matrices).Q


def wide(matrices: Tensor) -> Tensor:
    """(count, rows, columns) matrices, transposed if need be so that rows <= columns; a view."""
    return matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices


class PowerSGD:
    """Averages gradients over replicas in two messages, and remembers what they left out.

    A parameter is a matrix of its last dim by all others; one that factors would not shrink travels whole. The smaller
    side is the one that is orthogonalised (the algorithm on the transposed matrix, which costs less).

    Differs from torch's hook in what is remembered: each replica's own projection error, as Algorithm 2 has it, and not
    its distance from the average, which is a random walk whose size the rounding of bfloat16 factors would follow. The
    averages are the same. With bfloat16 messages each replica's rounding is fed back too; that of their sum is not.

    Args:
        shapes: of all parameters, by name. Their order is that of the messages and must be the same on all replicas.
        matrix_rank: of the factors.
        dtype: in which messages travel.
        num_local: replicas in this process.
    """

    def __init__(
        self,
        shapes: dict[str, Size],
        matrix_rank: int,
        dtype: torch.dtype = torch.float32,
        num_local: int = 1,
        device: torch.device | str = "cpu",
    ):
        self.shapes, self.matrix_rank, self.dtype, self.device = shapes, matrix_rank, dtype, device
        # torch loads CUDA's solvers at the first call, which two threads must not make at once (pytorch issue 90613).
        orthogonalise(torch.ones(1, 1, 1, device=device))
        self.dense = [name for name, shape in shapes.items() if not is_compressed(shape, matrix_rank)]
        # Matrices of one shape are multiplied and orthogonalised together.
        self.groups: dict[tuple[int, int], list[str]] = {}
        for name, shape in shapes.items():
            if is_compressed(shape, matrix_rank):
                self.groups.setdefault(matrix_shape(shape), []).append(name)
        # Without rounding nothing is left out of what travels whole.
        rounded = [] if dtype == torch.float32 else self.dense
        self.dense_errors = [{n: torch.zeros(shapes[n], device=device) for n in rounded} for _ in range(num_local)]
        self.errors = [
            {shape: torch.zeros(len(names), *shape, device=device) for shape, names in self.groups.items()}
            for _ in range(num_local)
        ]
        self.restart()

    def restart(self) -> None:
        """Forgets everything."""
        self.factors = {
            shape: first_factors(shape, len(names), self.matrix_rank).to(self.device)
            for shape, names in self.groups.items()
        }
        for errors in (*self.errors, *self.dense_errors):
            for error in errors.values():
                error.zero_()

    @torch.no_grad()
    def aggregate(self, gradients: list[Gradients], exchange: Exchange) -> dict[str, Tensor]:
        """The average over all replicas of gradients and remembered errors, in low rank; Algorithm 1 of the paper.

        mean(gradient + error before) == average + mean(error after), to the rounding of the exchange's sums.

        Args:
            gradients: of each replica of this process, by name, of any float dtype; None is zero.

        Returns:
            By name, in the parameters' shapes, float32; the same bits on all replicas.
        """
        share = 1.0 / exchange.num_replicas
        for errors, mine in zip(self.errors, gradients):
            self._add(errors, mine)  # Algorithm 2: delta = gradient + error, in the errors' place
        deltas = [[wide(errors[shape]) for shape in self.groups] for errors in self.errors]
        factors = list(self.factors.values())
        # Algorithm 1: P = M Q, averaged, orthogonalised.
        sides = [[share * (delta @ factor) for delta, factor in zip(mine, factors)] for mine in deltas]
        bases = [orthogonalise(side) for side in self._sum(sides, exchange)]
        # Algorithm 1: Q = M^T P, averaged. What is too small for factors goes with it.
        sent = [[(share * (d.mT @ base)).to(self.dtype) for d, base in zip(mine, bases)] for mine in deltas]
        whole = [self._whole(*pair, share) for pair in zip(gradients, self.dense_errors)]
        averages = self._sum([first + second for first, second in zip(sent, whole)], exchange)
        # Algorithm 2: the error is what this replica's own message leaves out, delta - P Q^T.
        for mine, messages in zip(deltas, sent):
            for delta, base, message in zip(mine, bases, messages):
                delta.baddbmm_(base, message.float().mT, alpha=-exchange.num_replicas)
        # Algorithm 1, warm start: the next power iteration begins with this Q.
        self.factors = {shape: factor.clone() for shape, factor in zip(self.groups, averages)}
        return self._restore(bases, averages[len(bases) :])

    def state_dict(self) -> dict[str, Tensor]:
        """`q/<parameter>` and, by replica of this process, `error/<replica>/<parameter>`; views, which change."""
        state = {}
        for shape, names in self.groups.items():
            state |= {f"q/{name}": factor for name, factor in zip(names, self.factors[shape])}
        for replica in range(len(self.errors)):
            state |= {f"error/{replica}/{n}": error for n, error in self._named_errors(replica).items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state_dict` of the same parameters, rank, dtype and replicas gave; exact."""
        for shape, names in self.groups.items():
            self.factors[shape] = torch.stack([state[f"q/{name}"] for name in names]).to(self.device)
        for replica in range(len(self.errors)):
            for name, error in self._named_errors(replica).items():
                error.copy_(state[f"error/{replica}/{name}"])

    def _named_errors(self, replica: int) -> dict[str, Tensor]:
        errors = dict(self.dense_errors[replica])
        for shape, names in self.groups.items():
            errors |= dict(zip(names, self.errors[replica][shape]))
        return errors

    def _add(self, errors: dict[tuple[int, int], Tensor], gradients: Gradients) -> None:
        for shape, names in self.groups.items():
            for error, name in zip(errors[shape], names):
                if gradients[name] is not None:
                    error += gradients[name].reshape(shape)

    def _whole(self, gradients: Gradients, errors: dict[str, Tensor], share: float) -> list[Tensor]:
        sent = []
        for name in self.dense:
            delta, error = gradients[name], errors.get(name)
            delta = torch.zeros(self.shapes[name], device=self.device) if delta is None else delta.float()
            delta = delta if error is None else delta + error
            sent.append((share * delta).to(self.dtype))
            if error is not None:
                error.copy_(delta - sent[-1].float() / share)
        return sent

    def _sum(self, replicas: list[list[Tensor]], exchange: Exchange) -> list[Tensor]:
        """Sums each of the tensors over replicas, all in one message; float32."""
        shapes = [tensor.shape for tensor in replicas[0]]
        if not shapes:
            return []
        messages = [torch.cat([tensor.to(self.dtype).flatten() for tensor in tensors]) for tensors in replicas]
        pieces = exchange.sum(messages).float().split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes)]

    def _restore(self, bases: list[Tensor], whole: list[Tensor]) -> dict[str, Tensor]:
        """Algorithm 1, last line: P Q^T."""
        averages = dict(zip(self.dense, whole))
        for (shape, names), base in zip(self.groups.items(), bases):
            # Contiguous, as fused optimizers take gradients to be.
            factor = self.factors[shape]
            matrices = factor @ base.mT if shape[0] > shape[1] else base @ factor.mT
            averages |= {name: matrix.reshape(self.shapes[name]) for name, matrix in zip(names, matrices)}
        return {name: averages[name] for name in self.shapes}
