"""The output of `weft plan`: memory, time and collectives of one mesh, or the meshes that the search found."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from weft.config.mesh import MeshSizes
from weft.engine.plan import StepPlan
from weft.planner.blueprint import Blueprint
from weft.planner.machines import Machine
from weft.planner.memory import Memory
from weft.planner.rows import StepLengths
from weft.planner.search import Found, Proposal
from weft.planner.timing import StepTime
from weft.planner.traffic import Transfer
from weft.report.tables import EngineRow, engine_table, new_table, show
from weft.terminal import byte_count, counted, say

_MOST_REFUSED = 6


@dataclass(frozen=True)
class PlanEstimate:
    """The estimates for one mesh. memory: of the fullest rank at each place of mesh.pp."""

    model: Blueprint
    mesh: MeshSizes
    machine: Machine
    lengths: StepLengths
    plan: StepPlan
    memory: Sequence[Memory]
    time: StepTime


def show_described(found: PlanEstimate) -> None:
    """Prints memory, time and collectives of a mesh."""
    fullest = max(found.memory, key=lambda memory: memory.fullest)
    _show_heading(found.model, found.mesh.world, found.lengths, found.machine)
    say(f"mesh     {written(found.mesh)}{_ulysses(found)}")
    say(f"step     {_step(found.plan)}")
    _show_memory(found, fullest)
    if len(found.memory) > 1:
        _show_stages(found)
    _show_time(found.time)
    _show_transfers(found.time.transfers)


def written(mesh: MeshSizes) -> str:
    """The mesh as overrides of a config: `mesh.dp_shard=8 mesh.tp=2`."""
    return " ".join(f"mesh.{axis}={size}" for axis, size in mesh.named.items())


def _show_heading(model: Blueprint, ranks: int, lengths: StepLengths, machine: Machine) -> None:
    elements = sum(math.prod(weight.shape) for weight in model.weights)
    say(f"model    {model.built.path}: {elements:,} parameters; {ranks:,} ranks")
    for number, line in enumerate(machine.lines()):
        say(f"{'' if number else 'assumed':<8} {line}")
    say(f"lengths  {len(lengths.of):,} documents a step, {lengths.said}")


def _ulysses(found: PlanEstimate) -> str:
    ulysses = found.model.ulysses(found.mesh.cp, found.mesh.tp)
    return "" if ulysses is None else f" mesh.ulysses={ulysses}"


def _step(plan: StepPlan) -> str:
    cut = sum(document.read > plan.budget for document in plan.documents)
    text = f"{counted(plan.micro_batches, 'micro-batch')} on {counted(plan.ranks, 'rank')} with other "
    text += f"documents; fill {plan.fill:.0%}, utilisation {plan.utilisation:.0%}"
    return text + (f"; {cut} documents are cut over ranks of cp" if plan.pieces else "")


def _show_memory(found: PlanEstimate, memory: Memory) -> None:
    held, machine = memory.held, found.machine
    place = f", place {held.place.pp + 1} of mesh.pp" if found.mesh.pp > 1 else ""
    table = new_table(f"memory of the fullest rank{place}", "what", ">bytes", "")
    kept: list[tuple[str, int, str]] = [
        ("weights", held.weights, "masters, and what is frozen"),
        ("gradients", held.gradients, ""),
        ("optimizer", held.optimizer, ""),
        ("average", held.average, "of the weights"),
    ]
    rows = [
        *([] if memory.offloaded else kept),
        ("units from the host", memory.staged, "shards, as they are stored"),
        ("gathered units", memory.gathered, "in the compute dtype"),
        ("kept copies", memory.copies, "of parameters in the compute dtype, for a whole step"),
        ("activations", memory.rows, memory.unknown or "what the longest row keeps for backward"),
        ("in flight", memory.in_flight, "what further rows of the pipeline keep"),
        ("gradients of a unit", memory.unreduced, "before they are sent"),
        ("sent gradients", memory.lingering, "of the last unit, until the next row's backward; beside the head"),
        ("reduced gradients", memory.reduced, "of replicated units, which torch keeps until the end of backward"),
        ("rows of experts", memory.experts, "sent and received, where routers choose evenly"),
        ("head", memory.head, "tiles of logits, and its gradients; in turn with gradients of units"),
    ]
    for name, size, note in rows:
        if size or note == memory.unknown != "":
            table.add_row(name, byte_count(size) if size else "not known", note)
    table.add_section()
    room = found.machine.accelerator.memory
    share = f"{memory.fullest / room:.0%} of {byte_count(room)} ({machine.accelerator.name})"
    table.add_row("at the fullest", byte_count(memory.fullest), share)
    show(table)
    if memory.fullest > room * machine.usable:
        say(f"warning  it does not fit: {1 - machine.usable:.0%} of the memory is for the context and fragments\n")
    if memory.offloaded:
        there = ", ".join(f"{name} {byte_count(size)}" for name, size, _ in kept if size)
        say(f"host     {byte_count(held.resident)} a rank, by fsdp.cpu_offload: {there}")
    say(
        f"host     {byte_count(memory.host)} a rank for what is being saved. Not counted: temporary tensors of a layer,"
    )
    images = ", images" if found.model.built.vision is not None else ""
    say(f"         what libraries allocate, engines that generate{images}\n")


def _show_stages(found: PlanEstimate) -> None:
    table = new_table("ranks of mesh.pp", ">place", "layers", ">resident", ">activations", ">fullest")
    for place, memory in enumerate(found.memory):
        kept = memory.rows + memory.in_flight
        sizes = (memory.resident, kept, memory.fullest)
        table.add_row(str(place + 1), _layers(found, place), *(byte_count(size) for size in sizes))
    show(table)


def _layers(found: PlanEstimate, place: int) -> str:
    stages = found.model.stages(found.mesh.pp)
    assert stages is not None
    spans = (stages[0].spans[stage] for stage in stages[0].placement.stages_of(place))
    return ", ".join(f"{first} to {end - 1}" for first, end in spans)


def _show_time(time: StepTime) -> None:
    table = new_table("time of a step, estimated", "part", ">seconds", ">adds", ">received", "")
    for part in time.parts:
        received = byte_count(round(part.received)) if part.received else ""
        table.add_row(part.name, f"{part.seconds:.3g}", f"{part.waits:.3g}", received, part.note)
    table.add_section()
    rate = f"{time.tokens / time.seconds:,.0f} tokens/s, MFU {time.mfu:.0%}"
    table.add_row("step", "", f"{time.seconds:.3g}", "", f"{rate}; most of the rest: {time.limit}")
    show(table)


def _show_transfers(transfers: Sequence[Transfer]) -> None:
    """Prints the transfers of a step, the largest first; equal transfers of several layers are one row."""
    table = new_table("collectives of a rank in a step", "what", "kind", "group", ">calls", ">bytes each", ">received")

    def key(one: Transfer) -> tuple[str, str, str, int, float]:
        return one.what, one.kind, one.axis, one.size, one.payload

    rows = []
    for (what, kind, axis, size, payload), alike in groupby(sorted(transfers, key=key), key):
        several = list(alike)
        calls, received = sum(one.calls for one in several), sum(one.received for one in several)
        rows.append((received, (what, kind, f"{axis} {size}", f"{calls:,.0f}", byte_count(round(payload)))))
    for received, texts in sorted(rows, key=lambda row: -row[0]):
        table.add_row(*texts, byte_count(round(received)))
    show(table)


def show_engines(rows: Sequence[EngineRow]) -> None:
    """Prints the memory of further engines, such as reference and critic, if there are any."""
    if rows:
        show(engine_table(rows))


def show_search(
    model: Blueprint, found: Found, ranks: int, lengths: StepLengths, machine: Machine, more: str = ""
) -> None:
    """Prints the best meshes, what limits each, and why other meshes were refused. more: a further override that runs
    of these lengths need."""
    _show_heading(model, ranks, lengths, machine)
    say(
        f"tried    {found.tried:,} of {found.meshes:,} meshes, those first that could be the fastest; "
        f"{found.too_large:,} need too much memory"
    )
    for reason, several in _refused(found)[:_MOST_REFUSED]:
        say(f"refused  {several:,} meshes: {reason}")
    if not found.best:
        say(_none_fits(found))
        return
    table = new_table("the best meshes, estimated", "", "mesh", ">memory", ">step s", ">tokens/s", ">MFU", "limit")
    for number, one in enumerate(found.best, 1):
        time = one.time
        figures = (f"{time.seconds:.3g}", f"{time.tokens / time.seconds:,.0f}", f"{time.mfu:.0%}")
        table.add_row(str(number), _axes(one), byte_count(one.memory.fullest), *figures, one.limit)
    show(table)
    unknown = next((one.memory.unknown for one in found.best if one.memory.unknown), "")
    if unknown:
        say(f"warning  without activations, which are not known of this model ({unknown}): it takes more memory")
    say(f"take     {' '.join(filter(None, (_overrides(found.best[0]), more)))}")


def _refused(found: Found) -> list[tuple[str, int]]:
    """(reason, number of meshes), most meshes first. Reasons that differ only in numbers are merged into the first."""
    alike: dict[str, tuple[str, int]] = {}
    for reason, several in found.refused.items():
        kind = re.sub(r"\d+", "N", reason)
        first, before = alike.get(kind, (reason, 0))
        alike[kind] = first, before + several
    return sorted(alike.values(), key=lambda pair: -pair[1])


def _axes(one: Proposal) -> str:
    text = " ".join(f"{axis} {size}" for axis, size in one.mesh.named.items() if size > 1) or "one rank"
    return f"{text}{', recompute' * one.recompute}"


def _overrides(one: Proposal) -> str:
    again = "full" if one.recompute else "none"
    return f"{written(one.mesh)} step.max_tokens_per_device={one.budget} model.recompute={again}"


def _none_fits(found: Found) -> str:
    if found.nearest is None:
        return "none     every mesh is refused"
    mesh, memory = found.nearest
    return (
        f"none     fits: {written(mesh)} needs the least, {byte_count(memory.fullest)} a rank. What helps: more ranks, "
        "a smaller step.max_tokens_per_device, optimizer.state_dtype=bf16, lora.rank=16"
    )
