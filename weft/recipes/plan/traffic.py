"""The communication of a mesh in an optimizer step: each collective, with its group and its bytes.

The formulas are in docs/reference/parallelism.md. Not counted, because they are small: metrics, the gradient norm,
numbers of rows for experts, and log-sum-exps of a split vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from weft.config.mesh import MeshSizes
from weft.config.recompute import RecomputePolicy
from weft.engine.selfcheck.context import received_per_token
from weft.models.train_module import ScoreHead
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.holdings import RankShare, UnitShare, shard_elements
from weft.recipes.plan.machines import Machine
from weft.recipes.plan.memory import last_place, rows_of_a_token
from weft.recipes.plan.rows import Load

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]
Phase = Literal["forward", "backward", "step"]
_FORWARD: Phase = "forward"
_BACKWARD: Phase = "backward"


@dataclass(frozen=True)
class Transfer:
    """A collective of a step. axis, size: its group and the number of ranks in it. stride: difference between the
    numbers of neighbours in the group. payload: bytes of the complete tensor in one call; for an all-to-all, bytes that
    a rank distributes, including its own part. calls: number in the step. hidden: whether it overlaps with compute."""

    name: str
    kind: Kind
    axis: str
    size: int
    stride: int
    payload: float
    calls: float
    phase: Phase
    hidden: bool = False

    @property
    def received(self) -> float:
        """Bytes that a rank receives in the step. It sends as many."""
        if self.kind == "send":
            return self.payload * self.calls
        per_call = self.payload * (self.size - 1) / self.size
        return per_call * self.calls * (2 if self.kind == "all-reduce" else 1)

    def seconds(self, machine: Machine) -> float:
        """The seconds of all calls, one after the other."""
        if not self.payload:
            return 0.0
        if self.kind == "send":
            return self.calls * machine.sending(self.payload, self.stride)
        if self.kind == "all-to-all":
            return self.calls * machine.exchanging(self.payload, self.size, self.stride)
        per_call = machine.gathering(self.payload, self.size, self.stride)
        return self.calls * per_call * (2 if self.kind == "all-reduce" else 1)


def transfers(
    model: Blueprint, mesh: MeshSizes, holdings: RankShare, load: Load, *, recompute: RecomputePolicy | None
) -> list[Transfer]:
    """The collectives of a rank in one step."""
    result = [
        *_of_units(model, mesh, holdings, load),
        *_of_tp(model, mesh, holdings, load, recompute=recompute),
        *_of_cp(model, mesh, holdings, load, recompute=recompute),
        *_of_experts(model, mesh, holdings, load, recompute=recompute),
        *_of_stages(model, mesh, holdings, load),
    ]
    return [transfer for transfer in result if transfer.size > 1 and transfer.payload and transfer.calls]


def _forwards(recompute: RecomputePolicy | None) -> float:
    """The mean number of times that a layer's forward collectives run."""
    return 1.0 + (0.0 if recompute is None else recompute.repeated("collectives"))


# ---------------------------------------------------------------- FSDP


def _of_units(model: Blueprint, mesh: MeshSizes, holdings: RankShare, load: Load) -> Iterator[Transfer]:
    fsdp, precision, rows = model.config.fsdp, model.setup.precision, load.micro_batches
    for unit in holdings.units:
        axis, stride = _group(mesh, unit)
        gathered, calls = unit.padded * precision.compute.itemsize, rows * unit.count
        name = f"weights of {unit.name}"
        yield Transfer(name, "all-gather", axis, unit.shards, stride, gathered, calls, "forward", True)
        if not model.setup.trained:
            continue
        if not unit.keep and fsdp.reshard_after_forward is not False:
            within = fsdp.reshard_after_forward
            size = unit.shards if within is True or unit.shards % within else int(within)
            yield Transfer(name, "all-gather", axis, size, stride, gathered, calls, "backward", True)
        name, reduced = f"gradients of {unit.name}", unit.trained_padded * precision.reduce.itemsize
        calls = unit.count if fsdp.reduce == "last" else calls
        yield Transfer(name, "reduce-scatter", axis, unit.shards, stride, reduced, calls, "backward", True)
        copies = mesh.dp_replicate * mesh.shards // (unit.shards * (mesh.ep if unit.strategy == "experts" else 1))
        calls = rows * unit.count if fsdp.reduce == "every" else unit.count
        end: Phase = "backward" if fsdp.reduce == "every" else "step"
        yield Transfer(
            name, "all-reduce", "dp_replicate", copies, stride * unit.shards, reduced / unit.shards, calls, end,
            fsdp.reduce == "every",
        )  # fmt: skip


def _group(mesh: MeshSizes, unit: UnitShare) -> tuple[str, int]:
    """(The name of the group over which a unit is sharded, its stride)."""
    if unit.strategy == "experts":
        return "same experts", mesh.tp * mesh.ep
    return ("dp_shard x cp" if mesh.cp > 1 else "dp_shard"), mesh.tp


# ---------------------------------------------------------------- tp


def _of_tp(
    model: Blueprint, mesh: MeshSizes, holdings: RankShare, load: Load, *, recompute: RecomputePolicy | None
) -> Iterator[Transfer]:
    if mesh.tp == 1:
        return
    styles, sequence, size = model.styles(mesh.tp), model.sequence(mesh.tp), model.setup.precision.compute.itemsize
    hidden = model.text.hidden_size * size / load.micro_batches
    first, last = holdings.coordinates.pp == 0, holdings.coordinates.pp == last_place(model, mesh)
    layers = set(model.layers(mesh.pp, holdings.coordinates.pp))
    regions = [name for name in styles.regions if model.layer_of(name) in layers]
    joined = [name for name in styles.joined if model.layer_of(name) in layers]
    tokens = load.tokens * hidden
    blocks = len(regions) * load.micro_batches
    recomputed = _forwards(recompute) - 1.0

    def transfer(name: str, kind: Kind, payload: float, calls: float, phase: Phase) -> Transfer:
        return Transfer(name, kind, "tp", mesh.tp, 1, payload, calls, phase)

    kinds: tuple[Kind, ...] = ("all-gather", "reduce-scatter") if sequence else ("all-reduce",)
    ends = 0 if _norm_follows(model) else len(layers) * load.micro_batches  # backward does not need a layer's last sum
    for kind in kinds:
        repeated = recomputed * (blocks - (ends if kind == kinds[-1] else 0))
        yield transfer("hidden states of blocks", kind, tokens, blocks + repeated, "forward")
        yield transfer("hidden states of blocks", kind, tokens, blocks, "backward")
    for name in joined:
        width = sum(part.size for part in styles.joined[name].segments)
        payload_of_norm = load.tokens * width * size / load.micro_batches
        yield transfer(
            "queries and keys of a norm",
            "all-gather",
            payload_of_norm,
            load.micro_batches * (1 + recomputed),
            "forward",
        )
        yield transfer("queries and keys of a norm", "all-reduce", payload_of_norm, load.micro_batches, "backward")
    if first:
        yield transfer("embeddings", kinds[-1], tokens, load.micro_batches, "forward")
        if sequence:
            yield transfer("embeddings", "all-gather", tokens, load.micro_batches, "backward")
    if last:
        if sequence:
            yield transfer("last hidden states", "all-gather", tokens, load.micro_batches, "forward")
        if not isinstance(model.module.head, ScoreHead):
            predicted = load.predicted * hidden
            yield transfer("gradient of the head's input", "all-reduce", predicted, load.micro_batches, "backward")
    # Gradients of weights that every rank of tp has completely and uses for its part of the work.
    stages, elements = model.stages(mesh.pp), 0
    for weight, inside in model.undivided(mesh.tp):
        on_stage = stages is None or holdings.coordinates.pp in stages[1].holders[weight.name]
        if on_stage and (sequence or inside):
            elements += shard_elements(weight.shape, mesh.shards, 0)
    yield transfer(
        "gradients of replicated weights",
        "all-reduce",
        float(elements * model.setup.precision.master.itemsize),
        1,
        "step",
    )


def _norm_follows(model: Blueprint) -> bool:
    """Whether a layer ends with a norm of its last block's output, as in gemma3."""
    _, layer = model.module.layers[0]
    return any(re.match(r"post_(feedforward|mlp|ffn)", name) for name, _ in layer.named_children())


# ---------------------------------------------------------------- cp


def _of_cp(
    model: Blueprint, mesh: MeshSizes, holdings: RankShare, load: Load, *, recompute: RecomputePolicy | None
) -> Iterator[Transfer]:
    """The exchange of heads, or of keys and values, for split documents. The payload of an all-to-all includes the
    share of 1 / size that stays on the rank."""
    ulysses = model.ulysses(mesh.cp, mesh.tp)
    if ulysses is None or not load.shared:
        return
    layers = len(model.built.flops.attention)
    stage_layers = len(model.layers(mesh.pp, holdings.coordinates.pp)) * layers / len(model.costs[0])
    heads, keys = received_per_token(model.built.flops, model.checked, mesh.cp, ulysses, mesh.tp)
    size, forwards = model.setup.precision.compute.itemsize, _forwards(recompute)
    tokens = load.shared * mesh.cp / load.micro_batches  # tokens of the complete group, the unit of received_per_token
    calls = stage_layers * load.micro_batches
    parts = (
        ("heads for tokens", "cp (ulysses)", heads, ulysses, mesh.tp),
        ("keys and values", "cp (ring)", keys, mesh.cp // ulysses, mesh.tp * ulysses),
    )
    for name, axis, received, ranks, stride in parts:
        payload = received / layers * tokens * size * ranks / max(1, ranks - 1)
        yield Transfer(name, "all-to-all", axis, ranks, stride, payload, calls * forwards, "forward")
        yield Transfer(name, "all-to-all", axis, ranks, stride, payload, calls, "backward")


# ---------------------------------------------------------------- ep


def _of_experts(
    model: Blueprint, mesh: MeshSizes, holdings: RankShare, load: Load, *, recompute: RecomputePolicy | None
) -> Iterator[Transfer]:
    """The exchange of rows with experts, if routers choose evenly."""
    if mesh.ep == 1:
        return
    stage_layers = set(model.layers(mesh.pp, holdings.coordinates.pp))
    layers = sum(model.layer_of(name) in stage_layers for name in model.experts)
    size = model.setup.precision.compute.itemsize
    rows, calls = load.tokens / load.micro_batches * rows_of_a_token(model), layers * load.micro_batches
    returned_bytes = rows * model.text.hidden_size * size
    sent_bytes = returned_bytes + rows * size  # with the weights of the rows
    # Outputs of experts are not stored, so a recomputed layer ends before it. Shared experts come after them.
    forwards = _forwards(recompute)
    for name, payload, times in (
        ("rows to experts", sent_bytes, forwards),
        ("rows from experts", returned_bytes, forwards if model.has_shared_experts else 1.0),
    ):  # fmt: skip
        yield Transfer(name, "all-to-all", "ep", mesh.ep, mesh.tp, payload, calls * times, "forward")
        yield Transfer(name, "all-to-all", "ep", mesh.ep, mesh.tp, payload, calls, "backward")


# ---------------------------------------------------------------- pp


def _of_stages(model: Blueprint, mesh: MeshSizes, holdings: RankShare, load: Load) -> Iterator[Transfer]:
    staged = model.stages(mesh.pp)
    if staged is None:
        return
    stages, _ = staged
    stride, pp_rank, placement = mesh.world // mesh.pp, holdings.coordinates.pp, stages.placement
    wide = 4 if stages.interface.wide else model.setup.precision.compute.itemsize
    parts = mesh.tp if model.sequence(mesh.tp) else 1
    payload = load.tokens / load.micro_batches * model.text.hidden_size * wide / parts
    for stage in placement.stages_of(pp_rank):
        for onward in (True, False):
            neighbour = placement.neighbour(stage, onward)
            distance = 0 if neighbour is None else abs(placement.rank_of(neighbour) - pp_rank)
            name, phase = ("hidden states", _FORWARD) if onward else ("their gradients", _BACKWARD)
            calls = load.micro_batches if distance else 0
            yield Transfer(name, "send", "pp", mesh.pp, stride * distance, payload, calls, phase, True)
    tied = sum(shard_elements(w.shape, mesh.shards, 0) for w in model.shared(mesh.pp, pp_rank)) / mesh.tp
    rank_distance = stride * (mesh.pp - 1)
    size = model.setup.precision.master.itemsize
    yield Transfer("gradient of the tied embedding", "send", "pp", mesh.pp, rank_distance, tied * size, 1, "step")
