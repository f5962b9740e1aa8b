"""An anchor of several processes: each has the gradients of its stage, and rank 0 the priors of all."""

from __future__ import annotations

import os

import pytest
import torch

from hf_meshadapt.anchor.circuit import norm
from hf_meshadapt.anchor.handshake import SECRET_VARIABLE
from hf_meshadapt.anchoring.passes import AnchorPasses
from hf_meshadapt.anchoring.spread import AnchorRanks
from hf_meshadapt.spectral.compressor import GradientCompressor
from hf_meshadapt.spectral.factors import to_tensors

from ..circuits import FAST, NUM_ROWS, ROWS, SECRET
from ..equality import Rows, collate_fixed, mesh_trainer, tiny_model
from ..runs import fork
from .test_circuits import ANCHOR


def test_an_anchor_of_three_processes_has_the_gradients_of_one(tmp_path):
    torch.set_num_threads(1)
    (tmp_path / "one").mkdir()
    options = dict(**ANCHOR, pipeline_stages=2, folder=tmp_path / "one")
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
        return {"gradients": gradients, "norm": norm(gradients), "prior": prior, "num_entries": num_entries}
    ranks = AnchorRanks(trainer.engine, lambda gradients: to_tensors(compressor.compress(gradients)))
    gradients = passes.gradients(ranks.scatter(weights) if rank == 0 else ranks.receive(), batch)
    work = ranks.gather(gradients)
    other = {**batch, "input_ids": batch["input_ids"] + (rank == 2)}
    with pytest.raises(ValueError) as caught:
        passes.gradients(weights, other)
    return {
        "gradients": gradients, "norm": work.gradient_norm, "prior": work.tensors_of(work.names), "names": work.names,
        "num_entries": num_entries, "error": str(caught.value),
    }  # fmt: skip
