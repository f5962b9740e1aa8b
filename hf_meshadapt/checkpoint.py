"""Weights of a pipeline saved stage by stage as one ordinary Hugging Face checkpoint, and read back in place.

Every stage writes the weights it owns through `save_pretrained`, so that transformers' own renaming and conversion
apply; `merge_index` then turns the shards of all stages into one standard sharded checkpoint that plain
`from_pretrained` loads. Optimizer and rank state: `checkpoint_state`. Folders and atomicity: `checkpoint_folder`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from hf_meshadapt.checkpoint_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX_NAME,
    SINGLE_NAME,
    read_header,
    some_names,
    weight_map,
    write_json,
)
from hf_meshadapt.pipeline.layout import ModelLayout

STAGE_SHARD = re.compile(r"model-stage-(\d{5})-of-(\d{5})-shard-(\d{5})-of-(\d{5})\.safetensors")
STANDARD_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def shard_name(stage: int, num_stages: int, shard: int = 0, num_shards: int = 1) -> str:
    """What a stage's shard is called until `merge_index` renames it."""
    return f"model-stage-{stage:05d}-of-{num_stages:05d}-shard-{shard:05d}-of-{num_shards:05d}.safetensors"


def save_stage(
    model, owned: list[str], folder: Path, stage: int, num_stages: int, max_shard_size: int | str = "50GB"
) -> list[Path]:
    """Writes the weights that one stage owns, as shards that `merge_index` later renames.

    Call it on one replica only. Stage 0 also writes what else `save_pretrained` makes (config.json,
    generation_config.json, custom code). A model chunk counts as a stage of its own under the interleaved schedule.

    Args:
        model: this stage's `PreTrainedModel`, foreign layers replaced; `model.config` is the whole model's.
        owned: state_dict names that this stage saves; every weight of the model on exactly one stage.
        folder: the (partial) checkpoint folder.
        stage: 0-based.
        num_stages: stages whose shards `merge_index` will wait for.
        max_shard_size: as for `save_pretrained`.

    Returns:
        The files written into `folder`.

    Raises:
        ValueError: nothing is owned, or an owned name is not in the state_dict.
        NotImplementedError: a quantized model, or one with adapters of its own.
    """
    _check_savable(model, owned, stage)
    state_dict = model.state_dict()
    private = folder / f".stage-{stage:05d}"
    if private.exists():
        shutil.rmtree(private)
    private.mkdir(parents=True)
    try:
        with _saving_on_every_rank(model):
            own = {name: state_dict[name] for name in owned}
            # The class's method: a part's own refuses.
            type(model).save_pretrained(model, private, state_dict=own, max_shard_size=max_shard_size)
        return _move_out(private, folder, stage, num_stages)
    finally:
        shutil.rmtree(private)


def _check_savable(model, owned: list[str], stage: int) -> None:
    if getattr(model, "hf_quantizer", None) is not None:
        raise NotImplementedError("a quantized model cannot be saved by stages: save_pretrained ignores state_dict")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise NotImplementedError("a model with adapters added by add_adapter cannot be saved by stages")
    if not owned:
        raise ValueError(f"stage {stage} owns no weights, so there is nothing to save: give it a layer")
    absent = set(owned) - set(model.state_dict())
    if absent:
        raise ValueError(f"stage {stage} is said to own weights that its model does not hold: {some_names(absent)}")


@contextmanager
def _saving_on_every_rank(model):
    # save_pretrained on a rank other than 0 of WORLD silently writes no weights.
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del model.should_save_on_this_rank


def _move_out(private: Path, folder: Path, stage: int, num_stages: int) -> list[Path]:
    shards = sorted(path.name for path in private.glob("*.safetensors"))
    if not shards:
        raise RuntimeError(f"save_pretrained wrote no weights for stage {stage} into {private}")
    targets = {name: shard_name(stage, num_stages, i, len(shards)) for i, name in enumerate(shards)}
    if stage == 0:
        others = (path.name for path in private.iterdir() if path.name not in (*targets, INDEX_NAME))
        targets.update((name, name) for name in others)
    for name, target in targets.items():
        os.replace(private / name, folder / target)
    return [folder / target for target in targets.values()]


def merge_index(folder: Path, stages: list[int] | None = None) -> list[Path]:
    """Makes the shards that all stages wrote into one standard sharded checkpoint; pure filesystem.

    Renames them to `model-0000i-of-0000N.safetensors`, writes `model.safetensors.index.json`, and removes the weights
    that an earlier save left in the folder. A single shard becomes `model.safetensors` without an index.

    Args:
        folder: where `save_stage` wrote.
        stages: those whose shards must be here; all by default. A machine with a filesystem of its own keeps the
            shards of its own stages only.

    Returns:
        The shards under their final names.

    Raises:
        ValueError: a stage or shard is missing, a weight was saved twice, or a shard is cut off.
    """
    shards = _complete_shards(folder, stages)
    owner: dict[str, Path] = {}
    total_bytes = 0
    for path in shards:
        for name, entry in read_header(path).items():
            if name in owner:
                raise ValueError(f"{name} was saved twice, in {owner[name].name} and {path.name}: one stage owns it")
            owner[name] = path
            total_bytes += entry["data_offsets"][1] - entry["data_offsets"][0]

    count = len(shards)
    final = {path: folder / f"model-{i:05d}-of-{count:05d}.safetensors" for i, path in enumerate(shards, start=1)}
    if count == 1:
        final = {shards[0]: folder / SINGLE_NAME}
    # Without an index nothing can load a mixture of old and new shards, should this process die among the renames.
    (folder / INDEX_NAME).unlink(missing_ok=True)
    for path, target in final.items():
        os.replace(path, target)
    for path in folder.iterdir():
        if STANDARD_SHARD.fullmatch(path.name) and path not in final.values():
            path.unlink()
    if count > 1:
        names = {name: final[path].name for name, path in sorted(owner.items())}
        partial = folder / f"{INDEX_NAME}.part"
        write_json(partial, {"metadata": {"total_size": total_bytes}, "weight_map": names})
        os.replace(partial, folder / INDEX_NAME)
    return list(final.values())


def install(partial: Path, folder: Path) -> None:
    """Moves finished files into a folder; at no moment do old and new weights look like one model or adapter."""
    names = {path.name for path in partial.iterdir()}
    is_adapter = ADAPTER_WEIGHTS in names
    if not is_adapter:
        (folder / INDEX_NAME).unlink(missing_ok=True)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):  # left beside a model, from_pretrained would put it on
        (folder / name).unlink(missing_ok=True)
    for path in folder.iterdir():
        # An adapter does not replace a model: it may be the very one that it belongs to.
        if not is_adapter and STANDARD_SHARD.fullmatch(path.name) and path.name not in names:
            path.unlink()
        elif path.name in names and path.is_dir():  # a tokenizer's further chat templates; os.replace wants it empty
            shutil.rmtree(path)
    for name in sorted(names, key=lambda name: name in (INDEX_NAME, ADAPTER_WEIGHTS)):
        os.replace(partial / name, folder / name)
    partial.rmdir()


def _complete_shards(folder: Path, stages: list[int] | None = None) -> list[Path]:
    """Shards of all stages in order; raises ValueError unless every stage's are all there."""
    found = {}
    for path in folder.iterdir():
        match = STAGE_SHARD.fullmatch(path.name)
        if match:
            found[tuple(int(number) for number in match.groups())] = path
    stage_counts = {num_stages for _, num_stages, _, _ in found}
    if len(stage_counts) != 1:
        held = f"shards of meshes with {sorted(stage_counts)} stages" if stage_counts else "no stage's shards"
        raise ValueError(f"{folder} holds {held}: every stage must save into one empty folder before the merge")
    (num_stages,) = stage_counts
    for stage in stages or range(num_stages):
        mine = sorted((shard, count) for s, _, shard, count in found if s == stage)
        if not mine or mine != [(shard, mine[0][1]) for shard in range(mine[0][1])]:
            raise ValueError(
                f"{folder} lacks shards of stage {stage} of {num_stages} (has {len(mine)}): that stage did not finish "
                "saving, or its files did not reach this machine"
            )
    return [found[key] for key in sorted(found)]


@torch.no_grad()
def load_stage_weights(
    model: nn.Module,
    owned: list[str],
    folder: Path,
    extra_names: dict[str, str] | None = None,
    convert: Callable[[torch.dtype], dict[str, torch.Tensor]] | None = None,
) -> None:
    """Copies a checkpoint's weights into this stage's parameters and buffers in place; reads no others.

    transformers stores some weights under other names or in another form than the model holds them (an expert by
    itself, where the model has one tensor of all). These it must read itself.

    Args:
        model: this stage's `PreTrainedModel`.
        owned: state_dict names to fill from the stored weights of the same name.
        folder: a checkpoint with an index and shards, or a single `model.safetensors`.
        extra_names: stored name by further local name: `{"lm_head.weight": "model.embed_tokens.weight"}` for the copy
            of a tied embedding on the last stage.
        convert: returns what `from_pretrained` makes of this stage in a dtype, by local name; called only where
            something is stored in another form. None where nothing can be.

    Raises:
        FileNotFoundError: the folder or a shard has no weights.
        ValueError: weights are missing from the checkpoint or the model, or differ in shape.
    """
    stored_names = {name: name for name in owned} | (extra_names or {})
    local = model.state_dict()
    absent = set(stored_names) - set(local)
    if absent:
        raise ValueError(f"this stage's model does not hold {some_names(absent)}, so {folder} cannot fill them")
    files = weight_map(folder)
    elsewhere = [name for name, stored in stored_names.items() if stored not in files]
    if elsewhere:
        sought = {stored_names[name]: local[name] for name in elsewhere}
        absent = set(sought if convert is None else _stored_form(model, sought)) - set(files)
        if absent:
            raise ValueError(
                f"{folder} lacks the weights {some_names(absent)}: it holds another architecture, or not all stages' shards"
            )
        # The widest of their types, so that nothing is rounded on the way.
        converted = convert(functools.reduce(torch.promote_types, {local[name].dtype for name in elsewhere}))
        for name in elsewhere:
            _copy(local[name], converted[name], name, folder)
            del stored_names[name]
    for path in sorted({files[stored] for stored in stored_names.values()}):
        with safe_open(path, framework="pt") as shard:
            for name, stored in stored_names.items():
                if files[stored] == path:
                    _copy(local[name], shard.get_tensor(stored), name, path)


def refuse_larger(folder: Path, layers_per_chunk: list[int], layout: ModelLayout) -> None:
    """Raises ValueError where a checkpoint has layers, or a head of its own, that this model would leave out unseen.

    Args:
        layers_per_chunk: of the mesh that wrote it.
    """
    written = sum(layers_per_chunk)
    if written != layout.num_layers:
        fault = f"{written} layers, and this model has {layout.num_layers}"
    elif layout.tied and layout.head_weight in weight_map(folder):
        fault = f"{layout.head_weight} of its own, and this model ties it to {layout.embedding_weight}"
    else:
        return
    raise ValueError(
        f"{folder} holds a model with {fault}: resume with the model that wrote it, or start anew from its weights"
    )


def _stored_form(model, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Names under which transformers stores these weights of the model, in whatever form."""
    from transformers.core_model_loading import revert_weight_conversion

    return set(revert_weight_conversion(model, {name: tensor.to("meta") for name, tensor in tensors.items()}))


def _copy(target: torch.Tensor, source: torch.Tensor, name: str, path: Path) -> None:
    # copy_ would broadcast a smaller tensor without a word.
    if target.shape != source.shape:
        raise ValueError(f"{name} has shape {tuple(target.shape)} here and {tuple(source.shape)} in {path}")
    target.copy_(source)
