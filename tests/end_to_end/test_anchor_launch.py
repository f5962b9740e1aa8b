"""Both circuits as a person starts them: two launches of the same script."""

import json
import os
import subprocess

import pytest

from hf_meshadapt.anchor.handshake import SECRET_VARIABLE, new_secret

from ..circuits import free_ports
from .test_launch import LAUNCHERS, ROOT, model_and_data  # noqa: F401 (a fixture)


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True], ids=["two launches", "meshadapt launch --anchor 2"])
def test_both_circuits_of_one_script_are_one_run(together, model_and_data, tmp_path):  # noqa: F811
    model, data = model_and_data
    script = [
        "examples/finetune_gsm8k.py", "--model_name_or_path", str(model), "--dataset_name", str(data), "--use_cpu",
        "--pipeline_stages", "2", "--max_steps", "6", "--per_device_train_batch_size", "4", "--learning_rate", "1e-3",
        "--logging_steps", "2", "--save_strategy", "no", "--report_to", "none", "--output_dir", str(tmp_path / "out"),
        "--preset", "paper", "--exact_first_token", "true", "--anchor_every", "2", "--prior_rank", "8",  # it has an anchor
        "--evaluate_before", "false",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment[SECRET_VARIABLE] = new_secret()
    fast_options = ["--anchor_deterministic", "--metrics_file", str(tmp_path / "fast.json")]
    if together:
        launcher = [*LAUNCHERS["python"], "-m", "hf_meshadapt", "launch", "--anchor", "2", "--config", "cpu_2x1"]
        commands = [[*launcher, *script, *fast_options]]
    else:
        script_of_both = [*script, *fast_options, "--fast_endpoint", f"127.0.0.1:{free_ports(2)}"]
        anchor_options = ["--circuit", "anchor", "--metrics_file", str(tmp_path / "no.json")]
        commands = [
            [*LAUNCHERS["accelerate"], *script_of_both],
            [*LAUNCHERS["python"], *script_of_both, *anchor_options],
        ]
    both = [start(command, environment, tmp_path / f"{i}.log") for i, command in enumerate(commands)]
    try:
        for i, process in enumerate(both):
            assert process.wait(240) == 0, (tmp_path / f"{i}.log").read_text()[-5000:]
    finally:
        for process in both:
            process.kill()
    alone = [*LAUNCHERS["python"], *script, "--metrics_file", str(tmp_path / "alone.json")]
    assert start(alone, environment, tmp_path / "2.log").wait(240) == 0, (tmp_path / "2.log").read_text()[-5000:]
    runs = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("fast", "alone")}
    assert runs["fast"]["loss_after"] == pytest.approx(runs["alone"]["loss_after"], rel=1e-6)
    assert runs["fast"]["anchor"] == runs["alone"]["anchor"] and runs["fast"]["anchor"]["num_live_steps"] == 3
    assert runs["fast"]["bytes_per_token"]["anchor"] > 0
    assert not (tmp_path / "no.json").exists()


def start(command: list[str], environment: dict, log) -> subprocess.Popen:
    with log.open("w") as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
