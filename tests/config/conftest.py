"""Files that configs of these tests name."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model `m` and data `d.jsonl`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "model.safetensors").write_text("")
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return tmp_path
