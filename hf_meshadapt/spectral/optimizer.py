"""`SpectralCorrection`: any torch optimizer, with its gradients corrected by anchor priors before each step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from .config import SpectralConfig
from .correction import correct_, prior_weight
from .priors import Priors
from .step import StepUnderWay

STATE_KEY = "spectral"
PLAIN_STATE = ("num_steps", "num_live_steps", "stepped_version")


class SpectralCorrection(Optimizer):
    """Corrects `.grad` in place, then takes a step of the inner optimizer, whose groups and state are also its own.

    Order: unscale, clip, correct, step. `step()` must find gradients unscaled and clipped; torch's GradScaler and
    accelerate do so in fp16 too. Afterwards `.grad` holds the corrected gradient, as it holds the clipped one after
    clipping: no second copy of the gradients is kept, and a second `step()` needs a new backward pass.

    Hand anchor gradients to `priors.receive`; their scale is said there. Where `control_variate` meets clipping, set
    `clip_coefficient` before every step. Without a prior, or with one that is too old, gradients stay as they are, and
    `metrics()` says so. With `anchor_only` the inner optimizer steps on arrivals only.

    Attributes:
        measures: the coming steps set `alignment`, at about the cost of the correction.
        alignment: of the last step's gradients with their priors: sums over matrices of what `correction.alignment` gives.

    Args:
        inner: the optimizer to wrap.
        named_parameters: names as in `model.named_parameters()`, of at least the parameters in `inner`.
        config: the rule and its constants.
        embeddings: see `config.kind_of`.

    Raises:
        ValueError: a parameter of `inner` has no name, or `inner` is a SpectralCorrection itself.
        NotImplementedError: `inner` does not step on finished gradients, or see `config.prior_rank`.
    """

    measures = False
    alignment: list[float] = []
    _under_way: StepUnderWay | None = None

    def __init__(
        self,
        inner: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        config: SpectralConfig | None = None,
        embeddings: Collection[str] = (),
    ) -> None:
        refuse_inner(inner)
        self.inner = inner
        # All that Optimizer.__init__ does (hooks, profiling), but for groups and state: they are the inner optimizer's.
        super().__setstate__({})
        self.config = SpectralConfig() if config is None else config
        self.name_of: dict[Parameter, str] = {parameter: name for name, parameter in named_parameters}
        self.priors = Priors((), self.config, embeddings)
        self.num_steps = 0
        self.num_live_steps = 0
        self.stepped_version: int | None = None  # anchor_only: of the last step
        self.clip_coefficient = 1.0  # what clipping multiplied the gradients of the coming step by
        self._metrics: dict[str, float] = {"weight": 0.0, "share_corrected": 0.0, "num_live_steps": 0}
        self._check_named(list(self._parameters()))
        self._hold_priors(self._parameters())

    def _check_named(self, parameters: list[Parameter]) -> None:
        unnamed = [tuple(parameter.shape) for parameter in parameters if parameter not in self.name_of]
        if unnamed:
            raise ValueError(
                f"named_parameters lacks the optimizer's parameters of shapes {unnamed[:3]} ({len(unnamed)} in all): "
                "pass model.named_parameters()"
            )

    def _hold_priors(self, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            if parameter.requires_grad:
                self.priors.add(self.name_of[parameter], parameter)

    # The step ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step, and returns what the closure returned; it is called once, before the correction."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.one_step() if self._under_way is None else contextlib.nullcontext():
            if self.config.rule != "anchor_only":
                self._correct(self._under_way)
                self.inner.step()
            elif self._under_way.weight > 0:
                self._take_priors(self._under_way)
                self.inner.step()
        self.clip_coefficient = 1.0
        return loss

    @contextlib.contextmanager
    def one_step(self) -> Iterator[None]:
        """Within it all calls of `step` are one optimizer step, each of another replica.

        Replicas that step apart take turns in the parameters: at a call these have one replica's weights and gradients,
        and the inner optimizer its state. Priors advance once, and correct all replicas' gradients with one weight.
        """
        assert self._under_way is None, "one_step within a step"
        with torch.no_grad():
            self.priors.advance()
        age_steps = self.priors.age_steps(self.num_steps)
        self._under_way = step = StepUnderWay(self._weight(age_steps), self.measures)
        try:
            yield
        finally:
            self._under_way = None
        if step.weight > 0:
            self.num_live_steps += 1
            self.stepped_version = self.priors.version if self.config.rule == "anchor_only" else None
        self.alignment = step.alignment()
        metrics = {"weight": step.weight, "share_corrected": step.share_corrected}
        self._metrics = metrics | {"num_live_steps": self.num_live_steps}
        if age_steps is not None:
            self._metrics |= {"prior_age_steps": age_steps, "prior_version": self.priors.version}
        self.num_steps += 1

    def _weight(self, age_steps: int | None) -> float:
        if age_steps is None or not self.config.corrects:
            return 0.0
        if self.config.rule == "anchor_only" and self.priors.version == self.stepped_version:
            return 0.0
        return prior_weight(age_steps, self.num_live_steps, self.config.max_staleness, self.config.ramp_steps)

    def _correct(self, step: StepUnderWay) -> None:
        """Corrects all gradients that have a prior."""
        if step.weight == 0:
            return
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            step.num_entries += parameter.numel()
            prior = self.priors.get(self.name_of[parameter])
            if prior is not None:
                step.measure(parameter.grad, prior)
                correct_(parameter.grad, prior, self.config, step.weight, self.clip_coefficient)
                step.num_corrected += parameter.numel()

    def _take_priors(self, step: StepUnderWay) -> None:
        """Makes the priors the gradients."""
        for parameter in self._parameters():
            prior = self.priors.get(self.name_of[parameter])
            step.num_entries += parameter.numel()
            if prior is None:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            else:
                step.measure(parameter.grad, prior)
            correct_(parameter.grad, prior, self.config, 1.0)
            step.num_corrected += parameter.numel()

    def _parameters(self) -> Iterable[Parameter]:
        return (parameter for group in self.inner.param_groups for parameter in group["params"])

    def metrics(self) -> dict[str, float]:
        """Of the last step.

        weight: of the prior, 0 where nothing was corrected. share_corrected: of gradient entries. num_live_steps: steps
        so far that were corrected (anchor_only: taken). prior_age_steps, prior_version: only where a prior is held.
        """
        return dict(self._metrics)

    # What the inner optimizer is and has ------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self):
        return self.inner.state

    @state.setter
    def state(self, state) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's; its parameters must have been among `named_parameters`."""
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        parameters = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        self._check_named(parameters)
        # A set stays one: torch refuses it, for it has no order.
        self.inner.add_param_group({**param_group, "params": given if isinstance(given, set) else params})
        self._hold_priors(parameters)

    def __repr__(self) -> str:
        return f"SpectralCorrection({self.config}) around {self.inner!r}"

    # State ------------------------------------------------------------------------------------------------------------

    def spectral_state(self) -> tuple[dict[str, Tensor], dict]:
        """State of the correction by parameter name: tensors for safetensors, and a dict for JSON."""
        tensors, priors = self.priors.state()
        return tensors, {"priors": priors, **{name: getattr(self, name) for name in PLAIN_STATE}}

    def load_spectral_state(self, tensors: Mapping[str, Tensor], plain: Mapping) -> None:
        """Puts in place what `spectral_state` returned; ValueError as in `Priors.load_state`."""
        self.priors.load_state(tensors, plain["priors"])
        for name in PLAIN_STATE:
            setattr(self, name, plain[name])

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with the correction's state under `STATE_KEY`."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        tensors, plain = self.spectral_state()
        state_dict = {**self.inner.state_dict(), STATE_KEY: {"tensors": tensors, "plain": plain}}
        for hook in self._optimizer_state_dict_post_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Undoes `state_dict`.

        Raises:
            ValueError: the state is of an optimizer without the correction, or see `Priors.load_state`.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else dict(replaced)
        if STATE_KEY not in state_dict:
            raise ValueError(
                f"the state dict has no {STATE_KEY!r}: it was saved without the correction. Load it with "
                "optimizer.inner.load_state_dict, and priors start anew"
            )
        spectral = state_dict.pop(STATE_KEY)
        self.load_spectral_state(spectral["tensors"], spectral["plain"])
        self.inner.load_state_dict(state_dict)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        # As any Optimizer's without hooks; LR schedulers put an unpicklable `step` into the instance.
        own = ("inner", "config", "name_of", "priors", "clip_coefficient", "_metrics", *PLAIN_STATE)
        return {name: self.__dict__[name] for name in own}


def refuse_inner(inner: Optimizer) -> None:
    """Names optimizers that cannot be wrapped; raises as `SpectralCorrection` does."""
    name = type(inner).__name__
    if isinstance(inner, SpectralCorrection):
        raise ValueError("inner is a SpectralCorrection already: wrap its inner optimizer, with one config")
    if isinstance(inner, torch.optim.LBFGS):
        raise NotImplementedError(f"{name} evaluates the closure within its step, uncorrected. Use a first-order one")
    if hasattr(inner, "fused_backward"):
        raise NotImplementedError(
            f"{name} updates weights during the backward pass. Use an optimizer that steps after"
        )
    if callable(getattr(inner, "train", None)):
        raise NotImplementedError(
            f"{name} has a train and an eval mode, which are not passed on. Use AdamW or another"
        )
