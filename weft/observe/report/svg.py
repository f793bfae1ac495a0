"""Line charts and stacked areas as SVG, for page.py. Numbers in, text out; imports no torch.

A chart is drawn in a box of WIDTH x HEIGHT units, which the page scales. Colours are CSS variables --c0 to --c7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 640.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 12.0, 36.0
COLOURS = 8
# A longer series is drawn as means of at most this many buckets, over an area from the lowest to the highest value.
_MOST_POINTS = 800
# Series of up to this many points have a dot at each point.
_MARKED_TO = 40
# Noisy series of at least this many points have a smoothed line in front.
_SMOOTHED_FROM = 60
# Positive values that span more than this factor are drawn on a logarithmic scale if Chart.log allows it.
_LOG_FACTOR = 50.0

STEPS = "optimizer step"

Value = float | None


@dataclass(frozen=True)
class Series:
    """One curve: y over x; y is None if missing. held_out: drawn dashed."""

    name: str
    x: Sequence[float]
    y: Sequence[Value]
    colour: int = 0
    held_out: bool = False

    @property
    def is_zero(self) -> bool:
        """Whether all values are zero, and there is at least one."""
        return any(value is not None for value in self.y) and not any(self.y)


@dataclass(frozen=True)
class Chart:
    """One chart. unit: of the values. zero: the y axis includes 0. log: the y axis may be logarithmic. noisy: long
    series are smoothed. stacked: series are stacked areas. percent: values are shares. marks: x of skipped steps.
    over: the quantity on the x axis; STEPS are whole numbers."""

    title: str
    unit: str
    series: Sequence[Series] = ()
    zero: bool = False
    log: bool = False
    noisy: bool = False
    stacked: bool = False
    percent: bool = False
    marks: Sequence[float] = ()
    over: str = STEPS


@dataclass(frozen=True)
class _Bucket:
    x: float
    mean: Value
    low: Value
    high: Value


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    pixel_low: float
    pixel_high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, position = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        share = (position - low) / (high - low) if high > low else 0.5
        return self.pixel_low + share * (self.pixel_high - self.pixel_low)


def numeric(value: object) -> Value:
    """A value of metrics.jsonl as a float; None if it is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def draw(chart: Chart) -> tuple[str, dict[str, Any]]:
    """(SVG, the data with which the page shows values under the pointer). data["base"]: the number that is subtracted
    from the numbers on the y axis; "" for none."""
    reduced = [(series, _buckets(series)) for series in chart.series]
    tops = _stack([buckets for _, buckets in reduced]) if chart.stacked else []
    steps = [x for series in chart.series for x in series.x]
    low, high = (min(steps), max(steps)) if steps else (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    x = _Scale(low, high, LEFT, WIDTH - RIGHT)
    y = _y_scale(chart, [buckets for _, buckets in reduced], tops)
    values = _log_ticks(y.low, y.high) if y.log else ticks(y.low, y.high)
    texts, base = axis_texts(values, chart.percent)
    parts = [_grid(chart, x, y, dict(zip(values, texts, strict=True)))]
    spread = max(abs(y.low), abs(y.high)) / (y.high - y.low)
    digits = min(15, 4 + math.ceil(math.log10(spread))) if base else 4  # of values under the pointer
    if chart.stacked:
        parts += _areas(reduced, tops, x, y)
    else:
        for series, buckets in reduced:
            parts.append(_line(series, buckets, x, y, chart.noisy))
    bottom = HEIGHT - BOTTOM
    parts += [f'<path class="skipped" d="M{x(step):.1f} {bottom - 8}l4.5 8h-9z"/>' for step in chart.marks]
    parts.append(f'<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/>')
    label = escape(f"{chart.title}, {chart.unit}, by {chart.over}", quote=True)
    svg = f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return svg, {
        "x": [x.low, x.high],
        "over": chart.over,
        "percent": chart.percent,
        "base": base,
        "digits": digits,
        "series": [
            {
                "name": series.name,
                "colour": series.colour % COLOURS,
                "x": [bucket.x for bucket in buckets],
                "y": [None if bucket.mean is None else float(f"{bucket.mean:.{digits + 1}g}") for bucket in buckets],
            }
            for series, buckets in reduced
        ],
    }


def logarithmic(chart: Chart) -> bool:
    """Whether the axis of this chart is logarithmic."""
    values = [value for series in chart.series for value in series.y if value is not None]
    return chart.log and bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_FACTOR


def number(value: float, percent: bool = False, digits: int = 4) -> str:
    """A value on an axis: `0.5`, `12k`, `1e-5`, `40%`."""
    if percent:
        return "0" if value == 0 else f"{number(100 * value, digits=digits - 1)}%"
    size = abs(value)
    for unit, power in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= 10 * power or (power > 1e3 and size >= power):
            return f"{value / power:.{digits}g}{unit}"
    if size and size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.{digits}g}"


def axis_texts(values: Sequence[float], percent: bool) -> tuple[list[str], str]:
    """(The numbers as text, ""). For numbers with the same first four digits, such as ratios of similar policies:
    (differences from a round number among them, that number)."""
    texts = [number(value, percent) for value in values]
    if len(set(texts)) == len(texts):
        return texts, ""
    middle = values[len(values) // 2]
    rounded = (float(f"{middle:.{digits}g}") for digits in range(1, 16))
    base = next((candidate for candidate in rounded if values[0] <= candidate <= values[-1]), middle)
    differences = [float(f"{value - base:.3g}") if abs(value - base) > 1e-15 * abs(base) else 0.0 for value in values]
    signed = [f"{'+' * (difference > 0)}{number(difference, percent)}" for difference in differences]
    return signed, number(base, percent, 15)


# ---------------------------------------------------------------- reducing


def _buckets(series: Series) -> list[_Bucket]:
    """The points of a short series; means over equally many points of a long one."""
    count = len(series.x)
    if count <= _MOST_POINTS:
        return [_Bucket(x, y, y, y) for x, y in zip(series.x, series.y, strict=True)]
    size = -(-count // _MOST_POINTS)
    buckets = []
    for start in range(0, count, size):
        values = [value for value in series.y[start : start + size] if value is not None]
        middle = series.x[min(start + size // 2, count - 1)]
        mean = sum(values) / len(values) if values else None
        buckets.append(_Bucket(middle, mean, min(values, default=None), max(values, default=None)))
    return buckets


def _smoothed(buckets: Sequence[_Bucket]) -> list[Value]:
    """A centred moving average, which does not lag; the window shrinks at both ends. None stays None."""
    reach = max(3, len(buckets) // 50)
    totals, counts = [0.0], [0]
    for bucket in buckets:
        totals.append(totals[-1] + (bucket.mean or 0.0))
        counts.append(counts[-1] + (bucket.mean is not None))
    smoothed: list[Value] = []
    for index, bucket in enumerate(buckets):
        near = min(reach, index, len(buckets) - 1 - index)
        low, high = index - near, index + near + 1
        mean = (totals[high] - totals[low]) / max(1, counts[high] - counts[low])
        smoothed.append(None if bucket.mean is None else mean)
    return smoothed


def _stack(layers: Sequence[Sequence[_Bucket]]) -> list[list[float]]:
    """The upper edge of every layer, at every point."""
    tops: list[list[float]] = []
    below = [0.0] * (len(layers[0]) if layers else 0)
    for layer in layers:
        below = [under + (bucket.mean or 0.0) for under, bucket in zip(below, layer, strict=True)]
        tops.append(below)
    return tops


# ---------------------------------------------------------------- axes


def _y_scale(chart: Chart, layers: Sequence[Sequence[_Bucket]], tops: Sequence[Sequence[float]]) -> _Scale:
    values = [v for layer in layers for bucket in layer for v in (bucket.low, bucket.high) if v is not None]
    if chart.stacked:
        values = [0.0, *(top for line in tops for top in line)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if logarithmic(chart):
        return _Scale(low / 1.15, high * 1.15, HEIGHT - BOTTOM, TOP, log=True)
    if chart.zero or chart.stacked:
        low = min(low, 0.0)
    if low == high:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
    room = 0.05 * (high - low)
    return _Scale(low if low == 0 else low - room, high + room, HEIGHT - BOTTOM, TOP)


def ticks(low: float, high: float, max_ticks: int = 5, *, integers: bool = False) -> list[float]:
    """Round numbers at equal distances within a range, at most `max_ticks` + 1. integers: integers only."""
    raw = max((high - low) / max_ticks, 1.0 if integers else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    steps = [factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0)]
    step = next(step for step in steps if step >= raw * 0.999999 and (not integers or step == round(step)))
    first = math.ceil(low / step - 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1.0, 2.0, 5.0) if math.log10(high / low) < 3 else (1.0,)
    return [v for power in powers for factor in factors if low <= (v := factor * 10.0**power) <= high]


def _grid(chart: Chart, x: _Scale, y: _Scale, texts: Mapping[float, str]) -> str:
    """The lines and numbers of both axes. texts: value -> its text on the y axis."""
    parts = []
    for value, text in texts.items():
        position = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{position:.1f}" y2="{position:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{position + 4:.1f}" text-anchor="end">{text}</text>')
    bottom = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for index, value in enumerate(ticks(x.low, x.high, 8, integers=chart.over == STEPS)):
        position, text = x(value), f"{value:,.10g}"
        room = 3.5 * len(text)  # half of the text's width
        position = min(position, WIDTH - room)
        kind = "tick step between" if index % 2 else "tick step"
        parts.append(f'<text class="{kind}" x="{position:.1f}" y="{bottom + 15}" text-anchor="middle">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(chart.over)}</text>')
    return "".join(parts)


# ---------------------------------------------------------------- drawing


def _line(series: Series, buckets: Sequence[_Bucket], x: _Scale, y: _Scale, noisy: bool) -> str:
    colour = f"var(--c{series.colour % COLOURS})"
    parts = []
    if any(bucket.low != bucket.high for bucket in buckets):
        edge = [(x(b.x), y(b.high)) for b in buckets if b.high is not None]
        edge += [(x(b.x), y(b.low)) for b in reversed(buckets) if b.low is not None]
        parts.append(f'<polygon points="{_points(edge)}" fill="{colour}" opacity="0.15"/>')
    means = [bucket.mean for bucket in buckets]
    smoothed = noisy and not series.held_out and len(buckets) >= _SMOOTHED_FROM
    style = ' opacity="0.35"' if smoothed else ' stroke-dasharray="5 3"' if series.held_out else ""
    parts.append(_path(buckets, means, x, y, f'stroke="{colour}"{style}'))
    if smoothed:
        parts.append(_path(buckets, _smoothed(buckets), x, y, f'stroke="{colour}" stroke-width="2.2"'))
    if len(buckets) <= _MARKED_TO:
        parts += [f'<circle cx="{x(b.x):.1f}" cy="{y(b.mean):.1f}" r="3" fill="{colour}"/>'
                  for b in buckets if b.mean is not None]  # fmt: skip
    return "".join(parts)


def _path(buckets: Sequence[_Bucket], values: Sequence[Value], x: _Scale, y: _Scale, style: str) -> str:
    """One path, with a gap at missing values."""
    commands, drawing = [], False
    for bucket, value in zip(buckets, values, strict=True):
        if value is None:
            drawing = False
            continue
        commands.append(f"{'L' if drawing else 'M'}{x(bucket.x):.1f} {y(value):.1f}")
        drawing = True
    return f'<path class="line" d="{"".join(commands)}" {style}/>'


def _areas(
    reduced: Sequence[tuple[Series, Sequence[_Bucket]]], tops: Sequence[Sequence[float]], x: _Scale, y: _Scale
) -> list[str]:
    parts, below = [], [0.0] * (len(tops[0]) if tops else 0)
    for (series, buckets), top in zip(reduced, tops, strict=True):
        edge = [(x(b.x), y(v)) for b, v in zip(buckets, top, strict=True)]
        edge += [(x(b.x), y(v)) for b, v in reversed(list(zip(buckets, below, strict=True)))]
        parts.append(f'<polygon class="area" points="{_points(edge)}" fill="var(--c{series.colour % COLOURS})"/>')
        below = list(top)
    return parts


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
