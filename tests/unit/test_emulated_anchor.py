"""The anchor of the emulated mesh: what it computes, when it acts, and that it leaves the fast circuit alone."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt import MeshAdaptTrainer
from hf_meshadapt.anchoring.emulated import EmulatedAnchor
from hf_meshadapt.anchoring.passes import AnchorPasses
from hf_meshadapt.calibration import boundary_state
from hf_meshadapt.planner import ANCHOR_RANK
from tests.equality import Rows, collate_fixed, mesh_trainer, tiny_model
from tests.runs import SaveAt

ROWS, EVERY = 4, 3
COMMON = dict(pipeline_stages=2, eval_strategy="no", learning_rate=1e-2, gradient_accumulation_steps=1, max_steps=8)
MASKED = dict(mask_ratio=0.5, exact_first_token=True, boundary_predictor="mean")
ANCHOR = dict(anchor=True, anchor_every=EVERY, prior_rank=8)
# A wide budget for narrow channels.
CALIBRATED = dict(preset="anchored", boundary_budget=0.4, calibration_tokens=150)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make(folder, kind: str = "llama_tied", dropout: float = 0.0, **options):
    trainer = mesh_trainer(tiny_model(kind, dropout=dropout), ROWS, str(folder), 21, **{**COMMON, **options})
    trainer.metrics = []
    end_step = trainer.anchoring.end_step

    def end() -> None:
        end_step()
        trainer.metrics.append(trainer.anchoring.optimizer.metrics() if trainer.args.has_anchor else None)

    trainer.anchoring.end_step = end
    return trainer


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.engine.parts.model.state_dict().items()}


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2"])
def test_passes_see_the_gradient_of_the_uncut_model(tmp_path, kind):
    trainer = make(tmp_path, kind, dropout=0.3, **MASKED)
    before, named = weights(trainer), trainer.engine.parts.stored_trainable()
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    other, batch = tiny_model(kind, seed=4, dropout=0.3).eval(), collate_fixed([Rows(8)[i] for i in range(ROWS)])
    gradients = AnchorPasses(trainer).gradients(dict(other.named_parameters()), batch)
    # Trainer's count: for GPT-2 it has one label per row more than the loss.
    other(**batch, num_items_in_batch=trainer._count_labels(batch["labels"])).loss.backward()
    assert gradients.keys() == dict(other.named_parameters()).keys()
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-7)
    assert_same(weights(trainer), before)
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for _, parameter in named)


@pytest.mark.parametrize("options", [{}, {"data_parallel_replicas": 2, "gradient_accumulation_steps": 2}], ids=str)
def test_an_anchor_whose_priors_do_not_come_changes_no_bit(tmp_path, options):
    options = dict(**MASKED, **options, dropout=0.2, max_steps=3)
    runs = []
    for more in ({}, dict(anchor=True, anchor_every=4)):
        trainer = make(tmp_path, **options, **more)
        trainer.train()
        runs.append(weights(trainer))
    assert_same(*runs)
    assert trainer.anchoring.history.num_snapshots == 1


def test_priors_come_when_they_should(tmp_path, capsys):
    trainer = make(tmp_path, max_steps=10)
    assert trainer.anchoring.report() is None and trainer.anchoring.logs() == {}
    trainer = make(tmp_path, max_steps=10, **ANCHOR, logging_steps=5)
    trainer.train()
    # Of step 0, known from step 3 on, in use after three steps of taking it in.
    assert [row["weight"] for row in trainer.metrics] == [0.0] * 5 + [1.0] * 5
    assert [row.get("prior_age_steps") for row in trainer.metrics] == [None] * 5 + [5, 6, 7, 5, 6]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["prior_weight"] for log in logs] == [0, 1]
    assert "prior_age_steps" not in logs[0] and logs[1]["prior_age_steps"] == 6
    assert "prior_version" not in logs[0] and logs[1]["prior_version"] == 3
    news = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert news == [  # without any option
        "step 1: no prior yet",
        "step 6: its priors are in use (prior of step 0, 5 steps old)",
    ]
    assert trainer.anchoring.status() == "prior of step 3, 6 steps old"
    assert logs[1]["share_corrected"] == pytest.approx(trainer.metrics[-1]["share_corrected"])
    assert "gradient_in_prior" not in logs[0]  # nothing was corrected
    assert 0 < logs[1]["gradient_in_prior"] <= 1 and -1 <= logs[1]["gradient_prior_cosine"] <= 1
    report = trainer.mesh_report()
    assert report["anchor"] == {
        "rule": "diagonal", "anchor_every": 3, "anchor_every_chosen": False, "effective_anchor_every": 3.0,
        "num_snapshots": 4, "num_priors": 2, "num_steps": 10, "num_live_steps": 5, "mean_prior_age_steps": 5.8,
        "snapshot_bytes": report["anchor"]["snapshot_bytes"], "prior_bytes": report["anchor"]["prior_bytes"],
        "num_calibrations": 0, "calibration_bytes": 0,
    }  # fmt: skip
    assert report["planned_bytes_per_token"]["anchor"] > 0 and "anchor" not in report["bytes_ratio_to_dense"]


def test_without_logs_nothing_is_measured(tmp_path):
    trainer = make(tmp_path, max_steps=6, **ANCHOR, logging_strategy="no", logging_steps=0)
    trainer.train()
    assert trainer.metrics[-1]["weight"] == 1 and trainer.anchoring.optimizer.alignment == []


def test_an_old_prior_is_not_used(tmp_path):
    trainer = make(tmp_path, max_steps=9, anchor=True, anchor_every=2, max_staleness_steps=6, prior_rank=4)
    answer = trainer.anchoring._answer
    trainer.anchoring._answer = lambda version: answer(version) if version == 0 else None  # as if the anchor had died
    trainer.train()
    assert [row["weight"] for row in trainer.metrics] == [
        0,
        0,
        0,
        1.0,
        pytest.approx(2 / 3),
        pytest.approx(1 / 3),
        0,
        0,
        0,
    ]
    assert trainer.anchoring.history.num_live_steps == 3


def test_planned_bytes_are_those_of_what_is_sent(tmp_path):
    trainer = make(tmp_path, **ANCHOR, data_parallel_replicas=2, max_steps=1)
    trainer.train()
    (prior,) = trainer.anchoring.pending.values()
    values = [piece for value in prior.values.values() for piece in value]
    plan = trainer.engine.plan(ROWS, 16, 1)
    traffic = plan.anchor.traffic
    assert sum(traffic.prior_bytes) == sum(piece.numel() * piece.element_size() for piece in values)
    # The second step's snapshot is a difference; the tied matrix is on both stages.
    parameters = sum(parameter.numel() for _, parameter in trainer.engine.parts.stored_trainable())
    assert sum(traffic.snapshot_bytes) == pytest.approx(parameters * (1 + 2 / 64), rel=0.01)
    per_step = (sum(traffic.snapshot_bytes) + 2 * sum(traffic.prior_bytes)) / EVERY  # to the other replica too
    assert plan.axis_bytes("anchor") == pytest.approx(per_step, abs=4)
    assert {link.from_rank for link in plan.links if link.axis == "anchor"} == {0, 1, ANCHOR_RANK}
    assert plan.dense().axis_bytes("anchor") == 0 < plan.ratio_to_dense()


@pytest.mark.parametrize(
    "options",
    [
        dict(correction_rule="blend", optim="sgd", data_parallel_replicas=2, save_at=(3, 5)),
        dict(correction_rule="anchor_only", anchor_batches=2, save_at=(4,)),
        dict(preset="paper", anchor_snapshot_bits=4, dropout=0.2, save_at=(7,)),
        # Replicas that step apart: a prior is being taken in, and a part of the model on its way; a snapshot is due.
        dict(preset="paper", data_parallel_replicas=2, sync_every=4, num_fragments=2, matrix_rank=4, save_at=(4, 6)),
        # Fits on their way, and in use; the next ones are due later.
        dict(**CALIBRATED, calibration_every=4, save_at=(2, 5)),
    ],
    ids=lambda options: options.get("correction_rule", options.get("preset")),
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, options):
    save_at = options.pop("save_at")
    options = {**ANCHOR, **options}
    whole = make(tmp_path, **options)
    whole.add_callback(SaveAt(save_at))
    whole.train()
    for step in save_at:
        resumed = make(tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert_same(weights(resumed), weights(whole))
        assert_same(boundary_state(resumed.engine), boundary_state(whole.engine))
        assert resumed.metrics == whole.metrics[step:]
        assert resumed.anchoring.report() == whole.anchoring.report()


def test_another_mesh_shape_resumes_with_the_priors(tmp_path):
    whole = make(tmp_path, **ANCHOR)
    whole.add_callback(SaveAt((7,)))
    whole.train()
    resumed = make(tmp_path, **ANCHOR, pipeline_stages=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert resumed.metrics[0]["prior_version"] == whole.metrics[7]["prior_version"]
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], tensor, rtol=0, atol=1e-5)


def test_a_run_without_an_anchor_can_go_on_with_one(tmp_path):
    without = make(tmp_path, max_steps=5)
    without.add_callback(SaveAt((5,)))
    without.train()
    trainer = make(tmp_path, **ANCHOR, max_steps=14)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    # The first snapshot is of step 6.
    assert [row.get("prior_version") for row in trainer.metrics] == [None] * 6 + [6] * 3


def test_a_second_run_begins_anew(tmp_path):
    trainer = make(tmp_path, **ANCHOR, max_steps=7)
    trainer.train()
    trainer.train()
    assert [row["weight"] for row in trainer.metrics] == 2 * [0, 0, 0, 0, 0, 1, 1]
    assert trainer.anchoring.history.num_steps == 7


def test_anchor_only_steps_on_delayed_gradients_alone(tmp_path):
    """Against plain SGD on the gradients of the whole model, two steps late and clipped."""
    rate, options = 0.5, dict(optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", warmup_steps=0)
    trainer = make(
        tmp_path,
        "llama",
        **MASKED,
        **options,
        anchor=True,
        anchor_every=2,
        anchor_calibrates=False,
        correction_rule="anchor_only",
        prior_rank=99,
    )
    trainer.anchoring = EmulatedAnchor(trainer, exact=True)
    batches, history = [], []
    trainer.anchoring.passes.batches = lambda *args: Recorder(AnchorPasses(trainer).batches(*args), batches)
    end_step = trainer.anchoring.end_step
    trainer.anchoring.end_step = lambda: (end_step(), history.append(weights(trainer)))
    trainer.train()

    model, late = tiny_model("llama").eval(), []
    for step in range(8):
        if step % 2 == 0:
            model.zero_grad()
            model(**batches[step // 2]).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert norm > 0
            late.append([parameter.grad.clone() for parameter in model.parameters()])
        elif step >= 3:  # came at the step before, taken in over two
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), late[(step - 3) // 2]):
                    parameter -= rate * gradient
        for name, parameter in model.named_parameters():
            # Priors travel in bfloat16.
            torch.testing.assert_close(
                history[step][name], parameter.detach(), rtol=0, atol=4e-3, msg=f"{step} {name}"
            )
    moved = [not torch.equal(a["lm_head.weight"], b["lm_head.weight"]) for a, b in zip(history, history[1:])]
    assert moved == [False, False, True, False, True, False, True]


class Recorder:
    def __init__(self, batches, seen: list):
        self.batches, self.seen = batches, seen

    @property
    def num_taken(self) -> int:
        return self.batches.num_taken

    def __next__(self):
        batch = next(self.batches)
        self.seen.append(batch)
        return batch


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from Rows(21)


class Once(Stream):
    def __next__(self):
        raise StopIteration


def test_of_a_stream_it_reads_a_shard_and_a_resumed_run_goes_on_there(tmp_path):
    options = {**ANCHOR, "trainer": {"train_dataset": Stream()}}
    whole = make(tmp_path, **options)
    whole.add_callback(SaveAt((4,)))
    whole.train()
    assert whole.anchoring.batches.num_taken == 3
    # Of 21 rows, every third one from the one that the seed chooses: the next four are of the second round.
    seed = whole.args.anchor_config().seed
    shard = Rows(21).rows[seed % 3 :: 3]
    expected = collate_fixed([shard[i % len(shard)] for i in range(12, 16)])
    assert seed == 8 and torch.equal(next(whole.anchoring.batches)["input_ids"], expected["input_ids"])
    resumed = make(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(weights(resumed), weights(whole))
    assert resumed.metrics == whole.metrics[4:]


def test_a_data_set_that_can_be_read_once_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="anchor=True with a Once"):
        make(tmp_path, **ANCHOR, trainer={"train_dataset": Once()})


def test_the_papers_preset_trains_without_an_anchor_where_it_cannot_read(tmp_path, caplog):
    args = make(tmp_path, preset="paper", max_steps=2).args
    trainer = MeshAdaptTrainer(tiny_model("llama"), args, train_dataset=Once(), data_collator=collate_fixed)
    trainer.train()
    assert args.has_anchor and trainer.mesh_report()["anchor"] is None and "trains without its anchor" in caplog.text
