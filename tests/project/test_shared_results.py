"""Results that processes of the suite share: computed once, and never of replaced code (support/shared_results.py)."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.cases import open_engine, saved_model
from tests.support.pool import run
from tests.support.shared_results import FOLDER, nothing_replaced, result_of_file
from tests.support.zoo import tiny_config
from weft.engine.selfcheck import architecture
from weft.engine.selfcheck.architecture import forget_checks, once_per_process, replaced_code


def test_a_result_is_computed_once_and_an_error_is_not_kept(tmp_path: Path) -> None:
    def fails() -> str:
        raise ValueError

    with pytest.raises(ValueError):
        result_of_file(tmp_path, "key", fails)
    assert [result_of_file(tmp_path, "key", lambda n=n: n) for n in (2, 3)] == [2, 2]
    assert result_of_file(tmp_path, "another", lambda: torch.ones(2)).tolist() == [1.0, 1.0]


def test_replaced_code_is_noticed() -> None:
    assert nothing_replaced()
    with mock.patch.object(architecture, "small_copy", mock.Mock()):
        assert not nothing_replaced()


def test_results_with_a_planted_bug_are_apart() -> None:
    runs: list[int] = []

    @once_per_process
    def check(config: object) -> int:
        runs.append(1)
        return len(runs)

    forget_checks()
    config = tiny_config("llama")
    assert [check(config), check(config)] == [1, 1]
    with replaced_code("a bug"):
        assert [check(config), check(config)] == [2, 2]
    assert check(config) == 1
    forget_checks()
    assert check(config) == 3


def opened(path: str, folder: str, forgets: bool) -> None:
    """An engine, whose checks are shared in this folder."""
    if forgets:
        forget_checks()
    with mock.patch.dict(os.environ, {FOLDER: folder}):
        open_engine(path, "tp2")


@pytest.mark.parametrize("forgets", [False, True])
def test_ranks_share_checks_unless_they_forget_them(forgets: bool, tmp_path: Path) -> None:
    run(2, opened, saved_model("llama", intermediate_size=48 + forgets), str(tmp_path), forgets)
    files = list(tmp_path.iterdir())
    assert len(files) == (0 if forgets else 2) and all(file.stat().st_size for file in files)
