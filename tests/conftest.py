"""The order of the suite, and how long its files take."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.lanes import is_unit
from tests.support.replacements import replacements

# Before torch is imported. With more, threads of one worker wait for cores that the other has: up to ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each full collection of garbage would scan all that was imported: 8 of the 20 s in which a worker finds the tests.
gc.disable()
# Workers of pytest-xdist have it; weft folds its output to it.
os.environ.pop("COLUMNS", None)

SECONDS = Path(__file__).parent / "seconds.json"  # of each file, in the last whole run that recorded them
_SHOWN = 10  # files
_SHARED = "WEFT_TESTS_SHARED"  # a variable: the folder of tests/support/shared_results.py
_REPLACING = {"mock", "patch", "planted"}  # names that a module of tests imports


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-seconds", action="store_true", help=f"write the seconds of each file to {SECONDS.name}")
    parser.addoption("--in-order", action="store_true", help="run files in the order in which they are named")


def pytest_configure(config: pytest.Config) -> None:
    """Workers and all processes of tests share a folder, and no other run of pytest does, such as one with a mutant."""
    if not hasattr(config, "workerinput"):
        os.environ[_SHARED] = folder = tempfile.mkdtemp(prefix="weft-shared-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def file_of(nodeid: str) -> str:
    """The file of a test, below tests/."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of `make unit`. What takes longest comes first, so that no worker begins it when the others have
    ended; a file without a record may take any time."""
    for item in items if "unit" in config.option.markexpr else ():
        function = getattr(item, "originalname", item.name)
        if item.get_closest_marker("slow") is None and is_unit(item.path, function):
            item.add_marker("unit")
    if config.getoption("--in-order"):
        return
    durations: dict[str, float] = json.loads(SECONDS.read_text())
    items.sort(key=lambda item: -durations.get(file_of(item.nodeid), math.inf))


def pytest_collection_finish() -> None:
    """Collections of garbage skip what was imported: a fifth of the processor seconds of tests without ranks."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _imports_are_not_collected() -> Iterator[None]:
    """Later collections also skip the modules that the tests of this file have imported."""
    modules = len(sys.modules)
    yield
    if len(sys.modules) > modules:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _checks_run_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """Results of checks of an architecture are shared by the tests of a file, except by tests that may replace code
    which the checks run: those of a file that imports a way to replace code, and those that replace something by
    monkeypatch. A test that only changes the folder or the environment with it uses the results of others."""
    replaces = not _REPLACING.isdisjoint(vars(request.module))
    if replaces:
        _forget_checks()
    elif (sharing := sys.modules.get("tests.support.shared_results")) is not None:
        sharing.share_checks()
    monkeypatch = request.getfixturevalue("monkeypatch") if "monkeypatch" in request.fixturenames else None
    for name in ("setattr", "delattr", "setitem", "delitem") if monkeypatch is not None else ():
        setattr(monkeypatch, name, _forgetting(getattr(monkeypatch, name)))
    yield
    if replaces or getattr(monkeypatch, "replaced", False):
        _forget_checks()


def _forgetting(replace: Callable[..., None]) -> Callable[..., None]:
    """A method of monkeypatch, before which the results of checks are dropped, as they are after the test. The
    environment, and the path, arguments and streams of `sys`, are no code that checks run."""

    def forget_and_replace(*args: Any, **kwargs: Any) -> None:
        if args[0] is not os.environ and args[0] is not sys:
            _forget_checks()
            replace.__self__.replaced = True  # type: ignore[attr-defined]
        replace(*args, **kwargs)

    return forget_and_replace


def _forget_checks() -> None:
    startup = sys.modules.get("weft.engine.selfcheck.architecture")
    if startup is not None:
        startup.forget_checks()


@pytest.fixture(autouse=True, scope="module")
def _no_group_outlives_its_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group that an engine in the tests' own process has made would be in the way of pretended ones. The
    files of tests/cuda come last and share one, because NCCL takes seconds."""
    _forget_checks()
    yield
    process = sys.modules.get("weft.launch.process")
    if process is not None and request.path.parent.name != "cuda":
        process.leave()


@pytest.fixture(autouse=True, scope="module")
def _no_replacement_outlives_its_file() -> Iterator[None]:
    """What a test replaces in the package is put back. Two threads that replace the same function restore each other's
    replacement; later files of the same worker would then fail, or not, by the order of files."""
    yield
    assert not (remaining := list(replacements("weft"))), f"left in the package by this file: {', '.join(remaining)}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The files that took longest, set-up of their fixtures included."""
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[file_of(report.nodeid)] += report.duration
    if len(seconds) > 1:
        terminalreporter.section(f"{sum(seconds.values()):.0f} s of tests in {len(seconds)} files")
        for name, duration in seconds.most_common(_SHOWN):
            terminalreporter.line(f"{duration:6.0f} s  {name}")
    if config.getoption("--record-seconds"):
        rounded = {name: round(duration, 1) for name, duration in seconds.most_common()}
        SECONDS.write_text(json.dumps(rounded, indent=1) + "\n")
