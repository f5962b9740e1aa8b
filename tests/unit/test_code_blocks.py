"""Every Python block of README.md and docs/ runs, on tiny models and data, for two steps. Commands: test_code_commands.py.

The names of the pages stay: the folder in which blocks run has a tiny model at `org/name`, and `load_dataset` and the Hub
are the tests' own.
"""

from __future__ import annotations

import configparser
import json
import re
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from huggingface_hub import constants

from hf_meshadapt import MeshAdaptArguments, MeshAdaptDPOConfig, MeshAdaptSFTConfig, MeshAdaptTrainer
from hf_meshadapt.evaluation import callback
from tests.code_blocks import PAGES, ROOT, Block, blocks, commands, indented
from tests.dpo import pairs
from tests.equality import Rows, collate_fixed, tiny_model
from tests.hub_client import client_constants
from tests.hub_server import serving
from tests.hub_state import Repo
from tests.sft import chats, completions, tokenizer

MODELS = ("org/name", "HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct")
DATA = {"trl-lib/ultrafeedback_binarized": pairs, "trl-lib/Capybara": chats, "json": completions}
NUM_ROWS, NUM_STEPS = 24, 2
SHORT = dict(max_steps=NUM_STEPS, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True)
SHORT |= dict(per_device_train_batch_size=4, per_device_eval_batch_size=4, save_steps=1, logging_steps=1, seed=7)
SHORTER = {
    MeshAdaptArguments: SHORT,
    **dict.fromkeys((MeshAdaptSFTConfig, MeshAdaptDPOConfig), SHORT | {"max_length": 32}),
}
SHOWN_KINDS = {"text"}  # neither code nor commands
ALL = [block for page in PAGES for block in blocks(page)]
PYTHON = list(dict.fromkeys(block.page for block in ALL if block.kind in ("python", "diff")))


@pytest.fixture
def reader(tmp_path, monkeypatch) -> Path:
    """The folder of somebody who follows a page."""
    monkeypatch.chdir(tmp_path)
    for name in MODELS:
        tiny_model("llama").save_pretrained(name)
        tokenizer().save_pretrained(name)
    for owner, options in SHORTER.items():
        monkeypatch.setattr(owner, "__init__", shortened(owner.__init__, options))

    def load_dataset(name: str, *_, split: str | None = None, **__):
        rows = DATA[name](NUM_ROWS, 1)
        return rows if split else datasets.DatasetDict(train=rows, test=DATA[name](8, 2))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(callback, "require_lm_eval", lambda: None)
    monkeypatch.setattr(callback, "run_on", lambda folder, options: {"results": {}})
    return tmp_path


def shortened(init, options: dict):
    """A constructor of arguments for two steps on the CPU, whatever else is asked for."""
    return lambda self, *args, **given: init(self, *args, **{**given, **options})


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_python_blocks_run(page, reader, monkeypatch):
    """In the order of the page, each going on where the last one ended, as a reader would type them."""
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    names = {"model": model, "gradients": gradients, "train": Rows(NUM_ROWS), "collator": collate_fixed}
    names |= {"MeshAdaptArguments": MeshAdaptArguments, "MeshAdaptTrainer": MeshAdaptTrainer}  # imported in the README
    with hub_with_checkpoint(page, reader, monkeypatch):
        for block in (one for one in blocks(page) if one.kind in ("python", "diff")):
            if block.text.startswith("# train.py"):
                run_script(block, monkeypatch)
                continue
            text = after(block.text) if block.kind == "diff" else block.text
            for name, make in (("args", make_args), ("trainer", make_trainer)):
                if re.search(rf"\b{name}\b", text) and not re.search(rf"^{name} = ", text, re.M) and name not in names:
                    names[name] = make()
            exec(compile(text, str(block), "exec"), names)
            finish(names)


def after(text: str) -> str:
    """The new side of a diff."""
    return "".join(line[1:] or "\n" for line in text.splitlines(keepends=True) if not line.startswith("-"))


def make_args() -> MeshAdaptArguments:
    return MeshAdaptArguments(output_dir="out", pipeline_stages=2)


def make_trainer() -> MeshAdaptTrainer:
    given = {"train_dataset": Rows(NUM_ROWS), "eval_dataset": Rows(8), "data_collator": collate_fixed}
    return MeshAdaptTrainer(model="org/name", args=make_args(), **given)


def finish(names: dict) -> None:
    """Trains what a block has set up and not trained, and leaves the model where the page looks for it."""
    trainer = names.get("trainer")
    if trainer is None:
        return
    if trainer.state.global_step == 0:
        trainer.train()
        trainer.save_model(trainer.args.output_dir)
    assert trainer.state.global_step == NUM_STEPS
    assert any("loss" in log for log in trainer.state.log_history)


def run_script(block: Block, monkeypatch) -> None:
    """Writes a script of the page and runs it by the first command that the page gives for it."""
    Path("train.py").write_text(block.text)
    every = [words for one in blocks(block.page) if one.kind == "bash" for words in commands(one.text)]
    words = next(words for words in every if words[:2] == ["python", "train.py"])
    monkeypatch.setattr("sys.argv", words[1:])
    finish(runpy.run_path("train.py", run_name="__main__"))


@contextmanager
def hub_with_checkpoint(page: Path, folder: Path, monkeypatch) -> Iterator[None]:
    """The tests' Hub, where the page downloads from it, with a checkpoint of step 1 to go on from."""
    if "snapshot_download" not in page.read_text():
        yield
        return
    make_trainer().train()
    checkpoint = Path("out/checkpoint-1")
    files = {str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*") if file.is_file()}
    with serving() as hub:
        hub.repos["me/llama-gsm8k"] = repo = Repo(private=False)
        repo.commit("main", {f"last-checkpoint/{name}": data for name, data in files.items()}, "a checkpoint")
        for name, value in client_constants(hub.url, folder / "home").items():
            monkeypatch.setattr(constants, name, value)
        yield


@pytest.mark.parametrize("block", [one for one in ALL if one.kind not in ("bash", "python")], ids=str)
def test_other_blocks(block):
    match block.kind:
        case "diff":
            assert compile(after(block.text), str(block), "exec")
        case "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())
        case "yaml":  # the launch file, with the comments left out
            shipped = yaml.safe_load((ROOT / "accelerate_configs" / "two_machines_2x1.yaml").read_text())
            assert yaml.safe_load(block.text) == shipped
        case "ini":
            parser = configparser.ConfigParser()
            parser.optionxform = str
            parser.read_string(block.text)
            assert set(parser["Interface"]) == {"Address", "ListenPort", "PrivateKey"}
            assert set(parser["Peer"]) == {"PublicKey", "AllowedIPs", "Endpoint", "PersistentKeepalive"}
        case kind:
            assert kind in SHOWN_KINDS, f"{block}: no check for blocks of this kind"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_only_formulas_are_set_off_by_spaces(page):
    code = re.compile(
        r"^\s*(import|from|def|if|for|with|return|meshadapt|accelerate|python|pip|make|torchrun) |\w\.\w+\(", re.M
    )
    for text in indented(page):
        assert not code.search(text), f"{page.name}: give this block a fence and a kind\n{text}"


def headings(page: Path) -> set[str]:
    """What links name the headings of a page by."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not heading or heading in headings(target), f"{page.name}: {link}"
