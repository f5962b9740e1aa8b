"""What the trainer saves and loads: plain models, machines with disks of their own, Trainer's options, models by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_meshadapt import checkpoint_folder
from hf_meshadapt.run_record import load_record
from tests.equality import VOCAB, mesh_trainer, tiny_model
from tests.runs import (
    DENSE,
    INTERLEAVED,
    MASKED,
    ROWS,
    TWO_STAGES,
    assert_plain_load,
    assert_same_run,
    fork,
    outcome,
    train,
)

# The saved model -----------------------------------------------------------------------------------------------------

CHAT_TEMPLATES = {"default": "{% for m in messages %}{{ m.content }} {% endfor %}", "tool_use": "{{ tools }}"}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="w0", bos_token="w1", eos_token="w2", chat_template=CHAT_TEMPLATES
    )


def train_and_save(rank: int, *, folder: Path, kind: str, **options) -> dict:
    trainer = mesh_trainer(
        tiny_model(kind), ROWS, str(folder / "run"), **DENSE | options, trainer={"processing_class": tiny_tokenizer()}
    )
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    return outcome(trainer)


def shards(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if ".safetensors" in path.name}


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2"])
def test_a_saved_model_is_plain_and_leaves_nothing_of_an_older_one(tmp_path, kind):
    saved, options = tmp_path / "saved", dict(folder=tmp_path, kind=kind, pipeline_stages=2)
    fork(train_and_save, 1, max_steps=1, **options)
    assert shards(saved) == {"model.safetensors"}

    ranks = fork(train_and_save, 4, max_steps=2, **options)
    assert shards(saved) == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)} | {"model.safetensors.index.json"}
    model = assert_plain_load(saved, ranks[:2])
    headers = [checkpoint_folder.read_header(path) for path in saved.glob("*.safetensors")]
    names = [name for header in headers for name in header]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert json.loads((saved / "config.json").read_text())["architectures"] == [type(tiny_model(kind)).__name__]
    assert model.generation_config.bos_token_id == 1 and (saved / "generation_config.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.apply_chat_template([{"content": "w5"}], tokenize=False) == "w5 "
    assert not list(saved.glob(".*"))

    alone = fork(train_and_save, 1, max_steps=1, **options)
    assert shards(saved) == {"model.safetensors"}
    assert_plain_load(saved, alone)


# No shared filesystem ------------------------------------------------------------------------------------------------

MACHINES = {  # ranks, ranks per machine, model, stages
    "2x1, a machine each": (2, 1, "llama_tied", 2),
    "2x2, a machine each": (4, 1, "gpt2", 2),
    "4x1 on two machines": (4, 2, "llama_tied", 4),
    "2x2 on two machines": (4, 2, "llama", 2),
}


EMBEDDINGS = {"model.embed_tokens.weight", "transformer.wte.weight"}  # a tied head's machine keeps them too


@pytest.mark.parametrize("place", MACHINES)
def test_without_a_shared_filesystem_weights_reach_rank_0_and_all_can_resume(tmp_path, place):
    num_ranks, machine_size, kind, stages = MACHINES[place]
    machines = [tmp_path / f"machine-{i}" for i in range(num_ranks // machine_size)]
    options = dict(
        folder=tmp_path, kind=kind, machine_size=machine_size, pipeline_stages=stages, dropout=0.2, **MASKED
    )
    whole = fork(train, num_ranks, save_at=(2, 4, 7), save_total_limit=2, **options)

    assert_plain_load(machines[0] / "checkpoint-7", whole[:stages])
    for i, machine in enumerate(machines):
        assert {path.name for path in machine.iterdir()} == {"checkpoint-4", "checkpoint-7"}
        mine = whole[i * machine_size : (i + 1) * machine_size] if i else whole
        stored = set(checkpoint_folder.weight_map(machine / "checkpoint-7"))
        assert stored - EMBEDDINGS <= {name for run in mine for name in run["weights"]}

    records = [load_record(folder) for machine in machines for folder in machine.iterdir()]
    assert len({record["run"] for record in records}) == 1  # of which each machine writes its own

    # The last machine died before it had the newest one.
    shutil.rmtree(machines[-1] / "checkpoint-7")
    assert_same_run(fork(train, num_ranks, resume=True, **options), whole)


def test_save_on_each_node_streams_nothing(tmp_path):
    options = dict(kind="llama", save_at=(1, 2), machine_size=1, pipeline_stages=2, **DENSE | {"max_steps": 3})
    streamed = fork(train, 2, folder=tmp_path / "streamed", **options)
    kept = fork(train, 2, folder=tmp_path / "kept", save_on_each_node=True, **options)
    stages = [tmp_path / "kept" / f"machine-{rank}" / "checkpoint-2" / "model.safetensors" for rank in (0, 1)]
    saved_bytes = streamed[1]["save_bytes"] - kept[1]["save_bytes"]
    assert saved_bytes == pytest.approx(2 * stages[1].stat().st_size, rel=0.05)
    assert kept[1]["save_bytes"] < 0.1 * stages[1].stat().st_size
    for path, run in zip(stages, kept):
        assert set(checkpoint_folder.read_header(path)) == set(run["weights"])
    resumed = fork(train, 2, folder=tmp_path / "kept", save_on_each_node=True, resume=True, **options)
    assert_same_run(resumed, kept)


def save_apart(rank: int, *, folder: Path, **options) -> dict:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    trainer = mesh_trainer(tiny_model("llama_tied"), ROWS, str(folder / f"machine-{rank}"), **DENSE, **options)
    trainer.save_model()
    return outcome(trainer)


def test_a_final_model_is_left_on_rank_0s_machine_only(tmp_path):
    ranks = fork(save_apart, 4, folder=tmp_path, pipeline_stages=2)
    assert_plain_load(tmp_path / "machine-0", ranks[:2])
    assert [list((tmp_path / f"machine-{rank}").iterdir()) for rank in (1, 2, 3)] == [[], [], []]


# Trainer's own options -----------------------------------------------------------------------------------------------


def train_past_the_best(rank: int, *, folder: Path, **options) -> dict:
    trainer = mesh_trainer(tiny_model("llama_tied"), ROWS, str(folder), **DENSE | options)
    trainer.train()
    best = {"step": trainer.state.best_global_step, "loss": trainer.state.best_metric}
    return outcome(trainer) | {"best": best, "eval_loss_after": trainer.evaluate()["eval_loss"]}


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_the_best_model_is_loaded_at_the_end_and_old_checkpoints_are_deleted(tmp_path, num_ranks):
    every_step = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    worst = dict(max_steps=4, greater_is_better=True)  # so that it is not the last one
    options = dict(pipeline_stages=2, load_best_model_at_end=True, save_total_limit=2, **every_step, **worst)
    ranks = fork(train_past_the_best, num_ranks, folder=tmp_path, **options)
    step, loss = ranks[0]["best"]["step"], ranks[0]["best"]["loss"]
    assert step < 4
    assert all(run["best"] == {"step": step, "loss": loss} and run["eval_loss_after"] == loss for run in ranks)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}", "checkpoint-4"}
    assert_plain_load(tmp_path / f"checkpoint-{step}", ranks)


def test_save_only_model_cannot_be_resumed_and_says_so(tmp_path):
    options = dict(folder=tmp_path / "run", kind="llama", pipeline_stages=2, **DENSE | {"max_steps": 2})
    ranks = fork(train, 2, save_at=(2,), save_only_model=True, **options)
    assert_plain_load(tmp_path / "run" / "checkpoint-2", ranks)
    with pytest.raises(AssertionError, match="ValueError.*has no optimizer state .*save_only_model"):
        fork(train, 2, resume=True, **options)


# A model given by name -----------------------------------------------------------------------------------------------


def train_by_name_and_by_instance(rank: int, *, folder: Path, source: str, **options) -> list[dict]:
    from_instance = AutoModelForCausalLM.from_pretrained(source)
    results = []
    for model in (source, from_instance):
        trainer = mesh_trainer(model, ROWS, str(folder), **options)
        check_only_own_parts(trainer.engine)
        trainer.train()
        results.append(outcome(trainer))
    return results


def check_only_own_parts(engine) -> None:
    parts, layout = engine.parts, engine.parts.layout
    mine = {index for stage in parts.stages.values() for index in stage.span}
    held = [name for name, _ in parts.model.named_parameters()]
    for index in range(layout.num_layers):
        assert any(name.startswith(f"{layout.layers}.{index}.") for name in held) == (index in mine)
    assert (layout.embedding_weight in held) == (0 in parts.stages)
    assert (layout.head_weight in held) == (parts.num_chunks - 1 in parts.stages)
    assert not any(parameter.is_meta for parameter in parts.model.parameters())


NAMED = {
    "tied": (3, "llama_tied", dict(pipeline_stages=3)),
    "untied": (2, "llama", TWO_STAGES),
    "gpt2": (2, "gpt2", TWO_STAGES),
    "interleaved": (2, "llama_tied", INTERLEAVED),
    "emulated": (1, "llama_tied", TWO_STAGES),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_model_by_name_loads_only_its_own_stage_and_trains_the_same(tmp_path, case):
    num_ranks, kind, options = NAMED[case]
    tiny_model(kind, dropout=0.2).save_pretrained(tmp_path / "model")
    source = str(tmp_path / "model")
    runs = fork(train_by_name_and_by_instance, num_ranks, folder=tmp_path / "run", source=source, **MASKED | options)
    assert_same_run(*zip(*runs))
