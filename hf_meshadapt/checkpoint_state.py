"""Training state beside the weights: optimizer state by parameter name, and each rank's generators and extras.

Keyed by name, the optimizer state of one mesh can be resumed by another: a stage reads the entries of its own
parameters from whatever files there are. Tensors are stored as safetensors and the rest as JSON: nothing is unpickled.
All functions take the checkpoint folder and keep to `mesh_state/` in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_meshadapt.checkpoint_folder import MESH_STATE, read_json, some_names, write_json

UNSAVED_OPTIONS = ("params", "param_names")


def optimizer_state_by_name(optimizer, named_parameters) -> tuple[dict[str, torch.Tensor], dict]:
    """State of an optimizer keyed by parameter name.

    Args:
        optimizer: the torch optimizer itself (`AcceleratedOptimizer.optimizer`, not the wrapper).
        named_parameters: (name, parameter) pairs to save. Parameters of the optimizer without a name here are left
            out: the last stage leaves its copy of a tied embedding to the first.

    Returns:
        tensors: `{parameter name}/{state key}` to the state tensor itself, not a copy.
        scalars: JSON-able; `groups` (parameter `names` and `options` of every group) and `state` (per parameter the
            keys of its `tensors` and its other `values`).

    Raises:
        NotImplementedError: state or options that are neither tensors nor JSON.
    """
    name_of = {parameter: name for name, parameter in named_parameters}
    tensors, groups, state = {}, [], {}
    for group in optimizer.param_groups:
        named = [(name_of[parameter], parameter) for parameter in group["params"] if parameter in name_of]
        options = {key: value for key, value in group.items() if key not in UNSAVED_OPTIONS}
        groups.append(
            {
                "names": [name for name, _ in named],
                "options": {key: _plain(value, f"option {key}", optimizer) for key, value in options.items()},
            }
        )
        for name, parameter in named:
            entries = optimizer.state.get(parameter, {})
            held = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
            rest = {key: value for key, value in entries.items() if key not in held}
            tensors.update((f"{name}/{key}", value) for key, value in held.items())
            values = {key: _plain(value, f"state {key} of {name}", optimizer) for key, value in rest.items()}
            state[name] = {"tensors": list(held), "values": values}
    return tensors, {"groups": groups, "state": state}


def _plain(value, what: str, optimizer):
    """A JSON-able copy of an option or state value; a one-element tensor (a capturable lr) becomes its number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item, what, optimizer) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise NotImplementedError(
        f"{what} of {type(optimizer).__name__} is a {type(value).__name__}, which a checkpoint cannot hold: "
        "use an optimizer whose state is tensors and numbers, or save_only_model=True"
    )


@torch.no_grad()
def load_optimizer_state(optimizer, named_parameters, tensors: dict[str, torch.Tensor], scalars: dict) -> None:
    """Puts saved state and group options into an optimizer; exact, no dtype is changed.

    Args:
        optimizer: the torch optimizer itself, its groups already made. Group options are matched by the parameters'
            names, so that another mesh shape may distribute the parameters differently.
        named_parameters: (name, parameter) pairs that name what was saved (the copy of a tied embedding by the
            embedding's name). Parameters of the optimizer without a name here are left alone, as saving leaves them out.
        tensors, scalars: as `optimizer_state_by_name` or `load_optimizer_files` returned them.

    Raises:
        ValueError: a named parameter has no saved state, or one group's parameters had different options.
    """
    name_of = {parameter: name for name, parameter in named_parameters}
    options_of = {name: group["options"] for group in scalars["groups"] for name in group["names"]}
    for i, group in enumerate(optimizer.param_groups):
        named = [(name_of[parameter], parameter) for parameter in group["params"] if parameter in name_of]
        names = [name for name, _ in named]
        missing = [name for name in names if name not in options_of or name not in scalars["state"]]
        if missing:
            raise ValueError(f"no saved optimizer state for {some_names(missing)}")
        if any(options_of[name] != options_of[names[0]] for name in names):
            raise ValueError(f"optimizer group {i} joins parameters that were saved with different options (lr, ...)")
        if names:
            _set_options(group, options_of[names[0]])
        for name, parameter in named:
            saved = scalars["state"][name]
            entries = {key: _placed(key, tensors[f"{name}/{key}"], group, parameter) for key in saved["tensors"]}
            optimizer.state[parameter] = entries | saved["values"]


def _set_options(group: dict, options: dict) -> None:
    for key, value in options.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(present, tuple) else value


def load_scheduler_state(scheduler, state: dict, optimizer) -> None:
    """Puts saved state into a scheduler, and its learning rates into those groups of the optimizer that train nothing
    here: no parameter's name brings them theirs, and schedulers go on from what a group has."""
    scheduler.load_state_dict(state)
    for group, rate in zip(optimizer.param_groups, state.get("_last_lr", ())):
        if not any(parameter.requires_grad for parameter in group["params"]):
            _set_options(group, {"lr": rate})


def _placed(key: str, value: torch.Tensor, group: dict, parameter: torch.Tensor) -> torch.Tensor:
    # torch keeps step counters on the CPU unless the optimizer is fused or capturable, and so do we. Cloned, so that
    # stepping never writes into the caller's (or another optimizer's) tensors.
    on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value.detach().to("cpu" if on_cpu else parameter.device, copy=True)


def save_optimizer_files(folder: Path, stage: int, tensors: dict[str, torch.Tensor], scalars: dict) -> list[Path]:
    """Writes one stage's optimizer state; call it on one replica. Returns the files written."""
    return save_pair(_optimizer_stem(folder, stage), tensors, scalars)


def load_optimizer_files(folder: Path, names) -> tuple[dict[str, torch.Tensor], dict]:
    """Optimizer state of the named parameters, from whatever stages' files the checkpoint has; reads no other tensors.

    Returns:
        tensors, scalars: as `load_optimizer_state` takes them, tensors on the CPU.

    Raises:
        ValueError: the checkpoint has no optimizer state, or parameters that no file holds, named.
    """
    wanted = set(names)
    files = sorted((folder / MESH_STATE).glob("optimizer-stage-*.json"))
    if not files:
        raise ValueError(
            f"{folder.name} has no optimizer state (was it saved with save_only_model?): resume from another checkpoint, "
            "or start anew from its weights as the model"
        )
    tensors, groups, state = {}, [], {}
    for path in files:
        scalars = read_json(path)
        mine = {name: saved for name, saved in scalars["state"].items() if name in wanted}
        groups += [group | {"names": [n for n in group["names"] if n in wanted]} for group in scalars["groups"]]
        state.update(mine)
        keys = [f"{name}/{key}" for name, saved in mine.items() for key in saved["tensors"]]
        with safe_open(path.with_suffix(".safetensors"), framework="pt") as stored:
            tensors.update((key, stored.get_tensor(key)) for key in keys)
    missing = wanted - set(state)
    if missing:
        raise ValueError(
            f"{folder / MESH_STATE} has no optimizer state for {some_names(missing)}: the checkpoint was written with "
            "other trainable parameters; resume with the same ones, or start anew from its weights as the model"
        )
    return tensors, {"groups": [group for group in groups if group["names"]], "state": state}


def _optimizer_stem(folder: Path, stage: int) -> Path:
    return folder / MESH_STATE / f"optimizer-stage-{stage:05d}"


def capture_rng() -> dict:
    """States of the python, numpy, torch CPU and (where one is in use) current CUDA device's generators."""
    state = {"python": random.getstate(), "torch": torch.random.get_rng_state()}
    algorithm, keys, *rest = np.random.get_state()
    state["numpy"] = (algorithm, keys.tolist(), *rest)
    if torch.cuda.is_initialized():  # a run on the CPU of a machine with GPUs shall not take memory on one
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict) -> None:
    """Sets every generator that `capture_rng` recorded; a CUDA state is left alone on a machine without CUDA."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@dataclass(frozen=True)
class RankState:
    """What one rank keeps for itself.

    Attributes:
        rng: as `capture_rng` returns it.
        scheduler: `lr_scheduler.state_dict()`.
        tensors: further tensors by name (boundary fills, error feedback).
        extra: further values: nested dicts, lists, tuples of numbers, strings, None and tensors.
    """

    rng: dict
    scheduler: dict
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: dict = field(default_factory=dict)


def save_rank_state(
    folder: Path,
    rank: int,
    *,
    rng: dict,
    scheduler: dict,
    tensors: dict[str, torch.Tensor] | None = None,
    extra: dict | None = None,
) -> list[Path]:
    """Writes one rank's `RankState`; returns the files written.

    Raises:
        NotImplementedError: a value that is neither a tensor nor plain data; says where it is.
    """
    stored = {f"tensors/{name}": tensor for name, tensor in (tensors or {}).items()}
    tree = {"rng": rng, "scheduler": scheduler, "extra": extra or {}}
    return save_pair(_rank_stem(folder, rank), stored, _pack(tree, "tree", stored))


def load_rank_state(folder: Path, rank: int) -> RankState:
    """One rank's state, tensors on the CPU.

    Raises:
        FileNotFoundError: the checkpoint was written by fewer ranks, or another machine has this one's.
    """
    stem = _rank_stem(folder, rank)
    if not stem.with_suffix(".json").exists():
        raise FileNotFoundError(
            f"{folder / MESH_STATE} has no state of rank {rank}: fewer ranks wrote it, or it was not copied here"
        )
    stored = load_file(stem.with_suffix(".safetensors"))
    tree = _unpack(read_json(stem.with_suffix(".json")), stored)
    tensors = {name.removeprefix("tensors/"): tensor for name, tensor in stored.items() if name.startswith("tensors/")}
    return RankState(tensors=tensors, **tree)


def _rank_stem(folder: Path, rank: int) -> Path:
    return folder / MESH_STATE / f"rank-{rank:05d}"


def _pack(value, where: str, tensors: dict[str, torch.Tensor]):
    """JSON form of nested plain data; its tensors go into `tensors` under the path that leads to them."""
    if isinstance(value, torch.Tensor):
        tensors[where] = value
        return {"tensor": where}
    if isinstance(value, dict):
        # Pairs, since JSON would turn keys that are numbers into strings.
        return {"dict": [[_key(k, where), _pack(v, f"{where}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [_pack(item, f"{where}/{i}", tensors) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise NotImplementedError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold: store plain data")


def _key(key, where: str):
    if isinstance(key, (bool, int, float, str)):
        return key
    raise NotImplementedError(f"{where} has a key of type {type(key).__name__}, which a checkpoint cannot hold")


def _unpack(value, tensors: dict[str, torch.Tensor]):
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_unpack(item, tensors) for item in content)
    return {key: _unpack(item, tensors) for key, item in content}


def save_pair(stem: Path, tensors: dict[str, torch.Tensor], values) -> list[Path]:
    """Writes `<stem>.safetensors` and `<stem>.json` (plain data); returns both."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stored, storages = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory, as quantised optimizers' code books do.
        stored[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor
        storages.add(stored[name].untyped_storage().data_ptr())
    paths = [stem.with_suffix(".safetensors"), stem.with_suffix(".json")]
    save_file(stored, paths[0])
    write_json(paths[1], values)
    return paths
