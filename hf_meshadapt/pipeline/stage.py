"""One model chunk: the real Hugging Face forward in which other chunks' layers let the hidden state pass.

`StageModule` serves the distributed and the emulated mesh alike. It registers only the parameters that its chunk
owns, so that DDP and gradient norms see exactly these; the model itself is held unregistered. Several chunks may
share one model (the emulated mesh, interleaved schedules): each swaps its own view of the layer list in for the
length of its forward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..boundary.module import BoundaryReceive, BoundarySend
from ..boundary.observer import Observer, observing
from ..gradients import spread_nonfinite
from .layout import ForeignLayer, ForeignMatrix, ModelLayout

# Takes model output, labels (B, T), what to divide the summed loss by, and the batch's loss inputs by name; returns a
# scalar.
LossFunction = Callable[..., torch.Tensor]
# Batch entries of such names go to a loss function of one's own and not to the model.
LOSS_INPUT_PREFIX = "loss_input_"

# Half of a sum is exact in every dtype: whatever is left over is something that was not divided.
LOSS_TOLERANCE = 1e-5


class EntryLayer(ForeignLayer):
    """Last foreign layer before a chunk: swaps in the hidden state that was received."""

    incoming: torch.Tensor | None = None

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.incoming


class ExitLayer(ForeignLayer):
    """First foreign layer after a chunk: keeps the hidden state to be sent on."""

    outgoing: torch.Tensor | None = None

    def passed(self, hidden: torch.Tensor) -> torch.Tensor:
        self.outgoing = hidden
        # What follows computes unused logits: keep it out of the graph.
        return hidden.detach()


class StageModule(nn.Module):
    """Runs the layers of `span`; called by torch's pipeline stages and by the emulated mesh.

    Args:
        model: the Hugging Face model, whole or pruned; held, not registered.
        layout: where its parts are.
        span: this chunk's layers.
        receive: boundary before the chunk, None on the first.
        send: boundary after the chunk, None on the last.
        autocast: makes the context of the forward.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        span: range,
        receive: BoundaryReceive | None,
        send: BoundarySend | None,
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        super().__init__()
        self._held = (model,)  # a tuple hides the model from nn.Module's registration
        self.layout, self.span = layout, span
        self.receive, self.send = receive, send
        self.autocast = autocast
        self.observers: dict[int, Observer] = {}  # look at what enters these layers in uncoded passes of a calibration
        self.loss_function: LossFunction | None = None  # the last chunk's, in place of the model's own loss
        self.on_output: Callable[[object], None] | None = None  # is shown the last chunk's output of every microbatch
        self._layers = (model.get_submodule(layout.layers),)
        # Where the model holds the head for another chunk, this one computes no logits; in a tuple as `_held`.
        has_idle_head = send is not None and layout.head is not None
        self._idle_head = (ForeignMatrix(model.get_submodule(layout.head)),) if has_idle_head else ()
        self.dtype = next(model.parameters()).dtype
        self._set_view(returns_tuple=False)
        if receive is not None or send is not None:
            self._probe_block_style()

    @property
    def model(self) -> nn.Module:
        return self._held[0]

    @property
    def is_first(self) -> bool:
        return self.receive is None

    @property
    def is_last(self) -> bool:
        return self.send is None

    def own(self, names: list[str]) -> None:
        """Registers the model's parameters of these names as this chunk's own."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        # Last first, as their gradients come: DDP fills its buckets in this order (`fix_buckets`).
        for name in reversed(names):
            self.register_parameter(name.replace(".", "/"), parameters[name])
        self.owned_names = list(names)

    def train(self, mode: bool = True) -> StageModule:
        self.model.train(mode)
        return super().train(mode)

    def forward(
        self,
        *arriving: torch.Tensor,
        key: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        kind: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items: torch.Tensor | None = None,
        **model_inputs: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """One microbatch through this chunk.

        Args:
            arriving: token ids (B, T) on the first chunk, else what `BoundarySend` of the chunk before returned.
            key: microbatch key of the masks, int64 on the CPU, one element.
            token_ids: (B, T), read by boundaries that predict.
            kind: (B, T), what every position is, read by boundaries; best on the CPU.
            labels: (B, T), read by the last chunk only.
            num_items: what the summed loss is divided by, one element.
            model_inputs: attention_mask and other tensors with a batch dimension; loss inputs.

        Returns:
            What goes over the next boundary, or on the last chunk the loss as a scalar: sum of token losses / num_items.
        """
        key = 0 if key is None else int(key)
        loss_inputs = {name: model_inputs.pop(name) for name in [*model_inputs] if name.startswith(LOSS_INPUT_PREFIX)}
        with self._view(), observing(self._views, self.observers, token_ids, kind):
            if self.is_first:
                inputs = {"input_ids": arriving[0]}
            else:
                incoming = self.receive(arriving, key, token_ids, kind, labels.shape[1], self.dtype)
                inputs = self._enter(incoming)
            if self.is_last:
                return spread_nonfinite(self._loss(labels, num_items, inputs | model_inputs, loss_inputs))
            # The boundaries stay outside: their sums and codes keep the precision that they ask for.
            with self.autocast():
                self.model(**inputs, **model_inputs, use_cache=False)
            return self.send(self._in_graph(self._exit.outgoing), key, token_ids, kind)

    def _in_graph(self, leaving: torch.Tensor) -> torch.Tensor:
        """The hidden state that leaves the chunk, made to take a gradient where nothing before it is trained.

        The next chunk sends its gradient back and the boundary codes it and is fitted to it, wanted or not.

        Raises:
            RuntimeError: what the chunk trains does not reach it.
        """
        if leaving.requires_grad or not torch.is_grad_enabled():
            return leaving
        if any(parameter.requires_grad for parameter in self.parameters()):
            raise RuntimeError(
                f"nothing that layers {self.span.start}-{self.span.stop - 1} train takes part in their output: with "
                "gradient checkpointing set gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        return leaving.detach().requires_grad_()

    def _enter(self, incoming: torch.Tensor) -> dict[str, torch.Tensor]:
        """Lays the hidden state ready for the entry layer; returns the inputs that only tell the model its shape."""
        self._entry.incoming = incoming
        shape = (*incoming.shape[:-1], self.layout.embedding_size)
        return {"inputs_embeds": incoming.new_zeros(shape)}

    def _loss(self, labels: torch.Tensor, num_items: torch.Tensor, inputs: dict, extra: dict) -> torch.Tensor:
        divisor = num_items.squeeze()
        # A loss function of its own gets the output of a model that saw no labels, as Trainer's gets it.
        ours = {} if self.loss_function else {"labels": labels, "num_items_in_batch": divisor, **extra}
        with self.autocast():
            output = self.model(**inputs, **ours, use_cache=False)
        if self.on_output is not None:
            self.on_output(output)
        return self.loss_function(output, labels, divisor, **extra) if self.loss_function else output.loss

    @contextlib.contextmanager
    def _view(self) -> Iterator[None]:
        layers = self._layers[0]
        resting, layers._modules = layers._modules, self._views
        path, _, name = (self.layout.head or "").rpartition(".")
        holder = self.model.get_submodule(path)._modules
        heads = {name: holder[name]} if self._idle_head else {}
        holder.update(zip(heads, self._idle_head))
        try:
            yield
        finally:
            layers._modules = resting
            holder.update(heads)
            # Do not keep a microbatch's graph alive beyond its backward.
            for module in (self._entry, self._exit):
                if module is not None:
                    module.incoming = module.outgoing = None

    def _set_view(self, returns_tuple: bool) -> None:
        resting = self._layers[0]._modules
        self._entry = self._exit = None
        self._views: dict[str, nn.Module] = {}
        for index, layer in enumerate(resting.values()):
            if index in self.span:
                module = layer
            elif index == self.span.start - 1:
                module = self._entry = EntryLayer(layer, returns_tuple)
            elif index == self.span.stop:
                module = self._exit = ExitLayer(layer, returns_tuple)
            else:
                module = ForeignLayer(layer, returns_tuple)
            self._views[str(index)] = module

    def _probe_block_style(self) -> None:
        """Finds out whether this architecture's blocks return a tensor or a tuple, by running four tokens.

        Raises:
            NotImplementedError: the chunk runs with neither; the model cannot be cut this way.
        """
        reasons = []
        for returns_tuple in (False, True):
            self._set_view(returns_tuple)
            try:
                self.probe()
                return
            except Exception as error:  # whatever the model's own code raises on a wrong shape
                reasons.append(f"{type(error).__name__}: {error}")
        raise NotImplementedError(
            f"{type(self.model).__name__} cannot be cut at layers {self.span.start}-{self.span.stop - 1}: "
            f"its blocks ran neither as tensor nor as tuple blocks ({'; '.join(reasons)}). Use pipeline_stages=1"
        )

    def probe(self) -> torch.Tensor:
        """Runs four tokens unmasked and returns what leaves the chunk, in graph: a hidden state or logits.

        Raises:
            RuntimeError: a hidden state reached the chunk or its exit in another shape than (1, 4, hidden).
        """

        def run(inputs: dict) -> torch.Tensor:
            with self.autocast():  # flash attention takes no float32
                output = self.model(**inputs, use_cache=False)
            return output.logits if self.is_last else self._exit.outgoing

        return self._probe(run)

    def loss_fault(self, num_rows: int = 1) -> str | None:
        """Why the last chunk's loss cannot be summed over microbatches, found by running rows of four tokens; None if it
        can.

        Microbatches, replicas and accumulation steps add up to the loss of the whole batch only if each is the sum of
        its tokens' losses divided by `num_items_in_batch`, and nothing else: then twice the items give half the loss.
        """
        try:
            labels = torch.zeros(num_rows, 4, dtype=torch.long, device=next(self.model.parameters()).device)
            items = torch.ones_like(labels[0, :1])
            once = float(self._probe(lambda inputs: self._loss(labels, items, inputs, {}).detach(), num_rows))
            twice = float(self._probe(lambda inputs: self._loss(labels, 2 * items, inputs, {}).detach(), num_rows))
        except Exception as error:  # whatever the model's or a person's own code raises
            return f"it raises {type(error).__name__}: {error}"
        if math.isfinite(once) and abs(once - 2 * twice) > LOSS_TOLERANCE * abs(once):
            return f"with num_items_in_batch=1 it is {once:.6g}, with 2 it is {twice:.6g} and not half of that"
        return None

    def _probe(self, run: Callable[[dict], torch.Tensor], num_rows: int = 1) -> torch.Tensor:
        """Calls `run` with the inputs of rows of four tokens, in evaluation mode, and checks the shape at the entry."""
        device = next(self.model.parameters()).device
        shape = (num_rows, 4, self.layout.hidden_size)
        arrived = []
        first = self._views[str(self.span.start)]
        hook = first.register_forward_pre_hook(
            lambda module, args, kwargs: arrived.append((args[0] if args else kwargs["hidden_states"]).shape),
            with_kwargs=True,
        )
        training = self.model.training
        devices = [device] if device.type == "cuda" else []
        try:
            self.model.eval()
            with torch.random.fork_rng(devices=devices), torch.enable_grad(), self._view():
                if self.is_first:
                    inputs = {"input_ids": torch.zeros(num_rows, 4, dtype=torch.long, device=device)}
                else:
                    inputs = self._enter(torch.ones(shape, dtype=self.dtype, device=device))
                leaving = run(inputs)
        finally:
            hook.remove()
            self.model.train(training)
        if list(arrived[0]) != list(shape) or (not self.is_last and list(leaving.shape) != list(shape)):
            raise RuntimeError(f"hidden state of shape {list(arrived[0])} where {list(shape)} was expected")
        return leaving
