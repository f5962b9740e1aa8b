"""What a user meets first: the import, the help texts, the examples, the launch files and the README's commands."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def test_import_is_light():
    code = "import sys, hf_meshadapt; print(*({'torch', 'transformers', 'accelerate', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == []


def test_help_prints_and_describes_every_field_of_ours():
    from transformers import HfArgumentParser, TrainingArguments

    from hf_meshadapt import MeshAdaptArguments

    text = HfArgumentParser(MeshAdaptArguments).format_help()
    inherited = {field.name for field in fields(TrainingArguments)}
    for field in fields(MeshAdaptArguments):
        assert f"--{field.name}" in text
        assert field.name in inherited or len(field.metadata["help"]) > 20, f"{field.name} has no help text"


def test_the_argument_reference_says_what_the_help_texts_say():
    from tests import argument_reference as reference

    grouped = [name for _, names in reference.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(reference.own_fields())  # each in one group
    message = "docs/arguments.md is stale: run `python -m tests.argument_reference`"
    assert reference.document() == reference.PATH.read_text(), message


@pytest.mark.parametrize("name", ["finetune_gsm8k.py", "finetune_lora.py", "sft.py", "dpo.py"])
def test_examples_stay_short(name):
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 150


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_launch_files_start_as_many_processes_as_their_name_says(path):
    launch = yaml.safe_load(path.read_text())
    stages, replicas = path.stem.split("_")[-1].split("x")
    assert launch["num_processes"] == int(stages) * int(replicas)
    assert launch["distributed_type"] == "MULTI_GPU"  # MULTI_CPU would start one process
    assert launch.get("use_cpu", False) == path.stem.startswith("cpu")
    assert launch["num_machines"] == (2 if path.stem.startswith("two_machines") else 1)


def test_readme_names_the_commands_that_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    first_screen = "\n".join(readme.splitlines()[:50])
    for target in ("demo", "test"):
        assert f"make {target}" in first_screen
        assert f"\n{target}:" in makefile
    for path in LAUNCH_FILES:
        assert path.name in readme


def test_constraints_pin_every_dependency():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["demo"], *extras["trl"], *extras["dev"]]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    pinned = {pin.split("==")[0] for pin in pins}
    assert {name.split(">")[0].split("<")[0] for name in wanted} <= pinned
