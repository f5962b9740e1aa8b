"""Checkpoints over forked gloo ranks: saving on every rank, shared or not, and peers that die while they send."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_meshadapt.checkpoint import merge_index, save_stage
from hf_meshadapt.checkpoint_folder import commit, last_whole_checkpoint, open_partial, save_mesh_info
from hf_meshadapt.checkpoint_state import load_rank_state, save_rank_state
from hf_meshadapt.shard_transfer import TransferError, gather_files, is_shared, receive_file, send_file
from tests.launch import run_ranks, start_ranks
from tests.tiny_stages import assert_same_weights, cut, tiny_model

TIMEOUT_SECONDS = 3.0


def make_group(rank: int):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks = list(range(dist.get_world_size()))
    return dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_SECONDS), backend="gloo")


def output_dir_of(rank: int, folder: Path, shared: bool) -> Path:
    return folder / "shared" if shared else folder / f"machine-{rank}"


def detect(rank: int, folder: Path) -> tuple[bool, bool, bool]:
    group = make_group(rank)
    # The last two ranks share a disk, rank 0 has another.
    partly = output_dir_of(min(rank, 1), folder, shared=False)
    return (
        is_shared(output_dir_of(rank, folder, shared=True), group, rank),
        is_shared(output_dir_of(rank, folder, shared=False), group, rank),
        is_shared(partly, group, rank),
    )


def test_every_rank_gives_the_same_answer_to_whether_a_folder_is_shared(tmp_path):
    assert run_ranks(detect, 3, tmp_path / "run", tmp_path) == [(True, False, False)] * 3
    assert list((tmp_path / "shared").iterdir()) == [] == list((tmp_path / "machine-0").iterdir())


def save(rank: int, folder: Path, shared: bool, bits_per_second: float | None) -> list[str]:
    """A whole save as a trainer would do it; returns the names that reached rank 0."""
    group = make_group(rank)
    num_stages = dist.get_world_size()
    final = output_dir_of(rank, folder, shared) / "checkpoint-5"
    if rank == 0 or not shared:
        open_partial(final)
    dist.barrier(group=group)
    partial = final.with_name(".partial-checkpoint-5")
    model, owned = cut(tiny_model("llama", True), "llama", True, rank, num_stages)
    files = save_stage(model, owned, partial, rank, num_stages)
    files += save_rank_state(partial, rank, rng={}, scheduler={"rank": rank})
    arrived = gather_files(
        files, partial, group, rank, shared=shared, chunk_bytes=1000, bits_per_second=bits_per_second
    )
    if rank == 0:
        merge_index(partial)
        save_mesh_info(partial, {"stages": num_stages}, 5)
        commit(partial, final)
    return [path.relative_to(partial).as_posix() for path in arrived]


@pytest.mark.parametrize("shared", [True, False])
def test_all_ranks_save_one_whole_checkpoint(tmp_path, shared):
    arrived, *others = run_ranks(save, 3, tmp_path / "run", tmp_path, shared, None)
    assert others == [[], []]
    assert len(arrived) == (0 if shared else 2 * 3)
    output_dir = output_dir_of(0, tmp_path, shared)
    checkpoint = last_whole_checkpoint(output_dir)
    assert checkpoint == output_dir / "checkpoint-5"
    assert_same_weights(AutoModelForCausalLM.from_pretrained(checkpoint), tiny_model("llama", True))
    assert [load_rank_state(checkpoint, rank).scheduler["rank"] for rank in range(3)] == [0, 1, 2]
    assert not list(checkpoint.rglob("*.part"))


def gather_slowly(rank: int, folder: Path) -> list[int]:
    group = make_group(rank)
    mine = output_dir_of(rank, folder, shared=False)
    mine.mkdir()
    path = mine / f"from-{rank}.bin"
    path.write_bytes(os.urandom(250_000))
    # 2 s for each of two senders: together longer than the group's timeout, which limits single messages.
    arrived = gather_files([path], mine, group, rank, shared=False, bits_per_second=1e6)
    return [path.stat().st_size for path in arrived]


def test_a_gathering_may_take_longer_than_the_timeout_and_keeps_to_the_rate(tmp_path):
    started = time.monotonic()
    results = run_ranks(gather_slowly, 3, tmp_path / "run", tmp_path)
    assert time.monotonic() - started > TIMEOUT_SECONDS + 0.9
    assert results == [[250_000, 250_000], [], []]
    for rank in (1, 2):
        received, sent = (tmp_path / f"machine-{r}" / f"from-{rank}.bin" for r in (0, rank))
        assert received.read_bytes() == sent.read_bytes()


def send_some_files(rank: int, folder: Path) -> None:
    group = make_group(rank)
    if rank == 0:
        for _ in range(3):
            receive_file(folder / "received", 1, group)
        return
    for size in (0, 1, 12_345):
        path = folder / f"file_{size}.bin"
        path.write_bytes(os.urandom(size))
        assert send_file(path, 0, group, f"mesh_state/file_{size}.bin", chunk_bytes=1000) == size
    for name in ("../x", "/x", "a/../x", ".x", "a//x", "", "a\0", "x/"):
        with pytest.raises(ValueError, match="relative path"):
            send_file(path, 0, group, name)


def test_files_arrive_whole_under_their_relative_names(tmp_path):
    run_ranks(send_some_files, 2, tmp_path / "run", tmp_path)
    for size in (0, 1, 12_345):
        received = tmp_path / "received" / "mesh_state" / f"file_{size}.bin"
        assert received.read_bytes() == (tmp_path / f"file_{size}.bin").read_bytes()


def send_badly(rank: int, folder: Path, name: str, digest: bytes) -> str:
    group = make_group(rank)
    if rank == 1:
        try:
            parts = ([len(name), 3, 10], torch.int64), (name.encode(), torch.uint8), (b"abc", torch.uint8)
            for values, dtype in (*parts, (digest, torch.uint8)):
                dist.send(torch.tensor(list(values), dtype=dtype), group=group, group_dst=0)
            dist.recv(torch.empty(1, dtype=torch.uint8), group=group, group_src=0)
        except RuntimeError:
            pass  # the receiver left
        return ""
    with pytest.raises(TransferError) as caught:
        receive_file(folder / "inside", 1, group)
    return str(caught.value)


@pytest.mark.parametrize(
    "name,message", [("../outside", "refused name"), ("/outside", "refused name"), ("file", "arrived damaged")]
)
def test_a_receiver_refuses_bad_names_and_damaged_bytes(tmp_path, name, message):
    error, _ = run_ranks(send_badly, 2, tmp_path / "run", tmp_path, name, bytes(16))
    assert message in error and "rank 1" in error
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "run"]


def lose_sender(rank: int, folder: Path, stop: signal.Signals) -> tuple[str, float]:
    group = make_group(rank)
    if rank == 1:
        path = folder / "weights.safetensors"
        path.write_bytes(os.urandom(1_000_000))
        threading.Timer(0.5, os.kill, (os.getpid(), stop)).start()
        send_file(path, 0, group, chunk_bytes=20_000, bits_per_second=1e6)
    last_chunk = time.monotonic()

    def note_chunk() -> None:
        nonlocal last_chunk
        last_chunk = time.monotonic()

    with pytest.raises(TransferError) as caught:
        receive_file(folder / "received", 1, group, note_chunk)
    return str(caught.value), time.monotonic() - last_chunk


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_whose_sender_dies_or_hangs_ends_with_its_name(tmp_path, stop):
    context = start_ranks(lose_sender, 2, tmp_path / "run", tmp_path, stop)
    receiver, sender = context.processes
    receiver.join(30)
    sender.kill()
    sender.join(30)
    receiver.kill()
    assert receiver.exitcode == 0, [path.read_text() for path in (tmp_path / "run").glob("error-0*")]
    error, seconds = torch.load(tmp_path / "run" / "result-0.pt")
    assert "receiving weights.safetensors from rank 1 failed" in error
    assert seconds < TIMEOUT_SECONDS + 2
    assert list((tmp_path / "received").iterdir()) == []


def lose_receiver(rank: int, folder: Path) -> str:
    group = make_group(rank)
    path = folder / "weights.safetensors"
    if rank == 0:
        receive_file(folder / "received", 1, group, lambda: os.kill(os.getpid(), signal.SIGKILL))
    path.write_bytes(os.urandom(1_000_000))
    with pytest.raises(TransferError) as caught:
        send_file(path, 0, group, chunk_bytes=20_000)
    return str(caught.value)


def test_a_sender_whose_receiver_dies_ends_with_its_name(tmp_path):
    receiver, sender = start_ranks(lose_receiver, 2, tmp_path / "run", tmp_path).processes
    sender.join(30)
    receiver.kill()
    sender.kill()
    assert sender.exitcode == 0, [path.read_text() for path in (tmp_path / "run").glob("error-1*")]
    error = torch.load(tmp_path / "run" / "result-1.pt")
    assert "sending" in error and "weights.safetensors to rank 0 failed" in error


def miss_a_rank(rank: int, folder: Path) -> str:
    group = make_group(rank)
    if rank == 2:
        time.sleep(TIMEOUT_SECONDS + 1.5)
        return ""
    with pytest.raises(TransferError) as caught:
        gather_files([], folder, group, rank, shared=True)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named(tmp_path):
    error, *_ = run_ranks(miss_a_rank, 3, tmp_path / "run", tmp_path)
    assert "rank 2 failed" in error
