"""The part of `weft report` for runs of `weft rl`: charts, and samples of the last rollout step. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.report.charts import Chart, Series, numeric
from weft.report.pictures import pictures
from weft.report.rollouts import ending, reward_text
from weft.rollout.records import FOLDER, read_rollouts, rollout_files
from weft.rollout.types import Group, Sample

if TYPE_CHECKING:
    from weft.report.page import ReportedRun

# How many of the best and of the worst samples are shown, each of a different prompt.
_MOST_SAMPLES = 3
# The middle of a long text is left out: characters kept of its beginning, of its end.
_KEPT = (3000, 1000)
_PHASES = "seconds/"


@dataclass(frozen=True)
class _Together:
    """A chart of several metrics of one run. keys: patterns of their names. held_out: a metric to add as a dashed line.
    least: the fewest metrics for which there is a chart."""

    chart: Chart
    keys: tuple[str, ...]
    held_out: str | None = None
    least: int = 1


_CHARTS = (
    _Together(Chart("Reward", "mean; mean of groups' deviations", noisy=True), ("reward", "reward_std"), "eval/reward"),
    _Together(Chart("Rewards by function", "means, before weights", noisy=True), ("rewards/*/mean",), least=2),
    _Together(Chart("Evaluation", "share of held-out prompts", percent=True), ("eval/accuracy", "eval/pass@*")),
    _Together(Chart("KL divergence", "nats per token", noisy=True), ("kl", "policy/kl_old")),
    _Together(Chart("Entropy", "nats per token", zero=True, noisy=True), ("entropy",)),
    _Together(
        Chart("Completion lengths", "tokens", zero=True, noisy=True),
        ("completions/mean_length", "completions/mean_terminated_length", "completions/min_length",
         "completions/max_length"),
        "eval/length",
    ),
    _Together(
        Chart("No signal, cut short", "share of groups; of samples", zero=True, noisy=True, percent=True),
        ("frac_reward_zero_std", "completions/clipped_ratio"),
    ),
    _Together(
        Chart("Clipped ratios", "share of tokens", zero=True, noisy=True, percent=True),
        ("clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean"),
    ),
    _Together(
        Chart("Engine and trainer: logprobs", "|log rho|, nats", log=True, noisy=True),
        ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
    ),
    _Together(
        Chart("Engine and trainer: ratio", "rho = old / rollout", noisy=True),
        ("sampling/importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/min",
         "sampling/importance_sampling_ratio/max"),
    ),
    _Together(Chart("Engine and trainer: KL", "nats per token", log=True, noisy=True), ("sampling/kl",)),
    _Together(
        Chart("Engine and trainer: what corrections leave", "shares", zero=True, noisy=True, percent=True),
        ("sampling/effective_sample_size", "sampling/clipped", "sampling/masked"),
    ),
    _Together(Chart("Staleness", "versions of the weights", zero=True), ("staleness/mean", "staleness/max")),
)  # fmt: skip


def is_rl(run: ReportedRun) -> bool:
    """Whether `weft rl` wrote the run: a line names a rollout step, or the config has the section rl."""
    return "rl" in run.config or any("rollout" in line for line in run.lines)


def rl_charts(runs: Sequence[ReportedRun]) -> tuple[list[Chart], set[str]]:
    """(charts, the metrics that they contain). For several runs, each chart has only the first metric that exists."""
    ours = [run for run in runs if is_rl(run)]
    found, used = [], set[str]()
    names = list(dict.fromkeys(key for run in ours for line in run.lines for key in line))
    for together in _CHARTS:
        keys = [key for pattern in together.keys for key in names if fnmatchcase(key, pattern)]
        keys = [key for key in keys if any(run.has(key) for run in ours)]
        if len(keys) < together.least:
            continue
        chart = together.chart
        if len(runs) > 1:
            keys = keys[:1]
            chart = replace(chart, unit=keys[0])
        used |= set(keys)
        series = _by_run(runs, keys[0]) if len(runs) > 1 else _by_key(runs[0], keys)
        if together.held_out and any(run.has(together.held_out) for run in runs):
            series += _held_out(runs, together.held_out, len(series))
            used.add(together.held_out)
        found.append(replace(chart, series=series))
    if len(runs) == 1 and ours:
        phases, keys = _phases(runs[0])
        found += [phases] if phases.series else []
        used |= set(keys)
    return found, used


def _by_key(run: ReportedRun, keys: Sequence[str]) -> list[Series]:
    return [Series(key, *run.points(key), colour=place) for place, key in enumerate(keys)]


def _by_run(runs: Sequence[ReportedRun], key: str) -> list[Series]:
    return [Series(run.name, *run.points(key), colour=place) for place, run in enumerate(runs) if run.has(key)]


def _held_out(runs: Sequence[ReportedRun], key: str, colour: int) -> list[Series]:
    """The held-out curve of each run: of several runs in the colour of the run, of one run in `colour`."""
    several = len(runs) > 1
    return [
        Series(
            f"{run.name}, held out" if several else f"held out ({key})",
            *run.points(key),
            colour=place if several else colour,
            held_out=True,
        )
        for place, run in enumerate(runs)
        if run.has(key)
    ]


def _phases(run: ReportedRun) -> tuple[Chart, list[str]]:
    """(chart of the seconds of each phase of a rollout step, at the optimizer step that ended it; its metrics)."""
    lines = [line for line in run.lines if any(key.startswith(_PHASES) for key in line)]
    keys = list(dict.fromkeys(key for line in lines for key in line if key.startswith(_PHASES)))
    x = [float(line["step"]) for line in lines]
    series = [
        Series(key.removeprefix(_PHASES), x, [numeric(line.get(key)) for line in lines], colour=place)
        for place, key in enumerate(keys)
    ]
    return Chart("Rollout step by phase", "seconds per rollout step", series, stacked=True), keys


# ---------------------------------------------------------------- samples


def last_samples(folder: Path) -> dict[str, Any] | None:
    """The best and the worst samples of the last rollout step as text; None if no rollouts are recorded."""
    files = rollout_files(folder / FOLDER)
    if not files:
        return None
    step = max(files)
    best, worst = extremes(read_rollouts(files[step]), _MOST_SAMPLES)
    parts = [("best", best), ("worst", worst)]
    return {
        "step": step,
        "parts": [
            {"name": name, "samples": [_shown(sample) for sample in samples]} for name, samples in parts if samples
        ],
    }


def extremes(groups: Sequence[Group], most: int) -> tuple[list[Sample], list[Sample]]:
    """(best, worst) samples, the most extreme first, each of a different prompt, without overlap."""
    known = [sample for group in groups for sample in group.samples if sample.reward is not None]
    ranked = sorted(known, key=lambda sample: sample.reward or 0.0, reverse=True)
    best = _of_other_prompts(ranked, most)
    taken = {sample.id for sample in best}
    return best, _of_other_prompts([sample for sample in reversed(ranked) if sample.id not in taken], most)


def _of_other_prompts(samples: Sequence[Sample], most: int) -> list[Sample]:
    """The first sample of each prompt, at most `most`."""
    found: dict[str, Sample] = {}
    for sample in samples:
        found.setdefault(sample.prompt.id, sample)
    return list(found.values())[:most]


def _shown(sample: Sample) -> dict[str, Any]:
    about = f"reward {reward_text(sample)}; {sample.length} tokens, {ending(sample)}"
    texts = {"prompt": _shortened(sample.prompt.text), "text": _shortened(sample.text), "about": about}
    return {**texts, "pictures": pictures(sample.prompt.columns.get("images"))}


def _shortened(text: str) -> str:
    first, last = _KEPT
    left_out = len(text) - first - last
    return text if left_out <= 0 else f"{text[:first]}\n[{left_out:,} characters left out]\n{text[-last:]}"
