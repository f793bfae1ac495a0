"""Bugs of expert parallelism: rows at the wrong expert, or back at the wrong token; gradients of experts and routers.

The checks of a small copy before the start would catch most of them. In these checks they are inactive (`rehearsing`),
so that figures show them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.ops.dispatch import Dispatched, ExpertPlacement
from weft.parallel.mesh import local_shard
from weft.parallel.shards.cuts import ShardSpec, ShardSpecs
from weft.verify.bugs import GRADIENTS, LOGPROB, NORM, Original, Plant, bug, rehearsing

NEEDS = "mesh.ep above 1"


# ---------------------------------------------------------------- gradients


def _scaled(plant: Plant, original: Original, engine: Any, factor: Callable[[Any], float]) -> None:
    done = engine._complete
    original(engine)
    for name, parameter in engine.module.named_parameters():
        if not done and parameter.grad is not None and ".experts." in name and engine.mesh.ep is not None:
            plant.hit()
            local_shard(parameter.grad).mul_(factor(engine))


@bug(
    "B14", "weft.engine.engine:Engine.complete_gradients",
    "gradients of experts, which are complete on their rank, are divided by the number of ranks of ep",
    caught_by=GRADIENTS, issue="pytorch/pytorch#160285", ranks=2, needs=NEEDS,
)  # fmt: skip
def experts_averaged(plant: Plant, original: Original, engine: Any) -> None:
    _scaled(plant, original, engine, lambda engine: 1 / engine.mesh.ep.size)


@bug(
    "B14", "weft.engine.engine:Engine.complete_gradients",
    "gradients of experts are multiplied by the number of ranks of ep, as if each rank had only a part of the tokens",
    caught_by=GRADIENTS, issue="NVIDIA/Megatron-LM#5956", ranks=2, needs=NEEDS,
)  # fmt: skip
def experts_multiplied(plant: Plant, original: Original, engine: Any) -> None:
    _scaled(plant, original, engine, lambda engine: float(engine.mesh.ep.size))


@bug(
    "B14", "weft.models.experts:experts_forward",
    "outputs of experts are weighted by scores without a gradient, so routers do not learn",
    caught_by=GRADIENTS, issue="NVIDIA-NeMo/Automodel#2995", ranks=2, needs=NEEDS,
)  # fmt: skip
def router_detached(
    plant: Plant, original: Original, experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Any:
    if rehearsing():
        return original(experts, hidden, chosen, weights)
    plant.hit()
    return original(experts, hidden, chosen, weights.detach())


@bug(
    "B14", "weft.engine.engine:global_norm",
    "the gradient norm includes only this rank's experts",
    caught_by=NORM, issue="NVIDIA/Megatron-LM#7452", ranks=2, needs=NEEDS,
)  # fmt: skip
def experts_norm_apart(plant: Plant, original: Original, named: Any, cuts: ShardSpecs, *args: Any) -> float:
    plant.hits += bool(cuts)
    return float(original(named, {}, *args))


# ---------------------------------------------------------------- which rows an expert gets


@bug(
    "B14", "weft.models.experts:dispatch",
    "rows from several ranks are passed to experts in the order of ranks",
    caught_by=LOGPROB, issue="huggingface/transformers#45473", ranks=2, needs=NEEDS,
)  # fmt: skip
def rows_unsorted(plant: Plant, original: Original, *arguments: Any) -> Dispatched:
    dispatched: Dispatched = original(*arguments)
    if rehearsing() or not len(dispatched.order_R):
        return dispatched
    plant.hit()
    rows, weights = (
        torch.empty_like(x).index_copy(0, dispatched.order_R, x) for x in (dispatched.rows_RH, dispatched.weights_R)
    )
    order = torch.arange(len(rows), device=rows.device)
    return replace(dispatched, rows_RH=rows, weights_R=weights, order_R=order)


@bug(
    "B14", "weft.models.experts:combine",
    "outputs of experts are returned to the wrong tokens",
    caught_by=LOGPROB, issue="huggingface/transformers#45473", ranks=2, needs=NEEDS,
)  # fmt: skip
def rows_back_elsewhere(
    plant: Plant, original: Original, rows: Tensor, dispatched: Dispatched, axis: ExpertPlacement
) -> Tensor:
    back: Tensor = original(rows, dispatched, axis)
    if rehearsing():
        return back
    plant.hit()
    return back.flip(0)


@bug(
    "B14", "weft.parallel.ep.experts:split_by_experts",
    "each rank computes with the experts of the next one",
    caught_by=LOGPROB, issue="huggingface/transformers#48205", ranks=2, needs=NEEDS,
)  # fmt: skip
def experts_of_the_next_rank(plant: Plant, original: Original, *args: Any) -> ShardSpec:
    cut: ShardSpec = original(*args)
    if rehearsing():
        return cut
    plant.hit()
    return cut.for_rank((cut.rank + 1) % cut.size)
