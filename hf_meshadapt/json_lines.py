"""Files of JSON lines that a user names, read so that what is wrong with one is said with its place."""

from __future__ import annotations

import json
from pathlib import Path


def read_text(path: Path, option: str = "--data") -> str:
    """
    Raises:
        ValueError: not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}={path}: not UTF-8 at byte {error.start}. Save it as UTF-8 text") from error


def read_json_lines(path: Path, option: str = "--data") -> list:
    """The values of all lines that are not empty.

    Args:
        option: that the user named the file by.

    Raises:
        ValueError: a line is no JSON, or the file is not UTF-8.
    """
    values = []
    for number, line in enumerate(read_text(path, option).split("\n"), 1):
        if not line.strip():
            continue
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{option}={path}: line {number} is no JSON ({error.msg} at character {error.pos + 1}): "
                f"{line.strip()[:40]!r}. Every line has to be one JSON object"
            ) from error
    return values
