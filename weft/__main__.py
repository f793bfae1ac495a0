"""`python -m weft`."""

from __future__ import annotations

from weft.cli import entry

if __name__ == "__main__":
    entry()
