"""What every test process does once."""

import gc
import os

# Before torch is imported. Tests run side by side on all cores, on models too small for threads, which spin as they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish(session) -> None:
    """Modules and collected tests are no garbage: Trainer's full collections, one a run, would walk them every time."""
    gc.collect()
    gc.freeze()
