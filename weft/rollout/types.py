"""The vocabulary of reinforcement learning: Prompt, Sample, Group. Plain data; the controller holds it.

T tokens of a sample: its prompt, what the policy sampled, and what an environment answered in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.prompt_images import PromptImages

Tokens = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Prompt:
    """A prompt. index: its position in the data. visit: how often it was drawn before (0: the first time). text: as
    users read it. messages: the conversation, if it is one. columns: the row's other columns, which rewards get by
    name. source: file and line, for messages. images: those that it shows, in the order of the parts of its messages
    that stand for them. placeholders: of a vision model, the tokens that stand for images and videos, which no answer
    may hold."""

    index: int
    visit: int
    tokens: tuple[int, ...]
    text: str
    messages: tuple[Mapping[str, Any], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    images: PromptImages | None = None
    placeholders: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        """Names this draw of the prompt within the run; seeds derive from it."""
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
    replied: images that the environment replied with, in order; its patches are those of all the sample's images.
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
    replied: PromptImages | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def forget_readings(self) -> None:
        """Drop what trainers computed for it, and what was derived from that; samples and rewards stay."""
        self.old = self.reference = self.values = self.advantages = self.correction = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def images(self) -> PromptImages | None:
        """The images of its prompt, then those of replies."""
        return shown(self.prompt, self.replied)

    @property
    def id(self) -> str:
        """As in "17.0/3": prompt, visit, number in its group."""
        return f"{self.prompt.id}/{self.number}"

    @property
    def counts(self) -> bool:
        """Whether it is compared with the group and trained."""
        return self.trained and self.reward is not None

    @property
    def length(self) -> int:
        """The number of tokens that the policy sampled."""
        return int(self.sampled.sum())

    def completion(self) -> list[int]:
        """All tokens after the prompt."""
        found: list[int] = self.tokens[len(self.prompt.tokens) :].tolist()
        return found


@dataclass
class Group:
    """The samples of one prompt, whose rewards are compared."""

    prompt: Prompt
    samples: list[Sample]

    @property
    def rewards(self) -> list[float | None]:
        return [sample.reward for sample in self.samples]

    @property
    def has_signal(self) -> bool:
        """Whether any two rewards of counted samples differ; otherwise every advantage of the group is zero."""
        return len({sample.reward for sample in self.samples if sample.counts}) > 1


def shown(prompt: Prompt, replied: PromptImages | None) -> PromptImages | None:
    """The images of a prompt, then those of replies to its answers."""
    if prompt.images is None or replied is None:
        return prompt.images or replied
    return prompt.images.followed_by(replied)


def samples_of(groups: Iterable[Group]) -> list[Sample]:
    """All of them, group by group."""
    return [sample for group in groups for sample in group.samples]
