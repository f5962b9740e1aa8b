"""Fingerprints: equal for what is alike, different for what is not, and never a stream's rows."""

from __future__ import annotations

import random

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from hf_meshadapt import fingerprints
from hf_meshadapt.fingerprints import (
    argument_fingerprint,
    dataset_fingerprint,
    differences,
    digest,
    eval_fingerprint,
    launch_fingerprint,
    model_fingerprint,
    ranks_in_words,
    refuse_differences,
    spread,
    tensor_fingerprint,
    versions,
)
from tests.equality import Rows, tiny_model


def test_differences_name_ranks_and_both_values():
    everyone = [{"argument": {"seed": "1", "bf16": "true"}, "weight": {"a": "x"}} for _ in range(4)]
    everyone[2] = {"argument": {"seed": "2"}, "weight": {"b": "y"}}
    assert differences(everyone) == {
        "argument": [
            "seed is 1 on ranks 0, 1, 3 and 2 on rank 2",
            "bf16 is true on ranks 0, 1, 3 and missing on rank 2",
        ]
    }
    with pytest.raises(
        ValueError, match="argument seed is 1 on ranks 0, 1, 3 and 2 on rank 2; bf16 .*. Start all ranks with"
    ):
        refuse_differences(everyone)
    assert not differences(everyone[:2]) and refuse_differences(everyone[:2]) is None


def test_many_differences_and_ranks_are_counted():
    many = [{"weight": {f"w{index}": str(rank) for index in range(20)}} for rank in range(2)]
    with pytest.raises(ValueError, match="w7 is 0 on rank 0 and 1 on rank 1; and 12 more. Load the same checkpoint"):
        refuse_differences(many)
    assert ranks_in_words(list(range(11))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


def test_every_kind_has_a_remedy():
    kinds = launch_fingerprint({}, {}).keys() | model_fingerprint({}, {}, {}).keys()
    assert kinds == fingerprints.REMEDIES.keys()


def test_local_arguments_are_left_out():
    local = {
        "output_dir": "a",
        "logging_dir": "b",
        "log_level": "c",
        "hub_token": "d",
        "local_rank": 1,
        "use_cpu": True,
    }
    assert argument_fingerprint({**local, "logging_steps": 5, "learning_rate": 2e-5}) == {
        "logging_steps": "5",
        "learning_rate": "2e-05",
    }


def test_versions_say_nothing_of_the_build(monkeypatch):
    monkeypatch.setattr(fingerprints.metadata, "version", lambda name: "2.13.0+cu128")
    assert versions()["torch"] == "2.13.0" and versions()["python"].count(".") == 1


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 97, 1000, 10**9])
def test_places_are_spread_with_both_ends(count):
    places = spread(count, 64)
    assert len(places) == min(count, 64) and places == sorted(set(places))
    if count:
        assert places[0] == 0 and places[-1] == count - 1
        assert max(b - a for a, b in zip(places, places[1:] or places)) <= 1 + count // 30


def test_entries_of_a_tensor():
    weight = torch.randn(200, 300)
    assert (
        tensor_fingerprint(weight) == tensor_fingerprint(weight.clone()) == tensor_fingerprint(weight.T.contiguous().T)
    )
    changed = weight.clone()
    changed[-1] += 1.0  # a row that was appended
    other = [changed, weight.T, weight.double(), weight * 1.001, weight[:, :299]]
    assert len({tensor_fingerprint(t) for t in (weight, *other)}) == 6
    assert tensor_fingerprint(weight).startswith("200x300 float32 ")
    for odd in (torch.tensor(2.0), torch.zeros(0, 3), torch.ones(3, dtype=torch.bool), weight.bfloat16()):
        assert tensor_fingerprint(odd) == tensor_fingerprint(odd.clone())


def test_a_copy_is_compared_with_what_it_is_a_copy_of():
    first, last = torch.randn(4, 2), torch.randn(4, 2)
    prints = [
        model_fingerprint({}, {"embed": first}, {}),
        model_fingerprint({}, {"head": first.clone()}, {"head": "embed"}),
        model_fingerprint({}, {"head": last}, {"head": "embed"}),
    ]
    assert not differences(prints[:2]) and "embed is 4x2" in differences(prints)["weight"][0]


def test_a_model_is_its_configuration_and_its_weights():
    def fingerprint(model, **config):
        return model_fingerprint({**model.config.to_dict(), **config}, model.state_dict(), {})

    model = tiny_model("llama_tied")
    again = fingerprint(tiny_model("llama_tied"), _name_or_path="elsewhere")
    assert not differences([fingerprint(model), again])
    assert differences([again, fingerprint(model, rope_theta=5.0)]).keys() == {"config"}
    assert differences([again, fingerprint(tiny_model("llama_tied", seed=1))]).keys() == {"weight"}


def test_digests_tell_values_apart():
    rows = [
        {"a": [1, 2], "b": "x"}, {"a": [1, 3], "b": "x"}, {"a": torch.tensor([1, 2]), "b": "x"}, {"a": [1, 2]}, [1, 2],
        {"a": np.array([1, 2])}, {"a": np.array([1, 2], dtype=np.int32)}, None, b"x", "x", 1.5, [[1], [2]], (1, [2]),
    ]  # fmt: skip
    assert len({digest(row) for row in rows}) == len(rows)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"image": object()}) == digest({"image": object()})
    assert digest([1] * 10_000) != digest([1] * 9_999 + [2])


def test_rows_columns_and_length_of_a_data_set():
    rows = Rows(40)
    mine = dataset_fingerprint(rows)
    assert mine == dataset_fingerprint(Rows(40)) and mine["length"] == "40" and "row 39" in mine
    assert mine["row 0"].startswith("columns input_ids, labels ")
    assert differences([{"train_dataset": mine}, {"train_dataset": dataset_fingerprint(Rows(40, seed=2))}])
    assert "length is 40" in differences([{"d": mine}, {"d": dataset_fingerprint(Rows(41))}])["d"][0]


def test_a_table_is_compared_by_its_rows_alone():
    table = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "n": [1, 2]})
    mapped = table.map(lambda row: row, load_from_cache_file=False)
    assert dataset_fingerprint(table) == dataset_fingerprint(mapped)
    assert dataset_fingerprint(table)["columns"] == '["input_ids", "n"]'
    assert dataset_fingerprint(table) != dataset_fingerprint(table.rename_column("n", "m"))


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("the stream was read")


def test_streams_are_not_read():
    assert dataset_fingerprint(Stream()) == {"type": "Stream"}

    def rows():
        raise AssertionError("the stream was read")
        yield

    features = datasets.Features({"text": datasets.Value("string")})
    table = datasets.IterableDataset.from_generator(rows, features=features)
    assert dataset_fingerprint(table) == {"type": "IterableDataset", "columns": '["text"]'}


class Drawn(Rows):
    def __getitem__(self, index):
        return {"input_ids": [random.random(), np.random.rand(), float(torch.rand(()))]}


def test_rows_that_are_drawn_at_random_are_left_out_and_draw_unnoticed():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert dataset_fingerprint(Drawn(4)) == {"type": "Drawn", "length": "4"}
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


class Broken(Rows):
    def __getitem__(self, index):
        raise FileNotFoundError("shard 7")


def test_rows_that_cannot_be_read_on_one_rank():
    prints = [{"train_dataset": {**dataset_fingerprint(make(4)), "type": "Rows"}} for make in (Rows, Broken)]
    with pytest.raises(
        ValueError, match=r"row 0 is columns.* and unreadable \(FileNotFoundError: shard 7\) on rank 1"
    ):
        refuse_differences(prints)


def test_several_evaluation_sets():
    sets = eval_fingerprint({"short": Rows(2), "long": Rows(9)})
    assert sets["names"] == '["short", "long"]' and sets["length of 'long'"] == "9"
    assert eval_fingerprint(None) == {"type": "NoneType"}
