"""Ranks that were started differently: all of them stop at once, with an error that names what, where and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from hf_meshadapt import MeshAdaptArguments, MeshAdaptTrainer, fingerprints
from tests.equality import COMMON, Rows, collate_fixed, tiny_model
from tests.launch import run_ranks

ODD = 1  # the rank that differs


@dataclass
class Case:
    """What the odd rank has otherwise, and what the error says.

    Attributes:
        args: of the arguments, for all ranks.
        odd_args: of the odd rank.
        odd: constructor arguments of the odd rank.
        change: is given the odd rank's model.
        version: of this package, of the odd rank.
        says: a pattern.
    """

    says: str
    args: dict = field(default_factory=dict)
    odd_args: dict = field(default_factory=dict)
    odd: dict = field(default_factory=dict)
    change: Callable = lambda model: None
    version: str = fingerprints.__version__
    kind: str = "llama_tied"


def set_weight(name: str):
    def change(model) -> None:
        with torch.no_grad():
            model.get_parameter(name)[-1, -1] += 1e-3

    return change


def set_config(model) -> None:
    model.config.rms_norm_eps = 1e-3


TWO = {"pipeline_stages": 2}
CASES = {
    "version": Case("version hf_meshadapt is .* on rank 0 and 0.0.9 on rank 1. Install the same", version="0.0.9"),
    "argument": Case("argument learning_rate is 2e-05 on rank 0 and 0.001 on rank 1. Start all ranks with the same",
                     odd_args={"learning_rate": 1e-3}),
    "mesh": Case("pipeline_stages is 1 on rank 0 and 2 on rank 1", odd_args=TWO),
    "seed": Case("seed is 7 on rank 0 and 8 on rank 1", TWO, {"seed": 8}),
    "codec": Case('boundary_codec is "none" on rank 0 and "quantize" on rank 1', TWO, {"boundary_codec": "quantize"}),
    "length": Case("train_dataset length is 8 on rank 0 and 9 on rank 1", TWO, odd={"train_dataset": Rows(9)}),
    "rows": Case("train_dataset row 0 is columns.* on rank 0 and columns .* on rank 1.*the same rows",
                 odd={"train_dataset": Rows(8, seed=5)}),
    "evaluation": Case("eval_dataset type is Rows on rank 0 and NoneType on rank 1", odd={"eval_dataset": None}),
    "metrics": Case("compute_metrics given is false on rank 0 and true on rank 1", TWO,
                    odd={"compute_metrics": lambda prediction: {}}),
    "config": Case("config rms_norm_eps is 1e-06 on rank 0 and 0.001 on rank 1. Give all ranks the same model", TWO,
                   change=set_config),
    "replica": Case("weight model.layers.3.mlp.up_proj.weight is 64x32 float32 .* on rank 0 and 64x32 .* on rank 1",
                    change=set_weight("model.layers.3.mlp.up_proj.weight")),
    "tied copy": Case("weight model.embed_tokens.weight is 97x32 float32 .* on rank 0 and 97x32 float32 .* on rank 1",
                      TWO, change=set_weight("model.embed_tokens.weight")),
}  # fmt: skip


def start(rank: int, cases: dict[str, Case], folder: Path, odd: int) -> dict[str, str | None]:
    """Every case's error on this rank, None where there was none."""
    said = {}
    for name, case in cases.items():
        AcceleratorState._reset_state()
        model, args = tiny_model(case.kind), {**COMMON, **case.args, "output_dir": str(folder / f"of-{rank}")}
        given = {"train_dataset": Rows(8), "eval_dataset": Rows(4), "data_collator": collate_fixed}
        if rank == odd:
            case.change(model)
            fingerprints.__version__ = case.version
            args, given = {**args, **case.odd_args}, {**given, **case.odd}
        try:
            arguments = MeshAdaptArguments(preset="dense", link_timeout_seconds=20.0, **args)
            MeshAdaptTrainer(model=model, args=arguments, **given)
            said[name] = None
        except ValueError as error:
            said[name] = str(error)
    return said


def test_all_ranks_refuse_what_one_has_otherwise(tmp_path):
    first, second = run_ranks(start, 2, tmp_path, CASES, tmp_path, ODD)
    for name, case in CASES.items():
        assert first[name] == second[name], name
        assert first[name] and re.search(case.says, first[name], re.DOTALL), (name, first[name])


REPLICAS = {
    "weight of a stage": Case("weight model.layers.3.mlp.up_proj.weight is .* on ranks? 1 and .* on rank 3",
                              change=set_weight("model.layers.3.mlp.up_proj.weight")),
    "mesh": Case("pipeline_stages is 2 on ranks 0, 1, 2 and 4 on rank 3", odd_args={"pipeline_stages": 4}),
}  # fmt: skip


def test_replicas_of_one_stage_hold_the_same_weights(tmp_path):
    cases = {name: replace(case, args=TWO) for name, case in REPLICAS.items()}
    ranks = run_ranks(start, 4, tmp_path, cases, tmp_path, 3)
    for name, case in cases.items():
        assert len({said[name] for said in ranks}) == 1
        assert ranks[0][name] and re.search(case.says, ranks[0][name], re.DOTALL), (name, ranks[0][name])
