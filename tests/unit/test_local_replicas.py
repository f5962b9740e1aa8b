"""Replicas that take turns in one model train as models of their own would."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_meshadapt.pipeline.local_replicas import LocalReplicas

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def loss_of(model: nn.Module, step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return model(torch.randn(6, 4, generator=generator)).square().sum()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_turns_equal_models_apart(optimizer):
    model, apart = model_of(), [model_of(), model_of()]
    alone = [OPTIMIZERS[optimizer](each.parameters()) for each in apart]
    shared = OPTIMIZERS[optimizer](model.parameters())
    local = LocalReplicas(list(model.named_parameters()), 2, apart=True)
    calls = []
    local.step_in_turn(shared, after=lambda: calls.append(None))
    scheduler = torch.optim.lr_scheduler.StepLR(shared, 2, gamma=0.5)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in alone]
    for step in range(5):
        for accumulation in range(2):
            for replica in local.passes():
                loss_of(model, 2 * step + accumulation, replica).backward()
                loss_of(apart[replica], 2 * step + accumulation, replica).backward()
        for replica in local.turns():
            for parameter, other in zip(model.parameters(), apart[replica].parameters()):
                assert torch.equal(parameter.grad, other.grad)
        for each in (shared, *alone):
            each.step()
            each.zero_grad()
        for each in (scheduler, *schedulers):
            each.step()
    assert len(calls) == 5
    for replica in range(2):
        for name, parameter in apart[replica].named_parameters():
            assert torch.equal(local.weights[replica][name], parameter)
    for name, parameter in model.named_parameters():  # between steps the first one's are in the model
        assert parameter.data_ptr() == local.weights[0][name].data_ptr()


def test_replicas_that_step_together_share_weights_and_take_their_gradients_out():
    model = model_of()
    local = LocalReplicas(list(model.named_parameters()), 2, apart=False)
    assert len(local.weights) == 1 and list(local.turns()) == [0]
    for replica in local.passes():
        loss_of(model, 0, replica).backward()
    first, second = local.take_gradients()
    assert not torch.equal(first["0.weight"], second["0.weight"])
    assert all(parameter.grad is None for parameter in model.parameters())
    for _ in local.passes():
        assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizers_state_is_handed_to_all():
    model = model_of()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    loss_of(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    local = LocalReplicas(list(model.named_parameters()), 2, apart=True)
    local.share_optimizer_state(optimizer)
    expected = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    addresses = set()
    for _ in local.turns(optimizer):
        for name, parameter in model.named_parameters():
            assert torch.equal(optimizer.state[parameter]["exp_avg"], expected[name])
            addresses.add(optimizer.state[parameter]["exp_avg"].data_ptr())
    assert len(addresses) == 2 * len(expected)
