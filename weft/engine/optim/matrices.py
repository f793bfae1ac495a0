"""The matrices that Muon orthogonalises: parts of parameters, determined on the model before it is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from torch import nn
from transformers import PretrainedConfig

from weft.config.schema import OptimizerConfig
from weft.engine.optim.groups import decays
from weft.engine.optim.kinds import MatrixBoxes
from weft.errors import UserError
from weft.models import hf
from weft.models.low_rank import LowRank
from weft.models.segments import TPSpec
from weft.models.train_module import TrainModule
from weft.parallel.shards.boxes import Box
from weft.parallel.tp.plan import FUSED, FUSED_GATE_UP, KEY_VALUE, QUERY, find_tp_plan


def find_matrices(module: TrainModule, config: PretrainedConfig, optimizer: OptimizerConfig) -> MatrixBoxes:
    """Name of a parameter -> the boxes of its matrices.

    Every weight of two dimensions is a matrix, except embeddings and the head. A stack of experts has one matrix per
    expert. A fused projection has one per part. With optimizer.muon_heads, the projections to queries, keys and values
    have one per head. Raises UserError for a fused projection whose parts weft does not know.
    """
    try:
        specs, reason = find_tp_plan(module, config, 1).specs, ""
    except UserError as error:
        specs, reason = {}, str(error)
    excluded = (f"{module.facts.head}.", f"{module.facts.embedding}.")
    boxes: dict[str, tuple[Box, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = module.get_submodule(name.rpartition(".")[0])
        stacked = parameter.ndim == 3 and (hf.is_fused_experts(owner) or isinstance(owner, LowRank))
        if name.startswith(excluded) or isinstance(owner, nn.Embedding) or not decays(name, parameter.ndim):
            continue
        if parameter.ndim != 2 and not stacked:
            continue
        leaves = set(name.split(".")[-3:])
        if reason and leaves & {*FUSED, *FUSED_GATE_UP}:
            raise UserError(
                f"optimizer.name=muon: {name} is a fused projection. Muon orthogonalises each part of it separately, "
                f"and weft does not know the parts ({reason}). Set optimizer.name=adamw."
            )
        heads = optimizer.muon_heads and bool(leaves & {*QUERY, *KEY_VALUE, *FUSED})
        boxes[name] = tuple(_boxes(tuple(parameter.shape), specs.get(name, TPSpec()), heads=heads))
    return boxes


def _boxes(shape: tuple[int, ...], spec: TPSpec, *, heads: bool) -> Iterator[Box]:
    """The boxes of a parameter's matrices: one for each index of the leading dimensions and each segment of spec.dim.

    heads: one box per head, in segments that consist of heads.
    """
    ranges = {dim: [(0, size)] for dim, size in enumerate(shape)}
    for dim in range(len(shape) - 2):
        ranges[dim] = [(index, 1) for index in range(shape[dim])]
    if spec.dim is not None and sum(part.size for part in spec.segments) == shape[spec.dim]:
        ranges[spec.dim] = []
        offset = 0
        for part in spec.segments:
            sizes = [part.width] * part.count if heads and part.heads else [part.size]
            for size in sizes:
                ranges[spec.dim].append((offset, size))
                offset += size
    for pairs in product(*(ranges[dim] for dim in range(len(shape)))):
        yield Box(tuple(start for start, _ in pairs), tuple(size for _, size in pairs))
