"""`python -m weft`."""

from __future__ import annotations

import sys

from weft.cli import main

if __name__ == "__main__":
    sys.exit(main())
