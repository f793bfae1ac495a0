"""Reinforcement learning: `weft rl`. The controller's loop is `train`; trainers and rollout engines are actors."""

from __future__ import annotations

import asyncio
import io
import shlex
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from weft.checkpoint.remote.uploads import Uploads, upload_all
from weft.checkpoint.remote.uploads import prepare as prepare_uploads
from weft.config.conditions import ENGINES
from weft.config.rl_schema import BUILT_IN_REWARDS, RlConfig, reward_models
from weft.data.encode import load_tokenizer, read_encoding
from weft.data.ends import answer_ends, template_ends
from weft.data.images import read_images
from weft.engine.losses.policy import choose_policy_loss
from weft.engine.optim.schedule import learning_rate
from weft.errors import StoppedError, UserError
from weft.inference.base import SamplingParams
from weft.inference.records import import_arrow, read_rollouts, recorded_files
from weft.inference.standalone import engine_class
from weft.inference.types import Prompt, Sample, SampleGroup, samples_of
from weft.launch import flight
from weft.launch.launch import note_run
from weft.launch.options import RlOptions
from weft.launch.process import check_cpu_backend
from weft.launch.ray_actors import exposure, import_ray
from weft.launch.reaper import reaping
from weft.launch.stopping import StopSignals
from weft.models import hf
from weft.observe.closing import say_stopped
from weft.observe.folder import lock_folder, write_bad_rows, write_config
from weft.observe.hooks import NO_RL_HOOKS, RlHooks
from weft.observe.progress import Progress
from weft.observe.resume import advice_after_last_step
from weft.observe.trackers import check_installed
from weft.plugins import shadowed
from weft.rl.actors import open_actors
from weft.rl.advantages import advantages, choose_estimator, reward_metrics, shape_rewards
from weft.rl.agents.agents import Agents, agent_metrics, load_agents
from weft.rl.agents.base import check_agent
from weft.rl.algorithms import UNUSABLE
from weft.rl.colocation import DeviceSharing, shares_devices, sleeping_parts
from weft.rl.corrections import correct, old_is_current, parity_is_due, require_comparable, require_parity
from weft.rl.documents import deal, is_trained, longest_samples
from weft.rl.environments.base import environment_class
from weft.rl.environments.episodes import Episodes, load_environment
from weft.rl.evaluate import RlEvaluator, read_held_out_prompts
from weft.rl.exact import require_exact, try_engine
from weft.rl.failure import report_failures, watching_controller
from weft.rl.meter import Meter
from weft.rl.placement import TIMED, resolve_placement
from weft.rl.producer import RolloutQueue
from weft.rl.prompts import PromptStream, check_lengths, load_rl_prompts, with_images
from weft.rl.recorder import RlRecorder, note_rl_start, print_rl_opening
from weft.rl.reference_critic import device_role, read_before_training
from weft.rl.resume import constants, find_collected, find_start, notes_on_replay, prepare_folder
from weft.rl.reward_models import RewardModelClient, check_reward_models
from weft.rl.rewards.base import Rewards, decode
from weft.rl.rollouts import EarlyStop, groups_to_train, rewarded_groups, rollout_group
from weft.rl.served_pool import check_engines, check_hosts, open_engines
from weft.rl.state import FRESH, RlPlan, RlRun, RlTask, RolloutStep
from weft.rl.teacher import add_teacher_advantages
from weft.rl.trainer_clock import TrainerClock
from weft.terminal import counted, display_name, say, say_all

_PROMISE = "this rollout step is finished, trained and saved, and then the run ends"


def run(config: RlConfig, options: RlOptions, hooks: RlHooks = NO_RL_HOOKS) -> None:
    """Entry point of the controller. Raises StoppedError if a signal ended the run early."""
    check_installed(config.track)
    check_cpu_backend(config.cluster.cpu_backend)
    import_ray()
    import_arrow()
    check_engines(config)
    if not options.rollout_only:
        prepare_uploads(config)
    task, resume = read_task(config, hooks), options.resume is not None
    plan, replayed = RlPlan.from_config(config, task.stream), list_replayed(options)
    if replayed:
        plan = replace(plan, rollouts=min(plan.rollouts, len(replayed)))
    with reaping(), lock_folder(config, resume=resume) as run_lock:
        note_run(run_lock.folder)
        start = FRESH
        if resume and options.rollout_only:
            start = find_collected(run_lock.folder)
        elif resume:
            start = find_start(config, run_lock.folder, task.prompts, plan, replayed=bool(replayed))
        if start.rollout == plan.rollouts:
            note = advice_after_last_step(start, config, plan.steps, run_lock.folder)
            say_all(upload_all(config, run_lock.folder))
            say(f"{run_lock.folder} has already finished: step {start.step}. {note}".rstrip())
            return
        if resume:
            start = prepare_folder(config, run_lock.folder, start)
        seconds = partial(time_rollout_steps, options, hooks, run_lock.folder)
        resolved = resolve_placement(config, options, plan.rollouts, seconds)
        shadows = [
            *filter(None, [UNUSABLE.get(config.rl.algorithm)]),
            *shadowed("rl.reward", config.rl.reward, BUILT_IN_REWARDS),
            *shadowed("rollout.engine", [config.rollout.engine], ENGINES),
        ]
        warnings = [*(f"warning  {text}" for text in shadows), *exposure(config.cluster.address)]
        notes = (*warnings, *start.notes, *resolved.notes, *notes_on_replay(config, replayed))
        config, start = resolved.config, replace(start, notes=notes)
        write_config(resolved.recorded, run_lock.folder)
        write_bad_rows([*task.prompts.bad, *task.held_out.bad], run_lock.folder)
        command = resume_command(run_lock.folder, options)
        with (
            open_actors(config, options, fill=start.state is None) as actors,
            report_failures(run_lock.folder, actors.groups, command),
        ):
            opened = RlRun(
                config,
                run_lock,
                task,
                actors,
                plan,
                start,
                replayed,
                hooks.on_step,
                command,
                options.device,
                resume,
                detail=options.detail,
            )
            asyncio.run(collect(opened) if options.rollout_only else train(opened))


def resume_command(folder: Path, options: RlOptions) -> str:
    """The command line that resumes a run."""
    options_text = (
        " --rollout-only"
        if options.rollout_only
        else f" --replay {shlex.quote(options.replay)}"
        if options.replay
        else ""
    )
    return f"weft rl --resume {shlex.quote(str(folder))}{options_text}"


def list_replayed(options: RlOptions) -> list[Path]:
    """The files of `--replay RUN/rollouts` in order; empty without the option. Raises UserError if there are none."""
    folder = options.replay
    if folder is not None and options.rollout_only:
        raise UserError("--rollout-only makes rollouts, and --replay trains on existing ones: remove one of them.")
    return [] if folder is None else recorded_files(folder, "--replay")


def check_task(config: RlConfig) -> PretrainedConfig:
    """The text config of the model. Raises UserError, before anything is loaded, if a user's function is missing or
    samples do not fit the model."""
    hf.import_architectures(config.model.imports, config.model.path)
    choose_estimator(config.rl.advantage)
    choose_policy_loss(config.rl.policy_loss)
    check_reward_models(config)
    environment_class(config)
    if config.rollout.engine not in ENGINES:
        engine_class(config.rollout.engine)
    if config.rl.agent is not None:
        check_agent(config.rl.agent)
    shape = hf.read_config(config.model.path).get_text_config()
    check_lengths(config, shape)
    return shape


def read_task(config: RlConfig, hooks: RlHooks = NO_RL_HOOKS) -> RlTask:
    """Reads prompts, and loads rewards and environment. Raises UserError for mistakes in the config, data or code."""
    vocabulary = check_task(config).vocab_size
    tokenizer = load_tokenizer(config.model.path)
    images = read_images(config.model.path, tokenizer, config.data)  # first, because it may set the chat template
    agents = load_agents(config, tokenizer, has_images=images is not None)
    episodes = agents or load_environment(config, tokenizer, images=images)
    prompts = load_rl_prompts(config, tokenizer, vocab_size=vocabulary, images=images)
    if config.rollout.engine == "sglang" and any(prompt.images for prompt in prompts):
        raise UserError(
            "rollout.engine=sglang does not support prompts with images in this version: set rollout.engine=vllm or "
            "embedded."
        )
    stream = PromptStream(prompts, config.rl.prompts_per_step, config.train.seed, config.data.shuffle)
    held_out = read_held_out_prompts(config, tokenizer, vocabulary, images)
    ends = template_ends(tokenizer, read_encoding(config.data, tokenizer))
    # A text that contains the template's end of turn was rendered with it before. Other texts end like documents.
    chats = agents is not None or any(
        p.messages is not None or not set(ends).isdisjoint(p.tokens) for p in (*prompts, *held_out.all())
    )
    ends_of_answers = answer_ends(config.model.path, tokenizer, ends if chats else ())
    return RlTask(prompts, held_out, stream, tokenizer, Rewards(config.rl, hooks.rewards), episodes, ends_of_answers)


async def train(run: RlRun) -> None:
    """The loop: rollouts, rewards, advantages, optimizer steps, weight sync. Raises StoppedError after a signal."""
    config, plan, first = run.config, run.plan, run.start.rollout + 1
    recorder = RlRecorder(config, run.run_lock.folder, run.start, run.on_step, cuda=run.device == "cuda")
    progress = Progress(plan.steps, interval=config.train.log_every)
    run.show, run.restarts.show = progress.doing, progress.note
    async with AsyncExitStack() as opened:
        uploads = opened.enter_context(Uploads(config, run.run_lock.folder, resume=run.resume))
        opened.push_async_exit(
            run.trainer_group.ending
        )  # before the uploads end, so that its last checkpoint is uploaded
        switch, sampling, evaluator = await prepare(run, opened)
        note_rl_start(run)
        with recorder, StopSignals(_PROMISE) as signals, progress:
            progress.notes(await begin(run, switch, sampling, evaluator, recorder))
            trainer_clock, engine_clock = TrainerClock(run.phases), switch.engine.clock
            engine_clock.take()  # discards the time before the first rollout step
            make = replay(run) if run.replayed else partial(roll_out, run, switch, sampling)
            producer = await opened.enter_async_context(
                RolloutQueue(make, first, plan.rollouts, config.cluster.max_staleness)
            )
            for number in range(first, plan.rollouts + 1):
                with run.phases("rollout"):
                    step = await producer.take()
                step.metrics["rollout/buffered"] = float(producer.buffered)
                with run.phases("train"):
                    await switch.to_training()
                    await compute_advantages(run, step)
                    lines = await update(run, step)
                with run.phases("sync"):
                    synced = await switch.to_rollouts(number)
                step.phases.add(switch.take_seconds())
                step.metrics |= run.restarts.metrics()
                run.version = number
                evaluated = await evaluate(evaluator, number, plan)
                step.metrics |= {**trainer_clock.take(), **engine_clock.take()}
                progress.notes([*step.failures.pop_messages(), *filter(None, [synced.note])])
                for line in recorder.record(step, lines, synced, evaluated):
                    progress.step(line)
                progress.notes(recorder.record_evaluation(number * plan.per_rollout, evaluated))
                progress.notes(recorder.stop_if_unproductive(step, lines))
                done = bool(signals.number) or number == plan.rollouts
                if done or recorder.due(number, plan):
                    async with switch.trainers_awake(back=not done):
                        with run.phases("save"):
                            progress.notes(await save(run, recorder, step))
                progress.notes(uploads.pop_messages())
                if done:
                    break
                await producer.trained(number)
            saved, news = await run.trainer_group.finish()
            progress.notes(news)
        stopped = signals.number if number < plan.rollouts else 0
        recorder.finish(run.phases, Path(saved), stopped)
        await run.trainer_group.close()
        say_all(await asyncio.to_thread(uploads.finish, bool(stopped), flight.recorder.beat))
    if number == plan.rollouts:
        recorder.flat.require_signal(number)
    if stopped:
        say_stopped(signal.Signals(stopped).name, number * plan.per_rollout, run.resume_command)
        raise StoppedError(stopped)


def time_rollout_steps(options: RlOptions, hooks: RlHooks, folder: Path, config: RlConfig) -> float:
    """Measures the seconds of a rollout step with this config, in a trial folder inside the run folder. The trial
    folder is removed afterwards."""
    trial = folder / "placement-trial"
    shutil.rmtree(trial, ignore_errors=True)
    config = replace(config, run=replace(config.run, dir=str(trial)))
    plan = RlPlan(TIMED, config.rl.minibatches * config.rl.epochs)
    try:
        with (
            redirect_stdout(io.StringIO()),
            lock_folder(config) as run_lock,
            open_actors(config, options, fill=True) as actors,
        ):
            task = read_task(config, hooks)
            return asyncio.run(timed(RlRun(config, run_lock, task, actors, plan, FRESH, device=options.device)))
    finally:
        shutil.rmtree(trial, ignore_errors=True)


async def timed(run: RlRun) -> float:
    """The mean seconds of the plan's rollout steps, without the first step, which includes start-up costs."""
    ends = []
    async with AsyncExitStack() as opened:
        switch, sampling, _ = await prepare(run, opened)
        await switch.to_rollouts(0)
        for number in range(1, run.plan.rollouts + 1):
            step = await roll_out(run, switch, sampling, number)
            await switch.to_training()
            await compute_advantages(run, step)
            await update(run, step)
            await switch.to_rollouts(number)
            run.version = number
            ends.append(time.perf_counter())
        await run.trainer_group.close()
    return (ends[-1] - ends[0]) / (len(ends) - 1)


async def collect(run: RlRun) -> None:
    """The loop of `--rollout-only`: rollouts with the current weights, without training."""
    recorder = RlRecorder(run.config, run.run_lock.folder, run.start, cuda=run.device == "cuda")
    async with AsyncExitStack() as opened:
        switch, sampling, _ = await prepare(run, opened)
        uploads = opened.enter_context(Uploads(run.config, run.run_lock.folder, resume=run.resume))
        progress = Progress(run.plan.rollouts, interval=run.config.train.log_every)
        run.show, run.restarts.show = progress.doing, progress.note
        note_rl_start(run)
        with recorder, StopSignals(_PROMISE) as signals, progress:
            await switch.to_rollouts(0)
            for number in range(run.start.rollout + 1, run.plan.rollouts + 1):
                step = await roll_out(run, switch, sampling, number)
                step.metrics |= {**reward_metrics(step.groups), **step.failures.metrics(), **run.restarts.metrics()}
                progress.notes(step.failures.pop_messages())
                progress.step(recorder.record_rollout(step))
                progress.notes(recorder.cut.count(step.samples))
                if signals.number:
                    break
        await run.trainer_group.close()
        say_all(await asyncio.to_thread(uploads.finish, bool(signals.number), flight.recorder.beat))
    if signals.number and number < run.plan.rollouts:
        say_stopped(signal.Signals(signals.number).name, number, run.resume_command)
        raise StoppedError(signals.number)
    folder = display_name(str(run.run_lock.folder))
    say(
        f"done     {counted(number, 'rollout step')}, nothing trained: {folder}/rollouts",
        f"next     weft rollouts {shlex.quote(folder)}  samples and their rewards",
        f"         weft rl ... --replay {shlex.quote(f'{folder}/rollouts')}  train on these rollouts",
    )


async def prepare(run: RlRun, opened: AsyncExitStack) -> tuple[DeviceSharing, SamplingParams, RlEvaluator]:
    """Opens the engines and the evaluator that the first rollout needs, and prints the opening. opened: closes them at
    the end."""
    config, task, trainers, start = run.config, run.task, run.actors.trainers, run.start
    opened.push_async_callback(task.rewards.close)
    if task.episodes is not None:
        opened.push_async_callback(task.episodes.close)
    if isinstance(task.episodes, Agents):
        await task.episodes.start()
    run.phases.add(start.seconds)
    task.stream.take(start.taken)
    run.version, run.updates = start.rollout, start.updates
    with run.phases("load"):
        await check_hosts(config, run.actors.engines)
        models = reward_models(config.rl.reward)
        scorers = "trainer" if config.reward_model.ranks is None else "reward_model"
        together = bool(models) and shares_devices(config, scorers)
        task.rewards.scorers = {
            role: RewardModelClient(role, run.other_ranks.get(role, trainers), together=together) for role in models
        }
        await task.rewards.start([*task.prompts, *task.held_out.all()])
        opening = await run.trainer_group.describe()
        await run.trainer_group.check_images(longest_samples(task.prompts, config.rollout.max_new_tokens))
        if isinstance(task.episodes, Episodes) and task.episodes.chats.images is not None:
            episodes = replace(task.episodes, room=await run.trainer_group.image_room())
            run.task = task = replace(task, episodes=episodes)
        run.compute = await trainers.call_one(0, "compute_dtype")
        run.device_name = await trainers.call_one(0, "device_name")
        texts = task.ends.files(config.model.path)
        notes = await run.trainer_group.open_run(
            str(run.run_lock.folder), run.run_lock.token, constants(run), start.step, texts
        )
        groups = {"trainer": trainers, **run.other_ranks}
        sharing = {role: group for role, group in groups.items() if shares_devices(config, device_role(role))}
        parts = next((sleeping_parts(config, run.device, device_role(role)) for role in sharing), ())
        engine = await open_engines(
            config, trainers, run.actors.engines, run.run_lock.folder, run.compute, run.restarts, parts,
            [*sharing.values()],
        )  # fmt: skip
        opened.push_async_callback(engine.close)
        switch = DeviceSharing(engine, [*sharing.values()], parts=parts, scores=together)
        await switch.to_training()
    if run.opening:
        print_rl_opening(run, opening, [*task.ends.lines(), *notes])
    opened.enter_context(watching_controller(config.train.timeout, run.run_lock.folder, run.resume_command))
    ends, rewards = task.ends.ids, task.rewards
    evaluator = RlEvaluator(config, task.held_out, switch, rewards, task.tokenizer, task.episodes, ends, run.show)
    return switch, sampling_of(config, ends), evaluator


async def begin(
    run: RlRun, switch: DeviceSharing, sampling: SamplingParams, evaluator: RlEvaluator, recorder: RlRecorder
) -> list[str]:
    """The first weight sync, its check for rl.on_policy=exact, and the evaluation before the first step. Returns
    messages for the user."""
    await switch.to_rollouts(run.start.rollout)
    notes: list[str] = []

    async def reader(samples: Sequence[Sample]) -> None:
        async with switch.trainers_awake(back=True):
            await run.trainer_group.read(["policy"], samples)

    if run.config.rl.on_policy == "exact":
        if run.config.rollout.engine == "embedded":
            notes += (await run.actors.trainers.call_all("prove_exact"))[:1]
        else:
            notes.append(await try_engine(run.config, switch.engine, reader, run.task.prompts, sampling))
    switch.take_seconds()  # discards the seconds before the first step
    if not run.start.rollout:
        notes += recorder.record_evaluation(0, await evaluate(evaluator, 0, run.plan))
    return notes


def replay(run: RlRun) -> Callable[[int], Awaitable[RolloutStep]]:
    """Returns a function that makes a rollout step from its file of RUN/rollouts. Samples and rewards are read from the
    file; everything else is computed again."""

    async def make(number: int) -> RolloutStep:
        groups = read_rollouts(run.replayed[number - 1])
        if run.config.rl.agent is None and any(sample.branch for sample in samples_of(groups)):
            raise UserError(
                f"--replay: {run.replayed[number - 1]} has agent episodes with several documents, which not every "
                "algorithm supports: set rl.agent as in the run that made them, so that weft can check the algorithm."
            )
        for sample in samples_of(groups):
            sample.prompt = with_images(sample.prompt, run.task.prompts)
            sample.forget_readings()
        return RolloutStep(number, groups, taken=0)

    return make


async def roll_out(run: RlRun, switch: DeviceSharing, sampling: SamplingParams, number: int) -> RolloutStep:
    """Samples and rewards a group for each prompt of rollout step `number`."""
    rl, step, engine = run.config.rl, RolloutStep(number), switch.engine

    extra, stops, first = run.config.rollout.oversample, list[EarlyStop](), run.task.stream.taken
    meter = Meter(f"rollout step {number}", lambda: engine.drawn)

    async def reward(group: SampleGroup) -> None:
        decode(group.samples, run.task.tokenizer)
        with meter.scoring(len(group.samples)):
            await run.task.rewards.score(group.samples, step.failures)
        for sample in group.samples:
            sample.times.rewarded = time.time()

    def counts(group: SampleGroup) -> bool:
        return not rl.dynamic_sampling or switch.scores_last or group.has_signal

    async def answer(prompts: Sequence[Prompt], needed: int) -> list[SampleGroup]:
        stop = EarlyStop(engine, needed, counts) if extra else None
        stops.extend([stop] if stop is not None else [])

        async def generate(prompt: Prompt) -> SampleGroup:
            source, seed = stop or engine, run.config.train.seed
            group = await rollout_group(prompt, rl.group_size, source, sampling, run.task.episodes, seed)
            meter.done += len(group.episodes)
            return group

        meter.expected += needed * rl.group_size
        return await rewarded_groups(prompts, generate, reward, step.phases, switch, stop)

    with engine.clock.rollout():
        async with meter.shown(run.show):
            # Dynamic sampling (DAPO, arXiv:2503.14476, equation 11) compares groups by rewards before shaping.
            step.groups, replaced = await groups_to_train(run.task.stream, answer, rl.dynamic_sampling, extra)
    shape_rewards(step.groups, run.config)
    if rl.agent is not None:
        step.metrics |= agent_metrics(step.samples)
    if rl.dynamic_sampling:
        step.metrics["rollout/replaced"] = float(replaced)
    if extra:
        dropped = run.task.stream.taken - first - len(step.groups) - replaced
        step.metrics["rollout/stopped_groups"] = float(sum(stop.groups for stop in stops))
        step.metrics["rollout/dropped_samples"] = float(dropped * rl.group_size)
    step.taken = run.task.stream.taken
    require_comparable(step.samples, sampling, allowed=run.config.rollout.allow_truncated)
    return step


async def compute_advantages(run: RlRun, step: RolloutStep) -> None:
    """Computes the samples' logprobs under old and reference policy and the critic's values, then corrections and
    advantages. Adds metrics to the step."""
    rl, samples = run.config.rl, step.samples
    checks = not run.replayed and parity_is_due(run.config, step.number - run.start.rollout)
    fused = old_is_current(run.config)
    with step.phases("logprobs"):
        old = rl.old_logprobs == "recompute" and (checks or not fused)
        await run.trainer_group.read(read_before_training(rl, old=old), samples)
    if rl.on_policy == "exact":
        require_exact(samples)
    if checks:
        rollout = run.config.rollout
        dtypes = [run.compute, run.compute if rollout.dtype == "auto" else rollout.dtype]
        require_parity(samples, run.version, f"rollout.engine={rollout.engine}", dtypes, rollout)
    if fused:  # discard the outputs of a parity check, so that checked steps train like the others
        for sample in samples:
            sample.old_logprobs = None
    else:  # also sets old logprobs that were not recomputed, because advantages may read them
        step.metrics |= correct(samples, rl, truncated=run.config.rollout.truncated)
    stale = staleness(samples, run.version, None if run.replayed else run.config.cluster.max_staleness)
    step.metrics |= {**advantages(step.groups, rl), **step.failures.metrics(), **stale}
    if rl.teacher_in_advantage:
        step.metrics |= add_teacher_advantages(samples, rl)


async def update(run: RlRun, step: RolloutStep) -> list[dict[str, object]]:
    """Runs the optimizer steps of a rollout step. Returns their lines of metrics.jsonl."""
    config, plan, lines = run.config, run.plan, []
    number = (step.number - 1) * plan.per_rollout
    with step.phases("train"):
        for epoch in range(config.rl.epochs):
            for part in deal(step.groups, config.rl.minibatches, seed=config.train.seed + step.number * 1000 + epoch):
                number += 1
                lr = learning_rate(run.updates + 1, plan.steps, config.optimizer.lr, config.schedule)
                samples = samples_of(part)
                lines.append(await run.trainer_group.update(samples, number, plan.steps, epoch + 1, lr))
                for sample in samples:
                    sample.times.trained = time.time() if is_trained(sample, config) else None
                run.updates += not lines[-1].get("skipped")
    if old_is_current(config):
        read = [sample for sample in step.samples if sample.old_logprobs is not None]
        step.metrics |= correct(read, config.rl, truncated=config.rollout.truncated)
    return lines


async def evaluate(evaluator: RlEvaluator, number: int, plan: RlPlan) -> Any:
    """The evaluation after rollout step `number`; None if none is due."""
    return await evaluator() if evaluator.due(number, plan.rollouts) else None


async def save(run: RlRun, recorder: RlRecorder, step: RolloutStep) -> list[str]:
    """Saves a checkpoint after this rollout step. Returns messages for the user."""
    progress = recorder.progress(step, run.updates, run.phases)
    return await run.trainer_group.save(step.number * run.plan.per_rollout, progress)


def staleness(samples: Sequence[Sample], version: int, max_lag: int | None) -> dict[str, float]:
    """Metrics of the lag, in versions, of the weights that sampled a token behind `version`, the trained weights.
    Raises RuntimeError if a lag exceeds `max_lag`."""
    lags = version - np.concatenate([sample.versions[sample.sampled] for sample in samples])
    if max_lag is not None and lags.max(initial=0) > max_lag:
        raise RuntimeError(f"a sample is {lags.max()} versions older than the trained weights: more than {max_lag}")
    return {"staleness/mean": float(lags.mean()), "staleness/max": float(lags.max())} if len(lags) else {}


def sampling_of(config: RlConfig, ends: Sequence[int]) -> SamplingParams:
    """The sampling parameters of training completions. ends: ids of the tokens that end a completion."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        ends=tuple(ends),
        stop=rollout.stop,
    )
