"""Reinforcement learning: `weft rl`. The controller's loop is `train`; what trains and what generates are actors."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from weft.cluster.machine import cpu_cores
from weft.cluster.options import RlOptions
from weft.cluster.rays import ActorGroup, Bundle, actor_group, import_ray, ray_session
from weft.cluster.stopping import StopSignals
from weft.config.rl_schema import RlAlgorithm, RlConfig
from weft.data.tokenizer import load_tokenizer
from weft.engine.schedule import learning_rate
from weft.errors import ActorError, StoppedError
from weft.observe.progress import Progress
from weft.observe.summary import Phases
from weft.observe.trackers import check_installed
from weft.recipes.folder import Held, hold_folder, write_config
from weft.recipes.resume import put_in_order
from weft.recipes.rl_record import RlRecorder, print_rl_opening, say_stopped
from weft.recipes.rl_resume import FRESH, RlStart, constants, find_start
from weft.rl.advantages import advantages, shape_rewards
from weft.rl.corrections import correct
from weft.rl.documents import deal
from weft.rl.environments import Episodes, load_environment
from weft.rl.pool import EmbeddedPool
from weft.rl.prompts import Prompts, PromptStream, load_rl_prompts
from weft.rl.records import cut_rollouts
from weft.rl.rewards import Rewards, completion_texts
from weft.rl.rollouts import rollout_group
from weft.rl.trainer import Trainer
from weft.rl.types import Group
from weft.rollout.base import RolloutEngine, Sampling


def run(config: RlConfig, options: RlOptions) -> None:
    """Entry point of the controller. Raises StoppedError where a signal ended the run early."""
    check_installed(config.track)
    import_ray()
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_rl_prompts(config, tokenizer)
    stream = PromptStream(prompts, config.rl.prompts, config.train.seed, config.data.shuffle)
    plan = Plan.of(config, stream)
    resume = options.resume is not None
    rewards, episodes = Rewards(config.rl), load_environment(config, tokenizer)
    with hold_folder(config, resume=resume) as held:
        start = find_start(config, held.folder, prompts, plan) if resume else FRESH
        if start.step == plan.steps:
            Console().print(f"{held.folder} has finished already: step {start.step}.")
            return
        if resume:
            notes = put_in_order(held.folder, start.step, {})
            cut_rollouts(held.folder, start.rollout)
            write_config(config, held.folder)
            start = replace(start, notes=(*start.notes, *notes))
        with ExitStack() as stack:
            bundles = trainer_bundles(options)
            stack.enter_context(ray_session(config.cluster.address, bundles))
            trainers = stack.enter_context(open_trainers(config, options, bundles, fill=start.state is None))
            try:
                asyncio.run(
                    train(Run(config, held, prompts, stream, tokenizer, trainers, rewards, episodes, plan, start))
                )
            except ActorError:
                trainers.keep_evidence(held.folder)
                raise


@dataclass(frozen=True)
class Plan:
    """How many steps there are. A rollout step is `updates` x `epochs` optimizer steps over prompts x group_size
    samples; steps: optimizer steps of the whole run."""

    rollouts: int
    per_rollout: int

    @property
    def steps(self) -> int:
        return self.rollouts * self.per_rollout

    @staticmethod
    def of(config: RlConfig, stream: PromptStream) -> Plan:
        """From train.steps, or train.epochs passes over the prompts."""
        per_rollout = config.rl.updates * config.rl.epochs
        if config.train.steps is not None:
            return Plan(-(-config.train.steps // per_rollout), per_rollout)
        assert config.train.epochs is not None
        return Plan(stream.steps(config.train.epochs), per_rollout)


@dataclass
class Run:
    """What the controller's loop works with."""

    config: RlConfig
    held: Held
    prompts: Prompts
    stream: PromptStream
    tokenizer: PreTrainedTokenizerBase
    trainers: ActorGroup
    rewards: Rewards
    episodes: Episodes | None
    plan: Plan
    start: RlStart
    phases: Phases = field(default_factory=Phases)


async def train(run: Run) -> None:
    """Rollouts, rewards, advantages, optimizer steps, a sync of the weights; and again."""
    config, trainers, phases, start = run.config, run.trainers, run.phases, run.start
    phases.go_on(start.seconds)
    run.stream.take(start.taken)
    with phases("load"):
        await run.rewards.start(run.prompts)
        opening, *_ = await trainers.all("describe")
        ends, *_ = await trainers.all("ends")
        notes = (await trainers.all("open_run", str(run.held.folder), run.held.token, constants(run), start.step))[0]
    print_rl_opening(run, opening, notes)
    engine, sampling = EmbeddedPool(trainers), sampling_of(config, ends)
    recorder = RlRecorder(config, run.held.folder, start)
    progress = Progress(run.plan.steps, extra=("reward",))
    with recorder, StopSignals() as signals, progress:
        await sync(run, start.rollout)
        for number in range(start.rollout + 1, run.plan.rollouts + 1):
            step = RolloutStep(number)
            groups = await roll_out(run, engine, sampling, step)
            metrics = await judge(run, groups, step)
            lines = await update(run, groups, step)
            with step.phases("sync"):
                await sync(run, number)
            progress.notes(run.rewards.take_news())
            for line in recorder.record(step, groups, lines, metrics, run.tokenizer):
                progress.step(line)
            recorder.stop_if_hopeless(lines)
            done = bool(signals.number) or number == run.plan.rollouts
            if done or recorder.due(number, run.plan):
                with phases("save"):
                    progress.notes(await save(run, recorder, number))
            if done:
                break
        saved, news = (await trainers.all("finish"))[0]
        progress.notes(news)
    recorder.finish(phases, Path(saved), signals.number)
    await run.rewards.close()
    await trainers.all("close")
    if signals.number and number < run.plan.rollouts:
        say_stopped(run, number * run.plan.per_rollout, signals.number)
        raise StoppedError(signals.number)


@dataclass
class RolloutStep:
    """One rollout step while it is made. number counts from 1; phases: its seconds."""

    number: int
    phases: Phases = field(default_factory=Phases)
    began: float = field(default_factory=time.perf_counter)


async def roll_out(run: Run, engine: RolloutEngine, sampling: Sampling, step: RolloutStep) -> list[Group]:
    """A group of samples for each of the step's prompts, with rewards."""
    rl, seed = run.config.rl, run.config.train.seed
    with step.phases("generate"):
        prompts = run.stream.take()
        groups = await asyncio.gather(
            *(rollout_group(prompt, rl.group_size, engine, sampling, run.episodes, seed) for prompt in prompts)
        )
    with step.phases("reward"):
        samples = [sample for group in groups for sample in group.samples]
        await run.rewards.score(samples, completion_texts(samples, run.tokenizer))
        shape_rewards(groups, run.config)
    return list(groups)


async def judge(run: Run, groups: Sequence[Group], step: RolloutStep) -> dict[str, float]:
    """Old logprobs, advantages and corrections of all samples; what the metrics say of them."""
    samples = [sample for group in groups for sample in group.samples]
    with step.phases("logprobs"):
        for method, of_sample in readings(run.config.rl).items():
            for part in await run.trainers.all(method, samples):
                for index, values in part.items():
                    setattr(samples[index], of_sample, values)
    corrections = correct(samples, run.config.rl)
    return {**advantages(groups, run.config.rl), **corrections, **run.rewards.metrics()}


def readings(rl: RlAlgorithm) -> dict[str, str]:
    """What the trainers read of samples before they are trained: method -> attribute of Sample."""
    asked = {"logprobs": "old"}
    if rl.kl > 0:
        asked["reference_logprobs"] = "reference"
    if rl.advantage == "gae":
        asked["values"] = "values"
    return asked


async def update(run: Run, groups: Sequence[Group], step: RolloutStep) -> list[dict[str, object]]:
    """The optimizer steps of a rollout step; their lines."""
    config, lines = run.config, []
    number = (step.number - 1) * run.plan.per_rollout
    with step.phases("train"):
        for epoch in range(config.rl.epochs):
            for part in deal(groups, config.rl.updates, seed=config.train.seed + step.number * 1000 + epoch):
                number += 1
                lr = learning_rate(number, run.plan.steps, config.optimizer.lr, config.schedule)
                samples = [sample for group in part for sample in group.samples if sample.trained]
                args = (samples, number, run.plan.steps, epoch + 1, lr)
                lines.append((await run.trainers.all("update", *args))[0])
    return lines


async def sync(run: Run, version: int) -> None:
    """The policy's weights to every engine."""
    await run.trainers.all("sync", version)


async def save(run: Run, recorder: RlRecorder, number: int) -> list[str]:
    """A checkpoint of what stands after this rollout step."""
    progress = recorder.progress(run.phases) | {"rollout": number, "taken": run.stream.taken}
    return list((await run.trainers.all("save", number * run.plan.per_rollout, progress))[0])


def sampling_of(config: RlConfig, ends: Sequence[int]) -> Sampling:
    """How training's completions are drawn."""
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        ends=tuple(ends),
        stop=rollout.stop,
    )


# ---------------------------------------------------------------- actors


def trainer_bundles(options: RlOptions) -> list[Bundle]:
    """What each trainer rank asks of the cluster."""
    gpu = options.device == "cuda"
    return [Bundle(cpus=0.0 if gpu else 1.0, gpus=1.0 if gpu else 0.0)] * options.world


def open_trainers(
    config: RlConfig, options: RlOptions, bundles: Sequence[Bundle], *, fill: bool
) -> AbstractContextManager[ActorGroup]:
    """The trainer group: one process for each rank."""
    world, alone = len(bundles), config.cluster.address is None
    env = [
        {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0" if options.device == "cuda" else str(rank),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpu_cores() // world))),
            **({"GLOO_SOCKET_IFNAME": "lo"} if alone else {}),
        }
        for rank in range(world)
    ]  # fmt: skip
    return actor_group("trainer rank", partial(_make_trainer, config, options, fill), bundles, env)


def _make_trainer(config: RlConfig, options: RlOptions, fill: bool, rank: int) -> Trainer:
    return Trainer(config, options.device, fill=fill)
