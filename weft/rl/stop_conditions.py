"""Conditions that end a run: consecutive rollout steps without a sample to train, or without any signal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.inference.types import Sample
from weft.rl.documents import is_trained
from weft.terminal import counted


@dataclass
class EmptySteps:
    """Counts consecutive rollout steps without a trained sample. max_steps: train.max_nonfinite."""

    max_steps: int
    in_a_row: int = 0

    def count(self, samples: Sequence[Sample], config: RlConfig) -> None:
        """Count one rollout step. UserError, with the reasons, after `max_steps` in a row."""
        self.in_a_row = 0 if any(is_trained(sample, config) for sample in samples) else self.in_a_row + 1
        if self.in_a_row >= self.max_steps:
            raise UserError(
                f"{self.in_a_row} rollout steps in a row had no sample to train (train.max_nonfinite). Of the last "
                f"step's {len(samples)} samples, {why_untrained(samples, config)}. Inspect them with `weft rollouts`."
            )


FLAT_STEPS = 3  # in a row, before a warning
_SHOWN = 300  # characters of a text


@dataclass
class FlatSteps:
    """Counts consecutive rollout steps whose advantages are all zero, because all compared rewards are equal. The test
    is on advantages: without a baseline, or with a critic, equal rewards still give a signal."""

    in_a_row: int = 0
    _last: Sequence[str] = ()  # two samples of the last step, as text

    def count(self, samples: Sequence[Sample], config: RlConfig) -> list[str]:
        """Count one rollout step; returns lines to print. A step without trained samples changes nothing. With a
        teacher in the loss every sample has a gradient."""
        if config.rl.teacher_in_loss:
            return []
        trained = [sample for sample in samples if is_trained(sample, config)]
        if not trained:
            return []
        self.in_a_row = self.in_a_row + 1 if all(_is_flat(sample) for sample in trained) else 0
        self._last = [_shown(sample) for sample in (trained[0], trained[-1])]
        if self.in_a_row != FLAT_STEPS:
            return []
        return [
            f"warning  {FLAT_STEPS} rollout steps in a row had no training signal: {_WHY} Two of the last samples:",
            *(f"         {line}" for line in self._last),
        ]

    def require_signal(self, rollouts: int) -> None:
        """Raise UserError if none of the run's `rollouts` steps had a signal. Call it at the end of the run."""
        if self.in_a_row == rollouts >= FLAT_STEPS:
            lines = "\n".join(self._last)
            raise UserError(
                f"the run had no training signal: in all {rollouts} rollout steps {_WHY} Use a reward that "
                "distinguishes answers, more diverse answers (rollout.temperature, rl.group_size), or prompts that "
                "the policy sometimes solves. Two of the last samples:\n"
                f"{lines}"
            )


_MOSTLY = 0.9  # share of a step's samples; if so many are truncated, weft warns


@dataclass
class CutSamples:
    """Warns once in a run, after the first rollout step in which nearly all samples were truncated."""

    longest: int
    has_warned: bool = False

    def count(self, samples: Sequence[Sample]) -> list[str]:
        """Look at one rollout step; returns lines to print. longest: rollout.max_new_tokens."""
        cut = sum(sample.finish == "length" for sample in samples)
        if self.has_warned or cut < _MOSTLY * len(samples):
            return []
        self.has_warned = True
        return [
            f"warning  {cut} of {counted(len(samples), 'sample')} were truncated at "
            f"rollout.max_new_tokens={self.longest}, so their rewards are of unfinished answers. Raise the limit "
            f"(rollout.max_new_tokens={2 * self.longest}), or look in `weft rollouts` why they do not end: a chat "
            "model may only end its answers within its chat template (rl.chat=true)."
        ]


_WHY = "all rewards that are compared with each other were equal, so every advantage was zero."


def _is_flat(sample: Sample) -> bool:
    """Whether all advantages of the sample are zero up to rounding."""
    assert sample.advantages is not None
    return float(np.abs(sample.advantages).max(initial=0.0)) <= 1e-6 * max(1.0, abs(sample.reward or 0.0))


def _shown(sample: Sample) -> str:
    prompt, answer = sample.prompt.text[-_SHOWN:], sample.text[:_SHOWN]
    return f"sample {sample.id} of {sample.prompt.source}: reward {sample.reward:g} for {answer!r} to {prompt!r}"


def why_untrained(samples: Sequence[Sample], config: RlConfig) -> str:
    """The number of untrained samples by reason, as text. Each counts under the first reason that applies."""
    reasons = {"failed in rl.environment": 0, "have no reward": 0, "sampled no token": 0, "were truncated": 0}
    for sample in samples:
        if not is_trained(sample, config):
            applies = (
                "error" in sample.notes or not sample.trained,
                sample.reward is None,
                not sample.length,
                True,
            )
            reasons[list(reasons)[applies.index(True)]] += 1
    advice = {
        "have no reward": " (their functions failed or returned None)",
        "were truncated": " (rl.mask_truncated, rollout.max_new_tokens)",
    }
    return ", ".join(f"{count} {reason}{advice.get(reason, '')}" for reason, count in reasons.items() if count)
