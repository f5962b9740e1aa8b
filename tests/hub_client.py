"""Points huggingface_hub's client at the Hub of the tests: a process of its own by environment, this one by constants."""

from __future__ import annotations

import os
from pathlib import Path


def client_environment(url: str, home: Path, token: str) -> dict[str, str]:
    """Environment of a process whose client talks to `url` as the owner of `token`."""
    return os.environ | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_TOKEN": token,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def client_constants(url: str, home: Path) -> dict:
    """What the client reads from its environment once, at import; attributes of `huggingface_hub.constants`."""
    return {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
    }
