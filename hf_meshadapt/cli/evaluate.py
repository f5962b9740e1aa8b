"""`meshadapt eval`."""

from __future__ import annotations

from .options import add_command, existing_folder, model_source


def add_commands(commands) -> None:
    command = add_command(
        commands,
        "eval",
        run,
        "evaluate a saved model by lm-eval and put the results on its card",
        "meshadapt eval runs/gsm8k --tasks gsm8k_heldout --base HuggingFaceTB/SmolLM2-135M-Instruct --limit 20",
    )
    command.add_argument("folder", nargs="?", type=existing_folder, metavar="DIR", help="folder of a saved model")
    command.add_argument(
        "--tasks", help="comma-separated: tasks of lm-eval, tasks that ship here, or domains (see --list)"
    )
    command.add_argument("--list", action="store_true", help="print the domains and the tasks that ship here")
    command.add_argument(
        "--base", type=model_source, metavar="MODEL", help="evaluate this model too, for a table of before and after"
    )
    command.add_argument("--limit", type=int, metavar="N", help="only the first N examples of every task")
    command.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples in the prompt (default: the task's own)"
    )
    command.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows at once (default: %(default)s)")
    command.add_argument("--device", help="for example cpu or cuda:0 (default: a GPU where there is one)")
    command.add_argument("--dtype", default="auto", help="dtype of the weights (default: as saved)")
    command.add_argument("--chat-template", action="store_true", help="ask through the tokenizer's chat template")
    command.add_argument("--include-path", metavar="DIR", help="folder with further task files of lm-eval")
    command.add_argument(
        "--timeout-seconds",
        type=float,
        default=24 * 3600.0,
        metavar="S",
        help="end one that takes longer (default: a day)",
    )
    command.add_argument("--allow-code-execution", action="store_true", help="run code that the model writes")


def run(args) -> int:
    if args.list:
        print(known_tasks())
        return 0
    if args.folder is None or not args.tasks:
        raise ValueError("give the folder of a saved model and --tasks; `meshadapt eval --list` names some")
    from ..evaluation.harness import EvaluationOptions, describe, evaluate

    options = EvaluationOptions(
        tasks=tuple(args.tasks.split(",")),
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        batch_size=args.batch_size,
        device=args.device,
        dtype=args.dtype,
        chat_template=args.chat_template,
        include_path=args.include_path,
        allow_code_execution=args.allow_code_execution,
        timeout_seconds=args.timeout_seconds,
    )
    print(describe(evaluate(args.folder, options, args.base)))
    return 0


def known_tasks() -> str:
    from ..evaluation.groups import DOMAINS, OUR_TASKS

    domains = [f"  {name}: {', '.join(tasks)}" for name, tasks in DOMAINS.items()]
    ours = [f"  {name}: {text}" for name, text in OUR_TASKS.items()]
    return "\n".join(["domains:", *domains, "tasks that ship here, beside lm-eval's:", *ours])
