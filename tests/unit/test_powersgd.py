"""PowerSGD against a slow reading of the paper, and what must hold for all shapes, ranks and dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_meshadapt.data_parallel.exchange import InProcess
from hf_meshadapt.data_parallel.powersgd import PowerSGD, first_factors, orthogonalise
from hf_meshadapt.data_parallel.sizes import is_compressed, matrix_shape, powersgd_values
from hf_meshadapt.data_parallel.tied import TiedSum

SHAPES = {
    "wide": (12, 40),
    "bias": (9,),
    "tall": (50, 10),
    "twin": (12, 40),
    "experts": (3, 8, 20),
    "small": (3, 4),
    "scalar": (),
}


def shapes_of(shapes: dict) -> dict[str, torch.Size]:
    return {name: torch.Size(shape) for name, shape in shapes.items()}


def draw(shapes: dict, num_replicas: int, seed: int = 0, dtype=torch.float32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()} for _ in range(num_replicas)]


def memory(aggregator: PowerSGD, replica: int) -> dict[str, torch.Tensor]:
    """A replica's error memory by parameter; zero where nothing is remembered."""
    state, prefix = aggregator.state_dict(), f"error/{replica}/"
    held = {name.removeprefix(prefix): error for name, error in state.items() if name.startswith(prefix)}
    return {n: held[n].reshape(s).clone() if n in held else torch.zeros(s) for n, s in aggregator.shapes.items()}


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


class Counting(InProcess):
    def __init__(self, num_replicas: int):
        super().__init__(num_replicas)
        self.sizes: list[int] = []

    def sum(self, messages):
        self.sizes.append(messages[0].numel())
        return super().sum(messages)


class Reference:
    """Algorithms 1 and 2 of the paper for one matrix, one replica after the other, in float64."""

    def __init__(self, matrix_rank: int, shape: tuple[int, int], start: torch.Tensor, num_replicas: int):
        self.q = start.double()
        self.transposed = shape[0] > shape[1]
        self.errors = [torch.zeros(shape[::-1] if self.transposed else shape).double() for _ in range(num_replicas)]

    def step(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        gradients = [g.double().T if self.transposed else g.double() for g in gradients]
        deltas = [gradient + error for gradient, error in zip(gradients, self.errors)]
        p = sum(delta @ self.q for delta in deltas) / len(deltas)
        p, _ = torch.linalg.qr(p)
        qs = [delta.T @ p for delta in deltas]
        self.q = sum(qs) / len(qs)
        self.errors = [delta - p @ q.T for delta, q in zip(deltas, qs)]
        average = p @ self.q.T
        return average.T if self.transposed else average


@pytest.mark.parametrize("shape", [(12, 40), (50, 10), (16, 16)])
def test_equals_the_papers_algorithm(shape):
    aggregator = PowerSGD(shapes_of({"weight": shape}), 3, num_local=3)
    reference = Reference(3, shape, first_factors(shape, 1, 3)[0], 3)
    for step in range(5):
        gradients = draw({"weight": shape}, 3, step)
        average = aggregator.aggregate(gradients, InProcess(3))["weight"]
        expected = reference.step([mine["weight"] for mine in gradients])
        torch.testing.assert_close(average.double(), expected, rtol=0, atol=1e-5)
        for replica, error in enumerate(reference.errors):
            held = memory(aggregator, replica)["weight"]
            expected = error.T if shape[0] > shape[1] else error
            torch.testing.assert_close(held.double(), expected, rtol=0, atol=1e-5)


def test_parameters_of_one_shape_do_not_disturb_each_other():
    gradients = draw(SHAPES, 2)
    together = PowerSGD(shapes_of(SHAPES), 2, num_local=2).aggregate(gradients, InProcess(2))
    for name in ("wide", "tall", "experts"):
        alone = PowerSGD(shapes_of({name: SHAPES[name]}), 2, num_local=2).aggregate(
            [{name: mine[name]} for mine in gradients], InProcess(2)
        )
        torch.testing.assert_close(together[name], alone[name], rtol=0, atol=1e-5)


dims = st.lists(st.integers(1, 24), min_size=0, max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(dims, min_size=1, max_size=4),
    rank=st.integers(1, 8),
    num_replicas=st.integers(1, 3),
    gradient_dtype=dtypes,
    message_dtype=dtypes,
)
def test_what_is_left_out_is_remembered(shapes, rank, num_replicas, gradient_dtype, message_dtype):
    """mean(gradient + error before) == average + mean(error after)."""
    named = {str(index): shape for index, shape in enumerate(shapes)}
    aggregator = PowerSGD(shapes_of(named), rank, message_dtype, num_local=num_replicas)
    exact = message_dtype == torch.float32 or num_replicas == 1
    for step in range(3):
        gradients = draw(named, num_replicas, step, gradient_dtype)
        before = [memory(aggregator, replica) for replica in range(num_replicas)]
        averages = aggregator.aggregate(gradients, InProcess(num_replicas))
        after = [memory(aggregator, replica) for replica in range(num_replicas)]
        for name, shape in named.items():
            given_ = sum(mine[name].float() + held[name] for mine, held in zip(gradients, before)) / num_replicas
            kept = averages[name] + sum(held[name] for held in after) / num_replicas
            assert averages[name].shape == torch.Size(shape) and averages[name].is_contiguous()
            # The sum of bfloat16 messages is rounded once more, and that is lost.
            largest = max(1.0, float(averages[name].abs().max()), float(given_.abs().max()))
            torch.testing.assert_close(kept, given_, rtol=0, atol=largest * (1e-5 if exact else 0.02))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(2, 20), columns=st.integers(2, 20), replicas=st.integers(1, 3))
def test_full_rank_equals_the_dense_average(rows, columns, replicas):
    """Also where only a part of the rank is full: the low-rank path with as many directions as there are."""
    rank = min(rows, columns)
    aggregator = PowerSGD(shapes_of({"weight": (rows, columns)}), 1, num_local=replicas)
    if aggregator.groups:  # what would travel whole is made to travel in factors
        aggregator.factors = {(rows, columns): first_factors((rows, columns), 1, rank)}
    for step in range(2):
        gradients = draw({"weight": (rows, columns)}, replicas, step)
        average = aggregator.aggregate(gradients, InProcess(replicas))["weight"]
        expected = sum(mine["weight"] for mine in gradients) / replicas
        torch.testing.assert_close(average, expected, rtol=0, atol=1e-5 * (1 + float(expected.abs().max())))


def test_averages_add_up_to_the_gradients_over_time():
    """With error feedback what is applied differs from what was given by what is remembered, which stays bounded."""
    for dtype, tolerance in ((torch.float32, 0.05), (torch.bfloat16, 0.06)):
        shapes = {"weight": (20, 30), "bias": (7,)}
        aggregator = PowerSGD(shapes_of(shapes), 4, dtype, num_local=2)
        given_ = {name: torch.zeros(shape) for name, shape in shapes.items()}
        applied = {name: torch.zeros(shape) for name, shape in shapes.items()}
        steady = draw(shapes, 1, 99)[0]
        for step in range(400):
            gradients = [{n: steady[n] + noise[n] for n in shapes} for noise in draw(shapes, 2, step)]
            for name, average in aggregator.aggregate(gradients, InProcess(2)).items():
                applied[name] += average / 400
                given_[name] += sum(mine[name] for mine in gradients) / 800
        for name in shapes:
            distance = (applied[name] - given_[name]).norm() / given_[name].norm()
            assert distance < tolerance, (dtype, name)


def test_two_messages_whatever_there_is():
    for rank, num_messages in ((2, 2), (100, 1)):
        exchange = Counting(2)
        PowerSGD(shapes_of(SHAPES), rank, num_local=2).aggregate(draw(SHAPES, 2), exchange)
        assert len(exchange.sizes) == num_messages
        assert exchange.sizes == [size for size in powersgd_values(SHAPES.values(), rank) if size]


def test_small_and_flat_parameters_travel_whole():
    compressed = {name for name, shape in SHAPES.items() if is_compressed(shape, 3)}
    assert compressed == {"wide", "tall", "twin", "experts"}
    assert matrix_shape(SHAPES["experts"]) == (24, 20)
    gradients = draw(SHAPES, 2)
    averages = PowerSGD(shapes_of(SHAPES), 3, num_local=2).aggregate(gradients, InProcess(2))
    for name in SHAPES.keys() - compressed:
        torch.testing.assert_close(averages[name], (gradients[0][name] + gradients[1][name]) / 2, rtol=0, atol=1e-6)


def test_a_missing_gradient_is_zero():
    gradients = draw(SHAPES, 2)
    zeros = [dict(gradients[0]) | {"wide": torch.zeros(12, 40), "bias": torch.zeros(9)}, gradients[1]]
    missing = [dict(gradients[0]) | {"wide": None, "bias": None}, gradients[1]]
    for dtype in (torch.float32, torch.bfloat16):
        one, other = (PowerSGD(shapes_of(SHAPES), 2, dtype, num_local=2) for _ in range(2))
        averages = one.aggregate(zeros, InProcess(2))
        for name, average in other.aggregate(missing, InProcess(2)).items():
            assert torch.equal(average, averages[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_carries_on_bit_for_bit(dtype):
    aggregator = PowerSGD(shapes_of(SHAPES), 2, dtype, num_local=2)
    for step in range(3):
        aggregator.aggregate(draw(SHAPES, 2, step), InProcess(2))
    state = copied(aggregator.state_dict())
    expected = [aggregator.aggregate(draw(SHAPES, 2, step), InProcess(2)) for step in (3, 4)]
    resumed = PowerSGD(shapes_of(SHAPES), 2, dtype, num_local=2)
    resumed.load_state_dict(state)
    for step in (3, 4):
        for name, average in resumed.aggregate(draw(SHAPES, 2, step), InProcess(2)).items():
            assert torch.equal(average, expected[step - 3][name])
    resumed.restart()
    fresh = PowerSGD(shapes_of(SHAPES), 2, dtype, num_local=2).state_dict()
    assert all(torch.equal(tensor, fresh[name]) for name, tensor in resumed.state_dict().items())


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_bases_are_orthonormal_even_of_dependent_columns(rank):
    low = torch.randn(2, 30, 1) @ torch.randn(2, 1, rank)
    for matrices in (torch.randn(2, 30, rank), low, torch.zeros(2, 30, rank), 1e-20 * torch.randn(2, 30, rank)):
        basis = orthogonalise(matrices)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(rank).expand(2, -1, -1), rtol=0, atol=1e-5)


def test_a_gradient_that_was_zero_is_followed_again():
    aggregator = PowerSGD(shapes_of({"weight": (12, 40)}), 2)
    aggregator.aggregate([{"weight": torch.zeros(12, 40)}], InProcess(1))
    gradient = torch.randn(12, 1) @ torch.randn(1, 40)
    for _ in range(3):
        average = aggregator.aggregate([{"weight": gradient}], InProcess(1))["weight"]
    assert average.norm() > 0.5 * gradient.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ends_of_a_tie_get_the_same_sum(dtype):
    shape = torch.Size((40, 12))
    tied = TiedSum(shape, 2, dtype, InProcess(2), num_replicas=2)
    exact = TiedSum(shape, 100, torch.float32, InProcess(2))
    ends = [torch.randn(shape), torch.randn(shape)]
    torch.testing.assert_close(exact.sum(0, ends), ends[0] + ends[1], rtol=0, atol=1e-6)
    first = tied.sum(0, ends)
    assert torch.equal(tied.sum(1, ends), first)  # replicas with the same gradients
    state = copied(tied.state_dict())
    again = TiedSum(shape, 2, dtype, InProcess(2), num_replicas=2)
    again.load_state_dict(state)
    assert torch.equal(again.sum(0, [None, ends[1]]), tied.sum(0, [torch.zeros(shape), ends[1]]))
