"""A plugin of pytest for benchmarks/gpu.py: `pytest -p benchmarks.gpu_tests` writes each outcome and each warning to
the file that an environment variable names, with tracebacks, which pytest prints only at its end; and it puts tests of
flex attention, which is compiled, behind all others."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPORT = "WEFT_GPU_TESTS_REPORT"
_FLEX = re.compile(r"flex|gpt_oss")  # gpt_oss's sinks are flex's alone


@dataclass
class Outcomes:
    """of: test -> passed, failed or skipped, the worst of its phases. warnings: text -> times."""

    of: dict[str, str] = field(default_factory=dict)
    warnings: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> list[str]:
        return [name.removeprefix("tests/cuda/") for name, outcome in self.of.items() if outcome == "failed"]

    def counts(self, *, flex: bool) -> dict[str, int]:
        """How many of the tests, or of those of flex attention, have which outcome."""
        counted = Counter(outcome for name, outcome in self.of.items() if not flex or _FLEX.search(name))
        return {outcome: counted[outcome] for outcome in ("passed", "failed", "skipped")}


def read_report(path: Path) -> Outcomes:
    """What a run of pytest, which may have been killed, has written so far."""
    read = Outcomes()
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of one that was killed
        if "warning" in entry:
            read.warnings[entry["warning"]] += 1
            continue
        before = read.of.get(entry["test"])
        if before != "failed" and (before is None or entry["outcome"] != "passed"):
            read.of[entry["test"]] = entry["outcome"]
    return read


def _write(**entry: Any) -> None:
    if path := os.environ.get(REPORT):
        with Path(path).open("a") as stream:
            stream.write(json.dumps(entry) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Flex attention last; else the order stays."""
    items.sort(key=lambda item: _FLEX.search(item.nodeid) is not None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of each phase that tells something."""
    if report.when == "call" or report.outcome != "passed":
        text = {"text": report.longreprtext} if report.outcome == "failed" else {}
        _write(test=report.nodeid, outcome=report.outcome, seconds=report.duration, **text)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported."""
    if report.outcome == "failed":
        _write(test=report.nodeid, outcome="failed", seconds=0.0)


def pytest_warning_recorded(warning_message: warnings.WarningMessage, nodeid: str) -> None:
    """All are listed; none is an error."""
    path = "/".join(Path(warning_message.filename).parts[-3:])
    text = str(warning_message.message).strip().splitlines() or [""]
    _write(warning=f"{warning_message.category.__name__} ({path}:{warning_message.lineno}): {text[0]}", test=nodeid)
