"""`weft watch` and `weft report --follow`: a run that goes on, has ended, failed, or was killed, from its files."""

from __future__ import annotations

import fcntl
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.observe.test_report import make_run
from weft import cli
from weft.files import LOCK
from weft.observe.report import read
from weft.observe.report.read import MetricsTail
from weft.observe.watch import curve, last_values, phase_shares


def watched(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["watch", str(run)]) == 0
    return re.sub(r"[ \n]+", " ", capsys.readouterr().out)


def make_rl_run(folder: Path, end: dict[str, str] | None) -> Path:
    """Five rollout steps of 4 x 2 samples, of which one is not trained in each, without a summary."""
    folder.mkdir()
    lines = [
        {
            "step": step, "rollout": step, "reward": step / 10, "staleness/mean": 0.5, "rollout/untrained": 1.0,
            "seconds/generate": 6.0, "seconds/train": 2.0, "engine_time/weights": 0.1,
            "engine_time/generate": 0.1 * step,
            "engine_time/prompts": 0.9 - 0.1 * step, "rollout/engine_restarts": float(step == 3),
        }
        for step in range(1, 6)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "re')
    config = {"rl": {"prompts_per_step": 4, "group_size": 2}, "train": {"steps": 9}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    started = {"started": "2026-01-01T00:00:00+00:00", "step": 0, "command": "weft rl"}
    (folder / "starts.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [started, *([end] if end else [])])
    )
    return folder


def test_what_is_seen_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has ended" in watched(make_run(tmp_path / "sft"), capsys)
    killed = watched(make_rl_run(tmp_path / "rl", None), capsys)
    assert "was killed: no end is recorded" in killed and "step 5 of 9; written" in killed
    assert "time generate 75%, train 25%" in killed
    assert "engines wait for prompts 60%, generate 30%, wait for weights 10%" in killed and "trainers" not in killed
    assert "samples 8 in a rollout step; 87.5% of the last 5 steps' are trained" in killed
    assert "reward 0.5 0.3 ▁▃▄▆█" in killed and "rollout/engine_restarts 0 0.2" in killed
    failed = make_rl_run(tmp_path / "failed", {"ended": "2026-01-01T01:00:00+00:00", "error": "ActorError: \x1b[2J"})
    assert "failed: ActorError: \\x1b[2J" in watched(failed, capsys)
    (failed / LOCK).touch()
    with (failed / LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "is running" in watched(failed, capsys)
        (failed / "metrics.jsonl").write_text("")
        assert "no step has ended yet" in watched(failed, capsys)
        (failed / "metrics.jsonl").unlink()  # as between a run's first files
        assert "no step has ended yet" in watched(failed, capsys)
    (failed / "metrics.jsonl").write_text("")
    assert cli.main(["watch", str(failed)]) == 2  # no step will come
    assert "nothing to show. The run failed: ActorError" in capsys.readouterr().err
    assert cli.main(["watch", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_growing_file_is_read_from_where_the_last_look_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def loads(text: str) -> Any:
        parsed.append(text)
        return json.loads(text)

    monkeypatch.setattr(read, "json", SimpleNamespace(loads=loads))
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)

    def look(text: str, mode: str = "a") -> list[float]:
        with path.open(mode) as lines:
            lines.write(text)
        parsed.clear()
        return [line["loss"] for line in tail.read()]

    assert look('{"step": 1, "loss": 1.5}\n{"step": 2, "lo') == [1.5]
    assert look('ss": 2.5}\nnonsense\n{"loss": 9}\n') == [1.5, 2.5]
    assert look('{"step": 3, "loss": 3.5}\n') == [1.5, 2.5, 3.5]
    assert [text for text in parsed if text] == ['{"step": 3, "loss": 3.5}']  # what was appended, and nothing else
    assert look("") == [1.5, 2.5, 3.5] and not any(parsed)
    # A resumed run cuts the file, and may have grown beyond where the last look ended before the next one.
    assert look('{"step": 1, "loss": 1.5}\n{"step": 2, "loss": 7.5}\n', "w") == [1.5, 7.5]
    assert look("".join(f'{{"step": {n}, "loss": {n}}}\n' for n in range(1, 99)), "w") == [*range(1, 99)]
    other = tmp_path / "other"
    other.write_text('{"step": 1, "loss": 4.5}\n')
    other.replace(path)
    assert look("") == [4.5]


def test_shares_and_curves() -> None:
    assert phase_shares([{"loss": 1.0}]) == {}
    shares = phase_shares([{"seconds/train": 1.0}, {"seconds/train": 2.0, "seconds/generate": 9.0}])
    assert shares == {"generate": 0.75, "train": 0.25} and [*shares] == ["generate", "train"]
    assert last_values([{"a": 1}, {"a": None}, {}, {"a": 2}, {"b": 3}, {"a": 4}], "a", 2) == [2.0, 4.0]
    assert curve([1.0, 1.0]) == "▁▁" and curve([0.0, 3.5, 7.0]) == "▁▅█"


def test_a_page_follows_a_run_until_it_ends(tmp_path: Path) -> None:
    run = make_rl_run(tmp_path / "rl", None)
    page = run / "report.html"
    (run / LOCK).touch()
    metrics = (run / "metrics.jsonl").rename(run / "later")
    with (run / LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        following = threading.Thread(target=cli.main, args=[["report", str(run), "--follow", "--every", "1"]])
        following.start()
        time.sleep(0.5)
        assert following.is_alive()  # no step has ended yet
        metrics.rename(run / "metrics.jsonl")
        deadline = time.monotonic() + 60
        while not page.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert '<meta http-equiv="refresh" content="1">' in page.read_text()
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write('ward": 0.75}\n{"step": 7, "reward": 0.625}\n')
        with (run / "starts.jsonl").open("a") as starts:
            starts.write(json.dumps({"ended": "2026-01-01T01:00:00+00:00", "error": ""}) + "\n")
    following.join(60)
    assert not following.is_alive()
    text = page.read_text()
    assert "http-equiv" not in text and "0.625" in text
