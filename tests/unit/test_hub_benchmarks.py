"""`.eval_results`: written for whole benchmarks of the Hub, and for nothing else."""

from __future__ import annotations

import pytest
import yaml
from huggingface_hub import eval_result_entries_to_yaml, parse_eval_result_entries

from hf_meshadapt.card import write_card
from hf_meshadapt.checkpoint_folder import write_json
from hf_meshadapt.evaluation.groups import LOCAL_TASKS
from hf_meshadapt.evaluation.harness import keep
from hf_meshadapt.hub_benchmarks import BENCHMARKS, benchmark_results, write_benchmark_results
from hf_meshadapt.run_record import RECORD_NAME
from tests.unit.test_card import RECORD

GSM8K = {
    "lm_eval": "0.4.13",
    "limit": None,
    "num_fewshot": None,
    "step": 40,
    "results": {"gsm8k": {"exact_match,strict-match": {"value": 0.2971, "stderr": 0.0126}}},
    "samples": {"gsm8k": 1319},
    "datasets": {"gsm8k": "openai/gsm8k"},
    "base": None,
}
MMLU_PRO = GSM8K | {
    "num_fewshot": 5,
    "results": {"mmlu_pro": {"exact_match,custom-extract": {"value": 0.125, "stderr": None}}, "mmlu_pro_law": {}},
    "samples": {"mmlu_pro_law": 12000, "mmlu_pro_math": 32},
    "datasets": {"mmlu_pro_law": "TIGER-Lab/MMLU-Pro", "mmlu_pro_math": "TIGER-Lab/MMLU-Pro"},
}


@pytest.mark.parametrize(
    ("evaluation", "name", "value", "notes"),
    [
        (GSM8K, "gsm8k", 29.71, "lm-eval 0.4.13, task gsm8k, exact_match,strict-match"),
        (
            GSM8K | {"chat_template": True, "dtype": "auto"},
            "gsm8k",
            29.71,
            "lm-eval 0.4.13, task gsm8k, exact_match,strict-match, chat template",
        ),
        (MMLU_PRO, "mmlu_pro", 12.5, "lm-eval 0.4.13, task mmlu_pro, exact_match,custom-extract, 5-shot"),
    ],
)
def test_a_whole_benchmark_is_written_in_the_hubs_format(evaluation, name, value, notes, tmp_path):
    (path,) = write_benchmark_results(tmp_path, evaluation)
    assert path == tmp_path / ".eval_results" / f"meshadapt-{name}.yaml"
    data = yaml.safe_load(path.read_text())
    (entry,) = parse_eval_result_entries(data)  # the Hub's own client reads it back
    assert eval_result_entries_to_yaml([entry]) == data
    assert (entry.dataset_id, entry.task_id) == (BENCHMARKS[name].dataset_id, name)
    assert (entry.value, entry.notes) == (value, notes)


PARTS = {
    "a limit": GSM8K | {"limit": 20},
    "a part of the test set": GSM8K | {"samples": {"gsm8k": 319}},
    "a local file under the same name": GSM8K | {"datasets": {"gsm8k": None}},
    "another data set": GSM8K | {"datasets": {"gsm8k": "me/gsm8k"}},
    "another metric": GSM8K | {"results": {"gsm8k": {"exact_match,flexible-extract": {"value": 0.3, "stderr": None}}}},
    "one subject": MMLU_PRO | {"samples": {"mmlu_pro_law": 1101}, "datasets": {"mmlu_pro_law": "TIGER-Lab/MMLU-Pro"}},
    "held-out problems": {
        key: {"gsm8k_heldout": value["gsm8k"]} if isinstance(value, dict) else value for key, value in GSM8K.items()
    },
    "nothing": None,
}


@pytest.mark.parametrize("case", PARTS)
def test_whatever_is_less_is_not(case, tmp_path):
    assert benchmark_results(PARTS[case]) == {} and not set(LOCAL_TASKS) & set(BENCHMARKS)
    assert write_benchmark_results(tmp_path, PARTS[case]) == [] and list(tmp_path.iterdir()) == []


def test_results_come_and_go_with_the_evaluation(tmp_path):
    write_json(tmp_path / RECORD_NAME, RECORD)
    place = tmp_path / ".eval_results"
    keep(tmp_path, GSM8K)  # without a card
    assert [path.name for path in place.iterdir()] == ["meshadapt-gsm8k.yaml"]
    (place / "theirs.yaml").write_text("[]")
    write_json(tmp_path / "evaluation.json", GSM8K | {"step": 30})  # of another step of the run
    write_card(tmp_path)
    assert [path.name for path in place.iterdir()] == ["theirs.yaml"]
