"""Adapters over stages: equal to peft under plain Trainer, whatever the mesh; saved and resumed as one adapter."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_meshadapt.calibration import boundary_state
from tests.adapters import RUN, SEED, adapted_model, lora, train_over_mesh, train_plain
from tests.equality import mesh_trainer, tiny_model
from tests.launch import run_ranks
from tests.runs import INTERLEAVED, SaveAt

ROWS = 4
QV = {"target_modules": ["q_proj", "v_proj"]}

# Model, layers, stages, replicas, LoraConfig. In "middle" the first and the last stage have nothing to train, in "conv1d"
# the first, of two replicas.
CASES = {
    "2x1-tied": ("llama_tied", 4, 2, 1, QV),
    "2x2-conv1d": (
        "gpt2",
        4,
        2,
        2,
        {"target_modules": ["c_proj"], "fan_in_fan_out": True, "bias": "lora_only", "layers_to_transform": [3]},
    ),
    "3x1-middle-dora": ("llama", 3, 3, 1, {**QV, "layers_to_transform": [1], "use_dora": True, "use_rslora": True}),
    "2x2-modules": (
        "llama",
        4,
        2,
        2,
        {**QV, "layers_to_transform": [0], "modules_to_save": ["model.norm", "lm_head"]},
    ),
    "2x1-interleaved": ("llama", 4, 2, 1, {**QV, "layers_to_transform": [1, 2]}),
    "2x1-tied-ends": ("llama_tied", 4, 2, 1, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "1x2": ("llama", 2, 1, 2, {"target_modules": "all-linear"}),
}


def some_slow(cases: dict, slow: set[str]) -> list:
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in cases]


def over_ranks(tmp_path: Path, num_ranks: int, **options) -> list[dict]:
    function = functools.partial(train_over_mesh, rows=ROWS, folder=tmp_path / "mesh", **options)
    return run_ranks(function, num_ranks, tmp_path / "results")


def joined(ranks: list[dict]) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for result in ranks:
        for name, tensor in result["weights"].items():
            assert torch.equal(held.setdefault(name, tensor), tensor), f"{name}: replicas differ"
    return held


def assert_same_adapter(folder: Path, other: Path, exact: bool) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "mesh_run.json", "training_args.json"}
    assert (folder / "adapter_config.json").read_text() == (other / "adapter_config.json").read_text()
    mine, expected = (load_file(path / "adapter_model.safetensors") for path in (folder, other))
    assert mine.keys() == expected.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0 if exact else 1e-6, msg=name)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("case", some_slow(CASES, {"2x1-interleaved", "2x1-tied-ends", "1x2"}))
def test_adapters_over_a_mesh_equal_peft_under_plain_trainer(case, tmp_path):
    kind, layers, stages, replicas, options = CASES[case]
    torch.set_num_threads(1)
    model = functools.partial(adapted_model, kind, layers, **options)
    mesh = INTERLEAVED if "interleaved" in case else {"pipeline_stages": stages}
    single = train_plain(model(), ROWS * replicas, tmp_path / "single", **RUN)
    ranks = over_ranks(tmp_path, stages * replicas, model=model, **mesh, **RUN)
    held = joined(ranks)
    assert held.keys() == single["weights"].keys()
    emulated = train_over_mesh(
        0,
        model=model,
        rows=ROWS,
        folder=tmp_path / "emulated",
        data_parallel_replicas=replicas,
        **mesh,
        **RUN,
    )
    for result in [*ranks, emulated]:
        for figure in ("loss", "grad_norm", "eval_loss"):
            assert result[figure] == pytest.approx(single[figure], rel=1e-6), figure
    for name, tensor in held.items():
        assert torch.equal(emulated["weights"][name], tensor), f"{name}: emulated and distributed differ"
        torch.testing.assert_close(tensor, single["weights"][name], rtol=0, atol=1e-6, msg=name)
    assert_same_adapter(tmp_path / "mesh" / "saved", tmp_path / "single" / "saved", exact=False)
    assert_same_adapter(tmp_path / "emulated" / "saved", tmp_path / "mesh" / "saved", exact=True)


# Coded boundaries ----------------------------------------------------------------------------------------------------

CODED = {
    "transform": {"preset": "anchored", "calibration_tokens": 256, "calibration_every": 3},
    "random_mask": {"preset": "paper", "anchor": False, "exact_first_token": True, "boundary_predictor": "mean"},
}


def train_coded(rank: int, *, folder: Path, **options) -> dict:
    model = adapted_model("llama_tied", **QV, layers_to_transform=[2, 3])
    trainer = mesh_trainer(model, ROWS, str(folder), **RUN | {"eval_strategy": "no"} | options)
    trainer.train()
    trained = {name: parameter.detach() for name, parameter in trainer.engine.parts.named_trainable()}
    return {"weights": trained, "fits": boundary_state(trainer.engine), "losses": trainer.state.log_history}


@pytest.mark.parametrize("codec", CODED)
def test_boundaries_behind_frozen_stages_are_fitted_and_coded_alike(codec, tmp_path):
    """The first stage trains nothing, yet what its boundary is fitted to are gradients."""
    torch.set_num_threads(1)
    options = {"folder": tmp_path, "pipeline_stages": 2, **CODED[codec]}
    ranks = run_ranks(functools.partial(train_coded, **options), 2, tmp_path / "results")
    emulated = train_coded(0, **options)
    assert not ranks[0]["weights"] and ranks[1]["weights"].keys() == emulated["weights"].keys()
    for part in ("weights", "fits"):
        for rank in ranks:
            for name, tensor in rank[part].items():
                assert torch.equal(tensor, emulated[part][name]), name
    if codec == "transform":
        gradients = [tensor for name, tensor in emulated["fits"].items() if "backward" in name]
        assert gradients and all(tensor.any() for tensor in gradients)


# First values --------------------------------------------------------------------------------------------------------


def first_values(rank: int, *, folder: Path, source: str, **options) -> dict:
    """Of adapters put on a model given by name, and on the model itself."""
    values = {}
    for way, model in {"name": source, "model": AutoModelForCausalLM.from_pretrained(source)}.items():
        torch.manual_seed(rank)  # whatever was drawn before
        config = lora(**options["lora"])
        mesh = {name: value for name, value in options.items() if name != "lora"}
        trainer = mesh_trainer(model, ROWS, str(folder), trainer={"peft_config": config}, max_steps=1, **mesh)
        parts = trainer.engine.parts
        assert not any(tensor.is_meta for tensor in [*parts.model.parameters(), *parts.model.buffers()])
        assert [len(span) for span in parts.spans] == [2, 2]
        values[way] = {name: parameter.detach() for name, parameter in parts.named_trainable()}
        if way == "name":
            assert math.isfinite(trainer.train().training_loss)
    return values


VALUES = {
    "tied-bfloat16": ("llama_tied", QV),
    "ends": ("llama", {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "init_lora_weights": "gaussian"}),
    "all-linear-dora": ("llama_tied", {"target_modules": "all-linear", "use_dora": True}),
    "modules": ("llama_tied", {**QV, "modules_to_save": ["model.norm", "lm_head"], "layers_to_transform": [3]}),
}


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("case", some_slow(VALUES, {"ends", "modules"}))
def test_a_peft_config_gives_the_values_of_peft_however_the_model_is_given(case, tmp_path):
    kind, options = VALUES[case]
    torch.set_num_threads(1)
    source = str(tmp_path / "base")
    tiny_model(kind).to(torch.bfloat16 if "bfloat16" in case else torch.float32).save_pretrained(source)
    base = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(SEED)
    expected = get_peft_model(base, lora(**options))
    function = functools.partial(first_values, source=source, lora=options, pipeline_stages=2)
    ranks = run_ranks(functools.partial(function, folder=tmp_path / "mesh"), 2, tmp_path / "results")
    alone = [function(0, folder=tmp_path / "emulated")]
    wanted = {n: p for n, p in expected.get_base_model().named_parameters() if p.requires_grad}
    for world in (ranks, alone):
        for way in ("name", "model"):
            values = {name: tensor for rank in world for name, tensor in rank[way].items()}
            assert values.keys() == wanted.keys()
            for name, tensor in values.items():
                assert torch.equal(tensor, wanted[name].detach()), f"{way}: {name}"


# Saved and resumed ---------------------------------------------------------------------------------------------------

RESUMED = {**RUN, "max_steps": 6, "eval_strategy": "no"}


def train_and_resume(rank: int, *, folder: Path, machine_size: int | None = None, **options) -> dict:
    """One run on this rank, as in `tests.runs.train`."""
    if machine_size:
        os.environ.update(LOCAL_RANK=str(rank % machine_size), LOCAL_WORLD_SIZE=str(machine_size))
        folder = folder / f"machine-{rank // machine_size}"
    resume, save_at = options.pop("resume", None), options.pop("save_at", ())
    model = adapted_model("llama_tied", **QV, layers_to_transform=[0, 2], modules_to_save=["model.norm"])
    trainer = mesh_trainer(model, ROWS, str(folder), **RESUMED | options)
    if save_at:
        trainer.add_callback(SaveAt(save_at))
    trainer.train(resume_from_checkpoint=resume)
    return {
        "loss": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "weights": {name: tensor.detach() for name, tensor in trainer.engine.parts.named_trainable()},
        "step": trainer.state.best_global_step,
        "eval_loss": trainer.evaluate()["eval_loss"],
    }


def resumed_on(num_ranks: int, folder: Path, **options) -> list[dict]:
    if num_ranks == 1:
        torch.set_num_threads(1)
        return [train_and_resume(0, folder=folder / "run", **options)]
    (folder / "results").mkdir(exist_ok=True)
    return run_ranks(
        functools.partial(train_and_resume, folder=folder / "run", **options), num_ranks, folder / "results"
    )


def assert_same(ranks: list[dict], others: list[dict], tolerance: float = 0.0) -> None:
    assert ranks[0]["loss"] == pytest.approx(others[0]["loss"], rel=tolerance)
    weights, expected = joined(ranks), joined(others)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance, msg=name)


def test_a_resumed_run_equals_the_uninterrupted_one_on_any_mesh(tmp_path):
    whole = resumed_on(2, tmp_path, pipeline_stages=2, save_at=(3,))
    checkpoint = tmp_path / "run" / "checkpoint-3"
    names = {path.name for path in checkpoint.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "mesh_state", "trainer_state.json"} <= names
    assert not any(name.startswith(("model", "config")) or "stage" in name for name in names)
    assert_same(resumed_on(2, tmp_path, pipeline_stages=2, resume=True), whole)
    assert_same(resumed_on(1, tmp_path, pipeline_stages=4, resume=str(checkpoint)), whole, tolerance=1e-6)

    base = tiny_model("llama_tied")
    loaded = PeftModel.from_pretrained(base, checkpoint)
    values = load_file(checkpoint / "adapter_model.safetensors")
    for stored, name in {"v": "v_proj.lora_B", "a": "q_proj.lora_A"}.items():
        key = f"base_model.model.model.layers.2.self_attn.{name}.weight"
        module = loaded.get_submodule(f"base_model.model.model.layers.2.self_attn.{name}.default")
        assert torch.equal(module.weight, values[key]), stored
    assert not torch.equal(
        loaded.merge_and_unload().model.layers[2].self_attn.q_proj.weight,
        tiny_model("llama_tied").model.layers[2].self_attn.q_proj.weight,
    )


def test_without_a_shared_filesystem_the_adapter_reaches_rank_0_and_all_can_resume(tmp_path):
    options = dict(pipeline_stages=2, machine_size=1)
    whole = resumed_on(4, tmp_path, save_at=(3,), **options)
    machines = [tmp_path / "run" / f"machine-{rank}" for rank in range(4)]
    first, *others = [load_file(path / "checkpoint-3" / "adapter_model.safetensors") for path in machines]
    assert all("layers.0" in name for name in others[1])
    assert others[0].keys() | others[1].keys() == first.keys() and len(others[1]) == 4
    assert_same(resumed_on(4, tmp_path, resume=True, **options), whole)


@pytest.mark.slow
def test_the_best_adapter_is_loaded_at_the_end(tmp_path):
    every_step = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=2)
    options = dict(pipeline_stages=2, load_best_model_at_end=True, warmup_steps=0, max_steps=4, **every_step)
    ranks = resumed_on(2, tmp_path, **options)
    step = ranks[0]["step"]
    assert step < 4
    stored = load_file(tmp_path / "run" / f"checkpoint-{step}" / "adapter_model.safetensors")
    weights = joined(ranks)
    assert len(weights) == len(stored)
    for name, tensor in weights.items():
        key = "base_model.model." + name.replace(".default", "").replace(".modules_to_save", "")
        assert torch.equal(tensor, stored[key]), name


def test_a_model_init_may_make_the_adapters(tmp_path):
    given = {"model_init": lambda: adapted_model("llama", **QV)}
    trainer = mesh_trainer(None, ROWS, str(tmp_path), pipeline_stages=2, trainer=given, **{**RESUMED, "max_steps": 1})
    trainer.train()
    names = [name for name, _ in trainer.engine.parts.named_trainable()]
    assert len(names) == 16 and all("lora_" in name for name in names)
