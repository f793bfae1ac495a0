"""The data of reinforcement learning: Prompt, Sample, SampleGroup. Plain data, which the controller holds.

T: the tokens of a sample, which are its prompt, the tokens that the policy sampled, and an environment's replies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.image_files import PromptImages
from weft.engine.batch.prefixes import Beginning
from weft.inference.base import CallTimes

Tokens = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Prompt:
    """A prompt. index: its position in the data. visit: how often it was drawn before (0: the first time). text: the
    prompt as users read it. messages: the conversation, if the prompt is one. columns: the row's other columns, which
    rewards get by name. source: file and line, for messages. images: its images, in the order of the image parts of
    its messages. placeholders: a vision model's tokens for images and videos, which no answer may contain."""

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
        """Identifies this visit of the prompt within the run; seeds derive from it."""
        return f"{self.index}.{self.visit}"


@dataclass
class SampleTimes:
    """When the steps of a sample's life ended, in Unix seconds by the controller's clock; None if they did not.

    queued: its group was started. calls: its requests to engines, one per answer; between them its environment or agent
    works. ended: its environment or agent ended, after the last answer. rewarded: it has its rewards. trained: the last
    optimizer step with the sample ended.
    """

    queued: float | None = None
    ended: float | None = None
    rewarded: float | None = None
    trained: float | None = None
    calls: list[CallTimes] = field(default_factory=list)


@dataclass(eq=False)
class Sample:
    """One answer to a prompt, its rewards, and what is computed from it. Arrays are [T]; their entry 0 is never used.

    number: index in the group. branch: of an agent's episode, which is several samples if its calls do not extend each
    other (weft/rl/agents/session.py); they share number, rewards and the episode's advantage, and the one with branch 0
    is scored. sampled: whether the policy sampled each token; only sampled tokens are trained. rollout_logprobs,
    old_logprobs, ref_logprobs, teacher_logprobs: logprobs of the sampled tokens, 0 elsewhere: under the engine, under
    the trainer with the rollout's weights, under the reference policy, and under a teacher. values: a critic's values.
    versions: of the weights that sampled each token; -1 for other tokens. kept_logmass: as in Completion, 0 at other
    tokens; None if sampling was not truncated. turns: number of the policy's answers. finish: how the last answer
    ended. text: the decoded completion. routes: as in Completion. rewards: of each function, before weights; None if
    the function returned None. reward: their weighted sum; None if the sample failed or has no reward, and is not
    trained. advantages, correction, returns: values of the sampled tokens. correction multiplies their loss
    (weft/rl/corrections.py); returns are the targets of a critic. trained: False if the sample failed. reply_images:
    the images of the environment's replies, in order; its patches and pairs include the prompt's images. notes:
    recorded with the sample for the environment and the rewards. beginnings: the prefix that it shares with others of
    its group, without and with its routes; None: not computed yet (weft/rl/documents.py:note_beginnings). times: of its
    life.
    """

    prompt: Prompt
    number: int
    tokens: Tokens
    sampled: Flags
    rollout_logprobs: Floats
    versions: NDArray[np.int32]
    finish: str
    turns: int = 1
    text: str = ""
    kept_logmass: Floats | None = None
    routes: Any = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    old_logprobs: Floats | None = None
    ref_logprobs: Floats | None = None
    teacher_logprobs: Floats | None = None
    values: Floats | None = None
    advantages: Floats | None = None
    returns: Floats | None = None
    correction: Floats | None = None
    trained: bool = True
    reply_images: PromptImages | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    branch: int = 0
    beginnings: dict[bool, Beginning | None] | None = None
    times: SampleTimes = field(default_factory=SampleTimes)

    def forget_readings(self) -> None:
        """Drop the values that trainers computed for the sample, and values derived from them; tokens and
        rewards stay."""
        self.old_logprobs = self.ref_logprobs = self.teacher_logprobs = None
        self.values = self.advantages = self.correction = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def images(self) -> PromptImages | None:
        """The images of the prompt, then those of replies."""
        return shown(self.prompt, self.reply_images)

    @property
    def id(self) -> str:
        """For example "17.0/3": the prompt's index and visit, and the number in the group; "17.0/3.1" for a branch."""
        return f"{self.prompt.id}/{self.number}" + (f".{self.branch}" if self.branch else "")

    @property
    def counts(self) -> bool:
        """Whether the sample is compared with its group and trained."""
        return self.trained and self.reward is not None

    @property
    def length(self) -> int:
        """The number of tokens that the policy sampled."""
        return int(self.sampled.sum())

    def completion(self) -> list[int]:
        """All tokens after the prompt."""
        completion: list[int] = self.tokens[len(self.prompt.tokens) :].tolist()
        return completion


@dataclass
class SampleGroup:
    """The samples of one prompt, whose rewards are compared."""

    prompt: Prompt
    samples: list[Sample]

    @property
    def episodes(self) -> list[Sample]:
        """One sample of each episode: the samples with branch 0."""
        return [sample for sample in self.samples if not sample.branch]

    @property
    def rewards(self) -> list[float | None]:
        return [sample.reward for sample in self.episodes]

    @property
    def has_signal(self) -> bool:
        """Whether any two rewards of counted samples differ; otherwise every advantage of the group is zero."""
        return len({sample.reward for sample in self.samples if sample.counts}) > 1


def shown(prompt: Prompt, replied: PromptImages | None) -> PromptImages | None:
    """The images of a prompt, then those of replies to its answers."""
    if prompt.images is None or replied is None:
        return prompt.images or replied
    return prompt.images.followed_by(replied)


def samples_of(groups: Iterable[SampleGroup]) -> list[Sample]:
    """The samples of all groups, group by group."""
    return [sample for group in groups for sample in group.samples]
