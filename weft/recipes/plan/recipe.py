"""`weft plan`: estimates of memory and time of a run on a mesh of any size, and a search for the best meshes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from weft.config.mesh import resolve_mesh
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.sources import looks_like_hub_dataset
from weft.data.documents import lengths_of
from weft.data.encode import load_tokenizer
from weft.data.images import read_images
from weft.data.sources import open_data
from weft.engine.config import EngineConfig
from weft.engine.losses.load import choose_objective
from weft.engine.losses.policy import PolicyLoss
from weft.errors import UserError, first_line
from weft.launch.machine import Accelerator, accelerator
from weft.launch.options import PlanOptions
from weft.models import hf
from weft.observe.tables import EngineRow, separate_engines
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.machines import machine_of
from weft.recipes.plan.memory import Memory, memory_by_stage
from weft.recipes.plan.rows import RowFacts, StepLengths, plan_rows
from weft.recipes.plan.search import Search, search
from weft.recipes.plan.show import show_engines, show_estimate, show_search, show_simulated
from weft.recipes.plan.simulate import Step, simulate
from weft.recipes.plan.timing import time_of
from weft.recipes.run_data import make_steps, read_data
from weft.rl.model_engines import critic_config, policy_config, reference_config, teacher_config
from weft.rl.reference_critic import own_ranks
from weft.terminal import byte_count

_READ_BYTES = 64 << 20  # the most data that are tokenised to get lengths


def run(config: SftConfig | RlConfig, options: PlanOptions) -> None:
    """Entry point; runs in one process. Raises UserError if weft refuses the model, the mesh or the rows."""
    hf.import_architectures(config.model.imports, config.model.path)
    assumed = accelerator(options.assume)
    assert assumed is not None
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
        show_search(model, result, options.ranks, lengths, machine, longer(config, options.length))
        return
    mesh = resolve_mesh(model.config.mesh, options.ranks, "--ranks")
    model.check(mesh)
    plan = plan_rows(model, mesh, lengths.tokens, None, lengths.group, lengths.prefix)
    rows = RowFacts.from_plan(model, plan)
    memories = memory_by_stage(model, mesh, rows)
    show_estimate(model, mesh, machine, lengths, plan, memories, time_of(model, mesh, rows, machine))
    if options.simulate:
        step = replace(step_of(config, lengths.tokens), group=lengths.group, prefix=lengths.prefix)
        for memory in ranks_to_simulate(memories):
            rank = memory.share.coordinates.rank(mesh)
            show_simulated(simulate(engine, options.ranks, assumed, step, rank=rank), memory, assumed.memory)
    if isinstance(config, RlConfig):
        show_engines(_engines_beside(config, options.ranks, assumed))


def step_of(config: SftConfig | RlConfig, lengths: Sequence[int]) -> Step:
    """The step to simulate: documents of these lengths, and the objective with the columns that it reads."""
    if isinstance(config, SftConfig):
        return Step(lengths, choose_objective(config.train.loss))
    return Step(lengths, PolicyLoss(config.rl), ("old_logprobs", "advantages", "correction", "ref_logprobs"))


def ranks_to_simulate(memory: Sequence[Memory]) -> list[Memory]:
    """The places of mesh.pp to simulate: the first, and the one with the fullest rank if it is another."""
    fullest = max(memory, key=lambda stage: stage.fullest)
    return [memory[0]] if fullest is memory[0] else [memory[0], fullest]


def lengths_of_a_step(config: SftConfig | RlConfig, stated: int | None) -> StepLengths:
    """The lengths of the documents of an optimizer step: the stated one, those of the data, or the longest possible."""
    if isinstance(config, RlConfig):
        return _lengths_of_rollouts(config, stated)
    if stated is not None:
        return _equal(config, stated, "--length")
    lengths, unread = _lengths_of_data(config)
    if unread:
        longest = config.data.max_length or config.step.max_tokens_per_device * config.mesh.cp
        return _equal(config, longest, f"the longest there can be, as {unread}; --length N states another")
    count = config.step.documents
    if count is None or len(lengths) >= count:
        return StepLengths(lengths, f"a step of {config.data.path}")
    repeated = list(islice(cycle(lengths), count))
    return StepLengths(repeated, f"the {len(lengths)} documents of {config.data.path}, repeated")


def longer(config: SftConfig | RlConfig, stated: int | None) -> str:
    """The override that lets a run have documents of the stated length; "" if it has them without."""
    if stated is None:
        return ""
    if isinstance(config, SftConfig):
        limit = config.data.max_length
        return "" if limit is None or stated <= limit else f"data.max_length={stated}"
    rollout = config.rollout
    max_new_tokens = stated - rollout.max_prompt_tokens
    return "" if max_new_tokens <= rollout.max_new_tokens else f"rollout.max_new_tokens={max_new_tokens}"


def _equal(config: SftConfig, length: int, origin: str) -> StepLengths:
    count = config.step.documents
    if count is None:
        assert config.step.tokens is not None
        count = max(1, config.step.tokens // length)
    return StepLengths([length] * count, f"{length:,} tokens each ({origin})")


def _lengths_of_rollouts(config: RlConfig, stated: int | None) -> StepLengths:
    count = max(1, config.rl.prompts_per_step * config.rl.group_size // config.rl.minibatches)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    origin = "--length" if stated else "prompts and answers as long as rollout allows; --length N states another"
    length, group = stated or longest, config.rl.group_size
    prefix = config.rollout.max_prompt_tokens * length // longest
    return StepLengths([length] * count, f"{length:,} tokens each ({origin})", group, prefix)


def _lengths_of_data(config: SftConfig) -> tuple[list[int], str]:
    """(lengths of the documents of the first step, ""), or ([], why the data were not read)."""
    paths = [config.data.path, *(source.path for source in config.data.sources or ())]
    if any(path and looks_like_hub_dataset(path) and not Path(path).exists() for path in paths):
        return [], "the data is on the hub"
    try:
        size = sum(part.size for source in open_data(config.data) for part in source.parts)
        if size > _READ_BYTES:
            return [], f"the data is larger than {_READ_BYTES >> 20} MiB"
        tokenizer = load_tokenizer(config.model.path)
        images = read_images(config.model.path, tokenizer, config.data)
        documents, _ = read_data(config, config.data, tokenizer, images)
    except (UserError, OSError) as error:
        return [], f"the data cannot be read ({first_line(error).rstrip('.')})"
    lengths = lengths_of(documents)
    first = next(iter(make_steps(replace(config, train=replace(config.train, steps=None, epochs=1)), documents)), None)
    return [lengths[index] for index in first.documents] if first is not None else [], ""


def _engines_beside(config: RlConfig, ranks: int, assumed: Accelerator) -> list[EngineRow]:
    """The memory of the reference and the critic on the trainer's ranks; rollout engines are not counted. An engine
    with ranks of its own has a row without figures."""
    separate, rows = own_ranks(config), []
    engines = {
        "reference": reference_config(config), "teacher": teacher_config(config), "critic": critic_config(config),
    }  # fmt: skip
    for name, engine in engines.items():
        if engine is None or name in separate:
            continue
        model = Blueprint(engine, "cpu", assumed)
        mesh = resolve_mesh(engine.mesh, ranks, "--ranks")
        model.check(mesh)
        memory = max(memory_by_stage(model, mesh, None), key=lambda stage: stage.share.resident)
        rows.append(_engine_row(name, memory))
    rows += separate_engines(separate.items())
    return rows


def _engine_row(name: str, memory: Memory) -> EngineRow:
    """An engine's memory on the accelerator; with cpu_offload that is what its units need while they run."""
    holdings = memory.share
    if memory.offloaded:
        note = f"{byte_count(holdings.resident)} on the host (cpu_offload)"
        return EngineRow(name, gathered=memory.gathered + memory.staged, note=note)
    return EngineRow(name, holdings.weights, holdings.gradients, holdings.optimizer, memory.gathered)
