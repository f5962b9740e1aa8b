"""Files that ship with the package from their one copy at the root of the repository."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

SHARE = "share/hf_meshadapt"


def shipped_file(relative: str) -> Path:
    """Where `accelerate_configs/...` or `model_cards/...` lies: in a checkout at its root, else where pip put it.

    Raises:
        FileNotFoundError: the installation lacks it.
    """
    in_checkout = Path(__file__).resolve().parents[1] / relative
    if in_checkout.is_file():
        return in_checkout
    for path in importlib.metadata.files("hf_meshadapt") or ():
        if str(path).endswith(f"{SHARE}/{relative}"):
            return Path(path.locate())
    raise FileNotFoundError(f"{relative} is not part of this installation of hf_meshadapt: install it anew with pip")
