"""Metrics of written answers against slow oracles, and the tasks that ship here as lm-eval reads them."""

from __future__ import annotations

import json
import random
import re
import sqlite3
import time
from pathlib import Path

import pytest
import yaml

from hf_meshadapt.evaluation import sql_match
from hf_meshadapt.evaluation.groups import FOLDER_TASKS, HUB_TASKS
from hf_meshadapt.evaluation.local_tasks import SOURCES, spider_execution, write_local_tasks
from hf_meshadapt.evaluation.metrics import exact_match, rouge1, token_f1
from hf_meshadapt.evaluation.sql_match import execution_match, query_of
from hf_meshadapt.evaluation.sql_questions import SCHEMA, sql_questions

# Words ---------------------------------------------------------------------------------------------------------------


def shared_by_crossing_out(predicted: list[str], expected: list[str]) -> int:
    left, shared = list(expected), 0
    for word in predicted:
        if word in left:
            left.remove(word)
            shared += 1
    return shared


def f1(predicted: list[str], expected: list[str]) -> float:
    shared = shared_by_crossing_out(predicted, expected)
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def texts(seed: int) -> list[str]:
    numbers = random.Random(seed)
    words = "the a An cat CAT dog, dog's 3.5 3 it's over; (under) café".split()  # noqa: SIM905
    return [" ".join(numbers.choices(words, k=numbers.randint(0, 8))) for _ in range(2)]


def rouge_words(text: str) -> list[str]:
    return "".join(c if c in "abcdefghijklmnopqrstuvwxyz0123456789" else " " for c in text.lower()).split()


def squad_words(text: str) -> list[str]:
    kept = "".join(c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    return [word for word in kept.split() if word not in ("a", "an", "the")]


@pytest.mark.parametrize("seed", range(40))
def test_overlaps_are_those_of_crossing_words_out(seed):
    prediction, reference = texts(seed)
    assert rouge1(prediction, reference) == pytest.approx(f1(rouge_words(prediction), rouge_words(reference)))
    mine, theirs = squad_words(prediction), squad_words(reference)
    expected = f1(mine, theirs) if mine and theirs else float(mine == theirs)
    assert token_f1(prediction, [reference]) == pytest.approx(expected)
    assert token_f1(prediction, ["zebra", reference]) == max(
        token_f1(prediction, ["zebra"]), token_f1(prediction, [reference])
    )
    assert exact_match(prediction, ["zebra", reference]) == float(mine == theirs)


@pytest.mark.parametrize("seed", range(40))
def test_rouge_is_googles(seed):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1"])
    prediction, reference = texts(seed)
    assert rouge1(prediction, reference) == pytest.approx(scorer.score(reference, prediction)["rouge1"].fmeasure)


def test_known_values():
    assert rouge1("the cat sat", "the cat sat on the mat") == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert token_f1("The Eiffel Tower!", ["eiffel tower", "Paris"]) == 1.0 == exact_match("an apple", ["Apple."])
    assert rouge1("", "") == token_f1("x", []) == 0.0 and token_f1("the", [""]) == 1.0


# Queries -------------------------------------------------------------------------------------------------------------

SCRIPT = "CREATE TABLE t (a INTEGER, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, 'y'), (2, 'z'), (3, NULL);"
GOLD = "SELECT a FROM t WHERE a > 1"
ANSWERS = {
    "SELECT a FROM t WHERE a > 1": True,
    " select A from T where not a <= 1; DROP TABLE t": True,  # what follows is not run
    "```sql\nSELECT a FROM t WHERE a > 1 ORDER BY a DESC;\n```\nHope this helps.": True,
    "SELECT a * 1.0 FROM t WHERE a > 1": True,
    "SELECT DISTINCT a FROM t WHERE a > 1": False,
    "SELECT a, b FROM t WHERE a > 1": False,
    "SELECT nothing FROM t": False,
    "": False,
    "I do not know.": False,
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_counts_by_what_it_returns(answer):
    assert execution_match(answer, GOLD, script=SCRIPT) is ANSWERS[answer]


def test_no_query_is_no_match_of_one_that_finds_nothing():
    nothing = "SELECT a FROM t WHERE a > 9"
    assert execution_match("SELECT b FROM t WHERE a = 7", nothing, script=SCRIPT)
    for answer in ("", ";", "-- I do not know", "/* SELECT a FROM t */", "```sql\n```"):
        assert not execution_match(answer, nothing, script=SCRIPT), answer
    with pytest.raises(ValueError, match="the reference query '' fails .there is no query in it"):
        execution_match(nothing, "", script=SCRIPT)


def test_order_counts_where_the_reference_has_one():
    ordered = GOLD + " ORDER BY a DESC"
    assert not execution_match(GOLD + " ORDER BY a", ordered, script=SCRIPT)
    assert execution_match(ordered, ordered, script=SCRIPT)
    assert query_of("```\nSELECT 1") == "SELECT 1"
    with pytest.raises(ValueError, match="the reference query 'SELECT c FROM t' fails .no such column"):
        execution_match("SELECT 1", "SELECT c FROM t", script=SCRIPT)


FORBIDDEN = [
    "DELETE FROM t", "INSERT INTO t VALUES (9, 'w')", "DROP TABLE t", "CREATE TABLE u (a)", "PRAGMA writable_schema = 1",
    "ATTACH DATABASE '{outside}' AS other", "VACUUM INTO '{outside}'", "SELECT load_extension('x')",
    "SELECT zeroblob(2000000000)", "BEGIN",
]  # fmt: skip


def test_a_query_cannot_change_or_reach_anything(tmp_path):
    path, outside = tmp_path / "t.sqlite", tmp_path / "outside.sqlite"
    with sqlite3.connect(path) as database:
        database.executescript(SCRIPT)
    before = path.read_bytes()
    for answer in FORBIDDEN:
        assert not execution_match(answer.format(outside=outside), GOLD, path=str(path)), answer
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == ["t.sqlite"]


def test_a_query_has_a_deadline_and_a_number_of_rows(monkeypatch):
    monkeypatch.setattr(sql_match, "SECONDS", 0.3)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"
    started = time.monotonic()
    assert not execution_match(endless.format("COUNT(*)"), GOLD, script=SCRIPT)
    assert time.monotonic() - started < 10
    monkeypatch.setattr(sql_match, "NUM_ROWS", 3)
    assert not execution_match(endless.format("i") + " LIMIT 4", GOLD, script=SCRIPT)


def test_made_up_questions_have_answers_that_differ():
    rows = sql_questions()
    assert rows == sql_questions() and len({row["question"] for row in rows}) == len(rows) >= 40
    database = sqlite3.connect(":memory:")
    database.executescript(rows[0]["script"])
    found = [database.execute(row["query"]).fetchall() for row in rows]
    assert [] not in found and [(None,)] not in found and len(set(map(repr, found))) > 30
    for row, answer in zip(rows, found):
        assert execution_match(row["query"], row["query"], script=row["script"]), (row, answer)
    assert rows[0]["schema"] == SCHEMA and "INSERT" not in SCHEMA


# Tasks ---------------------------------------------------------------------------------------------------------------

DOCUMENTS = {
    "cnn_dailymail_rouge1": ({"article": "Rain fell.", "highlights": "It rained."}, "It rained", "rouge1"),
    "xsum_rouge1": ({"document": "Rain fell.", "summary": "It rained."}, "It rained", "rouge1"),
    "narrativeqa_token_f1": (
        {
            "document": {"summary": {"text": "Ada met Ben."}},
            "question": {"text": "Whom?"},
            "answers": [{"text": "Ben"}, {"text": "The Ben"}],
        },
        " Ben.\nand so on",
        "token_f1",
    ),
    "sql_generated": (sql_questions()[0], sql_questions()[0]["query"], "execution_match"),
    "quality_accuracy": (
        {"article": "Rain fell.", "question": "What fell?", "options": ["Snow", "Rain", "Hail", "Ash"], "answer": 1},
        None,
        "acc",
    ),
}


@pytest.mark.parametrize("name", [*DOCUMENTS, "spider_execution"])
def test_lm_eval_reads_the_tasks_and_a_right_answer_scores_1(name, tmp_path, monkeypatch):
    tasks = pytest.importorskip("lm_eval.tasks")
    if name == "spider_execution":
        monkeypatch.setenv("SPIDER_FOLDER", str(spider(tmp_path / "spider")))
        row, answer, metric = None, "SELECT count(*) FROM singer", "execution_match"
    else:
        row, answer, metric = DOCUMENTS[name]
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_local_tasks([name], folder)
    if name in HUB_TASKS:  # a row of the same columns, for there is no Hub here
        read_from(row, folder / f"{name}.yaml")
    task = tasks.TaskManager(include_path=str(folder), include_defaults=False).load([name])["tasks"][name]
    doc = next(iter(task.test_docs()))
    prompt, target = task.doc_to_text(doc), task.doc_to_target(doc)
    if metric == "acc":
        assert prompt.endswith("D. Ash\nAnswer:") and target == 1
        return
    assert prompt.endswith(("Summary:", "Answer:", "Query:")) and "{{" not in prompt and target.strip()
    assert "INSERT" not in prompt  # a question shows the tables, not what is in them
    assert task.process_results(doc, [answer])[metric] == 1.0
    assert task.process_results(doc, ["No idea whatsoever"])[metric] == 0.0


def read_from(row: dict, path: Path) -> None:
    """Makes a task file read one row from the disk."""
    data = path.with_suffix(".jsonl")
    data.write_text(json.dumps(row) + "\n")
    text = re.sub(r"^dataset_name:.*\n|^dataset_kwargs:\n  .*\n", "", path.read_text(), flags=re.M)
    text = re.sub(r"^test_split: .*$", "test_split: test", text, flags=re.M)
    here = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}"
    path.write_text(re.sub(r"^dataset_path: .*$", here, text, flags=re.M))


def spider(folder: Path) -> Path:
    """A folder laid out as Spider's."""
    (folder / "database" / "concert").mkdir(parents=True)
    with sqlite3.connect(folder / "database" / "concert" / "concert.sqlite") as database:
        database.executescript("CREATE TABLE singer (name TEXT); INSERT INTO singer VALUES ('Ada');")
    (folder / "dev.json").write_text(
        json.dumps(
            [{"db_id": "concert", "question": "How many singers?", "query": "SELECT count(*) FROM singer", "sql": {}}]
        )
    )
    return folder


def test_spider_is_taken_from_where_the_user_has_it(tmp_path, monkeypatch):
    monkeypatch.delenv("SPIDER_FOLDER", raising=False)
    with pytest.raises(ValueError, match="spider_execution: set SPIDER_FOLDER .*sql_generated"):
        spider_execution()
    monkeypatch.setenv("SPIDER_FOLDER", str(spider(tmp_path)))
    (row,) = spider_execution()["test"]
    assert row["schema"] == "CREATE TABLE singer (name TEXT);" and execution_match(
        "SELECT 1", row["query"], path=row["path"]
    )


@pytest.mark.parametrize("name", [*HUB_TASKS, *FOLDER_TASKS])
def test_task_files_are_called_as_their_tasks(name):
    text = (SOURCES / f"{name}.yaml").read_text()
    assert yaml.safe_load(text.replace("!function ", ""))["task"] == name
