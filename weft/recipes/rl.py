"""Reinforcement learning: `weft rl`. The controller's loop is `train`; what trains and what generates are actors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from weft.cluster.machine import cpu_cores
from weft.cluster.options import RlOptions
from weft.cluster.process import pretend
from weft.cluster.rays import ActorGroup, Bundle, actor_group, import_ray, ray_session
from weft.cluster.stopping import StopSignals
from weft.config.rl_schema import RlConfig
from weft.data.tokenizer import load_tokenizer
from weft.engine.engine import Engine
from weft.engine.schedule import learning_rate
from weft.errors import ActorError, StoppedError, UserError
from weft.models import hf
from weft.objectives.policy import choose_policy_loss
from weft.observe.opening import print_dry_run
from weft.observe.progress import Progress
from weft.observe.summary import Phases
from weft.observe.trackers import check_installed
from weft.recipes.folder import Held, hold_folder, write_config
from weft.recipes.resume import put_in_order
from weft.recipes.rl_record import RlRecorder, print_rl_opening, say_stopped
from weft.recipes.rl_resume import FRESH, RlStart, constants, find_start
from weft.rl.advantages import advantages, choose_estimator, reward_metrics, shape_rewards
from weft.rl.corrections import correct, require_comparable
from weft.rl.documents import deal
from weft.rl.engines import policy_config
from weft.rl.environments import Episodes, load_environment
from weft.rl.evaluate import HeldOutPrompts, RlEvaluator, read_held_out_prompts
from weft.rl.exact import require_exact
from weft.rl.producer import Producer
from weft.rl.prompts import Prompts, PromptStream, load_rl_prompts
from weft.rl.records import cut_rollouts, read_rollouts, rollout_files
from weft.rl.rewards import Failures, Rewards, completion_texts
from weft.rl.rollouts import groups_to_train, rollout_group
from weft.rl.served_pool import Reserved, check_engines, open_engines
from weft.rl.trainer import DTYPE_NAMES, Trainer
from weft.rl.types import Group, Prompt, Sample
from weft.rollout.base import RolloutEngine, Sampling
from weft.rollout.standalone import Standalone


def run(config: RlConfig, options: RlOptions) -> None:
    """Entry point of the controller. Raises StoppedError where a signal ended the run early."""
    check_installed(config.track)
    choose_estimator(config.rl.advantage)  # the user's own are missed before anything is loaded
    choose_policy_loss(config.rl.policy_loss)
    if options.dry_run:
        with pretend(options.world, options.device) as ranks:
            engine = Engine(policy_config(config), ranks, weights=False)
            print_dry_run(config, engine, parameters=options.parameters)
        return
    import_ray()
    check_engines(config)
    task, resume = read_task(config), options.resume is not None
    plan, replayed = Plan.of(config, task.stream), list_replayed(options.replay)
    if replayed:
        plan = replace(plan, rollouts=min(plan.rollouts, len(replayed)))
    with hold_folder(config, resume=resume) as held:
        start = find_start(config, held.folder, task.prompts, plan) if resume else FRESH
        if start.step == plan.steps:
            Console(highlight=False, soft_wrap=True).print(f"{held.folder} has finished already: step {start.step}.")
            return
        if resume:
            notes = put_in_order(held.folder, start.step, {})
            cut_rollouts(held.folder, start.rollout)
            write_config(config, held.folder)
            start = replace(start, notes=(*start.notes, *notes))
        with open_actors(config, options, fill=start.state is None) as (trainers, standalone):
            try:
                opened = Run(config, held, task, trainers, standalone, plan, start, replayed)
                asyncio.run(collect(opened) if options.rollout_only else train(opened))
            except ActorError:
                trainers.keep_evidence(held.folder)
                raise


def list_replayed(folder: str | None) -> list[Path]:
    """The files of `--replay RUN/rollouts` in their order. UserError where there are none."""
    files = [] if folder is None else list(rollout_files(Path(folder)).values())
    if folder is not None and not files:
        raise UserError(f"--replay {folder}: no rollouts are there. Name a folder RUN/rollouts of a run of weft rl.")
    return files


@dataclass(frozen=True)
class Task:
    """What is asked, and what it is worth."""

    prompts: Prompts
    held_out: HeldOutPrompts
    stream: PromptStream
    tokenizer: PreTrainedTokenizerBase
    rewards: Rewards
    episodes: Episodes | None


def read_task(config: RlConfig) -> Task:
    """Prompts, rewards and environment of a config. Raises UserError for whatever the user has to mend."""
    tokenizer = load_tokenizer(config.model.path)
    episodes = load_environment(config, tokenizer)
    vocabulary = hf.read_config(config.model.path).get_text_config().vocab_size
    prompts = load_rl_prompts(config, tokenizer, vocab_size=vocabulary)
    stream = PromptStream(prompts, config.rl.prompts, config.train.seed, config.data.shuffle)
    held_out = read_held_out_prompts(config, tokenizer, vocabulary)
    return Task(prompts, held_out, stream, tokenizer, Rewards(config.rl), episodes)


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
    task: Task
    trainers: ActorGroup
    standalone: ActorGroup | None
    plan: Plan
    start: RlStart
    replayed: Sequence[Path] = ()  # files of rollouts that are trained from, in place of new ones
    phases: Phases = field(default_factory=Phases)
    version: int = 0  # of the weights that the trainers have: rollout steps that are trained


@dataclass
class RolloutStep:
    """One rollout step. number counts from 1; taken: prompts of the stream up to its end; phases: its seconds."""

    number: int
    groups: Sequence[Group] = ()
    taken: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    failures: Failures = field(default_factory=Failures)
    phases: Phases = field(default_factory=Phases)

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]


async def train(run: Run) -> None:
    """Rollouts, rewards, advantages, optimizer steps, a sync of the weights; and again."""
    config, plan, first = run.config, run.plan, run.start.rollout + 1
    recorder = RlRecorder(config, run.held.folder, run.start)
    progress = Progress(plan.steps, extra=("reward",))
    async with AsyncExitStack() as opened:
        engine, sampling, evaluator = await prepare(run, opened)
        with recorder, StopSignals() as signals, progress:
            progress.notes(await begin(run, engine, evaluator, recorder))
            make = replay(run) if run.replayed else partial(roll_out, run, engine, sampling)
            producer = await opened.enter_async_context(
                Producer(make, first, plan.rollouts, config.cluster.max_staleness)
            )
            for number in range(first, plan.rollouts + 1):
                with run.phases("rollout"):
                    step = await producer.take()
                with run.phases("train"):
                    await judge(run, step)
                    lines = await update(run, step)
                with run.phases("sync"), step.phases("sync"):
                    synced = await engine.sync(number)
                run.version = number
                found = await evaluate(evaluator, number, plan)
                done = bool(signals.number) or number == plan.rollouts
                if not done:
                    await producer.trained(number)
                progress.notes(step.failures.take_news())
                for line in recorder.record(step, lines, synced, found, run.task.tokenizer):
                    progress.step(line)
                progress.notes(recorder.record_evaluation(number * plan.per_rollout, found, run.task.tokenizer))
                recorder.stop_if_hopeless(lines)
                if done or recorder.due(number, plan):
                    with run.phases("save"):
                        progress.notes(await save(run, recorder, step))
                if done:
                    break
            saved, news = (await run.trainers.all("finish"))[0]
            progress.notes(news)
        stopped = signals.number if number < plan.rollouts else 0
        recorder.finish(run.phases, Path(saved), stopped)
        await run.trainers.all("close")
    if stopped:
        say_stopped(run, number * plan.per_rollout, stopped)
        raise StoppedError(stopped)


async def collect(run: Run) -> None:
    """Rollouts of the weights as they are, and nothing trained (`--rollout-only`)."""
    recorder = RlRecorder(run.config, run.held.folder, run.start)
    async with AsyncExitStack() as opened:
        engine, sampling, _ = await prepare(run, opened)
        with recorder, StopSignals() as signals, Progress(run.plan.rollouts, extra=("reward",)) as progress:
            await engine.sync(0)
            for number in range(1, run.plan.rollouts + 1):
                step = await roll_out(run, engine, sampling, number)
                step.metrics |= {**reward_metrics(step.groups), **step.failures.metrics()}
                progress.notes(step.failures.take_news())
                progress.step(recorder.record_rollout(step, run.task.tokenizer))
                if signals.number:
                    break
        await run.trainers.all("close")


async def prepare(run: Run, opened: AsyncExitStack) -> tuple[Any, Sampling, RlEvaluator]:
    """Everything that goes before the first rollout: the engines, how they draw, and what is evaluated. opened: closes
    what needs to be closed."""
    config, task, trainers, start = run.config, run.task, run.trainers, run.start
    opened.push_async_callback(task.rewards.close)
    run.phases.go_on(start.seconds)
    task.stream.take(start.taken)
    run.version = start.rollout
    with run.phases("load"):
        await task.rewards.start([*task.prompts, *task.held_out.all()])
        opening, *_ = await trainers.all("describe")
        ends, *_ = await trainers.all("ends")
        notes, *_ = await trainers.all("open_run", str(run.held.folder), run.held.token, constants(run), start.step)
        engine = await open_engines(config, trainers, run.standalone, run.held.folder)
        opened.push_async_callback(engine.close)
    print_rl_opening(run, opening, notes)
    evaluator = RlEvaluator(config, task.held_out, engine, task.rewards, task.tokenizer, task.episodes, ends)
    return engine, sampling_of(config, ends), evaluator


async def begin(run: Run, engine: Any, evaluator: RlEvaluator, recorder: RlRecorder) -> list[str]:
    """The first sync, what is proven of it, and the evaluation before the first step; what there is to print."""
    await engine.sync(run.start.rollout)
    notes: list[str] = []
    if run.config.rl.on_policy == "exact" and run.config.rollout.engine == "embedded":
        notes += (await run.trainers.all("prove_exact"))[:1]
    if not run.start.rollout:
        notes += recorder.record_evaluation(0, await evaluate(evaluator, 0, run.plan), run.task.tokenizer)
    return notes


def replay(run: Run) -> Callable[[int], Awaitable[RolloutStep]]:
    """Makes rollout steps of files of RUN/rollouts: what was sampled and its rewards; all else is worked out anew."""

    async def make(number: int) -> RolloutStep:
        groups = read_rollouts(run.replayed[number - 1])
        for sample in (sample for group in groups for sample in group.samples):
            sample.old = sample.reference = sample.values = sample.advantages = sample.correction = None
        return RolloutStep(number, groups, taken=0)

    return make


async def roll_out(run: Run, engine: RolloutEngine, sampling: Sampling, number: int) -> RolloutStep:
    """A group of samples for each prompt of a rollout step, with rewards."""
    rl, step = run.config.rl, RolloutStep(number)

    async def answer(prompts: Sequence[Prompt]) -> list[Group]:
        with step.phases("generate"):
            groups = await asyncio.gather(
                *(
                    rollout_group(prompt, rl.group_size, engine, sampling, run.task.episodes, run.config.train.seed)
                    for prompt in prompts
                )
            )
        with step.phases("reward"):
            samples = [sample for group in groups for sample in group.samples]
            await run.task.rewards.score(samples, completion_texts(samples, run.task.tokenizer), step.failures)
            shape_rewards(groups, run.config)
        return list(groups)

    step.groups, replaced = await groups_to_train(run.task.stream, answer, rl.dynamic_sampling)
    if rl.dynamic_sampling:
        step.metrics["rollout/replaced"] = float(replaced)
    step.taken = run.task.stream.taken
    require_comparable(step.samples, sampling)
    return step


async def judge(run: Run, step: RolloutStep) -> None:
    """What the trainers say of the samples (logprobs of old and reference policy, values), and what follows from it:
    corrections and advantages."""
    rl, samples = run.config.rl, step.samples
    with step.phases("logprobs"):
        if rl.old_logprobs == "recompute":
            await read(run, "policy", "old", samples)
        if rl.kl > 0:
            await read(run, "reference", "reference", samples)
        if rl.advantage == "gae":
            await read(run, "critic", "values", samples)
    if rl.on_policy == "exact":
        require_exact(samples)
    corrections = correct(samples, rl)  # sets old logprobs that are not recomputed, which advantages may read
    step.metrics |= {
        **advantages(step.groups, rl), **corrections, **step.failures.metrics(), **staleness(samples, run.version),
    }  # fmt: skip


async def read(run: Run, who: str, name: str, samples: Sequence[Sample]) -> None:
    """Set an array of each sample to what an engine of the trainers reads."""
    for part in await run.trainers.all("read", who, list(samples)):
        for index, values in part.items():
            setattr(samples[index], name, values)


async def update(run: Run, step: RolloutStep) -> list[dict[str, object]]:
    """The optimizer steps of a rollout step; their lines."""
    config, plan, lines = run.config, run.plan, []
    number = (step.number - 1) * plan.per_rollout
    with step.phases("train"):
        for epoch in range(config.rl.epochs):
            for part in deal(step.groups, config.rl.updates, seed=config.train.seed + step.number * 1000 + epoch):
                number += 1
                lr = learning_rate(number, plan.steps, config.optimizer.lr, config.schedule)
                samples = [sample for group in part for sample in group.samples]
                lines.append((await run.trainers.all("update", samples, number, plan.steps, epoch + 1, lr))[0])
    return lines


async def evaluate(evaluator: RlEvaluator, number: int, plan: Plan) -> Any:
    """What the evaluation after a rollout step found; None where none is due."""
    return await evaluator() if evaluator.due(number, plan.rollouts) else None


async def save(run: Run, recorder: RlRecorder, step: RolloutStep) -> list[str]:
    """A checkpoint of what stands after this rollout step."""
    progress = recorder.progress(run.phases) | {"rollout": step.number, "taken": step.taken}
    return list((await run.trainers.all("save", step.number * run.plan.per_rollout, progress))[0])


def staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """By how many versions of the weights sampled tokens are older than what trains on them."""
    lags = [version - int(v) for sample in samples for v in sample.versions[sample.sampled]]
    return {"staleness/mean": sum(lags) / len(lags), "staleness/max": float(max(lags))} if lags else {}


def sampling_of(config: RlConfig, ends: Sequence[int]) -> Sampling:
    """How training's completions are drawn."""
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        ends=tuple(ends),
        stop=rollout.stop,
    )


# ---------------------------------------------------------------- actors


@contextmanager
def open_actors(config: RlConfig, options: RlOptions, *, fill: bool) -> Iterator[tuple[ActorGroup, ActorGroup | None]]:
    """The trainer group, one process for each rank; and with rollout.engine=hf the engines', or on CUDA those that hold
    accelerators for engines that are servers."""
    alone, gpu = config.cluster.address is None, options.device == "cuda"
    bundle = Bundle(cpus=0.0 if gpu else 1.0, gpus=1.0 if gpu else 0.0)
    serves = config.rollout.engine in ("vllm", "sglang")
    engines = config.rollout.engines if config.rollout.engine == "hf" or (serves and gpu) else 0
    share = Bundle(gpus=float(config.rollout.tp)) if serves else bundle
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cpu_cores() // (options.world + engines))))

    def group(name: str, make: Any, one: Bundle, env: Sequence[dict[str, str]]) -> AbstractContextManager[ActorGroup]:
        common = {"OMP_NUM_THREADS": threads, **({"GLOO_SOCKET_IFNAME": "lo"} if alone else {})}
        return actor_group(name, make, [one] * len(env), [common | own for own in env])

    ranks = [
        {"RANK": str(rank), "WORLD_SIZE": str(options.world), "LOCAL_RANK": "0" if gpu else str(rank)}
        for rank in range(options.world)
    ]
    with (
        ray_session(config.cluster.address, [bundle] * options.world + [share] * engines),
        group("trainer rank", partial(_make_trainer, config, options, fill), bundle, ranks) as trainers,
    ):
        if not engines:
            yield trainers, None
            return
        make = _reserve if serves else partial(_make_engine, config, options)
        with group("rollout engine", make, share, [{} for _ in range(engines)]) as standalone:
            yield trainers, standalone


def _make_trainer(config: RlConfig, options: RlOptions, fill: bool, rank: int) -> Trainer:
    return Trainer(config, options.device, fill=fill)


def _reserve(number: int) -> Reserved:
    return Reserved()


def _make_engine(config: RlConfig, options: RlOptions, number: int) -> Standalone:
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    auto = "bf16" if options.device == "cuda" else "fp32"
    wanted = config.rollout.dtype if config.rollout.dtype != "auto" else config.fsdp.param_dtype
    return Standalone(
        config.model.path, config.lora, dtype=dtypes[auto if wanted == "auto" else wanted], device=options.device,
        tokenizer=load_tokenizer(config.model.path), exact=config.rl.on_policy == "exact",
    )  # fmt: skip
