"""Slow links on one machine, for benchmarks: a network namespace per rank, joined by a bridge, each at a rate of its own.

Needs root, `ip` and `tc` (Linux). What leaves a rank passes a token bucket; up to 0.2 s of traffic queue before it, as in
a home router.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000
INTERFACE = "eth0"


@dataclass(frozen=True)
class SlowLinks:
    """Namespaces that exist; made by `slow_links`."""

    name: str
    num_ranks: int
    rate_bits_per_second: float

    def namespace(self, rank: int) -> str:
        return f"{self.name}-{rank}"

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def enter(self, rank: int) -> None:
        """Moves this process, which must not have other threads, into a rank's namespace and tells torch of it."""
        with open(f"/run/netns/{self.namespace(rank)}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.namespace(rank)}")
        os.environ.update(MASTER_ADDR=self.address(0), GLOO_SOCKET_IFNAME=INTERFACE)

    def _make(self) -> None:
        hub, rate = f"{self.name}-hub", f"{self.rate_bits_per_second:.0f}bit"
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")
        for rank in range(self.num_ranks):
            mine, port = self.namespace(rank), f"port{rank}"
            _run("ip", "netns", "add", mine)
            _run("ip", "link", "add", INTERFACE, "netns", mine, "type", "veth", "peer", "name", port, "netns", hub)
            _run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", mine, "address", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _run("ip", "-n", mine, "link", "set", device, "up")
            # Segments of 64 kB, which the kernel makes for itself, would not fit into the queue of a slow link.
            _run("ip", "-n", mine, "link", "set", INTERFACE, "gso_max_size", "3000")
            bucket = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
            _run("ip", "netns", "exec", mine, "tc", "qdisc", "add", "dev", INTERFACE, "root", *bucket)

    def _remove(self) -> None:
        for name in (f"{self.name}-hub", *map(self.namespace, range(self.num_ranks))):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)  # those that were made


@contextmanager
def slow_links(num_ranks: int, rate_bits_per_second: float) -> Iterator[SlowLinks]:
    """Links that go when the context ends.

    Raises:
        PermissionError: this is not root.
        RuntimeError: a command failed; says which and why.
    """
    if os.geteuid():
        raise PermissionError("network namespaces need root: run the benchmark as root")
    links = SlowLinks(f"mesh{os.getpid()}", num_ranks, rate_bits_per_second)
    try:
        links._make()
        yield links
    finally:
        links._remove()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
