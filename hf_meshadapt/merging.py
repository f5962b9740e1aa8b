"""Merges a saved adapter, or a sharded model, into one ordinary model folder; in one process, on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from .run_record import RECORD_NAME

# What a model folder holds beside weights and tokenizer that is still true of the merged model.
KEPT = (RECORD_NAME, "card.json", "generation_config.json", "chat_template.jinja")


def merge(folder: Path, out: Path, *, base_model: str | None = None, dtype: str = "auto") -> Path:
    """Loads with peft and transformers, merges, and saves to `out`, whole or not at all.

    Args:
        base_model: in place of the adapter's own `base_model_name_or_path`.
        dtype: `auto`, `float32` or `bfloat16`.

    Raises:
        ValueError: nothing to merge, or `out` exists.
        ImportError: an adapter without peft.
    """
    if out.exists():
        raise ValueError(f"{out} exists already: name a folder that is to be made")
    is_adapter = (folder / "adapter_config.json").is_file()
    if not is_adapter and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds neither an adapter nor a model: give the folder of a saved one")
    if base_model and not is_adapter:
        raise ValueError(f"--base-model={base_model!r} has no effect: {folder} holds no adapter. Leave it out")
    model = _merged_adapter(folder, base_model, dtype) if is_adapter else _load(str(folder), dtype)
    partial = out.with_name(f".partial-{out.name}")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    _keep_companions(folder, partial)
    partial.rename(out)
    return out


def _load(source: str, dtype: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype)


def _merged_adapter(folder: Path, base_model: str | None, dtype: str):
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("merging an adapter needs peft: pip install peft") from error
    source = base_model or json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    if not source:
        raise ValueError(f"{folder} does not name its base model: give it with --base-model")
    return PeftModel.from_pretrained(_load(source, dtype), folder).merge_and_unload()


def _keep_companions(folder: Path, out: Path) -> None:
    for path in folder.iterdir():
        if path.is_file() and (path.name in KEPT or path.name.startswith(("tokenizer", "special_tokens", "vocab"))):
            shutil.copy2(path, out / path.name)
