"""Every recipe parses into the arguments of its script, and its templates make prompts of the columns that it names."""

from __future__ import annotations

import importlib.util
import re
import string
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from trl import TrlParser

from hf_meshadapt import MeshAdaptDPOConfig, MeshAdaptSFTConfig
from hf_meshadapt.anchor.handshake import SECRET_VARIABLE, new_secret
from hf_meshadapt.evaluation.groups import DOMAINS

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").rglob("*.yaml"))
PHASES = ["1_mid_training", "2_sft", "3_preference"]


@pytest.fixture
def example(monkeypatch):
    """Imports a script of examples/ by name."""

    def load(name: str):
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


def test_there_is_one_for_every_domain_and_phase():
    assert {path.stem for path in RECIPES} == {*DOMAINS, *PHASES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_parses(path, example, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    script = re.search(r"examples/(\w+)\.py", text).group(1)
    assert f"--config {path.relative_to(ROOT)}" in text
    module = example(script)
    config = MeshAdaptDPOConfig if script == "dpo" else MeshAdaptSFTConfig
    command = ["--config", str(path), "--bf16", "false", "--use_cpu", "true", "--output_dir", str(tmp_path)]
    script_args, training_args = TrlParser((module.ScriptArguments, config)).parse_args_and_config(command)
    values = yaml.safe_load(text)
    assert (training_args.pipeline_stages, training_args.preset) == (2, "anchored")
    assert training_args.learning_rate == values["learning_rate"] and training_args.max_length == values["max_length"]
    assert script_args.dataset_name == values["dataset_name"]
    columns = text[text.index("# Columns") : text.index("\nmodel_name_or_path")]
    for name in ("prompt_template", "completion_template"):
        for _, field, _, _ in string.Formatter().parse(values.get(name, "")):
            assert field is None or re.split(r"[.\[]", field)[0] in columns


def test_templates_make_prompts_and_completions(example, tmp_path):
    sft = example("sft")
    values = yaml.safe_load((ROOT / "examples" / "recipes" / "document_qa.yaml").read_text())
    row = {
        "context": "Oaks have acorns.",
        "question": "What do oaks have?",
        "answers": {"text": ["acorns"], "answer_start": [10]},
    }
    made = sft.as_completion(row, (values["prompt_template"], values["completion_template"]), is_chat=False)
    assert made == {"prompt": "Oaks have acorns.\n\nQuestion: What do oaks have?\nAnswer:\n", "completion": "acorns"}
    chat = sft.as_completion(row, ("{question}", "{answers[text][0]}"), is_chat=True)
    assert chat["completion"] == [{"role": "assistant", "content": "acorns"}]
    (tmp_path / "train.jsonl").write_text('{"q": "a"}\n')
    options = dict(
        model_name_or_path="m", dataset_name=str(tmp_path), dataset_test_split="train", prompt_template="{q}"
    )
    with pytest.raises(ValueError, match="prompt_template and completion_template go together"):
        sft.load_splits(sft.ScriptArguments(**options), is_chat=False)


def test_the_chat_template_marks_the_assistants_tokens():
    from tests.sft import tokenizer

    words = tokenizer()
    words.chat_template = (ROOT / "examples" / "recipes" / "smollm3" / "chatml.jinja").read_text()
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    text = words.apply_chat_template(turns, tokenize=False)
    assert text == "<|im_start|>user\nw1<|im_end|>\n<|im_start|>assistant\nw2 w3<|im_end|>\n"
    prompt = words.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt)
    marked = words.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    assert sum(marked["assistant_masks"]) == len(words("w2 w3<|im_end|>")["input_ids"])


SCRIPTS = {"finetune_gsm8k": "MeshAdaptTrainer", "finetune_lora": "MeshAdaptTrainer", "sft": "MeshAdaptSFTTrainer"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_can_be_the_anchor(name, example, tmp_path, monkeypatch):
    """Which serves and does nothing else. Those of pairs have no anchor."""
    module, called = example(name), []

    class Serving:  # a trainer with nothing but what the anchor's launch may call
        def __init__(self, **given):
            assert given["args"].runs_anchor

        def train(self):
            called.append("train")

    tokenizer = SimpleNamespace(pad_token="x", chat_template=None)
    monkeypatch.setattr(module, SCRIPTS[name], Serving)
    monkeypatch.setattr(module, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda folder: tokenizer))
    monkeypatch.setattr(module, "DataCollatorForSeq2Seq", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(module, "load_splits", lambda *_, **__: ([], []))
    monkeypatch.setattr(module, "tokenize", lambda dataset, *_: dataset, raising=False)
    monkeypatch.setenv(SECRET_VARIABLE, new_secret())
    options = ["--model_name_or_path", "x", "--pipeline_stages", "2", "--use_cpu", "true", "--bf16", "false"]
    options += ["--anchor", "--circuit", "anchor", "--fast_endpoint", "127.0.0.1:29600", "--output_dir", str(tmp_path)]
    options += ["--dataset_name", "x"] if name == "sft" else []
    monkeypatch.setattr(sys, "argv", [name, *options])
    module.main()
    assert called == ["train"]
