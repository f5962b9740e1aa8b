"""Which tasks an evaluation runs, what it keeps of lm-eval's results, and the sandbox for code that a model writes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hf_meshadapt.checkpoint_folder import read_json, write_json
from hf_meshadapt.evaluation import callback, harness
from hf_meshadapt.evaluation.callback import EvalCallback
from hf_meshadapt.evaluation.groups import DOMAINS, FOLDER_TASKS, LOCAL_TASKS, OUR_TASKS, resolve_tasks
from hf_meshadapt.evaluation.harness import EvaluationOptions, describe, evaluate, run_harness, summarise
from hf_meshadapt.evaluation.local_tasks import DATA, SOURCES, gsm8k_heldout, mmlu_prompts, write_local_tasks
from hf_meshadapt.evaluation.sandbox import passes
from hf_meshadapt.evaluation.worker import refuse_unknown
from hf_meshadapt.run_record import RECORD_NAME
from tests.unit.test_card import RECORD

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples"))

LM_EVAL_FOLDERS = (
    "medqa medmcqa humaneval mbpp gsm8k sciq arc hellaswag winogrande ifeval".split()  # noqa: SIM905
)
# What lm-eval 0.4.13 returned for two examples, shortened.
FOUND = {
    "results": {
        "maths": {
            "alias": "maths",
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": 0.5,
            "acc,none": 0.25,
            "acc_stderr,none": "N/A",
        }
    },
    "n-samples": {"maths": {"original": 319, "effective": 2}},
    "configs": {"maths": {"dataset_path": "openai/gsm8k"}},
}


def test_domains_become_lm_evals_tasks():
    assert resolve_tasks(["science", "gsm8k_heldout", "sciq"]) == ["sciq", "arc_challenge", "gsm8k_heldout"]
    with pytest.raises(ValueError, match="no tasks given"):
        resolve_tasks([])
    assert resolve_tasks(["sql", "summarisation"]) == ["spider_execution", "cnn_dailymail_rouge1", "xsum_rouge1"]
    with pytest.raises(ValueError, match="humaneval, mbpp: runs code .*--allow-code-execution"):
        EvaluationOptions(("code",)).resolved()
    with pytest.raises(ValueError, match="has no effect"):
        EvaluationOptions(("science",), allow_code_execution=True).resolved()


def test_every_task_of_a_domain_is_one_of_lm_evals_or_ships_here():
    package = next(Path(place, "lm_eval/tasks") for place in sys.path if Path(place, "lm_eval/tasks").is_dir())
    files = [path for folder in LM_EVAL_FOLDERS for path in (package / folder).glob("*.yaml")]
    names = {line.removeprefix("task: ") for path in files for line in path.read_text().splitlines()}
    assert set(sum(DOMAINS.values(), ())) - set(OUR_TASKS) <= names and not set(OUR_TASKS) & names
    assert len(DOMAINS) == 9


def test_numbers_are_kept_as_lm_eval_gives_them():
    assert summarise(FOUND) == {
        "results": {
            "maths": {
                "exact_match,strict-match": {"value": 0.5, "stderr": 0.5},
                "acc": {"value": 0.25, "stderr": None},
            }
        },
        "samples": {"maths": 2},
        "datasets": {"maths": "openai/gsm8k"},
    }


# Local tasks ---------------------------------------------------------------------------------------------------------


def test_the_held_out_problems_are_those_of_the_committed_split():
    from gsm8k_data import load_gsm8k

    train, held_out = load_gsm8k()
    data = gsm8k_heldout()
    for mine, theirs in ((data["train"], train), (data["test"], held_out)):
        assert [row["question"] for row in mine] == [row["question"] for row in theirs]
    assert len(data["test"]) == 319


def test_mmlu_questions_have_four_choices_and_an_answer():
    rows = mmlu_prompts()["test"]
    assert len(rows) == 281 and len({row["subject"] for row in rows}) == 57  # of 282; one answer is `(E)`
    assert all(len(row["choices"]) == 4 and all(row["choices"]) and 0 <= row["answer"] < 4 for row in rows)


def test_local_tasks_are_written_with_their_data_and_never_called_the_benchmark(tmp_path):
    assert set(LOCAL_TASKS) | set(FOLDER_TASKS) == set(DATA)
    assert set(OUR_TASKS) == {path.stem for path in SOURCES.glob("*.yaml")}
    write_local_tasks(["gsm8k_heldout", "hellaswag"], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "gsm8k_heldout.yaml", "gsm8k_heldout-train.jsonl", "gsm8k_heldout-test.jsonl",
    }  # fmt: skip
    task = yaml.safe_load((tmp_path / "gsm8k_heldout.yaml").read_text())
    assert task["task"] == "gsm8k_heldout" and not any(value == "gsm8k" for value in task.values())
    lines = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
    assert len(lines) == 319 and set(json.loads(lines[0])) == {"question", "answer"}


# Results beside the model --------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    """A folder that looks like a saved model, and an lm-eval that finds 0.5 for it and 0.25 for anything else."""

    def found(name: str, options) -> dict:
        value = 0.5 if name == str(tmp_path) else 0.25
        entry = {"acc": {"value": value, "stderr": 0.125}}
        tasks = options.resolved()
        return {"results": dict.fromkeys(tasks, entry), "samples": dict.fromkeys(tasks, 8), "datasets": {}}

    monkeypatch.setattr(harness, "run_harness", found)
    monkeypatch.setattr(harness.importlib.metadata, "version", lambda name: "0.4.13")
    (tmp_path / "config.json").write_text("{}")
    write_json(tmp_path / RECORD_NAME, RECORD)
    return tmp_path


def test_results_stand_beside_the_base_models_on_the_card(model):
    harness.write_card(model)
    evaluation = evaluate(model, EvaluationOptions(("sciq",)), base_model="gpt2")
    assert evaluation["step"] == RECORD["global_step"] and evaluation["base"]["model"] == "gpt2"
    assert "| sciq | acc | 8 | 0.2500 ± 0.1250 | 0.5000 ± 0.1250 |" in (model / "README.md").read_text()
    assert re.split(" {2,}", describe(evaluation).splitlines()[1])[-2:] == ["0.2500 ± 0.1250", "0.5000 ± 0.1250"]


def test_an_edited_card_is_not_overwritten_and_other_tasks_are_added(model, caplog):
    (model / "README.md").write_text("mine")
    evaluate(model, EvaluationOptions(("sciq",)))
    evaluate(model, EvaluationOptions(("hellaswag",)))
    assert (model / "README.md").read_text() == "mine" and "README.md was edited" in caplog.text
    assert set(read_json(model / "evaluation.json")["results"]) == {"sciq", "hellaswag"}
    evaluate(model, EvaluationOptions(("winogrande",), limit=5))
    assert set(read_json(model / "evaluation.json")["results"]) == {"winogrande"}


OPTIONS = {"limit": 5, "num_fewshot": 2, "dtype": "float32", "chat_template": True}


@pytest.mark.parametrize("changed", [*OPTIONS, "run", "global_step"])
def test_results_of_other_models_and_of_other_settings_do_not_stand_together(model, changed, caplog):
    write_json(model / RECORD_NAME, RECORD | {"run": "a"})
    first = evaluate(model, EvaluationOptions(("sciq",)))
    assert first["run"] == "a" and {name: first[name] for name in OPTIONS} == {
        "limit": None, "num_fewshot": None, "dtype": "auto", "chat_template": False,
    }  # fmt: skip
    further = {changed: OPTIONS[changed]} if changed in OPTIONS else {}
    if not further:
        write_json(model / RECORD_NAME, RECORD | {"run": "a", changed: 41 if changed == "global_step" else "b"})
    evaluate(model, EvaluationOptions(("hellaswag",), **further))
    assert set(read_json(model / "evaluation.json")["results"]) == {"hellaswag"}
    assert f"earlier results differ in {changed.removeprefix('global_')}; the new" in caplog.text


def test_each_base_model_has_a_table_of_its_own(model, tmp_path_factory):
    bases = [tmp_path_factory.mktemp(name) for name in "ab"]
    for base in bases:  # of one size: it is their time that tells them apart
        (base / "model.safetensors").write_bytes(b"weights")
    os.utime(bases[1] / "model.safetensors", ns=(1, 1))
    for first, second in (("org/a", "org/b"), map(str, bases), (str(bases[0]), "org/a"), ("org/a", None)):
        (model / "evaluation.json").unlink(missing_ok=True)
        both = [evaluate(model, EvaluationOptions((task,)), base) for task, base in zip("ab", (first, first))]
        merged = read_json(model / "evaluation.json")
        assert set(merged["results"]) == set(merged["base"]["results"]) == {"a", "b"}
        assert str(tmp_path_factory.getbasetemp()) not in json.dumps(both)
        evaluate(model, EvaluationOptions(("c",)), second)
        now = read_json(model / "evaluation.json")
        assert set(now["results"]) == {"c"} and (second is None or set(now["base"]["results"]) == {"c"})


def test_a_folder_without_a_record_is_known_by_its_weights(model):
    (model / RECORD_NAME).unlink()
    for tasks, time in ((("a",), 1), (("b",), 1), (("c",), 2)):
        (model / "model.safetensors").write_bytes(b"weights")
        os.utime(model / "model.safetensors", ns=(time, time))
        evaluate(model, EvaluationOptions(tasks))
        expected = {"a"} if tasks == ("a",) else {"a", "b"} if tasks == ("b",) else {"c"}
        assert set(read_json(model / "evaluation.json")["results"]) == expected
    write_json(model / RECORD_NAME, RECORD)  # a run has saved its model there
    assert "0.5000" not in harness.write_card(model).read_text()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no saved model"):
        evaluate(tmp_path, EvaluationOptions(("sciq",)))


def test_a_missing_lm_eval_says_what_to_install(monkeypatch):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    for needs_it in (lambda: run_harness("x", EvaluationOptions(("sciq",))), lambda: EvalCallback(["sciq"])):
        with pytest.raises(ImportError, match="lm-eval: run pip install '..eval.' in a clone"):
            needs_it()


def test_tasks_that_lm_eval_does_not_know_are_named_with_what_comes_near(tmp_path):
    known = ["sciq", "gsm8k", "gsm8k_cot"]
    (tmp_path / "mine.yaml").touch()
    refuse_unknown(["sciq", str(tmp_path / "mine.yaml")], known)
    with pytest.raises(ValueError, match="know: gsm8kk. Did you mean gsm8k, gsm8k_cot"):
        refuse_unknown(["sciq", "gsm8kk"], known)
    with pytest.raises(ValueError, match="know: zzz. `lm-eval ls tasks` lists them"):
        refuse_unknown(["zzz"], known)


def test_the_callback_evaluates_a_checkpoint_and_logs_it(model, monkeypatch):
    checkpoint = model / "checkpoint-40"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    write_json(checkpoint / RECORD_NAME, RECORD)
    seen = []
    run_on = callback.run_on
    monkeypatch.setattr(callback, "run_on", lambda folder, options: seen.append(folder) or run_on(folder, options))
    args = SimpleNamespace(output_dir=str(model), launched_ranks=1)
    state = SimpleNamespace(global_step=40, is_world_process_zero=True, log_history=[])
    evaluating = EvalCallback(["sciq"])
    evaluating.on_save(args, state, None)
    evaluating.on_train_end(args, state, None)
    assert state.log_history == [{"step": 40, "lm_eval/sciq/acc": 0.25}]
    assert seen[0].name == ".staged-eval-checkpoint-40" and not seen[0].exists()
    for folder in (model, checkpoint):
        assert read_json(folder / "evaluation.json")["step"] == 40
    state.is_world_process_zero = False
    evaluating.on_save(args, state, None)
    assert not evaluating.jobs.busy


# The sandbox ---------------------------------------------------------------------------------------------------------

PROGRAMS = {
    "assert 1 + 1 == 2": True,
    "assert 1 + 1 == 3": False,
    "import sys; sys.exit(0)": False,  # before its test
    "while True: pass": False,
    "x = bytearray(4 * 1024**3)": False,
    "open('f', 'w').write('x' * 10**7)": False,
    "import os; assert set(os.environ) <= {'HOME', 'TMPDIR', 'LC_CTYPE'} and not os.listdir('.')": True,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_sandbox_passes_only_what_reaches_its_end_within_the_limits(program):
    assert passes(program, timeout_seconds=1.0 if "while" in program else 30.0) == PROGRAMS[program]
