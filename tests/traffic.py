"""Runs a short mesh training and reads what its sockets sent, beside the plan; for tests and for benchmarks/wire.py."""

from .equality import COMMON, Rows, collate_fixed
from .launch import run_ranks

ROWS, ACCUMULATION = 8, 3


def wide_model(hidden: int = 576, layers: int = 3, tied: bool = False):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=hidden, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def measure(rank: int, folder: str, mesh: dict) -> dict:
    """Bytes of one replica-step by axis, on all ranks together, after two warm-up steps; and the plan."""
    from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer

    mesh = dict(mesh)
    busy_seconds = mesh.pop("busy_seconds", None)
    settings = COMMON | {"max_steps": 4, "eval_strategy": "no", "gradient_accumulation_steps": ACCUMULATION}
    settings |= {"preset": "dense", "per_device_train_batch_size": ROWS, **mesh}
    args = MeshAdaptArguments(output_dir=folder, **settings)
    trainer = MeshAdaptTrainer(model=wide_model(), args=args, train_dataset=Rows(400), data_collator=collate_fixed)
    trainer.engine.busy_seconds = busy_seconds
    trainer.train()
    plan = trainer.engine.plan(ROWS, 16, ACCUMULATION)
    logs = [log for log in trainer.state.log_history if "loss" in log][1:]  # the first step makes the schedule
    tokens = trainer.engine.mesh.replicas * ROWS * 16 * ACCUMULATION
    axes = ("pipeline", "data_parallel", "control")
    measured = {axis: [log.get(f"bytes_per_token_{axis}", 0) * tokens for log in logs] for axis in axes}
    return {
        "measured": measured,
        "planned": {axis: plan.axis_bytes(axis) for axis in axes},
        "framing": {axis: plan.framing_bytes(axis) for axis in axes},
        "report": trainer.mesh_report(),
        "boundaries": plan.to_dict()["boundaries"],
    }


def run(tmp_path, stages: int, replicas: int, **mesh) -> dict:
    mesh = {"pipeline_stages": stages, "pipeline_microbatches": 2, **mesh}
    return run_ranks(measure, stages * replicas, tmp_path, str(tmp_path / "run"), mesh)[0]
