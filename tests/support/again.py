"""Runs the tests once more, alone, that failed in the last run of the suite: python -m tests.support.again

Hundreds of the suite's tests start processes and wait for them with time limits, on machines that others may load. A
test that fails beside others and passes alone is named, for it has to be mended, and does not fail the suite. More than
a few failures are no matter of load: then nothing is run again. Ends with 0 if all that failed passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LAST_FAILED = Path(__file__).parents[2] / ".pytest_cache/v/cache/lastfailed"  # pytest's own record
MAX_FAILURES = 3


def main() -> int:
    """The status of the suite after the second run."""
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    if not 0 < len(failed) <= MAX_FAILURES:
        return 1
    print(f"\nOnce more, alone: {', '.join(failed)}\n", flush=True)
    status = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:xdist", *failed]).returncode
    if status == 0:
        print("", "FAILED ONCE, PASSED ALONE (the test depends on time: mend it):", *failed, sep="\n  ", flush=True)
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
