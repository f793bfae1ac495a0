"""Bugs of pipeline parallelism: gradients that micro-batches, stages and tied weights lose, or count twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.engine.optim.optimizer import OtherStages
from weft.parallel.mesh import PPAxis
from weft.parallel.pp.model import Pipeline, Span
from weft.parallel.pp.schedule import Action
from weft.parallel.pp.weight_gradients import Delayed
from weft.verify.bugs import AGREE, GRADIENTS, LOGPROB, NORM, Original, Plant, bug

MICRO_BATCHES = "gradients, many micro-batches"
MEGATRON = "NVIDIA/Megatron-LM#7452"
NEEDS = "mesh.pp above 1"


# ---------------------------------------------------------------- micro-batches


@bug(
    "B39", "weft.engine.pipeline_executor:PipelineExecutor.run_backward",
    "a stage drops its gradients when it starts another micro-batch, so only the last one is trained",
    caught_by=MICRO_BATCHES, issue="NVIDIA-NeMo/Automodel#3530", ranks=2, needs=NEEDS,
)  # fmt: skip
def last_micro_batch_only(plant: Plant, original: Original, self: Any, action: Action, *args: Any, last: bool) -> Any:
    if last and action.micro:
        plant.hit()
        for parameter in self.module.parameters():
            parameter.grad = None
    return original(self, action, *args, last=last)


@bug(
    "B39", "weft.engine.pipeline_executor:PipelineExecutor.train",
    "stages divide gradients by the number of micro-batches, which the step's normaliser already includes",
    caught_by=MICRO_BATCHES, issue="pytorch/torchtitan#1733", ranks=2, needs=NEEDS,
)  # fmt: skip
def scaled_by_micro_batches(
    plant: Plant, original: Original, self: Any, rows: Any, objective: Any, factors: Any, *args: Any, **options: Any
) -> Any:
    count = len(rows.sources)
    plant.hits += count > 1
    factors = replace(factors, normaliser=factors.normaliser * count)
    return original(self, rows, objective, factors, *args, **options)


@bug(
    "B39", "weft.engine.pipeline_executor:PipelineExecutor.compute_weight_gradients",
    "weight gradients that are computed at the end of a step are dropped for its last micro-batch",
    caught_by=GRADIENTS, issue="pytorch/pytorch#144530", ranks=2, needs=f"{NEEDS} and a zero-bubble schedule",
)  # fmt: skip
def last_weights_forgotten(
    plant: Plant, original: Original, self: Any, action: Action, delayed: Delayed, *, last: bool
) -> None:
    plant.hits += last and bool(delayed)
    original(self, action, [] if last else delayed, last=last)


@bug(
    "B39", "weft.engine.pipeline_executor:PipelineExecutor.compute_weight_gradients",
    "gradients of norms and other weights, left by a backward, are reduced before those of linear layers are "
    "computed, and those of linear layers are never reduced",
    caught_by=GRADIENTS, issue="pytorch/pytorch#144530", ranks=2, needs=f"{NEEDS} and a zero-bubble schedule",
)  # fmt: skip
def weights_after_the_sum(
    plant: Plant, original: Original, self: Any, action: Action, delayed: Delayed, *, last: bool
) -> None:
    original(self, action, [], last=last)
    plant.hits += bool(delayed)
    for add in delayed:
        add()


# ---------------------------------------------------------------- layers


@bug(
    "B39", "weft.engine.builder:cut_layers",
    "with several stages per rank, the second stage has the third stage's layers, and the third has the second's",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and several stages per rank",
)  # fmt: skip
def stages_in_another_order(plant: Plant, original: Original, *args: Any) -> list[Span]:
    spans: list[Span] = original(*args)
    if len(spans) > 3:
        plant.hit()
        spans[1], spans[2] = spans[2], spans[1]
    return spans


@bug(
    "B39", "weft.parallel.parallelize:keep_stages",
    "the first layer of a later stage is skipped, as in a split that is off by one",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs=NEEDS,
)  # fmt: skip
def layer_skipped(
    plant: Plant, original: Original, module: Any, pipeline: Pipeline, pp_rank: int, **options: Any
) -> None:
    original(module, pipeline, pp_rank, **options)
    if pp_rank:
        plant.hit()
        layer = module.layers[pipeline.spans[pipeline.placement.stage_of(pp_rank, 0)][0]][1]
        layer.register_forward_hook(lambda _, args, output: args[0] + 0.0 * output)


@bug(
    "B39", "weft.engine.pipeline_executor:PipelineExecutor.sum_over_stages",
    "the balancing loss of experts includes only a rank's layers",
    caught_by=GRADIENTS, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and model.router_aux_loss",
)  # fmt: skip
def balance_of_own_layers(plant: Plant, original: Original, self: Any, sums: Any) -> None:
    plant.hit()


# ---------------------------------------------------------------- weights that two stages hold


@bug(
    "B39", "weft.engine.engine:sum_shared_gradients",
    "the gradient of a tied weight is not summed over its two stages",
    caught_by=GRADIENTS, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and a model with a tied head",
)  # fmt: skip
def tied_weight_not_summed(
    plant: Plant, original: Original, module: nn.Module, pipeline: Pipeline, axis: PPAxis
) -> None:
    plant.hits += bool(pipeline.shared_params(axis.rank))


@bug(
    "B39", "weft.engine.engine:sum_shared_gradients",
    "the gradient of a tied weight is summed over its ranks once for each stage of a rank",
    caught_by=GRADIENTS, issue=MEGATRON, ranks=2,
    needs=f"{NEEDS}, several stages per rank, and a model with a tied head",
)  # fmt: skip
def tied_weight_summed_per_stage(
    plant: Plant, original: Original, module: nn.Module, pipeline: Pipeline, axis: PPAxis
) -> None:
    for _ in range(pipeline.placement.chunks):
        original(module, pipeline, axis)
    plant.hits += pipeline.placement.chunks > 1 and bool(pipeline.shared_params(axis.rank))


@bug(
    "B39", "weft.engine.engine:sum_shared_gradients",
    "the last stage updates a tied weight with only its part of the gradient",
    caught_by=AGREE, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and a model with a tied head",
)  # fmt: skip
def tied_weight_steps_apart(
    plant: Plant, original: Original, module: nn.Module, pipeline: Pipeline, axis: PPAxis
) -> None:
    before = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None and axis.rank}
    original(module, pipeline, axis)
    with torch.no_grad():
        for name in pipeline.shared_params(axis.rank) & before.keys():
            plant.hit()
            local = dict(module.named_parameters())[name]
            assert local.grad is not None
            local.grad.copy_(before[name])


@bug(
    "B39", "weft.engine.engine:OtherStages",
    "the gradient norm counts a tied weight once for each stage that has it",
    caught_by=NORM, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and a model with a tied head",
)  # fmt: skip
def tied_weight_counted_twice(
    plant: Plant, original: Original, group: Any, counted_elsewhere: frozenset[str]
) -> OtherStages:
    plant.hits += bool(counted_elsewhere)
    result: OtherStages = original(group, frozenset())
    return result


@bug(
    "B39", "weft.engine.engine:global_norm",
    "the gradient norm of a stage includes only its parameters",
    caught_by=NORM, issue=MEGATRON, ranks=2, needs=NEEDS,
)  # fmt: skip
def norm_of_one_stage(plant: Plant, original: Original, named: Any, tp: Any = None, pp: Any = None) -> float:
    plant.hits += pp is not None
    result: float = original(named, tp)
    return result
