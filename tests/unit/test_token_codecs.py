"""Every straight-through codec by its name: bytes by configuration, both directions, whole runs of the emulated mesh."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_meshadapt import MeshAdaptArguments
from hf_meshadapt.boundary.coder import BoundaryCoder
from hf_meshadapt.boundary.fitting import BoundaryFit
from hf_meshadapt.boundary.module import BoundaryReceive, BoundarySend
from hf_meshadapt.boundary.sequence_coder import FIRST, PADDING, TARGET, TOKEN
from hf_meshadapt.boundary.token_codecs import make_token_codec
from hf_meshadapt.boundary.transform import TransformTables
from hf_meshadapt.config import CODECS, BoundaryConfig

from ..equality import train_mesh

STRAIGHT_THROUGH = [codec for codec in CODECS if BoundaryConfig(codec=codec).straight_through]
BASELINES = [codec for codec in STRAIGHT_THROUGH if codec != "transform"]  # which has tests of its own
NATURAL = ("quantize", "tah_quant", "aq_sgd")


def test_all_but_two_codecs_are_straight_through():
    assert [codec for codec in CODECS if codec not in STRAIGHT_THROUGH] == ["none", "random_mask"]


def tables(size: int) -> TransformTables:
    basis = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(size))).Q
    return TransformTables(basis.T.contiguous(), basis, 1.0 / torch.arange(1.0, size + 1))


def fit(config: BoundaryConfig, size: int) -> BoundaryFit:
    fitted = (tables(size), tables(size)) if config.fits_transforms else (None, None)
    return BoundaryFit(torch.zeros(1, size), *fitted, 0.0)


# Bytes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_quantize_has_bytes_of_its_own(bits, direction):
    for length, size in ((17, 576), (17, 97)):
        plain, exact = (
            BoundaryConfig(codec="quantize", bits=bits, exact_first_token=first).sequence_bytes(
                length, size, direction
            )
            for first in (False, True)
        )
        token_bytes = make_token_codec(
            BoundaryConfig(codec="quantize", bits=bits), size, direction, None
        ).natural_bytes(size)
        assert plain == length * token_bytes + length * token_bytes % 2
        assert exact - plain == (2 * size if direction == "forward" else 0)


@pytest.mark.parametrize("codec", NATURAL)
def test_natural_sizes_of_codec_and_configuration_agree(codec):
    config = BoundaryConfig(codec=codec, bits=3)
    for size in (24, 64, 576):
        for direction in ("forward", "backward"):
            made = make_token_codec(config, size, direction, None)
            assert made.natural_bytes(size) == config.token_bytes(size, direction)


@pytest.mark.parametrize("codec", ["transform", "subspace", "topk", "bottleneck"])
def test_the_budget_is_the_mean_of_both_directions(codec):
    config = BoundaryConfig(codec=codec, budget=0.05, forward_share=0.75)
    forward, backward = (config.sequence_bytes(1000, 576, way) for way in ("forward", "backward"))
    dense = 2 * 1000 * 576
    assert (forward + backward) / (2 * dense) == pytest.approx(0.05, abs=1e-5)
    assert forward / (forward + backward) == pytest.approx(0.5 if codec == "bottleneck" else 0.75, abs=1e-5)


# Sequences -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(codec=st.sampled_from(BASELINES), exact=st.booleans(), data=st.data())
def test_any_mixture_of_tokens_fits_and_only_padding_and_what_is_cut_is_lost(codec, exact, data):
    size, length = data.draw(st.sampled_from((8, 24, 64))), data.draw(st.integers(1, 9))
    exact = exact and codec not in ("tah_quant", "aq_sgd")
    config = BoundaryConfig(codec=codec, budget=data.draw(st.sampled_from((0.05, 0.3, 1.0))), exact_first_token=exact)
    assume(config.sequence_bytes(length, size, "backward") > 0)
    kinds = st.lists(st.sampled_from((PADDING, TOKEN, FIRST, TARGET)), min_size=length, max_size=length)
    kind = torch.tensor([data.draw(kinds) for _ in range(2)])
    ids = torch.zeros(2, length, dtype=torch.long)
    coders = [BoundaryCoder(config, size, fit(config, size), None) for _ in range(2)]
    hidden = torch.randn(2, length, size, generator=torch.Generator().manual_seed(length))
    for way, encode, decode in (
        ("forward", lambda c, h: c.encode(h, ids, kind), lambda c, p: c.decode(p, ids, kind)),
        ("backward", lambda c, h: c.encode_gradient(h, kind), lambda c, p: c.decode_gradient(p, kind)),
    ):
        packed = encode(coders[0], hidden)
        assert packed.shape == (2, config.sequence_bytes(length, size, way)) and packed.shape[1] % 2 == 0
        decoded = decode(coders[1], packed)
        assert torch.isfinite(decoded).all() and not decoded[kind == PADDING].any()
        if codec in NATURAL:
            rest = (decoded - hidden)[kind != PADDING].square().sum()
            bits = {"quantize": 4, "tah_quant": 3, "aq_sgd": 4}[codec]
            allowed = 1.0 if exact else (2.0**-bits * 3) ** 2  # exact first tokens may leave less than 4 bits
            assert rest <= allowed * hidden.square().sum()


def test_codecs_without_calibration_are_ready_at_once_and_others_say_so():
    hidden, kind = torch.randn(1, 4, 64), torch.tensor([[FIRST, TOKEN, TARGET, TARGET]])
    ids = torch.zeros(1, 4, dtype=torch.long)
    for codec in STRAIGHT_THROUGH:
        config = BoundaryConfig(codec=codec, budget=0.2)
        send, receive = BoundarySend(config, 0, 64), BoundaryReceive(config, 0, 64)
        if config.fits_transforms:
            with pytest.raises(RuntimeError, match="needs a calibration"):
                send(hidden, 0, ids, kind)
        elif codec != "aq_sgd":
            assert receive(send(hidden, 0, ids, kind), 0, ids, kind, 4, torch.float32).shape == hidden.shape
        assert BoundaryConfig(codec=codec, predictor="mean").needs_calibration


def test_a_fit_without_transforms_is_refused_by_codecs_that_need_them():
    for codec in ("transform", "subspace"):
        with pytest.raises(ValueError, match=f"boundary_codec='{codec}'.* holds no transform"):
            BoundaryCoder(BoundaryConfig(codec=codec, budget=0.1), 8, BoundaryFit.empty(8), None)


# Arguments -----------------------------------------------------------------------------------------------------------


def arguments(tmp_path, **fields) -> MeshAdaptArguments:
    return MeshAdaptArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", pipeline_stages=2, **fields)


def test_arguments_reach_the_configuration(tmp_path):
    config = arguments(tmp_path, boundary_codec="quantize").boundary_config()
    assert (config.bits, config.rotated, config.predictor, config.exact_first_token) == (4, True, "none", False)
    assert not config.needs_calibration
    config = arguments(
        tmp_path, boundary_codec="quantize", boundary_bits=2, boundary_rotated=False, boundary_predictor="token"
    ).boundary_config()
    assert (config.bits, config.rotated, config.predictor) == (2, False, "token") and config.needs_calibration
    assert arguments(tmp_path, boundary_codec="aq_sgd", boundary_bits=3).boundary_config().bits == 3
    assert arguments(tmp_path, boundary_codec="subspace").boundary_config().predictor == "token"


REFUSED = [
    ({"boundary_codec": "quantize", "boundary_budget": 0.1}, "boundary_budget=0.1: has no effect"),
    ({"boundary_codec": "quantize", "forward_share": 0.6}, "forward_share=0.6: has no effect"),
    ({"boundary_codec": "quantize", "boundary_bits": 5}, "boundary_bits=5: not a known choice"),
    ({"boundary_codec": "quantize", "boundary_bits": 1, "boundary_rotated": False}, "boundary_bits=1: holds too"),
    ({"boundary_codec": "aq_sgd", "boundary_bits": 1}, "boundary_bits=1: holds too"),
    ({"boundary_codec": "aq_sgd", "boundary_rotated": True}, "boundary_rotated=True: has no effect"),
    ({"boundary_codec": "aq_sgd", "boundary_predictor": "mean"}, "boundary_predictor='mean': has no effect"),
    ({"boundary_codec": "tah_quant", "boundary_bits": 4}, "boundary_bits=4: has no effect"),
    ({"boundary_codec": "tah_quant", "exact_first_token": True}, "exact_first_token=True: has no effect"),
    ({"boundary_codec": "bottleneck", "forward_share": 0.6}, "forward_share=0.6: has no effect"),
    ({"boundary_codec": "topk", "loss_weighted": True}, "loss_weighted=True: has no effect"),
    ({"boundary_codec": "transform", "boundary_bits": 4}, "boundary_bits=4: has no effect"),
]


@pytest.mark.parametrize("fields, message", REFUSED, ids=lambda value: str(value)[:60])
def test_fields_without_effect_are_refused(tmp_path, fields, message):
    with pytest.raises(ValueError) as caught:
        arguments(tmp_path, **fields)
    assert str(caught.value).startswith(message)


def test_aq_sgd_refuses_replicas(tmp_path):
    with pytest.raises(NotImplementedError, match="boundary_codec='aq_sgd'.* Use one replica"):
        arguments(tmp_path, boundary_codec="aq_sgd", data_parallel_replicas=2)


# Runs ----------------------------------------------------------------------------------------------------------------

RUNS = [
    ({"boundary_codec": "quantize", "boundary_bits": 8}, 0.02),
    ({"boundary_codec": "quantize", "boundary_bits": 4, "boundary_rotated": False}, 0.2),
    (
        {"boundary_codec": "quantize", "boundary_bits": 1, "boundary_predictor": "token", "exact_first_token": True},
        0.7,
    ),
    ({"boundary_codec": "tah_quant"}, 0.2),
    ({"boundary_codec": "aq_sgd", "boundary_bits": 4}, 0.2),
    ({"boundary_codec": "topk", "boundary_budget": 0.5}, 0.7),
    ({"boundary_codec": "topk_free_indices", "boundary_budget": 0.5, "boundary_predictor": "mean"}, 0.7),
    ({"boundary_codec": "subspace", "boundary_budget": 0.5}, 0.5),
    ({"boundary_codec": "subspace", "boundary_budget": 0.5, "boundary_predictor": "none"}, 0.5),
    ({"boundary_codec": "bottleneck", "boundary_budget": 0.5, "exact_first_token": True}, 1.0),
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("dense"), {"preset": "dense"})


def run(folder, fields: dict) -> dict:
    torch.set_num_threads(1)
    # Eight rows, twice: the second epoch knows all samples.
    return train_mesh(
        0, "llama", 4, 4, str(folder), num_rows=8, pipeline_stages=2, max_steps=2, gradient_accumulation_steps=2,
        learning_rate=0.0, eval_strategy="no", **fields,
    )  # fmt: skip


@pytest.mark.parametrize("fields, distance", RUNS, ids=str)
def test_emulated_runs_follow_the_dense_one(fields, distance, dense, tmp_path):
    coded = run(tmp_path, fields)
    assert coded["loss"] == pytest.approx(dense["loss"], rel=0.05)
    # Weights do not move: the second step's gradient is that of the first visits, coded.
    assert coded["grad_norm"][1] != dense["grad_norm"][1]
    assert coded["grad_norm"] == pytest.approx(dense["grad_norm"], rel=distance)
