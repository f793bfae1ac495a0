"""`weft rollouts RUN`: samples and their rewards, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.text import Text

from weft.errors import UserError
from weft.inference.records import FOLDER, Answer, read_rollouts, rollout_files
from weft.inference.types import Sample, SampleGroup, samples_of
from weft.launch.options import RolloutsOptions
from weft.terminal import Console, say

_WIDTH = 4  # spaces before prompts and samples


def run(options: RolloutsOptions) -> None:
    """Prints groups of one rollout step. Raises UserError if there are none."""
    files = rollout_files(Path(options.run) / FOLDER)
    if not files:
        raise UserError(f"{options.run}: contains no rollouts: write the run folder of weft rl.")
    if options.step is None:
        step, groups = _read_newest(files)
    elif options.step not in files:
        raise UserError(f"{options.run}: has no rollout step {options.step}: use --step {min(files)} to {max(files)}.")
    else:
        step, groups = options.step, _read_groups(files[options.step])
    console = Console()
    console.print(summary(step, groups))
    for group in ordered(groups, options.order)[: options.groups]:
        console.print(describe(group, options.samples))


def _read_newest(files: Mapping[int, Path]) -> tuple[int, list[SampleGroup]]:
    """(newest rollout step that can be read, its groups). Raises UserError if none can be read."""
    problem = ""
    for step in sorted(files, reverse=True):
        try:
            groups = _read_groups(files[step])
        except UserError as error:
            problem = problem or str(error)
            continue
        if problem:
            say(f"skipped  {problem}")
        return step, groups
    raise UserError(problem)


def _read_groups(path: Path) -> list[SampleGroup]:
    if groups := read_rollouts(path):
        return groups
    raise UserError(f"{path}: contains no samples: choose another step with --step.")


def summary(step: int, groups: Sequence[SampleGroup]) -> str:
    """`step 12: 32 prompts, 256 samples; reward 0.41; 6 groups without signal; 3.7 tokens on average, 4 truncated`."""
    samples = samples_of(groups)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    mean = f"{sum(rewards) / len(rewards):.3g}" if rewards else "-"
    length = sum(sample.length for sample in samples) / len(samples)
    cut, silent = sum(s.finish == "length" for s in samples), sum(not group.has_signal for group in groups)
    return (
        f"step {step}: {len(groups)} prompts, {len(samples)} samples; reward {mean}; {silent} groups without signal; "
        f"{length:.3g} tokens on average, {cut} truncated"
    )


def ordered(groups: Sequence[SampleGroup], order: str) -> list[SampleGroup]:
    """The groups in an order: "drawn", or "best" or another for the best or the worst mean reward first."""
    if order == "drawn":
        return list(groups)
    rewarded = [group for group in groups if any(reward is not None for reward in group.rewards)]

    def mean(group: SampleGroup) -> float:
        return fmean(reward for reward in group.rewards if reward is not None)

    return sorted(rewarded, key=mean, reverse=order == "best")


def describe(group: SampleGroup, max_samples: int) -> Text:
    """The text of a prompt and of at most `max_samples` samples, the best first."""
    out = Text(f"\n{group.prompt.source or group.prompt.id}\n", style="dim")
    out.append(_indented(group.prompt.text), style="bold")
    samples = sorted(group.samples, key=lambda s: -1e30 if s.reward is None else s.reward, reverse=True)
    for sample in samples[:max_samples]:
        out.append(f"\n  reward {reward_text(sample)}  {sample.length} tokens, {ending(sample)}\n", style="cyan")
        out.append(_indented(sample.text))
    if len(samples) > max_samples:
        out.append(f"\n  and {len(samples) - max_samples} more", style="dim")
    return out


def reward_text(sample: Sample | Answer) -> str:
    total = "-" if sample.reward is None else f"{sample.reward:.4g}"
    parts = [f"{name} {'-' if value is None else f'{value:.4g}'}" for name, value in sample.rewards.items()]
    return f"{total} ({', '.join(parts)})" if len(parts) > 1 else total


def ending(sample: Sample | Answer) -> str:
    return {"end": "ended", "length": "truncated", "abort": "stopped"}.get(sample.finish, sample.finish)


def _indented(text: str) -> str:
    return "\n".join(" " * _WIDTH + line for line in text.splitlines() or [""])
