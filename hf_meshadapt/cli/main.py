"""The command `meshadapt`. Every subcommand has a module that says what it takes and, once it is chosen, runs it.

Exit codes: 0 done; 1 tried and failed (the Hub, a child process); 2 a mistake in what was asked for; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys

import hf_meshadapt

from . import diagnose, environment, evaluate, launch, merge, publish, trial

FAILED, MISTAKE, INTERRUPTED = 1, 2, 130


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshadapt",
        description="Adapt Hugging Face models over pipelines of GPUs joined by ordinary internet links.",
        epilog="`meshadapt COMMAND --help` says more about one command, with an example.",
    )
    parser.add_argument("--version", action="version", version=f"hf_meshadapt {hf_meshadapt.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (launch, trial, environment, diagnose, evaluate, merge, publish):
        module.add_commands(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    args = make_parser().parse_args(argv)
    if args.traceback:
        return args.run(args)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, FileNotFoundError, NotImplementedError, ImportError) as error:
        return _report(error, MISTAKE)
    except (RuntimeError, OSError, FloatingPointError) as error:
        return _report(error, FAILED)


def _report(error: Exception, code: int) -> int:
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {message}", file=sys.stderr)
    return code
