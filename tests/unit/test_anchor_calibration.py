"""Boundaries that the anchor calibrates: what is fitted, when it comes into force, what travels, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_meshadapt.anchor.attachment import AttachingEncoder, Attachment, attach, detach
from hf_meshadapt.anchor.messages import Message, MessageError
from hf_meshadapt.anchor.schedule import AnchorTraffic
from hf_meshadapt.anchor.snapshot import SnapshotDecoder, SnapshotEncoder
from hf_meshadapt.anchoring import fits as boundary_fits
from hf_meshadapt.anchoring.calibrator import Calibrator
from hf_meshadapt.anchoring.passes import AnchorPasses
from hf_meshadapt.anchoring.prior import Prior, pack, payload_bytes, unpack
from hf_meshadapt.boundary.fitting import BoundaryFit, fit_boundary
from hf_meshadapt.boundary.predictor import num_features, token_features
from hf_meshadapt.boundary.sequence_coder import TARGET, TOKEN
from hf_meshadapt.boundary.statistics import BoundaryMoments
from hf_meshadapt.config import BoundaryConfig
from hf_meshadapt.pipeline.microbatch import token_kinds
from tests.equality import Rows, collate_fixed, mesh_trainer, tiny_model
from tests.runs import SaveAt

CALIBRATED = dict(
    pipeline_stages=3, preset="anchored", wire_dtype="float32", boundary_budget=0.4, calibration_tokens=150,
    eval_strategy="no", gradient_accumulation_steps=1, learning_rate=1e-2, max_steps=8,
    anchor=True, anchor_every=2, prior_rank=4, calibration_every=1,
)  # fmt: skip
DENSE = dict(pipeline_stages=3, preset="dense", anchor=True)
CONFIG = BoundaryConfig("transform", predictor="token", exact_first_token=True, wire_dtype="bfloat16", budget=0.1)
HIDDEN, FEATURES = 12, 7


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make(folder, kind: str = "llama", **options):
    return mesh_trainer(tiny_model(kind), 4, str(folder), 21, **{**CALIBRATED, **options})


def attachment(engine) -> Attachment:
    """Of a fast circuit that is cut as this one."""
    cuts = tuple(span.start for span in engine.parts.spans[1:])
    return Attachment(1, -1, cuts, engine.mesh.stages, engine.features)


def fits_here(trainer) -> dict[int, dict[str, torch.Tensor]]:
    stages = trainer.engine.parts.stages.items()
    return {chunk: stage.receive.coder.fit.state() for chunk, stage in stages if stage.receive is not None}


# What is fitted ------------------------------------------------------------------------------------------------------


def test_fits_are_those_of_the_uncut_model_with_the_snapshots_weights(tmp_path):
    """Against hidden states and gradients taken by hooks; the second of the batches is held out, and of the cuts one is
    not where this process is cut."""
    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    engine, other = trainer.engine, tiny_model("llama", seed=5).eval()
    batches = [collate_fixed([Rows(12)[4 * i + j] for j in range(4)]) for i in range(3)]
    calibrator = Calibrator(engine, AnchorPasses(trainer).gradients, num_tokens=3 * 4 * 16, max_passes=9)
    cuts = (1, 2, 3)
    assert len({span.start for span in engine.parts.spans} & {*cuts}) == 2
    calibrator.take(attach(Message("heartbeat"), Attachment(1, -1, cuts, 2, engine.features)))
    assert calibrator.begin(7)
    for batch in batches:
        assert calibrator.wants_more
        calibrator.gradients(dict(other.named_parameters()), batch)
    assert not calibrator.wants_more
    fits = calibrator.fits(7)
    assert fits.keys() == {1, 2, 3} and calibrator.version == 7 and not calibrator.fits(7)
    for chunk, fit in fits.items():
        moments = observed(other, cuts[chunk - 1] - 1, batches, engine.features)
        expected = fit_boundary(moments, transforms=True).state()
        assert fit.keys() == expected.keys()
        for name in ("weights", "explained", "sensitivity", "felt", "forward/variances", "backward/variances"):
            torch.testing.assert_close(fit[name], expected[name], rtol=2e-2, atol=1e-4, msg=f"{chunk} {name}")


def observed(model, layer: int, batches, table) -> BoundaryMoments:
    moments = BoundaryMoments.zeros(num_features(table), model.config.hidden_size, "cpu")
    hidden: list[torch.Tensor] = []

    def keep(module, inputs, output) -> None:
        output.retain_grad()
        hidden.append(output)

    model.model.layers[layer].register_forward_hook(keep)
    for index, batch in enumerate(batches):
        model(**batch).loss.backward()
        kind, features = token_kinds(batch), token_features(table, batch["input_ids"])
        moments.add(features, hidden[-1].detach(), (kind == TOKEN) | (kind == TARGET), held_out=index == 1)
        if index != 1:
            moments.add_gradient(features, hidden[-1].grad, kind == TOKEN, kind == TARGET)
    return moments


def test_a_prior_is_of_its_own_batches_whether_or_not_fits_are_due(tmp_path):
    priors = {}
    for calibrates in (True, False):
        trainer = make(tmp_path, max_steps=1, anchor_calibrates=calibrates)
        trainer.train()
        (priors[calibrates],) = trainer.anchoring.pending.values()
    assert priors[True].fits.keys() == {1, 2} and not priors[False].fits
    assert (priors[True].num_batches, priors[False].num_batches) == (3, 1)  # 150 tokens in batches of 64
    for name, value in priors[True].values.items():
        assert all(torch.equal(a, b) for a, b in zip(value, priors[False].values[name])), name


def test_frozen_layers_before_a_cut_do_not_hide_its_gradients(tmp_path):
    """Nor does gradient checkpointing, by which layers may run twice."""
    fits = {}
    for frozen in (False, True):
        model = tiny_model("llama")
        for part in (model.model.embed_tokens, model.model.layers[0]) if frozen else ():
            part.requires_grad_(False)
        if frozen:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer = mesh_trainer(model, 4, str(tmp_path), 21, **{**CALIBRATED, "pipeline_stages": 2})
        calibrator = Calibrator(trainer.engine, AnchorPasses(trainer).gradients, num_tokens=1, max_passes=9)
        calibrator.set_up(Attachment(1, -1, (1, 3), 3, None))
        assert calibrator.begin(0)
        weights = {name: p.detach().clone() for name, p in trainer.engine.parts.stored_trainable()}
        calibrator.gradients(weights, collate_fixed([Rows(4)[i] for i in range(4)]))
        fits[frozen] = calibrator.fits(0)
    for chunk, fit in fits[False].items():
        for name, tensor in fit.items():
            assert torch.equal(fits[True][chunk][name], tensor), f"{chunk} {name}"


@pytest.mark.parametrize("tokens,passes,expected", [(64, 9, 2), (130, 9, 3), (9999, 5, 5), (9999, 1, 1)])
def test_as_many_passes_as_it_takes(tmp_path, tokens, passes, expected):
    """At least two, for one is held out, and no row twice."""
    batch, count = {"labels": torch.zeros(4, 16)}, 0
    calibrator = Calibrator(make(tmp_path).engine, lambda weights, batch: {}, tokens, passes)
    calibrator.set_up(Attachment(1, -1, (2, 4), 3, torch.ones(97, 4, dtype=torch.bfloat16)))
    assert calibrator.begin(0)
    while calibrator.wants_more:
        calibrator.gradients({}, batch)
        count += 1
    assert count == expected


# When --------------------------------------------------------------------------------------------------------------


def test_fits_come_with_their_prior_and_replace_the_passes_of_the_mesh(tmp_path):
    trainer = make(tmp_path, calibration_every=3)
    seen, begin_step = [], trainer.anchoring.begin_step

    def begin(step: int) -> None:
        begin_step(step)
        seen.append(fits_here(trainer)[1]["weights"])

    trainer.anchoring.begin_step = begin
    trainer.train()
    # Snapshots before steps 1, 3, 5, 7; every second brings fits, in force from the third step after on.
    changed = [step for step in range(1, 8) if not torch.equal(seen[step], seen[step - 1])]
    assert changed == [2, 6]
    report = trainer.mesh_report()
    assert report["calibration"]["passes"] == 1 and report["anchor"]["num_calibrations"] == 2
    sizes = [t.numel() * t.element_size() for fit in fits_here(trainer).values() for t in fit.values()]
    # Both boundaries have two ends; `explained` and `sensitivity` are not planned.
    assert report["anchor"]["calibration_bytes"] == 2 * (sum(sizes) - 2 * 12)
    traffic = trainer.engine.anchor_plan.traffic
    assert traffic.calibration_every == 3 and len(traffic.fit_bytes) == 3


def test_by_default_fits_cost_a_quarter_of_the_coded_bytes(tmp_path):
    trainer = make(tmp_path, max_steps=1, calibration_every=None)
    trainer.train()
    traffic, plan = trainer.engine.anchor_plan.traffic, trainer.engine.plan(4, 16, 1)
    spent = sum(traffic.fit_bytes) / traffic.calibration_every
    assert 0.1 * plan.axis_bytes("pipeline") < spent <= 0.27 * plan.axis_bytes("pipeline")


def test_an_anchor_that_dies_leaves_its_last_fits_in_force(tmp_path):
    trainer = make(tmp_path)
    answer = trainer.anchoring._answer
    trainer.anchoring._answer = lambda version: answer(version) if version == 0 else None
    trainer.train()
    assert trainer.anchoring.fitting.num_applied == 1 and trainer.engine.calibration_cost["passes"] == 1


def test_other_boundaries_do_not_resume_with_fits_that_were_on_their_way(tmp_path):
    whole = make(tmp_path)
    whole.add_callback(SaveAt((1,)))
    whole.train()
    same, cut = make(tmp_path, max_steps=1), make(tmp_path, pipeline_stages=2)
    same.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [sorted(prior.fits) for prior in same.anchoring.pending.values()] == [[1, 2]]
    assert same.engine.calibration_cost["passes"] == 1  # the interrupted run's
    cut.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert cut.engine.calibration_cost["passes"] == 1 and cut.anchoring.fitting.num_applied == 2
    assert cut.anchoring.fitting.version == 4


def test_passes_that_are_not_finite_give_no_fits(tmp_path, caplog):
    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    calibrator = Calibrator(trainer.engine, AnchorPasses(trainer).gradients, num_tokens=1, max_passes=9)
    calibrator.set_up(dataclasses.replace(attachment(trainer.engine), features=None))
    weights = {name: torch.full_like(p, float("inf")) for name, p in trainer.engine.parts.stored_trainable()}
    assert calibrator.begin(3)
    calibrator.gradients(weights, collate_fixed([Rows(4)[i] for i in range(4)]))
    assert calibrator.fits(3) == {} and calibrator.version == -1 and "not finite" in caplog.text


# What travels --------------------------------------------------------------------------------------------------------


def a_fit(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of random hidden states."""
    generator = torch.Generator().manual_seed(seed)
    moments = BoundaryMoments.zeros(FEATURES, HIDDEN, "cpu")
    for held_out in (False, True):
        hidden = torch.randn(2, 40, HIDDEN, generator=generator)
        features = torch.cat([torch.randn(2, 40, FEATURES - 1, generator=generator), torch.ones(2, 40, 1)], dim=2)
        every = torch.ones(2, 40, dtype=torch.bool)
        targets = torch.arange(40).expand(2, -1) > 20
        moments.add(features, hidden, every, held_out)
        moments.add_gradient(features, torch.randn(2, 40, HIDDEN, generator=generator), ~targets, targets)
    return fit_boundary(moments, transforms=True).state()


def test_what_travels_is_what_products_are_computed_with():
    fit = a_fit()
    sent = boundary_fits.to_wire(fit, CONFIG)
    assert {name for name, t in sent.items() if t.dtype == torch.bfloat16} == {
        "weights", "forward/analysis", "forward/synthesis", "backward/analysis", "backward/synthesis",
    }  # fmt: skip
    whole = dataclasses.replace(CONFIG, wire_dtype="float32")
    assert all(torch.equal(tensor, fit[name]) for name, tensor in boundary_fits.to_wire(fit, whole).items())
    for config, wire in ((CONFIG, sent), (whole, fit)):
        planned = boundary_fits.fit_bytes(config, HIDDEN, FEATURES)
        assert sum(t.numel() * t.element_size() for t in wire.values()) == planned + 4 + 8
    assert BoundaryFit.from_state(sent).forward.variances.dtype == torch.float32


def test_fits_pass_to_other_replicas_behind_their_prior():
    fits = {chunk: boundary_fits.to_wire(a_fit(chunk), CONFIG) for chunk in (1, 2)}
    payload = pack(Prior(3, 0.5, 1, {}, fits), {})
    other = unpack(payload, {})
    assert len(payload) > payload_bytes({}) and other.version == 3 and other.fits.keys() == fits.keys()
    for chunk, fit in fits.items():
        assert all(
            torch.equal(t, other.fits[chunk][n]) and t.dtype == other.fits[chunk][n].dtype for n, t in fit.items()
        )
    assert boundary_fits.from_tensors({"a.b/u": payload}) == ({}, {"a.b/u": payload})
    with pytest.raises(ValueError, match="'fit/x/y' names no part"):
        boundary_fits.from_tensors({"fit/x/y": payload})


def test_both_ends_of_a_boundary_get_its_fit():
    assert [boundary_fits.boundaries_of(stage, 2, 4) for stage in (0, 1)] == [[1, 2, 3]] * 2
    assert [boundary_fits.boundaries_of(stage, 3, 3) for stage in (0, 1, 2)] == [[1], [1, 2], [2]]


WRONG = {
    "another boundary": (lambda fits: {2: fits[1]}, "the boundaries before chunks"),
    "a shape": (lambda fits: {1: fits[1] | {"weights": torch.zeros(3, HIDDEN)}}, "weights of shape"),
    "too little": (
        lambda fits: {1: {n: t for n, t in fits[1].items() if n != "backward/analysis"}},
        "backward/analysis",
    ),
    "too much": (lambda fits: {1: fits[1] | {"more": torch.zeros(1)}}, "more of shape"),
    "not finite": (lambda fits: {1: fits[1] | {"explained": torch.tensor(float("nan"))}}, "not finite"),
    "no numbers": (lambda fits: {1: fits[1] | {"explained": torch.tensor(1)}}, "not finite"),
}


@pytest.mark.parametrize("case", WRONG)
def test_fits_of_another_form_are_refused(case):
    change, match = WRONG[case]
    fits = {1: boundary_fits.to_wire(a_fit(), CONFIG)}
    for good in ({}, fits, {1: {n: t for n, t in fits[1].items() if n != "felt"}}):
        boundary_fits.check_fits(good, [1], CONFIG, HIDDEN, FEATURES)
    with pytest.raises(ValueError, match=match):
        boundary_fits.check_fits(change(fits), [1], CONFIG, HIDDEN, FEATURES)


def test_fits_that_nobody_asked_for_are_refused(tmp_path):
    trainer = make(tmp_path, anchor_calibrates=False)
    with pytest.raises(ValueError, match="nobody asked for"):
        trainer.anchoring.fitting.check(Prior(3, 0.5, 1, {}, {1: a_fit()}))


@pytest.mark.parametrize("features", [torch.ones(5, 3, dtype=torch.bfloat16), None], ids=["features", "none"])
def test_a_new_anchor_is_told_once_what_it_needs(features):
    told, decoder = Attachment(40, 20, (2, 3, 7), 2, features), SnapshotDecoder()
    encoder, weights = AttachingEncoder(SnapshotEncoder(0), lambda: told), {"w": torch.ones(3)}
    for generation in range(2):
        messages = [encoder.encode(10 * generation + version, weights) for version in range(2)]
        found = [detach(message) for message in messages]
        assert found[1] is None and dataclasses.replace(found[0], features=features) == told
        assert features is None or torch.equal(found[0].features, features)
        for message in messages:
            decoder.decode(message)  # which takes nothing else than weights
        encoder.reset()


@pytest.mark.parametrize(
    "wrong",
    [
        dict(every=0), dict(every=1.5), dict(version=-2), dict(features=torch.ones(3, 2)),
        dict(cuts=()), dict(cuts=(0, 2, 3)), dict(cuts=(1, 3, 3)), dict(cuts=(3, 2, 4)), dict(cuts=(1, 2, True)),
        dict(cuts=(1, 2.0, 3)), dict(num_stages=0), dict(num_stages=3), dict(num_stages=2.0),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_attachment_is_refused(wrong):
    told = dataclasses.replace(Attachment(4, 2, (1, 2, 3), 4, torch.ones(5, 3, dtype=torch.bfloat16)), **wrong)
    with pytest.raises(MessageError):
        detach(attach(Message("snapshot"), told))


def test_an_anchor_refuses_cuts_that_its_model_does_not_have_and_fits_of_nothing(tmp_path):
    for told, options in ((Attachment(1, -1, (1, 4), 3, None), {}), (Attachment(1, -1, (1, 3), 3, None), DENSE)):
        trainer = mesh_trainer(tiny_model("llama"), 4, str(tmp_path), 21, **options or CALIBRATED)
        calibrator = Calibrator(trainer.engine, AnchorPasses(trainer).gradients, num_tokens=1, max_passes=9)
        with pytest.raises(MessageError, match="give both circuits the same model and the same arguments"):
            calibrator.take(attach(Message("heartbeat"), told))
        assert calibrator.attachment is None


def test_fits_count_with_every_so_many_priors():
    traffic = AnchorTraffic((1000, 2000), (100, 300), fit_bytes=(60, 120), calibration_every=25)
    assert [traffic.returned_per_step(stage, 10) for stage in (0, 1)] == [12, 34]
    assert traffic.bytes_per_step(10) == 300 + 46
    assert dataclasses.replace(traffic, calibration_every=3).returned_per_step(0, 10) == 16
