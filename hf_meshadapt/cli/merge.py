"""`meshadapt merge`: an adapter and its base model as one ordinary model."""

from __future__ import annotations

from pathlib import Path

from .options import add_command, existing_folder


def add_commands(commands) -> None:
    merge = add_command(
        commands,
        "merge",
        run,
        "merge an adapter into its base model, or the shards of a checkpoint into one model folder",
        "meshadapt merge runs/lora runs/lora-merged",
    )
    merge.add_argument("folder", type=existing_folder, metavar="DIR", help="folder of an adapter or a saved model")
    merge.add_argument("out", type=Path, metavar="OUT", help="folder to make; must not exist")
    merge.add_argument("--base-model", help="base model, where it is not at the place that the adapter names")
    merge.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="dtype of the weights")


def run(args) -> int:
    from ..merging import merge

    print(merge(args.folder, args.out, base_model=args.base_model, dtype=args.dtype))
    return 0
