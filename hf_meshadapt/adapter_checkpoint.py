"""Adapters of a pipeline saved stage by stage as one ordinary peft adapter: `adapter_config.json` and
`adapter_model.safetensors`, which `PeftModel.from_pretrained` loads onto the base model.

Adapters are small, so that the stages' files become one, unlike a model's shards (`checkpoint`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .checkpoint_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_header

STAGE_ADAPTER = re.compile(r"adapter-stage-(\d{5})-of-(\d{5})\.safetensors")


def save_stage_adapter(adapter, names: dict[str, str], folder: Path, stage: int, num_stages: int) -> list[Path]:
    """Writes the entries of the adapter that one stage owns, for `merge_adapter`; stage 0 also the configuration.

    Call it on one replica only.

    Args:
        adapter: the `PeftModel` around this stage's model.
        names: what this stage owns, name in the adapter's file by name in the model; may be empty.
        folder: the (partial) checkpoint folder.
        stage: 0-based.
        num_stages: stages whose files `merge_adapter` will wait for.

    Returns:
        The files written into `folder`.
    """
    state = adapter.get_base_model().state_dict()
    # Cloned where peft saves both ends of a tied embedding: safetensors refuses shared memory.
    tensors = {stored: state[name].detach().cpu().clone().contiguous() for name, stored in names.items()}
    path = folder / f"adapter-stage-{stage:05d}-of-{num_stages:05d}.safetensors"
    save_file(tensors, path, {"format": "pt"})
    if stage:
        return [path]
    _save_config(adapter, folder)
    return [path, folder / ADAPTER_CONFIG]


def _save_config(adapter, folder: Path) -> None:
    """As `PeftModel.save_pretrained` does."""
    (config,) = adapter.peft_config.values()
    base = adapter.get_base_model()
    mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    trains, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(folder, auto_mapping_dict=mapping if config.task_type is None else None)
    finally:
        config.inference_mode = trains


def merge_adapter(folder: Path, stages: list[int] | None = None) -> None:
    """Makes the files that all stages wrote into one; pure filesystem.

    Args:
        folder: where `save_stage_adapter` wrote.
        stages: those whose files must be here; all by default.

    Raises:
        ValueError: a stage is missing, an entry was saved twice, or a file is cut off.
    """
    found = {tuple(map(int, match.groups())): path for match, path in _stage_files(folder)}
    counts = {num_stages for _, num_stages in found}
    if len(counts) != 1:
        raise ValueError(
            f"{folder} holds adapters of meshes with {sorted(counts) or 'no'} stages: save all of one mesh"
        )
    (num_stages,) = counts
    missing = set(range(num_stages) if stages is None else stages) - {stage for stage, _ in found}
    if missing:
        raise ValueError(
            f"{folder} lacks the adapters of stages {sorted(missing)} of {num_stages}: they did not finish saving, or "
            "their files did not reach this machine"
        )
    tensors: dict[str, torch.Tensor] = {}
    for path in found.values():
        twice = tensors.keys() & read_header(path).keys()
        if twice:
            raise ValueError(f"{path} holds {sorted(twice)[0]}, which another stage saved too: one stage owns it")
        tensors |= load_file(path)
    part = folder / f"{ADAPTER_WEIGHTS}.part"
    save_file(tensors, part, {"format": "pt"})
    os.replace(part, folder / ADAPTER_WEIGHTS)
    for path in found.values():
        path.unlink()


def _stage_files(folder: Path) -> list[tuple[re.Match, Path]]:
    matches = ((STAGE_ADAPTER.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return [(match, path) for match, path in matches if match]
