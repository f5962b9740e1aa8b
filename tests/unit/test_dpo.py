"""Pair losses against TRL's own arithmetic in slow form, collated pairs, and what of DPO a mesh refuses."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import DPOConfig
from trl.trainer.dpo_trainer import DataCollatorForPreference

import hf_meshadapt
from hf_meshadapt import MeshAdaptDPOConfig, MeshAdaptDPOTrainer, MeshAdaptMixin
from hf_meshadapt.dpo import REFERENCE_COLUMNS, PairCollator
from hf_meshadapt.preference import PAIR_LOSSES, PairLoss, is_pair, log_probabilities
from tests.dpo import mesh_trainer, pairs
from tests.equality import tiny_model

QUIET = {"use_cpu": True, "report_to": "none", "bf16": False}

# Losses --------------------------------------------------------------------------------------------------------------


def batch(num_pairs: int = 3, length: int = 7, vocabulary: int = 11):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2 * num_pairs, length, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (2 * num_pairs, length), generator=generator)
    for row in range(2 * num_pairs):
        labels[row, : 1 + row % 3] = -100
    return logits, labels, torch.randn(2 * num_pairs, generator=generator)


def slow_log_probability(logits, labels) -> float:
    total = 0.0
    for position in range(1, len(labels)):
        if labels[position] != -100:
            total += float(logits[position - 1].log_softmax(-1)[labels[position]])
    return total


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow_loss(name: str, beta: float, chosen: float, rejected: float, num_chosen: int, num_rejected: int) -> float:
    margin, per_token = chosen - rejected, chosen / num_chosen - rejected / num_rejected
    return {
        "sigmoid": -math.log(sigmoid(beta * margin)),
        "sigmoid_norm": -math.log(sigmoid(beta * per_token)),
        "hinge": max(0.0, 1 - beta * margin),
        "ipo": (per_token - 1 / (2 * beta)) ** 2,
        "apo_zero": 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected),
        "apo_down": sigmoid(beta * chosen) + 1 - sigmoid(beta * margin),
    }[name]


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_each_loss_is_its_formula_pair_by_pair(name):
    logits, labels, reference = batch()
    expected = 0.0
    for pair in range(3):
        scores = [
            slow_log_probability(logits[row], labels[row]) - float(reference[row]) for row in (2 * pair, 2 * pair + 1)
        ]
        counts = [int((labels[row] != -100).sum()) for row in (2 * pair, 2 * pair + 1)]
        expected += slow_loss(name, 0.3, *scores, *counts)
    loss = PairLoss((name,), (2.0,), 0.3)(SimpleNamespace(logits=logits), labels, torch.tensor(5.0), reference)
    assert float(loss) == pytest.approx(2.0 * expected / 5, rel=1e-5)


def test_padded_pairs_add_nothing_and_their_gradient_is_zero():
    logits, labels, reference = batch()
    loss = PairLoss(("sigmoid", "ipo"), (1.0, 0.5), 0.1)
    alone = loss(SimpleNamespace(logits=logits[:4]), labels[:4], torch.tensor(2.0), reference[:4])
    labels[4:] = -100
    logits.requires_grad_()
    padded = loss(SimpleNamespace(logits=logits), labels, torch.tensor(2.0), reference)
    assert float(padded.detach()) == pytest.approx(float(alone), rel=1e-6)
    padded.backward()
    assert not logits.grad[4:].any() and logits.grad[:4].any()
    assert is_pair(labels).tolist() == [True, True, False]


def test_log_probabilities_of_half_precision_logits_are_in_float32():
    logits, labels, _ = batch()
    found = log_probabilities(logits.bfloat16(), labels)
    assert found.dtype == torch.float32
    slow = [slow_log_probability(row.bfloat16().float(), label) for row, label in zip(logits, labels)]
    assert found.tolist() == pytest.approx(slow, rel=1e-5)


# Pairs ---------------------------------------------------------------------------------------------------------------


def test_the_answers_of_a_pair_are_neighbours():
    tokens = [
        {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]},
        {"prompt_ids": [6], "chosen_ids": [7, 8], "rejected_ids": [9]},
    ]
    references = [(-1.0, -2.0), (-3.0, -4.0)]
    rows = [row | dict(zip(REFERENCE_COLUMNS, reference)) for row, reference in zip(tokens, references)]
    collate = PairCollator(DataCollatorForPreference(pad_token_id=0))
    made = collate(rows)
    assert made["input_ids"].tolist() == [[1, 2, 3, 0], [1, 2, 4, 5], [6, 7, 8, 0], [6, 9, 0, 0]]
    assert made["attention_mask"].sum(1).tolist() == [3, 4, 3, 2]
    no = -100
    assert made["labels"].tolist() == [[no, no, 3, no], [no, no, 4, 5], [no, 7, 8, no], [no, 9, no, no]]
    assert made["loss_input_reference"].tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert "loss_input_reference" not in collate(tokens)


def test_the_reference_is_the_model_as_it_is_given(tmp_path):
    trainer = mesh_trainer(
        str(tmp_path), per_device_eval_batch_size=2, data_parallel_replicas=2, trainer={"eval_dataset": pairs(5, 2)}
    )
    model, rows = tiny_model("llama").eval(), trainer.eval_dataset
    assert len(rows) == 5  # of which the last has replica 0 half, and replica 1 not at all
    for row in rows:
        for answer in ("chosen", "rejected"):
            tokens = row["prompt_ids"] + row[f"{answer}_ids"]
            labels = torch.tensor([-100] * len(row["prompt_ids"]) + row[f"{answer}_ids"])
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0]
            assert row[f"ref_{answer}_logps"] == pytest.approx(slow_log_probability(logits, labels), rel=1e-5)


def test_a_run_with_a_learnt_boundary(tmp_path):
    trainer = mesh_trainer(str(tmp_path), preset="anchored", boundary_budget=0.25, calibration_tokens=200, max_steps=1)
    trainer.train()
    # Batches of 4 pairs, 8 rows each; not twice as many.
    assert 200 <= trainer.engine.calibration_cost["tokens"] < 400


# Refusals ------------------------------------------------------------------------------------------------------------

OPTIONS = [
    ({"padding_free": True}, "padding_free=True: it makes one row"),
    ({"activation_offloading": True}, "activation_offloading=True: .*gradient_checkpointing"),
    ({"model_init_kwargs": {"dtype": "bfloat16"}}, "model_init_kwargs=.*: .*model_dtype"),
    ({"use_liger_kernel": True}, "use_liger_kernel=True"),
    ({"sync_ref_model": True}, "sync_ref_model=True: the reference's log-probabilities are computed once"),
    ({"use_weighting": True}, "use_weighting=True"),
    ({"ld_alpha": 0.5}, "ld_alpha=0.5"),
    ({"label_smoothing": 0.1}, "label_smoothing=0.1"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
    ({"precompute_ref_batch_size": 4}, "precompute_ref_batch_size=4: .*per_device_eval_batch_size"),
    ({"precompute_ref_log_probs": False}, "precompute_ref_log_probs=False: a second model"),
    ({"f_divergence_type": "forward_kl"}, "f_divergence_type='forward_kl': use 'reverse_kl'"),
    ({"loss_type": "robust"}, "loss_type='robust': .*Use sigmoid"),
    ({"loss_type": ["sigmoid", "sft"]}, "loss_type='sft'"),
    ({"anchor": True}, "anchor=True: the anchor circuit is not tested on pairs"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=lambda value: str(value)[:40])
def test_options_that_are_refused(tmp_path, options, message):
    with pytest.raises(NotImplementedError, match=message):
        MeshAdaptDPOConfig(output_dir=str(tmp_path), **{**QUIET, **options})


ARGUMENTS = [
    ({"ref_model": SimpleNamespace()}, "ref_model: the reference is the model that training starts from"),
    ({"data_collator": lambda rows: rows}, "data_collator: the trainer's own"),
    ({"compute_metrics": lambda prediction: {}}, "compute_metrics: logits of pairs"),
    ({"peft_config": LoraConfig(task_type="CAUSAL_LM")}, "peft_config: TRL keeps the reference as a second adapter"),
    ({"train_dataset": pairs(8, 1).to_iterable_dataset()}, "train_dataset is a IterableDataset: .*all rows"),
]


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS, ids=lambda value: str(value)[:20])
def test_arguments_that_are_refused(tmp_path, arguments, message):
    with pytest.raises(NotImplementedError, match=message):
        mesh_trainer(str(tmp_path), trainer=arguments)


def test_a_length_that_leaves_nothing_is_said_to(tmp_path):
    with pytest.raises(
        ValueError, match="train_dataset is empty after TRL prepared it: at max_length=1 none of its 24"
    ):
        mesh_trainer(str(tmp_path), max_length=1)
    for name in ("train_dataset", "eval_dataset"):  # from the beginning
        with pytest.raises(ValueError, match=f"^{name} is empty. Give it at least one row"):
            mesh_trainer(str(tmp_path), trainer={name: pairs(1, 1).select([])})


def test_other_arguments_and_models_with_adapters(tmp_path):
    from peft import get_peft_model

    for wrong in (DPOConfig(str(tmp_path), **QUIET), None):
        with pytest.raises(ValueError, match=f"args must be MeshAdaptDPOConfig, not {type(wrong).__name__}"):
            MeshAdaptDPOTrainer(tiny_model("llama"), wrong, train_dataset=pairs(4, 1))
    model = get_peft_model(tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with pytest.raises(NotImplementedError, match="PeftModelForCausalLM as model: TRL keeps the reference"):
        mesh_trainer(str(tmp_path), model)


def test_trainers_that_generate_are_refused_by_name(tmp_path):
    from trl import GRPOTrainer

    class MeshGRPOTrainer(MeshAdaptMixin, GRPOTrainer): ...

    with pytest.raises(NotImplementedError, match="GRPOTrainer over a mesh: it generates answers in every step"):
        MeshGRPOTrainer(tiny_model("llama"), MeshAdaptDPOConfig(output_dir=str(tmp_path), **QUIET))


def test_command_line(tmp_path):
    line = f"--output_dir {tmp_path} --use_cpu --bf16 false --pipeline_stages 2 --beta 0.05 --loss_type apo_zero"
    (args,) = HfArgumentParser(MeshAdaptDPOConfig).parse_args_into_dataclasses(line.split())
    assert (args.beta, args.loss_type, args.precompute_ref_log_probs, args.ddp_timeout) == (
        0.05,
        ["apo_zero"],
        True,
        600,
    )


def test_without_trl_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "hf_meshadapt.dpo")
    with pytest.raises(ModuleNotFoundError, match=r"MeshAdaptDPOTrainer needs trl: run pip install '\.\[trl\]' in a"):
        hf_meshadapt.MeshAdaptDPOTrainer  # noqa: B018 (names load on first use)
