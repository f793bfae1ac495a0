"""The output of a run at its start: data, steps, model, mesh, precision, units, memory. Printed by the first rank."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table

from weft.config import to_dict, to_yaml
from weft.config.conditions import BUILT_IN_OPTIMIZERS
from weft.config.paths import holds_weights
from weft.config.presets import default_of_command
from weft.config.recompute import Activations
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.data.documents import DataReport
from weft.data.order import StepSampler
from weft.engine.builder import saved_of, stored_rows_of_rank
from weft.engine.describe import (
    attention_kernels,
    axis_rows,
    describe,
    dtype_rows,
    elements_by_name,
    parameter_rows,
    unit_rows,
)
from weft.engine.engine import Engine
from weft.engine.loaded_state import state_lines
from weft.engine.optim.groups import describe_groups
from weft.engine.sleep import Part
from weft.engine.step_plan.plan import StepPlan
from weft.launch.accelerators import limits_of
from weft.launch.options import Detail
from weft.models import hf
from weft.models.freeze import PRESETS, resolved
from weft.models.lora import describe as describe_adapters
from weft.models.mixer_kernels import describe_kernels
from weft.models.patterns import matches
from weft.models.transforms import chosen_transforms
from weft.models.vision import vision_parts
from weft.observe.tables import (
    dtype_table,
    mesh_table,
    optimizer_table,
    sharding_table,
    sharding_totals_table,
    show,
    unit_table,
)
from weft.ops.attention import EXACT
from weft.parallel.memory import HostNeeds, hint, host_bytes, host_shortage
from weft.parallel.pp.model import Pipeline
from weft.parallel.quantise import describe as describe_quantised
from weft.strict_json import plain
from weft.terminal import Console, byte_count, clean, count, counted, say, say_folded
from weft.versions import untested_versions

_TIMED_BYTES = 100 << 20
_FEW_STEPS = 20  # below this number of optimizer steps, if the user did not set it, a hint is printed
_SMALL_STEP = 4  # documents or prompts; gradients of fewer are mostly noise
# Lines about the model that --quiet prints, and lines that only --verbose prints. RUN/opening.txt has all.
_ESSENTIAL = ("model ", "update ", "lora ", "hint ", "warning ")
_DETAILS = ("weights ", "layout ", "checked ", "fsdp ", "host ")
OPENING = "opening.txt"
_COMPARED = "checked on a small copy: log-probabilities and gradients equal those of one rank"


@dataclass(frozen=True)
class ModelOpening:
    """The lines of a run about its model and mesh. They are sent between processes."""

    lines: Sequence[str]
    tables: Sequence[Table] = ()

    def followed_by(self, lines: Iterable[str]) -> ModelOpening:
        """The same lines, followed by others."""
        return replace(self, lines=[*self.lines, *lines])


def print_opening(
    config: SftConfig,
    engine: Engine,
    report: DataReport,
    folder: Path,
    steps: StepSampler,
    notes: Sequence[str] = (),
    detail: Detail = "normal",
) -> None:
    """Prints the information that a user needs before a long run. notes: further lines about the data, and about a
    resumed run."""
    if not engine.ranks.is_first:
        return
    lines = [f"run      {folder}", f"data     {report}"]
    lines += steps_lines(config, len(steps), report.in_epoch or report.documents, steps.in_epoch, report.unit)
    if config.train.loss is not None:
        lines.append(f"loss     {config.train.loss}")
    model = model_opening(config, engine)
    if (loaded := engine.loaded) is not None:
        text = f"weights  {counted(loaded.tensors, 'tensor')}; this rank read {byte_count(loaded.bytes_read)}"
        if loaded.bytes_read >= _TIMED_BYTES:  # for fewer bytes, the time is that of opening files
            speed = loaded.bytes_read / max(loaded.seconds, 1e-9) / 1e9
            text += f" in {loaded.seconds:.1f} s ({speed:.2f} GB/s)"
        if loaded.left_out:
            text += f"; {len(loaded.left_out)} not read, as this model has no such tensors ({loaded.left_out[0]}, ...)"
        if loaded.drafts:
            text += (
                f"; {counted(len(loaded.drafts), 'tensor')} of draft layers are copied into exports without training"
            )
        elif layers := hf.draft_layers(engine.built.config):
            text += f"; the config has {counted(layers, 'draft layer')}, but the files contain none"
        model = replace(model, lines=[text, *model.lines])
    show_opening([*lines, *notes], model, folder, detail)


def show_opening(lines: Sequence[str], model: ModelOpening, folder: Path, detail: Detail) -> None:
    """Prints an opening, and appends all of it to RUN/opening.txt. lines: about the run; they are always printed."""
    page = io.StringIO()
    for table in model.tables:
        show(table, Console(file=page))
    with (folder / OPENING).open("a", encoding="utf-8") as file:
        file.write("".join(f"{clean(line)}\n" for line in (*lines, *model.lines)) + page.getvalue())
    if detail == "verbose":
        say_folded([*lines, *model.lines])
        for table in model.tables:
            show(table)
        return
    quiet = detail == "quiet"
    shown = [s for s in model.lines if s.startswith(_ESSENTIAL) or not (quiet or s.startswith(_DETAILS))]
    say_folded([*lines, *shown])
    if detail == "normal":
        say_folded(
            [f"details  {folder / OPENING} has dtypes, kernels, units and optimizer groups; --verbose prints them"]
        )


def steps_lines(config: SftConfig, steps: int, documents: int, in_epoch: int, unit: str = "documents") -> list[str]:
    """Lines about the length of a run, with advice if it has few steps and the user did not set train.steps. documents:
    number in an epoch. in_epoch: optimizer steps of the first epoch. unit: as in DataReport."""
    step, epochs, document = config.step, config.train.epochs, unit.removesuffix("s")
    size = f"up to {step.tokens:,} tokens" if step.tokens is not None else counted(step.documents or 0, document)
    number = f"{'about ' * (step.tokens is not None)}{in_epoch:,}"
    if epochs is None:
        epochs_text = f"; an epoch, {counted(documents, document)}, has {number}"
    else:
        epochs_text = (
            f"; {counted(epochs, 'epoch')} of {counted(documents, document)}{f', {number} each' * (epochs > 1)}"
        )
    lines = [f"steps    {counted(steps, 'optimizer step')} of {size}{epochs_text}"]
    if epochs is None or steps >= _FEW_STEPS:
        return lines
    fewer = max(_SMALL_STEP, documents * epochs // (2 * _FEW_STEPS))
    smaller = f"step.documents={fewer}" if step.tokens is None else f"step.tokens={max(2, step.tokens // 4)}"
    makes = "makes smaller steps and more of them" if fewer < min(step.documents or documents, documents) else ""
    longer = f"train.epochs={epochs * -(-2 * _FEW_STEPS // steps)} repeats the data more often"
    advice = f"{smaller} {makes}, {longer}" if makes else longer
    return [*lines, f"hint     {counted(steps, 'optimizer step')} in all may be too few: {advice}"]


def few_rollout_steps(config: RlConfig, rollouts: int, prompts: int) -> list[str]:
    """Advice if a run of weft rl has few rollout steps and train.steps is not set. prompts: number in an epoch."""
    epochs = config.train.epochs
    if epochs is None or rollouts >= _FEW_STEPS:
        return []
    fewer = max(_SMALL_STEP, prompts * epochs // (2 * _FEW_STEPS)) * config.rl.minibatches
    smaller = (
        f"rl.prompts_per_step={fewer} makes smaller steps and more of them, "
        if fewer < min(config.rl.prompts_per_step, prompts)
        else ""
    )
    longer = f"train.epochs={epochs * -(-2 * _FEW_STEPS // max(1, rollouts))} repeats the prompts more often"
    return [f"hint     {counted(rollouts, 'rollout step')} in all may be too few: {smaller}{longer}"]


def print_dry_run(config: SftConfig | RlConfig, engine: Engine, *, parameters: bool, as_json: bool = False) -> None:
    """Prints the resolved config, the mesh and the sharding, for a dry run. parameters: one row for each parameter.
    as_json: prints `{"config": ..., ...describe(engine)}` only."""
    if as_json:
        say(json.dumps(plain({"config": to_dict(config)} | describe(engine, parameters=parameters)), indent=2))
        return
    say(to_yaml(config))
    folder = Path(config.model.path)
    pretrained = config.model.init == "pretrained" and config.model.dcp_weights is None
    if pretrained and folder.is_dir() and not holds_weights(folder):
        say(f"weights  {folder} contains no weights yet: download them before training")
    model = model_opening(config, engine)
    say_folded(model.lines)
    for table in model.tables:
        show(table)
    say_folded([f"rows     {_activations(engine)}"])
    rows = parameter_rows(engine)
    show(sharding_table(rows) if parameters else sharding_totals_table(rows))


def _activations(engine: Engine) -> str:
    """Describes the activations that the largest row stores for backward."""
    model, tokens = engine.config.model, engine.config.step.max_tokens_per_device
    activations = Activations.from_config(engine.config)
    bound = "at most " if engine.lora is not None or model.freeze else ""
    stages, cut = engine.stages, engine.context
    try:
        saved = saved_of(
            engine.config, engine.built, engine.mesh, cut, engine.precision, sequence=engine.divided.sequence
        )
    except Exception as error:  # of any type: some families need real values, but here tensors have only shapes
        return (
            f"of {tokens:,} tokens: the memory that they need for backward is unknown before they run "
            f"({type(error).__name__})"
        )
    of_stage = ""
    layers, share = stored_rows_of_rank(engine.config.mesh.pp_schedule, stages, 0)
    if stages is not None:
        placement, rows_text = stages.placement, "each row of a step, all"
        if engine.config.mesh.pp_schedule != "GPipe":
            rows_text = f"{round(share * placement.chunks)} rows"
            if placement.chunks > 1:
                rows_text += f" in one of its {placement.chunks} stages"
        of_stage = f" on the first rank of mesh.pp, of {rows_text} at once,"
    size = saved.bytes(tokens, activations, layers, share)
    row = f", a rank's part of {cut.size * tokens:,}," if cut is not None else ""
    return (
        f"of {tokens:,} tokens{row} need{of_stage} {bound}{byte_count(size)} for backward "
        f"(model.recompute={activations.recompute or 'none'}), computed from shapes, without the head and masks"
    )


def model_opening(
    config: SftConfig | RlConfig, engine: Engine, other_engines: Sequence[Engine] = (), asleep: Sequence[Part] = ()
) -> ModelOpening:
    """The model, its sharding and memory. other_engines: on the same ranks. asleep: the parts of all engines that are
    sometimes offloaded (engine/sleep.py)."""
    named = engine.module.named_parameters(remove_duplicate=False)
    tables = [
        mesh_table(axis_rows(engine)),
        dtype_table(dtype_rows(engine)),
        unit_table(unit_rows(engine), engine.mesh.tp_size),
        optimizer_table(describe_groups(named, config.optimizer, engine.divided.cuts)),
    ]
    return ModelOpening(list(_model_lines(config, engine, other_engines, asleep)), tables)


def _model_lines(
    config: SftConfig | RlConfig, engine: Engine, other_engines: Sequence[Engine], asleep: Sequence[Part]
) -> Iterator[str]:
    """The lines of model_opening."""
    built, mesh, ranks, precision = engine.built, engine.mesh, engine.ranks, engine.precision
    elements = elements_by_name(engine)
    for line in untested_versions():
        yield f"warning  {line}"
    name = type(built.module.hf_model).__name__
    yield f"model    {config.model.path}: {name}, {sum(elements.values()):,} parameters"
    yield (
        f"mesh     {' x '.join(f'{axis} {size}' for axis, size in mesh.axes.items())} on "
        f"{counted(ranks.world, 'rank')} of {ranks.device.type}; "
        f"{_name(precision.master)} weights, {_name(precision.compute)} compute"
    )
    if precision.remark():
        yield f"warning  {precision.remark()}"
    if ranks.assumed is not None or (ranks.device.type == "cuda" and torch.cuda.is_available()):
        capability = None
        if ranks.assumed is not None:
            capability = ranks.assumed.capability
        elif not torch.version.hip:
            capability = torch.cuda.get_device_capability(ranks.device)
        if limits := limits_of(capability, precision.compute == torch.bfloat16):
            yield f"warning  {limits}"
    notes = ""
    if built.layout == "packed" and ranks.assumed is not None:
        notes = "".join(f"{name} processes each document separately; " for name in built.support.mixers)
    elif built.layout == "packed":
        mixers = {type(entry.mixer).__name__: entry.mixer for entry in engine.module.mixers.values()}
        for name, mixer in sorted(mixers.items()):
            notes += f"{name.removeprefix('FSDP')} {describe_kernels(mixer, ranks.device, precision.compute)}; "
    yield f"layout   documents {built.layout}; {notes}{_attention(engine)}"
    if mesh.cp_size > 1:
        context, row_tokens = engine.context, engine.config.step.max_tokens_per_device
        if context is None:
            yield "cp       documents of this model are not split on this mesh: each document is on one of these ranks"
        else:
            parts = {"ring": context.ring_size, "ulysses": context.ulysses_size}
            how = " x ".join(f"{name} {size}" for name, size in parts.items() if size > 1)
            yield (
                f"cp       documents{' of text' * _takes_images(engine)} longer than {row_tokens:,} tokens are split "
                f"over up to {context.size} ranks ({how}); shorter ones send nothing; {_COMPARED}"
            )
    if engine.pipeline is not None:
        yield f"pp       {_stages(engine, engine.pipeline)}"
    if mesh.tp_size > 1:
        replicated = {
            type(mixer.mixer).__name__: None for mixer in engine.module.mixers.values() if mixer.shard is None
        }
        notes = "".join(f"{name} replicated, because its heads do not divide evenly; " for name in replicated)
        yield f"tp       layers split over {mesh.tp_size} ranks; {notes}{_COMPARED}"
    yield (
        f"checked  on a small copy ({built.support.copy}): logits within {built.support.error:.0e} of HuggingFace's "
        f"eager forward, documents{', with images and without,' * _takes_images(engine)} do not see each other"
    )
    yield from vision_lines(engine, elements, config.data.image_pixels)
    if built.flops.expert:
        scope = {"document": "each document", "step": "the complete step"}.get(engine.config.model.router_aux_loss)
        balance = "no auxiliary loss" if scope is None else f"auxiliary loss of {scope} x {engine.balance:g}"
        yield f"experts  {balance} (model.router_aux_loss); dropout and router jitter are 0"
    if noise := hf.noise_of(hf.read_config(built.path)):
        named = ", ".join(dict.fromkeys(f"{name} {value:g}" for _, name, value in noise))
        yield f"dropout  {named} of config.json: 0 in training, like all dropout and router jitter"
    begins = engine.optimizer is not None and engine.loaded is not None
    yield from state_lines(engine.built.load, engine.config.optimizer) if begins else ()
    for line in describe_adapters(engine.lora, engine.module, elements) if engine.lora is not None else ():
        yield f"lora     {line}"
    if engine.module.quantised_shapes:
        yield f"lora     {describe_quantised(engine.module, sum(elements.values()))}"
    model = engine.config.model
    transforms = chosen_transforms(model, Activations.from_config(engine.config), fused_norms=False)
    layers = ", ".join(filter(None, (transform.describe(engine.module) for transform in transforms)))
    if layers:
        yield f"layers   {layers}"
    if (offload := engine.module.offload) is not None:
        bound = "" if offload.limit is None else f"up to {byte_count(offload.limit)}, "
        yield f"offload  host memory for activations: {bound}by model.offload_activations={model.offload_activations}"
    yield f"fsdp     {fsdp_line(engine)}"
    yield from update_lines(config)
    if engine.config.neftune_noise_alpha is not None:
        yield f"noise    on embeddings in training (NEFTune, alpha {engine.config.neftune_noise_alpha:g}), by document"
    scope = "of the first stage: " if engine.pipeline is not None else ""
    room = f"on this machine a rank has {byte_count(engine.room)}"
    if ranks.assumed is not None and engine.storage.type == "cuda":
        room = f"{ranks.assumed.name} (--assume) has {byte_count(engine.room)}"
    yield f"memory   {scope}{engine.memory}; {room}"
    yield f"host     {_host(config, [engine, *other_engines], asleep)}"
    advice = hint(engine.memory, engine.room, mesh) if engine.storage.type != "cpu" else None
    if advice is not None:
        yield f"hint     {advice}"


def _host(config: SftConfig | RlConfig, engines: Sequence[Engine], asleep: Sequence[Part]) -> str:
    """Describes the host memory of a rank's engines while a checkpoint is written, or while parts are offloaded."""
    state = config.checkpoint.trainer_state != "none"
    needs = []
    for engine in engines:
        adapters, replicas = engine.lora is not None, engine.mesh.dp_replicate
        host_needs = HostNeeds.estimate(engine.memory, adapters=adapters, state=state, replicas=replicas, parts=asleep)
        needs.append(host_needs if engine.config.purpose == "train" else replace(host_needs, saved=0))
    pinned = engines[0].storage.type == "cuda"
    size, ranks = host_bytes(needs), engines[0].ranks
    short = host_shortage(size, ranks.world) if pinned and ranks.assumed is None and ranks.simulated is None else ""
    return (
        f"{byte_count(size)} of {'pinned ' if pinned else ''}host memory per rank for checkpoint copies"
        f"{' or for offloaded parts' if asleep else ''}{short}"
    )


def fsdp_line(engine: Engine) -> str:
    """Describes the settings of FSDP2, except units, mesh and dtypes."""
    config = engine.config.fsdp
    prefetch = "FSDP2's default"
    if (depth := config.prefetch) is not None:
        forward, backward = depth if isinstance(depth, tuple) else (depth, depth)
        prefetch = f"{forward} ahead in forward and {backward} in backward"
    texts = [
        f"reshard_after_forward {str(config.reshard_after_forward).lower()}",
        f"gradients reduced: {config.reduce}",
        f"prefetch {prefetch}",
    ]
    if config.cpu_offload == "optimizer":
        texts.append("master weights, gradients and optimizer state on the host")
    elif config.cpu_offload:
        texts.append("parameters, gradients and optimizer state on the host")
    if engine.loss_scale is not None:
        texts.append(f"loss scale {engine.loss_scale.scale:g}, doubled after {engine.loss_scale.interval} steps")
    return ", ".join(texts)


def update_lines(config: SftConfig | RlConfig) -> list[str]:
    """Lines about the optimizer, its learning rate and the keys with default values, and about the average of the
    weights if there is one."""
    optimizer, schedule, lines = config.optimizer, config.schedule, []
    options = "".join(f", {name} {value}" for name, value in optimizer.options.items())
    stepping = "" if optimizer.name in BUILT_IN_OPTIMIZERS else "; each rank updates its shards"
    by_command: dict[str, list[str]] = {}
    for name in ("optimizer.lr", "optimizer.weight_decay", "schedule.name"):
        if command := default_of_command(config, name):
            by_command.setdefault(command, []).append(name)
    lines.append(
        f"update   {optimizer.name}{options}, lr {optimizer.lr:g}, weight_decay {optimizer.weight_decay:g}, "
        f"schedule {schedule.name}{stepping}"
        + "".join(f"; defaults of {command}: {', '.join(names)}" for command, names in by_command.items())
    )
    if optimizer.ema_decay is not None:
        lines.append(
            f"average  of the weights, decay {optimizer.ema_decay:g}; the HuggingFace directory of a checkpoint has "
            f"{'the average' if config.checkpoint.weights == 'ema' else 'the raw weights'} (checkpoint.weights)"
        )
    return lines


def _attention(engine: Engine) -> str:
    if not engine.built.uses_bounds:
        return "the family's own attention, eager" if engine.built.support.attends else "no attention"
    if engine.config.exact:
        return f"attention kernel {EXACT}"
    kernels = attention_kernels(engine)
    return "attention kernel " + ", ".join(f"{kernel} ({'; '.join(kinds)})" for kernel, kinds in kernels.items())


def _stages(engine: Engine, pipeline: Pipeline) -> str:
    """Describes the layers of each rank of mesh.pp: `2 stages of layers: 0 to 13 (310,000,000 parameters), 14 to 27
    (...); ...`. With several stages per rank: `4 stages of layers on 2 ranks: 0 to 6 and 14 to 20 (...), ...`."""
    texts, elements, placement = [], elements_by_name(engine), pipeline.placement
    for rank in range(placement.ranks):
        num_elements = sum(count for name, count in elements.items() if rank in pipeline.holders[name])
        spans = [pipeline.spans[stage] for stage in placement.stages_of(rank)]
        layers = " and ".join(f"{first}" if end - first == 1 else f"{first} to {end - 1}" for first, end in spans)
        texts.append(f"{layers} ({num_elements:,} parameters)")
    tied = [name for name in pipeline.shared_params(0) if engine.built.tensors[name].requires_grad]
    tied_text = "; the first and the last both have the tied embedding" if tied else ""
    over = f" on {placement.ranks} ranks" if placement.chunks > 1 else ""
    schedule = engine.config.mesh.pp_schedule
    return f"{placement.stages} stages of layers{over}: {', '.join(texts)}{tied_text}; schedule {schedule}; {_COMPARED}"


def pipeline_hint(engine: Engine, plan: StepPlan) -> list[str]:
    """Advice if a step has too few micro-batches to keep all pipeline stages busy; otherwise empty."""
    pp, micro_batches = engine.mesh.pp_size, plan.micro_batches
    if pp == 1 or micro_batches >= 2 * pp:
        return []
    return [
        f"hint     {counted(micro_batches, 'micro-batch')} for {pp} stages (mesh.pp): they wait for "
        f"each other in {engine.bubble(plan):.0%} of such a step. Use {2 * pp} micro-batches or more: put more "
        "documents or tokens in a step, or lower step.max_tokens_per_device."
    ]


def _takes_images(engine: Engine) -> bool:
    return engine.built.vision is not None and not engine.built.support.images


def vision_lines(engine: Engine, elements: Mapping[str, int], pixels: Mapping[str, int]) -> list[str]:
    """Lines about a vision model: its parts, and the size of an image; empty for other models. elements: parameter ->
    number of its elements over all ranks. pixels: data.image_pixels."""
    if not vision_parts(engine.module.base, engine.module.facts):
        return []
    refusal = engine.built.support.images
    parts = []  # with their names in model.freeze
    for preset in PRESETS:
        patterns = resolved(engine.module, [preset])
        parameters = {
            n: p for n, p in engine.module.named_parameters() if any(matches(pattern, n) for pattern in patterns)
        }
        size = sum(elements[n] for n in parameters)
        trained = sum(elements[n] for n, p in parameters.items() if p.requires_grad)
        state = {0: "frozen", size: "trained"}.get(trained, f"with {count(trained)} trained")
        parts.append(f"{preset} {count(size)} {state}")
    images = f"refused, because {refusal}" if refusal else _image_size(engine, pixels)
    return [f"parts    {', '.join(parts)} (model.freeze)", f"images   {images}"]


def _image_size(engine: Engine, pixels: Mapping[str, int]) -> str:
    """Describes how much of a row a document with images takes, and the largest image if the config limits its size."""
    vision, row_tokens = engine.built.vision, engine.config.step.max_tokens_per_device
    ranks = engine.planner.image_room.ranks
    limit = f"a document with images is not split, and must fit a row of {row_tokens:,} tokens"
    if ranks > 1:
        limit = f"a document with images is split (mesh.cp), and must fit {ranks} rows of {row_tokens:,} tokens"
    if vision is None or "max" not in pixels or "image_grid_thw" not in vision.smallest:
        return limit
    merge = int(vision.smallest["image_grid_thw"][0, 1])
    tokens = pixels["max"] // (vision.patch * merge) ** 2
    patch_tokens = math.ceil(engine.built.flops.tower_memory * tokens * merge**2)
    return (
        f"an image takes up to {tokens + patch_tokens:,} tokens of a row: {tokens:,}, and {patch_tokens:,} for its "
        f"patches; {limit}"
    )


# ---------------------------------------------------------------- rows of the tables


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
