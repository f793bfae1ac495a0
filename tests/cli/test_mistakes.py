"""What people get wrong, through the real command: exit status 2 in time, no traceback, a message that names the cause;
then its remedy is followed, and works. All that a data file can get wrong: data/test_errors_in_data.py."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.machine import business
from tests.support.mistakes import CONFIG, DATA, MISTAKES, PATHS, Mistake, make, mend, problem, write_folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    write_folder(folder)
    return folder


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake(mistake: Mistake, shared: Path, tmp_path: Path) -> None:
    make(mistake, shared, tmp_path)
    began = time.monotonic()
    done = forked.run(mistake.words, tmp_path)
    assert not problem(mistake, done)
    assert time.monotonic() - began < DATA * business()  # closer: `make mistakes`, with processes of their own
    done = forked.run(mend(mistake, shared, tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr


def test_there_are_fifty_of_every_kind() -> None:
    kinds = Counter(mistake.within for mistake in MISTAKES)
    assert len(MISTAKES) >= 50 and set(kinds) == {CONFIG, PATHS, DATA}
    assert len({mistake.what for mistake in MISTAKES}) == len(MISTAKES)
