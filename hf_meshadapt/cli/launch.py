"""`meshadapt launch`: accelerate's launcher with the launch files that ship here."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .circuits import CPU, fast_options, refuse_several_machines, run_both, shown
from .options import add_command

CONFIGS = ("cpu_2x1", "cpu_2x2", "cpu_4x1", "gpu_2x2", "two_machines_2x1")


def add_commands(commands) -> None:
    launch = add_command(
        commands,
        "launch",
        run,
        "start a training script on several processes, by accelerate's launcher, and an anchor beside it",
        "meshadapt launch --config cpu_2x2 train.py --pipeline_stages 2 --output_dir runs/try",
    )
    what = launch.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--config",
        metavar="NAME",
        help=f"a launch file of ours ({', '.join(CONFIGS)}: stages x replicas) or the path of your own",
    )
    what.add_argument("--num-processes", type=int, metavar="N", help="so many processes on this machine")
    launch.add_argument("--cpu", action="store_true", help="with --num-processes: on the CPU")
    launch.add_argument(
        "--machine-rank",
        type=int,
        metavar="N",
        help="with a launch file of several machines: 0 on the first one, then 1, 2, ...",
    )
    launch.add_argument(
        "--main-process-ip",
        metavar="ADDRESS",
        help="with such a file: of the first machine, in place of the file's own",
    )
    launch.add_argument(
        "--anchor",
        type=int,
        metavar="N",
        help="start an anchor of N processes beside it, with the same script: --circuit anchor, and what else both "
        "circuits need, is added to its arguments",
    )
    launch.add_argument(
        "--anchor-devices",
        metavar="LIST",
        help="with --anchor: the GPUs that it sees, such as 4,5; without, its first process shares the first GPU",
    )
    launch.add_argument("--dry-run", action="store_true", help="print what would be run and do not run it")
    launch.add_argument("script", metavar="SCRIPT", help="the training script")
    launch.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")


def run(args) -> int:
    script_args = list(args.script_args)
    if args.anchor is not None:
        script_args += fast_options(args.script_args)
    command = launch_command(args.config, args.num_processes, [*machine_options(args), args.script, *script_args])
    if args.cpu and args.config:
        raise ValueError("--cpu has no effect with --config: choose a launch file whose name begins with cpu")
    commands, changes = [command], [CPU if args.cpu else {}]
    if args.anchor is not None:
        commands.append(anchor_command(args, script_args))
        changes.append(anchor_changes(args))
    elif args.anchor_devices is not None:
        raise ValueError("--anchor-devices has no effect without --anchor")
    if args.dry_run:
        if args.anchor is not None:  # each run has a new one, which must not be printed
            changes = [{**change, "HF_MESHADAPT_ANCHOR_SECRET": "SECRET"} for change in changes]
        print("\n".join(map(shown, commands, changes)))
        return 0
    if not Path(args.script).is_file():
        # Every process would say so, amid what the launcher says of its children.
        raise ValueError(f"{args.script}: no such file. Give a training script")
    if args.anchor is not None:
        return run_both(*commands, changes)
    os.environ.update(*changes)
    os.execv(command[0], command)


def machine_options(args) -> list[str]:
    """Accelerate's options that say which of several machines this is.

    Raises:
        ValueError: they would have no effect.
    """
    given = {"--machine_rank": args.machine_rank, "--main_process_ip": args.main_process_ip}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    if options and args.config is None:
        raise ValueError(
            f"{options[0].replace('_', '-')} has no effect without --config: give a launch file of several machines"
        )
    return options


def anchor_command(args, script_args: list[str]) -> list[str]:
    """The command that starts the anchor.

    Raises:
        ValueError: less than one process, or a launch file for several machines.
    """
    if args.anchor < 1:
        raise ValueError(f"--anchor={args.anchor}: must be at least 1")
    if args.config is not None:
        refuse_several_machines(config_file(args.config))
    script = [args.script, *script_args, "--circuit", "anchor"]
    return [sys.executable, *script] if args.anchor == 1 else launch_command(None, args.anchor, script)


def anchor_changes(args) -> dict[str, str]:
    """Variables of the anchor's environment."""
    on_cpu = args.cpu or (args.config in CONFIGS and args.config.startswith("cpu"))
    devices = {} if args.anchor_devices is None else {"CUDA_VISIBLE_DEVICES": args.anchor_devices}
    return (CPU if on_cpu else {}) | devices


def launch_command(config: str | None, num_processes: int | None, script: list[str]) -> list[str]:
    """The command that starts `script`, options of the launcher before it.

    Raises:
        ValueError: no such launch file, or fewer than two processes.
    """
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    if config is not None:
        return [*launcher, "--config_file", str(config_file(config)), *script]
    if num_processes < 2:
        raise ValueError(
            f"--num-processes={num_processes}: must be at least 2. For one process (the emulated mesh) run the script with "
            "python"
        )
    single_machine = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    # Port 0: any free one, so that two runs on a machine do not meet.
    return [*launcher, *single_machine, "--main_process_port", "0", "--num_processes", str(num_processes), *script]


def config_file(name: str) -> Path:
    """
    Raises:
        ValueError: neither one of ours nor a file of YAML with a mapping, of which the launcher would show a traceback.
    """
    import yaml

    from ..shipped import shipped_file

    if name in CONFIGS:
        return shipped_file(f"accelerate_configs/{name}.yaml")
    if not Path(name).is_file():
        raise ValueError(f"--config={name}: no such file. Use one of {', '.join(CONFIGS)} or a path")
    try:
        content = yaml.safe_load(Path(name).read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config={name}: not YAML ({error}). Give a launch file of `accelerate config`") from error
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise ValueError(
            f"--config={name}: holds {found}, and a launch file maps names to values, such as `num_processes: 2`. Give one "
            "of `accelerate config`"
        )
    return Path(name)
