"""What weft puts into the temporary directory is removed: at the end, or by the next start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.launch import scratch
from weft.launch.scratch import PREFIX, scratch_folder

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal
from weft.launch.scratch import scratch_folder
with scratch_folder("killed-") as folder:
    (folder / "file").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_the_living_stay_and_those_of_the_killed_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}of-another-program").mkdir()
    with scratch_folder() as first:
        assert first.stat().st_mode & 0o777 == 0o700
        env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
        assert subprocess.run([sys.executable, "-c", KILLED], env=env).returncode == -9
        assert [path.name[:12] for path in tmp_path.glob("weft-killed*")] == ["weft-killed-"]
        with scratch_folder() as second:
            assert not list(tmp_path.glob("weft-killed*")) and first.exists() and second != first
        assert not second.exists()
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}of-another-program"]


def test_a_folder_that_is_still_written_to_is_removed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is gone is not waited for."""
    waits: list[float] = []
    monkeypatch.setattr(scratch.time, "sleep", waits.append)
    (tmp_path / "gone").mkdir()
    scratch._remove(tmp_path / "gone")
    assert not (tmp_path / "gone").exists() and waits == []
    (tmp_path / "busy").mkdir()
    tries: list[Path] = []
    remove = scratch.shutil.rmtree

    def busy(folder: Path, ignore_errors: bool) -> None:
        tries.append(folder)
        if len(tries) > 2:
            remove(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(scratch.shutil, "rmtree", busy)
    scratch._remove(tmp_path / "busy")
    assert not (tmp_path / "busy").exists() and len(tries) == 3 and len(waits) == 2
