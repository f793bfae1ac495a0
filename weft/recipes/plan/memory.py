"""The peak memory of each rank of a mesh, by purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.config.mesh import MeshSizes
from weft.config.recompute import Activations
from weft.models.train_module import ScoreHead
from weft.ops.head import block_bytes, tile_bytes
from weft.ops.offload import LAYERS_IN_FLIGHT
from weft.parallel.activations import RowSharing
from weft.parallel.memory import HostNeeds, MemoryNeeds, gathered_elements, host_bytes
from weft.parallel.pp.schedule import in_flight
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.holdings import RankShare, UnitShare, shares_by_stage
from weft.recipes.plan.rows import RowFacts
from weft.upstream import HSDP_BUFFERS


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. share: its bytes between steps, with gradients. gathered: parameters of gathered units, in the
    compute dtype. unreduced: gradients of the largest unit before they are reduced. rows: activations that the largest
    row stores for backward. in_flight: activations of further rows of a pipeline. experts: rows sent to experts and
    back. head: logits, and gradients of the head's inputs. host: on the host, while a checkpoint is written. unknown:
    why `rows` could not be computed; "" if it was. lingering: buffers of the last gradients that FSDP reduced, which it
    frees in the next row's backward. recomputed: the part of `rows` that belongs to a layer recomputed in backward.
    offloaded: whether shards are on the host (fsdp.cpu_offload). staged: shards of units that were copied from the
    host. reduced: gradients of replicated units in the reduce dtype, which torch keeps until the end of backward.
    dequantised: a quantised weight of the base while its layer computes, and gradients of an MLP's tiles in fp32.
    keeps: whether one data rank keeps parameters in the compute dtype for a complete step, if memory allows
    (parallel/fsdp.py:WorkingCopies). copies: their bytes beyond `gathered`. hosted: activations on the host
    (model.offload_activations). on_device: with fsdp.cpu_offload=optimizer, shards of all weights in the compute
    dtype."""

    share: RankShare
    gathered: int
    unreduced: int
    rows: int
    in_flight: int
    experts: int
    head: int
    host: int
    unknown: str = ""
    lingering: int = 0
    recomputed: int = 0
    offloaded: bool = False
    staged: int = 0
    reduced: int = 0
    dequantised: int = 0
    keeps: bool = False
    copies: int = 0
    hosted: int = 0
    on_device: int = 0

    @property
    def resident(self) -> int:
        """Bytes of the accelerator between steps."""
        return self.on_device if self.offloaded else self.share.resident

    @property
    def on_host(self) -> int:
        """Bytes of the host while a checkpoint is written, including offloaded shards."""
        return self.host + self.hosted + (self.share.resident if self.offloaded else 0)

    @property
    def fullest(self) -> int:
        """Peak bytes. The head and a layer's backward need memory at different times; all other parts add up."""
        alternating = max(
            self.head + self.lingering,
            self.recomputed + self.unreduced + self.experts + self.reduced + self.dequantised,
        )
        gathered = self.gathered + self.staged + self.copies
        return self.resident + gathered + self.rows - self.recomputed + self.in_flight + alternating

    @property
    def needs(self) -> MemoryNeeds:
        """The needs in the form that a dry run prints."""
        holdings = self.share
        return MemoryNeeds(holdings.weights, holdings.gradients, holdings.optimizer, self.gathered, 0, holdings.average)


def memory_of(
    model: Blueprint, mesh: MeshSizes, rows: RowFacts | None, activations: Activations | None = None
) -> Memory:
    """The memory of the rank that needs most, on the pipeline stage that needs most. rows: of a step; None for rows of
    step.max_tokens_per_device, enough of them for a pipeline. activations: None for the activations of the config."""
    return max(memory_by_stage(model, mesh, rows, activations), key=lambda memory: memory.fullest)


def memory_by_stage(
    model: Blueprint, mesh: MeshSizes, rows: RowFacts | None, activations: Activations | None = None
) -> list[Memory]:
    """For each stage, the memory of the rank that has most between steps. Arguments: see memory_of."""
    chosen = Activations.from_config(model.config) if activations is None else activations
    return [_of_stage(model, mesh, holdings, rows, chosen) for holdings in shares_by_stage(model, mesh)]


def _of_stage(
    model: Blueprint, mesh: MeshSizes, holdings: RankShare, rows: RowFacts | None, activations: Activations
) -> Memory:
    config, precision = model.config, model.setup.precision
    compute = precision.compute.itemsize
    tokens, micro_batches = longest_row(model, rows)
    units = [(gathered_part(model, mesh, unit), unit.keep) for unit in holdings.units for _ in range(unit.count)]
    memory = Memory(
        holdings,
        gathered=gathered_elements(units, config.fsdp.reshard_after_forward) * compute,
        unreduced=_unreduced(model, mesh, holdings, micro_batches) if model.setup.trained else 0,
        rows=0,
        in_flight=0,
        experts=_expert_rows(model, mesh, tokens),
        head=_head(model, mesh, tokens) if holdings.coordinates.pp == last_place(model, mesh) else 0,
        host=_host(model, mesh, holdings),
        lingering=_lingering(model, holdings, micro_batches) if model.setup.trained else 0,
        offloaded=bool(config.fsdp.cpu_offload),
        staged=_staged(model, holdings) if config.fsdp.cpu_offload is True else 0,
        on_device=_on_device(model, holdings) if config.fsdp.cpu_offload == "optimizer" else 0,
        reduced=_reduced(model, mesh, holdings, micro_batches) if model.setup.trained else 0,
        dequantised=_dequantised(model, mesh) + _tile_sums(model, mesh, activations),
    )
    if not model.setup.trained:
        return memory
    try:
        saved = model.saved(sharing(model, mesh, rows), tiled=activations.tile is not None, exchanged=mesh.ep > 1)
    except Exception as error:  # of any type: some families need values
        return replace(memory, unknown=type(error).__name__)
    layers = model.layers(mesh.pp, holdings.coordinates.pp)
    row_count = rows_in_flight(model, mesh, holdings.coordinates.pp, micro_batches)
    exchanged = kept_rows(model, mesh, tokens, layers, activations)
    moved = exchanged if activations.offload == "kept" else list[int]()
    stays = sum(sorted(moved, reverse=True)[:LAYERS_IN_FLIGHT]) if moved else sum(exchanged)
    bytes_of_row = saved.bytes(tokens, activations, layers) + stays
    all_rows = saved.bytes(tokens, activations, layers, row_count) + round(stays * (1 if moved else row_count))
    memory = replace(
        memory,
        rows=bytes_of_row,
        in_flight=all_rows - bytes_of_row,
        recomputed=saved.recomputed(tokens, activations, layers),
        hosted=saved.on_host(tokens, activations, layers, row_count) + round(sum(moved) * row_count),
    )
    freed = sum(count for count, keep in units if not keep) * compute
    if not _keeps(model, mesh, memory.fullest + freed):
        return memory
    working_copies = sum(count for count, _ in units) * compute
    return replace(memory, keeps=True, copies=max(0, working_copies - memory.gathered))


def gathered_part(model: Blueprint, mesh: MeshSizes, unit: UnitShare) -> int:
    """Elements of a unit that FSDP gathers. On a single rank it does not copy frozen weights in the compute dtype."""
    single = mesh.world == 1 and not model.config.fsdp.cpu_offload
    only_trained = single and model.setup.precision.frozen == model.setup.precision.compute
    return unit.trained if only_trained else unit.elements


def _keeps(model: Blueprint, mesh: MeshSizes, fullest: int) -> bool:
    """Whether one data rank on CUDA keeps all units gathered for a complete step: if an eighth of the memory stays
    free. fullest: bytes with them."""
    config, assumed = model.config.fsdp, model.assumed
    single_rank = mesh.dp_replicate * mesh.shards == 1 and not config.cpu_offload
    if config.reshard_after_forward is False:
        return single_rank
    return single_rank and assumed is not None and fullest <= 0.875 * assumed.memory


def longest_row(model: Blueprint, rows: RowFacts | None) -> tuple[int, int | None]:
    """(Tokens of the longest row, number of micro-batches; None for many)."""
    if rows is None:
        return model.config.step.max_tokens_per_device, None
    return rows.longest, rows.load.micro_batches


def rows_in_flight(model: Blueprint, mesh: MeshSizes, pp_rank: int, micro_batches: int | None) -> float:
    """The maximum number of rows for which a rank of mesh.pp stores activations. With several stages per rank, a row
    counts by the share of the rank's stages that store it."""
    stages = model.stages(mesh.pp)
    if stages is None:
        return 1.0
    placement, schedule = stages[0].placement, model.config.mesh.pp_schedule
    micro_batch_count = 4 * placement.stages if micro_batches is None else micro_batches
    if schedule != "GPipe":
        micro_batch_count = min(micro_batch_count, 4 * placement.stages)  # more micro-batches change nothing
    return in_flight(schedule, placement, pp_rank, micro_batch_count) / placement.chunks


def last_place(model: Blueprint, mesh: MeshSizes) -> int:
    """The index on mesh.pp that computes the loss."""
    stages = model.stages(mesh.pp)
    return 0 if stages is None else stages[0].placement.last


def sharing(model: Blueprint, mesh: MeshSizes, rows: RowFacts | None) -> RowSharing:
    """How ranks share the largest row, and the keys that its attention gathers. If documents may be split, the row is a
    part of one document."""
    cuts = rows is None or rows.cuts
    ulysses = model.ulysses(mesh.cp, mesh.tp) if cuts else None
    ring, heads = (1, 1) if ulysses is None else (mesh.cp // ulysses, ulysses)
    on_cpu = model.assumed is None and model.setup.ranks.device.type == "cpu"  # no copies in ops/tree_attention.py
    paths = 1.0 if rows is None or on_cpu else round(rows.keys * 8) / 8  # few distinct values: each is run on meta
    return RowSharing(mesh.tp, ring, heads, model.sequence(mesh.tp), paths)


def _unreduced(model: Blueprint, mesh: MeshSizes, holdings: RankShare, micro_batches: int | None) -> int:
    """Bytes of unreduced gradients of the largest unit: in the compute dtype from autograd, and in the dtype in which
    they are sent. On one data rank a step's only micro-batch sends none: its buffers are the gradients
    (parallel/fsdp.py). With fsdp.reduce=last, gradients of all units stay unreduced until the step's last
    micro-batch."""
    config, precision = model.config.fsdp, model.setup.precision
    trained = [unit for unit in holdings.units if unit.trained]
    single_rank = mesh.dp_replicate * mesh.shards == 1 and not config.cpu_offload
    stays = single_rank and micro_batches == 1 and precision.reduce == precision.master
    sent = 0 if stays else precision.reduce.itemsize
    sizes = (unit.trained * precision.compute.itemsize + unit.trained_padded * sent for unit in trained)
    largest = max(sizes, default=0)
    if config.reduce == "last" and micro_batches != 1:
        return largest + sum(unit.trained * unit.count for unit in trained) * precision.reduce.itemsize
    return largest


def _tile_sums(model: Blueprint, mesh: MeshSizes, activations: Activations) -> int:
    """Bytes of the fp32 sums of weight gradients over the tiles of the largest MLP."""
    if activations.tile is None or not model.setup.trained or model.setup.precision.compute.itemsize == 4:
        return 0
    return 4 * model.largest_mlp // mesh.tp


def _lingering(model: Blueprint, holdings: RankShare, micro_batches: int | None) -> int:
    """Bytes of the root's gradients in the dtype in which they are sent; they come last in a backward."""
    if micro_batches == 1 or model.config.fsdp.reduce == "last":
        return 0
    roots = (unit for unit in holdings.units if unit.name == "root" and unit.shards > 1)
    return sum(unit.trained_padded for unit in roots) * model.setup.precision.reduce.itemsize


def _staged(model: Blueprint, holdings: RankShare) -> int:
    """Bytes of the stored shards of the two largest units after they were copied from the host: each stays until it is
    gathered."""
    precision = model.setup.precision
    master, frozen = precision.master.itemsize, precision.frozen.itemsize
    sizes = []
    for unit in holdings.units:
        stored = unit.trained * master + (unit.elements - unit.trained) * frozen
        sizes += [(stored // unit.shards, False)] * unit.count
    return gathered_elements(sizes, True)


def _on_device(model: Blueprint, holdings: RankShare) -> int:
    """Bytes of a rank's shards of all weights in the compute dtype."""
    elements = sum(math.ceil(unit.elements / unit.shards) * unit.count for unit in holdings.units)
    return elements * model.setup.precision.compute.itemsize


def _reduced(model: Blueprint, mesh: MeshSizes, holdings: RankShare, micro_batches: int | None) -> int:
    """Bytes of reduced gradients of replicated units that torch keeps in addition to the gradients (weft/upstream.py):
    if they are cast to the masters' dtype, or added to those of an earlier micro-batch."""
    present, config, precision = HSDP_BUFFERS.present, model.config.fsdp, model.setup.precision
    added = config.reduce == "every" and micro_batches != 1
    if present is None or not present() or (precision.reduce == precision.master and not added):
        return 0
    ranks, size = mesh.dp_replicate * mesh.shards, precision.reduce.itemsize
    replicated = (
        unit for unit in holdings.units if ranks > unit.shards * (mesh.ep if unit.strategy == "experts" else 1)
    )
    return sum(unit.trained_padded // unit.shards * unit.count for unit in replicated) * size


def _dequantised(model: Blueprint, mesh: MeshSizes) -> int:
    """Bytes of the largest quantised weight in the compute dtype."""
    quantised = (weight for weight in model.weights if weight.quantised)
    parts = (math.prod(weight.shape) // (mesh.tp * (mesh.ep if weight.experts else 1)) for weight in quantised)
    return max(parts, default=0) * model.setup.precision.compute.itemsize


def _expert_rows(model: Blueprint, mesh: MeshSizes, tokens: int) -> int:
    """Bytes of the rows that a rank sends to experts and receives, if routers choose evenly; more if they do not."""
    if mesh.ep == 1:
        return 0
    return 2 * tokens * rows_of_a_token(model) * model.text.hidden_size * model.setup.precision.compute.itemsize


def kept_rows(
    model: Blueprint, mesh: MeshSizes, tokens: int, layers: Sequence[int], activations: Activations
) -> list[int]:
    """For each layer with experts, the bytes of the rows received from experts on other ranks and sent back, which
    recomputation stores."""
    recompute = activations.recompute
    if recompute is None or "collectives" not in recompute.keep:
        return []
    chosen = {layer for layer in layers if recompute.covers(layer)}
    return [_expert_rows(model, mesh, tokens) for name in model.experts if model.layer_of(name) in chosen]


def rows_of_a_token(model: Blueprint) -> int:
    """Rows sent to experts per token: one for each choice, or for every expert if all experts get every token."""
    facts = model.built.flops
    all_experts = not all(hasattr(child, "has_gate") for child in model.experts.values())
    return facts.experts if all_experts else facts.experts_per_token


def _head(model: Blueprint, mesh: MeshSizes, tokens: int) -> int:
    """Bytes of the tiles of logits in ops/head.py and of their gradients, for a row in which all tokens are trained."""
    head, compute = model.module.head, model.setup.precision.compute.itemsize
    if isinstance(head, ScoreHead):
        return 0
    width = int(head.weight.shape[1])
    vocabulary = -(-int(head.weight.shape[0]) // mesh.tp)
    kind, assumed = "cpu" if model.setup.ranks.device.type == "cpu" else "cuda", model.setup.ranks.assumed
    tiles = min(tile_bytes(kind, 0 if assumed is None else assumed.memory) // 4, tokens * vocabulary) * compute
    hidden = tokens * width * (4 + compute)
    if not head.weight.requires_grad or not model.setup.trained:
        return tiles + hidden
    wide = compute if compute == 4 else 4 + compute
    # With a split vocabulary, logits are computed again in backward, in two blocks of fp32.
    blocks = 2 * min(block_bytes(kind), 4 * tiles // compute) if mesh.tp > 1 and compute != 4 else 0
    return tiles + hidden + vocabulary * width * wide + blocks


def _host(model: Blueprint, mesh: MeshSizes, holdings: RankShare) -> int:
    needs = MemoryNeeds(holdings.weights, holdings.gradients, holdings.optimizer, 0, 0, holdings.average)
    adapters = model.built.lora is not None
    return host_bytes([HostNeeds.estimate(needs, adapters=adapters, state=True, replicas=mesh.dp_replicate, parts=())])
