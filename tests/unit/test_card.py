"""The model card: valid whatever a run knew about itself, free of local paths, and without a number of its own."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import re

import pytest
from huggingface_hub import ModelCard

import hf_meshadapt
from hf_meshadapt.card import card_of, is_unedited, render_card, write_card
from hf_meshadapt.card_sections import argument_code
from hf_meshadapt.checkpoint_folder import write_json
from hf_meshadapt.run_record import (
    RECORD_FORMAT,
    RECORD_NAME,
    is_plain,
    load_record,
    public_class,
    told_arguments,
)
from tests.equality import COMMON
from tests.hub_cards import card_faults, numbers_in_tables, untraced

RECORD = {
    "format": RECORD_FORMAT,
    "model": {
        "base_model": "meta-llama/Llama-3.2-1B",
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "metadata": {"license": "llama3.2", "language": ["en", "de"]},
    },
    "datasets": ["openai/gsm8k"],
    "arguments": {"learning_rate": 2e-5, "max_steps": 40, "seed": 7, "lr_scheduler_type": "cosine"},
    "mesh": {
        "stages": 4, "replicas": 2, "chunks_per_rank": 1, "microbatches": 8, "schedule": "gpipe", "emulated": False,
    },
    "boundary": {
        "codec": "random_mask", "mask_ratio": 0.95, "exact_first_token": True, "predictor": "mean",
        "wire_dtype": "bfloat16", "budget": 0.0,
    },
    "device": "cpu",
    "report": {
        "tokens_per_second": 1234.5,
        "wait_share": 0.125,
        "bytes_per_token": {"pipeline": 771.25, "total": 8123.75},
        "planned_bytes_per_token": {"pipeline": 768.0, "data_parallel": 7000.0, "total": 7768.0},
        "bytes_ratio_to_dense": {"pipeline": 0.064, "data_parallel": 1.0, "total": 0.4},
        "calibration": {"passes": 3, "seconds": 1.5},
        "boundary_budgets": None,
        "prior_age_steps": 17,
    },
    "global_step": 40,
    "log_history": [
        {"step": 10, "loss": 3.5, "epoch": 0.25},
        {"step": 40, "loss": 2.125, "epoch": 1.0},
        {"step": 40, "eval_loss": 2.375, "epoch": 1.0},
    ],
    "versions": {"hf_meshadapt": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.4"},
}  # fmt: skip
EVALUATION = {
    "lm_eval": "0.4.13",
    "limit": None,
    "results": {"gsm8k_heldout": {"exact_match,strict-match": {"value": 0.21, "stderr": 0.022}}},
    "base": {"results": {"gsm8k_heldout": {"exact_match,strict-match": {"value": 0.11, "stderr": 0.017}}}},
    "samples": {"gsm8k_heldout": 319},
    "datasets": {"gsm8k_heldout": "json"},
}


def assert_valid(text: str) -> ModelCard:
    """By the Hub's rules, and huggingface_hub reads back what it wrote."""
    assert card_faults(text) == []
    card = ModelCard(text)  # strict: raises on a model-index that it cannot read
    assert card_faults(str(card)) == []
    assert card.data.library_name in ("transformers", "peft")
    return card


# What a run may know: all of it, none of it, and what no card may show.
PLACE = "/home/somebody/secret"
BASES = ("meta-llama/Llama-3.2-1B", PLACE, None, "", "~/models/x", "gpt2")
DATASETS = (["openai/gsm8k"], [PLACE], [None], [], ["openai/gsm8k", None, "./data.json"])
METADATA = ({}, {"license": "other"}, {"license": "Apache-2.0", "language": "EN"}, {"language": [None, "english"]})
ADDED = ({}, {"license": "mit", "tags": ["maths"]}, {"base_model": PLACE, "datasets": [PLACE], "model_name": PLACE})
SOURCES = list(itertools.islice(zip(*map(itertools.cycle, (BASES, DATASETS, METADATA, ADDED))), 20))


@pytest.mark.parametrize("number", range(len(SOURCES)))
def test_any_metadata_makes_a_valid_card_without_local_places(number):
    base, datasets, metadata, added = SOURCES[number]
    record = copy.deepcopy(RECORD)
    record["model"] |= {"base_model": base, "metadata": metadata}
    record["datasets"] = datasets
    evaluation = EVALUATION if number % 2 else None
    card = assert_valid(render_card(record, evaluation, added, is_adapter=number % 3 == 0))
    assert (
        "somebody" not in str(card)
        and "/home" not in str(card)
        and "data.json" not in str(card)
        and "~/" not in str(card)
    )
    named = added.get("base_model", base)  # what a user adds wins
    assert card.data.get("base_model") == (named if named in ("meta-llama/Llama-3.2-1B", "gpt2") else None)
    assert ("base_model_relation" in card.data) == (card.data.base_model is not None)
    assert (card.data.datasets is not None) == ("openai/gsm8k" in datasets and PLACE not in added.get("datasets", ()))


def test_a_run_that_has_not_begun_has_a_card_too():
    record = RECORD | {"report": None, "log_history": [], "global_step": 0, "arguments": {}}
    record["model"] = RECORD["model"] | {"architecture": "BertForMaskedLM", "base_model": None, "metadata": {}}
    text = render_card(record, has_tokenizer=False)
    assert_valid(text)
    assert "from transformers import BertForMaskedLM\n" in text and "What it sent" not in text


@pytest.mark.parametrize("is_adapter", [False, True])
def test_its_code_blocks_are_python_and_its_arguments_are_ours(is_adapter):
    from hf_meshadapt import MeshAdaptArguments

    text = render_card(RECORD, added={"repo_id": "me/x"}, is_adapter=is_adapter)
    load, arguments = re.findall(r"```python\n(.*?)```", text, re.S)
    compile(load, "load", "exec")
    made = {}
    exec(arguments, made)
    assert isinstance(made["args"], MeshAdaptArguments) and made["args"].max_steps == 40


TOLD = {
    "lr_scheduler_type": "cosine_with_restarts",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "optim_target_modules": ["attn", "mlp"],
    "accelerator_config": {"use_seedable_sampler": False},
}
ENDPOINT = "trainer7.corp.example.com:29600"


@pytest.mark.parametrize("name", ["MeshAdaptArguments", "MeshAdaptSFTConfig", "MeshAdaptDPOConfig", "Mine"])
def test_the_arguments_on_a_card_make_the_arguments_of_the_run(name, tmp_path):
    """Of their own class, which knows its fields and defaults; that of a class of the user's the nearest one here."""
    public = "MeshAdaptArguments" if name == "Mine" else name
    mine = dataclasses.make_dataclass("Mine", [("secret", str, "mine")], bases=(hf_meshadapt.MeshAdaptArguments,))
    kind = mine if name == "Mine" else getattr(hf_meshadapt, name)
    anchor = {} if name == "MeshAdaptDPOConfig" else {"anchor": True, "fast_endpoint": ENDPOINT}
    further = {"max_length": 512} if hasattr(kind, "max_length") else {}
    further |= {"packing": True, "eos_token": "<|end|>"} if hasattr(kind, "packing") else {}
    args = kind(**COMMON | TOLD | anchor | further, pipeline_stages=2, output_dir=str(tmp_path))
    told = told_arguments(args)
    assert told == json.loads(json.dumps(told)) and not {"circuit", "fast_endpoint", "secret"} & set(told)
    assert TOLD["accelerator_config"].items() <= told["accelerator_config"].items()
    assert all(told[key] == value for key, value in (TOLD | further).items() if key != "accelerator_config")
    code, made = argument_code(told, public_class(args).__name__), {}
    assert f"args = {public}(" in code and ENDPOINT not in code
    code = code.replace(f"{public}(\n", f"{public}(use_cpu=True,\n")  # which says where it ran
    exec("\n".join(code.splitlines()[1:-1]), made)
    assert told_arguments(made["args"]) == told


def test_nothing_secret_or_local_within_a_dict_is_told():
    plain = ({"a": [1, None, {"b": "c"}]}, ["x"], {"key_states": True, "tokenizer_x": 1}, "<|end|>")
    assert [is_plain(value) for value in plain] == [True, True, True, True]
    local = ({"token": "hf_x"}, {"api_key": "x"}, {"a": ["/home/me"]}, {1: 2}, [object()], [float("inf")])
    assert not any(map(is_plain, local))


def test_a_card_of_a_mesh_says_that_an_anchor_was_started_beside_it():
    assert "anchor" not in render_card(RECORD)
    report = RECORD["report"] | {"anchor": {"num_steps": 3}}
    assert "once more as the anchor, with circuit='anchor'" in render_card(RECORD | {"report": report})


ADAPTER = {
    "peft_type": "LORA",
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj", "v_proj"],
}


def test_an_adapters_card_says_of_what_it_is_one_and_how_it_was_made():
    card = assert_valid(render_card(RECORD | {"adapter": ADAPTER}, is_adapter=True))
    assert (card.data.library_name, card.data.base_model_relation) == ("peft", "adapter")
    assert {"lora", "base_model:adapter:meta-llama/Llama-3.2-1B"} <= set(card.data.tags)
    for row in ("| kind | LORA |", "| rank | 16 |", "| alpha | 32 |", "| dropout | 0.05 |"):
        assert row in card.text
    assert "| target modules | q_proj, v_proj |" in card.text and "The adapter" not in render_card(RECORD)
    assert_valid(render_card(RECORD, is_adapter=True))  # of a version that did not record it


def test_results_are_in_the_metadata_and_beside_the_base_models():
    card = assert_valid(render_card(RECORD, EVALUATION, {"repo_id": "me/maths"}))
    assert [(r.dataset_name, r.metric_value) for r in card.data.eval_results] == [("gsm8k_heldout", 0.21)]
    assert card.data.model_name == "maths"
    row = "| gsm8k_heldout | exact_match,strict-match | 319 | 0.1100 ± 0.0170 | 0.2100 ± 0.0220 |"
    assert row in str(card)
    assert "Only the first 20 examples" in render_card(RECORD, EVALUATION | {"limit": 20})
    asked = {"num_fewshot": 5, "chat_template": True, "dtype": "float32"}
    assert "Settings: 5-shot, chat template, float32." in render_card(RECORD, EVALUATION | asked)
    assert "Settings" not in render_card(RECORD, EVALUATION | {"num_fewshot": None, "dtype": "auto"})


def test_every_number_in_a_table_is_one_that_was_recorded():
    text = render_card(RECORD, EVALUATION)
    assert len(numbers_in_tables(text)) > 20 and untraced(text, RECORD, EVALUATION) == set()
    assert untraced(text.replace("| 768 |", "| 769 |"), RECORD, EVALUATION) == {769.0}
    assert "In a clone of hf_meshadapt 0.1.0:\n\n```bash\npip install . torch==2.13.0\n" in text
    assert "torch 2.13.0+cpu" in text


# The folder ----------------------------------------------------------------------------------------------------------


def make_folder(folder):
    write_json(folder / RECORD_NAME, RECORD)
    return folder


def test_a_card_remembers_what_was_added_and_draws_the_losses(tmp_path):
    folder = make_folder(tmp_path)
    write_card(folder, license="mit", repo_id="me/maths")
    write_card(folder, language="en")
    card = assert_valid((folder / "README.md").read_text())
    assert (card.data.license, card.data.language) == ("mit", ["en"])
    assert 'name = "me/maths"' in card.text and "](loss_curve.png)" in card.text
    assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob(".*"))
    with pytest.raises(ValueError, match="licence: not on the card. Known are .*license"):
        write_card(folder, licence="mit")


def test_only_results_of_this_very_model_are_on_its_card(tmp_path, caplog):
    folder = make_folder(tmp_path)
    write_json(folder / "evaluation.json", EVALUATION | {"step": 40})
    assert "0.2100" in card_of(folder)
    write_json(folder / "evaluation.json", EVALUATION | {"step": 30})
    with caplog.at_level(logging.WARNING):
        assert "0.2100" not in card_of(folder)
    assert "step 30 of this run" in caplog.text
    # As many steps of another run, in the same folder.
    write_json(folder / RECORD_NAME, RECORD | {"run": "b"})
    write_json(folder / "evaluation.json", EVALUATION | {"step": 40, "run": "b"})
    assert "0.2100" in card_of(folder)
    for other in ({"step": 40, "run": "a"}, {"step": 40}, {"run": "b"}):
        write_json(folder / "evaluation.json", EVALUATION | other)
        assert "0.2100" not in card_of(folder)
    assert "step 40 of another run" in caplog.text


def test_an_adapter_on_a_model_of_nobody_else_says_so(tmp_path, caplog):
    folder = make_folder(tmp_path)
    write_json(folder / "adapter_config.json", {})
    write_json(folder / RECORD_NAME, RECORD | {"model": RECORD["model"] | {"base_model": None}})
    card = assert_valid(write_card(folder).read_text())
    assert "no base model of the Hub" in caplog.text and card.data.base_model is None
    caplog.clear()
    assert_valid(write_card(folder, base_model="me/base").read_text())
    assert not caplog.messages


def test_an_edited_card_is_known_as_such(tmp_path):
    folder = make_folder(tmp_path)
    assert is_unedited(folder)
    path = write_card(folder)
    assert is_unedited(folder)
    path.write_text(path.read_text() + "\nMy own words.\n")
    assert not is_unedited(folder)


def test_a_folder_without_a_record_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"has no {RECORD_NAME}: give a folder"):
        load_record(tmp_path)
    (tmp_path / RECORD_NAME).write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        load_record(tmp_path)
