"""Measures of gradients and priors against full SVDs in float64, and what `diagnose` makes of a tiny model."""

from __future__ import annotations

import json
import math
import weakref

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hf_meshadapt import diagnosing
from hf_meshadapt.cli.diagnose import read_texts, token_rows, verdict
from hf_meshadapt.cli.main import main
from hf_meshadapt.diagnosing import DiagnosisOptions, coded_gradient, diagnose, make_trainer
from hf_meshadapt.diagnostics import (
    cosine,
    effective_rank,
    energy_in_subspace,
    energy_in_top,
    energy_kept,
    quartiles,
    singular_values,
)
from hf_meshadapt.pruning import pruned, pruned_losses
from hf_meshadapt.spectral.config import SpectralConfig
from hf_meshadapt.spectral.factors import Factors
from tests.equality import Rows, collate_fixed, tiny_model
from tests.spectral_oracle import gaussian, random_matrix, truncated


@pytest.mark.parametrize("shape,rank", [((12, 20), 3), ((20, 12), 8), ((7, 7), 7)], ids=str)
def test_energy_in_the_largest_directions_is_that_of_the_best_approximation(shape, rank):
    matrix = gaussian(*shape, seed=1)
    best = truncated(matrix, rank)
    expected = float(best.square().sum() / matrix.double().square().sum())
    assert energy_in_top(singular_values(matrix), rank) == pytest.approx(expected, rel=1e-5)


def test_effective_rank_counts_equal_directions():
    assert effective_rank(torch.ones(5)) == pytest.approx(5)
    assert effective_rank(torch.tensor([3.0, 3.0, 0.0])) == pytest.approx(2)
    # By the definition: exp of -sum p ln p.
    assert effective_rank(torch.tensor([3.0, 1.0])) == pytest.approx(
        math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    )
    assert math.isnan(effective_rank(torch.zeros(3))) and math.isnan(energy_in_top(torch.zeros(3), 2))


@pytest.mark.parametrize("rank", [1, 4, 9])
def test_energy_in_a_subspace_is_that_of_dense_projections(rank):
    gradient, matrix = gaussian(10, 14, seed=2), random_matrix(10, 14, 6, seed=3)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    keep = min(rank, 6)  # the matrix has no further direction
    left, right = (side.double() @ side.double().T for side in (u[:, :keep], vh[:keep].T))
    expected = float((left @ gradient.double() @ right).square().sum() / gradient.double().square().sum())
    s = torch.where(torch.arange(len(s)) < 6, s, torch.zeros_like(s))
    assert energy_in_subspace(gradient, Factors(u, s, vh.T), rank) == pytest.approx(expected, rel=1e-4)
    assert energy_in_subspace(matrix, Factors(u, s, vh.T), 6) == pytest.approx(1, rel=1e-5)


def test_a_filter_keeps_the_energy_of_what_it_lets_through():
    gradient, matrix = gaussian(6, 9, seed=8), gaussian(6, 9, seed=9)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    passed = sum(
        s[i] / (s[i] + 0.1 * s[0]) * (u[:, i] @ gradient @ vh[i]) * torch.outer(u[:, i], vh[i]) for i in range(len(s))
    )
    expected = float(passed.square().sum() / gradient.square().sum())
    assert energy_kept(gradient, Factors(u, s, vh.T), SpectralConfig()) == pytest.approx(expected, rel=1e-4)


def test_cosine_takes_all_parameters_for_one_vector():
    one = {"a": gaussian(3, 4, seed=4), "b": gaussian(5, seed=5)}
    other = {"a": gaussian(3, 4, seed=6), "b": gaussian(5, seed=7)}
    flat = [torch.cat([side[name].flatten() for name in ("a", "b")]) for side in (one, other)]
    assert cosine(one, other) == pytest.approx(float(torch.nn.functional.cosine_similarity(*flat, dim=0)), rel=1e-5)
    assert cosine(one, {name: -2 * tensor for name, tensor in one.items()}) == pytest.approx(-1)
    assert math.isnan(cosine(one, {name: torch.zeros_like(tensor) for name, tensor in one.items()}))


def test_quartiles_leave_out_what_is_no_number():
    assert quartiles([4.0, math.nan, 1.0, 3.0, 2.0, 5.0]) == (2, 3, 4)
    assert all(map(math.isnan, quartiles([math.nan])))


# The command ----------------------------------------------------------------------------------------------------------


def test_diagnose_of_a_tiny_model(monkeypatch):
    torch.set_num_threads(1)
    trainers = []

    def make_alone(*args):
        assert not any(reference() for reference in trainers)
        trainer = make_trainer(*args)
        trainers.append(weakref.ref(trainer))
        return trainer

    monkeypatch.setattr(diagnosing, "make_trainer", make_alone)
    model = tiny_model("llama_tied")
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = DiagnosisOptions(num_anchors=3, anchor_every=2, prior_rank=32, learning_rate=1e-3, mask_ratio=0.5)
    figures = diagnose(model, Rows(30), collate_fixed, options)
    assert len(trainers) == 5 and figures["num_matrices"] == 4 * 7 and list(figures["staleness"]) == [2, 4]
    assert not all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items() if name in start)
    low, median, high = figures["matrices"]["energy in top 8"]
    assert 0 < low <= median <= high < 1 and figures["matrices"]["energy in top 64"][0] == pytest.approx(1)
    assert 1 < figures["matrices"]["effective rank"][1] <= 32
    boundaries = figures["boundaries"]
    assert boundaries["uncoded"]["cosine_to_uncoded"] == pytest.approx(1)
    # At full rank nothing of a square matrix lies outside.
    assert boundaries["uncoded"]["share_in_prior"][2] == pytest.approx(1, abs=1e-4)
    assert boundaries["uncoded"]["error_share_in_prior"] is None is boundaries["uncoded"]["error_kept_by_filter"]
    coded = [row for kind, row in boundaries.items() if kind != "uncoded"]
    assert len(coded) == 3
    for row in coded:
        assert 0 < row["cosine_to_uncoded"] < 0.999 and 0 < row["corrected_cosine_to_uncoded"] < 0.999
        assert 0 < row["error_kept_by_filter"][1] < row["error_share_in_prior"][1] <= 1.0001


def test_without_coding_a_batch_has_the_gradient_of_the_uncut_model(tmp_path):
    torch.set_num_threads(1)
    uncut, batch = tiny_model("llama_tied"), collate_fixed([Rows(8)[i] for i in range(4)])
    uncut(**batch).loss.backward()
    options = DiagnosisOptions(rows=4)
    trainer = make_trainer(
        tiny_model("llama_tied"), Rows(8), collate_fixed, options, str(tmp_path), {"boundary_codec": "none"}
    )
    gradients = coded_gradient(trainer, batch)
    for name, parameter in uncut.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_pruning_zeroes_the_smallest_weights_of_blocks_and_gives_them_back():
    model = tiny_model("llama_tied", num_layers=2)
    batches = [collate_fixed([Rows(8)[i] for i in range(4)])]
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = pruned_losses(model, batches, (0.0, 0.5))
    assert losses[0.0] == pytest.approx(model(**batches[0]).loss.item(), rel=1e-6) and losses[0.5] != losses[0.0]
    with pruned(model, 0.3):
        for name, now in model.state_dict().items():
            is_matrix = ".layers." in name and now.dim() == 2
            assert int((now == 0).sum()) == (int(0.3 * now.numel()) if is_matrix else int((start[name] == 0).sum()))
            if is_matrix:
                assert start[name][now == 0].abs().max() <= now[now != 0].abs().min()
    assert all(torch.equal(now, start[name]) for name, now in model.state_dict().items())


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="stages=1: must be at least 2"):
        DiagnosisOptions(stages=1)


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<unk>": 1, **{chr(97 + i): 2 + i for i in range(26)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>")


def test_texts_become_rows(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a b c d e f g")
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n\n{"text": "c d e"}\n')
    assert read_texts(tmp_path / "a.txt", "text") == ["a b c d e f g"]
    texts = read_texts(tmp_path / "a.jsonl", "text")
    assert texts == ["a b", "c d e"]
    assert token_rows(["a b c d e f g"], tokenizer, 3) == [{"input_ids": [2, 3, 4]}, {"input_ids": [5, 6, 7]}]
    # What is left over counts from half a row on, a short text as it is.
    lengths = [len(row["input_ids"]) for row in token_rows(["a b c d e f", "a b c d e", "a b"], tokenizer, 4)]
    assert lengths == [4, 2, 4, 2]
    with pytest.raises(ValueError, match="--field=body: row 1 .* has no such text \\(text\\)"):
        read_texts(tmp_path / "a.jsonl", "body")
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n\n{oops\n')
    with pytest.raises(
        ValueError, match=r"--data=.*b.jsonl: line 3 is no JSON \(Expecting .* at character 2\): '{oops'"
    ):
        read_texts(tmp_path / "b.jsonl", "text")
    (tmp_path / "b.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match="--data=.*b.txt: not UTF-8 at byte 2"):
        read_texts(tmp_path / "b.txt", "text")
    with pytest.raises(ValueError, match="--length=1: must be at least 2"):
        token_rows(texts, tokenizer, 1)
    with pytest.raises(ValueError, match="no row has two tokens"):
        token_rows(["a"], tokenizer, 4)


def test_the_command_prints_and_draws(tmp_path, tokenizer, capsys):
    pytest.importorskip("matplotlib")
    tiny_model("llama", num_layers=2).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data.txt").write_text("a b c d e f g h i j k l m n o p " * 12)
    words = ["diagnose", str(tmp_path / "model"), "--data", str(tmp_path / "data.txt"), "--out", str(tmp_path / "out")]
    words += ["--pruning-twin", str(tmp_path / "model")]
    assert main([*words, "--length", "16", "--anchors", "2", "--anchor-every", "1", "--rows", "2"]) == 0
    text = capsys.readouterr().out
    for part in ("14 matrices", "effective rank", "random mask, mean fill", "top-k, error", "set to zero"):
        assert part in text
    figures = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert figures["staleness"].keys() == {"1"} and figures["num_matrices"] == 14
    assert figures["pruning"]["MODEL"] == figures["pruning"]["twin"] and len(figures["pruning"]["twin"]) == 6
    assert (tmp_path / "out" / "diagnosis.png").read_bytes().startswith(b"\x89PNG")
    assert main([*words, "--stages", "1"]) == 2


@pytest.mark.parametrize(
    "cosine,corrected,words",
    [
        (0.5, 0.4, ["where the model has been going", "comes closer (0.10 to 0.40"]),
        (-0.1, 0.11, ["little of the next steps", "stays (0.10 to 0.11"]),
        (0.0, 0.0, ["little of the next steps", "is further away (0.10 to 0.00"]),
    ],
)
def test_the_verdict_says_what_the_figures_do(cosine, corrected, words):
    rows = {"cosine_to_uncoded": 0.1, "corrected_cosine_to_uncoded": corrected}
    lines = verdict({"staleness": {5: cosine, 10: 0.9}, "boundaries": {"uncoded": {}, "top-k": rows}})
    assert all(word in line for word, line in zip(words, lines)) and len(lines) == 3
    assert lines[0].startswith(f"Anchor gradients 5 steps apart have a cosine of {cosine:.2f}")
