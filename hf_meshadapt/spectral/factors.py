"""Low-rank factors of a matrix, by warm-started subspace iteration. Pure functions, float32.

Source: Halko, Martinsson & Tropp, Finding structure with randomness (2011), algorithm 4.4 with few iterations; warm
starts as in PowerSGD (Vogels et al. 2019, algorithm 1). Where we differ: a small SVD at the end gives singular pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

COLD_ITERATIONS = 5
MIXED_ITERATIONS = 2  # of a sum of factors, whose subspace the warm start knows in part


class Factors(NamedTuple):
    """M ~ u diag(s) v^T.

    Attributes:
        u: (m, r), orthonormal columns.
        s: (r,), descending, not negative; exactly 0 where the matrix has no further direction.
        v: (n, r), orthonormal columns.
    """

    u: Tensor
    s: Tensor
    v: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.u.shape[0], self.v.shape[0]

    def dense(self) -> Tensor:
        return (self.u * self.s) @ self.v.T

    def to(self, *args, **kwargs) -> Factors:
        return Factors(*(factor.to(*args, **kwargs) for factor in self))

    def scaled(self, factor: float) -> Factors:
        return self._replace(s=self.s * factor)


def compress(gradient: Tensor, rank: int, name: str, warm_start: Factors | None = None) -> Factors:
    """Factors of a matrix: one subspace iteration from a warm start, a few from a cold one.

    Args:
        gradient: (m, n), any float dtype.
        rank: capped by min(m, n).
        name: of the parameter; it seeds the cold start, so that two machines begin alike.
        warm_start: of a similar matrix of the same shape, of any rank.

    Returns:
        float32 factors on the gradient's device; s is 0 for a zero matrix.
    """
    matrix = gradient.float()
    basis = starting_basis(name, matrix.shape, rank, warm_start).to(matrix.device)
    num_iterations = COLD_ITERATIONS if warm_start is None else 1
    return _iterate(lambda right: matrix @ right, lambda left: matrix.T @ left, basis, num_iterations)


def concatenate_and_recompress(
    parts: list[tuple[float, Factors]], rank: int, name: str, warm_start: Factors
) -> Factors:
    """Factors of a weighted sum of factored matrices, which is never made dense.

    Args:
        parts: weights, and factors of matrices of one shape, each of its own rank.
        rank, name, warm_start: as in `compress`.
    """
    u = torch.cat([factors.u.float() for _, factors in parts], dim=1)
    s = torch.cat([weight * factors.s.float() for weight, factors in parts])[:, None]
    v = torch.cat([factors.v.float() for _, factors in parts], dim=1)
    basis = starting_basis(name, (len(u), len(v)), rank, warm_start).to(u.device)
    return _iterate(
        lambda right: u @ (s * (v.T @ right)), lambda left: v @ (s * (u.T @ left)), basis, MIXED_ITERATIONS
    )


def starting_basis(name: str, shape: tuple[int, int], rank: int, warm_start: Factors | None) -> Tensor:
    """(n, min(rank, m, n)) float32: the warm start's v, with columns of `sign_matrix` where it has no direction."""
    rank = min(rank, *shape)
    if warm_start is None:
        return sign_matrix(name, shape[1], rank)
    v, s = warm_start.v[:, :rank].float(), warm_start.s[:rank]
    missing = rank - len(s)
    if missing or bool((s == 0).any()):
        # Without them, directions that the warm start lacks would never be found.
        found = torch.nn.functional.pad(s, (0, missing)) > 0
        test = sign_matrix(name, shape[1], rank).to(v.device)
        v = torch.where(found, torch.nn.functional.pad(v, (0, missing)), test)
    return v


def sign_matrix(name: str, num_columns: int, rank: int) -> Tensor:
    """(num_columns, rank) random signs over sqrt(num_columns) on the CPU, the same for a name on every machine.

    Signs rather than Gaussians: integers do not depend on how a machine computes logarithms.
    """
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
    signs = torch.randint(0, 2, (num_columns, rank), generator=torch.Generator().manual_seed(seed))
    return (2.0 * signs - 1.0) / num_columns**0.5


def _iterate(
    multiply: Callable[[Tensor], Tensor],
    multiply_transposed: Callable[[Tensor], Tensor],
    basis: Tensor,
    num_iterations: int,
) -> Factors:
    """Subspace iteration on M, given as right (n, r) -> M right and left (m, r) -> M^T left."""
    for _ in range(num_iterations - 1):
        basis = _orthonormal(multiply_transposed(_orthonormal(multiply(basis))))
    left = _orthonormal(multiply(basis))
    right, triangle = torch.linalg.qr(multiply_transposed(left))
    # M ~ left left^T M = left triangle^T right^T
    inner_u, s, inner_vt = torch.linalg.svd(triangle.T)
    rounding = torch.finfo(s.dtype).eps * max(len(left), len(right))
    s = torch.where(s > rounding * s[:1], s, torch.zeros_like(s))
    return Factors(left @ inner_u, s, right @ inner_vt.T)


def _orthonormal(columns: Tensor) -> Tensor:
    # Householder: orthonormal to rounding whatever the columns are, zeros too. Cholesky-QR squares their condition.
    return torch.linalg.qr(columns).Q


def to_tensors(values: Mapping[str, Factors | Tensor]) -> dict[str, Tensor]:
    """Flat tensors for safetensors: `{name}/u`, `/s`, `/v` of factors and `{name}/whole` of tensors."""
    tensors = {}
    for name, value in values.items():
        parts = {"whole": value} if isinstance(value, Tensor) else value._asdict()
        tensors.update({f"{name}/{part}": tensor.contiguous() for part, tensor in parts.items()})
    return tensors


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Factors | Tensor]:
    """Undoes `to_tensors`.

    Raises:
        ValueError: a tensor's name is not of that form, or a factor is missing.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        parts.setdefault(name, {})[part] = tensor
    values: dict[str, Factors | Tensor] = {}
    for name, found in parts.items():
        if set(found) == {"whole"}:
            values[name] = found["whole"]
        elif set(found) == set(Factors._fields):
            values[name] = Factors(**found)
        else:
            raise ValueError(f"prior of {name!r} has parts {sorted(found)}, not u, s, v or whole: send it again")
    return values
