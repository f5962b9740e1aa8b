"""An optimizer made for a whole model, on a rank that has a part of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_meshadapt.given_optimizer import drop_foreign, parameter_ids


def test_other_stages_parameters_leave_an_optimizer_and_its_state():
    model, own = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), nn.Parameter(torch.zeros(1))
    named = [*model.named_parameters(), ("temperature", own)]
    optimizer = torch.optim.AdamW([{"params": named[:3]}, {"params": named[3:4]}, {"params": named[4:]}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    whole, kept = parameter_ids(model), list(model[0].parameters())

    before = copy.deepcopy(optimizer.state_dict())
    for untouched in (model, nn.Sequential(model, nn.Linear(1, 1))):
        drop_foreign(optimizer, whole, untouched)
        assert str(optimizer.state_dict()) == str(before)
    drop_foreign(optimizer, parameter_ids("a name"), model[0])
    assert str(optimizer.state_dict()) == str(before)

    drop_foreign(optimizer, whole, model[0])
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 0, 1]
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [*map(id, kept), id(own)]
    names = [group["param_names"] for group in optimizer.param_groups]
    assert names == [["0.weight", "0.bias"], [], ["temperature"]]
    assert optimizer.state.keys() == set(kept)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01] * 3)
    drop_foreign(None, whole, model[0])
