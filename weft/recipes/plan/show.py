"""The output of `weft plan`: memory, time and collectives of a mesh, estimated or simulated, or the best meshes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from weft.config.mesh import MeshSizes
from weft.engine.step_plan.plan import StepPlan
from weft.observe.tables import EngineRow, engine_table, new_table, show
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.choices import NOTHING_SAVED
from weft.recipes.plan.machines import Machine
from weft.recipes.plan.memory import Memory
from weft.recipes.plan.rows import StepLengths
from weft.recipes.plan.search import SearchResult
from weft.recipes.plan.simulate import Simulated
from weft.recipes.plan.timing import StepTime
from weft.recipes.plan.traffic import Transfer
from weft.terminal import byte_count, counted, say

_MAX_REASONS = 6  # for which meshes were refused
# Memory outside of a simulation: contexts of CUDA and NCCL in bytes, and fragments of the allocator's blocks, as a
# share of the allocated memory.
_CONTEXT = 1 << 30
_FRAGMENTS = 0.025
_NOTES = {
    "weights": "master weights, frozen weights and buffers",
    "optimizer": "with the average of the weights, if there is one",
    "frozen": "weights and heads of frozen models",
    "activations": "stored for backward, for all rows in flight",
    "head": "allocated by the head in a forward: logits, and gradients that the head computes in advance",
    "gathered": "complete parameters of units, and their receive buffers",
    "unreduced": "gradients of complete units, and their send buffers",
    "temporary": "all other tensors",
}


def show_estimate(
    model: Blueprint,
    mesh: MeshSizes,
    machine: Machine,
    lengths: StepLengths,
    plan: StepPlan,
    memories: Sequence[Memory],
    time: StepTime,
) -> None:
    """Prints the memory, time and collectives of a mesh. memories: of the fullest rank of each pipeline stage."""
    _show_heading(model, mesh.world, lengths, machine)
    ulysses = model.ulysses(mesh.cp, mesh.tp)
    say(f"mesh     {mesh_overrides(mesh)}" + (f" mesh.ulysses={ulysses}" if ulysses is not None else ""))
    cut = sum(document.read > plan.budget for document in plan.documents)
    say(
        f"step     {counted(plan.micro_batches, 'micro-batch')} on {counted(plan.ranks, 'rank')} with different "
        f"documents; fill {plan.fill:.0%}, utilisation {plan.utilisation:.0%}"
        + (f"; {cut} documents are split over ranks of cp" if plan.pieces else "")
    )
    read = sum(document.read for document in plan.documents)
    share = 1 - plan.tokens_forwarded / read
    if share >= 0.005:
        say(f"shared   {share:.0%} of the documents' tokens are not forwarded again: answers begin with their prompt")
    fullest = max(memories, key=lambda memory: memory.fullest)
    _show_memory(fullest, machine, stages=mesh.pp, vision=model.built.vision is not None)
    if len(memories) > 1:
        stages, rows = model.stages(mesh.pp), []
        assert stages is not None
        for rank, memory in enumerate(memories):
            spans = (stages[0].spans[stage] for stage in stages[0].placement.stages_of(rank))
            layers = ", ".join(f"{first} to {end - 1}" for first, end in spans)
            sizes = (memory.resident, memory.rows + memory.in_flight, memory.fullest)
            rows.append((str(rank), layers, *map(byte_count, sizes)))
        show(new_table("ranks of mesh.pp", ">rank", "layers", ">permanent", ">activations", ">peak", rows=rows))
    parts = [
        (p.name, f"{p.seconds:.3g}", f"{p.waits:.3g}", byte_count(round(p.received)) if p.received else "", p.note)
        for p in time.parts
    ]
    rate = f"{time.tokens / time.seconds:,.0f} tokens/s, MFU {time.mfu:.0%}; largest other part: {time.limit}"
    total = ("step", "", f"{time.seconds:.3g}", "", rate)
    columns = ("part", ">seconds", ">adds", ">received", "")
    show(new_table("time of a step, estimated", *columns, rows=parts, total=total))
    _show_transfers(time.transfers)


def mesh_overrides(mesh: MeshSizes) -> str:
    """The mesh as overrides of a config: `mesh.dp_shard=8 mesh.tp=2`."""
    return " ".join(f"mesh.{axis}={size}" for axis, size in mesh.named.items())


def _show_heading(model: Blueprint, ranks: int, lengths: StepLengths, machine: Machine) -> None:
    elements = sum(math.prod(weight.shape) for weight in model.weights)
    say(f"model    {model.built.path}: {elements:,} parameters; {ranks:,} ranks")
    for number, line in enumerate(machine.lines()):
        say(f"{'' if number else 'assumed':<8} {line}")
    say(f"lengths  {len(lengths.tokens):,} documents per step, {lengths.origin}")


def _show_memory(memory: Memory, machine: Machine, *, stages: int, vision: bool) -> None:
    """Prints the memory of a rank. stages: size of mesh.pp. vision: whether the model accepts images."""
    holdings = memory.share
    stage = f", rank {holdings.coordinates.pp} of mesh.pp" if stages > 1 else ""
    table = new_table(f"memory of the fullest rank{stage}", "what", ">bytes", "")
    resident_rows: list[tuple[str, int, str]] = [
        ("weights", holdings.weights, "master weights and frozen weights"),
        ("gradients", holdings.gradients, ""),
        ("optimizer", holdings.optimizer, ""),
        ("average", holdings.average, "of the weights"),
    ]
    rows = [
        *([] if memory.offloaded else resident_rows),
        ("weights", memory.on_device, "in the compute dtype; master weights are on the host"),
        ("units from the host", memory.staged, "shards in the stored dtype"),
        ("gathered units", memory.gathered, "in the compute dtype"),
        ("kept copies", memory.copies, "of parameters in the compute dtype, for a complete step"),
        ("activations", memory.rows, memory.unknown or "stored by the longest row for backward"),
        ("in flight", memory.in_flight, "activations of further rows in the pipeline"),
        ("gradients of a unit", memory.unreduced, "before the reduction"),
        ("sent gradients", memory.lingering, "of the last unit, until the next row's backward; together with the head"),
        ("reduced gradients", memory.reduced, "of replicated units, which torch keeps until the end of backward"),
        ("rows of experts", memory.experts, "sent and received, if routers choose evenly"),
        ("head", memory.head, "tiles of logits, and their gradients; not together with gradients of units"),
    ]
    for name, size, note in rows:
        if size or note == memory.unknown != "":
            table.add_row(name, byte_count(size) if size else "not known", note)
    table.add_section()
    room = machine.accelerator.memory
    share = f"{memory.fullest / room:.0%} of {byte_count(room)} ({machine.accelerator.name})"
    table.add_row("peak", byte_count(memory.fullest), share)
    show(table)
    if memory.fullest > room * machine.usable:
        reserved = f"{1 - machine.usable:.0%} of the memory is reserved for the device context and fragmentation"
        say(f"warning  it does not fit: {reserved}\n")
    if memory.offloaded:
        on_host = ", ".join(f"{name} {byte_count(size)}" for name, size, _ in resident_rows if size)
        say(f"host     {byte_count(holdings.resident)} per rank, by fsdp.cpu_offload: {on_host}")
    if memory.hosted:
        say(f"host     {byte_count(memory.hosted)} per rank for activations (model.offload_activations)")
    say(
        f"host     {byte_count(memory.host)} per rank for checkpoint copies. Not counted: temporary tensors of a layer,"
    )
    images = ", images" if vision else ""
    say(f"         memory of libraries, engines that generate{images}\n")


def _show_transfers(transfers: Sequence[Transfer]) -> None:
    """Prints the transfers of a step, the largest first. Equal transfers of several layers are one row."""

    def key(transfer: Transfer) -> tuple[str, str, str, int, float]:
        return transfer.name, transfer.kind, transfer.axis, transfer.size, transfer.payload

    rows = []
    for (purpose, kind, axis, size, payload), group in groupby(sorted(transfers, key=key), key):
        same_transfers = list(group)
        calls, received = sum(item.calls for item in same_transfers), sum(item.received for item in same_transfers)
        rows.append((received, (purpose, kind, f"{axis} {size}", f"{calls:,.0f}", byte_count(round(payload)))))
    cells = [(*texts, byte_count(round(received))) for received, texts in sorted(rows, key=lambda row: -row[0])]
    columns = ("what", "kind", "group", ">calls", ">bytes each", ">received")
    show(new_table("collectives of a rank in a step", *columns, rows=cells))


def show_engines(rows: Sequence[EngineRow], trained: Memory, machine: Machine) -> None:
    """Prints the memory of further engines, such as reference and critic, if there are any, and whether they fit
    together with the trained model. trained: of its fullest rank."""
    if not rows:
        return
    show(engine_table(rows))
    total, room = trained.fullest + sum(row.resident for row in rows), machine.accelerator.memory
    say(f"together {byte_count(total)}, with the trained model's peak: {total / room:.0%} of {byte_count(room)}")
    if total > room * machine.usable >= trained.fullest:
        say("warning  the models do not fit together: use more ranks, or cpu_offload of frozen models")


def show_search(
    model: Blueprint,
    result: SearchResult,
    ranks: int,
    lengths: StepLengths,
    machine: Machine,
    config: Any,
    extra_override: str = "",
) -> None:
    """Prints the best meshes, their limits, and why other meshes were refused. config: of the command.
    extra_override: a further override that runs of these lengths need."""
    _show_heading(model, ranks, lengths, machine)
    say(
        f"tried    {result.tried:,} of {result.meshes:,} meshes, ordered by a lower bound on their time; "
        f"{result.too_large:,} need too much memory"
    )
    by_pattern: dict[str, tuple[str, int]] = {}  # reasons that differ only in numbers are merged into the first
    for reason, count in result.refused.items():
        pattern = re.sub(r"\d+", "N", reason)
        first, before = by_pattern.get(pattern, (reason, 0))
        by_pattern[pattern] = first, before + count
    for reason, count in sorted(by_pattern.values(), key=lambda pair: -pair[1])[:_MAX_REASONS]:
        say(f"refused  {count:,} meshes: {reason}")
    if not result.best:
        if result.nearest is None:
            say("none     weft refuses every mesh")
            return
        mesh, least = result.nearest
        say(
            f"none     fits: {mesh_overrides(mesh)} needs the least, {byte_count(least)} per rank. Use more "
            "ranks, a smaller step.max_tokens_per_device, optimizer.state_dtype=int8 or lora.rank=16"
        )
        return
    table = new_table("the best meshes, estimated", "", "mesh", ">memory", ">step s", ">tokens/s", ">MFU", "limited by")
    for number, proposal in enumerate(result.best, 1):
        time = proposal.time
        figures = (f"{time.seconds:.3g}", f"{time.tokens / time.seconds:,.0f}", f"{time.mfu:.0%}")
        axes = " ".join(f"{axis} {size}" for axis, size in proposal.mesh.named.items() if size > 1) or "one rank"
        axes = ", ".join([axes, *(words.strip("'") for words in proposal.choice.changes(NOTHING_SAVED))])
        axes += " (not exact)" if proposal.lossy else ""
        table.add_row(str(number), axes, byte_count(proposal.fullest), *figures, proposal.limit)
    show(table)
    unknown = next((proposal.memory.unknown for proposal in result.best if proposal.memory.unknown), "")
    if unknown:
        say(f"warning  activations are not included, because weft cannot estimate them for this model ({unknown})")
    best = result.best[0]
    settings = best.choice.overrides(replace(config, step=replace(config.step, max_tokens_per_device=best.budget)))
    overrides = [mesh_overrides(best.mesh), f"step.max_tokens_per_device={best.budget}", *settings]
    say(f"use      {' '.join(filter(None, (*overrides, extra_override)))}")


# ---------------------------------------------------------------- a simulated rank


def show_simulated(simulated: Simulated, estimated: Memory, room: int, frozen_bytes: int = 0) -> None:
    """Prints the simulation of one rank. estimated: the estimated memory of the fullest rank of its stage, for
    comparison. room: memory of the accelerator in bytes. frozen_bytes: estimated bytes of frozen models."""
    ran = f"{simulated.micro_batches} of {simulated.all_micro_batches} micro-batches, those with the longest rows"
    if simulated.micro_batches == simulated.all_micro_batches:
        ran = counted(simulated.micro_batches, "micro-batch")
    say(f"simulate rank {simulated.rank} ran a step on tensors without values: {ran} ({simulated.seconds:.0f} s)")
    peak, holdings = simulated.peak, estimated.share
    when = f"{peak.phase} of micro-batch {peak.micro_batch}" if peak.micro_batch else peak.phase
    by_arithmetic = {
        "weights": holdings.weights,
        "gradients": holdings.gradients,
        "optimizer": holdings.optimizer + holdings.average,
        "frozen": frozen_bytes,
        "activations": estimated.rows + estimated.in_flight,
        "gathered": estimated.gathered,
    }
    stage = "" if simulated.stage is None else f", rank {simulated.stage} of mesh.pp"
    table = new_table(
        f"memory of rank {simulated.rank}{stage}, simulated",
        "what",
        f">in {when}",
        ">maximum at any time",
        ">estimated",
        "",
    )
    for name, size in peak.classes.items():
        if name == "frozen" and not peak.maxima[name]:
            continue
        estimate = byte_count(by_arithmetic[name]) if name in by_arithmetic else ""
        table.add_row(name, byte_count(size), byte_count(peak.maxima[name]), estimate, _NOTES.get(name, ""))
    table.add_section()
    share = f"{peak.total / room:.0%} of {byte_count(room)}"
    table.add_row("peak", byte_count(peak.total), "", byte_count(estimated.fullest + frozen_bytes), share)
    show(table)
    overhead = round(_CONTEXT + _FRAGMENTS * peak.total)
    extra = f"{byte_count(overhead)} for CUDA and NCCL contexts and fragmentation"
    total = f"with {extra}: {byte_count(peak.total + overhead)}"
    say(f"{'warning  it does not fit' if peak.total + overhead > room else 'memory  '} {total} of {byte_count(room)}\n")
    collectives = new_table(
        f"collectives of rank {simulated.rank} in these micro-batches", "part of the mesh", ">ranks", "operation",
        ">calls", ">bytes",
    )  # fmt: skip
    for kind, summed in sorted(simulated.collectives.totals.items(), key=lambda pair: -pair[1].bytes):
        collectives.add_row(kind.part, f"{kind.ranks:,}", kind.operation, f"{summed.count:,}", byte_count(summed.bytes))
    show(collectives)
    say("         The simulation assumes flash attention, and equal numbers of tokens for all experts.\n")
