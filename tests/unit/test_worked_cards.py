"""The worked cards in model_cards/ say what the records beside them say, down to the last number."""

from __future__ import annotations

import json
import re
import shlex
import struct
from pathlib import Path

import pytest

from benchmarks import worked_cards
from hf_meshadapt.card import card_of
from hf_meshadapt.checkpoint_folder import read_json, write_json
from hf_meshadapt.loss_curve import loss_points
from hf_meshadapt.run_record import RECORD_NAME, load_record
from tests.hub_cards import card_faults, numbers_in_tables, untraced
from tests.unit.test_card import ADAPTER, RECORD

CARDS = sorted(path.parent for path in worked_cards.CARDS.glob(f"*/{RECORD_NAME}"))


def check(place: Path) -> None:
    text, record, about = (place / "README.md").read_text(), load_record(place), read_json(place / "run.json")
    assert text == card_of(place) and card_faults(text) == []
    assert untraced(text, record, None) == set() and len(numbers_in_tables(text)) > 15
    assert "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in text and "runs/" not in text
    # The record is of the run that the command makes.
    words = shlex.split(about["command"])
    assert words[words.index("--max_steps") + 1] == str(record["global_step"])
    points = loss_points(record["log_history"])
    assert [step for step, _ in points["training"]] == list(range(1, record["global_step"] + 1))
    assert points["evaluation"][-1][1] == pytest.approx(about["metrics"]["loss_after"], abs=1e-3)
    for name, values in record["report"].items():
        assert about["metrics"][name] == values or name in ("tokens_per_second", "wait_share", "bytes_per_token")
    header = (place / "loss_curve.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and struct.unpack(">II", header[16:]) == (960, 540)
    machine_places = re.findall(r"/(?:home|root|work|tmp|Users)/", json.dumps(about) + text + json.dumps(record))
    assert not machine_places


@pytest.mark.parametrize("place", CARDS, ids=lambda path: path.name)
def test_a_worked_card_says_what_its_record_says(place):
    assert place.name in worked_cards.RUNS
    check(place)


def test_what_a_run_leaves_is_stored_whole(tmp_path):
    """A made-up run of an adapter, stored as those of the benchmark are."""
    folder, place = tmp_path / "out", tmp_path / "cards" / "smollm2-gsm8k-lora"
    folder.mkdir()
    losses = [{"step": step, "loss": 3.5 - step / 64, "epoch": step / 64} for step in range(1, 41)]
    record = RECORD | {
        "model": RECORD["model"] | {"base_model": None},
        "datasets": [],
        "adapter": ADAPTER,
        "log_history": [*losses, {"step": 40, "eval_loss": 2.375, "epoch": 0.625}],
    }
    write_json(folder / RECORD_NAME, record)
    write_json(folder / "adapter_config.json", {"base_model_name_or_path": "runs/models/smollm2-135m-instruct"})
    (folder / "model.safetensors").write_bytes(b"weights")
    command = "accelerate launch examples/finetune_lora.py --max_steps 40"
    metrics = {"loss_before": 3.5, "loss_after": 2.375, **record["report"]}
    worked_cards.store(folder, place, metrics, command=command, seconds=1.5)
    assert {path.name for path in place.iterdir()} == {
        *("README.md", "mesh_run.json", "loss_curve.png", "card.json", "adapter_config.json", "run.json"),
    }
    check(place)
    text = (place / "README.md").read_text()
    (place / "README.md").write_text(text.replace("1,234", "1,235"))
    with pytest.raises(AssertionError):
        check(place)


def test_runs_are_ones_that_the_examples_take(monkeypatch):
    launched = []
    monkeypatch.syspath_prepend(str(worked_cards.ROOT / "examples"))
    import demo

    monkeypatch.setattr(demo, "launch", lambda script, folder, with_anchor: launched.append((script, with_anchor)))
    monkeypatch.setattr(worked_cards, "read_json", lambda path: {})
    monkeypatch.setattr(worked_cards, "store", lambda folder, place, metrics, **about: place)
    for name, run in worked_cards.RUNS.items():
        assert worked_cards.make(name, num_steps=2).name == name
        script, with_anchor = launched[-1]
        assert script[0] == f"examples/{run.script}" and with_anchor == ("anchored" in name)
        assert script[script.index("--max_steps") + 1] == "2" and (worked_cards.ROOT / script[0]).is_file()
