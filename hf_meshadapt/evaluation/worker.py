"""The process that runs lm-eval: `python -m hf_meshadapt.evaluation.worker REQUEST.json RESULT.json`.

It calls lm-eval as lm-eval's own command does, with two differences: where the folders of `include_path` have all tasks it
does not read the thousands of task files that lm-eval carries, which takes long; and it looks at the tasks' names before it
loads the model.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from pathlib import Path


def run(request: dict) -> dict:
    """Evaluates one model.

    Args:
        request: `model` (folder or name), `peft` (folder of an adapter, or None), `include_path` (folders), and the
            fields of `harness.EvaluationOptions`.

    Returns:
        lm-eval's own results.

    Raises:
        ValueError: a task that lm-eval does not know.
    """
    import torch
    from lm_eval import simple_evaluate

    manager = make_task_manager(request["tasks"], request["include_path"])
    refuse_unknown(request["tasks"], manager.all_tasks)

    model_args = {"pretrained": request["model"], "dtype": request["dtype"]}
    if request["peft"]:
        model_args["peft"] = request["peft"]
    return simple_evaluate(
        model="hf",
        model_args=model_args,
        tasks=request["tasks"],
        num_fewshot=request["num_fewshot"],
        batch_size=request["batch_size"],
        device=request["device"] or ("cuda:0" if torch.cuda.is_available() else "cpu"),
        limit=request["limit"],
        apply_chat_template=request["chat_template"],
        log_samples=False,
        task_manager=manager,
        confirm_run_unsafe_code=request["allow_code_execution"],
    )


def make_task_manager(tasks: list[str], folders: list[str]):
    from lm_eval.tasks import TaskManager

    local = TaskManager(include_path=folders, include_defaults=False, metadata={})
    if set(tasks) <= set(local.all_tasks):
        return local
    return TaskManager(include_path=folders, metadata={})


def refuse_unknown(tasks: list[str], known: list[str]) -> None:
    """
    Args:
        known: tasks, groups and tags.

    Raises:
        ValueError: of tasks that lm-eval would not find; names what comes near.
    """
    unknown = [task for task in tasks if task not in known and not Path(task).is_file()]
    if unknown:
        near = [name for task in unknown for name in difflib.get_close_matches(task, known)]
        advice = f"Did you mean {', '.join(near)}?" if near else "`lm-eval ls tasks` lists them"
        raise ValueError(f"tasks that lm-eval does not know: {', '.join(unknown)}. {advice}")


def main(request_path: str, result_path: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as lm-eval's command does
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    if request["allow_code_execution"]:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # evaluate's code_eval asks for it too
    results = run(request)
    kept = {name: results[name] for name in ("results", "n-samples", "configs")}
    Path(result_path).write_text(json.dumps(kept, default=str), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
