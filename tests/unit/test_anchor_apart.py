"""An anchor beside replicas that step apart: all are corrected by the same priors, which are of the outer model."""

from __future__ import annotations

import pytest
import torch

from hf_meshadapt.anchoring.emulated import EmulatedAnchor
from hf_meshadapt.anchoring.passes import AnchorPasses
from hf_meshadapt.pipeline.local_replicas import LocalReplicas
from hf_meshadapt.spectral.config import SpectralConfig
from hf_meshadapt.spectral.optimizer import SpectralCorrection
from tests.equality import tiny_model
from tests.spectral_oracle import correction_oracle, gaussian
from tests.unit.test_emulated_anchor import COMMON, ROWS, Recorder, assert_same, make, weights
from tests.unit.test_local_replicas import OPTIMIZERS, loss_of, model_of

EVERY = 2
# SGD shows what a gradient was; the outer optimizer has a momentum.
STEPPING = dict(optim="sgd", optim_args="momentum=0.9", lr_scheduler_type="constant", warmup_steps=0)
APART = dict(data_parallel_replicas=2, outer_wire="float32", outer_learning_rate=0.7, outer_momentum=0.9)
SYNCS = {
    "diloco": dict(dp_sync="diloco", sync_every=3),
    "streaming_diloco": dict(dp_sync="streaming_diloco", sync_every=4, num_fragments=1, overlap_steps=1, mixing=0.5),
}
RULES = {"two_sided": dict(correction_tau=1e-3, correction_tau_relative=False), "blend": {}, "anchor_only": {}}
RATE = 0.1


@pytest.fixture(autouse=True)
def threads(one_thread):
    pass


# A slow reading -------------------------------------------------------------------------------------------------------


class ByHand:
    """Two replicas, each a model of its own, the outer model and the anchor's, in as many words.

    Args:
        config: of the correction, whose priors are the newest anchor gradients.
        snapshot_of: what the anchor sees, of (outer model, first replica).
    """

    def __init__(self, sync: dict, config: SpectralConfig, snapshot_of=lambda outer, first: outer):
        self.sync, self.config, self.snapshot_of = sync, config, snapshot_of
        self.replicas, self.outer = [tiny_model("llama"), tiny_model("llama")], tiny_model("llama")
        self.inner = [torch.optim.SGD(each.parameters(), lr=RATE, momentum=0.9) for each in self.replicas]
        self.momentum = {name: torch.zeros_like(p) for name, p in self.outer.named_parameters()}
        self.priors: list[dict[str, torch.Tensor]] = []  # of the snapshots before steps 0, 2, 4, ...
        self.sent: tuple[int, dict[str, torch.Tensor]] | None = None  # when it arrives, averaged pseudo-gradients

    def step(self, number: int, batch: dict, num_items: float, anchor_batch: dict | None) -> None:
        if anchor_batch is not None:
            self.priors.append(self.anchor_gradients(anchor_batch))
        # Of two steps before, taken in over two.
        prior = self.priors[(number - 3) // EVERY] if number >= 3 else None
        is_new = number >= 3 and (number - 3) % EVERY == 0
        for replica, (model, inner) in enumerate(zip(self.replicas, self.inner)):
            rows = slice(ROWS * replica, ROWS * (replica + 1))
            mine = {name: value[rows] for name, value in batch.items()}
            model(**mine, num_items_in_batch=num_items / 2).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if prior is not None:
                self.correct(model, prior)
            if self.config.rule != "anchor_only" or is_new:
                inner.step()
            inner.zero_grad()
        self.synchronise(number + 1)

    def anchor_gradients(self, batch: dict) -> dict[str, torch.Tensor]:
        model = self.snapshot_of(self.outer, self.replicas[0])
        model.zero_grad()
        model(**batch).loss.backward()
        if self.config.adds_prior:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return gradients

    def correct(self, model, prior: dict[str, torch.Tensor]) -> None:
        for name, parameter in model.named_parameters():
            if self.config.adds_prior or (".layers." in name and parameter.ndim == 2):
                parameter.grad.copy_(correction_oracle(parameter.grad, prior[name], self.config, weight=1.0))

    @torch.no_grad()
    def synchronise(self, steps: int) -> None:
        """After so many steps."""
        mine = [dict(model.named_parameters()) for model in self.replicas]
        if steps % self.sync["sync_every"] == 0:
            pseudo = {n: p - (mine[0][n] + mine[1][n]) / 2 for n, p in self.outer.named_parameters()}
            self.sent = (steps + self.sync.get("overlap_steps", 0), pseudo)
        if self.sent is None or self.sent[0] != steps:
            return
        (_, pseudo), self.sent, mixing = self.sent, None, self.sync.get("mixing", 0.0)
        for name, outer in self.outer.named_parameters():
            self.momentum[name] = 0.9 * self.momentum[name] + pseudo[name]
            outer -= 0.7 * (pseudo[name] + 0.9 * self.momentum[name])
            for parameters in mine:
                parameters[name].copy_(mixing * parameters[name] + (1 - mixing) * outer)


def train_watched(folder, sync: dict, rule: str) -> tuple[list, list, list]:
    """A run of the emulated mesh; returns its batches by step, the anchor's batches, and by step all replicas' weights.

    Snapshots and priors are sent exactly, so that nothing but the arithmetic can differ.
    """
    options = dict(**STEPPING, **APART, **sync, learning_rate=RATE, max_steps=10, **RULES[rule])
    anchor = dict(anchor=True, anchor_every=EVERY, prior_rank=99, prior_ema_beta=0.0, correction_rule=rule)
    trainer = make(folder, "llama", **options, **anchor)
    trainer.anchoring = anchor = EmulatedAnchor(trainer, exact=True)
    batches, anchor_batches, history = [], [], []
    anchor.passes.batches = lambda *args: Recorder(AnchorPasses(trainer).batches(*args), anchor_batches)
    anchor.compressor.compress = lambda gradients: {name: gradients[name] for name in anchor.optimizer.priors.held}
    train_batch, end_step = trainer.engine.train_batch, trainer._end_step

    def watched(batch, rows, num_items, *others):
        batches.append((batch, float(num_items)))
        return train_batch(batch, rows, num_items, *others)

    def end() -> None:
        end_step()
        local = trainer.engine.replication.local
        history.append([{name: t.clone() for name, t in mine.items()} for mine in local.weights])

    trainer.engine.train_batch, trainer._end_step = watched, end
    trainer.train()
    live = [anchor.optimizer.metrics()["num_live_steps"], anchor.history.num_applied, anchor.history.num_snapshots]
    # Priors of steps 0, 2, 4 and 6 came into use: each once, whatever the number of replicas.
    assert live == [4 if rule == "anchor_only" else 7, 4, 5]
    return batches, anchor_batches, history


def distance(history: list, by_hand: ByHand, batches: list, anchor_batches: list) -> float:
    """Largest difference of any weight after any step but the last, after which all is synchronised."""
    worst = 0.0
    for number, (batch, num_items) in enumerate(batches[:-1]):
        by_hand.step(number, batch, num_items, anchor_batches[number // EVERY] if number % EVERY == 0 else None)
        for mine, model in zip(history[number], by_hand.replicas):
            for name, parameter in model.named_parameters():
                worst = max(worst, float((mine[name] - parameter.detach()).abs().max()))
    return worst


@pytest.mark.parametrize(
    "sync,rule", [("diloco", "two_sided"), ("streaming_diloco", "blend"), ("diloco", "anchor_only")]
)
def test_equals_two_replicas_corrected_by_hand(tmp_path, sync, rule):
    tau = dict(tau=1e-3, tau_relative=False) if rule == "two_sided" else {}
    config = SpectralConfig(rule=rule, matrix_rank=99, ema_beta=0.0, **tau)
    batches, anchor_batches, history = train_watched(tmp_path, SYNCS[sync], rule)
    apart = [float((a["lm_head.weight"] - b["lm_head.weight"]).abs().max()) for a, b in history[:-1]]
    assert (max(apart) > 1e-3) == (rule != "anchor_only")  # which gives all replicas the same step
    assert distance(history, ByHand(SYNCS[sync], config), batches, anchor_batches) < 1e-5
    # Snapshots of a replica's own weights would have been seen.
    wrong = ByHand(SYNCS[sync], config, snapshot_of=lambda outer, first: first)
    assert distance(history, wrong, batches, anchor_batches) > 1e-4


# The optimizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["diagonal", "blend", "anchor_only"])
@pytest.mark.parametrize("inner", OPTIMIZERS)
def test_steps_in_turn_are_one_step_of_optimizers_apart(rule, inner):
    """Bit for bit; a ramp shows how often steps are counted, and a slow intake how often priors advance."""
    ramp = {} if rule == "anchor_only" else {"ramp_steps": 4}
    config = SpectralConfig(rule=rule, matrix_rank=3, refresh_steps=2, **ramp)

    def corrected(model: torch.nn.Module) -> SpectralCorrection:
        named = [(f"layers.{name}", parameter) for name, parameter in model.named_parameters()]
        return SpectralCorrection(OPTIMIZERS[inner](model.parameters()), named, config)

    model, apart = model_of(), [model_of(), model_of()]
    shared, alone = corrected(model), [corrected(each) for each in apart]
    local = LocalReplicas(list(model.named_parameters()), 2, apart=True)
    seen = []
    local.step_in_turn(shared, after=lambda: seen.append(shared.metrics()), around=shared.one_step)
    for step in range(9):
        if step % 3 == 0:
            gradients = {
                name: gaussian(*prior.shape, seed=step + index)
                for index, (name, prior) in enumerate(shared.priors.held.items())
            }
            for each in (shared, *alone):
                each.priors.receive(gradients, step, step)
        for replica in local.passes():
            (0.01 * loss_of(model, step, replica)).backward()
            (0.01 * loss_of(apart[replica], step, replica)).backward()
        for each in (shared, *alone):
            each.step()
            each.zero_grad()
        assert seen[-1] == alone[0].metrics() == alone[1].metrics() and shared.num_steps == step + 1
    assert len(seen) == 9 and seen[-1]["num_live_steps"] == (3 if rule == "anchor_only" else 8)
    for replica in range(2):
        for name, parameter in apart[replica].named_parameters():
            assert torch.equal(local.weights[replica][name], parameter)


def test_a_step_that_fails_does_not_count():
    model = model_of()
    optimizer = SpectralCorrection(torch.optim.SGD(model.parameters(), lr=0.1), list(model.named_parameters()))
    optimizer.inner.step = lambda: 1 / 0
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert optimizer.num_steps == 0


# The preset -----------------------------------------------------------------------------------------------------------

PAPER = dict(preset="paper", data_parallel_replicas=2, anchor_every=3, prior_rank=8, matrix_rank=4, sync_every=4)


def test_the_papers_preset_anchors_replicas_that_step_apart(tmp_path):
    """Its snapshots are of what is evaluated and saved: planned and reported as any."""
    trainer = make(tmp_path, **PAPER)
    sync = trainer.engine.data_parallel
    assert (sync.sync, sync.outer_wire, sync.num_fragments) == ("streaming_diloco", "powersgd", 3)
    seen = []
    answer = trainer.anchoring._answer

    def watched(version: int):
        snapshot = trainer.anchoring.weights()
        with trainer.engine.outer_weights():
            seen.append(all(torch.equal(t, p) for t, (_, p) in zip(snapshot.values(), trainer.anchoring.named)))
        return answer(version)

    trainer.anchoring._answer = watched
    trainer.train()
    assert seen == [True] * 3 and trainer.anchoring.history.num_live_steps == 3
    report = trainer.mesh_report()
    assert report["anchor"]["rule"] == "two_sided" and report["anchor"]["num_priors"] == 1
    assert all(report["planned_bytes_per_token"][axis] > 0 for axis in ("anchor", "data_parallel", "pipeline"))


def test_an_anchor_whose_priors_do_not_come_changes_no_bit(tmp_path):
    runs, mesh = [], {name: PAPER[name] for name in ("preset", "data_parallel_replicas", "matrix_rank", "sync_every")}
    for options in (dict(anchor=False), dict(anchor_every=8)):
        trainer = make(tmp_path, **mesh, **options)
        trainer.train()
        runs.append(weights(trainer))
    assert_same(*runs)
    assert trainer.anchoring.history.num_snapshots == 1


class ScheduleFree(torch.optim.SGD):
    def train(self):
        pass


@pytest.mark.parametrize(
    "options,words",
    [
        (
            {"preset": "paper"},
            "^preset=paper has an anchor by default: ScheduleFree has a train.*or set anchor=False$",
        ),
        ({"anchor": True}, "^anchor=True: ScheduleFree has a train and an eval mode.*, or set anchor=False$"),
    ],
)
def test_an_optimizer_that_cannot_be_corrected_is_named_with_the_remedy(tmp_path, options, words):
    optimizer = {"trainer": {"optimizer_cls_and_kwargs": (ScheduleFree, {"lr": 0.1})}}
    with pytest.raises(NotImplementedError, match=words):
        make(tmp_path, **options, **optimizer).train()
    make(tmp_path, **{**options, "anchor": False}, **optimizer, **{**COMMON, "max_steps": 1}).train()
