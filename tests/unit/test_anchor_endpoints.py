"""Where stages listen, and what the anchor is told of it."""

from __future__ import annotations

import socket

import pytest

from hf_meshadapt.anchor.config import Endpoint
from hf_meshadapt.anchor.fast_link import Source
from hf_meshadapt.anchoring.endpoints import cannot_listen, open_listener, own_address, sources_of


def test_stages_of_the_first_machine_are_found_by_the_name_that_the_anchor_uses():
    sources = sources_of(Endpoint("mesh.example", 29600), ["10.0.0.1", "10.0.0.1", "10.0.0.2"])
    assert sources == (Source(0, 0, "", 29600), Source(1, 0, "", 29601), Source(2, 0, "10.0.0.2", 29602))


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost"])
def test_the_own_address_is_that_on_the_launchs_network(monkeypatch, master):
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert own_address() in ("127.0.0.1", "::1")


def test_a_taken_port_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = Endpoint("127.0.0.1", taken.getsockname()[1] - 1)
        with pytest.raises(OSError, match="in use") as caught:
            open_listener(endpoint, stage=1)
    message = str(cannot_listen(endpoint, {1: str(caught.value)}))
    assert message.startswith(f"fast_endpoint='{endpoint}': stage 1 cannot listen on port {endpoint.port + 1}")
