"""Pieces that several commands' parsers share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_command(commands, name: str, run, summary: str, example: str) -> argparse.ArgumentParser:
    """A subcommand with its one-line help, and an example below its options."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def existing_folder(text: str) -> Path:
    """A folder that is there, as argparse's `type`."""
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return folder


def model_source(text: str) -> str:
    """A model's folder, or what can be its name on the Hub, as argparse's `type`."""
    from ..hub_names import hub_id

    if not Path(text).is_dir() and hub_id(text) is None:
        raise argparse.ArgumentTypeError(f"{text} is neither a model's folder nor a name that the Hub takes")
    if Path(text).is_dir() and not any(
        (Path(text) / name).is_file() for name in ("config.json", "adapter_config.json")
    ):
        raise argparse.ArgumentTypeError(f"{text} holds no model (config.json is missing)")
    return text
