"""The part of `weft report` for runs of `weft rl`: charts, and samples over time. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import UserError
from weft.report.charts import Chart, Series, numeric
from weft.report.pictures import pictures
from weft.report.rollouts import ending, reward_text
from weft.rollout.records import EVALUATIONS, FOLDER, Answer, read_answers, rollout_files

if TYPE_CHECKING:
    from weft.report.page import ReportedRun

# How many of the best and of the worst samples are shown, each of a different prompt.
_MOST_SAMPLES = 3
# Of samples over time: steps that are read, from the first to the last, and prompts that are shown.
_MOST_STEPS, _MOST_PROMPTS = 8, 4
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
    best, worst = extremes(read_answers(files[step]), _MOST_SAMPLES)
    parts = [("best", best), ("worst", worst)]
    return {
        "step": step,
        "parts": [{"name": name, "samples": [_shown(one) for one in answers]} for name, answers in parts if answers],
    }


def extremes(answers: Sequence[Answer], most: int) -> tuple[list[Answer], list[Answer]]:
    """(best, worst) answers, the most extreme first, each to a different prompt, without overlap."""
    ranked = sorted((one for one in answers if one.reward is not None), key=lambda one: one.reward or 0.0, reverse=True)
    best = _of_other_prompts(ranked, most)
    taken = {id(one) for one in best}
    return best, _of_other_prompts([one for one in reversed(ranked) if id(one) not in taken], most)


def _of_other_prompts(answers: Sequence[Answer], most: int) -> list[Answer]:
    """The first answer to each prompt, at most `most`."""
    found: dict[str, Answer] = {}
    for one in answers:
        found.setdefault(one.prompt_id, one)
    return list(found.values())[:most]


def _shown(answer: Answer) -> dict[str, Any]:
    about = f"reward {reward_text(answer)}; {answer.length} tokens, {ending(answer)}"
    texts = {"prompt": _shortened(answer.prompt), "text": _shortened(answer.text), "about": about}
    return {**texts, "pictures": pictures(answer.images)}


def samples_over_time(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """How answers and rewards changed: of evaluations, whose prompts stay the same, and of rollouts. Where no prompt of
    the rollouts comes again, the first prompt of each step stands for them. notes: gets those of files that cannot be
    read."""
    found = []
    for into, unit, name in ((EVALUATIONS, "step", "Held-out prompts"), (FOLDER, "rollout step", "Training prompts")):
        files = rollout_files(folder / into)
        groups = {}
        for step in evenly(list(files), _MOST_STEPS):
            try:
                groups[step] = _by_prompt(read_answers(files[step]))
            except UserError as error:
                notes.append(str(error))
        again = _most_frequent(groups) if len(groups) > 1 else []
        if again:
            prompts = [
                _changes({step: own[text] for step, own in groups.items() if text in own}, unit) for text in again
            ]
            found.append({"name": name, "prompts": prompts})
        elif into == FOLDER and len(groups) > 1:
            firsts = {step: next(iter(own.values())) for step, own in groups.items() if own}
            found.append({"name": f"{name}: the first of each step", "prompts": [_changes(firsts, unit)]})
    return found


def evenly(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, at about equal distances, with the first and the last."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def _by_prompt(answers: Sequence[Answer]) -> dict[tuple[str, str], list[Answer]]:
    """(index in the data, text) -> the answers to a prompt, in order."""
    found: dict[tuple[str, str], list[Answer]] = {}
    for one in answers:
        found.setdefault((one.prompt_id.partition(".")[0], one.prompt), []).append(one)
    return found


def _most_frequent(groups: Mapping[int, Mapping[tuple[str, str], Sequence[Answer]]]) -> list[tuple[str, str]]:
    """The prompts that occur in most steps, and in more than one, in their order."""
    counts = Counter(prompt for own in groups.values() for prompt in own)
    return [prompt for prompt, count in counts.most_common(_MOST_PROMPTS) if count > 1]


def _changes(answers: Mapping[int, Sequence[Answer]], unit: str) -> dict[str, Any]:
    """The first answer of each step, with its reward and the mean of all answers to the prompt. unit: of steps."""
    firsts = [own[0] for own in answers.values()]
    same = len({one.prompt for one in firsts}) == 1
    moments = []
    for step, own in answers.items():
        rewards = [one.reward for one in own if one.reward is not None]
        mean = f"; mean of {len(rewards)}: {sum(rewards) / len(rewards):.3g}" if len(rewards) > 1 else ""
        about = f"reward {reward_text(own[0])}{mean}"
        moment = {"when": f"{unit} {step:,}", "about": about, "text": _shortened(own[0].text)}
        moments.append(moment if same else {**moment, "prompt": _shortened(own[0].prompt)})
    if not same:
        return {"prompt": "", "pictures": [], "moments": moments}
    return {"prompt": _shortened(firsts[0].prompt), "pictures": pictures(firsts[0].images), "moments": moments}


def _shortened(text: str) -> str:
    first, last = _KEPT
    left_out = len(text) - first - last
    return text if left_out <= 0 else f"{text[:first]}\n[{left_out:,} characters left out]\n{text[-last:]}"
