"""Runs what draws random numbers without anybody noticing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def random_states_kept(seed: int = 0) -> Iterator[None]:
    """Within it Python, numpy and torch (on the CPU) draw from `seed`; afterwards they go on as if nothing had been.

    Other devices' generators are not touched, nor must they be initialised here.
    """
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
