"""The output of a run at its end: time, results, the path of the model, next commands. Printed by the first rank."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.config.urls import is_url
from weft.config.yaml12 import override
from weft.files import read_object
from weft.launch.process import Ranks
from weft.observe.progress import duration, number
from weft.terminal import counted, display_name, say, say_folded


def print_closing(summary: Mapping[str, Any], folder: Path) -> None:
    """Prints how a run went. summary: the content of summary.json. folder: the run folder."""
    say_folded(closing(summary, folder))


def closing(summary: Mapping[str, Any], folder: Path) -> list[str]:
    """The lines of print_closing."""
    seconds = {name: value for name, value in summary["seconds"].items() if name != "total"}
    phases = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    skipped = f" ({summary['skipped_steps']} skipped)" if summary["skipped_steps"] else ""
    lines = [
        f"done     {counted(summary['steps'], 'step')}{skipped} in {duration(summary['seconds']['total'])}: {phases}"
    ]
    rewards = summary.get("last_rewards")
    if rewards:
        has_means = summary["first_rewards"] != rewards
        lines.append(f"reward   {_from_to(summary['first_rewards'], rewards, has_means, 'rollout steps')}")
    elif summary["last_losses"]:
        first, last = summary["first_losses"], summary["last_losses"]
        has_means = summary["steps"] >= len(first) + len(last) and len(last) > 1
        lines.append(f"loss     {_from_to(first, last, has_means, 'steps')}")
    if summary["evaluation"] is not None:
        first, last, best = (summary["evaluation"][name] for name in ("first", "last", "best"))
        texts = []
        for figures in (first, last):
            text = number(figures.get("eval/loss"), ".4f")
            if "eval/loss" not in figures and "eval/accuracy" in figures:  # reinforcement learning
                text = f"accuracy {figures['eval/accuracy']:.1%}"
            texts.append(f"{text} (step {figures['step']})")
        line = f"held out {' -> '.join(dict.fromkeys(texts))}"
        if best is not None:
            metric = next(name for name in best if name not in ("step", "checkpoint"))
            saved = f", kept as {best['checkpoint']}" if best["checkpoint"] else ""
            line += f"; best {metric} {number(best[metric], '.4f')} (step {best['step']}){saved}"
        lines.append(line)
    train = seconds.get("train", 0.0)
    rate = f", {summary['tokens'] / train:,.0f} tokens/s" if train > 0 else ""
    lines.append(
        f"tokens   {summary['tokens']:,} ({summary['loss_tokens']:,} trained on) in "
        f"{counted(summary['documents'], 'document')}{rate}; peak memory {summary['peak_memory_gib']:.2f} GiB"
    )
    if summary["saved"] is not None:
        lines.append(f"model    {summary['saved']}")
    remote = is_url(display_name(str(folder)))  # for a URL, `weft merge` requires --output
    if summary["saved"] is not None and not str(summary["stopped"]).startswith("SIG"):
        run, checkpoint = shlex.quote(str(folder)), Path(summary["saved"])
        config, adapter = (
            read_object(checkpoint / name, "a config") if (checkpoint / name).is_file() else {}
            for name in ("config.json", "adapter_config.json")
        )
        scores = "Classification" in str(config.get("architectures"))
        commands = list[str]()
        if scores and len(config.get("id2label") or (0, 1)) == 1:  # transformers' default is two labels
            reward = override("rl.reward", [f"model:{summary['saved']}"])
            commands.append(f"weft rl ... {reward}  train a policy on its rewards")
        elif not scores and "_CLS" not in str(adapter.get("task_type")):
            commands.append(f"weft chat {run}      chat with it")
        if adapter:
            commands.append(f"weft merge {run}{' --output merged' * remote}     merge the adapter into its base")
        commands.append(f"weft report {run}    curves, phases and config on one page")
        if rewards:
            commands.append(f"weft rollouts {run}  samples and their rewards")
        lines += [f"{'' if number else 'next':9}{command}" for number, command in enumerate(commands)]
    return lines


def _from_to(first: Sequence[float], last: Sequence[float], has_means: bool, steps: str) -> str:
    """Describes a metric at the beginning and the end of a run: by means over the steps if `has_means`, otherwise by
    the first and the last value."""
    if has_means:
        means = [number(sum(values) / len(values), ".4f") for values in (first, last)]
        return f"{means[0]} -> {means[1]} (means of the first and the last {len(last)} {steps})"
    return f"{number(first[0], '.4f')} -> {number(last[-1], '.4f')}"


def say_stopped(stopped_by: str, step: int, resume_command: str) -> None:
    """Prints that a run stopped early. stopped_by: the signal, or the eval key, that ended it."""
    say(f"stopped  by {stopped_by} after step {step}. Resume with: {resume_command}")


def say_finished(folder: Path, step: int, steps: int, stopped_by: str | None, ranks: Ranks, advice: str) -> None:
    """Prints that there is nothing to resume: the last step is done, or the eval key `stopped_by` ended the run."""
    if not ranks.is_first:
        return
    if step == steps:
        say(f"{folder} has already finished: step {steps} of {steps}. {advice}".rstrip())
    else:
        say(f"{stopped_by} ended {folder} after step {step} of {steps}. Set another {stopped_by} to continue.")
