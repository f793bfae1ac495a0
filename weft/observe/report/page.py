"""`weft report`: one self-contained HTML page about a run, or about several runs. Imports no torch.

Runs in progress and runs that ended early also have a page.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml
from jinja2 import Environment

from weft.config.keys import schema_keys
from weft.config.render import plain_value
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.yaml12 import Dumper
from weft.errors import UserError
from weft.launch.options import ReportOptions
from weft.observe.progress import duration
from weft.observe.report.charts import charts, system_charts, without_zeros
from weft.observe.report.read import NoStepError, ReportedRun, read_run
from weft.observe.report.samples import answers_by_prompt
from weft.observe.report.svg import COLOURS, Chart, draw, logarithmic, numeric
from weft.terminal import clean, count
from weft.version import __version__

_MAX_VALUE = 300  # characters of a value of the config in a table


def run(options: ReportOptions) -> tuple[Path, list[str]]:
    """Writes the page; with options.follow it rewrites the page until all runs have ended. Returns its path, and notes
    on unreadable files. Raises UserError if a folder contains no run, or if the page cannot be written."""
    while True:
        try:
            target, runs = _write(options)
            if not (options.follow and any(reported.is_running for reported in runs)):
                return target, [note for reported in runs for note in reported.notes]
        except NoStepError:
            if not options.follow:
                raise
        time.sleep(options.every)


def _write(options: ReportOptions) -> tuple[Path, list[ReportedRun]]:
    runs = [read_run(Path(path)) for path in options.runs]
    names = [reported.name for reported in runs]
    runs = [replace(r, name=str(r.folder)) if names.count(r.name) > 1 else r for r in runs]
    if options.output:
        target = Path(options.output)
    else:
        target = runs[0].folder / "report.html" if len(runs) == 1 else Path("report.html")
        if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
            raise UserError(f"{target}: not a regular file, so weft does not overwrite it: remove it, or set --output.")
    try:
        reloaded = options.every if options.follow and any(reported.is_running for reported in runs) else None
        written = target.with_name(f"{target.name}.partial") if options.follow else target
        written.write_text(page(runs, reloaded), encoding="utf-8", errors="backslashreplace")
        written.replace(target)  # with --follow, a browser must never read an incomplete page
    except OSError as error:
        raise UserError(f"--output: {target} cannot be written: {error.strerror}.") from error
    return target, runs


def page(runs: Sequence[ReportedRun], reloaded: int | None = None) -> str:
    """The page as HTML. reloaded: seconds after which a browser loads it again."""
    template = files("weft.observe.report").joinpath("page.html").read_text(encoding="utf-8")
    # A browser would apply control characters that reverse the order of text: `clean` escapes them.
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    is_comparison = len(runs) > 1
    main, further = charts(runs)
    main, zero = without_zeros(main, one_run=not is_comparison)
    further, zero_others = without_zeros(further, one_run=not is_comparison)
    figures, facts = [_figures(run) for run in runs], [_facts(run) for run in runs]
    figure_names = list(dict.fromkeys(name for values in figures for name in values))
    table = {"names": figure_names, "rows": [[row.get(name, ("-", "")) for name in figure_names] for row in figures]}
    fact_names = dict.fromkeys(name for texts in facts for name in texts)
    return environment.from_string(template).render(
        title=" / ".join(run.name for run in runs),
        reloaded=reloaded,
        several=is_comparison,
        runs=[_describe(run, index) for index, run in enumerate(runs)],
        tiles=[] if is_comparison else [{"name": n, "number": v, "note": note} for n, (v, note) in figures[0].items()],
        table=table if is_comparison else None,
        differing=_differing(runs) if is_comparison else [],
        facts=[{"name": n, "values": [f.get(n, "-") for f in facts]} for n in fact_names] if is_comparison else [],
        charts=[_draw(chart) for chart in main],
        others=[_draw(chart) for chart in further],
        machine=[_draw(chart) for chart in system_charts(runs)],
        zero=zero + zero_others,
        version=__version__,
        written=f"{datetime.now():%Y-%m-%d %H:%M}",
    )


def _draw(chart: Chart) -> dict[str, Any]:
    """A chart for the template: its SVG, and the data with which the page shows values under the pointer."""
    svg, data = draw(chart)
    solid = [series for series in chart.series if not series.held_out]
    axis = f"axis: difference from {data['base']}" if data["base"] else "log scale" if logarithmic(chart) else ""
    return {
        "title": chart.title,
        "unit": ", ".join(text for text in (chart.unit, axis) if text),
        "svg": clean(svg),
        "data": json.dumps(data, separators=(",", ":")),
        "legend": [(s.name, s.colour % COLOURS) for s in solid] if len(chart.series) > 1 else [],
        "dashed": [(s.name, s.colour % COLOURS) for s in chart.series if s.held_out][:1],
        "skipped": len(chart.marks),
    }


def _describe(run: ReportedRun, index: int) -> dict[str, Any]:
    """A run for the template."""
    seconds = {name: value for name, value in run.summary.get("seconds", {}).items() if name != "total"}
    total = sum(seconds.values())
    has_failed = bool(run.failures) or bool(run.starts and run.starts[-1].get("error"))
    return {
        "name": run.name,
        "folder": str(run.folder),
        "colour": index % COLOURS,
        "status": _status(run),
        "failed": not run.is_running and bool(run.starts) and has_failed,
        "failures": () if run.is_running else run.failures,
        "facts": _facts(run),
        "model": run.config.get("model", {}).get("path", "-"),
        "data": run.summary.get("data") or run.config.get("data", {}).get("path", "-"),
        "phases": [
            {"name": name, "time": duration(value), "share": value / total, "colour": n % COLOURS}
            for n, (name, value) in enumerate(seconds.items())
        ] if total else [],
        "skipped": [line for line in run.lines if line.get("skipped")],
        "samples": answers_by_prompt(run.samples),
        "rollouts": run.rollouts,
        "over_time": run.over_time,
        "timelines": run.timelines,
        "checkpoints": run.checkpoints,
        "settings": _settings(run),
        "config": run.config_text,
        "notes": run.notes,
        "versions": {name: version for name, version in run.summary.get("versions", {}).items() if version},
    }  # fmt: skip


def _status(run: ReportedRun) -> str:
    last, start = run.lines[-1]["step"], run.starts[-1] if run.starts else {}
    if run.is_running:
        return f"running: {last:,} steps so far"
    messages = (failure["message"] for failure in run.failures if failure["message"] and not failure["lost_peer"])
    cause = next(messages, start.get("error"))
    if cause:
        return f"failed after step {last:,}: {cause.splitlines()[0]}"
    if start and "ended" not in start:
        return f"ended without a message after step {last:,}: killed, or its machine failed"
    if not run.summary:
        return f"not finished: {last:,} steps so far"
    stopped = run.summary.get("stopped")
    return f"stopped by {stopped} after step {last:,}" if stopped else f"finished after {last:,} steps"


def _facts(run: ReportedRun) -> dict[str, str]:
    """Name -> text: host, time and hardware of the last start, and its command."""
    if not run.starts:
        return {}
    start = run.starts[-1]
    versions = {**start["versions"], **run.summary.get("versions", {})}
    restarts = f"; {len(run.starts)} starts, the last after step {start['step']:,}" if len(run.starts) > 1 else ""
    replaced = sum(numeric(line.get("rollout/engine_restarts")) or 0.0 for line in run.lines)
    engines = start.get("engines", "") + (f"; {replaced:,.0f} replaced" if replaced else "")
    facts = {
        "device": f"{start['ranks']} x {start.get('device', '')}",
        "mesh": ", ".join(f"{axis} {size}" for axis, size in start["mesh"].items()),
        "rollout engines": engines,
        "host": start.get("host", ""),
        "started": _day(run.starts[0]["started"]) + restarts,
        "ended": _day(start.get("ended", "")),
        "command": start.get("command", ""),
        "git commit": start.get("commit", ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    return {name: text for name, text in facts.items() if text}


def _day(text: str) -> str:
    """`2026-11-26 08:59:33 UTC` for a time in ISO 8601; other texts unchanged."""
    try:
        return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError):
        return text


def _settings(run: ReportedRun) -> dict[str, list[dict[str, str]]]:
    """The keys of the config that differ from their defaults (`set`) and the others: name, value, default, help."""
    rows: dict[str, list[dict[str, str]]] = {"set": [], "default": []}
    schema = schema_keys(RlConfig if "rl" in run.config else SftConfig)
    for section, values in run.config.items():
        for leaf, value in (values or {}).items():
            name = f"{section}.{leaf}"
            key = schema.get(name)
            has_default = key is not None and not key.required
            default = plain_value(key.default) if key is not None and has_default else None
            shown = _as_yaml(default) if has_default else "-"
            row = {"name": name, "value": _as_yaml(value), "default": shown, "help": key.help if key else ""}
            rows["default" if has_default and default == value else "set"].append(row)
    return rows


def _differing(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """The keys of the config whose values differ between runs. A run that lacks a key has its default."""
    flat = [
        {f"{s}.{k}": _as_yaml(v) for s, keys in run.config.items() for k, v in (keys or {}).items()} for run in runs
    ]
    schema = {**schema_keys(SftConfig), **schema_keys(RlConfig)}
    rows = []
    for name in dict.fromkeys(name for config in flat for name in config):
        key = schema.get(name)
        default = "-" if key is None or key.required else _as_yaml(plain_value(key.default))
        if len({config.get(name, default) for config in flat}) > 1:
            rows.append({"key": name, "values": [config.get(name, "-") for config in flat]})
    return rows


def _as_yaml(value: object) -> str:
    """A value of the config as YAML on one line, shortened."""
    if isinstance(value, str):
        text = value
    else:
        text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=1 << 20, allow_unicode=True)
        text = text.removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]} ..."


def _figures(run: ReportedRun) -> dict[str, tuple[str, str]]:
    """The figures of a run: name -> (number, note)."""
    figures: dict[str, tuple[str, str]] = {}
    values = run.values("reward" if run.is_rl else "loss")
    if values:
        window = max(1, min(10, len(values) // 2))  # the first and the last values must not overlap
        note = f"mean of the last {window}; first {window}" if window > 1 else "the last step; the first"
        first, last = fmean(values[:window]), fmean(values[-window:])
        figures["Reward" if run.is_rl else "Loss"] = (f"{last:.4f}", f"{note}: {first:.4f}")
    steps, held_out = run.points("eval/accuracy" if run.is_rl else "eval/loss")
    points = [(value, step) for step, value in zip(steps, held_out, strict=True) if value is not None]
    if points:
        best, step = min(points, key=lambda point: (-point[0] if run.is_rl else point[0], point[1]))
        name = "Held-out accuracy" if run.is_rl else "Held-out loss"
        figures[name] = (f"{best:.4f}", f"best, at step {step:.0f}; last: {points[-1][0]:.4f}")
    skipped, epochs = sum(bool(line.get("skipped")) for line in run.lines), run.lines[-1].get("epoch")
    figures["Steps"] = (f"{run.lines[-1]['step']:,}", f"{skipped} skipped" + (f"; epoch {epochs}" if epochs else ""))
    tokens, trained = (count(round(sum(run.values(key)))) for key in ("tokens", "loss_tokens"))
    figures["Tokens"] = (tokens, f"{trained} of them trained")
    if rates := run.values("tokens_per_second"):
        mfu = run.values("mfu")
        figures["Tokens/s"] = (
            f"{median(rates):,.0f}",
            "median, all ranks" + (f"; MFU {median(mfu):.1%}" if mfu else ""),
        )
    if memory := run.values("memory_gib"):
        figures["Peak memory"] = (f"{max(memory):.2f} GiB", "largest rank")
    total, in_steps = run.summary.get("seconds", {}).get("total"), sum(run.values("seconds"))
    share = f"{in_steps / total:.0%} of it in steps" if total else "in steps"
    figures["Time"] = (duration(total or in_steps), share)
    return figures
