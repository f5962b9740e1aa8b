"""CPU tensors that pretend to be on a GPU, so that what would fail or wait there shows on any machine.

A `CudaTensor` says that its device is `cuda:0`, has real values and computes on the CPU: results can be compared with
those of the CPU, bit by bit. Within `PretendedCuda` operations refuse what CUDA refuses, tensors of both devices
together, and whatever makes the host wait for the device is counted.

torch's own FakeTensorMode has no values, and cannot index or move tensors of a device that torch was not built for.
"""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Trainer

import hf_meshadapt
from hf_meshadapt import MeshAdaptArguments

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
PACKAGE = f"{Path(hf_meshadapt.__file__).parent}/"


class CudaTensor(Tensor):
    """See above. Made by operations within `PretendedCuda`, and by `to_cuda`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda, is_cpu = CUDA, True, False

    def get_device(self) -> int:
        return 0

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    __array__ = numpy


class CudaParameter(CudaTensor, nn.Parameter):
    pass


def to_cuda(tensor: Tensor) -> CudaTensor:
    """A leaf as a leaf of its own, anything else within its graph; the memory is shared."""
    if isinstance(tensor, CudaTensor):
        return tensor
    if tensor.is_leaf:
        return Tensor._make_subclass(CudaTensor, tensor.detach(), tensor.requires_grad)
    return tensor.as_subclass(CudaTensor)


def move(module: nn.Module) -> nn.Module:
    """Puts a module's parameters and buffers there, in place; those that are one stay one."""
    moved: dict[int, CudaParameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in moved:
                made = Tensor._make_subclass(CudaParameter, parameter.detach(), parameter.requires_grad)
                moved[id(parameter)] = made
            part._parameters[name] = moved.get(id(parameter))
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else to_cuda(buffer)
    return module


# What takes tensors of both devices.
MIXES = {"copy_", "__getitem__", "__setitem__", "_has_compatible_shallow_copy_type"}
# What waits until the device has computed a value.
ASKS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal", "allclose", "unique"),
    *("masked_select", "__contains__", "is_nonzero", "flatnonzero", "__format__", "__repr__"),
}
MOVES = {"to", "cpu", "cuda", "copy_"}
FROM_NUMBERS = {"tensor", "new_tensor", "as_tensor"}
INDEXES = {"__getitem__", "__setitem__"}
GIGABYTE = 2**30


class PretendedCuda(TorchFunctionMode):
    """Within it `cuda` is a device.

    Attributes:
        waits: of the host for the device that the package causes: the operation, and the line that it came from.
    """

    def __init__(self):
        super().__init__()
        self.waits: list[str] = []
        self._patches = contextlib.ExitStack()

    def __enter__(self):
        stream = mock.Mock(synchronize=lambda: self.waits.append("stream"))
        patches = {
            "torch.cuda.mem_get_info": lambda device: (64 * GIGABYTE, 80 * GIGABYTE),
            "torch.cuda.get_rng_state": lambda device=CUDA: torch.get_rng_state(),
            "torch.cuda.set_rng_state": lambda state, device=CUDA: None,
            "torch.cuda.get_device_name": lambda device: "a GPU that is none",
            "torch.cuda.current_stream": lambda device: stream,
            "torch.accelerator.synchronize": lambda *device: self.waits.append("device"),
            "torch.futures.Future": functools.partial(_future, torch.futures.Future),
        }
        for name, stand_in in patches.items():
            self._patches.enter_context(mock.patch(name, stand_in))
        for kind in torch.autograd.Function.__subclasses__():
            if kind.__module__.startswith("hf_meshadapt") and "backward" in vars(kind):
                made = staticmethod(self._within(kind.backward))
                self._patches.enter_context(mock.patch.object(kind, "backward", made))
        return super().__enter__()

    def __exit__(self, *exception):
        self._patches.close()
        return super().__exit__(*exception)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", str(function))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(isinstance(tensor, CudaTensor) for tensor in given)
        if name == "register_hook" and there:
            return function(args[0], self._within(args[1]))
        if there and name not in MIXES | MOVES and getattr(function, "__self__", None) is not Tensor.data:
            strangers = [tuple(t.shape) for t in given if not isinstance(t, CudaTensor) and t.dim() and not t.is_meta]
            if strangers:
                raise RuntimeError(f"{name}: expected all tensors to be on cuda:0, found {strangers} on the CPU")
        target = CUDA if there else CPU
        if name in ("to", "cpu"):
            args, kwargs, target = _without_device(args, kwargs, CPU if name == "cpu" else None)
            function = Tensor.to
        elif kwargs.get("device") is not None and name not in ("autocast", "device"):
            target = torch.device(kwargs["device"])
            kwargs["device"] = "cpu" if target.type == "cuda" else target
        self._count(name, args, kwargs, target)
        kwargs.pop("pin_memory", None)
        kwargs.pop("non_blocking", None)
        result = function(*args, **kwargs)
        if name in ("__set__", "__setitem__") or isinstance(result, torch.Size):
            return result
        return tree_map(functools.partial(_placed, target=target, given=given), result)

    def _within(self, function):
        """The function called on gradients, which come from C++, where nothing is pretended."""

        def call(*args):
            TorchFunctionMode.__enter__(self)
            try:
                return function(*(to_cuda(arg) if isinstance(arg, Tensor) else arg for arg in args))
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)

        return call

    def _count(self, name: str, args: tuple, kwargs: dict, target: torch.device) -> None:
        on_cuda = [isinstance(arg, CudaTensor) for arg in args[:2]]
        waits = any(on_cuda) and name in ASKS
        if name in ("to", "cpu"):
            waits = on_cuda[0] != (target.type == "cuda") and not (kwargs.get("non_blocking") and not on_cuda[0])
        elif name == "copy_":
            waits = on_cuda[0] != on_cuda[1] and not kwargs.get("non_blocking")
        elif name in FROM_NUMBERS:
            waits = target.type == "cuda"
        elif name in INDEXES and on_cuda[0]:
            # A mask's true entries are counted first; indices from the host are copied.
            places = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, (Tensor, np.ndarray))]
            waits = any(not isinstance(p, CudaTensor) or p.dtype == torch.bool for p in places)
        file, line = _caller() if waits else ("", 0)
        if file.startswith(PACKAGE):
            self.waits.append(f"{name} in {file.removeprefix(PACKAGE)}:{line}")


def _caller() -> tuple[str, int]:
    """The line that an operation came from."""
    places = ((frame.filename, frame.lineno) for frame in reversed(traceback.extract_stack()))
    return next(place for place in places if "/torch/" not in place[0] and place[0] != __file__)


def _without_device(args: tuple, kwargs: dict, target: torch.device | None) -> tuple[tuple, dict, torch.device]:
    """Arguments of `Tensor.to` with a copy in the place of a move; where it leads."""
    tensor, *others = args
    target = kwargs.pop("device", target)
    for other in others:
        if isinstance(other, torch.dtype):
            kwargs["dtype"] = other
        elif isinstance(other, Tensor):
            target, kwargs["dtype"] = other.device, other.dtype
        elif isinstance(other, (str, torch.device)):
            target = other
    target = tensor.device if target is None else torch.device(target)
    if target.type == "meta":
        kwargs["device"] = "meta"
    kwargs.setdefault("dtype", tensor.dtype)
    kwargs["copy"] = kwargs.get("copy", False) or target.type != tensor.device.type
    return (tensor,), kwargs, target


def _placed(leaf, target: torch.device, given: list[Tensor]):
    if not isinstance(leaf, Tensor) or leaf.is_meta or any(leaf is tensor for tensor in given):
        return leaf
    if target.type == "cuda":
        return to_cuda(leaf)
    return leaf.as_subclass(Tensor) if isinstance(leaf, CudaTensor) else leaf


def _future(kind, devices=None):
    assert devices in (None, [CUDA]), devices
    return kind()


def forget_waits() -> None:
    """Of the mode that is in force, if any."""
    mode = _get_current_function_mode()
    if isinstance(mode, PretendedCuda):
        mode.waits.clear()


def on_both(function: Callable) -> list[str]:
    """Calls it with the CPU and with the pretended GPU, where its results must be there and have the same bits.

    Returns:
        `PretendedCuda.waits`.
    """
    expected = tree_leaves(function(CPU))
    with PretendedCuda() as mode:
        found = tree_leaves(function(CUDA))
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        if isinstance(one, Tensor):
            assert one.device == CUDA and torch.equal(one.as_subclass(Tensor), other)
        else:
            assert one == other
    return mode.waits


@contextlib.contextmanager
def trainer_there() -> Iterator[PretendedCuda]:
    """Within it trainers that are made and run take `cuda:0` for their device, and gloo sends what gloo can send."""
    mode, group = PretendedCuda(), dist.ProcessGroup
    patches = [
        # Its getter also joins the other ranks.
        (MeshAdaptArguments, "device", property(lambda args: args._setup_devices and CUDA)),
        (PartialState, "set_device", lambda state: setattr(state, "device", CUDA)),
        (Trainer, "_move_model_to_device", lambda trainer, model, device: move(model)),
        (group, "send", _host_only(group.send)),
        (group, "recv", _host_only(group.recv)),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        os.environ.pop("ACCELERATE_USE_CPU", None)
        for owner, name, stand_in in patches:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield stack.enter_context(mode)


def _host_only(function):
    """gloo's sends and receives take the address of memory, whatever memory that is."""

    def call(group, tensors, *args):
        assert not any(isinstance(tensor, CudaTensor) for tensor in tensors), "gloo sends host memory only"
        return function(group, tensors, *args)

    return call
