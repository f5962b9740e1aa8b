"""Optimizer state by parameter name, resumed by other mesh shapes, and the state that each rank keeps."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from hf_meshadapt.checkpoint_state import (
    capture_rng,
    load_optimizer_files,
    load_optimizer_state,
    load_rank_state,
    load_scheduler_state,
    optimizer_state_by_name,
    restore_rng,
    save_optimizer_files,
    save_rank_state,
)

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9)),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "plain_sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
    "hf_adafactor": lambda groups: transformers.Adafactor(groups, lr=None),
}


def parameters_of_two_stages(seed: int = 0, dtype=torch.float32) -> list[dict[str, nn.Parameter]]:
    torch.manual_seed(seed)
    return [
        {f"layers.{i}.{part}": nn.Parameter(torch.randn(shape, dtype=dtype)) for part, shape in parts.items()}
        for i, parts in enumerate([{"weight": (4, 3), "bias": (4,)}, {"weight": (2, 4), "bias": (2,)}])
    ]


def make_optimizer(kind: str, parameters: dict[str, nn.Parameter]):
    decayed = [parameter for name, parameter in parameters.items() if name.endswith("weight")]
    rest = [parameter for name, parameter in parameters.items() if name.endswith("bias")]
    return OPTIMIZERS[kind]([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])


def train(optimizer, parameters: dict[str, nn.Parameter], steps) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            if group["lr"] is not None:
                group["lr"] = group["lr"] * 0.9
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(step * 1000 + sum(name.encode()))
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def assert_same_optimizer(optimizer, parameters, other, other_parameters) -> None:
    tensors, scalars = optimizer_state_by_name(optimizer, parameters.items())
    expected, expected_scalars = optimizer_state_by_name(other, other_parameters.items())
    assert scalars == expected_scalars
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == expected[key].dtype and torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_stages_resume_as_one_and_one_as_two(tmp_path, kind):
    stages = parameters_of_two_stages()
    whole = stages[0] | stages[1]
    reference = {name: nn.Parameter(p.detach().clone()) for name, p in whole.items()}
    uninterrupted = make_optimizer(kind, reference)
    train(uninterrupted, reference, range(3))
    # Two stages train and save; one process loads and continues.
    for stage, parameters in enumerate(stages):
        optimizer = make_optimizer(kind, parameters)
        train(optimizer, parameters, range(3))
        save_optimizer_files(tmp_path / "two", stage, *optimizer_state_by_name(optimizer, parameters.items()))
    one = make_optimizer(kind, whole)
    load_optimizer_state(one, whole.items(), *load_optimizer_files(tmp_path / "two", whole))
    assert_same_optimizer(one, whole, uninterrupted, reference)
    train(one, whole, range(3, 5))
    train(uninterrupted, reference, range(3, 5))
    assert_same_optimizer(one, whole, uninterrupted, reference)
    # The one process saves; two stages load and continue.
    save_optimizer_files(tmp_path / "one", 0, *optimizer_state_by_name(one, whole.items()))
    train(uninterrupted, reference, range(5, 7))
    for parameters in stages:
        optimizer = make_optimizer(kind, parameters)
        load_optimizer_state(optimizer, parameters.items(), *load_optimizer_files(tmp_path / "one", parameters))
        train(optimizer, parameters, range(5, 7))
    for name, parameter in whole.items():
        assert torch.equal(parameter, reference[name]), name


def test_state_keeps_its_dtype_and_its_options_their_types(tmp_path):
    parameters = parameters_of_two_stages(dtype=torch.bfloat16)[0]
    optimizer = make_optimizer("adamw", parameters)
    train(optimizer, parameters, range(1))
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-6  # master precision that load_state_dict would round off
    save_optimizer_files(tmp_path, 0, *optimizer_state_by_name(optimizer, parameters.items()))
    loaded = make_optimizer("adamw", parameters)
    load_optimizer_state(loaded, parameters.items(), *load_optimizer_files(tmp_path, parameters))
    assert_same_optimizer(loaded, parameters, optimizer, parameters)
    assert loaded.param_groups[0]["betas"] == (0.8, 0.9)
    assert loaded.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.01
    assert [group["weight_decay"] for group in loaded.param_groups] == [0.1, 0.0]


def test_a_tied_copy_resumes_from_the_embeddings_state(tmp_path):
    embedding, copied = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    first, last = torch.optim.AdamW([embedding]), torch.optim.AdamW([copied])
    train(first, {"embed": embedding}, range(2))
    tensors, scalars = optimizer_state_by_name(last, [])
    assert tensors == {} and scalars["groups"][0]["names"] == []
    save_optimizer_files(tmp_path, 1, tensors, scalars)
    save_optimizer_files(tmp_path, 0, *optimizer_state_by_name(first, [("embed", embedding)]))
    load_optimizer_state(last, [("embed", copied)], *load_optimizer_files(tmp_path, ["embed"]))
    assert torch.equal(last.state[copied]["exp_avg"], first.state[embedding]["exp_avg"])


def test_what_is_not_trained_here_is_neither_saved_nor_loaded():
    """An optimizer that was made for the whole model holds frozen parameters, and other stages' too."""
    parameters = parameters_of_two_stages()[0]
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    groups = [{"params": [frozen, *parameters.values()]}, {"params": [nn.Parameter(torch.zeros(3), False)]}]
    first, second = (torch.optim.AdamW([dict(group) for group in groups]) for _ in range(2))
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in (first, second)]
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    for part in (first, schedulers[0]):
        part.step()
    load_optimizer_state(second, parameters.items(), *optimizer_state_by_name(first, parameters.items()))
    load_scheduler_state(schedulers[1], schedulers[0].state_dict(), second)
    assert_same_optimizer(second, parameters, first, parameters)
    assert second.state.keys() == set(parameters.values())
    assert [group["lr"] for group in second.param_groups] == pytest.approx([1e-4] * 2)


def test_optimizer_errors_name_the_parameters(tmp_path):
    parameters = parameters_of_two_stages()[0]
    optimizer = make_optimizer("adamw", parameters)
    with pytest.raises(ValueError, match="no optimizer state.*start anew"):
        load_optimizer_files(tmp_path, parameters)
    tensors, scalars = optimizer_state_by_name(optimizer, parameters.items())
    save_optimizer_files(tmp_path, 0, tensors, scalars)
    with pytest.raises(ValueError, match="layers.9.bias"):
        load_optimizer_files(tmp_path, [*parameters, "layers.9.bias"])
    joined = torch.optim.AdamW(parameters.values())
    with pytest.raises(ValueError, match="different options"):
        load_optimizer_state(joined, parameters.items(), tensors, scalars)
    optimizer.param_groups[0]["hook"] = object()
    with pytest.raises(NotImplementedError, match="option hook of AdamW"):
        optimizer_state_by_name(optimizer, parameters.items())


def draw() -> tuple:
    return random.random(), random.gauss(), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()


def test_rank_state_round_trips_bit_for_bit(tmp_path):
    random.gauss(), np.random.standard_normal()  # both hold half of a pair back
    parameter = nn.Parameter(torch.zeros(1))
    scheduler = transformers.get_cosine_schedule_with_warmup(torch.optim.SGD([parameter], lr=0.1), 2, 10)
    shared = torch.randn(4)
    fills = {"boundary.0/fill": torch.randn(5, dtype=torch.bfloat16), "a": shared, "b": shared.view(2, 2).t()}
    extra = {
        "nan": [float("nan"), float("-inf"), 1e-300],
        3: (1, (2, None)),
        "nested": {"t": torch.tensor(7)},
        "e": {},
    }
    save_rank_state(tmp_path, 2, rng=capture_rng(), scheduler=scheduler.state_dict(), tensors=fills, extra=extra)
    expected = draw()
    draw()
    state = load_rank_state(tmp_path, 2)
    restore_rng(state.rng)
    assert draw() == expected
    assert state.scheduler == scheduler.state_dict()
    assert state.tensors.keys() == fills.keys()
    assert all(torch.equal(state.tensors[name], fill) for name, fill in fills.items())
    assert np.isnan(state.extra["nan"][0]) and state.extra["nan"][1:] == extra["nan"][1:]
    assert state.extra[3] == extra[3] and state.extra["nested"]["t"].item() == 7 and state.extra["e"] == {}


def test_rank_state_refuses_objects_and_says_where(tmp_path):
    with pytest.raises(NotImplementedError, match="tree/extra/a/1 is a set"):
        save_rank_state(tmp_path, 0, rng={}, scheduler={}, extra={"a": [0, {1}]})
    with pytest.raises(FileNotFoundError, match="rank 5"):
        load_rank_state(tmp_path, 5)
