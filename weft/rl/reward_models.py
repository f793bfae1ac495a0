"""Reward models that rl.reward names as model:PATH, which score whole conversations, through their own chat templates
and tokenizers.

Each runs in the trainer's ranks, or in separate ranks (reward_model.ranks). If rollout engines share the trainer's
devices, models in the trainer's ranks score after all samples are drawn; otherwise they score while other samples are
still drawn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.config.rl_schema import RlConfig, reward_models
from weft.data.encode import Encoder, Encoding, load_tokenizer
from weft.data.records import Record, template_inputs
from weft.engine.batch.document import Document
from weft.engine.batch.media import ImageRoom
from weft.engine.engine import Engine
from weft.engine.scores import scored_document, step_scores
from weft.engine.sleep import Part
from weft.errors import UserError, first_line
from weft.inference.types import Sample
from weft.launch import flight
from weft.launch.options import Device
from weft.launch.process import Ranks, leave
from weft.models import hf
from weft.rl.frozen_ranks import FrozenRanks
from weft.rl.model_engines import reward_model_engine
from weft.rl.reference_critic import Role, start_rank, where_separate
from weft.rl.rewards.calls import RewardOutcome
from weft.rl.trainer_group import RankGroup
from weft.terminal import counted


@dataclass(frozen=True)
class Conversation:
    """A conversation to score. source: for messages. prompt, answer: both messages, or both texts. columns: of the
    prompt's row, of which tools and arguments of the template are read."""

    source: str
    prompt: str | Sequence[Mapping[str, Any]]
    answer: str | Sequence[Mapping[str, Any]]
    columns: Mapping[str, Any]

    @classmethod
    def of_sample(cls, sample: Sample) -> Conversation:
        prompt = sample.prompt
        if prompt.messages is None:
            return cls(prompt.source, prompt.text, sample.text, {})
        columns = {name: prompt.columns[name] for name in ("tools", "chat_template_kwargs") if name in prompt.columns}
        answer = sample.notes.get("messages") or [{"role": "assistant", "content": sample.text}]
        return cls(prompt.source, list(prompt.messages), answer, columns)

    @property
    def record(self) -> Record:
        if isinstance(self.prompt, str):
            return Record(self.source, "prompt", {"prompt": self.prompt, "completion": self.answer})
        messages = [*self.prompt, *self.answer]
        return Record(self.source, "messages", {"messages": messages, **template_inputs(self.source, self.columns)})


def check_reward_models(config: RlConfig) -> None:
    """Raises UserError, before anything starts, if the model is not a reward model, or cannot be read."""
    for path in reward_models(config.rl.reward).values():
        try:
            model = hf.read_config(path)
        except UserError as error:
            raise UserError(f"rl.reward: model:{path}: {error}") from error
        if not hf.classifies(model):
            raise UserError(
                f"rl.reward: model:{path} is a {(model.architectures or ['model'])[0]} without a trained score head. "
                "Train it as a reward model with `weft reward`."
            )
        if model.num_labels != 1:
            raise UserError(
                f"rl.reward: model:{path} has {counted(model.num_labels, 'label')}, but a reward is a single number. "
                "Name a model with one label, or write a function that calls this model."
            )
        load_tokenizer(path)


class ConversationScorer:
    """The engine of a reward model, with its tokenizer and chat template. Raises UserError for a model that the mesh
    cannot hold. Collective."""

    def __init__(self, config: RlConfig, path: str, ranks: Ranks, *, shares_with: Engine | None = None) -> None:
        """shares_with: another engine of these ranks."""
        self.path, self.engine = path, reward_model_engine(config, path, ranks, shares_with=shares_with)
        self.longest = self.engine.budget * self.engine.mesh.cp_size
        self.encoder = Encoder(load_tokenizer(path), Encoding("all"))
        self.pad = hf.padding_id(path)

    def score(self, conversations: Sequence[Conversation]) -> list[RewardOutcome]:
        """The score of each conversation, or its error; the same on every rank. Collective."""
        documents, outcomes = list[Document](), list[RewardOutcome | None]()
        for conversation in conversations:
            try:
                ids = self.encoder.encode([conversation.record])[0].ids
            except ValueError as error:  # an error of a template that cannot render the conversation
                outcomes.append(RewardOutcome(None, first_line(error)))
                continue
            if len(ids) > self.longest:
                text = f"the conversation has {len(ids)} tokens, more than reward_model.max_tokens_per_device"
                text += " x mesh.cp" * (self.longest > self.engine.budget)
                outcomes.append(RewardOutcome(None, f"{text} = {self.longest}"))
                continue
            documents.append(scored_document(torch.tensor(ids), self.pad, source=conversation.source))
            outcomes.append(None)
        if not documents:
            return [outcome for outcome in outcomes if outcome is not None]
        plan, local = self.engine.plan_step(documents)
        scores = iter(step_scores(self.engine, plan, local).values())
        return [_outcome(next(scores)) if outcome is None else outcome for outcome in outcomes]

    def line(self) -> str:
        """A line that describes this reward model at start."""
        kind, dtype = type(self.engine.built.module.hf_model).__name__, self.engine.precision.compute
        return f"reward   {self.path}: {kind}, in {str(dtype).removeprefix('torch.')}: {self.engine.memory}"

    def check_images(self, samples: Sequence[tuple[str, int, int]]) -> None:
        """Raises UserError if there are samples with images: a reward model reads texts."""
        if samples:
            raise UserError(
                f"{samples[0][0]}: has images, but the reward model {self.path} reads only text in this version. "
                "Score such samples with a function."
            )


class RewardModelRank:
    """One of the separate ranks of a reward model. Methods are called on all of them together."""

    def __init__(self, config: RlConfig, path: str, device: Device = "auto") -> None:
        self.config, self.ranks = config, start_rank(config, device)
        self.scorer = ConversationScorer(config, path, self.ranks)

    def describe(self) -> list[str]:
        """A line that describes this reward model at start."""
        return [f"{self.scorer.line()}; {where_separate(self.config, 'reward_model')}"]

    def sleep(self, parts: Sequence[Part], sends: bool = False) -> int:
        """See TrainerRank.sleep."""
        return self.scorer.engine.sleep(*parts)

    def wake(self) -> int:
        """See TrainerRank.wake."""
        return self.scorer.engine.wake()

    def check_images(self, samples: Sequence[tuple[str, int, int]]) -> None:
        """See ConversationScorer.check_images."""
        self.scorer.check_images(samples)

    def image_room(self) -> ImageRoom:
        return self.scorer.engine.planner.image_room

    def open_run(self, folder: str, constants: Mapping[str, Any], last: int = 0) -> None:
        """Enter RUN; there is nothing to restore."""
        flight.in_run(Path(folder))

    def score(self, role: Role, parts: Sequence[Sequence[Conversation]]) -> list[list[RewardOutcome]]:
        """The outcomes of the conversations of each part (score_parts). role: ignored; a rank has one."""
        return score_parts(self.scorer, parts)

    def close(self) -> None:
        """Leave the process group."""
        leave()


def score_parts(scorer: ConversationScorer, parts: Sequence[Sequence[Conversation]]) -> list[list[RewardOutcome]]:
    """The outcomes of each part. Parts are planned separately, because the last bits of scores depend on the other
    conversations of a row. Collective."""
    flight.enter("score")
    return [scorer.score(part) for part in parts]


def _outcome(score: float) -> RewardOutcome:
    return RewardOutcome(score) if math.isfinite(score) else RewardOutcome(None, f"the model's score is {score}")


def _require_all(role: Role, parts: Sequence[Sequence[Conversation]], answers: Sequence[Any]) -> None:
    """RuntimeError if the first rank's answer does not have one outcome for each conversation of each part."""
    given, required = [len(part) for part in answers[0]], [len(part) for part in parts]
    if given != required:
        text = f"{sum(given)} scores for {sum(required)} conversations"
        raise RuntimeError(f"the {role.replace('_', ' ')} has given {text}")


class RewardModelClient:
    """Scores samples with the ranks of one reward model. Requests that arrive while they compute are the next batch.

    together: whether all waiting requests are one part (score_parts), because a round requests all at once.
    """

    def __init__(self, role: Role, group: RankGroup, *, together: bool = False) -> None:
        self._role, self._group, self._together = role, group, together
        self._waiting: list[tuple[list[Conversation], asyncio.Future[list[RewardOutcome]]]] = []
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(([Conversation.of_sample(sample) for sample in samples], answer))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        outcomes: list[RewardOutcome] = await answer
        return outcomes

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                parts = [part for part, _ in batch]
                if self._together:
                    parts = [[conversation for part in parts for conversation in part]]
                accept = partial(_require_all, self._role, parts)
                if isinstance(self._group, FrozenRanks):
                    answers = await self._group.call_all("score", self._role, parts, accept=accept)
                else:
                    accept(answers := await self._group.call_all("score", self._role, parts))
                outcomes = [outcome for part in answers[0] for outcome in part]
            except Exception as error:
                for _, answer in [*batch, *self._waiting]:
                    if not answer.done():
                        answer.set_exception(error)
                self._waiting = []
                return
            scores = iter(outcomes)
            for part, answer in batch:
                values = [next(scores) for _ in part]
                if not answer.done():
                    answer.set_result(values)
