"""Where ranks meet: a place that cannot be one is refused at once."""

from __future__ import annotations

import time

import pytest

from hf_meshadapt.waiting import LinkError, join_world


@pytest.mark.parametrize("port", ["0", "-1", "65536", "http", "29500x", "²"])
@pytest.mark.parametrize("backend", ["gloo", None])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_is_none_is_refused_at_once(port, backend, rank, monkeypatch):
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    started = time.monotonic()
    with pytest.raises(ValueError, match=f"^MASTER_PORT={port}: must be a port number.*--standalone"):
        join_world(backend, 30.0)
    assert time.monotonic() - started < 5


def test_ports_that_can_be_one_are_tried(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": " 1 "}.items():
        monkeypatch.setenv(name, value)
    join_world(None, 0.1)  # TrainingArguments' own
    with pytest.raises(LinkError, match="rank 1 waited at start-up for all 2 ranks"):
        join_world("gloo", 0.1)
