"""`meshadapt try`: a recipe on the emulated mesh of one device, before a mesh is rented."""

from __future__ import annotations

import logging
from pathlib import Path

from .options import add_command, model_source


def add_commands(commands) -> None:
    command = add_command(
        commands,
        "try",
        run,
        "train a model for some minutes on the emulated mesh, dense and coded, and say which recipe suits a link",
        "meshadapt try HuggingFaceTB/SmolLM2-135M-Instruct --data trl-lib/Capybara --stages 4 --link-mbps 100",
    )
    add = command.add_argument
    add("model", type=model_source, metavar="MODEL", help="name or folder of a causal language model")
    add("--data", required=True, metavar="X", help="a file (.jsonl, .txt, ...), a folder, or a data set of the Hub, with "
        "`text`, `messages`, or `prompt` and `completion`")  # fmt: skip
    add("--data-config", metavar="NAME", help="configuration of a data set of the Hub")
    add("--split", metavar="NAME", help="split of a folder or of a data set of the Hub (default: train)")
    add("--stages", type=int, default=2, metavar="N", help="pipeline stages (default: %(default)s)")
    add("--replicas", type=int, default=1, metavar="N", help="data-parallel replicas (default: %(default)s)")
    add("--dp-sync", default="allreduce", metavar="S", help="how replicas stay one model: a choice of the argument "
        "dp_sync (default: %(default)s)")  # fmt: skip
    add("--link-mbps", "--link_mbps", type=float, default=100.0, metavar="R", help="uplink of every rented machine in "
        "Mbit/s (default: %(default)s)")  # fmt: skip
    add("--speedup", type=float, default=1.0, metavar="X", help="how many times faster a rented device is than this one "
        "(default: %(default)s)")  # fmt: skip
    add("--budget", type=float, action="append", metavar="B", help="bytes over boundaries as a share of dense ones, for "
        "a coded run; repeat it to compare several (default: 0.05)")  # fmt: skip
    add("--paper", action="store_true", help="also run the masks of the paper (preset `paper`)")
    add("--minutes", type=float, default=10.0, metavar="M", help="about so long for all runs (default: %(default)s)")
    add("--steps", type=int, default=200, metavar="N", help="optimizer steps, at most (default: %(default)s)")
    add("--batch-size", type=int, default=8, metavar="N", help="rows per replica and step (default: %(default)s)")
    add("--max-length", type=int, default=512, metavar="T", help="cut rows off at T tokens (default: %(default)s)")
    add("--held-out", type=int, default=32, metavar="N", help="rows to measure the loss on (default: %(default)s)")
    add("--eval-every", type=int, default=10, metavar="N", help="steps between such losses (default: %(default)s)")
    add("--learning-rate", type=float, default=1e-4, metavar="L", help="constant (default: %(default)s)")
    add("--calibration-tokens", type=int, metavar="N", help="tokens that coded runs look at first (default: 16384)")
    add("--seed", type=int, default=0, help="of data order and masks (default: %(default)s)")
    add("--no-bf16", action="store_false", dest="bf16", help="passes in float32, for devices without bfloat16")
    add("--output", type=Path, default=Path("runs/try"), metavar="DIR", help="folder for try.json and curves.png "
        "(default: %(default)s)")  # fmt: skip


def run(args) -> int:
    check(args)
    import datasets
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    from ..trial.comparison import RentedMesh
    from ..trial.data import draw_rows, hold_out, load_rows
    from ..trial.runs import run_all

    console = Console(highlight=False)
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    # What is wrong with a file is said once, by `load_rows`.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    num_read = args.steps * args.batch_size * args.replicas
    dataset = load_rows(args.data, args.data_config, args.split)
    train, held_out = rows = hold_out(draw_rows(dataset, num_read + args.held_out, args.seed), args.held_out)
    columns = ", ".join(dataset.column_names)
    console.print(f"{len(train)} rows to train on and {len(held_out)} held out, of {len(dataset)} rows ({columns})")
    recipes = recipes_of(args)
    runs, microbatches = run_all(recipes, options_of(args, len(recipes)), rows, console.print)
    conclude(
        args, console, runs, RentedMesh(args.stages, args.replicas, microbatches, 1e6 * args.link_mbps, args.speedup)
    )
    return 0


def recipes_of(args) -> list:
    from ..trial.comparison import Recipe

    coded = [Recipe("anchored", budget) for budget in dict.fromkeys(args.budget or [0.05])]
    return [Recipe("dense"), *coded, *([Recipe("paper")] if args.paper else [])]


def options_of(args, num_runs: int):
    from ..trial.runs import TrialOptions

    return TrialOptions(
        model=args.model,
        stages=args.stages,
        replicas=args.replicas,
        dp_sync=args.dp_sync,
        batch_size=args.batch_size,
        max_length=args.max_length,
        num_steps=args.steps,
        seconds_per_run=60 * args.minutes / num_runs,
        eval_every_steps=args.eval_every,
        learning_rate=args.learning_rate,
        seed=args.seed,
        bf16=args.bf16,
        calibration_tokens=args.calibration_tokens,
        output=args.output,
    )


def options_for(recipe, args) -> str:
    """Options of a training script that does to boundaries and replicas what the recipe's run did."""
    from ..presets import PRESETS
    from ..trial.comparison import WIRE_DTYPE

    by_default = "streaming_diloco" if recipe.preset == "paper" and args.replicas > 1 else "allreduce"
    further = {
        "wire_dtype": None if PRESETS[recipe.preset][1] == WIRE_DTYPE else WIRE_DTYPE,
        "anchor": "false" if recipe.preset == "paper" else None,  # its masks alone were tried
        "calibration_tokens": None if recipe.boundary_budget is None else args.calibration_tokens,
        "dp_sync": None if args.dp_sync == by_default else args.dp_sync,
    }
    given = "".join(f" --{name} {value}" for name, value in further.items() if value is not None)
    return f"--pipeline_stages {args.stages} {recipe.options()}{given}"


def conclude(args, console, runs: list, mesh) -> None:
    """Prints the table and the recommendation, and writes both to files."""
    from ..trial.comparison import recommend
    from ..trial.report import results, results_table, write_results

    recommendation = recommend(runs, mesh)
    console.print(results_table(runs, mesh))
    console.print(f"[bold]{recommendation.reason}.[/bold]")
    if recommendation.recipe is not None:
        console.print(f"  {options_for(recommendation.recipe, args)}", soft_wrap=True)
    if args.dp_sync == "allreduce" and runs[0].gradient_share > 0.5:
        console.print(
            f"{runs[0].gradient_share:.0%} of dense training's bytes are gradients of weights. No preset makes them fewer: "
            "try --dp-sync powersgd, put more tokens into a step (--batch-size, --max-length), or train adapters only."
        )
    written = write_results(args.output, results(runs, mesh, recommendation), runs)
    console.print("Figures: " + ", ".join(map(str, written)), soft_wrap=True)


def check(args) -> None:
    """Raises ValueError for numbers out of range, before anything is loaded."""
    if args.stages < 2:
        raise ValueError(f"--stages={args.stages}: must be at least 2, else nothing crosses a boundary")
    positive = ("replicas", "link_mbps", "speedup", "minutes", "steps", "batch_size", "max_length", "held_out")
    for name in (*positive, "eval_every", "learning_rate"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(args, name)}: must be positive")
    for budget in args.budget or ():
        if not 0 < budget <= 1:
            raise ValueError(f"--budget={budget}: must lie in (0, 1]. Use 0.05 for 5% of the dense bytes")
