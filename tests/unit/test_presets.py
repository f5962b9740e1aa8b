"""How the boundary's fields follow from preset and given fields, and what is refused with which words."""

from __future__ import annotations

import pytest

from hf_meshadapt.config import CODECS
from hf_meshadapt.presets import BOUNDARY_FIELDS, CODEC_FIELDS, OFF, PRESETS, resolve_boundary


def resolve(preset: str = "anchored", num_chunks: int = 2, **given) -> dict:
    fields = dict.fromkeys(("boundary_codec", *BOUNDARY_FIELDS))
    assert given.keys() <= fields.keys()
    return resolve_boundary(preset, fields | given, num_chunks)


def resolved(codec: str, **fields) -> dict:
    return {**OFF, **CODEC_FIELDS[codec], **fields, "boundary_codec": codec}


RESOLVED = [
    # preset, given, codec and fields that differ from its defaults
    ("anchored", {}, resolved("transform")),
    ("dense", {}, resolved("none")),
    ("paper", {}, resolved("random_mask", mask_ratio=0.95)),
    ("paper", {"mask_ratio": 0.9}, resolved("random_mask", mask_ratio=0.9)),
    # A mask ratio alone says what codec is meant, in any preset; an explicit codec says it better.
    ("anchored", {"mask_ratio": 0.9}, resolved("random_mask", mask_ratio=0.9)),
    ("dense", {"mask_ratio": 0.5}, resolved("random_mask", mask_ratio=0.5)),
    ("anchored", {"mask_ratio": 0.0}, resolved("none")),
    ("paper", {"mask_ratio": 0.0}, resolved("none")),
    ("dense", {"boundary_codec": "transform"}, resolved("transform")),
    ("anchored", {"boundary_codec": "none"}, resolved("none")),
    ("anchored", {"boundary_codec": "random_mask"}, resolved("random_mask")),
    ("paper", {"boundary_codec": "random_mask", "mask_ratio": 0.5}, resolved("random_mask", mask_ratio=0.5)),
    # A field that says off is never in the way.
    ("paper", {"boundary_codec": "transform", "mask_ratio": 0.0}, resolved("transform")),
    ("dense", {"exact_first_token": False, "boundary_predictor": "none"}, resolved("none")),
    (
        "anchored",
        {"exact_first_token": False, "boundary_predictor": "none", "loss_weighted": False},
        resolved("transform", exact_first_token=False, boundary_predictor="none", loss_weighted=False),
    ),
    (
        "paper",
        {"exact_first_token": True, "boundary_predictor": "token", "mask_seed": 0},
        resolved("random_mask", exact_first_token=True, boundary_predictor="token", mask_seed=0),
    ),
    ("anchored", {"boundary_budget": 0.1}, resolved("transform", boundary_budget=0.1)),
    (
        "anchored",
        {"boundary_budget": 1.0, "forward_share": 0.5},
        resolved("transform", boundary_budget=1.0, forward_share=0.5),
    ),
    # For random masks a budget is 1 - mask_ratio.
    ("paper", {"boundary_budget": 0.25}, resolved("random_mask", mask_ratio=0.75)),
    ("paper", {"boundary_budget": 1.0}, resolved("random_mask", mask_ratio=0.0)),
]


@pytest.mark.parametrize("preset,given,expected", RESOLVED, ids=lambda value: str(value)[:60])
def test_resolved(preset, given, expected):
    assert resolve(preset, **given) == expected
    # What was resolved resolves to itself: arguments are rebuilt from their own values.
    assert resolve(preset, **expected) == expected


@pytest.mark.parametrize("preset", ["anchored", "dense"])
def test_one_chunk_has_no_boundary(preset):
    assert resolve(preset, num_chunks=1) == resolved("none")
    assert resolve(preset, num_chunks=1, **resolved("none")) == resolved("none")


ONE_CHUNK = [
    ("paper", {}, "preset='paper'"),
    ("anchored", {"boundary_codec": "transform"}, "boundary_codec='transform'"),
    ("anchored", {"boundary_budget": 0.1}, "boundary_budget=0.1"),
    ("dense", {"forward_share": 0.5}, "forward_share=0.5"),
    ("anchored", {"loss_weighted": False}, "loss_weighted=False"),
    ("anchored", {"mask_ratio": 0.9}, "mask_ratio=0.9"),
    ("dense", {"mask_seed": 0}, "mask_seed=0"),
    ("dense", {"exact_first_token": True}, "exact_first_token=True"),
    ("anchored", {"boundary_predictor": "mean"}, "boundary_predictor='mean'"),
]


@pytest.mark.parametrize("preset,given,named", ONE_CHUNK, ids=lambda value: str(value)[:60])
def test_what_one_chunk_cannot_use_is_refused(preset, given, named):
    with pytest.raises(ValueError) as caught:
        resolve(preset, num_chunks=1, **given)
    name = named.split("=")[0]
    assert str(caught.value) == (
        f"{named}: has no effect with one stage: nothing crosses a boundary. "
        f"Set pipeline_stages to 2 or more, or leave {name} unset"
    )


USERS = {name: " or ".join(codec for codec, own in CODEC_FIELDS.items() if name in own) for name in OFF}
WITHOUT_EFFECT = [
    ("none", {"mask_ratio": 0.5}, "mask_ratio=0.5"),
    ("none", {"mask_seed": 0}, "mask_seed=0"),
    ("none", {"boundary_budget": 0.05}, "boundary_budget=0.05"),
    ("none", {"loss_weighted": False}, "loss_weighted=False"),
    ("none", {"exact_first_token": True}, "exact_first_token=True"),
    ("none", {"boundary_predictor": "token"}, "boundary_predictor='token'"),
    ("random_mask", {"forward_share": 0.75}, "forward_share=0.75"),
    ("random_mask", {"loss_weighted": True}, "loss_weighted=True"),
    ("transform", {"mask_ratio": 0.9}, "mask_ratio=0.9"),
    ("transform", {"mask_seed": 3}, "mask_seed=3"),
]


@pytest.mark.parametrize("codec,given,named", WITHOUT_EFFECT, ids=lambda value: str(value)[:60])
def test_fields_that_the_codec_lacks_are_refused(codec, given, named):
    with pytest.raises(ValueError) as caught:
        resolve(boundary_codec=codec, **given)
    (name,) = given
    assert str(caught.value) == (
        f"{named}: has no effect with boundary_codec={codec}. Use it with {USERS[name]}, or leave it unset"
    )


def test_a_budget_beside_a_mask_ratio_is_refused():
    with pytest.raises(ValueError) as caught:
        resolve("paper", boundary_budget=0.05, mask_ratio=0.95)
    assert str(caught.value) == (
        "boundary_budget=0.05: says the same as mask_ratio for random masks. "
        "Leave one of them out; this budget is mask_ratio=0.95"
    )


NAN = float("nan")
OUT_OF_RANGE = [
    ({"mask_ratio": 1.0}, "mask_ratio=1.0: must lie in [0, 1). Use 0 for dense"),
    ({"mask_ratio": -0.1}, "mask_ratio=-0.1: must lie in [0, 1). Use 0 for dense"),
    ({"mask_ratio": NAN}, "mask_ratio=nan: must lie in [0, 1). Use 0 for dense"),
    ({"boundary_codec": "random_mask", "mask_ratio": 1.5}, "mask_ratio=1.5: must lie in [0, 1). Use 0 for dense"),
    *(
        ({"boundary_budget": budget, **codec}, f"boundary_budget={budget}: must lie in (0, 1]. Use 0.05 for 5%")
        for budget in (0.0, -1.0, 1.01, NAN)
        for codec in ({}, {"boundary_codec": "random_mask"})
    ),
    *(
        ({"forward_share": share}, f"forward_share={share}: must lie in (0, 1). Use 0.75")
        for share in (0.0, 1.0, -0.5, NAN)
    ),
    ({"boundary_codec": "zip"}, f"boundary_codec='zip': not a known choice. Use one of: {', '.join(CODECS)}"),
    (
        {"boundary_predictor": "median"},
        "boundary_predictor='median': not a known choice. Use one of: none, mean, token",
    ),
]


@pytest.mark.parametrize("given,message", OUT_OF_RANGE, ids=lambda value: str(value)[:60])
def test_values_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError) as caught:
        resolve(**given)
    assert str(caught.value).startswith(message)


def test_every_codec_field_can_be_switched_off_and_every_preset_resolves():
    assert {name for own in CODEC_FIELDS.values() for name in own} == OFF.keys() == set(BOUNDARY_FIELDS)
    for preset, (codec, _) in PRESETS.items():
        assert resolve(preset)["boundary_codec"] == codec
