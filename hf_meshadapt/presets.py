"""Presets, and how the boundary's fields follow from what a user gave: pure functions of plain values."""

from __future__ import annotations

import math

from .config import CODECS, PREDICTORS

# What each codec's own fields are when nobody says otherwise; a field that a codec lacks has no effect with it.
CODEC_FIELDS: dict[str, dict] = {
    "none": {},
    "random_mask": {"mask_ratio": 0.95, "mask_seed": None, "exact_first_token": False, "boundary_predictor": "none"},
    "transform": {
        "boundary_budget": 0.05,
        "boundary_target_step_seconds": None,
        "link_bits_per_second": None,
        "forward_share": 0.8,
        "loss_weighted": True,
        "entropy_coded": True,
        "exact_first_token": True,
        "boundary_predictor": "token",
    },
    "subspace": {
        "boundary_budget": 0.05,
        "forward_share": 0.75,
        "exact_first_token": True,
        "boundary_predictor": "token",
    },
    # What the field does: nothing is predicted, and no token is treated apart.
    "bottleneck": {"boundary_budget": 0.05, "exact_first_token": False, "boundary_predictor": "none"},
    **dict.fromkeys(
        ("topk", "topk_free_indices"),
        {
            "boundary_budget": 0.05,
            "forward_share": 0.75,
            "exact_first_token": False,
            "boundary_predictor": "none",
            "boundary_error_feedback": False,
        },
    ),
    "quantize": {
        "boundary_bits": 4,
        "boundary_rotated": True,
        "exact_first_token": False,
        "boundary_predictor": "none",
    },
    "tah_quant": {},
    "aq_sgd": {"boundary_bits": 4},
}
BITS = (1, 2, 3, 4, 8)
OFF = {
    "mask_ratio": 0.0,
    "mask_seed": None,
    "exact_first_token": False,
    "boundary_predictor": "none",
    "boundary_budget": None,
    "boundary_target_step_seconds": None,
    "link_bits_per_second": None,
    "forward_share": None,
    "loss_weighted": None,
    "entropy_coded": None,
    "boundary_bits": None,
    "boundary_rotated": None,
    "boundary_error_feedback": None,
}
BOUNDARY_FIELDS = tuple(OFF)

# Codec and wire dtype (None: by the training dtype) of a preset.
PRESETS: dict[str, tuple[str, str | None]] = {
    "anchored": ("transform", "bfloat16"),
    "dense": ("none", None),
    "paper": ("random_mask", "bfloat16"),
}


def user_error(field_name: str, value, constraint: str, remedy: str) -> ValueError:
    return ValueError(f"{field_name}={value!r}: {constraint}. {remedy}")


def resolve_boundary(preset: str, given: dict, num_chunks: int) -> dict:
    """All boundary fields and the codec, out of a preset and what was given.

    Args:
        preset: a key of `PRESETS`.
        given: `boundary_codec` and `BOUNDARY_FIELDS`, None where unset.
        num_chunks: model chunks; one has no boundary.

    Raises:
        ValueError: a value out of range, or a field that would have no effect.
    """
    codec = _codec(preset, given)
    explicit = {name: given[name] for name in BOUNDARY_FIELDS if given[name] is not None}
    if num_chunks == 1:
        _refuse_without_boundary(preset, codec, given)
        codec = "none"
    if codec == "random_mask" and "boundary_budget" in explicit:
        if "mask_ratio" in explicit:
            raise user_error(
                "boundary_budget", explicit["boundary_budget"], "says the same as mask_ratio for random masks",
                f"Leave one of them out; this budget is mask_ratio={1 - explicit['boundary_budget']:g}",
            )  # fmt: skip
        _check_budget(explicit["boundary_budget"])
        explicit["mask_ratio"] = 1.0 - explicit.pop("boundary_budget")
    fields = CODEC_FIELDS[codec]
    for name, value in explicit.items():
        if name not in fields and value != OFF[name]:
            users = [other for other, own in CODEC_FIELDS.items() if name in own]
            raise user_error(
                name,
                value,
                f"has no effect with boundary_codec={codec}",
                f"Use it with {' or '.join(users)}, or leave it unset",
            )
    resolved = {**OFF, **fields, **{name: value for name, value in explicit.items() if name in fields}}
    _check_ranges(resolved)
    return {**resolved, "boundary_codec": codec}


def _codec(preset: str, given: dict) -> str:
    if given["boundary_codec"] is not None:
        if given["boundary_codec"] not in CODECS:
            raise user_error(
                "boundary_codec", given["boundary_codec"], "not a known choice", f"Use one of: {', '.join(CODECS)}"
            )
        return given["boundary_codec"]
    ratio = given["mask_ratio"]
    if ratio is not None:
        _check_mask_ratio(ratio)
        return "random_mask" if ratio > 0 else "none"
    return PRESETS[preset][0]


def _refuse_without_boundary(preset: str, codec: str, given: dict) -> None:
    """With one stage nothing crosses a boundary; only the default preset may say so in silence."""
    asked = [name for name in ("boundary_codec", *BOUNDARY_FIELDS) if given[name] not in (None, OFF.get(name), "none")]
    if not asked and codec != "none" and preset != "anchored":
        asked = ["preset"]
    if asked:
        value = preset if asked[0] == "preset" else given[asked[0]]
        raise user_error(
            asked[0], value, "has no effect with one stage: nothing crosses a boundary",
            f"Set pipeline_stages to 2 or more, or leave {asked[0]} unset",
        )  # fmt: skip


def _check_ranges(fields: dict) -> None:
    _check_mask_ratio(fields["mask_ratio"])
    _check_budget(fields["boundary_budget"])
    _check_target(fields)
    share = fields["forward_share"]
    if share is not None and not 0.0 < share < 1.0:
        raise user_error("forward_share", share, "must lie in (0, 1)", "Use 0.75: the forward direction needs more")
    bits = fields["boundary_bits"]
    if bits is not None and bits not in BITS:
        raise user_error("boundary_bits", bits, "not a known choice", f"Use one of: {', '.join(map(str, BITS))}")
    if bits == 1 and not fields["boundary_rotated"]:
        raise user_error("boundary_bits", 1, "holds too little without a rotation", "Use 2, or boundary_rotated")
    if fields["boundary_predictor"] not in PREDICTORS:
        raise user_error(
            "boundary_predictor",
            fields["boundary_predictor"],
            "not a known choice",
            f"Use one of: {', '.join(PREDICTORS)}",
        )


def _check_budget(budget: float | None) -> None:
    if budget is not None and not 0.0 < budget <= 1.0:
        raise user_error("boundary_budget", budget, "must lie in (0, 1]", "Use 0.05 for 5% of the dense bytes")


def _check_target(fields: dict) -> None:
    target, rate = fields["boundary_target_step_seconds"], fields["link_bits_per_second"]
    if target is not None and not 0.0 < target < math.inf:
        raise user_error(
            "boundary_target_step_seconds", target, "must be a positive number of seconds",
            "Use the step_seconds that you can afford, or leave it unset for boundary_budget everywhere",
        )  # fmt: skip
    if target is not None and fields["boundary_budget"] == 1.0:
        raise user_error(
            "boundary_target_step_seconds", target, "has no effect with boundary_budget=1.0: no budget is larger",
            "Lower boundary_budget, which is the least that every boundary gets",
        )  # fmt: skip
    if rate is not None and not 0.0 < rate < math.inf:
        raise user_error("link_bits_per_second", rate, "must be a positive number", "Use 100e6 for 100 Mbit/s")
    if rate is not None and target is None:
        raise user_error(
            "link_bits_per_second", rate, "has no effect without boundary_target_step_seconds",
            "Set that too, or leave this unset",
        )  # fmt: skip


def _check_mask_ratio(ratio: float) -> None:
    if not 0.0 <= ratio < 1.0:
        raise user_error("mask_ratio", ratio, "must lie in [0, 1)", "Use 0 for dense, 0.9 or 0.95 as the paper does")
