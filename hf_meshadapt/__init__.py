"""Adapt Hugging Face models over pipelines of GPUs joined by ordinary internet links.

Public names load on first use, so that `import hf_meshadapt` costs milliseconds.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_PUBLIC = {
    "MeshAdaptTrainer": "trainer",
    "MeshAdaptMixin": "trainer",
    "MeshAdaptArguments": "arguments",
    "MeshAdaptSFTTrainer": "sft",
    "MeshAdaptSFTConfig": "sft",
    "MeshAdaptDPOTrainer": "dpo",
    "MeshAdaptDPOConfig": "dpo",
    "MeshConfig": "config",
    "BoundaryConfig": "config",
    "EvalCallback": "evaluation.callback",
    "byte_plan": "planner",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
