"""`weft rl --dry-run`: prompts, rewards and memory of a run, from local files and without weights."""

from __future__ import annotations

import asyncio

from weft.checkpoint.export import manifest_of
from weft.config.conditions import SERVERS, in_own_process
from weft.config.devices import device_lines, device_lists, show_devices
from weft.config.rl_schema import RlConfig, reward_models
from weft.engine.engine import Engine
from weft.inference.embedded import EmbeddedEngine
from weft.inference.types import Prompt
from weft.inference.unmerged import stored_layout
from weft.launch.machine import accelerator
from weft.launch.options import RlOptions
from weft.launch.process import Ranks, fake_ranks
from weft.models.lora import samples_separate
from weft.observe.opening import few_rollout_steps, print_dry_run
from weft.observe.tables import EngineRow, engine_table, show
from weft.parallel.memory import cache_bytes
from weft.recipes.rl import check_task, read_task
from weft.recipes.run_data import why_unread
from weft.rl.corrections import note_on_staleness
from weft.rl.environments.base import environment_class
from weft.rl.model_engines import critic_engine, policy_config, reference_engine, reward_model_engine, teacher_engine
from weft.rl.reference_critic import device_role, own_ranks, shared_with_trainers, where_separate
from weft.rl.rewards.base import Rewards
from weft.rl.state import RlPlan, RlTask
from weft.terminal import byte_count, counted, say_folded

_LONGEST = 2000  # characters of the prompt that are shown
_LONGEST_VALUE = 60  # characters of a value of a column that are shown


def dry_run(config: RlConfig, options: RlOptions) -> None:
    """Prints the preview. Raises UserError for every problem that the run would refuse at its start. Prompts and
    rewards are checked first."""
    check_task(config)
    unread = why_unread(config)
    task = None if unread else read_task(config)
    rewards = task.rewards if task is not None else Rewards(config.rl)
    environment = environment_class(config)
    tried = asyncio.run(_try(rewards, task))
    with fake_ranks(options.world, options.device, accelerator(options.assume)) as ranks:
        engine = Engine(policy_config(config), ranks, weights=False)
        print_dry_run(config, engine, parameters=options.parameters, as_json=options.json)
        if options.json:
            return
        rows = _rows(config, engine, ranks)
        rollout, why_not_shared = _rollout_row(config, engine), engine.planner.apart
    rows += _separate_rows(config, options)
    show(engine_table([*rows, rollout]))
    lines = [*device_lines(config), *note_on_staleness(config), *(f"reward   {line}" for line in rewards.lines())]
    lines += [f"tried    {line}" for line in tried]
    if environment is not None:
        lines.append(f"environ. {environment.__name__}, up to {config.rl.max_turns} answers in a conversation")
    if config.rl.agent is not None:
        lines.append(f"agent    {config.rl.agent}, not run in a dry run; up to {config.rl.max_turns} calls in a run")
    say_folded(
        [*lines, *([f"prompts  not read: {unread}"] if task is None else _task_lines(config, task, why_not_shared))]
    )


async def _try(rewards: Rewards, task: RlTask | None) -> list[str]:
    """Import the reward functions, check that every prompt has the columns that they need, and call each function once.
    Returns their results."""
    async with rewards:
        if task is None:
            await rewards.start()
            return []
        prompts = [*task.prompts, *task.held_out.all()]
        await rewards.start(prompts)
        tokenizer = task.tokenizer
        return await rewards.try_out(prompts, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])


def _task_lines(config: RlConfig, task: RlTask, apart: str) -> list[str]:
    """Lines about the prompts: their number, the steps that they make, and the first prompt as the model receives it.
    apart: the reason why a prompt is forwarded for each answer; empty if it is forwarded once."""
    plan, rl = RlPlan.from_config(config, task.stream), config.rl
    lines = [f"prompts  {task.prompts}", f"template {task.prompts.template_use()}"]
    lines += [f"held out {name or config.eval.path}: {len(prompts):,}" for name, prompts in task.held_out.named.items()]
    lines += task.held_out.leaks(task.prompts)
    lines.append(
        f"steps    {counted(plan.rollouts, 'rollout step')} of {counted(rl.prompts_per_step, 'prompt')} x "
        f"{counted(rl.group_size, 'sample')}, {counted(plan.per_rollout, 'optimizer step')} each: "
        f"{plan.rollouts * rl.prompts_per_step / task.stream.in_epoch:.3g} epochs of the prompts"
    )
    lines += few_rollout_steps(config, plan.rollouts, task.stream.in_epoch)
    lines += _sharing_lines(config, task, apart)
    prompt = task.prompts[0]
    text = str(task.tokenizer.decode(list(prompt.tokens)))
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text) - _LONGEST:,} characters more)"
    lines.append(f"\nThe first prompt as the model receives it ({prompt.source}, {len(prompt.tokens)} tokens):\n")
    lines += [f"    {line}" for line in shown.split("\n")]
    return [*lines, f"\nPassed to rewards in addition: {_columns(prompt)}"]


def _sharing_lines(config: RlConfig, task: RlTask, apart: str) -> list[str]:
    """The saving of a training step that forwards a prompt once for all of its answers."""
    if apart:
        return [f"shared   nothing: every answer is forwarded with its prompt ({apart})"]
    prompts = sum(len(prompt.tokens) for prompt in task.prompts) / max(1, len(task.prompts))
    answers, group = config.rollout.max_new_tokens, config.rl.group_size
    most_saved, least_saved = (1 - (prompts + group * n) / (group * (prompts + n)) for n in (answers / 10, answers))
    return [
        f"shared   a prompt of {prompts:,.0f} tokens on average is forwarded once for its {counted(group, 'answer')}: "
        f"{least_saved:.0%} fewer tokens per update if answers have rollout.max_new_tokens tokens, {most_saved:.0%} if "
        "they have a tenth of that"
    ]


def _columns(prompt: Prompt) -> str:
    def shown(value: object) -> str:
        text = repr(value)
        return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."

    return ", ".join(f"{name} = {shown(value)}" for name, value in prompt.columns.items()) or "nothing"


def _rows(config: RlConfig, policy: Engine, ranks: Ranks) -> list[EngineRow]:
    """The memory of each engine on a rank."""
    separate = own_ranks(config)
    reference = None if "reference" in separate else reference_engine(config, ranks, shares_with=policy, weights=False)
    critic = None if "critic" in separate else critic_engine(config, ranks, shares_with=policy, weights=False)
    teacher = None if "teacher" in separate else teacher_engine(config, ranks, shares_with=policy, weights=False)
    engines = {"policy": policy, "reference": reference, "teacher": teacher, "critic": critic}
    engines |= {
        role: reward_model_engine(config, path, ranks, shares_with=policy, weights=False)
        for role, path in reward_models(config.rl.reward).items()
        if role not in separate
    }
    rows = [
        EngineRow(name, e.memory.weights, e.memory.gradients, e.memory.optimizer, e.memory.gathered)
        for name, e in engines.items()
        if e is not None
    ]
    if reference is None and config.rl.has_reference and "reference" not in separate:
        rows.append(EngineRow("reference", note="the policy without its adapters"))
    return rows


def _separate_rows(config: RlConfig, options: RlOptions) -> list[EngineRow]:
    """The separate ranks of other models, with their memory if they are on devices of trainer ranks."""
    rows = []
    lists, models = device_lists(config.cluster.devices), reward_models(config.rl.reward)
    for role, count in own_ranks(config).items():
        if role not in shared_with_trainers(config):
            rows.append(EngineRow(role, note=where_separate(config, role)))
            continue
        with fake_ranks(count, options.device, accelerator(options.assume)) as ranks:
            if role in models:
                engine: Engine | None = reward_model_engine(config, models[role], ranks, weights=False)
            else:
                engine = _MAKERS[role](config, ranks, weights=False)
            assert engine is not None
            memory, note = engine.memory, f"alone on devices {show_devices(lists[device_role(role)])}"
            rows.append(EngineRow(role, memory.weights, memory.gradients, memory.optimizer, memory.gathered, note))
    return rows


_MAKERS = {"reference": reference_engine, "teacher": teacher_engine, "critic": critic_engine}


def _rollout_row(config: RlConfig, policy: Engine) -> EngineRow:
    """The memory of the rollout engine."""
    rollout, size = config.rollout, policy.precision.compute.itemsize
    if rollout.engine in SERVERS:
        engine_size = counted(rollout.tp, "accelerator")
        engines = f"{rollout.num_engines} x {engine_size}" if rollout.num_engines else f"engines of {engine_size}"
        note = f"{rollout.engine}: {engines}, each with the memory of rollout.gpu_memory_utilization"
        return EngineRow("rollout", note=note)
    separate = samples_separate(config.lora)
    cache = byte_count(cache_bytes(policy.built.config, size) * rollout.kv_cache_tokens)
    if in_own_process(rollout.engine):
        manifest = (
            stored_layout(policy, policy.precision.compute)[1]
            if separate
            else manifest_of(policy, policy.precision.compute)
        )
        copy = byte_count(sum(tensor.nbytes for tensor in manifest.values()))
        return EngineRow("rollout", note=f"{rollout.num_engines} separate processes: {copy} each, and a cache")
    embedded = EmbeddedEngine(policy)
    content = "a full copy" if embedded.copies_base else "adapters, with the policy's base"
    note = f"{content}, and a cache of up to {cache} ({rollout.kv_cache_tokens:,} tokens)"
    return EngineRow("rollout", embedded.bytes, note=note)
