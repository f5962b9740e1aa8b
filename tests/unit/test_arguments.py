"""MeshAdaptArguments: what it refuses and how it says so, presets, and the ways to fill it in."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch.distributed as dist
from transformers import HfArgumentParser, TrainingArguments

from hf_meshadapt import MeshAdaptArguments

DENSE = {"pipeline_stages": 2, "preset": "dense"}
SECONDS = "boundary_target_step_seconds"
SECOND = {SECONDS: 1.0}
RATED = {**SECOND, "link_bits_per_second": 1e8}
REPLICAS = {"data_parallel_replicas": 2}
INTERLEAVED = {"pipeline_stages": 2, "pipeline_schedule": "interleaved", "pipeline_chunks_per_rank": 2}


# Fields, then what the message must hold: field=value, and a word of the remedy.
REFUSED = [
    ({"preset": "papers"}, "preset='papers'", "dense, paper"),
    ({"pipeline_schedule": "zero"}, "pipeline_schedule='zero'", "gpipe, 1f1b, interleaved"),
    ({"pipeline_schedule": "1f1b"}, "pipeline_schedule='1f1b'", "pipeline_stages to 2"),
    ({"boundary_predictor": "median", "pipeline_stages": 2}, "boundary_predictor='median'", "none, mean, token"),
    ({"boundary_codec": "zip"}, "boundary_codec='zip'", "none, random_mask"),
    ({"wire_dtype": "int8"}, "wire_dtype='int8'", "float32, bfloat16"),
    ({"wire_backend": "mpi"}, "wire_backend='mpi'", "gloo, nccl"),
    ({"model_dtype": "float8"}, "model_dtype='float8'", "auto, float32"),
    ({"mask_ratio": 1.0, "pipeline_stages": 2}, "mask_ratio=1.0", "Use 0 for dense"),
    ({"mask_ratio": -0.1, "pipeline_stages": 2}, "mask_ratio=-0.1", "Use 0 for dense"),
    ({"mask_ratio": float("nan"), "pipeline_stages": 2}, "mask_ratio=nan", "Use 0 for dense"),
    ({"mask_ratio": 0.5}, "mask_ratio=0.5", "Set pipeline_stages to 2"),
    ({"preset": "paper"}, "preset='paper'", "Set pipeline_stages to 2"),
    ({"wire_dtype": "float16"}, "wire_dtype='float16'", "Set pipeline_stages to 2"),
    ({**DENSE, "wire_dtype": "bfloat16", "pipeline_stages": 1}, "wire_dtype='bfloat16'", "Set pipeline_stages to 2"),
    ({**DENSE, "exact_first_token": True}, "exact_first_token=True", "Use it with random_mask or transform"),
    ({**DENSE, "boundary_predictor": "mean"}, "boundary_predictor='mean'", "Use it with random_mask or transform"),
    ({**DENSE, "mask_seed": 1}, "mask_seed=1", "Use it with random_mask"),
    ({"calibration_tokens": 0}, "calibration_tokens=0", "Use 1"),
    ({"calibration_every": -1}, "calibration_every=-1", "Use 0"),
    ({**DENSE, "calibration_tokens": 600}, "calibration_tokens=600", "leave it unset"),
    ({**SECOND, "pipeline_stages": 2}, "boundary_target_step_seconds=1.0", "Set link_bits_per_second too"),
    ({"pipeline_stages": 2, "link_bits_per_second": 1e8}, "link_bits_per_second=100000000.0", "Set that too"),
    ({**DENSE, **RATED}, "boundary_target_step_seconds=1.0", "Use it with transform, or"),
    ({**DENSE, "preset": "paper", **RATED}, "boundary_target_step_seconds=1.0", "Use it with transform, or"),
    (RATED, "boundary_target_step_seconds=1.0", "Set pipeline_stages to 2"),
    ({"pipeline_stages": 2, **RATED, "link_bits_per_second": 0}, "link_bits_per_second=0", "Use 100e6"),
    ({"pipeline_stages": 2, **RATED, "boundary_budget": 1.0}, "boundary_target_step_seconds=1.0", "Lower boundary_b"),
    *(
        ({"pipeline_stages": 2, **RATED, **{SECONDS: wrong}}, f"{SECONDS}={wrong!r}", "or leave it unset")
        for wrong in (0.0, -1.0, float("inf"), float("nan"))
    ),
    ({"pipeline_stages": 0}, "pipeline_stages=0", "Use 1"),
    ({"pipeline_chunks_per_rank": 0}, "pipeline_chunks_per_rank=0", "Use 1"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0", "Use 1"),
    ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size=0", "Use 1"),
    ({"data_parallel_replicas": 0}, "data_parallel_replicas=0", "Leave it unset"),
    (
        {**REPLICAS, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "gradient_checkpointing_kwargs={'use_reentrant': True}",
        "Set use_reentrant to False",
    ),
    ({"pipeline_microbatches": 0}, "pipeline_microbatches=0", "Leave it unset"),
    ({"pipeline_microbatches": 3}, "pipeline_microbatches=3", "Change one of them"),
    ({**INTERLEAVED, "pipeline_chunks_per_rank": 1}, "pipeline_schedule='interleaved'", "Set both to 2"),
    ({**INTERLEAVED, "pipeline_stages": 1}, "pipeline_schedule='interleaved'", "Set both to 2"),
    ({"pipeline_chunks_per_rank": 2, "pipeline_stages": 2}, "pipeline_chunks_per_rank=2", "pipeline_schedule=inter"),
    (
        {**INTERLEAVED, "per_device_train_batch_size": 5, "pipeline_microbatches": 5},
        "pipeline_microbatches=5",
        "Use a multiple of pipeline_stages=2",
    ),
    ({**INTERLEAVED, "per_device_eval_batch_size": 5}, "per_device_eval_batch_size=5", "Use a multiple of"),
    ({"pipeline_stages": 2, "pipeline_split": "3"}, "pipeline_split='3'", "12,10,8"),
    ({"pipeline_stages": 2, "pipeline_split": "3,0"}, "pipeline_split='3,0'", "12,10,8"),
    ({"pipeline_stages": 2, "pipeline_split": "3;4"}, "pipeline_split='3;4'", "12,10,8"),
    ({"pipeline_stages": 2, "pipeline_split": ""}, "pipeline_split=''", "12,10,8"),
    ({"link_timeout_seconds": 0}, "link_timeout_seconds=0", "Try 600"),
    ({"link_timeout_seconds": float("inf")}, "link_timeout_seconds=inf", "Try 600"),
    ({"ddp_timeout": -1}, "ddp_timeout=-1", "Try 600"),
]


@pytest.mark.parametrize("fields,named,remedy", REFUSED, ids=lambda value: str(value)[:40])
def test_wrong_values_are_refused_with_field_value_and_remedy(make_arguments, fields, named, remedy):
    with pytest.raises(ValueError) as caught:
        make_arguments(**fields)
    message = str(caught.value)
    assert message.startswith(named) and remedy in message, message


LAUNCHED = [
    (3, {"pipeline_stages": 2}, "pipeline_stages=2", "Launch a multiple of 2"),
    (2, {"pipeline_stages": 4}, "pipeline_stages=4", "choose a divisor of 2"),
    (4, {"pipeline_stages": 2, "data_parallel_replicas": 4}, "data_parallel_replicas=4", "Leave it unset"),
    (2, {"pipeline_stages": 2, "wire_backend": "nccl"}, "wire_backend='nccl'", "Use gloo"),
]


@pytest.mark.parametrize("world,fields,named,remedy", LAUNCHED, ids=lambda value: str(value)[:40])
def test_wrong_mesh_shapes_are_refused_before_any_process_group_forms(make_arguments, world, fields, named, remedy):
    # Nothing listens and no rank is set: an attempt to meet the others would raise something else, or hang.
    with pytest.raises(ValueError) as caught:
        make_arguments(world, **fields)
    message = str(caught.value)
    assert message.startswith(named) and remedy in message, message
    assert not dist.is_initialized()


UNSUPPORTED = [
    ({"fp16": True}, "fp16=True", "Use bf16=True"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size=True", "Set per_device_train_batch_size"),
    ({"fsdp": "full_shard"}, "fsdp='full_shard'", "Unset it"),
    ({"deepspeed": "zero3.json"}, "deepspeed='zero3.json'", "Unset it"),
    ({"bf16_full_eval": True}, "bf16_full_eval=True", "Load the model in bfloat16"),
    ({"label_names": ["targets"]}, "label_names=['targets']", "Rename the column"),
    ({"optim": "lomo"}, "optim='lomo'", "Use another"),
    ({"ddp_find_unused_parameters": True}, "ddp_find_unused_parameters=True", "Unset it"),
    ({"accelerator_config": {"split_batches": True}}, "accelerator_config={'split_batches': True}", "Leave it unset"),
    ({"accelerator_config": {"even_batches": False}}, "accelerator_config={'even_batches': False}", "Leave it unset"),
    ({"torch_compile": True}, "torch_compile=True", "Unset it"),
    ({"use_liger_kernel": True}, "use_liger_kernel=True", "Unset it"),
    (
        {"push_to_hub": True, "save_on_each_node": True},
        "push_to_hub=True with save_on_each_node",
        "Leave one of them out",
    ),
    ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False", "Leave it at True"),
]


@pytest.mark.parametrize("fields,named,remedy", UNSUPPORTED, ids=lambda value: str(value)[:40])
def test_unsupported_trainer_options_are_refused(make_arguments, fields, named, remedy):
    with pytest.raises(NotImplementedError) as caught:
        make_arguments(**fields)
    message = str(caught.value)
    assert message.startswith(named) and remedy in message, message


def test_sharding_by_the_launcher_is_refused(make_arguments, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(NotImplementedError, match="ACCELERATE_USE_FSDP=true.*Unset it"):
        make_arguments()


def test_presets_fill_only_what_is_unset(make_arguments):
    fields = (
        "boundary_codec",
        "mask_ratio",
        "boundary_budget",
        "exact_first_token",
        "boundary_predictor",
        "wire_dtype",
    )

    def filled(**given) -> list:
        return [getattr(make_arguments(pipeline_stages=2, **given), name) for name in fields]

    assert filled() == filled(preset="anchored") == ["transform", 0.0, 0.05, True, "token", "bfloat16"]
    assert filled(preset="dense") == ["none", 0.0, None, False, "none", "float32"]
    assert filled(preset="paper") == ["random_mask", 0.95, None, False, "none", "bfloat16"]
    mixed = filled(preset="paper", mask_ratio=0.9, exact_first_token=True, wire_dtype="float32")
    assert mixed == ["random_mask", 0.9, None, True, "none", "float32"]
    mixed = filled(boundary_budget=0.1, exact_first_token=False, boundary_predictor="mean")
    assert mixed == ["transform", 0.0, 0.1, False, "mean", "bfloat16"]
    assert filled(preset="dense", bf16=True)[-1] == "bfloat16"


def test_sub_configs_hold_what_was_given(make_arguments):
    args = make_arguments(
        pipeline_stages=3, data_parallel_replicas=2, pipeline_split="2,3,2", pipeline_schedule="1f1b", mask_ratio=0.5,
        seed=11, link_timeout_seconds=7.5, per_device_train_batch_size=12,
    )  # fmt: skip
    mesh, boundary = args.mesh_config(), args.boundary_config()
    assert (mesh.stages, mesh.replicas, mesh.layers_per_chunk, mesh.schedule) == (3, 2, (2, 3, 2), "1f1b")
    assert (mesh.microbatches, mesh.emulated, mesh.timeout_seconds) == (6, True, 7.5)
    assert (boundary.mask_ratio, boundary.mask_seed) == (0.5, 11)
    assert make_arguments(pipeline_stages=2, mask_ratio=0.5, mask_seed=0, seed=11).boundary_config().mask_seed == 0
    calibrated = dict(boundary_budget=0.1, forward_share=0.6, loss_weighted=False, boundary_predictor="mean")
    boundary = make_arguments(pipeline_stages=2, **calibrated).boundary_config()
    assert (boundary.codec, boundary.budget, boundary.forward_share) == ("transform", 0.1, 0.6)
    assert (boundary.loss_weighted, boundary.predictor, boundary.exact_first_token) == (False, "mean", True)
    boundary = make_arguments(pipeline_stages=2, **RATED).boundary_config()
    assert (boundary.target_step_seconds, boundary.link_bits_per_second, boundary.budgets) == (1.0, 1e8, None)
    assert args.train_batch_size == 24  # one process reads for both replicas


def test_default_microbatches_divide_the_batch_and_suit_the_schedule(make_arguments):
    def count(rows: int, **fields) -> int:
        return make_arguments(per_device_train_batch_size=rows, **fields).pipeline_microbatches

    assert [count(rows) for rows in (1, 8)] == [1, 1]
    assert [count(rows, pipeline_stages=2) for rows in (1, 6, 7, 8, 10)] == [1, 3, 1, 4, 2]
    assert [count(rows, **INTERLEAVED) for rows in (4, 5, 8, 16)] == [4, 1, 8, 8]


def test_link_timeout_governs_start_up_unless_ddp_timeout_is_given(make_arguments):
    assert make_arguments().ddp_timeout == 600
    assert make_arguments(link_timeout_seconds=7.5).ddp_timeout == 8
    assert make_arguments(link_timeout_seconds=7.5, ddp_timeout=1800).ddp_timeout == 1800


def parser() -> HfArgumentParser:
    return HfArgumentParser(MeshAdaptArguments)


COMMAND_LINE = (
    "--output_dir {folder} --use_cpu True --report_to none --pipeline_stages 2 --data_parallel_replicas 2 "
    "--pipeline_microbatches 2 --pipeline_schedule 1f1b --pipeline_split 3,4 --mask_ratio 0.9 --mask_seed 5 "
    "--exact_first_token True --boundary_predictor mean --wire_dtype bfloat16 --wire_backend gloo "
    "--model_dtype float32 --link_timeout_seconds 30 --ddp_timeout 60"
)


def test_command_line_and_yaml_give_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    words = COMMAND_LINE.format(folder=tmp_path).split()
    (parsed,) = parser().parse_args_into_dataclasses(words)
    file = tmp_path / "run.yaml"
    # What a person writes in YAML: bare words, numbers and true; the split must survive as text.
    pairs = [(name.removeprefix("--"), value) for name, value in zip(words[::2], words[1::2])]
    file.write_text("".join(f"{name}: {value}\n" for name, value in pairs))
    (from_yaml,) = parser().parse_yaml_file(str(file))
    assert from_yaml.to_dict() == parsed.to_dict()
    assert (parsed.exact_first_token, parsed.mask_ratio, parsed.mask_seed) == (True, 0.9, 5)
    assert parsed.mesh_config().layers_per_chunk == (3, 4)
    assert (parsed.link_timeout_seconds, parsed.ddp_timeout) == (30.0, 60)


def test_bare_flags_switch_on(tmp_path):
    words = f"--output_dir {tmp_path} --use_cpu --pipeline_stages 2 --exact_first_token --loss_weighted".split()
    (parsed,) = parser().parse_args_into_dataclasses(words)
    assert parsed.exact_first_token is True and parsed.loss_weighted is True
    (parsed,) = parser().parse_args_into_dataclasses([*words, "false"])
    assert parsed.loss_weighted is False


def test_wrong_choices_are_refused_on_the_command_line_too(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--pipeline_schedule", "zero"])
    assert "invalid choice: 'zero'" in capsys.readouterr().err


def test_every_added_field_has_help():
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    added = [f for f in dataclasses.fields(MeshAdaptArguments) if f.name not in inherited or f.name == "ddp_timeout"]
    assert len(added) > 10
    for f in added:
        assert len(f.metadata.get("help", "")) > 20, f.name
    text = parser().format_help()
    assert all(f"--{f.name}" in text for f in added)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bf16": True},
        {"pipeline_stages": 2, "data_parallel_replicas": 2},
        {"preset": "dense", "bf16": True},
        {"pipeline_stages": 2, "boundary_budget": 0.1, "forward_share": 0.5, "loss_weighted": False},
        {"pipeline_stages": 2, "boundary_codec": "random_mask", "boundary_budget": 0.1, "boundary_predictor": "token"},
        {"pipeline_stages": 2, "preset": "paper", "exact_first_token": True, "mask_seed": 3},
        {"pipeline_stages": 2, **RATED},
        {"pipeline_stages": 2, "mask_ratio": 0.5, "boundary_predictor": "mean", "pipeline_split": "1,2"},
        INTERLEAVED,
        {**REPLICAS, "pipeline_stages": 2, "preset": "paper", "matrix_rank": 4},
        {**REPLICAS, "dp_sync": "powersgd", "matrix_rank": 4},
        {**REPLICAS, "dp_sync": "streaming_diloco", "outer_wire": "int8"},
    ],
    ids=str,
)
def test_arguments_survive_serialisation_and_reconstruction(make_arguments, fields):
    args = make_arguments(**fields)
    assert json.loads(args.to_json_string()) == json.loads(json.dumps(args.to_dict()))
    again = dataclasses.replace(args)
    assert again.to_dict() == args.to_dict()
    kept = {f.name for f in dataclasses.fields(args) if f.init}
    from_json = MeshAdaptArguments(**{k: v for k, v in json.loads(args.to_json_string()).items() if k in kept})
    assert from_json.mesh_config() == args.mesh_config()
    assert from_json.boundary_config() == args.boundary_config()
    assert from_json.data_parallel_config() == args.data_parallel_config()
