"""`meshadapt env`: what is installed, which devices and network interfaces there are, what a model would need."""

from __future__ import annotations

import os

from .options import add_command, model_source

# Of the memory plan: default and help.
PLAN_OPTIONS = {
    "--stages": (1, "pipeline stages"),
    "--replicas": (1, "data-parallel replicas"),
    "--batch-size": (8, "rows per replica and step"),
    "--length": (1024, "padded tokens per row"),
    "--optim": ("adamw_torch_fused", "as in the training arguments"),
    "--dtype": ("bfloat16", "dtype of the weights"),
}
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HF_ENDPOINT", "HF_HUB_OFFLINE")


def add_commands(commands) -> None:
    env = add_command(
        commands,
        "env",
        run,
        "print versions, devices and network interfaces, and the memory that a model needs on every rank",
        "meshadapt env --model meta-llama/Llama-3.2-1B --stages 4 --replicas 2 --length 1024",
    )
    env.add_argument(
        "--model",
        type=model_source,
        metavar="NAME",
        help="name or folder of a model: plan its memory; loads no weights",
    )
    for option, (default, text) in PLAN_OPTIONS.items():
        choices = ["float32", "bfloat16"] if option == "--dtype" else None
        env.add_argument(option, type=type(default), choices=choices, help=f"{text} (default: {default})")


def run(args) -> int:
    for option, (default, _) in PLAN_OPTIONS.items():
        name = option.removeprefix("--").replace("-", "_")
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif args.model is None:
            raise ValueError(f"{option} has no effect without --model: it is of a model's memory. Name a model")
    rows = [*version_rows(), *device_rows(), *network_rows()]
    if args.model:
        rows += memory_rows(args)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.ljust(width)}  {value}")
    return 0


def version_rows() -> list[tuple[str, str]]:
    from ..run_record import versions

    return list(versions().items())


def device_rows() -> list[tuple[str, str]]:
    import torch

    cuda = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    rows = [(f"cuda:{index}", f"{one.name}, {one.total_memory / 1e9:.1f} GB") for index, one in enumerate(cuda)]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [*rows, ("cpu", f"{os.cpu_count()} cores, {memory_bytes / 1e9:.1f} GB")]


def network_rows() -> list[tuple[str, str]]:
    """Interfaces with their addresses, and the variables that choose among them."""
    import socket

    import psutil

    rows = []
    for name, addresses in psutil.net_if_addrs().items():
        found = [one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
        if found:
            rows.append((f"interface {name}", ", ".join(found)))
    return rows + [(name, os.environ[name]) for name in VARIABLES if name in os.environ]


def memory_rows(args) -> list[tuple[str, str]]:
    """Bytes of every stage's ranks at the worst moment of a step, as `memory.memory_plan` adds them up."""
    from ..memory_report import plan_stages

    plans = plan_stages(
        args.model, args.stages, args.replicas, args.batch_size, args.length, optimizer=args.optim, dtype=args.dtype
    )
    return [(f"memory of stage {stage}", text) for stage, text in enumerate(plans)]
