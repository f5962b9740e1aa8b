"""Types and ranges of argument fields, one by one."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_meshadapt import MeshAdaptArguments
from hf_meshadapt.argument_checks import mesh_annotations
from hf_meshadapt.field_checks import KINDS, RANGES, check_range, check_type

RIGHT = [(2, "int"), (np.int64(2), "int"), (None, "int | None"), (2, "float"), (0.5, "float | None"), ("a", "str"),
         (True, "bool | None"), (np.float32(1), "float")]  # fmt: skip
WRONG = [
    (2.0, "int", "a whole number. It is of type float"),
    ("2", "int | None", "a whole number or None. It is of type str"),
    (None, "float", "a number. It is of type NoneType"),
    (True, "int", "a whole number. It is of type bool"),
    (False, "float | None", "a number or None. It is of type bool"),
    ("yes", "bool | None", "True or False or None. It is of type str"),
    (1, "str", "a text. It is of type int"),
]


@pytest.mark.parametrize("value,annotation", RIGHT, ids=str)
def test_values_of_the_right_type(value, annotation):
    check_type("field", value, annotation)


@pytest.mark.parametrize("value,annotation,says", WRONG, ids=str)
def test_values_of_the_wrong_type(value, annotation, says):
    with pytest.raises(ValueError, match=f"field={value!r}: must be {says}"):
        check_type("field", value, annotation)


@pytest.mark.parametrize("name", RANGES)
def test_ranges_hold_their_bounds_and_the_defaults(name):
    least, most, remedy = RANGES[name]
    check_range(name, least)
    check_range(name, next(f.default for f in dataclasses.fields(TrainingArguments) if f.name == name))
    for wrong in (least - 1, most if most == math.inf else most + 1, math.nan, None, "1"):
        with pytest.raises(ValueError, match=f"{name}={wrong!r}: must "):
            check_range(name, wrong)


def test_every_field_of_the_mesh_has_a_type_that_can_be_checked():
    annotations = mesh_annotations(MeshAdaptArguments)
    assert {part for annotation in annotations.values() for part in annotation.split(" | ")} <= KINDS.keys()
    assert {"preset", "sync_every", "anchor_every"} <= annotations.keys()
    trainers_own = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert annotations.keys() | trainers_own == {field.name for field in dataclasses.fields(MeshAdaptArguments)}


def test_the_command_line_and_subclasses_are_checked_too(tmp_path):
    """HfArgumentParser puts types in the place of what was written; a subclass has fields of kinds of its own."""
    words = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--learning_rate", "-1"]
    with pytest.raises(ValueError, match="learning_rate=-1.0: must be at least"):
        HfArgumentParser(MeshAdaptArguments).parse_args_into_dataclasses(words)

    @dataclasses.dataclass
    class Derived(MeshAdaptArguments):
        odd: complex | None = None

    assert Derived(output_dir=str(tmp_path), use_cpu=True, odd=1j).odd == 1j
    with pytest.raises(ValueError, match="pipeline_stages='2': must be a whole number"):
        Derived(output_dir=str(tmp_path), pipeline_stages="2")


# Each once ended in a traceback from deep within, or was taken for something else.
MISTAKES = [
    ({"pipeline_stages": 2.0}, "pipeline_stages=2.0: must be a whole number"),
    ({"pipeline_stages": "2"}, "pipeline_stages='2': must be a whole number"),
    ({"data_parallel_replicas": 1.5}, "data_parallel_replicas=1.5: must be a whole number or None"),
    ({"pipeline_microbatches": "all"}, "pipeline_microbatches='all': must be a whole number or None"),
    ({"boundary_budget": "5%"}, "boundary_budget='5%': must be a number or None"),
    ({"boundary_codec": "quantize", "boundary_bits": 2.0}, "boundary_bits=2.0: must be a whole number or None"),
    ({"calibration_tokens": 1.5}, "calibration_tokens=1.5: must be a whole number or None"),
    ({"exact_first_token": "yes"}, "exact_first_token='yes': must be True or False or None"),
    ({"mask_ratio": 0.5, "mask_seed": "x"}, "mask_seed='x': must be a whole number or None"),
    ({"link_timeout_seconds": None}, "link_timeout_seconds=None: must be a number"),
    ({"pipeline_split": [None, 4]}, "must name at least one layer for each of 2 chunks"),
    ({"pipeline_split": 4}, "pipeline_split=4: must be a text or None"),
    ({"per_device_train_batch_size": 2.0}, "per_device_train_batch_size=2.0: must be a whole number"),
    ({"per_device_eval_batch_size": None}, "per_device_eval_batch_size=None: must be a whole number"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0: must be at least 1"),
    ({"learning_rate": -1.0}, "learning_rate=-1.0: must be at least 0.0"),
    ({"seed": -1}, "seed=-1: must lie in"),
    ({"dp_sync": "diloco", "sync_every": "30"}, "sync_every='30': must be a whole number or None"),
    ({"dp_sync": "diloco", "sync_every": 2.5}, "sync_every=2.5: must be a whole number or None"),
    ({"dp_sync": "diloco", "outer_momentum": "0.9"}, "outer_momentum='0.9': must be a number or None"),
    ({"dp_sync": "powersgd", "matrix_rank": True}, "matrix_rank=True: must be a whole number or None"),
    ({"check_replicas_every": 2.5}, "check_replicas_every=2.5: must be a whole number or None"),
    ({"tied_embeddings": None}, "tied_embeddings=None: must be a text"),
    ({"anchor": "yes"}, "anchor='yes': must be True or False or None"),
    ({"anchor": True, "anchor_every": 2.5}, "anchor_every=2.5: must be a whole number or None"),
    ({"anchor": True, "anchor_batches": 1.5}, "anchor_batches=1.5: must be a whole number or None"),
    ({"anchor": True, "prior_rank": "64"}, "prior_rank='64': must be a whole number or None"),
]


@pytest.mark.parametrize("fields,says", MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_in_arguments(fields, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        MeshAdaptArguments(output_dir=str(tmp_path), use_cpu=True, **{"pipeline_stages": 2, **fields})
