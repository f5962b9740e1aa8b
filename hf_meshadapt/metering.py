"""What a run really sends: socket bytes per axis and peer.

Nothing here is derived from shapes: `SocketMeter` asks the kernel, so that `planner.byte_plan` has something
independent to be checked against. All state sits in the objects, which the trainer makes and passes on.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from hf_meshadapt.planner import PLAN_AXES

METER_AXES = (*PLAN_AXES, "save", "other")
UNKNOWN_PEER = -1

# struct tcp_info of linux/tcp.h (4.19 or later): u64 tcpi_bytes_sent, then u64 tcpi_bytes_retrans.
_BYTES_SENT_OFFSET = 200
_TCP_INFO_LENGTH = _BYTES_SENT_OFFSET + 16


@dataclass
class _Socket:
    """One TCP connection of this process: where it belongs and its last counts, which outlive it."""

    ends: tuple[str, str]
    axis: str = "other"
    peer: int = UNKNOWN_PEER
    sent_bytes: int = 0
    retransmitted_bytes: int = 0


class SocketMeter:
    """Counts the bytes that this process's TCP connections sent, per axis and peer rank.

    A connection belongs to the axis within whose context it appeared:

        meter = SocketMeter()
        with meter.axis("pipeline"):
            group = dist.new_group(ranks)
        meter.resolve_peers()
        meter.read()  # {"pipeline": {1: 12000288}, "other": {0: 466}}

    Gloo connects all members when a group is made. Connections made outside every context (TCPStore, WORLD, the Hub)
    are axis `other`.

    Bytes count once, retransmissions apart (`retransmitted_bytes`); gloo's headers are in, TCP/IP headers (about 4%
    on ethernet) are not. Connections are found in /proc/self/fd. Where that or TCP_INFO is missing, `available` is
    False and every reading empty.
    """

    def __init__(self):
        self.available = _tcp_info_available()
        self._counters: list[tuple[str, Callable[[], int]]] = []
        self._sockets: dict[int, _Socket] = {}  # by inode: unlike descriptors, the kernel does not reuse it
        self._ignored: set[int] = set()
        self._taken_bytes: dict[str, int] = {}
        # The anchor link makes its groups in a thread of its own while the trainer reads.
        self._lock = threading.Lock()

    @contextmanager
    def axis(self, name: str) -> Iterator[None]:
        """Gives every connection that appears within the context to axis `name`; an inner context wins.

        Raises:
            ValueError: `name` is not one of `METER_AXES`.
        """
        if name not in METER_AXES:
            raise ValueError(f"axis={name!r} is not one of {', '.join(METER_AXES)}")
        before = self._scan()
        try:
            yield
        finally:
            for inode, entry in self._scan().items():
                if inode not in before and entry.axis == "other":
                    entry.axis = name

    def add_counter(self, axis: str, sent_bytes: Callable[[], int]) -> None:
        """Gives an axis bytes that are counted elsewhere: of links whose other end is no rank, which come and go."""
        self._counters.append((axis, sent_bytes))

    def resolve_peers(self, group: dist.ProcessGroup | None = None) -> None:
        """Finds every connection's peer rank, once, after the groups are made; collective over all ranks.

        A peer outside the run, behind address translation, or this process itself stays `UNKNOWN_PEER`.

        Args:
            group: a group of all ranks in rank order that takes CPU tensors; WORLD by default.
        """
        entries = list(self._scan().values())
        owners = {}
        for rank, ends in enumerate(exchange_json([entry.ends for entry in entries], group)):
            if rank != dist.get_rank(group):
                owners.update({(far, near): rank for near, far in ends})
        for entry in entries:
            entry.peer = owners.get(entry.ends, UNKNOWN_PEER)

    def read(self) -> dict[str, dict[int, int]]:
        """Bytes sent since each connection began: {axis: {peer rank: bytes}}. Costs well under a millisecond."""
        reading: dict[str, dict[int, int]] = {}
        for entry in self._scan().values():
            peers = reading.setdefault(entry.axis, {})
            peers[entry.peer] = peers.get(entry.peer, 0) + entry.sent_bytes
        for axis, sent_bytes in self._counters:
            peers = reading.setdefault(axis, {})
            peers[UNKNOWN_PEER] = peers.get(UNKNOWN_PEER, 0) + sent_bytes()
        return reading

    def retransmitted_bytes(self) -> int:
        """Bytes that the kernel sent again since each connection began, not part of `read`."""
        return sum(entry.retransmitted_bytes for entry in self._scan().values())

    def take_axis_bytes(self) -> dict[str, int]:
        """Bytes sent to other ranks per axis since the last call, for `figures.gather`.

        Leaves out connections of axis `other` with no known peer rank: uploads are not the mesh's traffic.
        """
        sent_bytes = {
            axis: sum(count for peer, count in peers.items() if axis != "other" or peer != UNKNOWN_PEER)
            for axis, peers in self.read().items()
        }
        taken = {axis: count - self._taken_bytes.get(axis, 0) for axis, count in sent_bytes.items()}
        self._taken_bytes = sent_bytes
        return taken

    def _scan(self) -> dict[int, _Socket]:
        """All connections so far by inode, the live ones with fresh counts."""
        with self._lock:
            for name in os.listdir("/proc/self/fd") if self.available else ():
                try:
                    self._visit(int(name))
                except OSError:
                    continue  # closed meanwhile, listening, or not connected yet
            return dict(self._sockets)

    def _visit(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode) or status.st_ino in self._ignored:
            return
        with _duplicate_socket(descriptor) as connection:
            inode = os.fstat(connection.fileno()).st_ino
            if connection.proto != socket.IPPROTO_TCP:
                self._ignored.add(inode)
                return
            if inode not in self._sockets:
                ends = (_address(connection.getsockname()), _address(connection.getpeername()))
                self._sockets[inode] = _Socket(ends)
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        entry = self._sockets[inode]
        all_bytes, entry.retransmitted_bytes = struct.unpack_from("=QQ", info, _BYTES_SENT_OFFSET)
        entry.sent_bytes = all_bytes - entry.retransmitted_bytes


def _duplicate_socket(descriptor: int) -> socket.socket:
    """A duplicate for the caller to close at once: kept open, it would hide a connection's end from its peer."""
    duplicate = os.dup(descriptor)
    blocking = os.get_blocking(duplicate)
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:  # the descriptor was closed and reused by something else meanwhile
        os.close(duplicate)
        raise
    if os.get_blocking(duplicate) != blocking:  # socket.setdefaulttimeout makes Python switch the original too
        os.set_blocking(duplicate, blocking)
    return connection


def _tcp_info_available() -> bool:
    """Whether this platform lists descriptors in /proc and fills tcp_info as far as the counts."""
    if not (os.path.isdir("/proc/self/fd") and hasattr(socket, "TCP_INFO")):
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            return len(probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)) >= _TCP_INFO_LENGTH
    except OSError:
        return False


def _address(name: tuple) -> str:
    """`host port` as both ends of a connection write it: IPv4 not mapped into IPv6, no interface name."""
    return f"{name[0].removeprefix('::ffff:').partition('%')[0]} {name[1]}"


def exchange_json(value, group: dist.ProcessGroup | None) -> list:
    """Every rank's `value`, in rank order, as JSON in padded uint8 tensors: nothing is unpickled."""
    payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(payload)]), group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: len(payload)] = payload
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [json.loads(bytes(data[: int(length)].tolist())) for data, length in zip(everyone, lengths)]


def gather_tensors(mine: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> list[dict[str, torch.Tensor]]:
    """Every rank's tensors by name, in rank order, on the group's first rank; nothing on the others. CPU tensors."""
    # Copies: safetensors refuses entries that share memory, as labels and the batch that they are part of do.
    mine = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in mine.items()}
    payload = torch.frombuffer(bytearray(save(mine)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(payload)]), group=group)
    if dist.get_rank(group):
        dist.send(payload, group=group, group_dst=0)
        return []
    gathered = [mine]
    for rank, length in enumerate(lengths[1:], start=1):
        arrived = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(arrived, group=group, group_src=rank)
        gathered.append(load(arrived.numpy().tobytes()))
    return gathered
