"""Where the ranks of the fast circuit listen for the anchor."""

from __future__ import annotations

import os
import socket

from ..anchor.config import Endpoint
from ..anchor.fast_link import Source, listen
from ..presets import user_error


def open_listener(endpoint: Endpoint, stage: int) -> socket.socket:
    """This stage's listening socket.

    Raises:
        OSError: the port is taken.
    """
    return listen(endpoint.bind_host, endpoint.port + stage)


def own_address() -> str:
    """This machine's address on the network of the launch, by which ranks on other machines know it."""
    host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "1"))
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # chooses the interface; nothing is sent
        return probe.getsockname()[0]


def sources_of(endpoint: Endpoint, addresses: list[str]) -> tuple[Source, ...]:
    """Every stage's source; an empty host is that of the first one, by whatever name the anchor calls it.

    Args:
        addresses: of the stages' machines, in order.
    """
    return tuple(
        Source(stage, 0, "" if address == addresses[0] else address, endpoint.port + stage)
        for stage, address in enumerate(addresses)
    )


def cannot_listen(endpoint: Endpoint, faults: dict[int, str]) -> ValueError:
    """The error of stages that could not listen."""
    (stage, fault), *_ = sorted(faults.items())
    return user_error(
        "fast_endpoint", str(endpoint), f"stage {stage} cannot listen on port {endpoint.port + stage} ({fault})",
        "Use another port, of which the following ones are free too, one for each stage",
    )  # fmt: skip
