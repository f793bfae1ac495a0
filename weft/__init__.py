"""weft post-trains HuggingFace models with PyTorch FSDP2. Importing it imports no torch."""

from __future__ import annotations

__version__ = "0.1.0"
