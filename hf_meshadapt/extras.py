"""How to install what only a part of the package needs; the package is on no index, a clone is installed."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """What an error says about an extra of pyproject.toml."""
    return f"run pip install '.[{extra}]' in a clone of hf_meshadapt"
