"""DiLoCo and Streaming DiLoCo: replicas step apart and average what they learnt every so many steps. Pure.

DiLoCo: Douillard et al. 2023, arXiv 2311.08105, Algorithm 1. Streaming DiLoCo: Douillard et al. 2025, arXiv 2501.18512,
Algorithm 2: fragments, overlap with computation, mixing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from .base import ChunkParameters, GradientSynchronizer
from .outer_wires import DenseWire, Int8Wire
from .powersgd import PowerSGD


def outer_step(
    outer: Tensor, momentum: Tensor, gradient: Tensor, learning_rate: float, momentum_factor: float
) -> None:
    """One Nesterov step (torch's SGD with nesterov=True) on an averaged pseudo-gradient, in place. All float32."""
    momentum.mul_(momentum_factor).add_(gradient)
    outer.sub_(gradient + momentum_factor * momentum, alpha=learning_rate)


def fragment_offset(fragment: int, num_fragments: int, sync_every: int) -> int:
    """Steps by which a fragment's rounds of `sync_every` steps are shifted: fragments are spread evenly."""
    return fragment * sync_every // num_fragments


def fragment_due(step: int, num_fragments: int, sync_every: int) -> int | None:
    """The fragment that is sent after `step` optimizer steps (1 after the first), None if none is."""
    for fragment in range(num_fragments):
        if (step - fragment_offset(fragment, num_fragments, sync_every)) % sync_every == 0:
            return fragment
    return None


def fragment_names(chunks: list[ChunkParameters], num_fragments: int) -> list[list[str]]:
    """One stage's parameters by fragment: layers in turn ("strided"), what is in no layer with the first."""
    layers = sorted({layer for chunk in chunks for layer in chunk.layers.values()})
    place = {layer: index % num_fragments for index, layer in enumerate(layers)}
    fragments: list[list[str]] = [[] for _ in range(num_fragments)]
    for chunk in chunks:
        for name in chunk.parameters:
            fragments[place[chunk.layers[name]] if name in chunk.layers else 0].append(name)
    return fragments


class DiLoCo(GradientSynchronizer):
    """Every `sync_every` steps all replicas move to one outer model.

    That model is what is evaluated and saved; between syncs each replica trains its own weights, with its own state of
    the inner optimizer. Outer weights and momentum are float32 whatever the model is.
    """

    steps_apart = True
    num_fragments = 1

    def __init__(self, config, exchange, chunks, weights):
        super().__init__(config, exchange, chunks, weights)
        self.parameters = {n: p for chunk in chunks.values() for n, p in chunk.parameters.items()}
        self.fragments: list[list[str]] = [[] for _ in range(self.num_fragments)]
        self.wires: list[list[DenseWire | PowerSGD]] = [[] for _ in range(self.num_fragments)]
        tied = {name for chunk in chunks.values() for name in chunk.tied}
        for stage in sorted({chunk.stage for chunk in chunks.values()}):
            mine = [chunk for chunk in chunks.values() if chunk.stage == stage]
            for fragment, names in enumerate(fragment_names(mine, self.num_fragments)):
                self.fragments[fragment] += names
                # A tied copy travels alone: a ring sums in an order that depends on the place in the message, and the
                # other end's message is another.
                parts = [[name] for name in names if name in tied] + [[name for name in names if name not in tied]]
                self.wires[fragment] += [self._make_wire(part) for part in parts if part]
        self.outer = {name: torch.empty_like(p, dtype=torch.float32) for name, p in self.parameters.items()}
        self.momentum = {name: torch.zeros_like(tensor) for name, tensor in self.outer.items()}
        self.restart()

    def _make_wire(self, names: list[str]) -> DenseWire | PowerSGD:
        shapes = {name: self.parameters[name].shape for name in names}
        wire = self.config.outer_wire
        if wire == "powersgd":
            dtype, device = getattr(torch, self.config.factor_dtype), self.parameters[names[0]].device
            return PowerSGD(shapes, self.config.matrix_rank, dtype, self.exchange.num_local, device)
        return Int8Wire(shapes) if wire == "int8" else DenseWire(shapes, getattr(torch, wire))

    def parts(self):
        parts = {chunk.stage: [] for chunk in self.chunks.values()}
        stage_of = {name: chunk.stage for chunk in self.chunks.values() for name in chunk.parameters}
        for _, wire in self._named_wires():
            parts[stage_of[next(iter(wire.shapes))]].append([tuple(shape) for shape in wire.shapes.values()])
        return parts

    def end_step(self, final: bool) -> None:
        self.steps += 1
        if final or self.steps % self.config.sync_every == 0:
            self._synchronise()

    def finish(self) -> None:
        if self.synchronised_at != self.steps:
            self._synchronise()

    @contextlib.contextmanager
    def outer_weights(self) -> Iterator[None]:
        held = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.data = self.outer[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = held[name]

    def agreed(self) -> dict[str, Tensor]:
        return self.outer

    @torch.no_grad()
    def restart(self) -> None:
        for name, parameter in self.parameters.items():
            for mine in self.weights:
                mine[name].copy_(parameter)
            self.outer[name].copy_(parameter)
            self.momentum[name].zero_()
        for wire in (wire for wires in self.wires for wire in wires):
            wire.restart()
        self.steps = self.synchronised_at = 0

    def state_dict(self) -> dict[str, Tensor]:
        state = {"steps": torch.tensor([self.steps, self.synchronised_at])}
        state |= {f"outer/{name}": tensor for name, tensor in self.outer.items()}
        state |= {f"momentum/{name}": tensor for name, tensor in self.momentum.items()}
        for prefix, wire in self._named_wires():
            state |= {f"{prefix}{name}": tensor for name, tensor in wire.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.steps, self.synchronised_at = state["steps"].tolist()
        for name in self.outer:
            self.outer[name].copy_(state[f"outer/{name}"])
            self.momentum[name].copy_(state[f"momentum/{name}"])
        for prefix, wire in self._named_wires():
            wire.load_state_dict({n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)})

    def _named_wires(self) -> list[tuple[str, DenseWire | PowerSGD]]:
        return [
            (f"wire/{fragment}/{index}/", wire)
            for fragment, wires in enumerate(self.wires)
            for index, wire in enumerate(wires)
        ]

    def _synchronise(self) -> None:
        for fragment in range(self.num_fragments):
            self._apply(fragment, self._begin(fragment)(), mixing=0.0)
        self.synchronised_at = self.steps

    @torch.no_grad()
    def _begin(self, fragment: int) -> Callable[[], dict[str, Tensor]]:
        """What averages a fragment's pseudo-gradients, outer - inner as they are now, over replicas.

        DiLoCo, Algorithm 1, the average of outer gradients. Streaming DiLoCo too subtracts from the global weights, which
        with mixing are not what the replica started its round from.
        """
        gradients = [{n: self.outer[n] - mine[n].float() for n in self.fragments[fragment]} for mine in self.weights]
        return partial(self._average, fragment, gradients)

    def _average(self, fragment: int, gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        averages, device = {}, next((tensor.device for tensor in self.outer.values()), "cpu")
        with self.exchange.clock.synchronising(device):
            for wire in self.wires[fragment]:
                parts = [{name: mine[name] for name in wire.shapes} for mine in gradients]
                averages |= wire.aggregate(parts, self.exchange)
        return averages

    @torch.no_grad()
    def _apply(self, fragment: int, averages: dict[str, Tensor], mixing: float) -> None:
        """Outer step (DiLoCo, Algorithm 1, outer optimization), then `mixing` of a replica's own weights and the rest of
        outer ones (Streaming DiLoCo, Algorithm 2, the alpha of its last step; 0 replaces them, as DiLoCo does)."""
        for name in self.fragments[fragment]:
            outer = self.outer[name]
            rates = self.config.outer_learning_rate, self.config.outer_momentum
            outer_step(outer, self.momentum[name], averages[name], *rates)
            for mine in self.weights:
                mine[name].copy_(mixing * mine[name].float() + (1 - mixing) * outer if mixing else outer)


class StreamingDiLoCo(DiLoCo):
    """Fragments are synchronised in turn, each every `sync_every` steps, while training goes on.

    Streaming DiLoCo, Algorithm 2: after the step at which a fragment is due its pseudo-gradients are sent; its outer
    step, and the mixing with what the replica has learnt since, come `overlap_steps` later. After the last step of a
    run all fragments are synchronised at once, and replicas take the outer weights.
    """

    def __init__(self, config, exchange, chunks, weights):
        self.num_fragments = config.num_fragments
        # fragment, step at which it is applied, what waits for its average
        self.in_flight: tuple[int, int, Callable[[], dict[str, Tensor]]] | None = None
        super().__init__(config, exchange, chunks, weights)

    def end_step(self, final: bool) -> None:
        self.steps += 1
        self._receive_if_due()
        if final:
            self.finish()
            return
        fragment = fragment_due(self.steps, self.num_fragments, self.config.sync_every)
        if fragment is not None:
            wait = self.exchange.launch(self._begin(fragment))
            self.in_flight = (fragment, self.steps + self.config.overlap_steps, wait)
            self._receive_if_due()

    def finish(self) -> None:
        self._receive_if_due(early=True)
        super().finish()

    def restart(self) -> None:
        if self.in_flight is not None:
            self.in_flight[2]()  # nobody else may use the exchange before
            self.in_flight = None
        super().restart()

    def state_dict(self) -> dict[str, Tensor]:
        arrived = {}
        if self.in_flight is not None:
            fragment, due, wait = self.in_flight
            arrived = {f"arrived/{name}": tensor for name, tensor in wait().items()}
            arrived["in_flight"] = torch.tensor([fragment, due])
        return super().state_dict() | arrived  # in this order: a fragment on its way changes its wire's errors

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.in_flight = None
        if "in_flight" in state:
            fragment, due = state["in_flight"].tolist()
            averages = {n: state[f"arrived/{n}"].to(self.outer[n].device) for n in self.fragments[fragment]}
            self.in_flight = (fragment, due, lambda: averages)

    def _receive_if_due(self, early: bool = False) -> None:
        if self.in_flight is not None and (early or self.steps >= self.in_flight[1]):
            fragment, _, wait = self.in_flight
            self._apply(fragment, wait(), self.config.mixing)
            self.in_flight = None
