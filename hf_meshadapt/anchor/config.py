"""Frozen configuration of the anchor circuit. Pure data."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from .budget import ANCHOR_BUDGET
from .schedule import UNDECIDED, AnchorSchedule

CIRCUITS = ("fast", "anchor")
MAX_PORT = 65535


@dataclass(frozen=True)
class Endpoint:
    """Where a circuit listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """It is an address of this machine that no other machine can reach."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def bind_host(self) -> str:
        """What to bind to: the host may be a router's address, so it is all interfaces but for local addresses."""
        if self.is_local:
            return self.host
        return "::" if ":" in self.host else ""


def read_endpoint(text: str) -> Endpoint:
    """`host:port`, with an IPv6 host in brackets.

    Raises:
        ValueError: it is not of that form.
    """
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bracketed) or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        raise ValueError(f"{text!r} is not host:port")
    return Endpoint(host[1:-1] if bracketed else host, int(port))


@dataclass(frozen=True)
class AnchorConfig:
    """What an anchor does and when.

    Attributes:
        anchor_every: optimizer steps from one snapshot to the next, K; None where it is not chosen yet.
        budget: of what the pipeline would send uncoded, what K is chosen to keep.
        anchor_batches: passes per snapshot, whose gradients are averaged.
        seed: of the order in which the anchor reads the data.
        snapshot_bits: per weight of every snapshot but the first, 8 or 4.
        deterministic: priors arrive exactly K steps after their snapshot, and whoever is late is waited for.
        circuit: one of `CIRCUITS`: which this process is part of.
        endpoint: where the fast circuit's first stage listens; None where the anchor is emulated.
        rate_bits_per_second: limit of every link between the circuits, each way; None for none.
    """

    anchor_every: int | None = None
    budget: float = ANCHOR_BUDGET
    anchor_batches: int = 1
    seed: int = 0
    snapshot_bits: int = 8
    deterministic: bool = False
    circuit: str = "fast"
    endpoint: Endpoint | None = None
    rate_bits_per_second: float | None = None

    @property
    def schedule(self) -> AnchorSchedule:
        return AnchorSchedule(self.anchor_every or UNDECIDED, self.deterministic)
