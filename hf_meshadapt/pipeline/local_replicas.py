"""Several replicas in one process share one model: their gradients, and weights where they step apart, take turns in it."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


class LocalReplicas:
    """Gradients of this process's replicas and, if they step apart, their weights and optimizer state.

    Outside of `passes` and `turns` the weights of replica 0 are in the model.

    Args:
        named: what is trained, (name, parameter).
        num_replicas: in this process.
        apart: each has weights and optimizer state of its own.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], num_replicas: int, apart: bool):
        self.named, self.num_replicas = list(named), num_replicas
        self.apart = apart and num_replicas > 1
        # The first one's are the parameters' own.
        self.weights = [
            {name: parameter.data.clone() if replica else parameter.data for name, parameter in self.named}
            for replica in range(num_replicas if self.apart else 1)
        ]
        self._gradients: list[dict[str, Tensor | None]] = [{} for _ in range(num_replicas)]
        self._optimizer_state: list[dict[str, dict]] = [{} for _ in self.weights]

    def _enter(self, replica: int, optimizer: torch.optim.Optimizer | None) -> None:
        for name, parameter in self.named:
            if self.apart:
                parameter.data = self.weights[replica][name]
            parameter.grad = self._gradients[replica].get(name)
            if optimizer is not None:
                optimizer.state.pop(parameter, None)
                if state := self._optimizer_state[replica].get(name):
                    optimizer.state[parameter] = state

    def _leave(self, replica: int, optimizer: torch.optim.Optimizer | None) -> None:
        for name, parameter in self.named:
            self._gradients[replica][name], parameter.grad = parameter.grad, None
            if optimizer is not None:
                self._optimizer_state[replica][name] = optimizer.state.get(parameter, {})

    def turns(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[int]:
        """Replicas that step apart, each in the model while it is yielded; otherwise 0 once, with nothing changed."""
        return self.passes(optimizer) if self.apart else iter([0])

    def passes(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[int]:
        """All replicas, each in the model while it is yielded; with nothing changed if there is only one.

        With `optimizer` each brings its own state, too.
        """
        if self.num_replicas == 1:
            yield 0
            return
        for replica in range(self.num_replicas):
            self._enter(replica, optimizer)
            yield replica
            self._leave(replica, optimizer)
        if self.apart:
            for name, parameter in self.named:
                parameter.data = self.weights[0][name]
        if optimizer is not None:
            self._return(optimizer)

    def share_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives every replica that steps apart a copy of the optimizer's state as it is."""
        if not self.apart:
            return
        for held in self._optimizer_state:
            for name, parameter in self.named:
                state = optimizer.state.get(parameter, {})
                held[name] = {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}
        self._return(optimizer)

    def take_gradients(self) -> list[dict[str, Tensor | None]]:
        """All replicas' gradients, which are forgotten here."""
        gradients, self._gradients = self._gradients, [{} for _ in range(self.num_replicas)]
        return gradients

    def step_in_turn(
        self,
        optimizer: torch.optim.Optimizer,
        after: Callable[[], None],
        around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> Callable[[], None]:
        """From now on a step of the optimizer is one of every replica, with its own state; `after` is called once.

        Where replicas do not step apart, only the latter. Returns what undoes it.

        Args:
            around: makes a context for the steps of all replicas together.
        """
        if not self.apart:
            return optimizer.register_step_post_hook(lambda *_: after()).remove
        step = optimizer.step

        @functools.wraps(step)  # learning rate schedulers mark what they have seen
        def step_all(_, *args, **kwargs):
            with around():
                for _ in self.turns(optimizer):
                    step(*args, **kwargs)
                    optimizer.zero_grad()
            after()

        optimizer.step = types.MethodType(step_all, optimizer)  # learning rate schedulers want a bound method

        def undo() -> None:
            optimizer.step = step

        return undo

    def _return(self, optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in self.named:
            if state := self._optimizer_state[0].get(name):
                optimizer.state[parameter] = state
