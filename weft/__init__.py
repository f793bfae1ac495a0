"""weft post-trains HuggingFace models with PyTorch FSDP2. Importing it imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.api import Run, rl, sft

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "rl", "sft"]


def __getattr__(name: str) -> object:
    """Read when they are asked for: configs are read by programs that need nothing else."""
    if name == "rl":  # a folder, too, and the name is the folder's once anything of it is imported
        return import_module("weft.rl")
    if name in ("Run", "sft"):
        from weft import api

        return getattr(api, name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")
