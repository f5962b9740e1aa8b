"""Which names may appear on a public page: ids of the Hub, and nothing that is a place on somebody's disk."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

# huggingface_hub's validate_repo_id: letters, digits, `-`, `_`, `.`; neither `--` nor `..`; at most 96 characters.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"(?:{_PART}/)?{_PART}")
_CACHE_FOLDER = re.compile(r"(?:models|datasets)--([^/\\]+)")
_DATASET_URL = re.compile(rf"hf://datasets/((?:{_PART}/)?{_PART})@")


def hub_id(name: str | None) -> str | None:
    """The Hub's name of a model or dataset, or None for a local path, an empty name and whatever cannot be one.

    A folder within the Hub's cache gives back the name that it was downloaded by.
    """
    if not isinstance(name, str) or not name:
        return None
    if cached := _CACHE_FOLDER.search(name):
        name = cached[1].replace("--", "/")
    elif Path(name).exists():
        return None
    valid = _HUB_ID.fullmatch(name) and "--" not in name and ".." not in name and len(name) <= 96
    return name if valid and not name.endswith(".git") else None


def hub_ids(names: Iterable[str | None] | str | None, what: str) -> list[str]:
    """The Hub's names among `names`, without repeats; says how many others were left out, and not what they were.

    Args:
        what: what they name, for the warning.
    """
    given = [names] if isinstance(names, str) else [name for name in names or () if name is not None]
    found = [name for name in map(hub_id, given) if name]
    if len(found) < len(given):
        logger.warning("%d of %d %s are not names of the Hub and stay off the card", len(given) - len(found),
                       len(given), what)  # fmt: skip
    return list(dict.fromkeys(found))


def dataset_ids(dataset) -> list[str]:
    """Hub names of what a `datasets` dataset was read from, however it was mapped or filtered since.

    Args:
        dataset: a Dataset, a dict of them, or anything else, which has none.
    """
    if isinstance(dataset, dict):
        return list(dict.fromkeys(name for part in dataset.values() for name in dataset_ids(part)))
    info = getattr(dataset, "info", None)
    sources = getattr(info, "download_checksums", None) or {}
    return list(dict.fromkeys(match[1] for source in sources if (match := _DATASET_URL.match(str(source)))))


def is_path(value) -> bool:
    """Whether a value could be a place on a disk: any text with a separator is taken for one."""
    return isinstance(value, str) and ("/" in value or "\\" in value)
