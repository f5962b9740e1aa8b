"""The arguments of the anchor circuit: what follows from them, what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from hf_meshadapt.anchor.config import Endpoint, read_endpoint
from hf_meshadapt.spectral.config import SpectralConfig

ON = {"anchor": True, "pipeline_stages": 2}
ENDPOINT = {"fast_endpoint": "10.0.0.1:29600"}

REFUSED = [
    ({"anchor_every": 5}, "anchor_every=5", "Set anchor=True"),
    ({"correction_alpha": 0.0}, "correction_alpha=0.0", "Set anchor=True"),
    ({"prior_rank": 8}, "prior_rank=8", "Set anchor=True"),
    ({"anchor_deterministic": True}, "anchor_deterministic=True", "Set anchor=True"),
    (ENDPOINT, "fast_endpoint='10.0.0.1:29600'", "Set anchor=True"),
    ({"circuit": "anchor"}, "circuit='anchor'", "Set anchor=True"),
    ({"circuit": "slow"}, "circuit='slow'", "Use one of: fast, anchor"),
    ({**ON, "circuit": "anchor"}, "fast_endpoint=None", "host:port"),
    ({**ON, "fast_endpoint": "10.0.0.1"}, "fast_endpoint='10.0.0.1'", "203.0.113.7:29600"),
    ({**ON, "fast_endpoint": "10.0.0.1:65535"}, "fast_endpoint='10.0.0.1:65535'", "Use a lower port"),
    ({**ON, "anchor_every": 0}, "anchor_every=0", "Use 1"),
    ({"anchor_budget": 0.5}, "anchor_budget=0.5", "Set anchor=True"),
    ({**ON, "anchor_budget": 0}, "anchor_budget=0", "Use 0.25"),
    ({**ON, "anchor_budget": float("nan")}, "anchor_budget=nan", "Use 0.25"),
    ({**ON, "anchor_budget": float("inf")}, "anchor_budget=inf", "Use 0.25"),
    ({**ON, "anchor_budget": 0.5, "anchor_every": 5}, "anchor_budget=0.5", "Leave one of them unset"),
    ({"anchor": True, "pipeline_stages": 1, "anchor_budget": 0.5}, "anchor_budget=0.5", "Set anchor_every"),
    ({**ON, "max_staleness_steps": 13}, "max_staleness_steps=13", "Take snapshots more often"),
    ({**ON, "anchor_batches": 0}, "anchor_batches=0", "Use 1"),
    ({**ON, "anchor_snapshot_bits": 2}, "anchor_snapshot_bits=2", "8, 4"),
    ({**ON, "anchor_rate_bits_per_second": 0}, "anchor_rate_bits_per_second=0", "Use 20e6"),
    ({**ON, "anchor_every": 50}, "max_staleness_steps=50", "Take snapshots more often"),
    ({**ON, "anchor_every": 6, "max_staleness_steps": 9}, "max_staleness_steps=9", "Take snapshots more often"),
    ({**ON, "correction_rule": "diagnal"}, "correction_rule='diagnal'", "diagonal, two_sided"),
    ({**ON, "correction_rule": "none"}, "correction_rule='none'", "Leave the anchor out"),
    ({**ON, "correction_alpha": 1.0}, "correction_alpha=1.0", "Leave the anchor out"),
    ({**ON, "correction_rule": "blend", "correction_blend_weight": 0.0}, "correction_blend_weight=0.0", "Leave the"),
    ({**ON, "correction_alpha": 2.0}, "correction_alpha=2.0", "[0, 1]"),
    ({**ON, "correction_tau": 0.0}, "correction_tau=0.0", "Use a small number"),
    ({**ON, "prior_rank": 0}, "prior_rank=0", "at least 1"),
    ({**ON, "prior_ema_beta": 1.0}, "prior_ema_beta=1.0", "newest"),
    ({**ON, "correction_rule": "blend", "correction_tau": 0.5}, "correction_tau=0.5", "choose a rule among"),
    ({**ON, "correction_blend_weight": 0.2}, "correction_blend_weight=0.2", "choose a rule among"),
    ({**ON, "correction_rule": "anchor_only", "ramp_steps": 3}, "ramp_steps=3", "choose a rule among"),
    ({"pipeline_stages": 2, "anchor_calibrates": True}, "anchor_calibrates=True", "Set anchor=True"),
    ({**ON, "preset": "dense", "anchor_calibrates": True}, "anchor_calibrates=True", "needs no calibration"),
    ({**ON, "calibration_every": 0, "anchor_calibrates": True}, "anchor_calibrates=True", "calibration_every=0"),
    (
        {"pipeline_stages": 2, "preset": "paper", "anchor": False, "anchor_every": 5},
        "anchor_every=5",
        "Set anchor=True",
    ),
]


@pytest.mark.parametrize("fields,named,remedy", REFUSED, ids=lambda value: str(value)[:40])
def test_wrong_values_are_refused_with_field_value_and_remedy(make_arguments, fields, named, remedy):
    with pytest.raises(ValueError) as caught:
        make_arguments(**fields)
    message = str(caught.value)
    assert message.startswith(named) and remedy in message, message


def test_what_cannot_be_done_is_refused(make_arguments):
    with pytest.raises(NotImplementedError, match="control_variate.*An anchor has neither"):
        make_arguments(**ON, correction_rule="control_variate")
    with pytest.raises(ValueError, match="^fast_endpoint=None"):
        make_arguments(2, **ON)


def test_without_an_anchor_nothing_follows(make_arguments):
    args = make_arguments(pipeline_stages=2)
    assert args.anchor_config() is None and args.spectral_config() is None


def test_presets_choose_the_filter(make_arguments):
    assert make_arguments(**ON).spectral_config() == SpectralConfig(
        rule="diagonal", tau=0.1, tau_relative=True, alpha=0.3
    )
    paper = SpectralConfig(rule="two_sided", tau=1e-3, tau_relative=False, alpha=0.3)
    assert make_arguments(**ON, preset="paper").spectral_config() == paper
    mixed = make_arguments(**ON, preset="paper", correction_rule="diagonal", correction_alpha=0.5).spectral_config()
    assert (mixed.rule, mixed.tau, mixed.tau_relative, mixed.alpha) == ("diagonal", 1e-3, False, 0.5)
    assert make_arguments(**ON, preset="paper", correction_rule="blend").spectral_config() == SpectralConfig(
        rule="blend"
    )
    # A prior is in use before the next one comes.
    intervals = (1, 3, 20, None)
    assert [make_arguments(**ON, anchor_every=k).spectral_config().refresh_steps for k in intervals] == [1, 3, 4, 4]


def test_the_papers_preset_has_an_anchor_where_there_can_be_one(make_arguments, monkeypatch):
    def has(world: int = 1, **fields) -> bool:
        args = make_arguments(pipeline_stages=2, **{"preset": "paper", **fields})
        monkeypatch.setenv("WORLD_SIZE", str(world))  # later: ranks would look for each other
        assert args.has_anchor == (args.anchor_config() is not None) == (args.spectral_config() is not None)
        return args.has_anchor

    assert has() and not has(anchor=False) and not has(preset="anchored") and has(preset="anchored", anchor=True)
    assert not has(2) and has(2, **ENDPOINT) and has(**ENDPOINT, circuit="anchor")
    assert has(data_parallel_replicas=2) and has(data_parallel_replicas=2, dp_sync="diloco")
    again = dataclasses.replace(make_arguments(pipeline_stages=2, preset="paper"))
    assert again.anchor is None and again.has_anchor


def test_an_anchor_calibrates_what_is_calibrated_unless_told_otherwise(make_arguments):
    def calibrates(**fields) -> bool:
        return make_arguments(**{"pipeline_stages": 2, **fields}).calibrated_by_anchor

    assert calibrates(anchor=True) and calibrates(anchor=True, calibration_every=3) and not calibrates()
    assert not calibrates(anchor=True, anchor_calibrates=False) and not calibrates(anchor=True, calibration_every=0)
    assert not calibrates(preset="paper") and calibrates(preset="paper", boundary_predictor="mean")
    assert not calibrates(anchor=True, pipeline_stages=1)


def test_anchor_config_holds_what_was_given(make_arguments):
    config = make_arguments(**ON, seed=5).anchor_config()
    assert (config.anchor_every, config.anchor_batches, config.seed, config.snapshot_bits) == (None, 1, 6, 8)
    assert (config.budget, make_arguments(**ON, anchor_budget=2).anchor_config().budget) == (0.25, 2)
    assert config.deterministic and config.endpoint is None  # one process is always exactly K steps late
    options = dict(anchor_every=4, anchor_batches=3, anchor_seed=0, anchor_snapshot_bits=4, **ENDPOINT)
    config = make_arguments(**ON, **options, circuit="anchor", anchor_rate_bits_per_second=2e7).anchor_config()
    assert (config.anchor_every, config.anchor_batches, config.seed, config.snapshot_bits) == (4, 3, 0, 4)
    assert (config.circuit, config.deterministic, config.rate_bits_per_second) == ("anchor", False, 2e7)
    assert config.endpoint == Endpoint("10.0.0.1", 29600)


def test_arguments_survive_reconstruction(make_arguments):
    args = make_arguments(**ON, preset="paper", correction_alpha=0.4, anchor_every=7)
    again = dataclasses.replace(args)
    assert (again.anchor_config(), again.spectral_config()) == (args.anchor_config(), args.spectral_config())
    assert again.to_dict() == args.to_dict()


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:0", "host:65536", "host:x", "::1:80", "host:-1"])
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(ValueError, match="is not host:port"):
        read_endpoint(text)


def test_endpoints_say_what_to_bind_to():
    endpoints = [
        read_endpoint(text) for text in ("a.example:1", "127.0.0.1:2", "localhost:3", "[::1]:4", "[2001:db8::1]:5")
    ]
    assert [str(one) for one in endpoints] == [
        "a.example:1",
        "127.0.0.1:2",
        "localhost:3",
        "[::1]:4",
        "[2001:db8::1]:5",
    ]
    assert [one.bind_host for one in endpoints] == ["", "127.0.0.1", "localhost", "::1", "::"]


def test_an_anchor_of_several_processes_is_a_pipeline_that_knows_the_fast_boundaries(make_arguments, monkeypatch):
    # Without the others whom a launcher would have started.
    monkeypatch.setattr("hf_meshadapt.arguments.join_world", lambda *_: None)
    monkeypatch.setattr("transformers.TrainingArguments.__post_init__", lambda self: None)
    fast = dict(
        anchor=True, **ENDPOINT, pipeline_stages=4, pipeline_chunks_per_rank=2, pipeline_schedule="interleaved",
        pipeline_split="1,1,1,1,1,1,1,1", pipeline_microbatches=8, per_device_train_batch_size=8, preset="paper",
        mask_ratio=0.9, exact_first_token=True, boundary_predictor="token", calibration_tokens=500, dp_sync="powersgd",
    )  # fmt: skip
    args = make_arguments(3, **fast, circuit="anchor")
    mesh = args.mesh_config()
    assert (mesh.stages, mesh.replicas, mesh.chunks_per_rank, mesh.schedule) == (3, 1, 1, "gpipe")
    assert (mesh.microbatches, mesh.layers_per_chunk, mesh.emulated) == (4, None, False)
    assert args.boundary_config() == make_arguments(8, **fast).boundary_config() and args.calibration_tokens == 500
    again = make_arguments(3, **fast, circuit="anchor")
    assert dataclasses.replace(again).to_dict() == again.to_dict() == args.to_dict()
    # What the correction does follows from the fast circuit's preset.
    assert args.spectral_config() == make_arguments(8, **fast).spectral_config()
    # One process runs the fast circuit's own cut, and a fast circuit of one stage may have an anchor of several.
    assert make_arguments(1, **fast, circuit="anchor").mesh_config().stages == 4
    assert (
        make_arguments(2, anchor=True, **ENDPOINT, circuit="anchor", calibration_tokens=None).mesh_config().stages == 2
    )
