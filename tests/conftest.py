"""What every test process does once."""

import gc
import os

import pytest

# Before torch is imported. Tests run side by side on all cores, on models too small for threads, which spin as they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish(session) -> None:
    """Modules and collected tests are no garbage: Trainer's full collections, one a run, would walk them every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _verbosity_of_its_own():
    """A trainer's `log_level` is the process's, and "passive" takes over what the last one has left."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
