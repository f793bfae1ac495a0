"""Initial values of adapters that are computed from the base's weights: PiSSA, OLoRA, LoftQ, and DoRA's magnitudes.

They are computed from full weights, so they do not depend on the mesh. The weights are assigned to the ranks in turn. A
rank computes the values for its weights and broadcasts them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from weft.config.schema import MOVES_BASE
from weft.launch import flight
from weft.models.lora import FROM_WEIGHTS, LoraPlan, Target
from weft.models.train_module import TrainModule
from weft.parallel.mesh import full_tensor
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.cuts import ShardSpecs, shards_of
from weft.parallel.shards.load import LoadPlan, read_whole


def needs_weights(plan: LoraPlan) -> bool:
    """Whether the initial values of new adapters are computed from the base's weights."""
    return plan.path is None and (plan.dora or plan.init in FROM_WEIGHTS)


@torch.no_grad()
def fill_from_weights(
    module: TrainModule,
    plan: LoraPlan,
    base: Mapping[str, Tensor],
    load: LoadPlan,
    cuts: ShardSpecs,
    group: dist.ProcessGroup | None,
) -> None:
    """Fill this rank's shards of adapters. base: shards of the base's weights, dequantised. group: the ranks that have
    the same layers, None for one rank. Collective over it."""
    parameters = dict(module.named_parameters())
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    local = [target for target in plan.targets if target.names[0] in parameters]
    for number, target in enumerate(local):
        flight.beat()
        weight = full_tensor(base[target.weight], cuts.get(target.weight)).float()
        weight = weight.T if target.transposed else weight
        values = {
            name: torch.zeros(shape, device=weight.device)
            for name, shape in plan.tensors(target).items()
            if name not in target.names or plan.init in FROM_WEIGHTS
        }
        if number % world == rank:
            values |= _first_values(plan, target, weight, load)
        for name, tensor in values.items():
            tensor = tensor.contiguous()
            if group is not None:
                dist.broadcast(tensor, group=group, group_src=number % world)
            for shard in shards_of(parameters[name], cuts.get(name)):
                shard.values.copy_(tensor[shard.box.within(Box.from_shape(tuple(tensor.shape)))])


def _first_values(plan: LoraPlan, target: Target, weight: Tensor, load: LoadPlan) -> dict[str, Tensor]:
    """Name -> initial values of a target's adapter tensors. weight: the full weight [out, in], fp32."""
    values, (a_name, b_name, *magnitude) = {}, plan.tensors(target)
    rank = plan.rank - plan.frozen
    if plan.init in MOVES_BASE:
        b, a = _pissa(weight, rank, plan) if plan.init.startswith("pissa") else _olora(weight, rank)
        values = {a_name: torch.cat([a, a]), b_name: torch.cat([b, -b], 1)}
    elif plan.init == "loftq":
        exact = read_whole(load, target.weight).to(weight)
        b, a = _low_rank((exact.T if target.transposed else exact) - weight, rank, plan.scale)
        values = {a_name: a, b_name: b}
    if magnitude:  # DoRA: row norms of the layer's weight before training, which includes loftq's correction
        initial = weight if plan.init != "loftq" else weight + plan.scale * values[b_name] @ values[a_name]
        values[magnitude[0]] = initial.norm(dim=1)
    return values


def _pissa(weight: Tensor, rank: int, plan: LoraPlan) -> tuple[Tensor, Tensor]:
    """(B, A) of the largest singular values, as in peft (PiSSA, arXiv:2404.02948)."""
    if plan.init == "pissa":
        return _low_rank(weight, rank, plan.scale)
    with torch.random.fork_rng(devices=[weight.device] if weight.device.type == "cuda" else []):
        torch.manual_seed(0)  # svd_lowrank starts from a random subspace
        u, s, v = torch.svd_lowrank(weight, rank, niter=int(plan.init.rpartition("_")[2]))
    root = (s / plan.scale).sqrt()
    return u * root, root[:, None] * v.T


def _low_rank(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """(B, A) such that scale * B @ A is the best approximation of the weight with this rank."""
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    root = (s[:rank] / scale).sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank]


def _olora(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(B, A) of a QR decomposition, as in peft (OLoRA, arXiv:2406.01775)."""
    q, r = torch.linalg.qr(weight)
    return q[:, :rank], r[:rank]
