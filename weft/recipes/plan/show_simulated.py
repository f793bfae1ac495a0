"""The output of `weft plan --simulate`: memory of one simulated rank by class, and its collectives."""

from __future__ import annotations

from weft.observe.tables import new_table, show
from weft.recipes.plan.memory import Memory
from weft.recipes.plan.simulate import Simulated
from weft.terminal import byte_count, say

# What a simulation does not see: bytes of the contexts of CUDA and NCCL, and fragments of the allocator's blocks, as a
# share of what is allocated.
_CONTEXT = 1 << 30
_FRAGMENTS = 0.025
_NOTES = {
    "weights": "masters, what is frozen, and buffers",
    "optimizer": "with the average of the weights, if there is one",
    "activations": "what forwards keep for backward, of all rows in flight",
    "head": "what it makes in a forward: logits, and gradients that are known then",
    "gathered": "whole parameters of units, and the buffers in which they arrive",
    "unreduced": "gradients of whole units, and the buffers in which they leave",
    "temporary": "all else that torch allocates",
}


def show_simulated(simulated: Simulated, estimated: Memory, room: int) -> None:
    """Prints the simulation of one rank. estimated: the memory by formula of the fullest rank of its stage, for
    comparison. room: memory of the accelerator in bytes."""
    ran = f"{simulated.micro_batches} of {simulated.all_micro_batches} micro-batches ran, those with the longest rows"
    if simulated.micro_batches == simulated.all_micro_batches:
        ran = f"{simulated.micro_batches} micro-batches ran"
    say(f"simulate rank {simulated.rank} took a step with tensors without values: {ran} ({simulated.seconds:.0f} s)")
    _show_memory(simulated, estimated, room)
    _show_collectives(simulated)
    say("         Attention has the sizes of flash kernels; experts get equally many tokens.\n")


def _show_memory(simulated: Simulated, estimated: Memory, room: int) -> None:
    peak, holdings = simulated.peak, estimated.share
    when = f"{peak.phase} of micro-batch {peak.micro_batch}" if peak.micro_batch else peak.phase
    by_arithmetic = {
        "weights": holdings.weights,
        "gradients": holdings.gradients,
        "optimizer": holdings.optimizer + holdings.average,
        "activations": estimated.rows + estimated.in_flight,
        "gathered": estimated.gathered,
    }
    stage = "" if simulated.stage is None else f", place {simulated.stage + 1} of mesh.pp"
    table = new_table(
        f"memory of rank {simulated.rank}{stage}, simulated",
        "what",
        f">in {when}",
        ">most at any time",
        ">estimated",
        "",
    )
    for name, size in peak.classes.items():
        estimate = byte_count(by_arithmetic[name]) if name in by_arithmetic else ""
        table.add_row(name, byte_count(size), byte_count(peak.maxima[name]), estimate, _NOTES.get(name, ""))
    table.add_section()
    share = f"{peak.total / room:.0%} of {byte_count(room)}"
    table.add_row("at the fullest", byte_count(peak.total), "", byte_count(estimated.fullest), share)
    show(table)
    overhead = round(_CONTEXT + _FRAGMENTS * peak.total)
    total = f"with {byte_count(overhead)} for CUDA and NCCL contexts and fragments: {byte_count(peak.total + overhead)}"
    say(f"{'warning  it does not fit' if peak.total + overhead > room else 'memory  '} {total} of {byte_count(room)}\n")


def _show_collectives(simulated: Simulated) -> None:
    table = new_table(
        f"collectives of rank {simulated.rank} in these micro-batches", "part of the mesh", ">ranks", "operation",
        ">calls", ">bytes",
    )  # fmt: skip
    for kind, total in sorted(simulated.collectives.totals.items(), key=lambda pair: -pair[1].bytes):
        table.add_row(kind.part, f"{kind.ranks:,}", kind.operation, f"{total.count:,}", byte_count(total.bytes))
    show(table)
