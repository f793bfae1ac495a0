"""The vocabulary of reinforcement learning: Prompt, Sample, Group. Plain data; the controller holds it.

T tokens of a sample: its prompt, what the policy sampled, and what an environment answered in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Prompt:
    """Something to be answered.

    index: its place in the data; visit: how often it has been drawn before (0: the first time). text: of the prompt as
    users read it; messages: the conversation, where it is one. columns: all other columns of its row, which rewards are
    given by name. source: file and line, for messages.
    """

    index: int
    visit: int
    tokens: tuple[int, ...]
    text: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def id(self) -> str:
        """Names this draw of the prompt in the run; seeds come from it."""
        return f"{self.index}.{self.visit}"


@dataclass(eq=False)
class Sample:
    """One answer to a prompt, and what became of it. Arrays are aligned with tokens; entry 0 is never used.

    sampled: which tokens the policy drew, and which are therefore trained; all others (prompt, tool results) are given.
    Three policies, each a logprob of every sampled token, 0 elsewhere: `rollout`, what the engine sampled from; `old`,
    the trainer with the rollout's weights; `reference`, what KL is measured against. values: a critic's.
    versions: of the weights that drew each token; -1 where none did. kept_logmass: where sampling left tokens out.
    turns: how often the policy was asked. finish: how its last turn ended. text: of its completion, decoded.
    rewards: of each function, before weights; None where it had nothing to say. reward: their weighted sum; None where
    the sample is not to be trained.
    advantages, correction: [T], of sampled tokens; correction multiplies their loss (weft/rl/corrections). returns:
    what a critic should have said of them.
    notes: what the environment or the rewards want to be kept beside it.
    """

    prompt: Prompt
    number: int
    tokens: Tokens
    sampled: Flags
    rollout: Floats
    versions: NDArray[np.int32]
    finish: str
    turns: int = 1
    text: str = ""
    kept_logmass: Floats | None = None
    routes: Any = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    old: Floats | None = None
    reference: Floats | None = None
    values: Floats | None = None
    advantages: Floats | None = None
    returns: Floats | None = None
    correction: Floats | None = None
    trained: bool = True
    notes: dict[str, Any] = field(default_factory=dict)

    def forget_readings(self) -> None:
        """Drop what trainers have read of it, and what followed: it is as it was drawn and rewarded."""
        self.old = self.reference = self.values = self.advantages = self.correction = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def id(self) -> str:
        """As in "17.0/3": prompt, visit, number in its group."""
        return f"{self.prompt.id}/{self.number}"

    @property
    def counts(self) -> bool:
        """Whether it is compared with others and trained."""
        return self.trained and self.reward is not None

    @property
    def length(self) -> int:
        """Tokens that the policy drew."""
        return int(self.sampled.sum())

    def completion(self) -> list[int]:
        """All tokens after the prompt."""
        found: list[int] = self.tokens[len(self.prompt.tokens) :].tolist()
        return found


@dataclass
class Group:
    """The samples of one prompt, whose rewards are compared with each other."""

    prompt: Prompt
    samples: list[Sample]

    @property
    def rewards(self) -> list[float | None]:
        return [sample.reward for sample in self.samples]

    @property
    def has_signal(self) -> bool:
        """Whether any two rewards differ, of samples that count: without, every advantage of the group is zero."""
        return len({sample.reward for sample in self.samples if sample.counts}) > 1


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """All of them, group by group."""
    return [sample for group in groups for sample in group.samples]
