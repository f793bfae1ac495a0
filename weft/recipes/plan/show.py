"""The output of `weft plan`: memory, time and collectives of one mesh, or the meshes that the search found."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from weft.config.mesh import MeshSizes
from weft.engine.step_plan.plan import StepPlan
from weft.observe.tables import EngineRow, engine_table, new_table, show
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.machines import Machine
from weft.recipes.plan.memory import Memory
from weft.recipes.plan.rows import StepLengths
from weft.recipes.plan.search import Proposal, SearchResult
from weft.recipes.plan.timing import StepTime
from weft.recipes.plan.traffic import Transfer
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


def show_described(estimate: PlanEstimate) -> None:
    """Prints memory, time and collectives of a mesh."""
    fullest = max(estimate.memory, key=lambda memory: memory.fullest)
    _show_heading(estimate.model, estimate.mesh.world, estimate.lengths, estimate.machine)
    say(f"mesh     {written(estimate.mesh)}{_ulysses(estimate)}")
    say(f"step     {_step(estimate.plan)}")
    _show_memory(estimate, fullest)
    if len(estimate.memory) > 1:
        _show_stages(estimate)
    _show_time(estimate.time)
    _show_transfers(estimate.time.transfers)


def written(mesh: MeshSizes) -> str:
    """The mesh as overrides of a config: `mesh.dp_shard=8 mesh.tp=2`."""
    return " ".join(f"mesh.{axis}={size}" for axis, size in mesh.named.items())


def _show_heading(model: Blueprint, ranks: int, lengths: StepLengths, machine: Machine) -> None:
    elements = sum(math.prod(weight.shape) for weight in model.weights)
    say(f"model    {model.built.path}: {elements:,} parameters; {ranks:,} ranks")
    for number, line in enumerate(machine.lines()):
        say(f"{'' if number else 'assumed':<8} {line}")
    say(f"lengths  {len(lengths.tokens):,} documents a step, {lengths.origin}")


def _ulysses(estimate: PlanEstimate) -> str:
    ulysses = estimate.model.ulysses(estimate.mesh.cp, estimate.mesh.tp)
    return "" if ulysses is None else f" mesh.ulysses={ulysses}"


def _step(plan: StepPlan) -> str:
    cut = sum(document.read > plan.budget for document in plan.documents)
    text = f"{counted(plan.micro_batches, 'micro-batch')} on {counted(plan.ranks, 'rank')} with other "
    text += f"documents; fill {plan.fill:.0%}, utilisation {plan.utilisation:.0%}"
    return text + (f"; {cut} documents are cut over ranks of cp" if plan.pieces else "")


def _show_memory(estimate: PlanEstimate, memory: Memory) -> None:
    holdings, machine = memory.share, estimate.machine
    stage = f", place {holdings.coordinates.pp + 1} of mesh.pp" if estimate.mesh.pp > 1 else ""
    table = new_table(f"memory of the fullest rank{stage}", "what", ">bytes", "")
    resident_rows: list[tuple[str, int, str]] = [
        ("weights", holdings.weights, "masters, and what is frozen"),
        ("gradients", holdings.gradients, ""),
        ("optimizer", holdings.optimizer, ""),
        ("average", holdings.average, "of the weights"),
    ]
    rows = [
        *([] if memory.offloaded else resident_rows),
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
    room = estimate.machine.accelerator.memory
    share = f"{memory.fullest / room:.0%} of {byte_count(room)} ({machine.accelerator.name})"
    table.add_row("at the fullest", byte_count(memory.fullest), share)
    show(table)
    if memory.fullest > room * machine.usable:
        say(f"warning  it does not fit: {1 - machine.usable:.0%} of the memory is for the context and fragments\n")
    if memory.offloaded:
        on_host = ", ".join(f"{name} {byte_count(size)}" for name, size, _ in resident_rows if size)
        say(f"host     {byte_count(holdings.resident)} a rank, by fsdp.cpu_offload: {on_host}")
    say(
        f"host     {byte_count(memory.host)} a rank for what is being saved. Not counted: temporary tensors of a layer,"
    )
    images = ", images" if estimate.model.built.vision is not None else ""
    say(f"         what libraries allocate, engines that generate{images}\n")


def _show_stages(estimate: PlanEstimate) -> None:
    table = new_table("ranks of mesh.pp", ">place", "layers", ">resident", ">activations", ">fullest")
    for stage, memory in enumerate(estimate.memory):
        activations = memory.rows + memory.in_flight
        sizes = (memory.resident, activations, memory.fullest)
        table.add_row(str(stage + 1), _layers(estimate, stage), *(byte_count(size) for size in sizes))
    show(table)


def _layers(estimate: PlanEstimate, rank: int) -> str:
    stages = estimate.model.stages(estimate.mesh.pp)
    assert stages is not None
    spans = (stages[0].spans[stage] for stage in stages[0].placement.stages_of(rank))
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

    def key(transfer: Transfer) -> tuple[str, str, str, int, float]:
        return transfer.name, transfer.kind, transfer.axis, transfer.size, transfer.payload

    rows = []
    for (purpose, kind, axis, size, payload), group in groupby(sorted(transfers, key=key), key):
        same_transfers = list(group)
        calls, received = sum(item.calls for item in same_transfers), sum(item.received for item in same_transfers)
        rows.append((received, (purpose, kind, f"{axis} {size}", f"{calls:,.0f}", byte_count(round(payload)))))
    for received, texts in sorted(rows, key=lambda row: -row[0]):
        table.add_row(*texts, byte_count(round(received)))
    show(table)


def show_engines(rows: Sequence[EngineRow]) -> None:
    """Prints the memory of further engines, such as reference and critic, if there are any."""
    if rows:
        show(engine_table(rows))


def show_search(
    model: Blueprint, result: SearchResult, ranks: int, lengths: StepLengths, machine: Machine, extra_override: str = ""
) -> None:
    """Prints the best meshes, what limits each, and why other meshes were refused. extra_override: a further override
    that runs of these lengths need."""
    _show_heading(model, ranks, lengths, machine)
    say(
        f"tried    {result.tried:,} of {result.meshes:,} meshes, those first that could be the fastest; "
        f"{result.too_large:,} need too much memory"
    )
    for reason, count in _refused(result)[:_MOST_REFUSED]:
        say(f"refused  {count:,} meshes: {reason}")
    if not result.best:
        say(_none_fits(result))
        return
    table = new_table("the best meshes, estimated", "", "mesh", ">memory", ">step s", ">tokens/s", ">MFU", "limit")
    for number, proposal in enumerate(result.best, 1):
        time = proposal.time
        figures = (f"{time.seconds:.3g}", f"{time.tokens / time.seconds:,.0f}", f"{time.mfu:.0%}")
        table.add_row(str(number), _axes(proposal), byte_count(proposal.memory.fullest), *figures, proposal.limit)
    show(table)
    unknown = next((proposal.memory.unknown for proposal in result.best if proposal.memory.unknown), "")
    if unknown:
        say(f"warning  without activations, which are not known of this model ({unknown}): it takes more memory")
    say(f"take     {' '.join(filter(None, (_overrides(result.best[0]), extra_override)))}")


def _refused(result: SearchResult) -> list[tuple[str, int]]:
    """(reason, number of meshes), most meshes first. Reasons that differ only in numbers are merged into the first."""
    by_pattern: dict[str, tuple[str, int]] = {}
    for reason, count in result.refused.items():
        pattern = re.sub(r"\d+", "N", reason)
        first, before = by_pattern.get(pattern, (reason, 0))
        by_pattern[pattern] = first, before + count
    return sorted(by_pattern.values(), key=lambda pair: -pair[1])


def _axes(proposal: Proposal) -> str:
    text = " ".join(f"{axis} {size}" for axis, size in proposal.mesh.named.items() if size > 1) or "one rank"
    return f"{text}{', recompute' * proposal.recompute}"


def _overrides(proposal: Proposal) -> str:
    recompute = "full" if proposal.recompute else "none"
    return f"{written(proposal.mesh)} step.max_tokens_per_device={proposal.budget} model.recompute={recompute}"


def _none_fits(result: SearchResult) -> str:
    if result.nearest is None:
        return "none     every mesh is refused"
    mesh, memory = result.nearest
    return (
        f"none     fits: {written(mesh)} needs the least, {byte_count(memory.fullest)} a rank. What helps: more ranks, "
        "a smaller step.max_tokens_per_device, optimizer.state_dtype=bf16, lora.rank=16"
    )
