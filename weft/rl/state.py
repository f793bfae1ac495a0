"""The state of the controller's loop in `weft rl`: its task, its plan, where it starts, and each rollout step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from weft.config.rl_schema import RlConfig
from weft.data.ends import AnswerEnds
from weft.inference.types import Sample, SampleGroup, samples_of
from weft.launch.options import Detail, Device
from weft.launch.summary import Phases
from weft.observe.folder import RunLock
from weft.observe.hooks import OnStep
from weft.observe.resume import Start
from weft.rl.actors import Actors
from weft.rl.agents.agents import Agents
from weft.rl.environments.episodes import Episodes
from weft.rl.evaluate import HeldOutPrompts
from weft.rl.frozen_ranks import FrozenRanks
from weft.rl.meter import Show
from weft.rl.prompts import Prompts, PromptStream
from weft.rl.reference_critic import CRITIC, Role
from weft.rl.restarts import RestartBudget
from weft.rl.rewards.base import Failures, Rewards
from weft.rl.trainer_group import RankGroup, TrainerGroup

_WINDOW = 3600.0  # seconds within which cluster.frozen_restarts counts


@dataclass(frozen=True)
class RlTask:
    """Prompts, rewards and environment or agent of a run. stream: the order of the training prompts. ends: of answers,
    in every engine and in checkpoints."""

    prompts: Prompts
    held_out: HeldOutPrompts
    stream: PromptStream
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards
    episodes: Episodes | Agents | None
    ends: AnswerEnds


@dataclass(frozen=True)
class RlStart(Start):
    """Where a run starts. rollout: number of rollout steps done. taken: number of prompts taken. empty_in_a_row,
    flat_in_a_row: counts of EmptySteps and FlatSteps."""

    rollout: int = 0
    taken: int = 0
    empty_in_a_row: int = 0
    flat_in_a_row: int = 0


FRESH = RlStart()


@dataclass(frozen=True)
class RlPlan:
    """The number of steps of a run. rollouts: rollout steps. per_rollout: optimizer steps of each, rl.minibatches x
    rl.epochs. steps: optimizer steps of the whole run."""

    rollouts: int
    per_rollout: int

    @property
    def steps(self) -> int:
        return self.rollouts * self.per_rollout

    @staticmethod
    def from_config(config: RlConfig, stream: PromptStream) -> RlPlan:
        """The plan for train.steps optimizer steps, rounded up to whole rollout steps, or for train.epochs."""
        per_rollout = config.rl.minibatches * config.rl.epochs
        if config.train.steps is not None:
            return RlPlan(-(-config.train.steps // per_rollout), per_rollout)
        assert config.train.epochs is not None
        return RlPlan(stream.steps(config.train.epochs), per_rollout)


@dataclass
class RlRun:
    """The state of the controller's loop. resume_command: the command that resumes the run."""

    config: RlConfig
    run_lock: RunLock
    task: RlTask
    actors: Actors
    plan: RlPlan
    start: RlStart
    replayed: Sequence[Path] = ()  # files of recorded rollouts to train on, instead of new ones
    on_step: OnStep | None = None
    resume_command: str = ""
    device: Device = "cpu"
    resume: bool = False
    detail: Detail = "normal"  # the amount of the first lines to print
    opening: bool = True  # print the first lines
    show: Show = lambda text: None  # shows the progress of rollouts
    phases: Phases = field(default_factory=Phases)
    compute: str = ""  # the trainers' dtype
    device_name: str = ""  # of the first trainer
    version: int = 0  # of the trainers' weights: the number of rollout steps trained so far
    updates: int = 0  # optimizer steps that were not skipped, which the learning rate depends on
    other_ranks: dict[Role, RankGroup] = field(init=False)  # separate ranks of other models
    trainer_group: TrainerGroup = field(init=False)
    restarts: RestartBudget = field(init=False)

    def __post_init__(self) -> None:
        rollout = self.config.rollout
        limit = 0 if rollout.engine == "embedded" else rollout.restarts
        self.restarts = RestartBudget(limit, rollout.restart_window, "rollout.restarts")

        def budget() -> RestartBudget:
            limit, key = self.config.cluster.frozen_restarts, "cluster.frozen_restarts"
            return RestartBudget(limit, _WINDOW, key, lambda text: self.restarts.show(text))

        self.other_ranks = {
            role: group if role == CRITIC else FrozenRanks(group, budget())
            for role, group in self.actors.reference_critic.items()
        }
        self.trainer_group = TrainerGroup(self.config, self.actors.trainers, self.other_ranks)


@dataclass
class RolloutStep:
    """One rollout step. number: counts from 1. taken: prompts of the stream that were consumed by its end, in total.
    phases: its seconds by phase."""

    number: int
    groups: Sequence[SampleGroup] = ()
    taken: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    failures: Failures = field(default_factory=Failures)
    phases: Phases = field(default_factory=Phases)

    @property
    def samples(self) -> list[Sample]:
        return samples_of(self.groups)
