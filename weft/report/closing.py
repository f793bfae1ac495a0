"""What a run says when it has ended: how long, how well, where the model is, what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.config.urls import is_url
from weft.report.progress import duration, number
from weft.terminal import called, say


def print_closing(summary: Mapping[str, Any], folder: Path) -> None:
    """summary: the content of summary.json. folder: RUN."""
    for text in closing(summary, folder):
        say(text)


def closing(summary: Mapping[str, Any], folder: Path) -> list[str]:
    """The lines that print_closing prints."""
    seconds = {name: value for name, value in summary["seconds"].items() if name != "total"}
    phases = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    skipped = f" ({summary['skipped_steps']} skipped)" if summary["skipped_steps"] else ""
    lines = [f"done     {summary['steps']} steps{skipped} in {duration(summary['seconds']['total'])}: {phases}"]
    rewards = summary.get("last_rewards")
    if rewards:
        several = summary["first_rewards"] != rewards
        lines.append(f"reward   {_from_to(summary['first_rewards'], rewards, several, 'rollout steps')}")
    elif summary["last_losses"]:
        first, last = summary["first_losses"], summary["last_losses"]
        several = summary["steps"] >= len(first) + len(last) and len(last) > 1
        lines.append(f"loss     {_from_to(first, last, several, 'steps')}")
    if summary["evaluation"] is not None:
        lines.append(f"held out {_evaluation(summary['evaluation'])}")
    train = seconds.get("train", 0.0)
    rate = f", {summary['tokens'] / train:,.0f} tokens/s" if train > 0 else ""
    lines.append(
        f"tokens   {summary['tokens']:,} ({summary['loss_tokens']:,} trained on) in {summary['documents']:,} documents"
        f"{rate}; peak memory {summary['peak_memory_gib']:.2f} GiB"
    )
    if summary["saved"] is not None:
        lines.append(f"model    {summary['saved']}")
    remote = is_url(called(str(folder)))  # where nothing is written beside what is read
    if summary["saved"] is not None and not str(summary["stopped"]).startswith("SIG"):
        lines.append(f"next     weft chat {folder}      talk to it")
        if (Path(summary["saved"]) / "adapter_config.json").is_file():
            lines.append(f"         weft merge {folder}{' --output merged' * remote}     a model of base and adapter")
        lines.append(f"         weft report {folder}    curves, phases and config on one page")
        if rewards:
            lines.append(f"         weft rollouts {folder}  what was sampled, and how it was rewarded")
    return lines


def _evaluation(evaluation: Mapping[str, Any]) -> str:
    """The first and the last held-out loss, or accuracy, and, where they were compared, the best evaluation."""
    first, last, best = (evaluation[name] for name in ("first", "last", "best"))
    texts = [f"{_figure(found)} (step {found['step']})" for found in (first, last)]
    text = " -> ".join(dict.fromkeys(texts))
    if best is None:
        return text
    metric = next(name for name in best if name not in ("step", "checkpoint"))
    kept = f", kept as {best['checkpoint']}" if best["checkpoint"] else ""
    return f"{text}; best {metric} {number(best[metric], '.4f')} (step {best['step']}){kept}"


def _figure(found: Mapping[str, Any]) -> str:
    """What an evaluation is judged by: its loss, or in reinforcement learning, how many answers are correct."""
    if "eval/loss" not in found and "eval/accuracy" in found:
        return f"accuracy {found['eval/accuracy']:.1%}"
    return number(found.get("eval/loss"), ".4f")


def _from_to(first: Sequence[float], last: Sequence[float], several: bool, steps: str) -> str:
    """From the first to the last, as means where there are enough steps for two (several)."""
    if several:
        means = [number(sum(values) / len(values), ".4f") for values in (first, last)]
        return f"{means[0]} -> {means[1]} (means of the first and the last {len(last)} {steps})"
    return f"{number(first[0], '.4f')} -> {number(last[-1], '.4f')}"
