"""A mesh run that uploads what it saves: one process talks to the Hub, and no upload can end the run."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_meshadapt.run_record import load_record
from tests.equality import mesh_trainer, tiny_model
from tests.hub_cards import card_faults
from tests.hub_client import client_environment
from tests.hub_server import serving
from tests.hub_state import SLOW, TOKEN, Hub
from tests.runs import DENSE, ROWS, SaveAt, assert_plain_load, assert_same_run, collect_warnings, fork, outcome

DOWNLOAD = (
    "import sys; from huggingface_hub import snapshot_download; snapshot_download(sys.argv[1], local_dir=sys.argv[2])"
)


def train_and_push(rank: int, *, folder: Path, url: str, token: str, resume=None, **options) -> dict:
    os.environ.update(client_environment(url, folder / "home", token))
    errors = collect_warnings(logging.ERROR)
    hub = dict(push_to_hub=True, hub_model_id="me/tiny", hub_strategy="checkpoint")
    trainer = mesh_trainer(tiny_model("llama_tied"), ROWS, str(folder / "run"), **DENSE | hub | options)
    trainer.add_callback(SaveAt((4,)))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    return outcome(trainer) | {"errors": errors, "repo": trainer.hub_model_id}


def files_under(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def download(server: Hub, folder: Path) -> Path:
    environment = client_environment(server.url, folder / "home", TOKEN)
    target = folder / "back"
    subprocess.run([sys.executable, "-c", DOWNLOAD, "me/tiny", str(target)], env=environment, check=True, timeout=60)
    return target


def test_a_2x2_mesh_uploads_its_model_and_a_checkpoint_to_resume_from(tmp_path):
    options = dict(pipeline_stages=2, hub_private_repo=True, max_steps=6)
    with serving() as server:
        ranks = fork(train_and_push, 4, folder=tmp_path, url=server.url, token=TOKEN, **options)
        assert [run["errors"] for run in ranks] == [[]] * 4 and {run["repo"] for run in ranks} == {"me/tiny"}
        assert server.requests.count("POST /api/repos/create") == 1 + 3  # the run's, and of every upload its own
        repo = server.repos["me/tiny"]
        assert repo.private and repo.titles[1:] == [
            "Training in progress, step 4",
            "Training in progress, step 4, checkpoint",
            "Model save",
        ]
        back = download(server, tmp_path)
    assert_plain_load(back, ranks[:2])
    local, remote = files_under(tmp_path / "run"), files_under(back)
    names = {name for name in remote if not name.startswith((".", "last-checkpoint"))}
    assert "README.md" in names and "training_args.json" not in remote
    assert all(remote[name] == local[name] for name in names)
    card = remote["README.md"].decode()
    assert card_faults(card) == [] and str(tmp_path) not in card and "| pipeline |" in card
    assert load_record(back)["mesh"]["replicas"] == 2
    assert not list((tmp_path / "run").glob(".pushing-*"))
    # The checkpoint of the Hub carries on where step 4 was.
    again = dict(folder=tmp_path / "again", url="", token="", resume=str(back / "last-checkpoint"), push_to_hub=False)
    resumed = fork(train_and_push, 4, **options | again)
    assert_same_run(resumed, ranks)


def test_an_upload_that_is_cut_leaves_the_run_whole_and_a_command_that_works(tmp_path):
    with serving() as server:
        server.fail("PUT", "/lfs/", 507)
        options = dict(folder=tmp_path, url=server.url, token=TOKEN, pipeline_stages=2, hub_strategy="end")
        ranks = fork(train_and_push, 2, **options)
        assert_plain_load(tmp_path / "run", ranks)
        assert (tmp_path / "run" / "README.md").is_file()
        assert ranks[1]["errors"] == [] and len(ranks[0]["errors"]) == 1
        message = ranks[0]["errors"][0]
        assert "the storage is full (507)" in message
        command = shlex.split(next(line for line in message.splitlines() if "meshadapt push" in line))
        server.heal()
        environment = client_environment(server.url, tmp_path / "home", TOKEN)
        subprocess.run([sys.executable, "-m", "hf_meshadapt", *command[1:]], env=environment, check=True, timeout=60)
        local, remote = files_under(tmp_path / "run"), server.repos["me/tiny"].files()
        assert "model.safetensors.index.json" in remote
        assert all(data == local[name] for name, data in remote.items() if name != ".gitattributes")


def push_slowly(rank: int, *, folder: Path, url: str) -> dict:
    os.environ.update(client_environment(url, folder / "home", TOKEN))
    options = dict(push_to_hub=True, hub_model_id="me/tiny", pipeline_stages=2)
    trainer = mesh_trainer(tiny_model("llama_tied"), ROWS, str(folder / "run"), **DENSE | options)
    trainer.args.link_timeout_seconds = 4.0  # rank 0 may wait for a quarter of it
    trainer.save_model()
    went_on = trainer.uploads.busy
    loss = trainer.evaluate()["eval_loss"]
    trainer.uploads.wait(60.0)
    return {"went_on": went_on, "loss": loss}


def test_nobody_waits_for_an_upload_that_takes_long(tmp_path):
    with serving() as server:
        server.fail("POST", "/commit/", SLOW, times=1)
        ranks = fork(push_slowly, 2, folder=tmp_path, url=server.url)
        assert [run["went_on"] for run in ranks] == [True, False] and ranks[0]["loss"] == ranks[1]["loss"]
        assert "model.safetensors.index.json" in server.repos["me/tiny"].files()


def push_by_hand(rank: int, *, folder: Path, url: str) -> dict:
    os.environ.update(client_environment(url, folder / "home", ""))
    trainer = mesh_trainer(tiny_model("llama_tied"), ROWS, str(folder / "run"), **DENSE, pipeline_stages=2)
    url = trainer.push_to_hub("by hand", token=TOKEN, private=True, dataset="openai/gsm8k", license="mit")
    future = trainer.push_to_hub("again", blocking=False, token=TOKEN, revision="v2", language="en")
    return {"url": url, "again": future.result(60.0)}


def test_push_to_hub_takes_trainers_arguments_and_the_cards(tmp_path):
    with serving() as server:
        (run,) = fork(push_by_hand, 1, folder=tmp_path, url=server.url)
        repo = server.repos["me/run"]
        assert repo.private and repo.titles[1:] == ["by hand", "again"]
        assert run["url"].endswith(repo.branches["main"]) and run["again"].endswith(repo.branches["v2"])
        card = repo.files("v2")["README.md"].decode()
        assert card_faults(card) == []
        assert all(line in card for line in ("license: mit\n", "- openai/gsm8k\n", "- en\n", 'name = "me/run"'))


def test_a_token_that_the_hub_does_not_know_ends_the_run_at_once_on_all_ranks(tmp_path):
    with serving() as server, pytest.raises(AssertionError) as caught:
        fork(train_and_push, 2, folder=tmp_path, url=server.url, token="hf_wrong", pipeline_stages=2)
    for rank in (0, 1):
        own = str(caught.value).split(f"--- rank {rank}")[1].split("--- rank")[0]
        assert "ValueError: push_to_hub=True, hub_model_id='me/tiny'" in own and "does not know this token" in own
