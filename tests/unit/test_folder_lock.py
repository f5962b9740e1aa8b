"""One run at a time saves into a folder; a run that was killed locks nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from contextlib import contextmanager

import pytest

from hf_meshadapt import folder_lock
from hf_meshadapt.folder_lock import LOCK_NAME, FolderLock, is_held


def hold_until_told(folder, pipe) -> None:
    with FolderLock() as lock:
        lock.hold(folder)
        pipe.send(os.getpid())
        pipe.recv()
    pipe.send("let go")


@contextmanager
def another_run(folder):
    """A process that holds a folder: it, and the pipe that ends it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold_until_told, args=(folder, theirs))
    process.start()
    try:
        assert ours.poll(30) and ours.recv() == process.pid
        yield process, ours
    finally:
        process.kill()
        process.join()


def refusal(folder, call: str) -> str:
    with FolderLock() as lock, pytest.raises(ValueError) as caught:
        getattr(lock, call)(folder)
    return str(caught.value)


def test_a_second_run_is_told_who_holds_the_folder_until_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "PATIENCE_SECONDS", 0.1)
    with another_run(tmp_path) as (process, pipe):
        assert is_held(tmp_path)
        for call in ("hold", "refuse_held"):
            message = refusal(tmp_path, call)
            assert f"output_dir={tmp_path}: another run" in message and "an output_dir of its own" in message
            assert f"process {process.pid} on {socket.gethostname()}, since 2" in message
        (tmp_path / LOCK_NAME).write_text("")  # read in the moment before it is written
        assert "does not say who it is" in refusal(tmp_path, "hold")
        pipe.send("end")
        assert pipe.poll(30) and pipe.recv() == "let go"
        assert not is_held(tmp_path) and not list(tmp_path.iterdir())
        with FolderLock() as lock:
            lock.hold(tmp_path)
            assert (tmp_path / LOCK_NAME).exists()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_locks_nothing(tmp_path):
    with another_run(tmp_path) as (process, _):
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / LOCK_NAME).exists() and not is_held(tmp_path)
    with FolderLock() as lock:
        lock.refuse_held(tmp_path)
        lock.hold(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_process_is_not_refused_what_it_holds_and_keeps_it(tmp_path):
    def attempt(pipe) -> None:
        pipe.send(is_held(tmp_path))

    with FolderLock() as lock:
        for _ in range(2):
            lock.hold(tmp_path)
            lock.refuse_held(tmp_path)
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=attempt, args=(theirs,))
        process.start()
        assert ours.poll(30) and ours.recv() is True
        process.join()


def no_locks(*_):
    raise OSError(95, "Operation not supported")


@pytest.mark.parametrize("broken", [None, "lockf"], ids=["no fcntl", "no locks"])
def test_without_locks_nobody_is_kept_out(tmp_path, monkeypatch, broken):
    if broken:
        monkeypatch.setattr(folder_lock.fcntl, broken, no_locks)
    else:
        monkeypatch.setattr(folder_lock, "fcntl", None)
    (tmp_path / LOCK_NAME).touch()
    with FolderLock() as lock:
        lock.refuse_held(tmp_path)
        lock.hold(tmp_path)
        lock.hold(tmp_path / "nowhere")
