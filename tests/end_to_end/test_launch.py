"""The example as a person starts it: accelerate launch, torchrun and plain python, on a tiny model saved to disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "accelerate": [
        str(BIN / "accelerate"), "launch", "--main_process_port", "0",
        "--config_file", "accelerate_configs/cpu_2x1.yaml",
    ],
    "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"],
    "python": [sys.executable],
}  # fmt: skip


@pytest.fixture(scope="module")
def model_and_data(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    words = ["[PAD]", "[EOS]", "[UNK]", *(f"w{i}" for i in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"question": f"w{i % 60} w{i % 7} w3", "answer": f"w{i % 7} w{i % 5} w{i % 3}"} for i in range(80)]
    data = folder / "data"
    data.mkdir()
    for split, part in {"train": rows[:64], "test": rows[64:]}.items():
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder / "model", data


def launch(
    launcher: str, model: Path, data: Path, folder: Path, *options: str, script: str = "finetune_gsm8k.py"
) -> dict:
    command = [
        *LAUNCHERS[launcher], f"examples/{script}", "--model_name_or_path", str(model),
        "--dataset_name", str(data), "--output_dir", str(folder), "--metrics_file", str(folder / "metrics.json"),
        "--pipeline_stages", "2", "--max_steps", "6", "--per_device_train_batch_size", "4",
        "--learning_rate", "1e-3", "--logging_steps", "2", "--save_strategy", "no", "--report_to", "none",
        "--use_cpu", *options,
    ]  # fmt: skip
    folder.mkdir()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return json.loads((folder / "metrics.json").read_text())


def test_every_launcher_gives_the_same_run(model_and_data, tmp_path):
    masked = ("--preset", "paper", "--anchor", "false", "--exact_first_token", "true")
    runs = {name: launch(name, *model_and_data, tmp_path / name, *masked) for name in LAUNCHERS}
    for name, run in runs.items():
        assert run["loss_after"] == pytest.approx(runs["python"]["loss_after"], rel=1e-6), name
        assert run["loss_after"] < run["loss_before"]
    assert runs["accelerate"]["bytes_per_token"]["pipeline"] > 0
    assert runs["python"]["bytes_per_token"] == {}  # one process sends nothing

    # What is left behind is an ordinary checkpoint: plain transformers loads it without this package.
    check = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "models = [AutoModelForCausalLM.from_pretrained(folder) for folder in sys.argv[1:]]\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = tokenizer('w1 w2 w3', return_tensors='pt')['input_ids']\n"
        "logits = [model(ids).logits for model in models]\n"
        "assert torch.equal(logits[0], logits[1]), (logits[0] - logits[1]).abs().max()\n"
        "assert 'hf_meshadapt' not in sys.modules\n"
        "print(models[0].generate(ids, max_new_tokens=3).shape)\n"
    )
    command = [sys.executable, "-c", check, str(tmp_path / "accelerate"), str(tmp_path / "python")]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120)


@pytest.mark.slow
def test_the_lora_example_leaves_an_adapter_that_peft_merges(model_and_data, tmp_path):
    run = launch("accelerate", *model_and_data, tmp_path / "lora", "--lora_r", "4", script="finetune_lora.py")
    assert run["loss_after"] < run["loss_before"]
    assert "tied" not in run["planned_bytes_per_token"]
    check = (
        "import sys\n"
        "from peft import AutoPeftModelForCausalLM\n"
        "model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1]).merge_and_unload()\n"
        "model.save_pretrained(sys.argv[2])\n"
    )
    command = [sys.executable, "-c", check, str(tmp_path / "lora"), str(tmp_path / "merged")]
    subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (tmp_path / "merged" / "model.safetensors").exists()
