"""`SpectralCorrection` is the optimizer that it wraps, but for the gradients that this one sees."""

from __future__ import annotations

import copy
import io
import json
import pickle

import pytest
import torch
from safetensors.torch import load, save
from transformers import Adafactor

from hf_meshadapt.checkpoint_state import load_optimizer_state, optimizer_state_by_name
from hf_meshadapt.spectral.compressor import GradientCompressor
from hf_meshadapt.spectral.config import RULES, SpectralConfig
from hf_meshadapt.spectral.correction import correct_
from hf_meshadapt.spectral.optimizer import SpectralCorrection

NUM_STEPS = 6


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv 2302.06675, as short as it goes."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.add_(momentum.lerp(parameter.grad, 0.1).sign(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 0.01)


INNER = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adafactor": lambda groups: Adafactor(groups, lr=1e-2, relative_step=False, scale_parameter=False),
    "lion": Lion,
    "muon": lambda groups: torch.optim.Muon(groups, lr=1e-2),
}


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """Two matrices in blocks and, as its name does not say, a table."""
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(11, 8), torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 11)]
    return torch.nn.Sequential(*layers).to(dtype)


def batch_loss(model, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(11, (2, 16), generator=generator)
    return torch.nn.functional.cross_entropy(model(tokens).float(), labels)


def groups_of(model, kind: str = "adamw") -> list[dict]:
    """Matrices and the rest, as Trainer divides them; Muon takes matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [{"params": matrices}] if kind == "muon" else [{"params": matrices}, {"params": vectors, "lr": 5e-3}]


def wrap(model, kind: str = "adamw", **options) -> SpectralCorrection:
    inner = INNER[kind](groups_of(model, kind))
    config = SpectralConfig(
        **({} if options.get("rule") == "none" else {"matrix_rank": 4, "refresh_steps": 1}) | options
    )
    return SpectralCorrection(inner, model.named_parameters(), config, embeddings={"0.weight"})


def anchor_gradients(optimizer: SpectralCorrection, version: int) -> dict:
    """Of the model's first weights, on a batch of its own."""
    model = make_model()
    batch_loss(model, 1000 + version).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if name in optimizer.priors.held}
    return GradientCompressor(optimizer.config, optimizer.priors.embeddings).compress(gradients)


def send(optimizer: SpectralCorrection, version: int, step: int) -> None:
    if optimizer.priors.held:
        optimizer.priors.receive(anchor_gradients(optimizer, version), version, step)


def train(model, optimizer, steps=range(NUM_STEPS), every: int = 2, scheduler=None) -> None:
    """A version arrives every two steps, two steps late."""
    for step in steps:
        if isinstance(optimizer, SpectralCorrection) and step and step % every == 0:
            send(optimizer, version=step, step=step - every)
        optimizer.zero_grad()
        batch_loss(model, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_same_weights(one, other) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters()):
        assert torch.equal(a, b), name


def assert_same_state(one, other) -> None:
    states = [optimizer.state_dict() for optimizer in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for index, entries in states[0]["state"].items():
        assert entries.keys() == states[1]["state"][index].keys()
        for key, value in entries.items():
            other_value = states[1]["state"][index][key]
            same = torch.equal(value, other_value) if torch.is_tensor(value) else value == other_value
            assert same, (index, key)


# What the inner optimizer sees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INNER)
@pytest.mark.parametrize("options", [{"rule": "none"}, {"alpha": 1.0}, {"rule": "blend", "blend_weight": 0.0}])
def test_without_a_correction_it_is_bitwise_the_inner_optimizer(kind, options):
    plain_model, model = make_model(), make_model()
    plain, wrapped = INNER[kind](groups_of(plain_model, kind)), wrap(model, kind, **options)
    train(plain_model, plain)
    train(model, wrapped)
    assert_same_weights(model, plain_model)
    assert_same_state(wrapped, plain)
    assert wrapped.metrics()["share_corrected"] == 0


@pytest.mark.parametrize("kind", INNER)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("none", "anchor_only")])
def test_the_inner_optimizer_sees_corrected_gradients(kind, rule):
    plain_model, model = make_model(), make_model()
    plain, wrapped = INNER[kind](groups_of(plain_model, kind)), wrap(model, kind, rule=rule)
    for step in range(3):
        send(wrapped, version=step, step=step)
        for optimizer, trained in ((plain, plain_model), (wrapped, model)):
            optimizer.zero_grad()
            batch_loss(trained, step).backward()
        wrapped.step()
        for name, parameter in plain_model.named_parameters():
            if (prior := wrapped.priors.get(name)) is not None:
                correct_(parameter.grad, prior, wrapped.config, 1.0)
        plain.step()
        for one, other in zip(model.parameters(), plain_model.parameters()):
            assert torch.equal(one.grad, other.grad)  # documented: the corrected one stays
    assert_same_weights(model, plain_model)


def test_a_correction_changes_the_run():
    plain_model, model = make_model(), make_model()
    train(plain_model, INNER["adamw"](groups_of(plain_model)))
    train(model, wrap(model))
    for name, parameter in plain_model.named_parameters():
        assert not torch.equal(parameter, model.get_parameter(name)), name


def test_bfloat16_weights():
    model = make_model(torch.bfloat16)
    optimizer = wrap(model, rule="blend")
    train(model, optimizer)
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())
    assert optimizer.priors.get("1.weight").u.dtype == torch.float32
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_anchor_only_steps_on_arrivals_alone_and_on_nothing_but_the_prior():
    plain_model, model = make_model(), make_model()
    plain, optimizer = INNER["adamw"](groups_of(plain_model)), wrap(model, rule="anchor_only")
    for step in range(9):
        if step in (2, 5):
            send(optimizer, version=step, step=step - 2)
        if step == 5:
            batch_loss(model, step).backward()  # fast gradients need not be there, and do not matter
        optimizer.step()
        if step in (2, 5):
            for name, parameter in plain_model.named_parameters():
                prior = optimizer.priors.get(name)
                parameter.grad = prior.clone() if torch.is_tensor(prior) else prior.dense()
            plain.step()
        metrics = optimizer.metrics()
        assert (metrics["weight"], metrics["share_corrected"]) == ((1, 1) if step in (2, 5) else (0, 0))
    for one, other in zip(model.parameters(), plain_model.parameters()):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert optimizer.metrics()["num_live_steps"] == 2


def test_control_variates_are_clipped_as_the_step_was():
    model, clipped_model = make_model(), make_model()
    optimizer, clipped = wrap(model, rule="control_variate"), wrap(clipped_model, rule="control_variate")
    for one, trained in ((optimizer, model), (clipped, clipped_model)):
        send(one, version=0, step=0)
        batch_loss(trained, 0).backward()
    for parameter in clipped_model.parameters():
        parameter.grad.mul_(0.25)
    clipped.clip_coefficient = 0.25
    optimizer.step(), clipped.step()
    for one, other in zip(model.parameters(), clipped_model.parameters()):
        torch.testing.assert_close(0.25 * one.grad, other.grad)
    assert clipped.clip_coefficient == 1.0  # for one step


def test_gradients_are_unscaled_before_they_are_corrected():
    """torch's GradScaler, as accelerate uses it for fp16: an overflow skips step and correction."""
    model, scaled_model = make_model(), make_model()
    optimizer, scaled = wrap(model), wrap(scaled_model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(2):
        send(optimizer, step, step), send(scaled, step, step)
        batch_loss(model, step).backward()
        optimizer.step()
        scaler.scale(batch_loss(scaled_model, step)).backward()
        scaler.step(scaled)
        scaler.update()
        optimizer.zero_grad(), scaled.zero_grad()
    assert_same_weights(model, scaled_model)
    batch_loss(scaled_model, 5).backward()
    scaled_model[1].weight.grad[0, 0] = float("inf")
    scaler.step(scaled)
    assert scaled.num_steps == 2
    assert_same_weights(model, scaled_model)


# Missing, old and young priors ------------------------------------------------------------------------------------------


def test_metrics_say_how_old_the_prior_is_and_when_it_does_nothing():
    model = make_model()
    optimizer = wrap(model, max_staleness=8, ramp_steps=2)
    seen = []
    for step in range(14):
        if step == 3:
            send(optimizer, version=7, step=1)
        optimizer.zero_grad()
        batch_loss(model, step).backward()
        optimizer.step()
        seen.append(optimizer.metrics())
    matrices = sum(parameter.numel() for name, parameter in model.named_parameters() if name in optimizer.priors.held)
    share = matrices / sum(parameter.numel() for parameter in model.parameters())
    assert seen[2] == {"weight": 0.0, "share_corrected": 0.0, "num_live_steps": 0}
    assert seen[3] == {
        "weight": 0.5, "share_corrected": share, "num_live_steps": 1, "prior_age_steps": 2, "prior_version": 7
    }  # fmt: skip
    assert [row["weight"] for row in seen[4:]] == [1, 1, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0]
    assert [row["share_corrected"] for row in seen[9:]] == [0] * 5
    assert seen[13]["prior_age_steps"] == 12 and seen[13]["num_live_steps"] == 6


def test_a_prior_past_its_time_leaves_the_inner_optimizer_bitwise():
    plain_model, model = make_model(), make_model()
    plain, wrapped = INNER["adamw"](groups_of(plain_model)), wrap(model, max_staleness=2)
    wrapped.num_steps = 2
    send(wrapped, version=0, step=0)
    train(plain_model, plain, range(3))
    train(model, wrapped, range(3), every=100)
    assert_same_weights(model, plain_model)


def test_parameters_without_a_gradient_are_passed_over():
    model = make_model()
    optimizer = wrap(model, rule="blend")
    send(optimizer, version=0, step=0)
    batch_loss(model, 0).backward()
    model[1].weight.grad = None
    before = model[1].weight.clone()
    optimizer.step()
    assert torch.equal(model[1].weight, before)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert optimizer.metrics()["share_corrected"] == 1 and numel > 96


def test_frozen_parameters_have_no_prior():
    model = make_model()
    model[1].weight.requires_grad_(False)
    assert set(wrap(model).priors.held) == {"3.weight"}


# Parity with torch's optimizers ----------------------------------------------------------------------------------------


SCHEDULERS = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_STEPS),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=9),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers(kind, recwarn):
    plain_model, model = make_model(), make_model()
    plain, wrapped = INNER["adamw"](groups_of(plain_model)), wrap(model, alpha=1.0)
    for trained, optimizer in ((plain_model, plain), (model, wrapped)):
        train(trained, optimizer, scheduler=SCHEDULERS[kind](optimizer))
    assert_same_weights(model, plain_model)
    assert [group["lr"] for group in wrapped.param_groups] == [group["lr"] for group in plain.param_groups]
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_step_hooks_run_around_the_correction():
    model = make_model()
    optimizer, seen = wrap(model), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", model[1].weight.grad.clone())))
    optimizer.inner.register_step_pre_hook(lambda *_: seen.append(("inner", model[1].weight.grad.clone())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", model[1].weight.grad.clone())))
    send(optimizer, version=0, step=0)
    batch_loss(model, 0).backward()
    optimizer.step()
    assert [name for name, _ in seen] == ["before", "inner", "after"]
    assert not torch.equal(seen[0][1], seen[1][1]) and torch.equal(seen[1][1], seen[2][1])


def test_state_hooks_run():
    optimizer, calls = wrap(make_model()), []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state.pop("extra")))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", 1, "loaded"]


def test_it_shares_groups_state_and_defaults_even_after_loading():
    model = make_model()
    optimizer = wrap(model)
    train(model, optimizer, range(2))
    optimizer.inner.load_state_dict(optimizer.inner.state_dict())
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state is optimizer.inner.state and optimizer.defaults is optimizer.inner.defaults
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "rule='diagonal'" in repr(optimizer) and "AdamW" in repr(optimizer)


def test_zero_grad():
    model = make_model()
    optimizer = wrap(model)
    batch_loss(model, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all((parameter.grad == 0).all() for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_groups_can_be_added():
    model = make_model()
    inner = torch.optim.AdamW([model[1].weight], lr=1e-2)
    optimizer = SpectralCorrection(inner, model.named_parameters(), SpectralConfig(matrix_rank=4))
    optimizer.add_param_group({"params": model[3].weight, "lr": 1e-3})
    optimizer.add_param_group({"params": iter([model[3].bias])})
    assert [group["lr"] for group in inner.param_groups] == [1e-2, 1e-3, 1e-2]
    assert [list(map(id, group["params"])) for group in inner.param_groups] == [
        [id(parameter)] for parameter in (model[1].weight, model[3].weight, model[3].bias)
    ]
    assert set(optimizer.priors.held) == {"1.weight", "3.weight"}
    with pytest.raises(TypeError, match="ordered"):
        optimizer.add_param_group({"params": {model[1].bias}})
    stranger = torch.nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"lacks .* shapes \[\(3, 3\)\].*pass model.named_parameters\(\)"):
        optimizer.add_param_group({"params": [stranger]})
    assert len(inner.param_groups) == 3


def test_groups_with_names():
    model = make_model()
    inner = torch.optim.AdamW([("1.weight", model[1].weight)], lr=1e-2)
    optimizer = SpectralCorrection(inner, model.named_parameters(), SpectralConfig(matrix_rank=4))
    optimizer.add_param_group({"params": [("3.weight", model[3].weight)]})
    assert [group["param_names"] for group in optimizer.param_groups] == [["1.weight"], ["3.weight"]]
    assert set(optimizer.priors.held) == {"1.weight", "3.weight"}


def test_a_closure_is_called_once_and_its_loss_returned():
    plain_model, model = make_model(), make_model()
    plain, wrapped, losses = INNER["adamw"](groups_of(plain_model)), wrap(model, rule="none"), []

    def closure_of(trained, optimizer):
        def closure():
            optimizer.zero_grad()
            losses.append(batch_loss(trained, 0))
            losses[-1].backward()
            return losses[-1]

        return closure

    plain.step(closure_of(plain_model, plain))
    assert wrapped.step(closure_of(model, wrapped)) is losses[1] and len(losses) == 2
    assert wrapped.step() is None
    plain.step()
    assert_same_weights(model, plain_model)


# State -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule, options", [("diagonal", {"ramp_steps": 5}), ("blend", {}), ("anchor_only", {})])
@pytest.mark.parametrize("stop", [3, 4])
def test_a_resumed_run_is_the_uninterrupted_one(rule, options, stop):
    options = {"rule": rule, "refresh_steps": 2, **options}
    whole_model, model = make_model(), make_model()
    whole, first = wrap(whole_model, **options), wrap(model, **options)
    train(whole_model, whole, range(9))
    train(model, first, range(stop))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed_model = make_model()
    resumed = wrap(resumed_model, **options)
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.num_steps == stop
    train(resumed_model, resumed, range(stop, 9))
    assert_same_weights(resumed_model, whole_model)
    assert_same_state(resumed, whole)
    assert resumed.metrics() == whole.metrics()


def test_checkpoints_by_parameter_name_hold_it():
    """What a mesh run saves: the inner optimizer's state and the correction's, nothing pickled."""
    models = [make_model(), make_model()]
    first, second = (wrap(model) for model in models)
    train(models[0], first, range(3))
    named = [list(model.named_parameters()) for model in models]
    load_optimizer_state(second, named[1], *optimizer_state_by_name(first, named[0]))
    tensors, plain = first.spectral_state()
    second.load_spectral_state(load(save(tensors)), json.loads(json.dumps(plain)))
    models[1].load_state_dict(models[0].state_dict())
    for model, optimizer in zip(models, (first, second)):
        train(model, optimizer, range(3, 6))
    assert_same_weights(*models)


def test_an_empty_state_dict_comes_back():
    optimizer = wrap(make_model())
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.priors.version is None and optimizer.num_steps == 0


def test_a_state_dict_without_the_correction_is_named():
    optimizer = wrap(make_model())
    with pytest.raises(ValueError, match="saved without the correction.*optimizer.inner.load_state_dict"):
        optimizer.load_state_dict(optimizer.inner.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_their_own_way(copied):
    model = make_model()
    optimizer = wrap(model, refresh_steps=2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    train(model, optimizer, range(3))
    other_model, other = copied((model, optimizer))
    before = [parameter.clone() for parameter in model.parameters()]
    train(other_model, other, range(3, 7))
    assert all(torch.equal(one, parameter) for one, parameter in zip(before, model.parameters()))
    train(model, optimizer, range(3, 7))
    assert_same_weights(model, other_model)
    other.register_step_post_hook(lambda *_: None)


# Refused -----------------------------------------------------------------------------------------------------------------


class ScheduleFree(Lion):
    def train(self):
        pass


class Lomo(Lion):
    def fused_backward(self):
        pass


@pytest.mark.parametrize(
    "make, error, words",
    [
        (torch.optim.LBFGS, NotImplementedError, "LBFGS evaluates the closure"),
        (ScheduleFree, NotImplementedError, "ScheduleFree has a train and an eval mode"),
        (Lomo, NotImplementedError, "Lomo updates weights during the backward pass"),
        (lambda parameters: SpectralCorrection(Lion([*parameters]), make_names(parameters)), ValueError, "already"),
    ],
)
def test_optimizers_that_cannot_be_wrapped_are_named(make, error, words):
    model = make_model()
    with pytest.raises(error, match=words):
        SpectralCorrection(make(list(model.parameters())), model.named_parameters())


def make_names(parameters):
    return [(f"{i}.weight", parameter) for i, parameter in enumerate(parameters)]


def test_every_parameter_needs_a_name():
    model = make_model()
    with pytest.raises(ValueError, match=r"named_parameters lacks .*\(11, 8\)"):
        SpectralCorrection(Lion(list(model.parameters())), model[1].named_parameters())
