"""The charts of `weft report`: which metrics share a chart, for one run or several. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise
from statistics import fmean, median

from weft.launch.timing import METRICS as PHASES
from weft.observe.report.read import MAX_KEYS, ReportedRun
from weft.observe.report.svg import Chart, Series, numeric

# Keys of metrics.jsonl with a separate chart, in the order of the page; the series are added later.
_CHARTS = (
    ("loss", Chart("Loss", "nats per trained token", log=True, noisy=True)),
    ("grad_norm", Chart("Gradient norm", "L2, before clipping", log=True, noisy=True)),
    ("lr", Chart("Learning rate", "per step", zero=True)),
    ("tokens_per_second", Chart("Throughput", "tokens per second, all ranks", zero=True, noisy=True)),
    ("seconds", Chart("Time", "seconds per step", zero=True, noisy=True)),
    ("mfu", Chart("Model FLOPs utilisation", "share of the peak", zero=True, noisy=True, percent=True)),
    ("memory_gib", Chart("Peak memory", "GiB, largest rank", zero=True)),
    ("fill", Chart("Fill of rows", "real tokens / budget", zero=True, noisy=True, percent=True)),
    ("utilisation", Chart("Balance of ranks", "mean / largest FLOPs", zero=True, noisy=True, percent=True)),
)
# Charts of `weft rl`: chart, patterns of its metrics, and a metric of evaluations that is drawn dashed, or "".
RL_CHARTS = (
    (Chart("Reward", "mean; mean of groups' deviations", noisy=True), ("reward", "reward_std"), "eval/reward"),
    (Chart("Rewards by function", "means, before weights", noisy=True), ("rewards/*/mean",), ""),
    (Chart("Evaluation", "share of held-out prompts", percent=True), ("eval/accuracy", "eval/pass@*"), ""),
    (Chart("KL divergence", "nats per token", noisy=True), ("kl", "policy/kl_old"), ""),
    (Chart("Entropy", "nats per token", zero=True, noisy=True), ("entropy",), ""),
    (Chart("Teacher", "divergence, nats per token", noisy=True), ("teacher/divergence", "teacher/kl"), ""),
    (Chart("Teacher: agreement, share of trained tokens", "shares", zero=True, noisy=True, percent=True), (
        "teacher/agreement", "teacher/share",
    ), ""),
    (Chart("Completion lengths", "tokens", zero=True, noisy=True), (
        "completions/mean_length", "completions/mean_terminated_length", "completions/min_length",
        "completions/max_length",
    ), "eval/length"),
    (Chart("No signal, truncated", "share of groups; of samples", zero=True, noisy=True, percent=True), (
        "frac_reward_zero_std", "completions/clipped_ratio",
    ), ""),
    (Chart("Clipped ratios", "share of tokens", zero=True, noisy=True, percent=True), (
        "clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean",
    ), ""),
    (Chart("Engine and trainer: logprobs", "|log rho|, nats", log=True, noisy=True), (
        "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
    ), ""),
    (Chart("Engine and trainer: ratio", "rho = old / rollout", noisy=True), (
        "sampling/importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/min",
        "sampling/importance_sampling_ratio/max",
    ), ""),
    (Chart("Engine and trainer: KL", "nats per token", log=True, noisy=True), ("sampling/kl",), ""),
    (Chart("Engine and trainer: after corrections", "shares", zero=True, noisy=True, percent=True), (
        "sampling/effective_sample_size", "sampling/clipped", "sampling/masked",
    ), ""),
    (Chart("Trainers' time", "share of wall-clock", stacked=True, percent=True), ("trainer_time/*",), ""),
    (Chart("Engines' time", "share of wall-clock", stacked=True, percent=True), ("engine_time/*",), ""),
    (Chart("Samples that are trained", "share of generated samples", zero=True, percent=True), (
        "rollout/keep_rate",
    ), ""),
    (Chart("Buffer", "waiting complete rollout steps", zero=True), ("rollout/buffered",), ""),
    (Chart("Staleness", "versions of the weights", zero=True), ("staleness/mean", "staleness/max"), ""),
)  # fmt: skip
# Charts of system.jsonl, by the name of the key, or for GPUs by its last part.
_SYSTEM_CHARTS = (
    ("utilisation", Chart("GPU utilisation", "share of time in which a kernel ran", zero=True, percent=True)),
    ("memory_gib", Chart("GPU memory", "GiB in use, by all processes", zero=True)),
    ("celsius", Chart("GPU temperature", "\N{DEGREE SIGN}C")),
    ("watts", Chart("GPU power", "W", zero=True)),
    ("system/cpu", Chart("Processor", "share of all cores", zero=True, percent=True)),
    ("system/memory_gib", Chart("Host memory", "GiB in use", zero=True)),
)
_NO_CHART = {
    "step", "epoch", "documents", "tokens", "loss_tokens", "micro_batches", "skipped", "reason", "profiled",
    "eval/seconds", "eval/loss", "rollout",
}  # fmt: skip
# Units of other metrics, by the last part of their names.
_UNITS = {"loss": "nats per trained token", "perplexity": "e^loss", "accuracy": "share of trained tokens",
          "exact": "share of documents"}  # fmt: skip
_ROLLOUT_SECONDS = "seconds/"


def charts(runs: Sequence[ReportedRun]) -> tuple[list[Chart], list[Chart]]:
    """(Charts that every run has, charts of other metrics)."""
    main, charted = _rl_charts(runs)
    for key, chart in _CHARTS:
        if key == "seconds" and len(runs) == 1 and runs[0].has("time/forward"):
            main.append(_phase_chart(runs[0]))
        elif any(run.has(key) for run in runs):
            series = _curves(runs, key)
            if key == "loss":
                series += _curves(runs, "eval/loss", colour=1, held_out=True)
                if all(run.is_rl for run in runs):
                    chart = replace(chart, unit="of the policy", log=False)
            skipped = [float(line["step"]) for run in runs for line in run.lines if line.get("skipped")]
            marks = skipped if key in ("loss", "grad_norm", "lr") else []
            main.append(replace(chart, series=series, marks=marks))
    charted |= {key for key, _ in _CHARTS} | _NO_CHART
    names = list(dict.fromkeys(key for run in runs for line in run.lines for key in line))[:MAX_KEYS]
    further = [key for key in names if key not in charted and not key.startswith("time/")]
    return main, _other_charts(runs, [key for key in further if any(run.has(key) for run in runs)])


def _rl_charts(runs: Sequence[ReportedRun]) -> tuple[list[Chart], set[str]]:
    """(Charts of `weft rl`, their metrics). For several runs, each chart has only the first metric that exists."""
    rl_runs = [run for run in runs if run.is_rl]
    drawn, charted = list[Chart](), set[str]()
    names = list(dict.fromkeys(key for run in rl_runs for line in run.lines for key in line))
    for chart, patterns, evaluated in RL_CHARTS:
        keys = [key for pattern in patterns for key in names if fnmatchcase(key, pattern)]
        keys = [key for key in keys if any(run.has(key) for run in rl_runs)]
        if not keys or (len(keys) == 1 and "rewards/*/mean" in patterns):  # with one function, its reward is the reward
            continue
        if len(runs) > 1:
            keys = keys[:1]
            chart = replace(chart, unit=keys[0], stacked=False)
        series = [curve for index, key in enumerate(keys) for curve in _curves(runs, key, colour=index)]
        if evaluated and any(run.has(evaluated) for run in runs):
            series += _curves(runs, evaluated, colour=len(series), held_out=True)
            charted.add(evaluated)
        charted |= set(keys)
        drawn.append(replace(chart, series=series))
    if len(runs) == 1 and rl_runs:
        lines = [line for line in runs[0].lines if any(key.startswith(_ROLLOUT_SECONDS) for key in line)]
        keys = list(dict.fromkeys(key for line in lines for key in line if key.startswith(_ROLLOUT_SECONDS)))
        x = [float(line["step"]) for line in lines]  # the optimizer steps that ended the rollout steps
        series = [
            Series(key.removeprefix(_ROLLOUT_SECONDS), x, [numeric(line.get(key)) for line in lines], colour=index)
            for index, key in enumerate(keys)
        ]
        if series:
            drawn.append(Chart("Rollout step by phase", "seconds per rollout step", series, stacked=True))
        charted |= set(keys)
    return drawn, charted


def _curves(runs: Sequence[ReportedRun], key: str, *, colour: int = 0, held_out: bool = False) -> list[Series]:
    """The curve of a metric for each run that has it. With several runs, each curve has the name and colour of its run;
    with one run, it has the name of the metric and the colour `colour`. held_out: as in Series."""
    curves = []
    for index, run in enumerate(runs):
        if any(key in line for line in run.lines):
            name = run.name if len(runs) > 1 else key
            if held_out:
                name = f"{run.name}, held out" if len(runs) > 1 else f"held out ({key})"
            curves.append(Series(name, *run.points(key), index if len(runs) > 1 else colour, held_out))
    return curves


def _phase_chart(run: ReportedRun) -> Chart:
    lines = [line for line in run.lines if any(f"time/{phase}" in line for phase in PHASES)]
    x = [float(line["step"]) for line in lines]
    columns = [[numeric(line.get(f"time/{phase}")) for line in lines] for phase in PHASES]
    series = [Series(phase, x, y, colour=i) for i, (phase, y) in enumerate(zip(PHASES, columns, strict=True)) if any(y)]
    return Chart("Time by phase", "seconds per step, first rank", series, stacked=True)


def _other_charts(runs: Sequence[ReportedRun], keys: Sequence[str]) -> list[Chart]:
    """One chart for each key. For a single run, keys such as `eval/NAME/loss` share a chart, with a series per NAME."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        parts = key.split("/")
        is_of_source = len(runs) == 1 and len(parts) == 3 and parts[0] == "eval"
        groups.setdefault(f"eval/*/{parts[2]}" if is_of_source else key, []).append(key)
    drawn = []
    for pattern, members in groups.items():
        series = [curve for key in members for curve in _curves(runs, key)]
        if len(members) > 1:
            series = [replace(curve, name=curve.name.split("/")[1], colour=index) for index, curve in enumerate(series)]
        leaf = pattern.rpartition("/")[2]
        # Accuracy counts complete answers in `weft rl`, and tokens in other runs.
        answers = leaf == "accuracy" and any(run.is_rl for run in runs)
        unit = "share of held-out prompts" if answers else _UNITS.get(leaf, "")
        percent = leaf in ("accuracy", "exact", "clipped_ratio") or leaf.startswith("pass@")
        drawn.append(Chart(pattern if len(members) > 1 else members[0], unit, series, percent=percent))
    return drawn


def system_charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Charts of the first rank's machine over time, without pauses. With one run, each GPU has a series; with several
    runs, each run has a series, the mean over its GPUs."""
    times = [_running_minutes(run) for run in runs]
    longest = max((minutes[-1] for minutes in times if minutes), default=0.0)
    over, scale = ("hours", 1 / 60) if longest > 180.0 else ("minutes", 1.0) if longest > 3.0 else ("seconds", 60.0)
    drawn = []
    for leaf, chart in _SYSTEM_CHARTS:
        series = []
        for index, (run, minutes) in enumerate(zip(runs, times, strict=True)):
            x = [minute * scale for minute in minutes]
            names = dict.fromkeys(key for line in run.system for key in line)
            keys = [key for key in names if key == leaf or (key.startswith("system/gpu") and key.endswith(f"/{leaf}"))]
            columns = {key: [numeric(line.get(key)) for line in run.system] for key in keys[:MAX_KEYS]}
            if len(runs) > 1 and columns:
                rows = [[value for value in row if value is not None] for row in zip(*columns.values(), strict=True)]
                columns = {run.name: [fmean(row) if row else None for row in rows]}
            for number, (key, y) in enumerate(columns.items()):
                name = key.split("/")[1] if len(runs) == 1 else key
                series.append(Series(name, x, y, colour=index if len(runs) > 1 else number))
        if any(value is not None for curve in series for value in curve.y):
            drawn.append(replace(chart, series=series, over=over))
    return drawn


def _running_minutes(run: ReportedRun) -> list[float]:
    """The minutes at each sample of the machine since the first. A pause between two starts counts as one interval."""
    seconds = [numeric(line.get("time")) or 0.0 for line in run.system]
    steps = [max(0.0, after - before) for before, after in pairwise(seconds)]
    usual = median(steps) if steps else 0.0
    total, minutes = 0.0, [0.0] * bool(seconds)
    for step in steps:
        total += step if step <= max(60.0, 5.0 * usual) else usual
        minutes.append(total / 60.0)
    return minutes


def without_zeros(drawn: Sequence[Chart], *, one_run: bool) -> tuple[list[Chart], list[str]]:
    """(The charts that are not zero throughout, names of the others). one_run: the series of a chart are metrics of one
    run, so single zero series are also removed; otherwise they are one metric of several runs."""
    remaining, zero = [], []
    for chart in drawn:
        flat = [series.name for series in chart.series if series.is_zero]
        if len(flat) == len(chart.series):
            zero.append(chart.title)
            continue
        if flat and one_run:
            zero.append(f"{chart.title} ({', '.join(flat)})")
            chart = replace(chart, series=[series for series in chart.series if not series.is_zero])
        remaining.append(chart)
    return remaining, zero
