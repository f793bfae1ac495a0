"""`make test-versions`: the quick part of the suite, parity and contracts with other torch and transformers.

Each argument is the Python of an environment. The result, by file, is docs/reference/versions.md; the status is 1
where anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "versions.md"
MARKERS = "not soak and not oracle and not table and (not slow or versions)"
VERSIONS = (
    "import platform, torch, transformers as t; print(platform.python_version(), torch.__version__, t.__version__)"
)
KINDS = ("passed", "failed", "skipped")
INTRODUCTION = """\
# Versions

weft runs with torch 2.11 to 2.15, transformers 5.17 to 5.23 and Python 3.11 to 3.13. With a newer version it prints a
warning and continues.

`make test` uses the pair of constraints.txt, and also runs contracts and parity on the oldest transformers.
`make test-versions` runs both ends of the ranges in environments of several GB each: the suite without its slow tests,
with all tests of parity and all contracts.

The code detects differences between versions by feature: of torch in weft/versions.py, of transformers in
weft/models/hf.py.
"""


@dataclass(frozen=True)
class Outcome:
    """One environment. counts: file of tests -> passed, failed, skipped; failed: names of tests."""

    versions: tuple[str, str, str]
    seconds: float
    counts: dict[str, Counter[str]]
    failed: list[str]


def main() -> int:
    """Run the environments one after the other; the page is written after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="+")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--pytest-args", default="")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    for python in arguments.pythons:
        outcomes.append(run(python, arguments.workers, arguments.pytest_args.split()))
        if not arguments.pytest_args:
            PAGE.write_text(page(outcomes), encoding="utf-8")
    return int(any(outcome.failed or not outcome.counts for outcome in outcomes))


def run(python: str, workers: str, arguments: list[str]) -> Outcome:
    """The suite in one environment."""
    installed = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.split()
    print(f"Python {installed[0]}, torch {installed[1]}, transformers {installed[2]}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        how = ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder", "-m", MARKERS, "-q"]
        subprocess.run(
            [python, "-m", "pytest", *how, f"--junitxml={report}", *arguments],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
        counts, failed = read_report(report)
    return Outcome((installed[0], installed[1], installed[2]), time.monotonic() - began, counts, failed)


def read_report(path: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """What pytest's JUnit report says: counts by file, and the tests that failed."""
    counts: dict[str, Counter[str]] = {}
    failed = []
    for case in ElementTree.parse(path).iter("testcase"):
        file = next(part for part in case.attrib["classname"].split(".") if part.startswith("test_"))
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts.setdefault(file, Counter())[kind] += 1
        if kind == "failed":
            failed.append(f"{file}::{case.attrib['name']}")
    return counts, failed


def page(outcomes: list[Outcome]) -> str:
    """docs/reference/versions.md."""
    head = "| file | " + " | ".join(f"torch {o.versions[1]}, transformers {o.versions[2]}" for o in outcomes) + " |"
    lines = [head, "|---|" + "---|" * len(outcomes)]
    total = [sum((tally for tally in o.counts.values()), Counter[str]()) for o in outcomes]
    lines.append("| all | " + " | ".join(_cell(counts) for counts in total) + " |")
    for file in sorted({file for o in outcomes for file in o.counts}):
        lines.append(f"| {file} | " + " | ".join(_cell(o.counts.get(file, Counter())) for o in outcomes) + " |")
    failed = [f"- torch {o.versions[1]}: {name}" for o in outcomes for name in o.failed] or ["- none"]
    ran = "; ".join(f"Python {o.versions[0]} in {o.seconds / 60:.0f} min" for o in outcomes)
    machine = f"{os.cpu_count()} cores, no accelerator"
    return "\n".join([
        INTRODUCTION,
        f"Passed / failed / skipped, by `make test-versions` on {datetime.date.today()} ({machine}; {ran}):", "",
        *lines, "", "Failed:", "", *failed, "",
    ])  # fmt: skip


def _cell(counts: Counter[str]) -> str:
    return " / ".join(str(counts[kind]) for kind in KINDS)


if __name__ == "__main__":
    sys.exit(main())
