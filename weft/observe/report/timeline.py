"""When samples were generated, rewarded and trained: timelines of `weft report` as SVG. Imports no torch.

The first timeline has a row for each engine, over the last rollout steps. The second has a row for each of the slowest
groups of the last step, or of its samples of agents and environments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.inference.records import FOLDER, SampleLife, read_lives, rollout_files
from weft.observe.report.svg import ticks

_MAX_STEPS, _MAX_ROWS = 5, 40
_WIDTH, _LEFT, _ROW, _TOP = 1100.0, 170.0, 17.0, 6.0
# The colour of each phase of a sample.
PARTS = {"waits for an engine": 4, "generated": 0, "environment or agent": 1, "rewards": 2, "until trained": 7}


@dataclass(frozen=True)
class _Bar:
    began: float
    ended: float
    part: str


def timelines(folder: Path, notes: list[str]) -> dict[str, Any] | None:
    """The SVGs of both timelines, for the template; None if no file has times. notes: unreadable files are added."""
    steps: dict[int, list[SampleLife]] = {}
    files = rollout_files(folder / FOLDER)
    for step in sorted(files)[-_MAX_STEPS:]:
        try:
            if lives := read_lives(files[step]):
                steps[step] = lives
        except UserError as error:
            notes.append(str(error))
    if not steps:
        return None
    last, lives = list(steps.items())[-1]
    rows = slowest(lives)
    origin = min(life.queued for life in lives)
    return {
        "first": min(steps),
        "step": last,
        "engines": _engines(steps),
        "samples": _svg([(_name(group), _bars(group[0])) for group in rows], origin, ()),
        "shown": len(rows),
        "total": len(_merged(lives)),
        "keys": [item for item in PARTS.items() if any(bar.part == item[0] for g in rows for bar in _bars(g[0]))],
    }


def slowest(lives: Sequence[SampleLife]) -> list[list[SampleLife]]:
    """The samples that took longest from queue to reward, by engine and start; samples of one request are together."""
    groups = sorted(_merged(lives), key=lambda group: group[0].queued - group[0].rewarded)[:_MAX_ROWS]
    return sorted(groups, key=lambda group: (group[0].calls[0].engine, group[0].calls[0].began, group[0].name))


def _merged(lives: Sequence[SampleLife]) -> list[list[SampleLife]]:
    groups: dict[Any, list[SampleLife]] = {}
    for life in lives:
        groups.setdefault((life.prompt_id, life.calls), []).append(life)
    return list(groups.values())


def _name(group: Sequence[SampleLife]) -> str:
    first = group[0]
    name = f"sample {first.name}" if len(group) == 1 else f"prompt {first.prompt_id} x {len(group)}"
    return f"engine {first.calls[0].engine}: {name}"


def _bars(life: SampleLife) -> list[_Bar]:
    bars, start = [], life.queued
    for index, call in enumerate(life.calls):
        bars.append(_Bar(start, call.queued, "environment or agent" if index else "waits for an engine"))
        bars += [_Bar(call.queued, call.began, "waits for an engine"), _Bar(call.began, call.ended, "generated")]
        start = call.ended
    bars += [_Bar(start, life.ended, "environment or agent"), _Bar(life.ended, life.rewarded, "rewards")]
    bars += [] if life.trained is None else [_Bar(life.rewarded, life.trained, "until trained")]
    return [bar for bar in bars if bar.ended > bar.began]


def _engines(steps: dict[int, list[SampleLife]]) -> str:
    """A row per engine with the intervals in which it had requests, and a line at the end of each step's training."""
    spans: dict[int, set[tuple[float, float]]] = {}
    for lives in steps.values():
        for life in lives:
            for call in life.calls:
                spans.setdefault(call.engine, set()).add((call.began, call.ended))
    rows = [
        (f"engine {engine}", [_Bar(began, ended, "generated") for began, ended in union(spans[engine])])
        for engine in sorted(spans)
    ]
    origin = min(life.queued for lives in steps.values() for life in lives)
    ends = {step: [life.trained for life in lives if life.trained is not None] for step, lives in steps.items()}
    return _svg(rows, origin, [(max(times), f"step {step}") for step, times in ends.items() if times])


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals as disjoint ones, in order."""
    merged: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if merged and began <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(ended, merged[-1][1]))
        else:
            merged.append((began, ended))
    return merged


def _svg(rows: Sequence[tuple[str, Sequence[_Bar]]], origin: float, marks: Sequence[tuple[float, str]]) -> str:
    """Rows of bars over the seconds since `origin`. marks: (time, text) of vertical lines."""
    last = max([bar.ended for _, bars in rows for bar in bars] + [time for time, _ in marks])
    length = max(last - origin, 1e-6)
    bottom, scale = _TOP + _ROW * len(rows), (_WIDTH - _LEFT - 14.0) / length
    parts = []
    for second in ticks(0.0, length, 8):
        x = _LEFT + second * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="row" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{second:g} s</text>')
    for index, (name, bars) in enumerate(rows):
        y = _TOP + _ROW * index
        parts.append(f'<text class="row" x="{_LEFT - 6}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        for bar in bars:
            x, width = _LEFT + (bar.began - origin) * scale, max((bar.ended - bar.began) * scale, 0.4)
            faint = ' opacity="0.3"' if bar.part == "until trained" else ""
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 4}"{faint} '
                f'fill="var(--c{PARTS[bar.part]})"><title>{bar.part} {bar.ended - bar.began:.2f} s</title></rect>'
            )
    for time, text in marks:
        x = _LEFT + (time - origin) * scale
        parts.append(f'<line class="cross" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="row" x="{x:.1f}" y="{bottom + 29}" text-anchor="end">{escape(text)}</text>')
    height = bottom + (34 if marks else 19)
    return f'<svg class="life" viewBox="0 0 {_WIDTH:g} {height:g}" role="img">{"".join(parts)}</svg>'
