"""The version of weft, and where it is installed. This file imports nothing else of weft."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).parent
