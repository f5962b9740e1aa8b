"""The command line: help that starts at once, exit codes, and a user's mistake in one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_meshadapt.anchor.handshake import SECRET_VARIABLE
from hf_meshadapt.checkpoint_folder import write_json
from hf_meshadapt.cli.circuits import run_both
from hf_meshadapt.cli.launch import CONFIGS
from hf_meshadapt.cli.main import main, make_parser
from hf_meshadapt.run_record import RECORD_NAME
from hf_meshadapt.shipped import shipped_file
from tests.equality import tiny_model
from tests.unit.test_card import RECORD

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("launch", "try", "env", "diagnose", "eval", "merge", "push", "card")


LAUNCH_FILES = {
    "list.yaml": b"- num_processes: 2\n",
    "empty.yaml": b"# nothing\n",
    "broken.yaml": b"a: [1\nb: {",
    "weights.bin": bytes(range(256)),
}


def test_help_is_light():
    code = (
        "import sys; from hf_meshadapt.cli.main import make_parser; make_parser().format_help();"
        "print(*({'torch', 'transformers', 'accelerate', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert result.stdout.split() == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command, capsys):
    assert command in make_parser().format_help()
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert done.value.code == 0 and f"example:\n  meshadapt {command}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("push /nowhere me/x", "/nowhere is not a folder"),
        ("push . a/b/c --create-only", "not a name that the Hub takes"),
        ("card .", "has no mesh_run.json"),
        ("eval . --tasks sql", "holds no saved model"),
        ("eval .", "give the folder of a saved model and --tasks"),
        ("merge . out", "neither an adapter nor a model"),
        ("launch --config nowhere train.py", "--config=nowhere: no such file"),
        ("launch --config cpu_2x1 --cpu train.py", "--cpu has no effect"),
        ("launch --num-processes 1 train.py", "must be at least 2"),
        ("launch --num-processes 2 --machine-rank 1 train.py", "--machine-rank has no effect without --config"),
        ("launch --config cpu_2x1 nowhere.py", "nowhere.py: no such file"),
        ("launch --config cpu_2x1 --anchor 0 train.py", "--anchor=0: must be at least 1"),
        ("launch --config cpu_2x1 --anchor-devices 1 train.py", "--anchor-devices has no effect"),
        ("launch --config two_machines_2x1 --anchor 1 train.py", "it is for several machines"),
        ("launch --config cpu_2x1 --anchor 1 train.py --circuit fast", "--circuit with --anchor"),
        ("env --model x --stages 0", "pipeline_stages=0: must be at least 1"),
        ("env --stages 1", "--stages has no effect without --model"),
        ("launch --config list.yaml train.py", "--config=list.yaml: holds a list, and a launch file maps names"),
        ("launch --config empty.yaml train.py", "--config=empty.yaml: holds nothing"),
        ("launch --config broken.yaml train.py", "--config=broken.yaml: not YAML (while parsing"),
        ("launch --config weights.bin --anchor 1 train.py", "--config=weights.bin: not YAML"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in LAUNCH_FILES.items():
        (tmp_path / name).write_bytes(content)
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    with pytest.raises((ValueError, NotImplementedError)):
        main(["--traceback", *arguments.split()])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("env --model /nosuch", "/nosuch is neither a model's folder nor a name that the Hub takes"),
        ("env --model .", ". holds no model (config.json is missing)"),
        ("try ./nosuch --data x.jsonl", "./nosuch is neither"),
        ("diagnose a/b/c --data x.jsonl", "a/b/c is neither"),
        ("diagnose a/b --data x.jsonl --pruning-twin .", ". holds no model"),
        ("eval . --tasks sql --base /nosuch", "/nosuch is neither"),
    ],
)
def test_a_model_that_cannot_be_one_is_a_mistake(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as done:
        main(arguments.split())
    assert done.value.code == 2 and message in capsys.readouterr().err


def test_unknown_options_are_refused(capsys):
    with pytest.raises(SystemExit) as done:
        main(["push", "--privat"])
    assert done.value.code == 2 and "usage: meshadapt push" in capsys.readouterr().err


# Commands ------------------------------------------------------------------------------------------------------------


def test_launch_is_accelerates_launcher_with_our_files(capsys):
    assert set(CONFIGS) == {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert main(["launch", "--dry-run", "--config", "cpu_2x2", "train.py", "--config", "theirs"]) == 0
    words = capsys.readouterr().out.split()
    assert words[1:4] == ["-m", "accelerate.commands.launch", "--config_file"]
    assert words[4] == str(shipped_file("accelerate_configs/cpu_2x2.yaml")) and words[5:] == [
        "train.py",
        "--config",
        "theirs",
    ]
    assert main(["launch", "--dry-run", "--num-processes", "4", "--cpu", "train.py"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("ACCELERATE_USE_CPU=true ") and line.endswith("--num_processes 4 train.py\n")


def test_launch_tells_several_machines_apart(capsys):
    machine = ["--machine-rank", "1", "--main-process-ip", "10.0.0.7"]
    assert main(["launch", "--dry-run", "--config", "two_machines_2x1", *machine, "train.py"]) == 0
    words = capsys.readouterr().out.split()
    assert words[-5:] == ["--machine_rank", "1", "--main_process_ip", "10.0.0.7", "train.py"]


def test_launch_starts_an_anchor_beside_it(capsys):
    script = ["train.py", "--pipeline_stages", "2"]
    assert main(["launch", "--dry-run", "--config", "cpu_2x1", "--anchor", "1", *script]) == 0
    fast, anchor = capsys.readouterr().out.splitlines()
    port = int(fast.rpartition(":")[2])
    shared = f"train.py --pipeline_stages 2 --anchor true --fast_endpoint 127.0.0.1:{port}"
    assert "accelerate.commands.launch" in fast and fast.endswith(shared)
    secret = f"{SECRET_VARIABLE}=SECRET"  # of one's own making, the same for both
    assert fast.startswith(f"{secret} ")
    assert anchor == f"ACCELERATE_USE_CPU=true {secret} {sys.executable} {shared} --circuit anchor"
    given = ["--anchor=true", "--fast_endpoint=10.0.0.1:5"]
    options = ["--num-processes", "2", "--anchor", "3", "--anchor-devices", "4,5,6"]
    assert main(["launch", "--dry-run", *options, *script, *given]) == 0
    fast, anchor = capsys.readouterr().out.splitlines()
    assert fast.endswith(f"--num_processes 2 {' '.join(script + given)}")
    assert anchor.startswith(f"CUDA_VISIBLE_DEVICES=4,5,6 {secret} ")
    assert anchor.endswith(f"--num_processes 3 {' '.join(script + given)} --circuit anchor")


SHOW = "import os; print(len(os.environ['HF_MESHADAPT_ANCHOR_SECRET']) > 20, os.environ['WHO'], flush=True); "


@pytest.mark.parametrize(
    ("fast", "anchor", "code", "told"),
    [
        ("time.sleep(1)", "pass", 0, ""),
        ("time.sleep(1)", "sys.exit(3)", 0, "The anchor ended with exit code 3: the run goes on without."),
        ("sys.exit(4)", "time.sleep(60)", 4, ""),
        ("os.kill(os.getpid(), 9)", "time.sleep(60)", 137, ""),
    ],
    ids=["both end", "the anchor fails", "the fast circuit fails", "the fast circuit is killed"],
)
def test_both_circuits_end_together(fast, anchor, code, told, capfd):
    commands = [[sys.executable, "-c", f"{SHOW} import sys, time; {work}"] for work in (fast, anchor)]
    before = signal.getsignal(signal.SIGTERM)
    assert run_both(*commands, [{"WHO": "fast"}, {"WHO": "anchor"}]) == code
    assert signal.getsignal(signal.SIGTERM) is before
    output, error = capfd.readouterr()
    assert "True fast" in output and told in error and bool(told) == bool(error)


def test_card_takes_what_the_run_cannot_know(tmp_path, capsys):
    write_json(tmp_path / RECORD_NAME, RECORD)
    extra = ["--license", "mit", "--language", "en", "--dataset", "a/b", "--dataset", "c/d", "--tag", "maths"]
    assert main(["card", str(tmp_path), *extra]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    for line in ("license: mit", "- a/b", "- c/d", "- maths"):
        assert f"\n{line}\n" in text


def test_merge_makes_one_plain_model_of_an_adapter(tmp_path, capsys):
    from peft import LoraConfig, get_peft_model

    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "out"))
    tiny_model("llama").save_pretrained(base)
    torch.manual_seed(1)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    )
    model.save_pretrained(adapter)
    write_json(adapter / RECORD_NAME, RECORD)
    assert main(["merge", str(adapter), str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    tokens = torch.arange(3, 19)[None]
    merged = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, model.eval()(tokens).logits, rtol=0, atol=1e-5)
    assert (out / RECORD_NAME).is_file() and not (out / "adapter_config.json").exists()
    assert main(["merge", str(adapter), str(out)]) == 2  # it is there already
    assert "exists already" in capsys.readouterr().err


def test_env_names_versions_devices_interfaces_and_memory(tmp_path, capsys):
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    asked = ["--model", str(tmp_path), "--stages", "2", "--replicas", "2", "--batch-size", "4", "--length", "16"]
    assert main(["env", *asked, "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0] for line in lines]
    assert {"hf_meshadapt", "torch", "cpu", "interface lo", "memory of stage 0", "memory of stage 1"} <= set(names)
    plan = next(line for line in lines if line.startswith("memory of stage 0"))
    assert "weights" in plan and "optimizer state" in plan and "data-parallel copy" in plan


def test_python_m_is_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "hf_meshadapt", "card", "/nowhere"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert result.returncode == 2 and "/nowhere is not a folder" in result.stderr
    import tomllib

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert json.dumps(scripts) == '{"meshadapt": "hf_meshadapt.cli.main:main"}'
