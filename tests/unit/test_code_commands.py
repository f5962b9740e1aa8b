"""Every command in shell blocks of README.md and docs/ is right: launchers, scripts and `meshadapt` take what it gives.

Nothing is launched: their own parsers read it, arguments are made of it, and scripts stop there.
"""

from __future__ import annotations

import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
import transformers
import trl
import yaml

from hf_meshadapt import MeshAdaptArguments
from hf_meshadapt.cli.main import main, make_parser
from hf_meshadapt.evaluation.groups import resolve_tasks
from tests.code_blocks import (
    PAGES,
    ROOT,
    Launch,
    blocks,
    check_make,
    check_pip,
    commands,
    launch_of,
    option,
)

SHELL = [block for page in PAGES for block in blocks(page) if block.kind == "bash"]
# Not checked: what the shell itself knows, and what changes the machine or needs another one.
NOT_RUN = {"export", "sed", "cat", "tee", "umask"} | {"sudo", "wg", "ping", "iperf3", "openssl"}
# What `train.py` is on pages that have none of their own.
TRAIN = """
from transformers import HfArgumentParser
from hf_meshadapt import MeshAdaptArguments
HfArgumentParser(MeshAdaptArguments).parse_args_into_dataclasses()
"""


class Parsed(Exception):
    """Raised in a script once it has its arguments."""


@pytest.fixture
def parse_only(monkeypatch):
    """Scripts stop where they have parsed their arguments."""

    def stopping(parse):
        def parse_and_stop(self, *args, **kwargs):
            values = parse(self, *args, **kwargs)
            assert any(isinstance(value, MeshAdaptArguments) for value in values)
            raise Parsed

        return parse_and_stop

    for owner, name in (
        (transformers.HfArgumentParser, "parse_args_into_dataclasses"),
        (trl.TrlParser, "parse_args_and_config"),
    ):
        monkeypatch.setattr(owner, name, stopping(getattr(owner, name)))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_commands_are_right(block, tmp_path, parse_only, monkeypatch, capsys):
    found = commands(block.text)
    assert found
    monkeypatch.chdir(tmp_path)
    scripts = [one.text for one in blocks(block.page) if one.text.startswith("# train.py")]
    (tmp_path / "train.py").write_text((scripts or [TRAIN])[0])
    for words in found:
        check_command(words, monkeypatch, capsys)


def check_command(words: list[str], monkeypatch, capsys) -> None:
    """Raises where a command would not do: of a kind that is not known, too."""
    match words[0]:
        case "accelerate" | "torchrun" | "python":
            check_launch(launch_of(words), monkeypatch, capsys)
        case "meshadapt":
            check_meshadapt(words[1:], monkeypatch, capsys)
        case "pip":
            check_pip(words, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
        case "make":
            check_make(words)
        case name:
            assert name in NOT_RUN, f"{shlex.join(words)}: no check for this command"


def check_launch(launch: Launch, monkeypatch, capsys) -> None:
    """The script's own parser takes the options, for as many ranks as are launched; all of them in this process."""
    path = Path(launch.script) if launch.script == "train.py" else ROOT / launch.script
    options, stages = list(launch.options), int(option(launch.options, "pipeline_stages") or 1)
    if option(options, "config") is not None:  # a file of arguments, by its place in the repository
        file = ROOT / option(options, "config")
        options[options.index("--config") + 1] = str(file)
        stages = yaml.safe_load(file.read_text())["pipeline_stages"]
    if launch.num_ranks > 1 and option(options, "circuit") != "anchor":
        assert launch.num_ranks % stages == 0, launch
        options += ["--data_parallel_replicas", str(launch.num_ranks // stages)]
    helps = "--help" in options
    monkeypatch.setattr("sys.argv", [launch.script, *options, *([] if helps else ["--use_cpu", "true"])])
    with pytest.raises(SystemExit if helps else Parsed) as ended:
        runpy.run_path(str(path), run_name="__main__")
    if helps:
        assert ended.value.code == 0 and "\n  --preset" in capsys.readouterr().out


def check_meshadapt(words: list[str], monkeypatch, capsys) -> None:
    """Its own parser takes the options; `launch` says what it would run, which is then checked; `env` runs."""
    if words[0] == "launch":
        assert main(["launch", "--dry-run", *words[1:]]) == 0
        for line in capsys.readouterr().out.splitlines():
            check_launch(launch_of(typed(*commands(line))), monkeypatch, capsys)
        return
    if words == ["env"]:
        assert main(words) == 0 and "interface lo" in capsys.readouterr().out
        return
    for word in words:
        if word.startswith("runs/"):
            Path(word).mkdir(parents=True, exist_ok=True)
    args = make_parser().parse_args(words)
    if words[0] == "eval":
        assert resolve_tasks(args.tasks.split(","))


def typed(words: list[str]) -> list[str]:
    """A command of this interpreter's as one types it."""
    if words[1:3] == ["-m", "accelerate.commands.launch"]:
        return ["accelerate", "launch", *words[3:]]
    return ["python", *words[1:]]


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --pipeline_stage_s 2",
        "python train.py --pipeline_stages 2 --mask_ratio 2",
        "accelerate launch --config_file accelerate_configs/gpu_3x3.yaml train.py",
        "accelerate launch --config_file accelerate_configs/gpu_2x2.yaml train.py --pipeline_stages 3",
        "accelerate launch --num_process 2 --no_such_option train.py",
        "torchrun --no_such_option train.py",
        "meshadapt launch --config cpu_2x2 train.py --no_such_option",
        "meshadapt pull runs/x me/x",
        "meshadapt eval runs/x --tasks",
        "pip install '.[no_such_extra]'",
        "pip install no-such-package",
        "make no-such-target",
        "no-such-command",
    ],
)
def test_wrong_commands_are_found(command, tmp_path, parse_only, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (words,) = commands(command)
    with pytest.raises((AssertionError, ValueError, SystemExit)):
        check_command(words, monkeypatch, capsys)


def test_commands_are_taken_apart():
    lines = ["A=1 one --x 2 \\", "    --y 'a b'   # a comment", "two ... | three > file && four"]
    assert commands("\n".join(lines)) == [["one", "--x", "2", "--y", "a b"], ["two"], ["three"], ["four"]]
