"""`meshadapt try`: rows from files, and rows held out."""

from __future__ import annotations

import pytest

from hf_meshadapt.cli.main import main
from hf_meshadapt.trial.data import draw_rows, form_of, hold_out, load_rows
from tests.sft import chats, completions, texts


@pytest.mark.parametrize(
    ("data", "form"), [(texts, ["text"]), (chats, ["messages"]), (completions, ["prompt", "completion"])]
)
def test_rows_of_a_file(data, form, tmp_path):
    path = tmp_path / "rows.jsonl"
    data(12, 1).add_column("source", ["made"] * 12).to_json(path)
    rows = load_rows(str(path))
    assert rows.column_names == form and len(rows) == 12


def test_rows_of_text_files_are_their_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    for path in (tmp_path / "a.txt", tmp_path):
        assert draw_rows(load_rows(str(path)), 10, 0)["text"] == ["one", "two"]


def test_no_more_rows_are_looked_at_than_can_be_read(tmp_path):
    texts(30, 1).to_json(tmp_path / "rows.jsonl")
    dataset = load_rows(str(tmp_path / "rows.jsonl"))
    rows, other = (draw_rows(dataset, 8, seed)["text"] for seed in (0, 1))
    assert len(dataset) == 30
    assert len(rows) == len(set(rows)) == 8 and set(rows) != set(other)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="the folder has no data; put a .jsonl"):
        load_rows(str(tmp_path))
    (tmp_path / "a.pdf").touch()
    with pytest.raises(ValueError, match="cannot be read as .pdf; give a .jsonl"):
        load_rows(str(tmp_path / "a.pdf"))
    with pytest.raises(ValueError, match="neither a file or folder here, nor a data set"):
        load_rows(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="has columns question, answer: need messages, prompt with completion, text"):
        form_of(["question", "answer"], "X")


@pytest.mark.parametrize(
    "name,text,words",
    [
        ("rows.jsonl", '{"text": "a"}\n{oops\n', "/rows.jsonl: line 2 is no JSON (Expecting property name"),
        ("rows.json", '[{"text": "a"},\n{oops]\n', ": cannot be read ("),
        ("rows.parquet", "no such thing", ": cannot be read ("),
    ],
)
def test_a_broken_file_is_an_error_of_one_line(name, text, words, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    for data in (tmp_path / name, tmp_path):
        assert main(["try", "nowhere", "--data", str(data)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --data={tmp_path}") and words in line


def test_options_without_effect_on_a_file_or_folder_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "empty.txt").touch()
    file = str(tmp_path / "a.txt")
    for source, options, words in (
        (str(tmp_path / "empty.txt"), {}, "empty.txt: the file is empty"),
        (file, {"config": "main"}, "--data-config=main: has no effect with a file"),
        (file, {"split": "train"}, "--split=train: has no effect with a file"),
        (str(tmp_path), {"config": "main"}, "--data-config=main: has no effect with a folder"),
    ):
        with pytest.raises(ValueError, match=words):
            load_rows(source, **options)
    assert load_rows(str(tmp_path), split="train[:1]")["text"] == ["one"]


def test_held_out_rows_are_in_no_training_row():
    rows = texts(30, 1)
    doubled = rows.select([*range(30), *range(30)])
    train, held_out = hold_out(doubled, 4)
    assert len(held_out) == 8 and len(train) == 52
    assert not set(train["text"]) & set(held_out["text"])
    assert set(hold_out(rows, 4)[1]["text"]) == set(held_out["text"])  # whatever the order and the repeats
    assert len(hold_out(rows, 100)[1]) == 6  # a fifth
    with pytest.raises(ValueError, match="has 1 different rows"):
        hold_out(rows.select([0, 0]), 1)
