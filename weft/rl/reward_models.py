"""Reward models that rl.reward names as model:PATH. Each has ranks of its own, which score whole conversations, through
its own chat template and tokenizer, while the policy is sampled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.config.rl_schema import RlConfig, reward_models
from weft.config.schema import LoraConfig, MeshConfig, ModelConfig, OptimizerConfig
from weft.data.encode import Encoder, Encoding, load_tokenizer
from weft.data.records import Record, template_inputs
from weft.engine.batch.document import Document
from weft.engine.batch.media import ImageRoom
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.score_head import ScoreSpec
from weft.engine.scores import scored_document, step_scores
from weft.errors import UserError, first_line
from weft.inference.types import Sample
from weft.launch import flight
from weft.launch.options import Device
from weft.launch.process import Ranks, leave
from weft.launch.ray_actors import ActorGroup
from weft.models import hf
from weft.rl.model_engines import policy_config
from weft.rl.reference_critic import start_rank
from weft.rl.rewards.calls import RewardOutcome
from weft.terminal import counted


@dataclass(frozen=True)
class Conversation:
    """What a reward model scores. source: for messages. prompt, answer: both messages, or both texts. columns: of the
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
    """Raises UserError, before anything starts, if a reward model is none, or cannot be read."""
    for path in reward_models(config.rl.reward).values():
        try:
            model = hf.read_config(path)
        except UserError as error:
            raise UserError(f"rl.reward: model:{path}: {error}") from error
        if not hf.classifies(model):
            raise UserError(
                f"rl.reward: model:{path} is a {(model.architectures or ['model'])[0]} without a trained head of "
                "scores: weft reward makes a reward model of it."
            )
        if model.num_labels != 1:
            raise UserError(
                f"rl.reward: model:{path} has {counted(model.num_labels, 'label')}; a reward is one number: name a "
                "model with one label, or write a function that calls this one."
            )
        load_tokenizer(path)


def reward_model_config(config: RlConfig, path: str) -> EngineConfig:
    """The engine config of the reward model at `path`."""
    policy, section = policy_config(config), config.reward_model
    fsdp = replace(
        policy.fsdp, wrap="auto", overrides={}, cast_forward_inputs=(), cpu_offload=section.cpu_offload,
        param_dtype=section.param_dtype or policy.fsdp.param_dtype,
    )  # fmt: skip
    usual = MeshConfig()
    return EngineConfig(
        model=ModelConfig(path=path, attention=policy.model.attention, compile=policy.model.compile),
        lora=LoraConfig(),
        mesh=MeshConfig(
            dp_replicate=section.dp_replicate or usual.dp_replicate, dp_shard=section.dp_shard or usual.dp_shard,
            tp=section.tp, pp=section.pp,
        ),
        fsdp=fsdp,
        step=replace(
            policy.step, max_tokens_per_device=section.max_tokens_per_device or policy.step.max_tokens_per_device
        ),
        optimizer=OptimizerConfig(),
        seed=policy.seed,
        deterministic=policy.deterministic,
        purpose="inference",
        score=ScoreSpec(end_marked=True),
    )  # fmt: skip


class ConversationScorer:
    """The engine of a reward model, with its tokenizer and chat template. Raises UserError for a model that the mesh
    cannot hold. Collective."""

    def __init__(self, config: RlConfig, path: str, ranks: Ranks, *, shares_with: Engine | None = None) -> None:
        """shares_with: another engine of these ranks."""
        try:
            self.engine = Engine(reward_model_config(config, path), ranks, shares_with=shares_with)
        except UserError as error:
            raise UserError(f"the reward model (rl.reward: model:{path}, keys reward_model.*): {error}") from error
        self.encoder = Encoder(load_tokenizer(path), Encoding("all"))
        self.pad = hf.padding_id(path)

    def score(self, conversations: Sequence[Conversation]) -> list[RewardOutcome]:
        """The score of each conversation, or the error for which it has none; the same on every rank. Collective."""
        documents, outcomes = list[Document](), list[RewardOutcome | None]()
        for conversation in conversations:
            try:
                ids = self.encoder.encode([conversation.record])[0].ids
            except ValueError as error:  # of a template that refuses the conversation
                outcomes.append(RewardOutcome(None, first_line(error)))
                continue
            if len(ids) > self.engine.budget:
                text = f"the conversation has {len(ids)} tokens, more than reward_model.max_tokens_per_device"
                outcomes.append(RewardOutcome(None, f"{text} = {self.engine.budget}"))
                continue
            documents.append(scored_document(torch.tensor(ids), self.pad, source=conversation.source))
            outcomes.append(None)
        if not documents:
            return [outcome for outcome in outcomes if outcome is not None]
        plan, local = self.engine.plan_step(documents)
        scores = iter(step_scores(self.engine, plan, local).values())
        return [_outcome(next(scores)) if outcome is None else outcome for outcome in outcomes]


class RewardModelRank:
    """One of the ranks of a reward model. Methods are called on all of them together."""

    def __init__(self, config: RlConfig, path: str, device: Device = "auto") -> None:
        self.path, self.ranks = path, start_rank(config, device)
        self.scorer = ConversationScorer(config, path, self.ranks)
        self.engine = self.scorer.engine

    def describe(self) -> list[str]:
        """A line that describes this reward model at start."""
        kind, dtype = type(self.engine.built.module.hf_model).__name__, self.engine.precision.compute
        return [
            f"reward   {self.path}: {kind}, in {str(dtype).removeprefix('torch.')}: {self.engine.memory}; on "
            f"{counted(self.ranks.world, 'rank')} of its own"
        ]

    def check_images(self, samples: Sequence[tuple[str, int, int]]) -> None:
        """Raises UserError: a reward model reads texts."""
        raise UserError(
            f"{samples[0][0]}: has images, and a reward model of rl.reward ({self.path}) reads texts alone in this "
            "version: score such samples with a function."
        )

    def image_room(self) -> ImageRoom:
        return self.engine.planner.image_room

    def open_run(self, folder: str, constants: Mapping[str, Any], last: int = 0) -> None:
        """Enter RUN; there is nothing to restore."""
        flight.in_run(Path(folder))

    def score(self, conversations: Sequence[Conversation]) -> list[RewardOutcome]:
        """The score of each conversation, or the error for which it has none; the same on every rank."""
        flight.enter("score")
        return self.scorer.score(conversations)

    def close(self) -> None:
        """Leave the process group."""
        leave()


def _outcome(score: float) -> RewardOutcome:
    return RewardOutcome(score) if math.isfinite(score) else RewardOutcome(None, f"the model's score is {score}")


class RewardModelClient:
    """Scores samples with the ranks of one reward model. What is asked for while they compute is their next batch."""

    def __init__(self, group: ActorGroup) -> None:
        self._group = group
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
                conversations = [conversation for part, _ in batch for conversation in part]
                outcomes, *_ = await self._group.call_all("score", conversations)
                if len(outcomes) != len(conversations):
                    raise RuntimeError(
                        f"the {self._group.name} has given {len(outcomes)} scores for {len(conversations)} "
                        "conversations"
                    )
            except Exception as error:
                for _, answer in [*batch, *self._waiting]:
                    if not answer.done():
                        answer.set_exception(error)
                self._waiting = []
                return
            rest = iter(outcomes)
            for part, answer in batch:
                values = [next(rest) for _ in part]
                if not answer.done():
                    answer.set_result(values)
