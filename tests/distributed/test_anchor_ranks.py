"""An anchor of several processes: each has the gradients of its stage, and rank 0 the priors and fits of all."""

from __future__ import annotations

import os

import pytest
import torch

from hf_meshadapt.anchor.attachment import Attachment, attach, only_attachment
from hf_meshadapt.anchor.circuit import norm
from hf_meshadapt.anchor.handshake import SECRET_VARIABLE
from hf_meshadapt.anchor.messages import Message
from hf_meshadapt.anchoring.calibrator import Calibrator
from hf_meshadapt.anchoring.passes import AnchorPasses
from hf_meshadapt.anchoring.spread import ATTACHMENT, AnchorRanks
from hf_meshadapt.boundary.predictor import project_embedding
from hf_meshadapt.spectral.compressor import GradientCompressor
from hf_meshadapt.spectral.factors import to_tensors

from ..circuits import FAST, NUM_ROWS, ROWS, SECRET
from ..equality import Rows, collate_fixed, mesh_trainer, tiny_model
from ..runs import collect_warnings, fork
from .test_circuits import ANCHOR

# Of four layers; the second cut lies within a stage of the anchor, the others on its boundaries.
SPANS, CUTS, STAGE_OF = [range(0, 1), range(1, 3), range(3, 4)], (1, 2, 3), {1: 1, 2: 1, 3: 2}


def test_an_anchor_of_three_processes_has_the_gradients_and_fits_of_one(tmp_path):
    torch.set_num_threads(1)
    (tmp_path / "one").mkdir()
    calibrated = dict(preset="anchored", boundary_budget=0.4, calibration_tokens=1, wire_dtype="float32")
    options = dict(**ANCHOR, **calibrated, pipeline_stages=2, folder=tmp_path / "one")
    alone = anchor_gradients(0, **options)
    stages = fork(anchor_gradients, 3, circuit="anchor", fast_endpoint="127.0.0.1:1", **options)
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        assert stage["names"] == {name for other in stages for name in other["gradients"]} == alone["gradients"].keys()
        assert stage["norm"] == pytest.approx(alone["norm"], rel=1e-6)
        assert stage["num_entries"] < 0.7 * alone["num_entries"]
        for name, tensor in stage["gradients"].items():  # both ends have the tied matrix
            assert torch.equal(found.setdefault(name, tensor), tensor), name
            torch.testing.assert_close(tensor, alone["gradients"][name], rtol=0, atol=1e-6)
    assert found.keys() == alone["gradients"].keys()
    # Rank 0 alone has the priors, with those of the others.
    assert stages[0]["prior"].keys() == alone["prior"].keys()
    for key, tensor in alone["prior"].items():
        torch.testing.assert_close(stages[0]["prior"][key], tensor, rtol=0, atol=0.02)
    assert stages[1]["error"].startswith("the stages of replica 0 have read different batches for a prior")
    assert_same_fits(stages, alone)


def assert_same_fits(stages: list[dict], alone: dict) -> None:
    """Each stage has looked at the cuts within its layers, and rank 0 has what all made of it."""
    assert [stage["spans"] for stage in stages] == [SPANS] * 3
    found = {chunk: index for index, stage in enumerate(stages) for chunk in stage["moments"]}
    assert found == STAGE_OF and alone["moments"].keys() == alone["fits"].keys() == {1, 2, 3}
    for chunk, moments in alone["moments"].items():
        for found, expected in zip(stages[STAGE_OF[chunk]]["moments"][chunk], moments, strict=True):
            assert expected.any()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        found, expected = stages[0]["fits"][chunk], alone["fits"][chunk]
        assert found.keys() == expected.keys()
        for name in ("weights", "explained", "sensitivity", "felt", "forward/variances", "backward/variances"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5, msg=f"{chunk} {name}")
    assert not stages[1]["fits"] and not stages[2]["fits"]
    # What one of them saw is no use: nobody fits, and all are due again.
    assert all(stage["version"] == 7 and stage["due"] == [True, False, True] for stage in stages)
    assert all("hidden states or gradients are not finite" in stage["warned"] for stage in stages)


def anchor_gradients(rank: int, folder, **options) -> dict:
    """One pass at the weights of another model, and what comes of a rank that reads something else."""
    os.environ[SECRET_VARIABLE] = SECRET
    trainer = mesh_trainer(tiny_model("llama_tied"), ROWS, str(folder), NUM_ROWS, **FAST, **options)
    passes, compressor = AnchorPasses(trainer), GradientCompressor(trainer.args.spectral_config(), warm=False)
    weights, batch = dict(tiny_model("llama_tied", seed=3).named_parameters()), collate_fixed(Rows(ROWS).rows)
    weights = {name: tensor.detach() for name, tensor in weights.items()}
    num_entries = sum(parameter.numel() for _, parameter in trainer.engine.parts.stored_trainable())
    if trainer.engine.mesh.emulated:
        gradients = passes.gradients(weights, batch)
        prior = to_tensors(compressor.compress(gradients))
        fitted = fits_of(trainer, passes, weights, batch)
        return {"gradients": gradients, "norm": norm(gradients), "prior": prior, "num_entries": num_entries, **fitted}
    ranks = AnchorRanks(trainer.engine, lambda gradients: to_tensors(compressor.compress(gradients)))
    weights = ranks.scatter(weights) if rank == 0 else ranks.receive()
    gradients = passes.gradients(weights, batch)
    work = ranks.gather(gradients)
    other = {**batch, "input_ids": batch["input_ids"] + (rank == 2)}
    with pytest.raises(ValueError) as caught:
        passes.gradients(weights, other)
    return {
        "gradients": gradients, "norm": work.gradient_norm, "prior": work.tensors_of(work.names), "names": work.names,
        "num_entries": num_entries, "error": str(caught.value), "spans": trainer.engine.parts.spans,
        **fits_of(trainer, passes, weights, batch, ranks),
    }  # fmt: skip


def fits_of(trainer, passes: AnchorPasses, weights: dict, batch: dict, ranks: AnchorRanks | None = None) -> dict:
    """A calibration of two passes, and over several ranks two that the last one sees no numbers in."""
    table = project_embedding(tiny_model("llama").get_input_embeddings().weight, 8)
    labels = batch["labels"].clone()
    labels[:, :5] = -100  # context, which is looked at apart
    batch = batch | {"labels": labels}
    told = attach(Message("heartbeat"), Attachment(1, -1, CUTS, 4, table))
    if ranks is not None and ranks.is_first:
        ranks.tell_attachment(only_attachment(told))
    elif ranks is not None:
        task, num_bytes, _ = ranks.hear()
        assert task == ATTACHMENT
        told = ranks.hear_attachment(num_bytes)
    gathering = {} if ranks is None else {"gather": ranks.gather_fits}
    calibrator = Calibrator(trainer.engine, passes.gradients, num_tokens=1, max_passes=9, **gathering)
    calibrator.take(told)

    def look(version: int) -> bool:
        due = calibrator.begin(version)
        while due and calibrator.wants_more:
            calibrator.gradients(weights, batch)
        return due

    due = [look(7)]
    moments = {chunk: observer.moments().tensors() for chunk, observer in calibrator._observers.items()}
    result = {"moments": moments, "fits": calibrator.fits(7), "version": calibrator.version}
    if ranks is None:
        return result
    due += [look(7), look(8)]
    if trainer.engine.topology.is_last:
        calibrator._observers[3].by_replica[0].gradients[0, 0] = float("nan")
    warnings = collect_warnings()
    assert calibrator.fits(8) == {} and calibrator.version == 7
    return result | {"due": due, "warned": "\n".join(warnings)}
