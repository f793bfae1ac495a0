"""`weft plan`: estimates of memory and time of a run on a mesh of any size, and a search for the best meshes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from weft.config.devices import device_lines
from weft.config.distill_schema import DistillConfig
from weft.config.dpo_schema import DpoConfig
from weft.config.mesh import resolve_mesh
from weft.config.recompute import RecomputeSetting
from weft.config.reward_schema import RewardConfig
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.sources import looks_like_hub_dataset
from weft.data.documents import lengths_of
from weft.data.encode import load_tokenizer
from weft.data.images import read_images
from weft.data.sources import open_data
from weft.engine.batch.document import choose
from weft.engine.config import EngineConfig
from weft.engine.losses.base import Loss
from weft.engine.losses.distillation import loss_of
from weft.engine.losses.load import choose_objective
from weft.engine.losses.policy import PolicyLoss
from weft.engine.losses.preference.objective import PreferenceLoss
from weft.errors import UserError, first_line
from weft.launch.machine import accelerator
from weft.launch.options import PlanOptions
from weft.models import hf
from weft.recipes.plan.account import with_chosen_recompute
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.machines import machine_of
from weft.recipes.plan.memory import Memory, memory_by_stage
from weft.recipes.plan.other_models import (
    OtherModels,
    answers_of_example,
    list_other_models,
    prefix_of_pairs,
    with_readings,
)
from weft.recipes.plan.readings import readings_of
from weft.recipes.plan.rows import StepLengths
from weft.recipes.plan.search import Search, search
from weft.recipes.plan.show import show_engines, show_estimate, show_search, show_simulated
from weft.recipes.plan.simulate import Step, simulate
from weft.recipes.plan.timing import time_of
from weft.recipes.reward import make_loss as score_loss
from weft.recipes.run_data import make_steps, read_data
from weft.rl.model_engines import policy_config
from weft.terminal import counted, say, say_all

_READ_BYTES = 64 << 20  # maximum size of data that is tokenised to get lengths


def run(config: SftConfig | RlConfig, options: PlanOptions) -> None:
    """Entry point; runs in one process. Raises UserError if weft refuses the model, the mesh or the rows."""
    hf.import_architectures(config.model.imports, config.model.path)
    assumed = accelerator(options.assume)
    assert assumed is not None
    if config.model.recompute == "auto" and isinstance(config, SftConfig):
        if options.search:  # it tries all policies that the other settings allow
            policy: RecomputeSetting = "none" if config.model.offload_activations == "off" else "full"
            config = replace(config, model=replace(config.model, recompute=policy))
        else:
            config, line = with_chosen_recompute(config, options.ranks, "cpu", assumed)
            say(line)
    machine = machine_of(
        assumed, ranks=options.machine, link=options.link, network=options.network, matmul=options.matmul,
        attention=options.attention,
    )  # fmt: skip
    engine = policy_config(config) if isinstance(config, RlConfig) else EngineConfig.from_config(config)
    model = Blueprint(engine, "cpu", assumed, samples=isinstance(config, RlConfig))
    lengths = lengths_of_a_step(config, options.length)
    if options.search:
        problem = Search(
            config, model, machine, options.ranks, lengths.tokens, options.length is not None, lengths.group,
            lengths.prefix,
        )  # fmt: skip
        result = search(problem)
        show_search(model, result, options.ranks, lengths, machine, config, longer(config, options.length))
        if names := ", ".join(other_models.name for other_models in list_other_models(config, engine)):
            say(f"with     {names}: included in the memory and the time of every mesh")
        return
    mesh = resolve_mesh(model.config.mesh, options.ranks, "--ranks")
    model.check(mesh)
    other_models = OtherModels(config, model, options.ranks, "cpu", assumed)
    plan, rows = lengths.plan(model, mesh)
    memories = memory_by_stage(model, mesh, rows)
    readings = other_models.readings(mesh, plan, rows, machine, lengths.plan)
    time = with_readings(time_of(model, mesh, rows, machine), readings)
    show_estimate(model, mesh, machine, lengths, plan, memories, time)
    if options.simulate:
        step = replace(step_of(config, lengths.tokens), group=lengths.group, prefix=lengths.prefix)
        for memory in ranks_to_simulate(memories):
            rank = memory.share.coordinates.rank(mesh)
            others = sum(row.resident for row in other_models.rows(mesh))
            show_simulated(simulate(engine, options.ranks, assumed, step, rank=rank), memory, assumed.memory, others)
    show_engines(other_models.rows(mesh), max(memories, key=lambda memory: memory.fullest), machine)
    if isinstance(config, RlConfig):
        say_all(device_lines(config))


def step_of(config: SftConfig | RlConfig, lengths: Sequence[int]) -> Step:
    """The step to simulate: documents of these lengths, the loss with the columns that it reads, and the forwards
    before it. Raises UserError for features that are not simulated."""
    if isinstance(config, RlConfig):
        return Step(lengths, PolicyLoss(config.rl), ("old_logprobs", "advantages", "correction", "ref_logprobs"))
    objective: Loss
    if isinstance(config, DpoConfig):
        objective = PreferenceLoss(config.preference)
    elif isinstance(config, DistillConfig):
        objective = loss_of(config.distill)
    elif isinstance(config, RewardConfig):
        objective = score_loss(config.reward)
    else:
        objective = choose_objective(config.train.loss)
    scored = isinstance(config, RewardConfig)
    arrays = ("margin", "label") if scored else ()
    return Step(lengths, objective, arrays, scored=scored, readings=readings_of(config, objective))


def ranks_to_simulate(memory: Sequence[Memory]) -> list[Memory]:
    """The indices on mesh.pp to simulate: the first, and the index of the fullest rank if it differs."""
    fullest = max(memory, key=lambda stage: stage.fullest)
    return [memory[0]] if fullest is memory[0] else [memory[0], fullest]


def lengths_of_a_step(config: SftConfig | RlConfig, stated: int | None) -> StepLengths:
    """The lengths of the documents of an optimizer step: the stated one, those of the data, or the longest possible."""
    if isinstance(config, RlConfig):
        return _lengths_of_rollouts(config, stated)
    if stated is not None:
        return _equal(config, stated, "--length")
    lengths, prefix, unread = _lengths_of_data(config)
    if unread:
        longest = config.data.max_length or config.step.max_tokens_per_device * config.mesh.cp
        return _equal(config, longest, f"the maximum, because {unread}; --length N sets another length")
    count = config.step.documents
    if count is None or len(lengths) >= count * answers_of_example(config):
        return StepLengths(lengths, f"as in a step of {config.data.path}", answers_of_example(config), prefix)
    repeated = list(islice(cycle(lengths), count * answers_of_example(config)))
    return StepLengths(
        repeated, f"the {len(lengths)} documents of {config.data.path}, repeated", answers_of_example(config), prefix
    )


def longer(config: SftConfig | RlConfig, stated: int | None) -> str:
    """The override that permits documents of the stated length; "" if none is necessary."""
    if stated is None:
        return ""
    if isinstance(config, SftConfig):
        limit = config.data.max_length
        return "" if limit is None or stated <= limit else f"data.max_length={stated}"
    rollout = config.rollout
    max_new_tokens = stated - rollout.max_prompt_tokens
    return "" if max_new_tokens <= rollout.max_new_tokens else f"rollout.max_new_tokens={max_new_tokens}"


def _equal(config: SftConfig, length: int, origin: str) -> StepLengths:
    answers, count = answers_of_example(config), config.step.documents
    if count is None:
        assert config.step.tokens is not None
        count = max(1, config.step.tokens // (answers * length))
    if answers == 1:
        return StepLengths([length] * count, f"{length:,} tokens each ({origin})")
    prompt = length // 2
    origin = f"two for each of {counted(count, 'pair')}, {length:,} tokens each, a prompt of {prompt:,} ({origin})"
    return StepLengths([length] * count * answers, origin, answers, prompt)


def _lengths_of_rollouts(config: RlConfig, stated: int | None) -> StepLengths:
    count = max(1, config.rl.prompts_per_step * config.rl.group_size // config.rl.minibatches)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    origin = "--length" if stated else "prompts and answers of maximum length; --length N sets another length"
    length, group = stated or longest, config.rl.group_size
    prefix = config.rollout.max_prompt_tokens * length // longest
    return StepLengths([length] * count, f"{length:,} tokens each ({origin})", group, prefix)


def _lengths_of_data(config: SftConfig) -> tuple[list[int], int, str]:
    """(lengths of the documents of the first step, prefix of its pairs, ""), or ([], 0, why the data were not
    read)."""
    paths = [config.data.path, *(source.path for source in config.data.sources or ())]
    if any(path and looks_like_hub_dataset(path) and not Path(path).exists() for path in paths):
        return [], 0, "the data is on the hub"
    try:
        size = sum(part.size for source in open_data(config.data) for part in source.parts)
        if size > _READ_BYTES:
            return [], 0, f"the data is larger than {_READ_BYTES >> 20} MiB"
        tokenizer = load_tokenizer(config.model.path)
        images = read_images(config.model.path, tokenizer, config.data)
        documents, _ = read_data(config, config.data, tokenizer, images)
    except (UserError, OSError) as error:
        return [], 0, f"the data cannot be read ({first_line(error).rstrip('.')})"
    lengths = lengths_of(documents)
    first = next(iter(make_steps(replace(config, train=replace(config.train, steps=None, epochs=1)), documents)), None)
    if first is None:
        return [], 0, ""
    prefix = prefix_of_pairs(config, choose(documents, first.documents))
    return [lengths[index] for index in first.documents], prefix, ""
