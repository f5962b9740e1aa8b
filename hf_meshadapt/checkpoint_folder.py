"""Checkpoint folders that are whole or absent: written aside, moved into place in one rename, checked before use.

Pure filesystem code (no torch). A checkpoint is an ordinary Hugging Face folder plus `mesh_state/`:

    config.json  model-0000i-of-0000N.safetensors  model.safetensors.index.json  ...
    mesh_state/optimizer-stage-0000i.safetensors + .json   optimizer state by parameter name, one pair per stage
    mesh_state/rank-0000i.safetensors + .json              random number generators, scheduler, extras
    mesh_state/sync-0000i.safetensors + .json              error feedback, outer model, weights of replicas that step apart
    mesh_state/mesh.json                                   mesh shape, step, versions, files; written last

Where adapters are trained, `adapter_config.json` and `adapter_model.safetensors` stand in place of config and weights.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
from pathlib import Path

import hf_meshadapt

logger = logging.getLogger(__name__)

MESH_STATE = "mesh_state"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TRAINER_STATE = "trainer_state.json"  # transformers' name
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names
MESH_FORMAT = 1
PARTIAL_PREFIX = ".partial-"
REPLACED_PREFIX = ".replaced-"
TOKEN_PREFIX = ".shared-"  # by which ranks find out whether they share a filesystem
# The limit that the safetensors library itself sets; it keeps a corrupt length from asking for gigabytes.
MAX_HEADER_BYTES = 100_000_000
NUM_NAMES_SHOWN = 8


def some_names(names) -> str:
    """Names for an error message, the first few of them when there are many."""
    names = sorted(names)
    more = f" and {len(names) - NUM_NAMES_SHOWN} more" if len(names) > NUM_NAMES_SHOWN else ""
    return ", ".join(names[:NUM_NAMES_SHOWN]) + more


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path):
    """Parses a JSON file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not JSON; names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): the file is damaged, use another checkpoint") from error


def read_header(path: Path) -> dict[str, dict]:
    """Tensor entries (`dtype`, `shape`, `data_offsets` in bytes) of a safetensors file, by name; reads no tensor.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not safetensors, or is not as long as its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path} ({size} bytes) is cut off or is not safetensors: use another checkpoint")
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError as error:
            raise ValueError(f"{path} has a damaged safetensors header ({error}): use another checkpoint") from error
    header.pop("__metadata__", None)
    expected = 8 + header_bytes + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        raise ValueError(f"{path} has {size} bytes where its header says {expected}: use another checkpoint")
    return header


def weight_map(folder: Path) -> dict[str, Path]:
    """File that holds each stored weight, from the index, or from the single `model.safetensors`, or an adapter's.

    Raises:
        FileNotFoundError: the folder has none of them.
        ValueError: the index is damaged or names a file outside the folder.
    """
    if (folder / INDEX_NAME).exists():
        files = read_json(folder / INDEX_NAME)["weight_map"]
        strange = sorted({name for name in files.values() if Path(name).name != name})
        if strange:
            raise ValueError(f"{folder / INDEX_NAME} names shards outside its folder: {strange}")
        return {weight: folder / name for weight, name in files.items()}
    for name in (SINGLE_NAME, ADAPTER_WEIGHTS):
        if (folder / name).exists():
            return dict.fromkeys(read_header(folder / name), folder / name)
    raise FileNotFoundError(
        f"{folder} has no weights: none of {INDEX_NAME}, {SINGLE_NAME}, {ADAPTER_WEIGHTS} is there"
    )


def save_mesh_info(folder: Path, mesh: dict, step: int) -> Path:
    """Writes `mesh_state/mesh.json`; call it last: its presence says that the rest was written, and it lists that.

    Args:
        folder: the (partial) checkpoint folder.
        mesh: JSON-able shape of the mesh, such as `dataclasses.asdict(MeshConfig(...))`.
        step: optimizer steps taken.
    """
    packages = ("torch", "transformers", "accelerate", "safetensors")
    versions = {name: importlib.metadata.version(name) for name in packages}
    versions["hf_meshadapt"] = hf_meshadapt.__version__
    path = folder / MESH_STATE / "mesh.json"
    path.parent.mkdir(exist_ok=True)
    files = [file.relative_to(folder).as_posix() for file in _files_to_resume(folder)]
    write_json(path, {"format": MESH_FORMAT, "step": step, "mesh": mesh, "versions": versions, "files": files})
    return path


def _files_to_resume(folder: Path) -> list[Path]:
    """What a run reads to resume, of what is there: weights, the trainer's state, and what ranks and stages keep."""
    kept = [path for path in (folder / MESH_STATE).glob("*-*") if path.suffix in (".json", ".safetensors")]
    single = [folder / name for name in (INDEX_NAME, TRAINER_STATE) if (folder / name).exists()]
    return sorted({*weight_map(folder).values(), *single, *kept})


def _listed(folder: Path) -> list[Path]:
    """The files that made it whole when it was written, on this machine; none where an older version wrote it."""
    files = load_mesh_info(folder).get("files", [])
    if not isinstance(files, list) or any(str(Path(str(name)).parent) not in (".", MESH_STATE) for name in files):
        raise ValueError(f"{folder / MESH_STATE / 'mesh.json'} is damaged: files={files!r}; use another checkpoint")
    return [folder / name for name in files]


def load_mesh_info(folder: Path) -> dict:
    """Contents of `mesh.json`: `format`, `step`, `mesh`, `versions`, and `files` but in older ones.

    Raises:
        FileNotFoundError: the checkpoint has none, so a mesh did not write it or did not finish.
        ValueError: damaged, or of a newer format than this version reads.
    """
    path = folder / MESH_STATE / "mesh.json"
    info = read_json(path)
    if not isinstance(info, dict) or not isinstance(info.get("format"), int):
        raise ValueError(f"{path} is damaged: it has no format number; use another checkpoint")
    if info["format"] > MESH_FORMAT:
        raise ValueError(f"{path} has format {info['format']}, this version reads up to {MESH_FORMAT}: update it")
    return info


def open_partial(final: Path) -> Path:
    """Makes an empty folder `.partial-<name>` beside `final`, to be filled and then committed.

    One process per folder calls it. Ranks without a shared filesystem give each their own name
    (`final.with_name(f"{final.name}-rank{rank}")`), since several of them may still run on one machine.
    """
    partial = final.with_name(PARTIAL_PREFIX + final.name)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, final: Path) -> None:
    """Moves a filled partial folder to its final name; a crash at any point leaves the old or the new one whole.

    A crash between the two renames of a replacement leaves the old one under `.replaced-<name>`, from where
    `discard_partials` puts it back.

    Raises:
        FileNotFoundError: there is no such partial folder.
    """
    if not partial.is_dir():
        raise FileNotFoundError(f"cannot commit {final}: {partial} does not exist, open_partial makes it")
    _fsync_tree(partial)
    aside = final.with_name(REPLACED_PREFIX + final.name)
    if final.exists():
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(final, aside)
    os.rename(partial, final)
    _fsync(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _fsync_tree(folder: Path) -> None:
    # Names reach the disk with their folder: files first, then every folder from the leaves up.
    for current, _, names in os.walk(folder, topdown=False):
        for name in names:
            _fsync(Path(current, name))
        _fsync(Path(current))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard_partials(output_dir: Path) -> None:
    """Deletes what killed saves left behind, and puts back a checkpoint that a killed commit had moved aside.

    Several processes may call it at once (one per machine of a shared filesystem), while nobody saves.
    """
    for partial in output_dir.glob(f"{PARTIAL_PREFIX}*"):
        shutil.rmtree(partial, ignore_errors=True)
    for token in output_dir.glob(f"{TOKEN_PREFIX}*"):
        token.unlink(missing_ok=True)
    for aside in output_dir.glob(f"{REPLACED_PREFIX}*"):
        final = aside.with_name(aside.name.removeprefix(REPLACED_PREFIX))
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):  # another process has put it back
                os.rename(aside, final)


def checkpoint_fault(folder: Path, weights_only: bool = False) -> str | None:
    """Why a checkpoint cannot be resumed from, or None when it is whole.

    Whole is: every file that `mesh.json` lists, every shard that the index names and whatever else there is to resume
    from is there; safetensors files are as long as their own headers say, and JSON can be read to its end. (So sizes
    need no list, and `trainer_state.json` may be edited.) A machine's own filesystem has the files of its own ranks,
    and its own list.

    Args:
        weights_only: look at the weights alone.
    """
    try:
        listed = _listed(folder)
        files = weight_map(folder).values() if weights_only else [*listed, *_files_to_resume(folder)]
        for path in sorted(set(files)):
            read_json(path) if path.suffix == ".json" else read_header(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def last_whole_checkpoint(output_dir: Path) -> Path | None:
    """Newest `checkpoint-<step>` folder that is whole, or None; logs why it passes over others, removes nothing."""
    for folder in reversed(checkpoints_in(output_dir)):
        fault = checkpoint_fault(folder)
        if fault is None:
            return folder
        logger.warning("%s is not a whole checkpoint and is passed over: %s", folder, fault)
    return None


def checkpoints_in(output_dir: Path) -> list[Path]:
    """Folders `checkpoint-<step>`, oldest first, whole or not."""
    steps = {}
    for folder in output_dir.iterdir() if output_dir.is_dir() else ():
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match and folder.is_dir():
            steps[int(match[1])] = folder
    return [steps[step] for step in sorted(steps)]


def asked_checkpoint(value, output_dir: Path):
    """`resume_from_checkpoint` as `train()` may get it: "True", as a command line gives it, means the newest.

    Raises:
        ValueError: there is no folder of this name.
    """
    if value is None or isinstance(value, bool) or Path(value).is_dir():
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    found = ", ".join(folder.name for folder in checkpoints_in(output_dir)) or "no checkpoint"
    raise ValueError(f"resume_from_checkpoint={str(value)!r}: no such folder; {output_dir} has {found}")
