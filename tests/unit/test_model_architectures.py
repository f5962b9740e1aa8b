"""Every architecture of `tests.architectures`, cut into stages, is the whole model: logits, loss and all gradients.

Tolerance: 1e-6 relative for the loss, 1e-5 of its norm for every gradient, in float32. Measured: equal bit for bit with
one microbatch; several only change the order of sums.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers

from hf_meshadapt.checkpoint import load_stage_weights, merge_index, save_stage
from hf_meshadapt.config import BoundaryConfig, MeshConfig
from hf_meshadapt.pipeline.assembly import cut_model, load_model, own_parts, wrap_chunks
from hf_meshadapt.pipeline.intake import read_part
from hf_meshadapt.pipeline.microbatch import microbatch_keys
from hf_meshadapt.pipeline.outline import outline_model
from hf_meshadapt.pipeline.ownership import leftover_claims
from hf_meshadapt.pipeline.sequential import SequentialRunner
from hf_meshadapt.pipeline.split_run import Outcome, collect_gradients, cut_apart, run_parts, run_whole
from tests.architectures import ARCHITECTURES, FAST, LLAMA, make_architecture, make_batch

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def architectures(fast=FAST):
    """All of the table, those that are not in `fast` left to `make test-all`."""
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in ARCHITECTURES]


def num_items(batch) -> torch.Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def assert_same(outcome: Outcome, whole: Outcome) -> None:
    torch.testing.assert_close(outcome.loss, whole.loss, rtol=1e-6, atol=0)
    assert outcome.gradients.keys() == whole.gradients.keys()
    for name, expected in whole.gradients.items():
        gradient = outcome.gradients[name]
        assert (gradient is None) == (expected is None), name
        if expected is not None:
            assert (gradient - expected).norm() <= 1e-5 * expected.norm(), name


@pytest.mark.parametrize("name", architectures())
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_of_different_ranks_are_the_whole_model(name, stages):
    """Each stage pruned as on a rank of its own; rows padded on the right, then on the left."""
    model = make_architecture(name)
    ranks = cut_apart(model, MeshConfig(stages=stages))
    logits = []
    for side in (False, True):
        batch = make_batch(left=side)
        hooks = [
            part.register_forward_hook(lambda module, args, output: logits.append(output.logits.detach()))
            for part in (model, ranks[-1].model)
        ]
        whole = run_whole(model, batch, num_items(batch))
        assert_same(run_parts(ranks, batch, num_items(batch)), whole)
        for hook in hooks:
            hook.remove()
        torch.testing.assert_close(logits.pop(), logits.pop(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", architectures())
def test_the_emulated_mesh_is_the_whole_model(name):
    """Three stages through the project's runner: two microbatches, the last row made up by padding."""
    model = make_architecture(name)
    batch = make_batch(rows=3)
    whole = run_whole(model, batch, num_items(batch))
    mesh = MeshConfig(stages=3, microbatches=2, emulated=True)
    (parts,) = cut_apart(model, mesh)
    runner = SequentialRunner(parts, mesh, BoundaryConfig(), torch.device("cpu"))
    runner._set_mode = lambda training: None  # dropout stays off, as in the whole model's run
    loss = runner.train_batch(batch, 4, [microbatch_keys(0, 0, 0, 0, 2)], num_items(batch).float(), sync=True)
    assert_same(Outcome(loss, collect_gradients([parts])), whole)


SAVED = ("llama", "gpt2", "opt", "phi3", "mixtral", "qwen3_next", "gemma3", "mamba", "bloom", "gpt_oss", "stablelm")
SAVED += ("gpt_neox", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "loaded"])
def test_a_part_of_a_model_is_not_taken_for_the_whole(by_name, tmp_path):
    model, tokens = make_architecture("llama"), torch.ones(1, 3, dtype=torch.long)
    model.save_pretrained(tmp_path)
    for stage in range(2):
        mesh, source = MeshConfig(stages=2), str(tmp_path)
        if by_name:
            part, *_ = load_model(source, outline_model(source), mesh, stage, "float32")
        else:
            part, *_ = cut_model(copy.deepcopy(model), mesh, stage)
        with pytest.raises(NotImplementedError, match="generate.. on a rank of a mesh: the model there is a part"):
            part.generate(tokens, max_new_tokens=2)
        with pytest.raises(NotImplementedError, match=f"a forward of the model on stage {stage} of 2: .*a part"):
            part(input_ids=tokens, labels=tokens)
        with pytest.raises(
            NotImplementedError, match=r"save_pretrained.* Call trainer.save_model\(folder\) on all ranks"
        ):
            part.save_pretrained(tmp_path / "saved")
        with pytest.raises(NotImplementedError, match=r"push_to_hub.* Call trainer.push_to_hub\(\) on all ranks"):
            part.push_to_hub("me/model")
    whole, *_ = cut_model(model, MeshConfig(stages=2, emulated=True), 0)
    assert whole.generate(tokens, max_new_tokens=2).shape[0] == 1
    assert whole(input_ids=tokens, labels=tokens).loss.isfinite()
    whole.save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAVED[:4] else pytest.mark.slow) for name in SAVED]
)
@pytest.mark.parametrize("tied", [True, False])
def test_stages_load_and_save_the_whole_model(name, tied, tmp_path):
    """Each stage loads its own part by name; their merged checkpoint is the original, and is loaded in place again."""
    model = make_architecture(name, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "whole")
    mesh = MeshConfig(stages=3)
    source = str(tmp_path / "whole")
    cuts = [load_model(source, outline_model(source), mesh, stage, "float32") for stage in range(3)]
    wrapped = [wrap_chunks(*cut, mesh, BoundaryConfig(), stage) for stage, cut in enumerate(cuts)]
    claims = {chunk: names for stages in wrapped for chunk, names in leftover_claims(stages).items()}
    ranks = [own_parts(*cut, stages, claims) for cut, stages in zip(cuts, wrapped)]
    batch = make_batch()
    for parts in ranks:
        parts.model.eval()
    assert_same(run_parts(ranks, batch, num_items(batch)), run_whole(model, batch, num_items(batch)))

    for stage, parts in enumerate(ranks):
        save_stage(parts.model, parts.saved_names(), tmp_path / "merged", stage, 3)
    merge_index(tmp_path / "merged")
    again = type(model).from_pretrained(tmp_path / "merged")
    assert (again.get_input_embeddings().weight is again.get_output_embeddings().weight) == tied
    expected = model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for weight, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[weight]), weight

    for stage, parts in enumerate(ranks):
        copies, local = parts.stored_name_of_copy(), parts.model.state_dict()
        for weight in (*parts.saved_names(), *copies):
            local[weight].zero_()
        convert = functools.partial(read_part, parts, tmp_path / "merged", mesh, stage)
        load_stage_weights(parts.model, parts.saved_names(), tmp_path / "merged", copies, convert)
        for weight in (*parts.saved_names(), *copies):
            assert torch.equal(local[weight], expected[weight]), weight


def test_gemma3n_is_refused():
    config = transformers.Gemma3nTextConfig(
        **{**LLAMA, "num_hidden_layers": 4}, head_dim=8, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97, laurel_rank=4, layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    model = transformers.Gemma3nForCausalLM(config)
    with pytest.raises(NotImplementedError, match="Gemma3nForCausalLM.*num_kv_shared_layers=2.*altup_num_inputs=4"):
        cut_apart(model, MeshConfig(stages=2))
    cut_apart(model, MeshConfig(stages=1))


def test_outputs_of_all_layers_are_refused():
    """A stage has its own layers' only; the routers' auxiliary loss is not a sum over layers, with weight or without."""
    for name in ("mixtral", "qwen3_moe"):
        model = make_architecture(name, output_router_logits=True)
        with pytest.raises(NotImplementedError, match="output_router_logits=True.*Set it to False"):
            cut_apart(model, MeshConfig(stages=2))
        model.config.output_router_logits = False
        cut_apart(model, MeshConfig(stages=2))
    for output in ("output_hidden_states", "output_router_logits"):
        model = make_architecture("mixtral", router_aux_loss_coef=0.0)
        setattr(model.config, output, True)
        with pytest.raises(
            NotImplementedError, match=f"config.{output}=True: a stage has those of its own layers only"
        ):
            cut_apart(model, MeshConfig(stages=1))


def test_layers_that_share_a_weight_are_refused():
    model = make_architecture("llama")
    model.model.layers[3].mlp = model.model.layers[0].mlp
    with pytest.raises(NotImplementedError, match="layers.3.mlp.*layers.0.mlp.*are one weight.*pipeline_stages=1"):
        cut_apart(model, MeshConfig(stages=2))
