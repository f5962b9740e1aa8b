"""Checkpoint files sent to rank 0 over a gloo group, for meshes without a shared filesystem.

All ranks here are ranks of the given group. Per file: header (three int64: bytes of the name, bytes of the file,
bytes of a chunk), name, chunks, blake2b digest; the receiver answers with one byte. Every wait ends after the group's
timeout at the latest, and its error names file and peer.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from hf_meshadapt.checkpoint_folder import TOKEN_PREFIX

DEFAULT_CHUNK_BYTES = 4 * 2**20
MAX_CHUNK_BYTES = 2**30
MAX_NAME_BYTES = 512
DIGEST_BYTES = 16
WAIT_SIGN_SECONDS = 1.0
# What rank 0 tells the ranks that wait in gather_files.
WAIT, TURN, DONE = 0, 1, 2
# No component may start with a dot: neither `..` nor hidden files.
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")


class TransferError(RuntimeError):
    """A file did not pass between two ranks; the message names the file, the peer and what to do."""


@contextmanager
def _named(action: str, peer: int):
    """Turns a dead, silent or slow peer's error into a `TransferError` that names it."""
    try:
        yield
    except TransferError:
        raise
    except RuntimeError as error:
        raise TransferError(
            f"{action} rank {peer} failed: {error}\nIf rank {peer} ended, its own log says why: restart and resume "
            "from the last whole checkpoint. If it is only slow, raise the mesh's timeout."
        ) from error


def is_shared(folder: Path, group, rank: int, patience_seconds: float = 1.0) -> bool:
    """Whether all ranks see the same folder; all ranks of the group must call it, and all get the same answer.

    Rank 0 writes a file named by a random value that it broadcasts, and the others look for it.

    Args:
        folder: made where it does not exist.
        patience_seconds: how long to look, for filesystems that show new files late.

    Raises:
        OSError: rank 0 cannot write to the folder (the others return False).
        TransferError: a rank did not answer within the group's timeout.
    """
    folder.mkdir(parents=True, exist_ok=True)
    value = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    problem = None
    with _named(f"agreeing on whether {folder} is shared, started by", 0):
        dist.broadcast(value, group=group, group_src=0)
        token = folder / f"{TOKEN_PREFIX}{bytes(value.tolist()).hex()}"
        if rank == 0:
            try:
                token.touch(exist_ok=False)
            except OSError as error:
                problem = error
        # Only now does everyone know that the token was written, or was not.
        dist.barrier(group=group)
        found = torch.tensor([int(_appears(token, patience_seconds))])
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    if problem is not None:
        raise problem
    if rank == 0:
        token.unlink()
    return bool(found.item())


def _appears(path: Path, patience_seconds: float) -> bool:
    deadline = time.monotonic() + patience_seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def send_file(
    path: Path,
    dst: int,
    group,
    name: str | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    bits_per_second: float | None = None,
) -> int:
    """Sends one file to rank `dst`, which must be in `receive_file`; returns once the receiver has verified it.

    Args:
        path: the file.
        name: relative path with `/` under which it arrives; the file's own name by default.
        chunk_bytes: bytes per message; with a rate at most what passes in one second, so that activations that
            share the link never queue behind more than that.
        bits_per_second: rate to keep to, or None for what the link gives.

    Returns:
        Bytes of the file.

    Raises:
        ValueError: a name that the receiver would refuse, or an impossible rate or chunk.
        TransferError: the peer ended, was silent for the group's timeout, or got other bytes than were sent.
    """
    name = _checked_name(path.name if name is None else name)
    if bits_per_second is not None:
        if bits_per_second <= 0:
            raise ValueError(f"bits_per_second={bits_per_second}: must be positive, or None for no limit")
        chunk_bytes = min(chunk_bytes, max(1024, int(bits_per_second / 8)))
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunk_bytes={chunk_bytes}: must lie in 1 to {MAX_CHUNK_BYTES}")
    size = path.stat().st_size
    with _named(f"sending {path} to", dst):
        _send(torch.tensor([len(name), size, chunk_bytes]), dst, group)
        _send(torch.frombuffer(bytearray(name.encode()), dtype=torch.uint8), dst, group)
        digest = _send_chunks(path, size, dst, group, chunk_bytes, bits_per_second)
        _send(torch.frombuffer(bytearray(digest), dtype=torch.uint8), dst, group)
        if not _receive(1, torch.uint8, dst, group).item():
            raise TransferError(f"rank {dst} received other bytes than {path} has: save again")
    return size


def _send_chunks(path: Path, size: int, dst: int, group, chunk_bytes: int, bits_per_second: float | None) -> bytes:
    checksum = hashlib.blake2b(digest_size=DIGEST_BYTES)
    buffer = torch.empty(min(chunk_bytes, size), dtype=torch.uint8)
    view = memoryview(buffer.numpy())
    left = size
    with path.open("rb") as file:
        while left:
            started = time.monotonic()
            count = file.readinto(view[: min(left, len(view))])
            if not count:
                raise TransferError(f"{path} lost {left} of its {size} bytes while it was being sent to rank {dst}")
            checksum.update(view[:count])
            _send(buffer[:count], dst, group)
            left -= count
            if bits_per_second is not None:
                time.sleep(max(0.0, started + count * 8 / bits_per_second - time.monotonic()))
    return checksum.digest()


def receive_file(folder: Path, src: int, group, after_chunk=None) -> Path:
    """Receives one file from rank `src` into `folder`, under the name that the sender gives.

    The bytes go to `<name>.part`, which is renamed once size and digest agree and removed on any error.

    Args:
        folder: where the relative path that the sender gives begins; made where it does not exist.
        after_chunk: called after every chunk.

    Raises:
        TransferError: the peer ended, was silent for the group's timeout, sent a name that leads out of the folder, or
            the bytes that arrived are not those that were sent.
    """
    with _named("receiving a file from", src):
        name_bytes, size, chunk_bytes = _receive(3, torch.int64, src, group).tolist()
        if not (0 < name_bytes <= MAX_NAME_BYTES and size >= 0 and 0 < chunk_bytes <= MAX_CHUNK_BYTES):
            raise TransferError(f"rank {src} sent an impossible header ({name_bytes}, {size}, {chunk_bytes})")
        name = bytes(_receive(name_bytes, torch.uint8, src, group).tolist()).decode("ascii", errors="replace")
    try:
        target = folder / _checked_name(name)
    except ValueError as error:
        raise TransferError(f"rank {src} sent a file under a refused name: {error}") from error
    part = target.with_name(f"{target.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _named(f"receiving {name} from", src):
            actual = _receive_chunks(part, size, chunk_bytes, src, group, after_chunk)
            whole = actual == bytes(_receive(DIGEST_BYTES, torch.uint8, src, group).tolist())
            _send(torch.tensor([int(whole)], dtype=torch.uint8), src, group)
            if not whole:
                raise TransferError(f"{name} from rank {src} arrived damaged: save again")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _receive_chunks(part: Path, size: int, chunk_bytes: int, src: int, group, after_chunk) -> bytes:
    checksum = hashlib.blake2b(digest_size=DIGEST_BYTES)
    left = size
    with part.open("wb") as file:
        while left:
            chunk = memoryview(_receive(min(left, chunk_bytes), torch.uint8, src, group).numpy())
            checksum.update(chunk)
            file.write(chunk)
            left -= len(chunk)
            if after_chunk is not None:
                after_chunk()
    return checksum.digest()


def gather_files(
    paths: list[Path],
    folder: Path,
    group,
    rank: int,
    *,
    shared: bool,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    bits_per_second: float | None = None,
) -> list[Path]:
    """Brings every rank's files into rank 0's folder; all ranks of the group must call it.

    On return, on any rank, rank 0 has all files: with a shared filesystem no file is sent and this is a barrier only.
    Ranks are served one after the other; rank 0 gives the others a sign of life every second, so that the group's
    timeout limits single messages, not the whole gathering.

    Args:
        paths: this rank's files, all inside `folder`; may be empty. Ignored on rank 0, which already has its own.
        folder: this rank's (partial) checkpoint folder; files arrive at the same relative path in rank 0's.
        shared: what `is_shared` answered.
        chunk_bytes, bits_per_second: as for `send_file`.

    Returns:
        On rank 0 the files that arrived, elsewhere an empty list.

    Raises:
        TransferError: as `send_file` and `receive_file`.
    """
    if rank == 0:
        return _collect(folder, group)
    names = {} if shared else {path: path.relative_to(folder).as_posix() for path in paths}
    _await_sign(TURN, group)
    with _named("sending a checkpoint to", 0):
        _send(torch.tensor([len(names)]), 0, group)
    for path, name in names.items():
        send_file(path, 0, group, name, chunk_bytes, bits_per_second)
    _await_sign(DONE, group)
    return []


def _collect(folder: Path, group) -> list[Path]:
    others = range(1, dist.get_world_size(group))
    received, last_sign = [], time.monotonic()

    def keep_waiting(sender: int) -> None:
        nonlocal last_sign
        if time.monotonic() - last_sign >= WAIT_SIGN_SECONDS:
            last_sign = time.monotonic()
            for other in others:
                if other != sender:
                    _sign(WAIT, other, group)

    for sender in others:
        _sign(TURN, sender, group)
        with _named("receiving a checkpoint from", sender):
            count = _receive(1, torch.int64, sender, group).item()
        for _ in range(count):
            received.append(receive_file(folder, sender, group, lambda sender=sender: keep_waiting(sender)))
    for other in others:
        _sign(DONE, other, group)
    return received


def _sign(sign: int, peer: int, group) -> None:
    with _named("telling the state of a checkpoint to", peer):
        _send(torch.tensor([sign]), peer, group)


def _await_sign(wanted: int, group) -> None:
    with _named("waiting for the checkpoint's next step from", 0):
        while _receive(1, torch.int64, 0, group).item() != wanted:
            pass


def _checked_name(name: str) -> str:
    if len(name) > MAX_NAME_BYTES or not SAFE_NAME.fullmatch(name):
        raise ValueError(
            f"{name[:80]!r}: a relative path of letters, digits, `_`, `-`, `.`; no part starts with a dot"
        )
    return name


def _send(tensor: torch.Tensor, dst: int, group) -> None:
    dist.send(tensor, group=group, group_dst=dst)


def _receive(count: int, dtype: torch.dtype, src: int, group) -> torch.Tensor:
    tensor = torch.empty(count, dtype=dtype)
    dist.recv(tensor, group=group, group_src=src)
    return tensor
