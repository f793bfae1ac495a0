"""The output of a run at its opening (data, mesh, precision, units, sharding) and at its closing (time, results, where
the model is, what to do next). Printed by the first rank."""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from weft.config import to_yaml
from weft.config.checks import BUILT_IN
from weft.config.mesh import AXES
from weft.config.paths import holds_weights
from weft.config.presets import default_of_command
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig
from weft.config.urls import is_url
from weft.data.documents import DataReport
from weft.data.order import StepSampler
from weft.engine.engine import Engine
from weft.engine.loaded_state import state_lines
from weft.engine.optim.groups import describe_groups
from weft.engine.sleep import Part
from weft.engine.step_plan.plan import StepPlan
from weft.launch.accelerators import limits_of
from weft.launch.options import Detail
from weft.launch.process import Ranks
from weft.models import hf
from weft.models.lora import describe
from weft.models.mixer_kernels import described
from weft.models.transforms import TRANSFORMS
from weft.observe.progress import duration, number
from weft.observe.tables import (
    AxisRow,
    DtypeRow,
    ParameterRow,
    UnitRow,
    dtype_table,
    mesh_table,
    optimizer_table,
    sharding_table,
    sharding_totals_table,
    show,
    unit_table,
)
from weft.observe.vision import vision_lines
from weft.ops.attention import EXACT, choose
from weft.parallel.activations import RowSharing, saved_bytes
from weft.parallel.memory import HostNeeds, hint, host_bytes, host_shortage
from weft.parallel.mesh import Mesh
from weft.parallel.parallelize import StagePlan, layers_of
from weft.parallel.pp.model import Pipeline
from weft.parallel.pp.schedule import in_flight
from weft.parallel.shards.cuts import AnyShardSpec, NestedShardSpec, full_shape
from weft.parallel.shards.load import LoadReport
from weft.parallel.units import Unit, parameters_by_unit
from weft.terminal import Console, byte_count, clean, counted, display_name, say, say_folded
from weft.versions import untested_versions

_TIMED_BYTES = 100 << 20
_FEW_STEPS = 20  # fewer optimizer steps than this, where nobody chose their number, are pointed out
_SMALL_STEP = 4  # documents or prompts; gradients of fewer are mostly noise
# Lines of the model that --quiet leaves, and lines that only --verbose prints; RUN/opening.txt has all.
_ESSENTIAL = ("model ", "update ", "lora ", "hint ", "warning ")
_DETAILS = ("weights ", "layout ", "checked ", "fsdp ", "host ")
OPENING = "opening.txt"
_COMPARED = "on a small copy log-probabilities and every gradient were those of one rank"


@dataclass(frozen=True)
class ModelOpening:
    """What a run says of its model and mesh. Both are sent between processes."""

    lines: Sequence[str]
    tables: Sequence[Table] = ()

    def followed_by(self, lines: Iterable[str]) -> ModelOpening:
        """The same with further lines."""
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
    """Prints what a user needs to know before a long run. notes: further lines about the data, and about a resumed
    run."""
    if not engine.ranks.is_first:
        return
    lines = [f"run      {folder}", f"data     {report}"]
    lines += steps_lines(config, len(steps), report.in_epoch or report.documents, steps.in_epoch)
    if config.train.loss is not None:
        lines.append(f"loss     {config.train.loss}")
    model = model_opening(config, engine)
    if engine.loaded is not None:
        model = replace(model, lines=[f"weights  {_loaded(engine.loaded)}", *model.lines])
    show_opening([*lines, *notes], model, folder, detail)


def show_opening(lines: Sequence[str], model: ModelOpening, folder: Path, detail: Detail) -> None:
    """Prints an opening, and appends all of it to RUN/opening.txt. lines: about the run, which are always printed."""
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
    say_folded([*lines, *(essential if detail == "quiet" else brief)(model.lines)])
    if detail == "normal":
        say_folded(
            [f"details  {folder / OPENING} has dtypes, kernels, units and optimizer groups; --verbose prints them"]
        )


def steps_lines(config: SftConfig, steps: int, documents: int, in_epoch: int) -> list[str]:
    """Lines about the length of a run, with advice if it has few steps and train.steps does not say so. documents: of
    an epoch. in_epoch: optimizer steps of the first epoch."""
    step, epochs = config.step, config.train.epochs
    size = f"up to {step.tokens:,} tokens" if step.tokens is not None else counted(step.documents or 0, "document")
    number = f"{'about ' * (step.tokens is not None)}{in_epoch:,}"
    if epochs is None:
        epochs_text = f"; an epoch, {counted(documents, 'document')}, has {number}"
    else:
        epochs_text = (
            f"; {counted(epochs, 'epoch')} of {counted(documents, 'document')}{f', {number} each' * (epochs > 1)}"
        )
    lines = [f"steps    {counted(steps, 'optimizer step')} in all, of {size}{epochs_text}"]
    if epochs is None or steps >= _FEW_STEPS:
        return lines
    fewer = max(_SMALL_STEP, documents * epochs // (2 * _FEW_STEPS))
    smaller = f"step.documents={fewer}" if step.tokens is None else f"step.tokens={max(2, step.tokens // 4)}"
    makes = "makes smaller steps and more of them" if fewer < min(step.documents or documents, documents) else ""
    longer = f"train.epochs={epochs * -(-2 * _FEW_STEPS // steps)} goes through the data more often"
    advice = f"{smaller} {makes}, {longer}" if makes else longer
    return [*lines, f"hint     {counted(steps, 'optimizer step')} in all may teach little: {advice}"]


def few_rollout_steps(config: RlConfig, rollouts: int, prompts: int) -> list[str]:
    """Advice if a run of weft rl has few rollout steps and train.steps does not say so. prompts: of an epoch."""
    epochs = config.train.epochs
    if epochs is None or rollouts >= _FEW_STEPS:
        return []
    fewer = max(_SMALL_STEP, prompts * epochs // (2 * _FEW_STEPS)) * config.rl.minibatches
    smaller = (
        f"rl.prompts_per_step={fewer} makes smaller steps and more of them, "
        if fewer < min(config.rl.prompts_per_step, prompts)
        else ""
    )
    longer = f"train.epochs={epochs * -(-2 * _FEW_STEPS // max(1, rollouts))} goes through the prompts more often"
    return [f"hint     {counted(rollouts, 'rollout step')} in all may teach little: {smaller}{longer}"]


def say_finished(folder: Path, step: int, steps: int, stopped_by: str | None, ranks: Ranks, advice: str) -> None:
    """Prints that there is nothing to resume: the last step is done, or the eval key `stopped_by` ended the run."""
    if not ranks.is_first:
        return
    if step == steps:
        say(f"{folder} has finished already: step {steps} of {steps}. {advice}".rstrip())
    else:
        say(f"{folder} was ended by {stopped_by} after step {step} of {steps}. Set another {stopped_by} to go on.")


def print_dry_run(config: SftConfig | RlConfig, engine: Engine, *, parameters: bool) -> None:
    """Prints the resolved config, the mesh and the sharding, for a dry run. parameters: one row for each parameter."""
    say(to_yaml(config))
    folder = Path(config.model.path)
    pretrained = config.model.init == "pretrained" and config.model.dcp_weights is None
    if pretrained and folder.is_dir() and not holds_weights(folder):
        say(f"weights  there are none in {folder} yet: download them before you train")
    model = model_opening(config, engine)
    say_folded(model.lines)
    for table in model.tables:
        show(table)
    say_folded([f"rows     {_activations(engine)}"])
    rows = parameter_rows(engine)
    show(sharding_table(rows) if parameters else sharding_totals_table(rows))


def _activations(engine: Engine) -> str:
    """Describes the activations that the largest row keeps for backward."""
    model, tokens = engine.config.model, engine.config.step.max_tokens_per_device
    bound = "at most " if engine.lora is not None or model.freeze else ""
    stages = engine.stages
    try:
        saved = saved_bytes(engine.built.config, engine.precision.compute, _shared(engine))
    except Exception as error:  # of any type: some families need real values, and only shapes are computed here
        return (
            f"of {tokens:,} tokens: what they keep for backward is not known before they run ({type(error).__name__})"
        )
    layers, share, of_stage = None, 1.0, ""
    if stages is not None:
        layers = layers_of(stages, 0)
        share, rows_text = _most_in_flight(engine, stages)
        of_stage = f" on the first rank of mesh.pp, of {rows_text},"
    size = saved.bytes(tokens, recompute=model.recompute == "full", layers=layers, rows=share)
    cut = engine.context
    row = f", a rank's part of {cut.size * tokens:,}," if cut is not None else ""
    return (
        f"of {tokens:,} tokens{row} keep{of_stage} {bound}{byte_count(size)} for backward "
        f"(model.recompute={model.recompute}), counted from shapes, without the head and masks"
    )


def _most_in_flight(engine: Engine, stages: StagePlan) -> tuple[float, str]:
    """(rows of all its layers that the first rank of mesh.pp keeps at most, their description)."""
    schedule, placement = engine.config.mesh.pp_schedule, stages.placement
    if schedule == "GPipe":
        return 1.0, "each row of a step, all at once"
    micro_batches = 4 * placement.stages  # more micro-batches change nothing
    in_flight_rows = in_flight(schedule, placement, 0, micro_batches)
    rows = (
        f"{in_flight_rows} rows"
        if placement.chunks == 1
        else f"{in_flight_rows} rows in one of its {placement.chunks} stages"
    )
    return in_flight_rows / placement.chunks, f"{rows} at once"


def _shared(engine: Engine) -> RowSharing:
    """How the ranks share the largest row; with mesh.cp, a row may be a part of one document."""
    cut = engine.context
    ring, ulysses = (1, 1) if cut is None else (cut.ring_size, cut.ulysses_size)
    return RowSharing(engine.mesh.tp_size, ring, ulysses, engine.divided.sequence)


def _balancing(engine: Engine) -> str:
    scope = {"document": "each document", "step": "the whole step"}.get(engine.config.model.router_aux_loss)
    return "no auxiliary loss" if scope is None else f"auxiliary loss of {scope} x {engine.balance:g}"


def model_opening(
    config: SftConfig | RlConfig, engine: Engine, other_engines: Sequence[Engine] = (), asleep: Sequence[Part] = ()
) -> ModelOpening:
    """The model, its sharding and memory. other_engines: on the same ranks. asleep: the parts of all engines that
    sleep at times (engine/sleep.py)."""
    named = engine.module.named_parameters(remove_duplicate=False)
    tables = [
        mesh_table(axis_rows(engine)),
        dtype_table(dtype_rows(engine)),
        unit_table(unit_rows(engine), engine.mesh.tp_size),
        optimizer_table(describe_groups(named, config.optimizer, engine.divided.cuts)),
    ]
    return ModelOpening(list(_model_lines(config, engine, other_engines, asleep)), tables)


def essential(lines: Iterable[str]) -> list[str]:
    """The lines about the model that --quiet leaves."""
    return [line for line in lines if line.startswith(_ESSENTIAL)]


def brief(lines: Iterable[str]) -> list[str]:
    """The lines about the model that are printed without --quiet and --verbose."""
    return [line for line in lines if not line.startswith(_DETAILS)]


def _limits(engine: Engine) -> str:
    """What is amiss with the accelerators of this run; "" if nothing is."""
    ranks = engine.ranks
    if ranks.assumed is not None:
        capability = ranks.assumed.capability
    elif ranks.device.type != "cuda" or not torch.cuda.is_available():
        return ""
    else:
        capability = None if torch.version.hip else torch.cuda.get_device_capability(ranks.device)
    return limits_of(capability, engine.precision.compute == torch.bfloat16)


def _model_lines(
    config: SftConfig | RlConfig, engine: Engine, other_engines: Sequence[Engine], asleep: Sequence[Part]
) -> Iterator[str]:
    """The lines of model_opening."""
    built = engine.built
    for line in untested_versions():
        yield f"warning  {line}"
    yield (
        f"model    {config.model.path}: {type(built.module.hf_model).__name__}, {_all_elements(engine):,} parameters"
    )
    precision = engine.precision
    yield (
        f"mesh     {' x '.join(f'{axis} {size}' for axis, size in engine.mesh.axes.items())} on "
        f"{counted(engine.ranks.world, 'rank')} of {engine.ranks.device.type}; "
        f"{_name(precision.master)} weights, {_name(precision.compute)} compute"
    )
    if precision.remark():
        yield f"warning  {precision.remark()}"
    if limits := _limits(engine):
        yield f"warning  {limits}"
    notes = "".join(f"{line}; " for line in _mixers(engine) if built.layout == "packed")
    yield f"layout   documents {built.layout}; {notes}{_attention(config, engine)}"
    if engine.mesh.cp_size > 1:
        yield f"cp       {_context(engine)}"
    if engine.pipeline is not None:
        yield f"pp       {_stages(engine, engine.pipeline)}"
    if engine.mesh.tp_size > 1:
        replicated = {
            type(mixer.mixer).__name__: None for mixer in engine.module.mixers.values() if mixer.share is None
        }
        notes = "".join(f"{name} whole on each, because its heads do not divide; " for name in replicated)
        yield f"tp       layers divided over {engine.mesh.tp_size} ranks; {notes}{_COMPARED}"
    yield (
        f"checked  on a small copy ({built.support.copy}): logits within {built.support.error:.0e} of HuggingFace's "
        f"eager forward, documents{', with images and without,' * _takes_images(engine)} do not see each other"
    )
    yield from vision_lines(engine, _elements_of(engine), config.data.image_pixels)
    if built.flops.expert:
        yield f"experts  {_balancing(engine)} (model.router_aux_loss); dropout and router jitter are 0"
    if noise := hf.noise_of(hf.read_config(built.path)):
        named = ", ".join(dict.fromkeys(f"{name} {value:g}" for _, name, value in noise))
        yield f"dropout  {named} of config.json: 0 in training, as dropout and router jitter always are"
    begins = engine.optimizer is not None and engine.loaded is not None
    yield from state_lines(engine.built.load, engine.config.optimizer) if begins else ()
    for line in describe(engine.lora, engine.module, _elements_of(engine)) if engine.lora is not None else ():
        yield f"lora     {line}"
    if _layers(engine):
        yield f"layers   {_layers(engine)}"
    yield f"fsdp     {fsdp_line(engine)}"
    yield from update_lines(config)
    if engine.config.neftune_noise_alpha is not None:
        yield f"noise    on embeddings in training (NEFTune, alpha {engine.config.neftune_noise_alpha:g}), by document"
    scope = "of the first stage: " if engine.pipeline is not None else ""
    yield f"memory   {scope}{engine.memory}; {_rooms(engine)}"
    yield f"host     {_host(config, [engine, *other_engines], asleep)}"
    advice = hint(engine.memory, engine.room, engine.mesh) if engine.storage.type != "cpu" else None
    if advice is not None:
        yield f"hint     {advice}"


def _mixers(engine: Engine) -> list[str]:
    """How packed rows pass each class of modules that carry state."""
    classes = {type(held_mixer.mixer).__name__: held_mixer.mixer for held_mixer in engine.module.mixers.values()}
    if engine.ranks.assumed is not None:
        return [f"{name} document by document" for name in engine.built.support.mixers]
    device, dtype = engine.ranks.device, engine.precision.compute
    return [f"{name.removeprefix('FSDP')} {described(mixer, device, dtype)}" for name, mixer in sorted(classes.items())]


def _rooms(engine: Engine) -> str:
    assumed = engine.ranks.assumed
    if assumed is not None and engine.storage.type == "cuda":
        return f"{assumed.name} (--assume) has {byte_count(engine.room)}"
    return f"on this machine a rank has {byte_count(engine.room)}"


def _host(config: SftConfig | RlConfig, engines: Sequence[Engine], asleep: Sequence[Part]) -> str:
    """Describes the host memory of a rank's engines while a checkpoint is written, or while parts sleep."""
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
        f"{byte_count(size)} of {'pinned ' if pinned else ''}host memory a rank for checkpoint copies"
        f"{' or for parts that sleep' if asleep else ''}{short}"
    )


def _loaded(report: LoadReport) -> str:
    text = f"{counted(report.tensors, 'tensor')}; this rank read {byte_count(report.bytes_read)}"
    if report.bytes_read >= _TIMED_BYTES:  # the time of less is that of opening files
        text += f" in {report.seconds:.1f} s ({report.bytes_read / max(report.seconds, 1e-9) / 1e9:.2f} GB/s)"
    if report.left_out:
        text += f"; left out, not part of this model: {len(report.left_out)} ({report.left_out[0]}, ...)"
    return text


def fsdp_line(engine: Engine) -> str:
    """Describes the settings of FSDP2, except units, mesh and dtypes."""
    config = engine.config.fsdp
    texts = [
        f"reshard_after_forward {str(config.reshard_after_forward).lower()}",
        f"gradients reduced: {config.reduce}",
        f"prefetch {_prefetch(config.prefetch)}",
    ]
    if config.cpu_offload:
        texts.append("parameters, gradients and optimizer state on the host")
    if engine.loss_scale is not None:
        texts.append(f"loss scale {engine.loss_scale.scale:g}, doubled after {engine.loss_scale.interval} steps")
    return ", ".join(texts)


def update_lines(config: SftConfig | RlConfig) -> list[str]:
    """Lines about the optimizer, its learning rate and which keys have their defaults, and about the average of the
    weights if there is one."""
    optimizer, schedule, lines = config.optimizer, config.schedule, []
    options = "".join(f", {name} {value}" for name, value in optimizer.options.items())
    stepping = "" if optimizer.name in BUILT_IN else "; each rank steps its own shards"
    by_command: dict[str, list[str]] = {}
    for name in ("optimizer.lr", "optimizer.weight_decay", "schedule.name"):
        if command := default_of_command(config, name):
            by_command.setdefault(command, []).append(name)
    lines.append(
        f"update   {optimizer.name}{options}, lr {optimizer.lr:g}, weight_decay {optimizer.weight_decay:g}, "
        f"schedule {schedule.name}{stepping}"
        + "".join(f"; default of {command}: {', '.join(names)}" for command, names in by_command.items())
    )
    if optimizer.ema_decay is not None:
        lines.append(
            f"average  of the weights, decay {optimizer.ema_decay:g}; the HuggingFace directory of a checkpoint holds "
            f"{'the average' if config.checkpoint.weights == 'ema' else 'the raw weights'} (checkpoint.weights)"
        )
    return lines


def _prefetch(depth: int | tuple[int, int] | None) -> str:
    if depth is None:
        return "FSDP2's default"
    forward, backward = depth if isinstance(depth, tuple) else (depth, depth)
    return f"{forward} ahead in forward and {backward} in backward"


def _layers(engine: Engine) -> str:
    """Describes how the decoder layers are computed; "" without recompute, compile and transforms."""
    model = engine.config.model
    recompute = ["run again in backward (recompute)"] if model.recompute == "full" else []
    transforms = [TRANSFORMS[name].describe(engine.module) for name in model.transforms]
    return ", ".join([*recompute, *(["compiled"] if model.compile is True else []), *transforms])


def _attention(config: SftConfig | RlConfig, engine: Engine) -> str:
    built = engine.built
    if not built.uses_bounds:
        return "attention of the family's own, eager" if built.support.attends else "no attention"
    if engine.config.exact:
        return f"attention kernel {EXACT}"
    kinds: dict[str, list[str]] = {}
    for traits in built.support.attention:
        kernel = choose(config.model.attention, engine.ranks.device, engine.precision.compute, traits)
        kinds.setdefault(kernel, []).append(str(traits))
    return "attention kernel " + ", ".join(
        f"{kernel} ({'; '.join(traits_texts)})" for kernel, traits_texts in kinds.items()
    )


def _all_elements(engine: Engine) -> int:
    return sum(_elements_of(engine).values())


def _stages(engine: Engine, pipeline: Pipeline) -> str:
    """Describes the layers of each rank of mesh.pp: `2 stages of layers: 0 to 13 (310,000,000 parameters), 14 to 27
    (...); ...`, or with several stages a rank `4 stages of layers on 2 ranks: 0 to 6 and 14 to 20 (...), ...`."""
    texts, elements, placement = [], _elements_of(engine), pipeline.placement
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
    """Advice if a step has too few micro-batches to keep all pipeline stages busy; else empty."""
    pp, micro_batches = engine.mesh.pp_size, plan.micro_batches
    if pp == 1 or micro_batches >= 2 * pp:
        return []
    return [
        f"hint     {counted(micro_batches, 'micro-batch')} for {pp} stages (mesh.pp): they wait for "
        f"each other in {engine.bubble(plan):.0%} of a step like this. More documents or tokens in a step, or a "
        f"smaller step.max_tokens_per_device, gives more; {2 * pp} or more are good."
    ]


def _elements_of(engine: Engine) -> dict[str, int]:
    """Name of each parameter -> its elements over all ranks."""
    cuts = engine.divided.cuts
    return {name: math.prod(full_shape(name, p, cuts)) for name, p in engine.whole_parameters().items()}


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _context(engine: Engine) -> str:
    """Describes how mesh.cp divides documents."""
    context, row_tokens = engine.context, engine.config.step.max_tokens_per_device
    if context is None:
        return "documents of this model are not cut on this mesh, but dealt whole to these ranks"
    parts = {"ring": context.ring_size, "ulysses": context.ulysses_size}
    how = " x ".join(f"{name} {size}" for name, size in parts.items() if size > 1)
    subject = "documents of text" if _takes_images(engine) else "documents"
    return (
        f"{subject} longer than {row_tokens:,} tokens are cut over up to {context.size} ranks ({how}); others send "
        f"nothing; {_COMPARED}"
    )


def _takes_images(engine: Engine) -> bool:
    return engine.built.vision is not None and not engine.built.support.images


def axis_rows(engine: Engine) -> list[AxisRow]:
    """The axes of the mesh, and the ranks along each."""
    mesh = engine.mesh
    ranks = torch.arange(mesh.sizes.world).reshape(mesh.sizes.all)
    groups = {name: ranks.movedim(n, -1).reshape(-1, ranks.shape[n]).tolist() for n, name in enumerate(AXES)}
    groups["ep"] = ranks.reshape(-1, mesh.ep_size, mesh.tp_size).movedim(1, -1).reshape(-1, mesh.ep_size).tolist()
    meaning = {
        "pp": "stages of consecutive layers; the same documents",
        "dp_replicate": "copies of the model; gradients summed over them",
        "dp_shard": "parameters, gradients, optimizer state sharded (FSDP2)",
        "cp": "parts of long documents; shards, as those of dp_shard",
        "tp": f"heads, intermediate widths, vocabulary{', tokens between blocks' * engine.divided.sequence} divided; "
        "the same documents",
        "ep": "of dp_shard x cp: experts divided, tokens travel to them",
    }
    return [
        AxisRow(name, size, tuple(tuple(group) for group in groups[name]), meaning[name])
        for name, size in mesh.axes.items()
    ]


def dtype_rows(engine: Engine) -> list[DtypeRow]:
    """The dtypes of masters, compute, reduction, optimizer state and export."""
    precision = engine.precision
    buffers = sorted({_name(b.dtype) for b in engine.module.buffers() if b.is_floating_point()})
    cast = ", ".join(engine.config.fsdp.cast_forward_inputs)
    inputs = [DtypeRow("inputs", _name(precision.compute), f"cast for {cast}")] if cast else []
    average = [] if engine.config.optimizer.ema_decay is None else [DtypeRow("average", "float32", "of the weights")]
    export = sorted({_name(d) for d in engine.built.source_dtypes.values()} if engine.lora is None else ())
    export = export or [_name(precision.master)]
    frozen = [DtypeRow("base", _name(precision.frozen), "frozen, never cast up")] if engine.lora is not None else []
    return [
        DtypeRow("masters", _name(precision.master), "the weights that the optimizer steps"),
        *frozen,
        DtypeRow("compute", _name(precision.compute), "forward and backward; softmax and loss in float32"),
        *inputs,
        DtypeRow("reduction", _name(precision.reduce), "gradients summed over ranks"),
        DtypeRow("optimizer", ", ".join(dict.fromkeys(map(_name, engine.moments))) or "-", "state"),
        *average,
        DtypeRow("buffers", ", ".join(buffers) or "-", "rotary tables, router biases: never cast"),
        DtypeRow(
            "export",
            ", ".join(export),
            "each tensor as in the source's files" if engine.lora is None else "the adapter",
        ),
    ]


def unit_rows(engine: Engine) -> list[UnitRow]:
    """The FSDP units, and the root with the remaining parameters."""
    size, owned = engine.precision.compute.itemsize, parameters_by_unit(engine.units)
    counts = [sum(p.numel() for p in parameters) for parameters in owned]
    rows = [
        UnitRow(unit.name, count, count * size, _sharding(unit))
        for unit, count in zip(engine.units, counts, strict=True)
    ]
    root_elements = _elements(engine.module) - sum(counts)
    return [*rows, UnitRow("root", root_elements, root_elements * size)]


def _sharding(unit: Unit) -> str:
    """Describes over which ranks a unit is sharded; "" for all ranks."""
    named = {"full": "", "experts": "over the ranks of the same experts", "replicate": "replicated"}
    return named[unit.shard] if isinstance(unit.shard, str) else f"groups of {unit.shard}"


def parameter_rows(engine: Engine) -> list[ParameterRow]:
    """The full and local shape of every parameter, and the axes over which it is sharded or divided."""
    sizes = {"dp_replicate": engine.mesh.dp_replicate, engine.mesh.shard_axis: engine.mesh.shards}
    cuts = engine.divided.cuts
    return [
        _parameter_row(name, parameter, sizes, cuts.get(name), engine.mesh)
        for name, parameter in engine.module.named_parameters()
    ]


def _parameter_row(
    name: str, parameter: nn.Parameter, sizes: Mapping[str, int], cut: AnyShardSpec | None, mesh: Mesh
) -> ParameterRow:
    local: torch.Tensor = parameter
    axes: tuple[str, ...] = ()
    if isinstance(parameter, DTensor):
        device_mesh = parameter.device_mesh
        placed = zip(list(sizes)[-device_mesh.ndim :], device_mesh.shape, parameter.placements, strict=True)
        axes = tuple(
            axis if size == sizes[axis] else f"{axis} in groups of {size}"
            for axis, size, placement in placed
            if isinstance(placement, Shard) and (size > 1 or sizes[axis] == 1)
        )
        local = parameter.to_local()
    shape = tuple(parameter.shape)
    if cut is not None:
        shape, axes = cut.shape, (*axes, *_dividing(cut, mesh))
    return ParameterRow(name, shape, tuple(local.shape), axes, _name(parameter.dtype), parameter.element_size())


def _dividing(cut: AnyShardSpec, mesh: Mesh) -> Iterator[str]:
    """Yields the axes, tp or ep, along which ranks compute with different parts of a tensor."""
    for spec in (cut.outer, cut.inner) if isinstance(cut, NestedShardSpec) else (cut,):
        if spec.divides:
            yield "ep" if mesh.ep is not None and spec.ranks is mesh.ep.ranks else "tp"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- the closing


def print_closing(summary: Mapping[str, Any], folder: Path) -> None:
    """Prints how a run went. summary: the content of summary.json. folder: the run folder."""
    say_folded(closing(summary, folder))


def closing(summary: Mapping[str, Any], folder: Path) -> list[str]:
    """The lines of print_closing."""
    seconds = {name: value for name, value in summary["seconds"].items() if name != "total"}
    phases = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    skipped = f" ({summary['skipped_steps']} skipped)" if summary["skipped_steps"] else ""
    lines = [
        f"done     {counted(summary['steps'], 'step')}{skipped} in {duration(summary['seconds']['total'])}: {phases}"
    ]
    rewards = summary.get("last_rewards")
    if rewards:
        has_means = summary["first_rewards"] != rewards
        lines.append(f"reward   {_from_to(summary['first_rewards'], rewards, has_means, 'rollout steps')}")
    elif summary["last_losses"]:
        first, last = summary["first_losses"], summary["last_losses"]
        has_means = summary["steps"] >= len(first) + len(last) and len(last) > 1
        lines.append(f"loss     {_from_to(first, last, has_means, 'steps')}")
    if summary["evaluation"] is not None:
        lines.append(f"held out {_evaluation(summary['evaluation'])}")
    train = seconds.get("train", 0.0)
    rate = f", {summary['tokens'] / train:,.0f} tokens/s" if train > 0 else ""
    lines.append(
        f"tokens   {summary['tokens']:,} ({summary['loss_tokens']:,} trained on) in "
        f"{counted(summary['documents'], 'document')}{rate}; peak memory {summary['peak_memory_gib']:.2f} GiB"
    )
    if summary["saved"] is not None:
        lines.append(f"model    {summary['saved']}")
    remote = is_url(display_name(str(folder)))  # for a URL, `weft merge` requires --output
    if summary["saved"] is not None and not str(summary["stopped"]).startswith("SIG"):
        run = shlex.quote(str(folder))
        lines.append(f"next     weft chat {run}      talk to it")
        if (Path(summary["saved"]) / "adapter_config.json").is_file():
            lines.append(f"         weft merge {run}{' --output merged' * remote}     a model of base and adapter")
        lines.append(f"         weft report {run}    curves, phases and config on one page")
        if rewards:
            lines.append(f"         weft rollouts {run}  what was sampled, and how it was rewarded")
    return lines


def _evaluation(evaluation: Mapping[str, Any]) -> str:
    """Describes the first and the last held-out loss or accuracy, and the best evaluation if one was tracked."""
    first, last, best = (evaluation[name] for name in ("first", "last", "best"))
    texts = [f"{_figure(evaluated)} (step {evaluated['step']})" for evaluated in (first, last)]
    text = " -> ".join(dict.fromkeys(texts))
    if best is None:
        return text
    metric = next(name for name in best if name not in ("step", "checkpoint"))
    saved = f", kept as {best['checkpoint']}" if best["checkpoint"] else ""
    return f"{text}; best {metric} {number(best[metric], '.4f')} (step {best['step']}){saved}"


def _figure(evaluation: Mapping[str, Any]) -> str:
    """Describes one evaluation: by its loss, or in reinforcement learning by its share of correct answers."""
    if "eval/loss" not in evaluation and "eval/accuracy" in evaluation:
        return f"accuracy {evaluation['eval/accuracy']:.1%}"
    return number(evaluation.get("eval/loss"), ".4f")


def _from_to(first: Sequence[float], last: Sequence[float], has_means: bool, steps: str) -> str:
    """Describes a metric at the beginning and the end of a run: by means over the steps if `has_means`, else by the
    first and the last value."""
    if has_means:
        means = [number(sum(values) / len(values), ".4f") for values in (first, last)]
        return f"{means[0]} -> {means[1]} (means of the first and the last {len(last)} {steps})"
    return f"{number(first[0], '.4f')} -> {number(last[-1], '.4f')}"


def say_stopped(stopped_by: str, step: int, resume_command: str) -> None:
    """Prints that a run stopped early. stopped_by: the signal, or the eval key, that ended it."""
    say(f"stopped  by {stopped_by} after step {step}. Go on with: {resume_command}")
