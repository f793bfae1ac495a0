"""The other models of a command, such as a reference or teachers: their memory on a rank, and their time in a step.

`weft plan` and dry runs share this. A model with separate weights is a Blueprint on its mesh. The base under adapters
and an average are computed with the trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from weft.checkpoint.export import manifest_of
from weft.config.distill_schema import AVERAGE, BASE, DistillConfig, is_opened
from weft.config.dpo_schema import DpoConfig
from weft.config.mesh import MeshSizes, resolve_mesh
from weft.config.reward_schema import RewardConfig
from weft.config.rl_schema import RlConfig, reward_models
from weft.config.schema import MeshConfig, SftConfig, StepConfig
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.frozen import named_section
from weft.engine.losses.preference.objective import split_examples
from weft.engine.scores import parts_pairs
from weft.engine.step_plan.plan import StepPlan
from weft.launch.machine import Accelerator
from weft.launch.options import Device
from weft.models.lora import samples_separate
from weft.models.train_module import ScoreHead
from weft.observe.tables import EngineRow
from weft.recipes.frozen_models import closes_reference, frozen_teacher_config, preference_reference
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.machines import Machine
from weft.recipes.plan.memory import Memory, memory_by_stage
from weft.recipes.plan.rows import RowFacts
from weft.recipes.plan.timing import Part, StepTime, forward_seconds
from weft.rl.model_engines import critic_config, reference_config, reward_model_config, teacher_config
from weft.rl.reference_critic import device_role, own_ranks, shared_with_trainers, where_separate
from weft.terminal import byte_count, counted

# Same signature as StepLengths.plan.
RowsOf = Callable[[Blueprint, MeshSizes, int | None], tuple[StepPlan, RowFacts]]


@dataclass(frozen=True)
class OtherModel:
    """A model in addition to the trained one. section: of its keys. config: of its engine; None if the trained model's
    weights are used, or if it needs no memory in a step. note: where and when it computes. reads: number of forwards of
    the step's documents; a fraction for a teacher of some of the documents. first_epoch: whether it computes nothing in
    later epochs. has_head: whether a copy of its head is on the trained model's ranks. ranks: number of separate ranks,
    on the same devices; with ahead, on other devices, where it computes the next step's documents at the same time.
    path: of its model."""

    name: str
    section: str
    path: str
    config: EngineConfig | None = None
    note: str = ""
    reads: float = 0.0
    first_epoch: bool = False
    has_head: bool = False
    ranks: int | None = None
    ahead: bool = False


def list_other_models(config: SftConfig | RlConfig, trained: EngineConfig) -> list[OtherModel]:
    """The models in addition to the trained one. trained: the trained model's engine config. Forwards of `weft rl` are
    not in an optimizer step, so they have no reads. Its models with separate devices are omitted."""
    if isinstance(config, RlConfig):
        engines = {
            "reference": reference_config(config), "teacher": teacher_config(config), "critic": critic_config(config),
            **{role: reward_model_config(config, path) for role, path in reward_models(config.rl.reward).items()},
        }  # fmt: skip
        separate, sharing = own_ranks(config), shared_with_trainers(config)
        return [
            OtherModel(
                name, device_role(name), engine.model.path, engine,
                where_separate(config, name) if name in sharing else "", ranks=separate.get(name),
            )
            for name, engine in engines.items()
            if engine is not None and (name not in separate or name in sharing)
        ]  # fmt: skip
    if isinstance(config, DpoConfig):
        return _reference(config, trained)
    return _teachers(config, trained) if isinstance(config, DistillConfig) else []


def answers_of_example(config: SftConfig) -> int:
    """Documents per example that step.documents counts: two for a pair (both answers), otherwise one."""
    is_pair = config.preference.is_paired if isinstance(config, DpoConfig) else config.reads_preferences
    return 2 if is_pair else 1


def prefix_of_pairs(config: SftConfig, documents: Sequence[Document]) -> int:
    """Mean number of tokens that the two answers of a pair share at their beginning; 0 without pairs."""
    if answers_of_example(config) == 1:
        return 0
    pairs = list(zip(documents[::2], documents[1::2], strict=True))
    return round(sum(_common_prefix(chosen.tokens, rejected.tokens) for chosen, rejected in pairs) / max(1, len(pairs)))


def _common_prefix(first: Tensor, second: Tensor) -> int:
    """The length of the common prefix."""
    shorter = min(len(first), len(second))
    return int((first[:shorter] == second[:shorter]).long().cumprod(0).sum())


def _reference(config: DpoConfig, trained: EngineConfig) -> list[OtherModel]:
    preference, engine = config.preference, preference_reference(config, trained)
    if not preference.has_reference:
        return []
    mismatched = float("kto" in preference.losses)  # prompts with other prompts' answers, which are not cached
    reads = mismatched + (preference.cache != "disk")
    notes = [] if engine is not None else ["the trained model without its adapters"]
    if engine is not None and closes_reference(config):
        engine, notes = None, ["closed before the first step (preference.cache=disk)"]
    first = preference.cache == "memory" and not mismatched
    if first:
        notes.append("computed in the first epoch (preference.cache=memory)")
    path = config.reference.path or config.model.path
    return [
        OtherModel(
            "reference",
            "reference",
            path,
            engine,
            "; ".join(notes),
            reads,
            first,
            ranks=config.reference.ranks,
            ahead=config.reference.ranks is not None,
        )
    ]


def _teachers(config: DistillConfig, trained: EngineConfig) -> list[OtherModel]:
    distill = config.distill
    if distill.teacher in (BASE, AVERAGE):
        of_student = {BASE: "the student without its adapters", AVERAGE: "the average of the student's weights"}
        note, path = of_student[distill.teacher], config.model.path
        return [OtherModel("teacher", "teacher", path, None, note, 1.0, has_head=True)]
    cached = distill.cache == "disk"
    named = list((distill.teachers or {"": str(distill.teacher)}).items())
    return [
        OtherModel(
            f"teacher {name}".strip(),
            "teacher",
            path,
            None if cached else frozen_teacher_config(config, path, trained),
            "opened for documents that are missing in distill.cache_dir" if cached else "",
            0.0 if cached else 1.0 / len(named),
            has_head=True,
            ranks=config.teacher.ranks,
            ahead=config.teacher.ranks is not None,
        )
        for name, path in named
        if is_opened(path)  # lists need no model
    ]


@dataclass(frozen=True)
class Reading(Part):
    """A forward without gradients before a step. first_epoch: as in OtherModel. ahead: whether it computes the next
    step on separate ranks, so that it adds to a step only the time by which it takes longer."""

    first_epoch: bool = False
    ahead: bool = False


class OtherModels:
    """The models in addition to a trained one, as blueprints."""

    def __init__(
        self,
        config: SftConfig | RlConfig,
        trained: Blueprint,
        ranks: int,
        device: Device,
        assumed: Accelerator | None,
        blueprints: dict[str, Blueprint] | None = None,
    ) -> None:
        """ranks: of the run. blueprints: a cache of blueprints, which do not depend on meshes and budgets. Raises
        UserError, with the section, for a model that every mesh refuses, including its own."""
        self.config, self.trained, self.ranks = config, trained, ranks
        blueprints = {} if blueprints is None else blueprints
        self.models = list_other_models(config, replace(trained.config, mesh=config.mesh, step=config.step))
        self._blueprints = list[tuple[Blueprint, MeshSizes] | None]()
        for model in self.models:
            if model.config is None:
                self._blueprints.append(None)
                continue
            with named_section(model.section):
                key = repr(replace(model.config, mesh=MeshConfig(), step=StepConfig()))
                blueprint = (
                    blueprints[key]
                    if key in blueprints
                    else blueprints.setdefault(key, Blueprint(model.config, device, assumed))
                )
                mesh = resolve_mesh(model.config.mesh, model.ranks or ranks, "--ranks")
                blueprint.check(mesh)
                self._blueprints.append((blueprint, mesh))

    def rows(self, mesh: MeshSizes) -> list[EngineRow]:
        """The memory of each model on a rank. mesh: of the trained model."""
        rows = []
        for model, built in zip(self.models, self._blueprints, strict=True):
            if built is None:
                rows.append(EngineRow(model.name, note=model.note))
            else:
                memory = max(memory_by_stage(*built, None), key=lambda stage: stage.share.resident)
                row = _engine_row(model, memory)
                if model.ahead:
                    size = byte_count(row.resident + (row.gathered or 0))
                    where = f"on {counted(model.ranks or 0, 'separate rank')}, {size} on each"
                    row = EngineRow(model.name, note="; ".join(filter(None, [where, row.note])))
                rows.append(row)
            if model.has_head:
                head = self._head_bytes(model, None if built is None else built[0], mesh.tp)
                rows.append(EngineRow(f"head of {model.name}", head, note="a copy on the student's ranks"))
        if isinstance(self.config, DistillConfig) and self.config.distill.on_policy:
            trained = self.trained
            copy = sum(tensor.nbytes for tensor in manifest_of(trained, trained.setup.precision.compute).values())
            if samples_separate(self.config.lora):
                copy = trained.stored  # with adapters, the size of the masters; smaller if ranks do not shard the base
            rows.append(
                EngineRow("copy that samples", copy, note="before each step (distill.on_policy), with a KV cache")
            )
        if isinstance(self.config, RlConfig):
            separate_roles = own_ranks(self.config).keys() - shared_with_trainers(self.config)
            rows += [EngineRow(role, note=where_separate(self.config, role)) for role in sorted(separate_roles)]
        return rows

    def _head_bytes(self, model: OtherModel, blueprint: Blueprint | None, tp: int) -> int:
        """Bytes of the rows of a teacher's head on a rank of the student (engine/teachers.py:teacher_head)."""
        source = blueprint or self.trained
        if blueprint is None and model.path != self.trained.config.model.path:  # hidden states come from a cache
            assert isinstance(self.config, DistillConfig)
            config = frozen_teacher_config(self.config, model.path, self.trained.config)
            source = Blueprint(config, "cpu", self.trained.assumed)
        head, student = source.module.head, self.trained.module.head
        assert not isinstance(head, ScoreHead) and not isinstance(student, ScoreHead)
        vocabulary = min(int(self.trained.text.vocab_size), len(head.weight), -(-len(student.weight) // tp))
        biases = 0 if head.bias is None else vocabulary
        return (vocabulary * int(head.weight.shape[1]) + biases) * source.setup.precision.compute.itemsize

    def readings(
        self, mesh: MeshSizes, plan: StepPlan, rows: RowFacts, machine: Machine, rows_of: RowsOf
    ) -> list[Reading]:
        """The forwards before a step's forward: one of each additional model, and one of the trained model if its loss
        needs complete examples. mesh, plan, rows: of the trained model. rows_of: plans rows of the step's documents."""
        parts, forward = list[Reading](), forward_seconds(self.trained, mesh, rows, machine)
        for model, built in zip(self.models, self._blueprints, strict=True):
            seconds = forward
            if not model.reads:
                continue
            if built is not None:
                blueprint, frozen_mesh = built
                assert model.config is not None
                _, frozen_rows = rows_of(blueprint, frozen_mesh, model.config.step.max_tokens_per_device)
                seconds = forward_seconds(blueprint, frozen_mesh, frozen_rows, machine)
            seconds *= model.reads
            note = "; ".join([*filter(None, [model.note]), *["on separate ranks, a step ahead"] * model.ahead])
            parts.append(Reading(f"{model.name}: forward", seconds, seconds, 0.0, note, model.first_epoch, model.ahead))
        share, note = self._read_of_trained(plan)
        if share:
            parts.append(Reading("trained model: forward", share * forward, share * forward, 0.0, note))
        return parts

    def _read_of_trained(self, plan: StepPlan) -> tuple[float, str]:
        """(Share of the step's documents that the trained model computes before its step, the reason)."""
        if isinstance(self.config, RewardConfig):
            parted = self.config.reads_preferences and parts_pairs(plan)
            return float(parted), "scores of answers in another row than their pair's other answer"
        if not isinstance(self.config, DpoConfig):
            return 0.0, ""
        preference, documents = self.config.preference, range(len(plan.documents))
        if any(facts.whole_step for facts in preference.facts):
            return 1.0, "all answers of the step, which preference.loss compares"
        examples = [documents[::2], documents[1::2]] if preference.is_paired else [documents]
        split = len(split_examples(examples, plan)) / len(examples[0])
        if "kto" in preference.losses:
            return 1.0 + split, "answers to other prompts, for the KL of kto"
        return split, "answers of pairs that are in two rows"


def with_waits(readings: Sequence[Reading], seconds: float) -> list[Reading]:
    """The forwards with their addition to steps of `seconds`. Forwards on separate ranks run ahead, one after the
    other: together they add the time by which they take longer than the step."""
    ahead = sum(part.seconds for part in readings if part.ahead)
    busy = seconds + sum(part.waits for part in readings if not part.ahead)
    share = max(0.0, ahead - busy) / ahead if ahead else 0.0
    return [replace(part, waits=share * part.seconds) if part.ahead else part for part in readings]


def with_readings(time: StepTime, readings: Sequence[Reading]) -> StepTime:
    """The time of a step with these forwards before it."""
    readings = with_waits(readings, time.seconds)
    seconds = time.seconds + sum(part.waits for part in readings)
    return replace(time, seconds=seconds, parts=(*readings, *time.parts), mfu=time.mfu * time.seconds / seconds)


def _engine_row(model: OtherModel, memory: Memory) -> EngineRow:
    """An engine's memory on the accelerator. With cpu_offload it is the memory that its units need while they run."""
    holdings = memory.share
    if memory.offloaded:
        note = f"{byte_count(holdings.resident)} on the host (cpu_offload)"
        note = f"{note}; {model.note}" if model.note else note
        return EngineRow(model.name, memory.on_device, gathered=memory.gathered + memory.staged, note=note)
    return EngineRow(
        model.name, holdings.weights, holdings.gradients, holdings.optimizer, memory.gathered, note=model.note
    )
