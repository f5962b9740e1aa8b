"""examples/sft.py and dpo.py as a person runs them, in this process: from a model's folder, and back to one."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.dpo import pairs
from tests.equality import tiny_model
from tests.sft import chats, completions, tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def model(tmp_path) -> Path:
    tiny_model("llama_tied").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run_example(monkeypatch, folder: Path, *options: str, script: str = "sft.py") -> dict:
    common = [
        "--use_cpu",
        "--report_to",
        "none",
        "--save_strategy",
        "no",
        "--disable_tqdm",
        "true",
        "--max_length",
        "32",
    ]
    command = [
        script,
        "--output_dir",
        str(folder),
        "--metrics_file",
        str(folder / "metrics.json"),
        *common,
        *options,
    ]
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return json.loads((folder / "metrics.json").read_text())


@pytest.mark.parametrize("options", [["--assistant_only_loss"], ["--packing"]], ids=["assistant", "packed"])
def test_two_steps_on_chats(model, tmp_path, monkeypatch, options):
    data = tmp_path / "data"
    chats(24, 1).to_json(data / "train.jsonl")
    chats(8, 2).to_json(data / "test.jsonl")
    mesh = ["--pipeline_stages", "2", "--preset", "dense", "--max_steps", "2", "--learning_rate", "1e-2"]
    metrics = run_example(
        monkeypatch, tmp_path / "out", "--model_name_or_path", str(model), "--dataset_name", str(data), *mesh, *options
    )
    assert metrics["loss_after"] < metrics["loss_before"]
    assert metrics["planned_bytes_per_token"]["pipeline"] > 0
    trained, chat = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    ids = chat.apply_chat_template(
        [{"role": "user", "content": "w1 w2"}], add_generation_prompt=True, return_tensors="pt"
    )
    assert trained.generate(**ids, max_new_tokens=2, min_new_tokens=2).shape[1] == ids["input_ids"].shape[1] + 2


def test_a_recipe_file_with_templates(model, tmp_path, monkeypatch):
    data, recipe = tmp_path / "data", tmp_path / "recipe.yaml"
    rows = completions(40, 1).rename_columns({"prompt": "question", "completion": "answer"})
    rows.to_json(data / "train.jsonl")
    recipe.write_text(
        f"model_name_or_path: {model}\ndataset_name: {data}\n"
        'dataset_train_split: "train[:80%]"\ndataset_test_split: "train[80%:]"\n'
        'prompt_template: "w1 {question}"\ncompletion_template: "{answer}"\n'
        "pipeline_stages: 2\npreset: dense\nmax_steps: 50\nlearning_rate: 1.0e-2\n"
    )
    # What the command line says goes before the file.
    metrics = run_example(monkeypatch, tmp_path / "out", "--config", str(recipe), "--max_steps", "2")
    assert metrics["loss_after"] < metrics["loss_before"]
    record = json.loads((tmp_path / "out" / "mesh_run.json").read_text())
    assert record["global_step"] == 2 and record["arguments"]["learning_rate"] == 1e-2


def test_two_steps_on_pairs(model, tmp_path, monkeypatch):
    data = tmp_path / "data"
    pairs(16, 1).to_json(data / "train.jsonl")
    pairs(6, 2).to_json(data / "test.jsonl")
    options = ["--model_name_or_path", str(model), "--dataset_name", str(data), "--num_eval_rows", "4"]
    mesh = ["--pipeline_stages", "2", "--preset", "dense", "--max_steps", "2", "--learning_rate", "1e-2"]
    metrics = run_example(monkeypatch, tmp_path / "out", *options, *mesh, script="dpo.py")
    assert metrics["loss_before"] == pytest.approx(0.6931, abs=1e-2)  # log 2: the reference is the model itself
    assert metrics["loss_after"] != metrics["loss_before"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
