"""Fixtures of several files."""

import pytest
import torch

from hf_meshadapt import MeshAdaptArguments


@pytest.fixture
def make_arguments(tmp_path, monkeypatch):
    """Builds arguments as in one process, or as a launcher of `world` ranks would have it."""

    def build(world: int = 1, **fields) -> MeshAdaptArguments:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        return MeshAdaptArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **fields)

    return build


@pytest.fixture
def one_thread():
    """The same sums and random numbers on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
