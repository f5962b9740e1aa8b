"""Uploads against a server that speaks the Hub's protocol, with the real client: what works, and every way it can fail."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import ModelCard, constants, snapshot_download
from huggingface_hub.utils import _http

from hf_meshadapt import hub as hub_module
from hf_meshadapt import hub_trainer
from hf_meshadapt.anchor.handshake import SECRET_VARIABLE, new_secret
from hf_meshadapt.checkpoint_folder import write_json
from hf_meshadapt.child_process import BackgroundJobs, ChildFailed, child_environment, run_child
from hf_meshadapt.hub import HubError, make_repo, push, push_arguments, retry_command
from hf_meshadapt.hub_names import dataset_ids, hub_id
from hf_meshadapt.run_record import RECORD_NAME, load_record
from tests.equality import mesh_trainer, tiny_model
from tests.hub_client import client_constants, client_environment
from tests.hub_server import serving
from tests.hub_state import CUT, READ_TOKEN, TOKEN, Hub
from tests.unit.test_card import RECORD
from tests.unit.test_hub_benchmarks import GSM8K

WEIGHTS = bytes(range(256)) * 2000


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A Hub that this process's client talks to, without the pauses between its attempts."""
    with serving() as hub:
        for name, value in client_constants(hub.url, tmp_path / "home").items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def folder(tmp_path) -> Path:
    """What save_model leaves, with what must not be uploaded."""
    folder = tmp_path / "out"
    (folder / "checkpoint-5").mkdir(parents=True)
    (folder / "mesh_state").mkdir()
    for name in ("config.json", "training_args.json", "trainer_state.json", "checkpoint-5/config.json", ".partial-x"):
        (folder / name).write_text("{}")
    (folder / "mesh_state" / "mesh.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    write_json(folder / RECORD_NAME, RECORD)
    return folder


MODEL_FILES = {"config.json", "model.safetensors", RECORD_NAME, "README.md", "loss_curve.png"}


def uploaded(server: Hub, repo: str = "me/out", revision: str = "main") -> dict[str, bytes]:
    return {name: data for name, data in server.repos[repo].files(revision).items() if name != ".gitattributes"}


def test_a_model_and_its_card_come_back_as_they_were(server, folder, tmp_path):
    url = push(folder, "out", private=True, message="first")
    assert url.startswith(f"{server.url}/me/out/commit/")
    assert server.repos["me/out"].private and server.repos["me/out"].titles[-1] == "first"
    assert set(uploaded(server)) == MODEL_FILES
    back = Path(snapshot_download("me/out", cache_dir=tmp_path / "cache"))
    for name in MODEL_FILES:
        assert (back / name).read_bytes() == (folder / name).read_bytes()
    card = ModelCard.load(back / "README.md")
    card.validate()
    assert 'name = "me/out"' in card.text


def test_pushing_again_replaces_weights_of_another_cut(server, folder):
    push(folder, "me/out")
    (folder / "model.safetensors").unlink()
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(WEIGHTS[number:])
    (folder / "model.safetensors.index.json").write_text("{}")
    push(folder, "me/out")
    names = {name for name in uploaded(server) if name.startswith("model")}
    assert names == {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)} | {"model.safetensors.index.json"}


def test_benchmark_results_travel_with_the_model_they_are_of(server, folder):
    """And take the place of those of the last one, but not of what others have put there."""
    (folder / ".env").write_text("SECRET=1")
    results = folder / ".eval_results"
    results.mkdir()
    for name in ("meshadapt-gsm8k.yaml", "theirs.yaml"):
        (results / name).write_text("[]")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    push(folder, "me/out")
    assert {name for name in uploaded(server) if name.startswith(".")} == {
        ".eval_results/meshadapt-gsm8k.yaml",
        ".eval_results/theirs.yaml",
    }
    shutil.rmtree(results)
    push(folder, "me/out")
    assert [name for name in uploaded(server) if name.startswith(".")] == [".eval_results/theirs.yaml"]


def test_a_branch_and_a_checkpoint_with_its_state(server, folder):
    push(folder, "me/out", revision="v2")
    assert set(uploaded(server)) == set() and set(uploaded(server, revision="v2")) == MODEL_FILES
    push(folder, "me/out", path_in_repo="last-checkpoint", with_state=True)
    names = {name.removeprefix("last-checkpoint/") for name in uploaded(server)}
    assert names == MODEL_FILES | {"mesh_state/mesh.json", "trainer_state.json"}


@pytest.mark.parametrize("place", ["sub", ".", None])
def test_a_push_deletes_only_what_it_replaces(server, folder, place):
    """And all else in a folder where that is asked for, as for the trainer's last checkpoint, but never at the root."""
    theirs = {"notes.txt": b"mine", "mesh_state/rank-00007.json": b"{}", "model-00001-of-00002.safetensors": b"old"}
    prefix = "sub/" if place == "sub" else ""
    theirs = {prefix + name: data for name, data in theirs.items()} | {"other/model.safetensors": b"another model"}
    make_repo("me/out", None)
    server.repos["me/out"].commit("main", theirs, "by hand")
    push(folder, "me/out", path_in_repo=place)
    found = set(theirs) | {prefix + name for name in MODEL_FILES}
    found.remove(f"{prefix}model-00001-of-00002.safetensors")
    assert set(uploaded(server)) == found
    push(folder, "me/out", path_in_repo=place, with_state=True)
    found -= {f"{prefix}mesh_state/rank-00007.json"}
    assert set(uploaded(server)) == found | {
        f"{prefix}{name}" for name in ("mesh_state/mesh.json", "trainer_state.json")
    }
    if place != "sub":
        with pytest.raises(ValueError, match="replace_folder deletes everything else .*below the root"):
            push(folder, "me/out", path_in_repo=place, replace_folder=True)
    else:
        push(folder, "me/out", path_in_repo=place, replace_folder=True)
        assert set(uploaded(server)) == {"other/model.safetensors"} | {f"sub/{name}" for name in MODEL_FILES}


def test_results_of_an_earlier_model_are_not_published(server, folder):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    (folder / ".eval_results").mkdir()
    (folder / ".eval_results" / "meshadapt-gsm8k.yaml").write_text("[]")
    names = {"evaluation.json", ".eval_results/meshadapt-gsm8k.yaml"}
    for step, found in ((RECORD["global_step"], names), (3, set())):
        write_json(folder / "evaluation.json", {"step": step, "lm_eval": "0.4.13", "base": None})
        push(folder, "me/out")
        assert {name for name in uploaded(server) if "eval" in name} == found


def test_a_card_that_is_there_is_left_alone(server, folder):
    (folder / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    push(folder, "me/out")
    assert uploaded(server)["README.md"].endswith(b"Mine.\n")


# Faults: where it strikes, how often, what is said. Cuts and 500s that pass are none.
FAULTS = {
    "unknown token": (("POST", "/api/repos/create", 401), "does not know this token.*hf auth login"),
    "forbidden": (("POST", "/commit/", 403), "may not write there .403."),
    "storage full": (("PUT", "/lfs/", 507), "storage is full .507."),
    "broken": (("POST", "/commit/", 500), "answered 500 again and again.*Try later"),
    "refused": (("POST", "/commit/", 400), "the Hub refused it .400.: "),
    "cut for good": (("PUT", "/lfs/", CUT), "connection failed .*Check the network"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_upload_says_why_keeps_everything_and_can_be_repeated(server, folder, fault):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    what, message = FAULTS[fault]
    server.fail(*what)
    with pytest.raises(HubError, match=message):
        push(folder, "me/out")
    assert all(path.read_bytes() == data for path, data in before.items())
    assert "model.safetensors" not in (uploaded(server) if server.repos else {})
    server.heal()
    push(folder, "me/out")
    assert uploaded(server)["model.safetensors"] == WEIGHTS


@pytest.mark.parametrize(
    "fault",
    [
        ("POST", "/api/repos/create", 500, 1),
        ("POST", "/commit/", 503, 2),
        ("PUT", "/lfs/", CUT, 1),
        ("PUT", "/lfs/", 500, 1),
    ],
    ids=lambda fault: f"{fault[1]} {fault[2]}",
)
def test_trouble_that_passes_is_outlived(server, folder, fault):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    server.fail(*fault)
    push(folder, "me/out")
    assert uploaded(server)["model.safetensors"] == WEIGHTS


def test_names_and_tokens_that_cannot_work_are_refused(server, folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="not a name that the Hub takes.*owner/name"):
        make_repo("a/b/c", None)
    with pytest.raises(ValueError, match="holds no saved model"):
        push(tmp_path, "me/out")
    (folder / "config.json").rename(tmp_path / "config.json")  # all that a run leaves that was killed while saving
    with pytest.raises(ValueError, match="holds no weights .*model.safetensors, adapter_model.safetensors"):
        push(tmp_path, "me/out")
    (tmp_path / "config.json").rename(folder / "config.json")
    assert "me/out" not in server.repos
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "model.safetensors", "b": "gone"}})
    with pytest.raises(ValueError, match="lacks gone, which model.safetensors.index.json names"):
        push(folder, "me/out")
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    with pytest.raises(HubError, match="may not write there"):
        make_repo("me/out", None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        make_repo("me/out", None)


ANSWERS = {
    400: (
        'Invalid metadata in README.md: "license" must be one of [...]',
        "the Hub refused it .400.: Invalid metadata",
    ),
    403: ("Private storage limit reached", "may not write there .403.*The Hub says: Private storage limit reached"),
    409: ("exists as a dataset", "the Hub refused it .409.: exists as a dataset"),
    422: ("", "the Hub refused it .422.: Client error"),
    429: ("retry in 3600 s", "too many requests .429.: retry in 3600 s. Wait"),
    503: ("down for maintenance", "answered 503 again and again .down for maintenance.. Try later"),
}


@pytest.mark.parametrize("status", ANSWERS)
def test_what_the_hub_says_is_told(status, monkeypatch):
    said, message = ANSWERS[status]
    attempts = []
    monkeypatch.setattr(hub_module.time, "sleep", lambda seconds: None)

    def call():
        attempts.append(1)
        request = httpx2.Request("POST", "https://huggingface.co/api/x")
        _http.hf_raise_for_status(httpx2.Response(status, request=request, json={"error": said} if said else {}))

    with pytest.raises(HubError, match=f"uploading x: .*{message}"):
        hub_module.explained(call, "uploading x")
    assert len(attempts) == (3 if status == 503 else 1)


def test_a_full_disk_stops_the_upload_and_not_the_model(server, folder, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_module, "write_card", full)
    with pytest.raises(HubError, match="writing the card of .*the disk is full"):
        push(folder, "me/out")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_the_command_does_what_the_function_does(folder, tmp_path):
    """In a process of its own, as users and the trainer run it: no traceback, one line, an exit code."""
    options = dict(private=True, revision="v2", message="it's done", path_in_repo=None, with_state=False)
    arguments = push_arguments(folder, "me/out", **options)
    assert retry_command(arguments).startswith(f"meshadapt push {folder} me/out --private --revision v2 --message 'it")
    whole = push_arguments(folder, "me/out", path_in_repo="last-checkpoint", with_state=True, replace_folder=True)
    assert whole[3:] == ["--with-state", "--replace-folder", "--path-in-repo", "last-checkpoint"]
    command = [sys.executable, "-m", "hf_meshadapt", *arguments]
    with serving() as server:
        environment = client_environment(server.url, tmp_path / "home", "hf_wrong")
        failed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert failed.returncode == 1 and failed.stdout == ""
        assert failed.stderr.splitlines()[-1].startswith("error: making the repository me/out: the Hub does not know")
        assert "Traceback" not in failed.stderr
        environment["HF_TOKEN"] = TOKEN
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.startswith(f"uploaded {folder} to {server.url}/me/out/commit/")
        assert set(uploaded(server, revision="v2")) == MODEL_FILES and server.repos["me/out"].private


# What it is made of --------------------------------------------------------------------------------------------------


def test_names_of_the_hub_and_places_on_a_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    cached = "/root/.cache/hub/models--meta-llama--Llama-3.2-1B/snapshots/0123"
    assert hub_id(cached) == "meta-llama/Llama-3.2-1B"
    assert [hub_id(name) for name in ("gpt2", "a/b", "runs/model", "/a/b", "a/b/c", "..", "", None, "x.git")] == [
        "gpt2", "a/b", *[None] * 7,
    ]  # fmt: skip


def test_datasets_name_where_they_came_from():
    from datasets import Dataset, DatasetDict

    dataset = Dataset.from_list([{"a": 1}])
    assert dataset_ids(dataset) == [] and dataset_ids(None) == []
    dataset.info.download_checksums = {
        "hf://datasets/openai/gsm8k@740312/main/train.parquet": {},
        "hf://datasets/squad@1/x": {},
        "/home/me/secret.json": {},
    }
    mapped = dataset.map(lambda row: {"b": row["a"]})
    assert dataset_ids(DatasetDict(train=mapped, test=mapped)) == ["openai/gsm8k", "squad"]


def test_a_child_is_no_rank_and_its_last_word_is_its_error(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "1")
    environment = child_environment(HF_TOKEN="x", ABSENT=None)
    assert environment["HF_TOKEN"] == "x" and "ABSENT" not in environment
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU"} & set(environment)
    with pytest.raises(ChildFailed, match="^/nowhere is not a folder: give"):
        run_child(["push", "/nowhere", "me/x"])
    with pytest.raises(ChildFailed, match="meshadapt env took longer than 0.01 s"):
        run_child(["env"], timeout_seconds=0.01)


def test_background_jobs_run_in_order_and_log_their_failures(caplog):
    jobs, order = BackgroundJobs("test"), []

    def fail():
        order.append("second")
        raise RuntimeError("no luck")

    first = jobs.submit(lambda: order.append("first") or 1, str)
    second = jobs.submit(fail, lambda error: f"it failed: {error}")
    assert jobs.wait(10) and not jobs.busy
    assert (first.result(), second.result(), order) == (1, None, ["first", "second"])
    assert "it failed: no luck" in caplog.text


# The trainer's own part ----------------------------------------------------------------------------------------------


def test_an_anchor_makes_no_repository_and_pushes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, new_secret())
    monkeypatch.setattr(hub_trainer, "run_child", None)  # the process that would talk to the Hub
    anchor = dict(anchor=True, circuit="anchor", fast_endpoint="127.0.0.1:29600", pipeline_stages=2)
    trainer = mesh_trainer(tiny_model("llama"), 4, str(tmp_path), **anchor, push_to_hub=True, hub_model_id="me/x")
    assert trainer.push_to_hub() is None and trainer.hub_model_id is None
    assert not list(tmp_path.iterdir())


def test_a_model_is_known_by_its_run_and_its_step(tmp_path):
    """Another run in the same folder takes the earlier one's results off the card; a resumed one is the same run."""
    options = dict(pipeline_stages=2, max_steps=2, save_strategy="steps", save_steps=1, eval_strategy="no")

    def make(**further):
        return mesh_trainer(tiny_model("llama"), 4, str(tmp_path), 8, **options | further)

    def saved(folder: Path) -> str:
        return load_record(folder)["run"]

    trainer = make()
    trainer.save_model()
    untrained = saved(tmp_path)
    trainer.train()
    trainer.save_model()
    first = saved(tmp_path)
    assert {saved(tmp_path / f"checkpoint-{step}") for step in (1, 2)} == {first} and first != untrained
    evaluation = {"lm_eval": "0.4.13", "results": {"gsm8k": {"acc": {"value": 0.91}}}, "base": None}
    write_json(tmp_path / "evaluation.json", evaluation | {"step": 2, "run": first})
    (tmp_path / ".eval_results").mkdir()
    trainer.create_model_card()
    assert "0.9100" in (tmp_path / "README.md").read_text()
    again = make()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    again.save_model()
    assert saved(tmp_path) == first and "0.9100" in (tmp_path / "README.md").read_text()
    other = make(learning_rate=1.0)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    other.save_model()  # and writes the card anew, which nobody has edited
    assert saved(tmp_path) not in (first, untrained) and "0.9100" not in (tmp_path / "README.md").read_text()
    once = saved(tmp_path)
    other.train()
    other.save_model()
    assert saved(tmp_path) != once


def test_a_card_that_was_edited_outlives_the_next_model_and_the_results_do_not(tmp_path, caplog):
    trainer = mesh_trainer(tiny_model("llama"), 4, str(tmp_path), 8, pipeline_stages=2)
    trainer.save_model()
    record, results = load_record(tmp_path), tmp_path / ".eval_results" / "meshadapt-gsm8k.yaml"
    (tmp_path / "README.md").write_text("mine")
    write_json(tmp_path / "evaluation.json", GSM8K | {"step": 0, "run": record["run"]})
    for is_same in (True, False):
        if not is_same:
            trainer._run_id = None
        trainer.save_model()
        assert (tmp_path / "README.md").read_text() == "mine" and results.is_file() == is_same
    assert "README.md was edited" in caplog.text
