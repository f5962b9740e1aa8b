"""Checkpoint folders: moved into place whole, checked before use, whole after SIGKILL at any point."""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hf_meshadapt.checkpoint import load_stage_weights, merge_index
from hf_meshadapt.checkpoint_folder import (
    asked_checkpoint,
    checkpoint_fault,
    commit,
    discard_partials,
    last_whole_checkpoint,
    load_mesh_info,
    open_partial,
    save_mesh_info,
    write_json,
)
from hf_meshadapt.checkpoint_state import save_rank_state
from tests.tiny_stages import assert_same_weights, cut, save_all_stages, tiny_model


def save_checkpoint(output_dir: Path, step: int, whole) -> Path:
    final = output_dir / f"checkpoint-{step}"
    partial = open_partial(final)
    save_all_stages(partial, whole, "llama", True)
    merge_index(partial)
    save_rank_state(partial, 0, rng={}, scheduler={"step": step}, tensors={"fill": torch.full((4,), float(step))})
    write_json(partial / "trainer_state.json", {"global_step": step})
    save_mesh_info(partial, {"stages": 2}, step)
    commit(partial, final)
    return final


def test_last_whole_checkpoint_is_the_newest_whole_one(tmp_path):
    assert last_whole_checkpoint(tmp_path / "nowhere") is None and last_whole_checkpoint(tmp_path) is None
    whole = tiny_model("llama", True)
    nine, ten, eleven = (save_checkpoint(tmp_path, step, whole) for step in (9, 10, 11))
    open_partial(tmp_path / "checkpoint-12")
    assert last_whole_checkpoint(tmp_path) == eleven
    assert load_mesh_info(eleven)["step"] == 11 and load_mesh_info(eleven)["mesh"] == {"stages": 2}
    (eleven / "mesh_state" / "mesh.json").unlink()
    assert last_whole_checkpoint(tmp_path) == ten
    shard = ten / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    for damaged in (content[:-1], content[:100], b"", content + b"x", b"\xff" * len(content)):
        shard.write_bytes(damaged)
        assert last_whole_checkpoint(tmp_path) == nine
    shard.write_bytes(content)
    assert last_whole_checkpoint(tmp_path) == ten
    shard.unlink()
    assert "model-00002-of-00002" in checkpoint_fault(ten) and last_whole_checkpoint(tmp_path) == nine
    (nine / "mesh_state" / "mesh.json").write_text('{"format": 99}')
    assert "update it" in checkpoint_fault(nine)
    discard_partials(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-11", "checkpoint-9"]


NEEDED = ("trainer_state.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
          "mesh_state/rank-00000.json", "mesh_state/rank-00000.safetensors")  # fmt: skip


def test_a_checkpoint_that_was_not_copied_whole_is_passed_over(tmp_path, caplog):
    whole = tiny_model("llama", True)
    older, newer = (save_checkpoint(tmp_path, step, whole) for step in (1, 2))
    assert set(load_mesh_info(newer)["files"]) == {*NEEDED, "model-00002-of-00002.safetensors"}
    for name in NEEDED:
        content = (newer / name).read_bytes()
        for damage in (b"", content[:-2], None):
            if damage is None:
                (newer / name).unlink()
            else:
                (newer / name).write_bytes(damage)
            fault = checkpoint_fault(newer)
            assert fault and Path(name).name in fault and "\n" not in fault, (name, damage)
            caplog.clear()
            assert last_whole_checkpoint(tmp_path) == older
            assert str(newer) in caplog.text and Path(name).name in caplog.text
            # The best model of a run needs its weights alone.
            assert (checkpoint_fault(newer, weights_only=True) is None) == (not name.startswith("model"))
        (newer / name).write_bytes(content)
    assert last_whole_checkpoint(tmp_path) == newer
    # What a person may change, or what others add, is not looked at.
    for name in ("README.md", "config.json", "mesh_state/notes.txt"):
        (newer / name).write_text("{")
    assert checkpoint_fault(newer) is None


def test_a_checkpoint_without_a_list_is_whole_by_what_it_has(tmp_path):
    """As versions before the list wrote it."""
    folder = save_checkpoint(tmp_path, 1, tiny_model("llama", True))
    info = load_mesh_info(folder)
    del info["files"]
    write_json(folder / "mesh_state" / "mesh.json", info)
    assert checkpoint_fault(folder) is None
    state = folder / "mesh_state" / "rank-00000.json"
    content = state.read_text()
    state.write_text(content[:-3])
    assert "rank-00000.json is not valid JSON" in checkpoint_fault(folder)
    state.write_text(content)
    (folder / "trainer_state.json").write_text("")
    assert "trainer_state.json is not valid JSON" in checkpoint_fault(folder)
    for strange in (["../outside.json"], "trainer_state.json", ["/x.json"]):
        (folder / "trainer_state.json").write_text("{}")
        (folder / "mesh_state" / "mesh.json").write_text(json.dumps(info | {"files": strange}))
        assert "mesh.json is damaged" in checkpoint_fault(folder)


def test_commit_replaces_and_an_interrupted_replacement_is_undone(tmp_path):
    final = tmp_path / "checkpoint-1"
    for content in ("old", "new"):
        partial = open_partial(final)
        (partial / "file").write_text(content)
        commit(partial, final)
        assert (final / "file").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    (open_partial(final) / "file").write_text("half")
    os.rename(final, tmp_path / ".replaced-checkpoint-1")
    discard_partials(tmp_path)
    assert (final / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    with pytest.raises(FileNotFoundError, match="open_partial"):
        commit(tmp_path / ".partial-checkpoint-1", final)


def test_several_processes_may_discard_at_once(tmp_path):
    for i in range(100):
        (open_partial(tmp_path / f"checkpoint-{i}") / "file").write_text("half")
        (tmp_path / f".replaced-checkpoint-{i}").mkdir()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(discard_partials, [tmp_path] * 4))
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{i}" for i in range(100)}


def watch_events(kill_at: int | None, folder: Path) -> list[str]:
    """Lists this process's file operations under `folder` and kills it by SIGKILL at the given one (from 0)."""
    events: list[str] = []

    def watch(event: str, args: tuple) -> None:
        watched = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if watched and str(args[0]).startswith(str(folder)):
            if len(events) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            events.append(event)

    sys.addaudithook(watch)
    return events


def save_in_child(kill_at: int | None, output_dir: Path, step: int, whole) -> int:
    """Saves in a forked process that ends itself at a file operation; returns how many a save takes if it lives."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            events = watch_events(kill_at, output_dir)
            save_checkpoint(output_dir, step, whole)
            os.write(writer, str(len(events)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) == (kill_at is not None)
    with open(reader, "rb") as pipe:
        return int(pipe.read() or 0)


@pytest.mark.parametrize("step", [2, 1], ids=["new", "replaced"])
def test_sigkill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path, step):
    torch.set_num_threads(1)
    old, new = tiny_model("llama", True, seed=0), tiny_model("llama", True, seed=1)
    save_checkpoint(tmp_path / "counted", 1, old)
    num_events = save_in_child(None, tmp_path / "counted", step, new)
    assert num_events > 30
    outcomes = []
    # Thinly while files are written, at every operation around the commit's renames and clean-up.
    for kill_at in [*range(0, num_events - 20, 6), *range(num_events - 20, num_events)]:
        output_dir = tmp_path / str(kill_at)
        previous = save_checkpoint(output_dir, 1, old)
        save_in_child(kill_at, output_dir, step, new)
        if step == 2:
            # Also without any cleaning up.
            assert last_whole_checkpoint(output_dir) in (previous, output_dir / "checkpoint-2")
        discard_partials(output_dir)
        found = last_whole_checkpoint(output_dir)
        assert {path.name for path in output_dir.iterdir()} == {"checkpoint-1", found.name}
        model, owned = cut(tiny_model("llama", True, seed=2), "llama", True, 0, 1)
        load_stage_weights(model, owned, found)
        is_new = torch.equal(model.lm_head.weight, new.lm_head.weight)
        assert_same_weights(model, new if is_new else old)
        outcomes.append(is_new)
    # First the old ones, then the new ones, and some of both.
    assert outcomes == sorted(outcomes) and not outcomes[0] and outcomes[-1]


def test_the_checkpoint_that_was_asked_for(tmp_path):
    for step in (20, 5):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for value in (None, True, False, str(tmp_path / "checkpoint-5"), tmp_path / "checkpoint-5"):
        assert asked_checkpoint(value, tmp_path) is value
    assert asked_checkpoint("True", tmp_path) is True and asked_checkpoint("false", tmp_path) is False
    with pytest.raises(ValueError, match="checkpoint-7': no such folder; .* has checkpoint-5, checkpoint-20$"):
        asked_checkpoint(str(tmp_path / "checkpoint-7"), tmp_path)
    with pytest.raises(ValueError, match="nowhere has no checkpoint$"):
        asked_checkpoint("checkpoint-7", tmp_path / "nowhere")
