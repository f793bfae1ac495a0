"""The part of `weft report` for runs of `weft rl`: charts, and samples over time. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import UserError
from weft.inference.records import EVALUATIONS, FOLDER, Answer, read_answers, rollout_files
from weft.observe.report.charts import Chart, Series, numeric
from weft.observe.report.pictures import pictures
from weft.observe.rollouts import ending, reward_text

if TYPE_CHECKING:
    from weft.observe.report.page import ReportedRun

# How many of the best and of the worst samples are shown, each of a different prompt.
_MAX_SAMPLES = 3
# Of samples over time: steps that are read, from the first to the last, and prompts that are shown.
_MOST_STEPS, _MOST_PROMPTS = 8, 4
# The middle of a long text is left out: characters kept of its beginning, of its end.
_KEPT_CHARACTERS = (3000, 1000)
_PHASES = "seconds/"


@dataclass(frozen=True)
class _GroupedChart:
    """A chart of several metrics of one run. keys: patterns of their names. held_out: a metric to add as a dashed line.
    least: the fewest metrics for which there is a chart."""

    chart: Chart
    keys: tuple[str, ...]
    held_out: str | None = None
    min_metrics: int = 1


_CHARTS = (
    _GroupedChart(
        Chart("Reward", "mean; mean of groups' deviations", noisy=True), ("reward", "reward_std"), "eval/reward"
    ),
    _GroupedChart(
        Chart("Rewards by function", "means, before weights", noisy=True), ("rewards/*/mean",), min_metrics=2
    ),
    _GroupedChart(Chart("Evaluation", "share of held-out prompts", percent=True), ("eval/accuracy", "eval/pass@*")),
    _GroupedChart(Chart("KL divergence", "nats per token", noisy=True), ("kl", "policy/kl_old")),
    _GroupedChart(Chart("Entropy", "nats per token", zero=True, noisy=True), ("entropy",)),
    _GroupedChart(
        Chart("Completion lengths", "tokens", zero=True, noisy=True),
        ("completions/mean_length", "completions/mean_terminated_length", "completions/min_length",
         "completions/max_length"),
        "eval/length",
    ),
    _GroupedChart(
        Chart("No signal, cut short", "share of groups; of samples", zero=True, noisy=True, percent=True),
        ("frac_reward_zero_std", "completions/clipped_ratio"),
    ),
    _GroupedChart(
        Chart("Clipped ratios", "share of tokens", zero=True, noisy=True, percent=True),
        ("clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean"),
    ),
    _GroupedChart(
        Chart("Engine and trainer: logprobs", "|log rho|, nats", log=True, noisy=True),
        ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
    ),
    _GroupedChart(
        Chart("Engine and trainer: ratio", "rho = old / rollout", noisy=True),
        ("sampling/importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/min",
         "sampling/importance_sampling_ratio/max"),
    ),
    _GroupedChart(Chart("Engine and trainer: KL", "nats per token", log=True, noisy=True), ("sampling/kl",)),
    _GroupedChart(
        Chart("Engine and trainer: what corrections leave", "shares", zero=True, noisy=True, percent=True),
        ("sampling/effective_sample_size", "sampling/clipped", "sampling/masked"),
    ),
    _GroupedChart(Chart("Staleness", "versions of the weights", zero=True), ("staleness/mean", "staleness/max")),
)  # fmt: skip


def is_rl(run: ReportedRun) -> bool:
    """Whether `weft rl` wrote the run: a line names a rollout step, or the config has the section rl."""
    return "rl" in run.config or any("rollout" in line for line in run.lines)


def rl_charts(runs: Sequence[ReportedRun]) -> tuple[list[Chart], set[str]]:
    """(charts, the metrics that they contain). For several runs, each chart has only the first metric that exists."""
    rl_runs = [run for run in runs if is_rl(run)]
    charts, used = [], set[str]()
    names = list(dict.fromkeys(key for run in rl_runs for line in run.lines for key in line))
    for group in _CHARTS:
        keys = [key for pattern in group.keys for key in names if fnmatchcase(key, pattern)]
        keys = [key for key in keys if any(run.has(key) for run in rl_runs)]
        if len(keys) < group.min_metrics:
            continue
        chart = group.chart
        if len(runs) > 1:
            keys = keys[:1]
            chart = replace(chart, unit=keys[0])
        used |= set(keys)
        series = _by_run(runs, keys[0]) if len(runs) > 1 else _by_key(runs[0], keys)
        if group.held_out and any(run.has(group.held_out) for run in runs):
            series += _held_out(runs, group.held_out, len(series))
            used.add(group.held_out)
        charts.append(replace(chart, series=series))
    if len(runs) == 1 and rl_runs:
        phases, keys = _phases(runs[0])
        charts += [phases] if phases.series else []
        used |= set(keys)
    return charts, used


def _by_key(run: ReportedRun, keys: Sequence[str]) -> list[Series]:
    return [Series(key, *run.points(key), colour=index) for index, key in enumerate(keys)]


def _by_run(runs: Sequence[ReportedRun], key: str) -> list[Series]:
    return [Series(run.name, *run.points(key), colour=index) for index, run in enumerate(runs) if run.has(key)]


def _held_out(runs: Sequence[ReportedRun], key: str, colour: int) -> list[Series]:
    """The held-out curve of each run: of several runs in the colour of the run, of one run in `colour`."""
    compared = len(runs) > 1
    return [
        Series(
            f"{run.name}, held out" if compared else f"held out ({key})",
            *run.points(key),
            colour=index if compared else colour,
            held_out=True,
        )
        for index, run in enumerate(runs)
        if run.has(key)
    ]


def _phases(run: ReportedRun) -> tuple[Chart, list[str]]:
    """(chart of the seconds of each phase of a rollout step, at the optimizer step that ended it; its metrics)."""
    lines = [line for line in run.lines if any(key.startswith(_PHASES) for key in line)]
    keys = list(dict.fromkeys(key for line in lines for key in line if key.startswith(_PHASES)))
    x = [float(line["step"]) for line in lines]
    series = [
        Series(key.removeprefix(_PHASES), x, [numeric(line.get(key)) for line in lines], colour=index)
        for index, key in enumerate(keys)
    ]
    return Chart("Rollout step by phase", "seconds per rollout step", series, stacked=True), keys


# ---------------------------------------------------------------- samples


def last_samples(folder: Path) -> dict[str, Any] | None:
    """The best and the worst samples of the last rollout step as text; None if no rollouts are recorded."""
    files = rollout_files(folder / FOLDER)
    if not files:
        return None
    step = max(files)
    best, worst = extremes(read_answers(files[step]), _MAX_SAMPLES)
    parts = [("best", best), ("worst", worst)]
    return {
        "step": step,
        "parts": [
            {"name": name, "samples": [_shown(answer) for answer in answers]} for name, answers in parts if answers
        ],
    }


def extremes(answers: Sequence[Answer], count: int) -> tuple[list[Answer], list[Answer]]:
    """(best, worst) answers, the most extreme first, each to a different prompt, without overlap."""
    ranked = sorted(
        (answer for answer in answers if answer.reward is not None),
        key=lambda answer: answer.reward or 0.0,
        reverse=True,
    )
    best = _of_other_prompts(ranked, count)
    best_ids = {id(answer) for answer in best}
    return best, _of_other_prompts([answer for answer in reversed(ranked) if id(answer) not in best_ids], count)


def _of_other_prompts(answers: Sequence[Answer], count: int) -> list[Answer]:
    """The first answer to each prompt, at most `count`."""
    firsts: dict[str, Answer] = {}
    for answer in answers:
        firsts.setdefault(answer.prompt_id, answer)
    return list(firsts.values())[:count]


def _shown(answer: Answer) -> dict[str, Any]:
    about = f"reward {reward_text(answer)}; {answer.length} tokens, {ending(answer)}"
    texts = {"prompt": _shortened(answer.prompt), "text": _shortened(answer.text), "about": about}
    return {**texts, "pictures": pictures(answer.images)}


def samples_over_time(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """How answers and rewards changed: of evaluations, whose prompts stay the same, and of rollouts. Where no prompt of
    the rollouts comes again, the first prompt of each step stands for them. notes: gets those of files that cannot be
    read."""
    parts = []
    for subfolder, unit, name in (
        (EVALUATIONS, "step", "Held-out prompts"),
        (FOLDER, "rollout step", "Training prompts"),
    ):
        files = rollout_files(folder / subfolder)
        groups = {}
        for step in evenly(list(files), _MOST_STEPS):
            try:
                groups[step] = _by_prompt(read_answers(files[step]))
            except UserError as error:
                notes.append(str(error))
        repeated = _most_frequent(groups) if len(groups) > 1 else []
        if repeated:
            prompts = [
                _changes({step: answers[text] for step, answers in groups.items() if text in answers}, unit)
                for text in repeated
            ]
            parts.append({"name": name, "prompts": prompts})
        elif subfolder == FOLDER and len(groups) > 1:
            firsts = {step: next(iter(answers.values())) for step, answers in groups.items() if answers}
            parts.append({"name": f"{name}: the first of each step", "prompts": [_changes(firsts, unit)]})
    return parts


def evenly(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, at about equal distances, with the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def _by_prompt(answers: Sequence[Answer]) -> dict[tuple[str, str], list[Answer]]:
    """(index in the data, text) -> the answers to a prompt, in order."""
    groups: dict[tuple[str, str], list[Answer]] = {}
    for answer in answers:
        groups.setdefault((answer.prompt_id.partition(".")[0], answer.prompt), []).append(answer)
    return groups


def _most_frequent(groups: Mapping[int, Mapping[tuple[str, str], Sequence[Answer]]]) -> list[tuple[str, str]]:
    """The prompts that occur in most steps, and in more than one, in their order."""
    counts = Counter(prompt for answers in groups.values() for prompt in answers)
    return [prompt for prompt, count in counts.most_common(_MOST_PROMPTS) if count > 1]


def _changes(answers: Mapping[int, Sequence[Answer]], unit: str) -> dict[str, Any]:
    """The first answer of each step, with its reward and the mean of all answers to the prompt. unit: of steps."""
    firsts = [samples[0] for samples in answers.values()]
    same = len({answer.prompt for answer in firsts}) == 1
    moments = []
    for step, samples in answers.items():
        rewards = [answer.reward for answer in samples if answer.reward is not None]
        mean = f"; mean of {len(rewards)}: {sum(rewards) / len(rewards):.3g}" if len(rewards) > 1 else ""
        about = f"reward {reward_text(samples[0])}{mean}"
        moment = {"when": f"{unit} {step:,}", "about": about, "text": _shortened(samples[0].text)}
        moments.append(moment if same else {**moment, "prompt": _shortened(samples[0].prompt)})
    if not same:
        return {"prompt": "", "pictures": [], "moments": moments}
    return {"prompt": _shortened(firsts[0].prompt), "pictures": pictures(firsts[0].images), "moments": moments}


def _shortened(text: str) -> str:
    first, last = _KEPT_CHARACTERS
    left_out = len(text) - first - last
    return text if left_out <= 0 else f"{text[:first]}\n[{left_out:,} characters left out]\n{text[-last:]}"
