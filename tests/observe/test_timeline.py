"""The timeline of samples in `weft report`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from weft.inference.base import CallTimes
from weft.inference.records import read_lives, write_rollouts
from weft.inference.types import Prompt, Sample, SampleGroup, SampleTimes
from weft.observe.report.timeline import slowest, timelines, union

START = 1.7e9


def sample(prompt: Prompt, number: int, times: SampleTimes) -> Sample:
    empty = np.zeros(2, np.float32)
    return Sample(prompt, number, np.ones(2, np.int64), empty > 0, empty, np.full(2, -1, np.int32), "end", times=times)


def plain(index: int, engine: int, began: float, ended: float) -> SampleGroup:
    """A group of two samples of one request."""
    prompt = Prompt(index, 0, (1,), "p")
    call = CallTimes(engine, START, START + began, START + ended)
    times = [SampleTimes(START, START + ended, START + ended + 1, START + 100, [call]) for _ in range(2)]
    return SampleGroup(prompt, [sample(prompt, number, each) for number, each in enumerate(times)])


def test_rows_and_bars(tmp_path: Path) -> None:
    """Requests are rows, by engine; the parts of a sample with an environment are in proportion to their seconds."""
    prompt = Prompt(9, 0, (1,), "p")
    calls = [CallTimes(0, START, START + 10, START + 30), CallTimes(1, START + 60, START + 60, START + 70)]
    played = sample(prompt, 0, SampleTimes(START, START + 75, START + 80, START + 100, calls))
    lost = sample(prompt, 1, SampleTimes(START))  # no engine answered
    write_rollouts(tmp_path, 3, [plain(5, 1, 0, 40), SampleGroup(prompt, [played, lost]), plain(6, 0, 20, 50)])
    (file,) = (tmp_path / "rollouts").iterdir()
    lives = read_lives(file)
    assert [life.name for life in lives] == ["5.0/0", "5.0/1", "9.0/0", "6.0/0", "6.0/1"]
    assert lives[2].calls == tuple(calls) and lives[2].trained == START + 100
    notes: list[str] = []
    drawn = timelines(tmp_path, notes)
    assert drawn is not None and not notes and drawn["shown"] == drawn["total"] == 3
    rows = re.findall(r">(engine [^<]*)<", drawn["samples"])
    assert rows == ["engine 0: sample 9.0/0", "engine 0: prompt 6.0 x 2", "engine 1: prompt 5.0 x 2"]
    first = drawn["samples"].split("engine 0: prompt")[0]
    bars = re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)".*?<title>(.*?) ([\d.]+) s<', first)
    expected = [("waits for an engine", 10), ("generated", 20), ("environment or agent", 30), ("generated", 10),
                ("environment or agent", 5), ("rewards", 5), ("until trained", 20)]  # fmt: skip
    assert [(name, float(seconds)) for _, name, seconds in bars] == expected
    scale = float(bars[0][0]) / 10
    assert all(abs(float(width) - scale * float(seconds)) < 0.2 for width, _, seconds in bars)
    assert re.findall(r">(engine \d|step \d)<", drawn["engines"]) == ["engine 0", "engine 1", "step 3"]


def test_the_slowest_of_thousands(tmp_path: Path) -> None:
    groups = [plain(index, index % 3, 0, 1 + index) for index in range(1000)]
    write_rollouts(tmp_path, 1, groups)
    rows = slowest(read_lives(tmp_path / "rollouts/step-000001.parquet"))
    assert {int(row[0].prompt_id.partition(".")[0]) for row in rows} == set(range(960, 1000))
    assert [row[0].calls[0].engine for row in rows] == sorted(row[0].calls[0].engine for row in rows)
    drawn = timelines(tmp_path, [])
    assert drawn is not None and drawn["total"] == 1000 and len(drawn["samples"]) < 40_000


def test_runs_without_times_have_none(tmp_path: Path) -> None:
    assert timelines(tmp_path, []) is None
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step-000001.parquet").write_bytes(b"nothing")
    notes: list[str] = []
    assert timelines(tmp_path, notes) is None and "contains no rollouts of weft" in notes[0]


def test_union_of_spans() -> None:
    assert union([(3, 4), (0, 1), (0.5, 2), (4, 5), (7, 8), (7, 7.5)]) == [(0, 2), (3, 5), (7, 8)]
