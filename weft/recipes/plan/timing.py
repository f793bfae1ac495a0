"""The time of a step on a machine, part by part. It is computed from rates, which are assumed or were measured.

In addition to matmuls, attention and collectives, it includes the accelerator's passes over tensors: those of layers
and head (recipes/plan/passes.py), FSDP2's copies between masters and gathered weights, clipping and the optimizer. It
also includes the host's time to launch operations, which matters if there is little to compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from weft.config.mesh import MeshSizes
from weft.config.recompute import STORE_ALL, Activations
from weft.models.flops import model_flops
from weft.parallel.pp.schedule import DELAYED, Action, bubble, order
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.holdings import RankShare, shares_by_stage
from weft.recipes.plan.machines import Machine
from weft.recipes.plan.memory import gathered_part, kept_rows, last_place, memory_by_stage, sharing
from weft.recipes.plan.rows import RowFacts
from weft.recipes.plan.traffic import Transfer, transfers


@dataclass(frozen=True)
class Part:
    """A part of a step on the slowest stage. seconds: duration of the part. waits: the seconds that it adds to the
    step; for communication, those that do not overlap with compute. received: bytes that a rank receives."""

    name: str
    seconds: float
    waits: float
    received: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class StepTime:
    """The time of a step. parts: their `waits` add up to `seconds`. tokens: of all ranks. mfu: FLOPs of the model as a
    share of the FLOPs at peak. transfers: of a rank of the slowest stage."""

    seconds: float
    parts: tuple[Part, ...]
    tokens: int
    mfu: float
    transfers: tuple[Transfer, ...]

    @property
    def limit(self) -> str:
        """The name of the part, other than compute, that adds most to a step; "computing" if none adds a tenth."""
        waiting = max((part for part in self.parts if part.name not in _COMPUTING), key=lambda part: part.waits)
        return waiting.name if waiting.waits > 0.1 * self.seconds else "computing"


_COMPUTING = ("linear layers", "attention")
# Launches per trained tensor at the end of a step, for which the device waits. AdamW divides and skips on the device,
# so the host waits once, after the update; other optimizers are launched after the norm has been read.
LAUNCHES_OF_UPDATE = 1
LAUNCHES_OF_OTHERS = 3
# Attention of a document of n tokens reaches n / (n + SHORT) of the rate for long ones: on an H200 varlen reaches 172
# TFLOP/s for 1,024 tokens, 247 for 4,096 and 273 for 16,384 (docs/benchmarks/gpu.md).
SHORT = 640


@dataclass(frozen=True)
class _Work:
    """A stage's seconds, as (forward, backward), for one row of the cost RowFacts.dearest. linear, attention: compute.
    passes: over tensors of layers and head. copies: of FSDP2, in the compute stream. open: collectives that do not
    overlap. gathers: collectives that may overlap with compute. hosted: copies from and to the host, which may also
    overlap. launching: the host's time to launch kernels."""

    linear: tuple[float, float]
    attention: tuple[float, float]
    passes: tuple[float, float]
    copies: tuple[float, float]
    open: tuple[float, float]
    gathers: tuple[float, float]
    hosted: tuple[float, float]
    launching: tuple[float, float]

    def device(self, phase: int, share: float) -> float:
        """Seconds in which the accelerator computes a row with `share` times the cost."""
        scaled = self.linear[phase] + self.attention[phase] + self.passes[phase]
        return scaled * share + self.copies[phase]

    def seconds(self, share: float) -> tuple[float, float]:
        """(Forward, backward) seconds of a row with `share` times the cost."""
        phases = []
        for phase in (0, 1):
            hidden = max(self.gathers[phase], self.hosted[phase], self.launching[phase])
            phases.append(max(self.device(phase, share), hidden) + self.open[phase] * share)
        return phases[0], phases[1]


def time_of(
    model: Blueprint, mesh: MeshSizes, rows: RowFacts, machine: Machine, activations: Activations | None = None
) -> StepTime:
    """The time of a step of these rows. activations: None for the activations of the config."""
    chosen = Activations.from_config(model.config) if activations is None else activations
    holdings = shares_by_stage(model, mesh)
    moved = [
        transfers(model, mesh, stage_holdings, rows.load, recompute=chosen.recompute) for stage_holdings in holdings
    ]
    works = [
        _work(model, mesh, stage_holdings, rows, machine, transfers_of_stage, chosen)
        for stage_holdings, transfers_of_stage in zip(holdings, moved, strict=True)
    ]
    shares = rows.shares
    busy = [sum(sum(work.seconds(share)) for share in shares) for work in works]
    of_rows = _seconds_of_rows(model, mesh, works, busy, shares)
    slowest = max(range(len(works)), key=lambda stage: busy[stage])
    ends = [_end_of_step(transfers_of_stage, machine) for transfers_of_stage in moved]
    update = max(_update_seconds(model, stage_holdings, machine) for stage_holdings in holdings)
    launches = LAUNCHES_OF_UPDATE if model.config.optimizer.name == "adamw" else LAUNCHES_OF_OTHERS
    waiting = launches * machine.launch * max(map(_trained_tensors, holdings))
    total = of_rows + max(ends) + update + waiting
    parts = _parts(works[slowest], rows, moved[slowest], machine)
    if mesh.pp > 1:
        idle, bubble_share = of_rows - busy[slowest], 1.0 - sum(busy) / len(busy) / of_rows
        parts.append(Part("waiting for stages", idle, idle, note=f"bubble {bubble_share:.0%}"))
    location = "on the host: " if model.config.fsdp.cpu_offload else ""
    parts.append(Part("optimizer", update, update, note=f"{location}norm, clipping, reads and writes of the states"))
    parts.append(Part("end of the step", waiting, waiting, note="the device waits while the host launches the update"))
    mfu = rows.flops / (machine.peak * mesh.world * total)
    return StepTime(total, tuple(parts), rows.tokens, mfu, tuple(moved[slowest]))


def forward_seconds(model: Blueprint, mesh: MeshSizes, rows: RowFacts, machine: Machine) -> float:
    """Seconds of a forward of these rows without gradients."""
    works = [
        _work(
            model, mesh, stage_holdings, rows, machine,
            transfers(model, mesh, stage_holdings, rows.load, recompute=None), STORE_ALL,
        )
        for stage_holdings in shares_by_stage(model, mesh)
    ]  # fmt: skip
    busy = [sum(work.seconds(share)[0] for share in rows.shares) for work in works]
    return max(busy) + (sum(busy) - max(busy)) / len(rows.shares)  # a pipeline fills and drains once, with one row


def _work(
    model: Blueprint,
    mesh: MeshSizes,
    holdings: RankShare,
    rows: RowFacts,
    machine: Machine,
    moved: Sequence[Transfer],
    activations: Activations,
) -> _Work:
    linear, attention = _flops(model, mesh, holdings.coordinates.pp, rows, activations)
    per_row = 1.0 / rows.load.micro_batches
    seconds = defaultdict[tuple[str, bool], float](float)
    for transfer in moved:
        seconds[transfer.phase, transfer.hidden] += transfer.seconds(machine) * per_row
    passes, launching = _passes(model, mesh, holdings, rows, machine, activations)
    copies, hosted = _copies(model, mesh, holdings, rows, machine, activations)
    moved_out = _hosted_seconds(model, mesh, holdings, rows, machine, activations)
    return _Work(
        linear=(linear[0] / (machine.peak * machine.matmul), linear[1] / (machine.peak * machine.matmul)),
        attention=(
            attention[0] / (machine.peak * machine.attention),
            attention[1] / (machine.peak * machine.attention),
        ),
        passes=passes,
        copies=copies,
        open=(seconds["forward", False], seconds["backward", False]),
        gathers=(seconds["forward", True], seconds["backward", True]),
        hosted=(hosted[0] + moved_out, hosted[1] + moved_out),
        launching=launching,
    )


def _hosted_seconds(
    model: Blueprint, mesh: MeshSizes, holdings: RankShare, rows: RowFacts, machine: Machine, activations: Activations
) -> float:
    """Seconds in which activations of a row are copied to the host. Copying them back takes as long."""
    if activations.offload == "off":
        return 0.0
    tokens, layers = round(rows.load.tokens / rows.load.micro_batches), model.layers(mesh.pp, holdings.coordinates.pp)
    try:
        saved = model.saved(sharing(model, mesh, rows), tiled=activations.tile is not None, exchanged=mesh.ep > 1)
    except Exception:  # of any type: some families need values
        return 0.0
    size = saved.moved(tokens, activations, layers) + sum(kept_rows(model, mesh, tokens, layers, activations))
    return size / (machine.host * machine.moved)


def _passes(
    model: Blueprint,
    mesh: MeshSizes,
    holdings: RankShare,
    rows: RowFacts,
    machine: Machine,
    activations: Activations,
) -> tuple[tuple[float, float], tuple[float, float]]:
    """((forward, backward) seconds of passes over tensors of a row's layers and head, the same for launching all of its
    operations). A pipeline's last stage has the head."""
    load, passes = rows.load, model.passes(sharing(model, mesh, rows))
    tokens = load.tokens / load.micro_batches
    stage_passes = [passes[layer] for layer in model.layers(mesh.pp, holdings.coordinates.pp)]
    recomputed = 0.0 if activations.recompute is None else 1.0 / activations.recompute.every
    operations = sum(layer.forward.operations for layer in stage_passes)
    backward = sum(layer.backward.operations for layer in stage_passes) + recomputed * operations
    fused = machine.fused if model.config.model.compile is True else 1.0
    ahead, back = (
        sum(fused * (work.bytes - work.experts) + work.experts for work in direction)
        for direction in zip(*((layer.forward, layer.backward) for layer in stage_passes), strict=True)
    )
    of_layers = machine.operating(ahead * tokens), machine.operating((back + recomputed * ahead) * tokens)
    forward_bytes = backward_bytes = 0.0
    if holdings.coordinates.pp == last_place(model, mesh):
        # If gradients of the outputs are known, the head computes nearly all in forward; otherwise in backward.
        head_bytes = model.head_passes(mesh.tp) * load.predicted / load.micro_batches
        if model.samples:
            backward_bytes = head_bytes
        else:
            forward_bytes = head_bytes
    of_head = machine.passing(forward_bytes), machine.passing(backward_bytes)
    seconds = of_layers[0] + of_head[0], of_layers[1] + of_head[1]
    return seconds, (operations * machine.launch, backward * machine.launch)


def _copies(
    model: Blueprint,
    mesh: MeshSizes,
    holdings: RankShare,
    rows: RowFacts,
    machine: Machine,
    activations: Activations,
) -> tuple[tuple[float, float], tuple[float, float]]:
    """((forward, backward) seconds of FSDP2's copies for a row, (forward, backward) seconds of copies between host and
    accelerator that overlap with compute).

    Gathering: shards are cast, and received data is copied into parameters. A single shard is also cast and copied; one
    data rank does so once per step if memory allows. Reducing: gradients are concatenated and cast. A single shard's
    gradients are copied, and those of replicas also divided; gradients of further micro-batches are added. From a host,
    shards come in the masters' dtype, and gradients are sent back.
    """
    config, precision = model.config.fsdp, model.setup.precision
    compute, reduce, master = precision.compute.itemsize, precision.reduce.itemsize, precision.master.itemsize
    trains, further = model.setup.trained, rows.load.micro_batches > 1
    single_rank = mesh.dp_replicate * mesh.shards == 1
    working_copies = (
        single_rank and trains and memory_by_stage(model, mesh, rows, activations)[holdings.coordinates.pp].keeps
    )
    per_row = 1.0 / rows.load.micro_batches if working_copies else 1.0
    copied, waited, hidden = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]  # bytes; bytes from the host, with and without waiting
    for unit in holdings.units:
        freed = trains and not unit.keep and config.reshard_after_forward is not False and not working_copies
        phases = (0, 1) if freed else (0,)
        frozen = gathered_part(model, mesh, unit) - unit.trained
        for elements, stored in ((unit.trained, master), (frozen, precision.frozen.itemsize)):
            cast = 0.0 if stored == compute or config.cpu_offload == "optimizer" else (stored + compute) / unit.shards
            for phase in phases:
                copied[phase] += unit.count * elements * (cast + 2 * compute) * per_row
                if config.cpu_offload is True:
                    # A single shard is copied in the compute stream.
                    target = waited if unit.shards == 1 else hidden
                    target[phase] += unit.count * elements * stored / unit.shards
        if not trains:
            continue
        single = 0 if unit.shards > 1 else 2 * reduce if single_rank else 4 * reduce
        added = 3 * master / unit.shards if further else 0
        copied[1] += unit.count * unit.trained * (compute + reduce + single + added)
        if config.cpu_offload:
            sent = 1 / rows.load.micro_batches if config.reduce == "last" else 1
            hidden[1] += unit.count * unit.trained * reduce / unit.shards * sent
    rate = machine.host * machine.moved
    forward, backward = (machine.passing(copied[phase]) + waited[phase] / rate for phase in (0, 1))
    return (forward, backward), (hidden[0] / rate, hidden[1] / rate)


def _flops(
    model: Blueprint, mesh: MeshSizes, stage: int, rows: RowFacts, activations: Activations
) -> tuple[tuple[float, float], tuple[float, float]]:
    """((forward, backward) FLOPs of matmuls, the same of attention) of a rank of a stage, for a row of the cost
    RowFacts.dearest. Recomputed layers count again, in backward."""
    of_rank = rows.dearest / mesh.tp
    layer_costs, head = model.costs
    total, stage_layers = sum(layer_costs) + head, model.layers(mesh.pp, stage)
    last = stage == last_place(model, mesh)
    layers, of_head = sum(layer_costs[layer] for layer in stage_layers) / total, head * last / total
    frozen = model.built.flops.frozen
    ahead = 1 / 2 if frozen else 1 / 3
    linear = of_rank * rows.linear
    attending = of_rank * (1 - rows.linear)
    attending += model_flops(model.built.flops)[1] * SHORT * rows.load.tokens / rows.load.micro_batches / mesh.tp
    attending *= len(stage_layers) / len(layer_costs)
    trained = linear * (layers + of_head)
    forward, backward = trained * ahead, trained * (1 - ahead)
    recompute = activations.recompute
    repeated = 0.0 if recompute is None else recompute.repeated("matmuls")
    if activations.tile is not None:  # tiles are recomputed, even if their layer is not
        repeated += model.mlp_share * (1.0 - repeated)
    backward += linear * layers * ahead * repeated
    if last and (mesh.tp > 1 or model.samples):  # logits are computed twice
        backward += linear * of_head * ahead
    attended = 2.0 + (0.0 if recompute is None else recompute.repeated("attention"))
    return (forward, backward), (attending / 3, attending * attended / 3)


def _seconds_of_rows(
    model: Blueprint, mesh: MeshSizes, works: Sequence[_Work], busy: Sequence[float], shares: Sequence[float]
) -> float:
    """Seconds of all forwards and backwards of a step, including waits between stages. busy: each stage's seconds
    without waits."""
    staged = model.stages(mesh.pp)
    if staged is None:
        return busy[0]
    stages, schedule = staged[0], model.config.mesh.pp_schedule
    placement, delayed = stages.placement, schedule in DELAYED
    run, repeated_seconds = list(shares), 0.0
    if schedule != "GPipe" and len(run) > 8 * placement.stages and max(run) - min(run) < 1e-6:
        # Once a pipeline of equal rows is full, each further row adds its time on the slowest rank.
        del run[8 * placement.stages :]
        repeated_seconds = max(busy) * (1.0 - len(run) / len(shares))
    orders = [order(schedule, placement, pp_rank, len(run)) for pp_rank in range(mesh.pp)]
    costs = [[work.seconds(share) for share in run] for work in works]
    of_rank = [sum(stages.costs[stage] for stage in placement.stages_of(pp_rank)) for pp_rank in range(mesh.pp)]

    def cost(stage: int, action: Action) -> float:
        pp_rank = placement.rank_of(stage)
        forward, backward = costs[pp_rank][action.micro]
        seconds = forward if action.kind == "forward" else backward / 2 if delayed else backward
        return seconds * stages.costs[stage] / of_rank[pp_rank]

    busy_here = sum(busy) * len(run) / len(shares)
    return busy_here / len(busy) / (1.0 - bubble(orders, placement, cost)) + repeated_seconds


def _end_of_step(moved: Sequence[Transfer], machine: Machine) -> float:
    """Seconds of the collectives at the end of a step: sums over replicas, over tp and between stages."""
    return sum(transfer.seconds(machine) for transfer in moved if transfer.phase == "step")


def _update_seconds(model: Blueprint, holdings: RankShare, machine: Machine) -> float:
    """Seconds of norm, clipping and update. Gradients are read for the norm, read and written by clipping, and read by
    the optimizer, which reads and writes masters and states. An average is also read and written. AdamW clips during
    its update, and writes gradients back."""
    masters = holdings.gradients  # of the same number and dtype
    of_gradients = 3 if model.config.optimizer.name == "adamw" else 4
    moved = 2 * (masters + holdings.optimizer) + of_gradients * holdings.gradients
    if holdings.average:
        moved += 2 * holdings.average + masters
    if not model.config.fsdp.cpu_offload:
        return machine.passing(moved)
    seconds = moved / machine.host_memory
    if model.config.fsdp.cpu_offload == "optimizer":  # new weights are copied while other weights are updated
        trained = sum(unit.trained * unit.count / unit.shards for unit in holdings.units)
        seconds = max(seconds, trained * model.setup.precision.compute.itemsize / (machine.host * machine.moved))
    return seconds


def _trained_tensors(holdings: RankShare) -> int:
    return sum(unit.count * unit.tensors for unit in holdings.units)


def _parts(work: _Work, rows: RowFacts, moved: Sequence[Transfer], machine: Machine) -> list[Part]:
    """The parts of the slowest stage's time: compute, and each kind of collective, with the seconds that do not overlap
    with compute."""
    total = sum(rows.shares)
    linear, attention, passes = (sum(phases) * total for phases in (work.linear, work.attention, work.passes))
    copies = sum(work.copies) * len(rows.shares)
    even = rows.utilisation
    uneven = (linear + attention + passes) * (1 - even)
    parts = [
        Part("linear layers", linear * even, linear * even),
        Part("attention", attention * even, attention * even),
        Part("elementwise", passes * even, passes * even, note="norms, rotary embeddings, activations, logits"),
        Part("copies of weights", copies, copies, note="FSDP2's casts of weights, and copies of gradients"),
        Part("uneven rows", uneven, uneven, note=f"utilisation {even:.0%}"),
    ]
    visible = hosted = launched = 0.0
    for share in rows.shares:
        for phase in (0, 1):
            computing = work.device(phase, share)
            gathered = max(computing, work.gathers[phase])
            copied = max(gathered, work.hosted[phase])
            visible, hosted = visible + gathered - computing, hosted + copied - gathered
            launched += max(0.0, work.launching[phase] - copied)
    count = len(rows.shares)
    parts.append(Part("copies from and to the host", sum(work.hosted) * count, hosted, note="overlap with compute"))
    parts.append(
        Part("kernel launches", sum(work.launching) * count, launched, note="by the host, while the device computes"),
    )
    hidden = sum(transfer.seconds(machine) for transfer in moved if transfer.hidden)
    for (name, overlaps), group in _by_name(moved):
        seconds = sum(transfer.seconds(machine) for transfer in group)
        received = sum(transfer.received for transfer in group)
        waits = visible * seconds / hidden if overlaps and hidden else seconds
        parts.append(Part(name, seconds, waits, received, "overlaps with compute" if overlaps else ""))
    return [part for part in parts if part.seconds > 0]


def _by_name(moved: Sequence[Transfer]) -> list[tuple[tuple[str, bool], list[Transfer]]]:
    """The transfers by (axis and kind, whether they overlap with compute)."""

    def key(transfer: Transfer) -> tuple[str, bool]:
        return f"{transfer.axis}: {transfer.kind}", transfer.hidden

    return [(name, list(group)) for name, group in groupby(sorted(moved, key=key), key)]
