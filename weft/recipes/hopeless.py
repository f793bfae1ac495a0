"""When steps come to nothing, one after the other, the run is ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.rl.documents import is_trained
from weft.rl.types import Sample


@dataclass
class BadSteps:
    """Steps in a row that were not finite. most: train.max_nonfinite."""

    most: int
    in_a_row: int = 0

    def count(self, line: Mapping[str, object], advice: str) -> None:
        """One step, by its line of metrics.jsonl. FloatingPointError after too many. A step that was skipped because
        its loss scale was too large, or because it had nothing to train, is neither good nor bad."""
        if line.get("overflow") or line.get("empty"):
            return
        self.in_a_row = self.in_a_row + 1 if line.get("skipped") else 0
        if self.in_a_row >= self.most:
            raise FloatingPointError(
                f"{self.in_a_row} steps in a row were not finite (train.max_nonfinite). Last: {line.get('reason')}. "
                f"{advice}"
            )


@dataclass
class EmptySteps:
    """Rollout steps in a row of which no sample was trained. most: train.max_nonfinite."""

    most: int
    in_a_row: int = 0

    def count(self, samples: Sequence[Sample], config: RlConfig) -> None:
        """One rollout step. UserError after too many, with why."""
        self.in_a_row = 0 if any(is_trained(sample, config) for sample in samples) else self.in_a_row + 1
        if self.in_a_row >= self.most:
            raise UserError(
                f"{self.in_a_row} rollout steps in a row had no sample to train (train.max_nonfinite). Of the "
                f"{len(samples)} of the last one {why_untrained(samples, config)}. Look at them with `weft rollouts`."
            )


def why_untrained(samples: Sequence[Sample], config: RlConfig) -> str:
    """Why samples are left out, each by the first reason that holds."""
    reasons = {"failed in rl.environment": 0, "have no reward": 0, "drew no token": 0, "ended at their longest": 0}
    for sample in samples:
        if not is_trained(sample, config):
            held = ("error" in sample.notes or not sample.trained, sample.reward is None, not sample.length, True)
            reasons[list(reasons)[held.index(True)]] += 1
    advice = {
        "have no reward": " (their functions failed, or gave None)",
        "ended at their longest": " (rl.mask_truncated, rollout.max_new_tokens)",
    }
    return ", ".join(f"{count} {reason}{advice.get(reason, '')}" for reason, count in reasons.items() if count)
