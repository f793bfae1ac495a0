"""The memory of a run on its ranks: an account after memory ran out, and the activations that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft.config.distill_schema import DistillConfig
from weft.config.dpo_schema import DpoConfig
from weft.config.mesh import MeshSizes, resolve_mesh
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.validate import check_config
from weft.engine.config import EngineConfig
from weft.errors import UserError
from weft.launch.machine import ACCELERATORS, Accelerator
from weft.launch.options import Device
from weft.launch.process import choose_device
from weft.models import hf
from weft.parallel.memory import capacity
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.choices import Choice, activation_choices, choices, fitting
from weft.recipes.plan.machines import Machine, machine_of
from weft.recipes.plan.memory import Memory, memory_of
from weft.recipes.plan.other_models import OtherModels
from weft.recipes.plan.rows import RowFacts, plan_rows, planner_of
from weft.recipes.plan.timing import time_of
from weft.rl.model_engines import policy_config
from weft.terminal import byte_count

Config = TypeVar("Config", bound=SftConfig)
_SHOWN = 3
_WORTHWHILE = 0.03  # of a rank's memory: a setting that saves less is not printed


@dataclass(frozen=True)
class Situation:
    """A run and its ranks. room: bytes of a rank. other_bytes: bytes of other models on the same ranks. machine: its
    rates order settings by time; an H100's rates replace the device's if those are unknown."""

    config: Any
    model: Blueprint
    mesh: MeshSizes
    machine: Machine
    room: int
    other_bytes: int

    @staticmethod
    def from_config(
        config: SftConfig | RlConfig, world: int, device: Device, assumed: Accelerator | None = None
    ) -> Situation:
        """assumed: the accelerator that a dry run assumes; None: this machine's device."""
        engine = policy_config(config) if isinstance(config, RlConfig) else EngineConfig.from_config(config)
        if engine.model.recompute == "auto":
            engine = replace(engine, model=replace(engine.model, recompute="none"))
        usual = ACCELERATORS["h100-80gb"]
        if assumed is None:
            torch_device = choose_device(device, 0)
            room = capacity(torch_device, world if torch_device.type == "cpu" else 1)
            if torch_device.type == "cuda":
                properties = torch.cuda.get_device_properties(torch_device)
                assumed = Accelerator(usual.name, room, (properties.major, properties.minor))
        else:
            room = assumed.memory
        model = Blueprint(engine, "cpu", assumed, samples=isinstance(config, RlConfig))
        mesh = resolve_mesh(engine.mesh, world)
        other_models = config if isinstance(config, RlConfig | DpoConfig | DistillConfig) else None
        rows = [] if other_models is None else OtherModels(other_models, model, world, "cpu", assumed).rows(mesh)
        machine = replace(machine_of(usual), accelerator=replace(usual, memory=room))
        return Situation(config, model, mesh, machine, room, sum(row.resident for row in rows))

    @property
    def parts(self) -> int:
        """The maximum number of ranks over which a document is split."""
        return self.mesh.cp if self.model.built.cuts_documents else 1

    @property
    def stated_longest(self) -> int | None:
        """Tokens of the longest document, if the config determines it."""
        if isinstance(self.config, RlConfig):
            return self.config.rollout.max_prompt_tokens + self.config.rollout.max_new_tokens
        longest: int | None = self.config.data.max_length
        return longest

    def longest(self, budget: int) -> int:
        """Maximum number of tokens of a document, if a row has at most `budget` tokens."""
        return min(budget * self.parts, self.stated_longest or budget * self.parts)

    def rows(self, budget: int, length: int) -> RowFacts:
        """A step of full rows of `budget` tokens, with documents of `length` tokens, or shorter ones that fill rows."""
        ranks = self.mesh.dp_replicate * self.mesh.shards
        if length <= budget:
            length = budget // -(-budget // length)
        omitted = planner_of(self.model, self.mesh).costs.omitted(length + 1)
        count = 4 * ranks * (budget // length) or 4 * ranks * budget // length
        lengths = [length + omitted] * max(1, count)
        return RowFacts.from_plan(self.model, plan_rows(self.model, self.mesh, lengths, budget))

    def memory_and_seconds(
        self, choice: Choice, budget: int, mesh: MeshSizes | None = None, length: int | None = None
    ) -> tuple[Memory, float]:
        """(memory of the fullest rank, seconds per token in a step) with these settings. length: tokens of each
        document; None for the longest possible."""
        model, chosen_mesh = self.model, mesh or self.mesh
        stated = Choice.from_config(model.config)
        if (choice.cpu_offload, choice.state_dtype, choice.base) != (
            stated.cpu_offload, stated.state_dtype, stated.base
        ):  # fmt: skip
            model = model.with_settings(choice.apply(model.config))
        rows = self.rows(budget, length or self.longest(budget))
        memory = memory_of(model, chosen_mesh, rows, choice.activations)
        return memory, time_of(model, chosen_mesh, rows, self.machine, choice.activations).seconds / rows.tokens


def with_chosen_recompute(
    config: Config, world: int, device: Device, assumed: Accelerator | None = None
) -> tuple[Config, str]:
    """(The config with the settings that model.recompute=auto chooses, a line with the reason); with another value of
    the key, the config unchanged and "". Of the policies, tiles and offloads that fit, those that take the least time,
    as in `weft plan --search`; those that need the least memory, if none fits. Raises UserError in a process that
    already is one of several ranks."""
    if config.model.recompute != "auto":
        return config, ""
    if dist.is_initialized():
        raise UserError(
            "model.recompute=auto is chosen before the ranks form a process group, and these already have one: set "
            "model.recompute to none, selective or full."
        )
    situation = Situation.from_config(config, world, device, assumed)
    stated, budget = Choice.from_config(situation.model.config), config.step.max_tokens_per_device
    room = situation.machine.usable * situation.room - situation.other_bytes
    # On the CPU activations that go to the host would stay where they are.
    offloads = ("off", "inputs", "kept") if situation.model.assumed is not None else (stated.offload,)

    def needed(choice: Choice) -> tuple[int, float]:
        memory, seconds = situation.memory_and_seconds(choice, budget)
        return memory.fullest, seconds

    by_policy = [
        [c for c in options if c.offload in offloads] for options in activation_choices(situation.model.config)
    ]
    matches, (size, choice) = fitting([options for options in by_policy if options], needed, room)
    if matches:
        choice, size, _ = min(matches, key=lambda match: (match[2], match[1]))
    words = "the fastest setting that fits" if matches else "nothing fits, and this setting needs the least memory"
    others = [change for change in choice.overrides(situation.model.config) if "model.recompute=" not in change]
    named = " ".join([str(choice.recompute), *others])
    return choice.apply(config), (
        f"recompute model.recompute=auto is {named}: {words}, {byte_count(size)} of {byte_count(round(room))} "
        "(estimated)"
    )


@dataclass(frozen=True)
class Knob:
    """A change of the config. saved: bytes of a rank. slower: relative increase of the time per token. exact: whether
    results do not change."""

    override: str
    saved: int
    slower: float
    note: str = ""
    exact: bool = True


def knobs(situation: Situation) -> list[Knob]:
    """The changes that save memory, in the order of their cost in time. For each key: the cheapest change that is
    worthwhile; if no change is, the change that saves most."""
    stated, config = Choice.from_config(situation.model.config), situation.model.config
    budget = config.step.max_tokens_per_device
    now, seconds = situation.memory_and_seconds(stated, budget)
    options: list[Knob] = []

    def add(override: str, choice: Choice, mesh: MeshSizes | None = None) -> None:
        memory, token_seconds = situation.memory_and_seconds(choice, budget, mesh)
        saved, slower, exact = now.fullest - memory.fullest, token_seconds / seconds - 1.0, not choice.lossy(stated)
        options.append(Knob(override, saved, slower, "" if exact else "not exact", exact))

    smaller = max(budget // 2, -(-(situation.stated_longest or 0) // situation.parts))
    step = replace(situation.config.step, max_tokens_per_device=smaller)
    if 4 <= smaller < budget and not check_config(replace(situation.config, step=step)):
        length = situation.longest(smaller)  # in both cases, because attention costs more in longer documents
        memory, smaller_seconds = situation.memory_and_seconds(stated, smaller, length=length)
        slower = smaller_seconds / situation.memory_and_seconds(stated, budget, length=length)[1] - 1.0
        note = "" if situation.stated_longest else f"if no document is longer than {length} tokens"
        options.append(Knob(f"step.max_tokens_per_device={smaller}", now.fullest - memory.fullest, slower, note))
    tried = set[tuple[str, ...]]()
    for group in choices(config, adapters=situation.model.built.lora is not None):
        for choice in (option for by_time in group for option in by_time):
            changes = tuple(choice.overrides(config))
            if len(changes) != 1 or changes in tried or check_config(choice.apply(situation.config)):
                continue
            tried.add(changes)
            add(changes[0], choice)
    if situation.mesh.dp_replicate > 1:
        shards = situation.mesh.dp_replicate * situation.mesh.dp_shard
        mesh = replace(situation.mesh, dp_replicate=1, dp_shard=shards)
        add(f"mesh.dp_replicate=1 mesh.dp_shard={shards}", stated, mesh)
    if isinstance(situation.config, RlConfig):
        share = situation.config.rollout.gpu_memory_utilization
        if share is not None and share > 0.2 and situation.config.cluster.placement == "colocated":
            override = f"rollout.gpu_memory_utilization={share - 0.1:.2g}"
            options.append(Knob(override, situation.room // 10, 0.0, "fewer answers at once"))
    by_key: dict[str, list[Knob]] = {}
    for option in options:
        by_key.setdefault(option.override.strip("'").partition("=")[0], []).append(option)
    least = _WORTHWHILE * now.fullest
    best = []
    for of_key in by_key.values():
        worthwhile = [option for option in of_key if option.saved >= least]
        best += [min(worthwhile, key=lambda option: (option.slower, -option.saved))] if worthwhile else []
    return sorted(best, key=lambda option: (max(0.0, round(option.slower, 2)), not option.exact, -option.saved))


def account_lines(config: SftConfig | RlConfig, world: int, device: Device) -> Iterator[str]:
    """The estimated memory of a rank, and the cheapest settings that save memory."""
    hf.import_architectures(config.model.imports, config.model.path)
    situation = Situation.from_config(config, world, device)
    memory, _ = situation.memory_and_seconds(
        Choice.from_config(situation.model.config), situation.model.config.step.max_tokens_per_device
    )
    parts = [
        ("weights", memory.share.weights), ("gradients", memory.share.gradients),
        ("optimizer", memory.share.optimizer), ("average", memory.share.average),
    ] if not memory.offloaded else []  # fmt: skip
    parts += [
        ("gathered weights", memory.gathered + memory.staged + memory.copies),
        ("activations", memory.rows + memory.in_flight),
        ("gradients of a unit", memory.unreduced + memory.reduced + memory.lingering),
        ("rows of experts", memory.experts), ("head", memory.head), ("other models", situation.other_bytes),
    ]  # fmt: skip
    words = ", ".join(f"{name} {byte_count(size)}" for name, size in parts if size)
    total = memory.fullest + situation.other_bytes
    yield f"account  of the fullest rank, estimated: {words}"
    yield f"         peak {byte_count(total)}; a rank has {byte_count(situation.room)}"
    if memory.unknown:
        yield f"         without activations, which weft cannot estimate for this model ({memory.unknown})"
    proposals = knobs(situation)[:_SHOWN]
    yield "cheapest settings that save memory, each one alone:" if proposals else "no setting saves much"
    for knob in proposals:
        cost = "no slower" if knob.slower < 0.005 else f"{knob.slower:.0%} slower"
        note = f" ({knob.note})" if knob.note else ""
        yield f"         {knob.override} saves {byte_count(knob.saved)}, {cost}{note}"
    yield "         weft plan --search, with the same config, finds combinations of settings that fit"


def memory_account(config: SftConfig | RlConfig, world: int, device: Device) -> Sequence[str]:
    """The lines of `account_lines`, or a line about an error in them: the run's error must be printed first."""
    try:
        return list(account_lines(config, world, device))
    except Exception as error:  # of any type: the account must not hide the failure
        return [f"account  not possible ({type(error).__name__}: {error})"]
