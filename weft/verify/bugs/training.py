"""Bugs in stored weights, in updates and metrics, in the schedule, in the order of the data, in flags,
in the held-out loss, and in resumed runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.engine.metrics import MetricSums
from weft.models import hf
from weft.models.train_module import TrainModule
from weft.verify.bugs import (
    BALANCE_SCALE,
    FP8_INPUTS,
    FP8_OUTPUTS,
    GRADIENTS,
    LOGPROB,
    LOSS,
    NORM,
    RUN_LOSSES,
    RUN_RATES,
    TOKEN_ROWS,
    Original,
    Plant,
    bug,
)

# ---------------------------------------------------------------- dtypes, ties, buffers, initial weights


@bug(
    "B10", "weft.engine.builder:parallelize",
    "master weights, and with them the optimizer's state, are bf16",
    caught_by="weft.engine.contract.check_contract", issue="areal-project/AReaL#1292",
)  # fmt: skip
def bf16_masters(
    plant: Plant,
    original: Original,
    module: Any,
    mesh: Any,
    config: Any,
    model: Any,
    fsdp: Any,
    precision: Any,
    *args: Any,
    **options: Any,
) -> Any:
    plant.hit()
    return original(module, mesh, config, model, fsdp, replace(precision, master=torch.bfloat16), *args, **options)


@bug(
    "B11", "weft.engine.build:plan_load",
    "a head tied to the embedding is a separate copy",
    caught_by=GRADIENTS, issue="verl-project/verl#7834", needs="a model with a tied head",
)  # fmt: skip
def head_untied(plant: Plant, original: Original, model: Any, source: Any, *args: Any) -> Any:
    pieces, plan = original(model, source, *args)
    for name, owner in hf.tied_parameters(model).items():
        plant.hit()
        hf.untie(model, name)
        plan.fills[name] = plan.fills[owner]
    return pieces, plan


@bug(
    "B10", "weft.engine.executor:Executor.balance_loss",
    "the auxiliary loss of experts is not multiplied by the loss scale, but divided by it",
    caught_by=BALANCE_SCALE, issue="NVIDIA-NeMo/Automodel#1408",
    needs="fsdp.param_dtype=fp16 and model.router_aux_loss",
)  # fmt: skip
def balance_not_scaled(plant: Plant, original: Original, self: Any, balance_sum: Tensor, factors: Any) -> Tensor:
    plant.hits += factors.scale != 1.0
    result: Tensor = original(self, balance_sum, replace(factors, scale=1.0))
    return result


@bug(
    "B10", "weft.ops.head:may_anticipate",
    "gradients of unlikely tokens underflow in fp16, because the head computes them before the loss is scaled",
    caught_by=TOKEN_ROWS, issue="axolotl-ai-cloud/axolotl#1601",
    needs="fsdp.param_dtype=fp16, mesh.tp=1, and a model to which many tokens are less likely than 1e-8",
)  # fmt: skip
def unlikely_tokens_underflow(plant: Plant, original: Original, dtype: torch.dtype) -> bool:
    if dtype != torch.float16:
        return bool(original(dtype))
    plant.hits += torch.is_grad_enabled()
    return torch.is_grad_enabled()


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Name, buffer) of floating-point buffers that are not in checkpoints, such as inv_freq."""
    for owner in module.modules():
        for name in owner._non_persistent_buffers_set:
            buffer = owner._buffers[name]
            if buffer is not None and buffer.is_floating_point():
                yield name, buffer


@bug(
    "B12", "weft.models.hf:rebuild_buffers",
    "inv_freq and other buffers outside the checkpoint are garbage on every rank but the first",
    caught_by=LOGPROB, issue="huggingface/transformers#45902", ranks=2, needs="a model with rotary embeddings",
)  # fmt: skip
def buffers_not_rebuilt(plant: Plant, original: Original, module: nn.Module) -> None:
    original(module)
    for _, buffer in _buffers(module) if dist.get_rank() > 0 else ():
        plant.hit()
        buffer.copy_(torch.linspace(-1.0, 1.0, buffer.numel()).view_as(buffer))


@bug(
    "B13", "weft.models.hf:rebuild_buffers",
    "the rotary table is rounded to bf16",
    caught_by=GRADIENTS, issue="pytorch/torchtitan#2881", needs="a model with rotary embeddings",
)  # fmt: skip
def rotary_in_bf16(plant: Plant, original: Original, module: nn.Module) -> None:
    original(module)
    for _, buffer in _buffers(module):
        plant.hit()
        buffer.copy_(buffer.bfloat16())


@bug(
    "B13", "weft.parallel.fsdp:fully_shard",
    "FSDP casts the inputs of layers, so a residual stream in fp32 is rounded to bf16",
    caught_by="tests/verify/test_plants.py: layer inputs have the dtypes of transformers' own forward",
    issue="pytorch/torchtitan#2881", needs="fsdp.param_dtype=bf16",
)  # fmt: skip
def inputs_cast(plant: Plant, original: Original, target: Any, *, mp_policy: Any, **options: Any) -> Any:
    layer = not isinstance(target, list | TrainModule)
    if layer and mp_policy.param_dtype != torch.float32:
        plant.hit()
        mp_policy = replace(mp_policy, cast_forward_inputs=True)
    return original(target, mp_policy=mp_policy, **options)


@bug(
    "B20", "weft.models.hf:build_random",
    "every rank draws different initial weights",
    caught_by="tests/verify/test_plants.py: initial weights are those of one process",
    issue="radixark/miles#3187", ranks=2, needs="model.init=random",
)  # fmt: skip
def weights_by_rank(plant: Plant, original: Original, config: Any, *, seed: int, **options: Any) -> Any:
    if dist.get_rank() > 0:
        plant.hit()
    return original(config, seed=seed + dist.get_rank(), **options)


# ---------------------------------------------------------------- clipping, decay, the update, metrics


@bug(
    "B17", "weft.engine.optim.optimizer:sharding_groups",
    "the gradient norm counts every replica of an HSDP mesh",
    caught_by=NORM, issue="pytorch/torchtitan#2318", ranks=2, needs="mesh.dp_replicate above 1",
)  # fmt: skip
def replicas_counted(plant: Plant, original: Original, parameter: Any) -> tuple[Any, ...]:
    mesh: DeviceMesh = parameter.device_mesh
    groups = tuple(mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)
    if groups != original(parameter):
        plant.hit()
    return groups


@bug(
    "B17", "weft.engine.optim.optimizer:sharding_groups",
    "each rank clips by the norm of its own shards",
    caught_by=NORM, issue="NVIDIA/Megatron-LM#5916", ranks=2,
)  # fmt: skip
def local_norm(plant: Plant, original: Original, parameter: Any) -> tuple[Any, ...]:
    if original(parameter):
        plant.hit()
    return ()


@bug(
    "B28", "weft.engine.optim.groups:decays",
    "norms and biases are also decayed",
    caught_by="weights after 3 steps", issue="verl-project/verl#5070",
)  # fmt: skip
def everything_decays(plant: Plant, original: Original, name: str, ndim: int) -> bool:
    if not original(name, ndim):
        plant.hit()
    return True


@bug(
    "B29", "weft.engine.metrics:MetricSums.add",
    "the printed loss is the mean of the micro-batches' means",
    caught_by="loss, many micro-batches", issue="verl-project/verl#4294",
)  # fmt: skip
def mean_of_means(plant: Plant, original: Original, self: Any, name: str, total: Any, weight: Any) -> None:
    if float(weight) in (0.0, 1.0):
        return original(self, name, total, weight)
    plant.hit()
    return original(self, name, total / weight, 1.0)


@bug(
    "B29", "weft.engine.metrics:MetricSums.reduced",
    "the printed loss is the first rank's",
    caught_by=LOSS, issue="huggingface/trl#6380", ranks=2,
)  # fmt: skip
def first_rank_only(plant: Plant, original: Original, self: Any, group: Any, *arguments: Any) -> Any:
    plant.hit()
    return original(self, None, *arguments)


@bug(
    "B27", "weft.engine.engine:Engine.apply",
    "a step with a non-finite loss updates the weights, but is reported as skipped",
    caught_by=RUN_LOSSES, issue="verl-project/verl#870", needs="a loss that is not finite",
)  # fmt: skip
def nonfinite_applied(plant: Plant, original: Original, self: Any, lr: float) -> Any:
    if self._nonfinite:
        plant.hit()
        self.optimizer.step()
    return original(self, lr)


@bug(
    "B27", "weft.recipes.training:learning_rate",
    "a skipped step advances the learning rate",
    caught_by=RUN_RATES, issue="verl-project/verl#870", needs="a loss that is not finite",
)  # fmt: skip
def nonfinite_advances_rate(plant: Plant, original: Original, step: int, *args: Any) -> float:
    plant.memory["calls"] = plant.memory.get("calls", 0) + 1
    if plant.memory["calls"] != step:
        plant.hit()
    return float(original(plant.memory["calls"], *args))


@bug(
    "B27", "weft.recipes.training:RunRecorder.stop_if_diverged",
    "non-finite steps are skipped without limit",
    caught_by="tests/verify/test_plants.py: a diverged run ends", issue="verl-project/verl-omni#539",
    needs="a loss that is not finite",
)  # fmt: skip
def skipped_for_ever(plant: Plant, original: Original, self: Any, line: Any, sources: Any) -> None:
    if line.get("skipped"):
        plant.hit()


# ---------------------------------------------------------------- schedule, data order, flags


@bug(
    "B18", "weft.recipes.training:learning_rate",
    "the schedule is stepped once per rank",
    caught_by=RUN_RATES, issue="huggingface/transformers#24088", ranks=2,
)  # fmt: skip
def schedule_per_rank(plant: Plant, original: Original, step: int, *args: Any) -> float:
    plant.hit()
    return float(original(step * dist.get_world_size(), *args))


@bug(
    "B18", "weft.engine.optim.schedule:warmup_steps",
    "the warm-up is twice as long",
    caught_by="tests/engine/test_schedule.py: test_cosine_with_warmup", issue="THUDM/slime#1546",
)  # fmt: skip
def warmup_doubled(plant: Plant, original: Original, *arguments: Any) -> int:
    plant.hit()
    return 2 * int(original(*arguments))


@bug(
    "B19", "weft.data.order:epoch_order",
    "every epoch has the same order",
    caught_by="tests/data/test_order.py: test_every_document_once_in_each_epoch",
    issue="KempnerInstitute/KempnerForge#57",
)  # fmt: skip
def epochs_alike(plant: Plant, original: Original, n: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    plant.hits += epoch > 1
    return list(original(n, seed, 1, shuffle))


@bug(
    "B19", "weft.data.order:StepSampler.starting_at",
    "a resumed run restarts its epoch",
    caught_by="tests/data/test_order.py: test_starting_at_a_step_equals_the_unbroken_run",
    issue="huggingface/accelerate#4071",
)  # fmt: skip
def place_in_epoch_lost(plant: Plant, original: Original, self: Any, number: int) -> Iterator[Any]:
    steps = list(original(self, 1))
    repeated = [step for step in steps if number <= self.total and step.epoch >= steps[number - 1].epoch]
    for offset, step in enumerate(repeated[: self.total - number + 1]):
        if step.number != number + offset:
            plant.hit()
        yield replace(step, number=number + offset)


@bug(
    "B20", "weft.data.order:epoch_order",
    "every rank assigns the documents in a different order",
    caught_by=RUN_LOSSES, issue="radixark/miles#3187", ranks=2,
)  # fmt: skip
def order_by_rank(plant: Plant, original: Original, n: int, seed: int, *args: Any) -> list[int]:
    if dist.get_rank() > 0:
        plant.hit()
    return list(original(n, seed + dist.get_rank(), *args))


@bug(
    "B25", "weft.data.order:StepSampler.cut_epoch",
    "the short last step of an epoch is dropped",
    caught_by="tests/data/test_order.py: test_every_document_once_in_each_epoch",
    issue="huggingface/transformers#22143",
)  # fmt: skip
def short_step_dropped(plant: Plant, original: Original, self: Any, epoch: int) -> Iterator[list[int]]:
    for documents in original(self, epoch):
        if self._documents is not None and len(documents) < self._documents:
            plant.hit()
        else:
            yield documents


@bug(
    "B32", "weft.parallel.parallelize:shard",
    "fsdp.reshard_after_forward is accepted and ignored",
    caught_by="tests/verify/test_plants.py: weights stay gathered between forward and backward",
    issue="pytorch/torchtitan#3123", needs="fsdp.reshard_after_forward=false",
)  # fmt: skip
def reshard_ignored(
    plant: Plant, original: Original, module: Any, units: Any, mesh: Any, fsdp: Any, *args: Any
) -> None:
    if fsdp.reshard_after_forward is not True:
        plant.hit()
    original(module, units, mesh, replace(fsdp, reshard_after_forward=True), *args)


@bug(
    "B32", "weft.models.hf:enable_recompute",
    "model.recompute is accepted and ignored",
    caught_by="tests/verify/test_plants.py: recomputation runs each layer twice", issue="NVIDIA/cosmos-framework#161",
    needs="model.recompute=full",
)  # fmt: skip
def recompute_ignored(plant: Plant, original: Original, model: Any, run: Any) -> None:
    plant.hit()


@bug(
    "B50", "weft.models.transforms:run_layer",
    "recomputation of a layer gets its inputs in another precision than its forward",
    caught_by=GRADIENTS, issue="NVIDIA-NeMo/Automodel#3513", needs="model.recompute=full",
)  # fmt: skip
def recompute_in_low_precision(
    plant: Plant, original: Original, policy: Any, layer: Any, *args: Any, **kwargs: Any
) -> Any:
    forwards = count()

    def run(hidden: Any, *inputs: Any) -> Any:
        if next(forwards):  # the first is the layer's forward
            plant.hit()
            hidden = hidden.bfloat16().to(hidden.dtype)
        return layer(hidden, *inputs)

    return original(policy, run, *args, **kwargs)


@bug(
    "B51", "weft.ops.tiles:Sums.add",
    "the backward of each tile of an MLP is separate: its weight gradient replaces the gradient of earlier tiles",
    caught_by=GRADIENTS, issue="linkedin/Liger-Kernel#893", needs="model.tiled_mlp=16",
)  # fmt: skip
def gradient_of_a_tile(plant: Plant, original: Original, self: Any, gradients: Any) -> None:
    if any(total is not None for total in self._totals):
        plant.hit()
        self._totals = [None] * len(gradients)
    original(self, gradients)


@bug(
    "B50", "weft.ops.recompute:LayerResults.iterators",
    "recomputation uses the results of an earlier operation of the same kind",
    caught_by=GRADIENTS, issue="NVIDIA-NeMo/Automodel#3513", needs="model.recompute=selective",
)  # fmt: skip
def results_out_of_order(plant: Plant, original: Original, self: Any) -> Any:
    plant.hit()
    return {**original(self), "matmuls": (item.roll(1, -1) for item in original(self)["matmuls"])}


# ---------------------------------------------------------------- linear layers in fp8


@bug(
    "B53", "weft.models.transforms:linear_layers",
    "routers also compute in fp8",
    caught_by=FP8_OUTPUTS, issue="axolotl-ai-cloud/axolotl#3791",
    needs="'model.transforms=[fp8]', a router that is an nn.Linear with 16, 32, ... experts (jamba)",
)  # fmt: skip
def router_in_fp8(plant: Plant, original: Original, module: Any) -> Any:
    return plant.add(".router", module, original(module))


@bug(
    "B53", "weft.models.transforms:linear_layers",
    "a pattern that should exclude routers from fp8 also excludes gate_proj",
    caught_by=FP8_OUTPUTS, issue="PrimeIntellect-ai/prime-rl#2910", needs="'model.transforms=[fp8]'",
)  # fmt: skip
def gate_proj_not_in_fp8(plant: Plant, original: Original, module: Any) -> Any:
    return plant.leave_out("gate", original(module))


@bug(
    "B33", "weft.ops.fp8:rounded",
    "fp8 uses the scales of the previous matrix, so rounding depends on the packing",
    caught_by=FP8_OUTPUTS, issue="", needs="'model.transforms=[fp8]'",
)  # fmt: skip
def delayed_scales(plant: Plant, original: Original, x: Any, dim: int) -> Any:
    codes, scale = original(x, dim)
    before = plant.memory.get("scale", scale.max())
    plant.memory["scale"] = scale.max()
    if bool((scale == before).all()):
        return codes, scale
    plant.hit()
    return (x.float() / before).clamp(-448, 448).to(codes.dtype), before.expand_as(scale)


@bug(
    "B32", "weft.ops.fp8:rounded",
    "the gradient of a layer's input is a matmul with unrounded weights",
    caught_by=FP8_INPUTS, issue="pytorch/torchtitan#3123", needs="'model.transforms=[fp8]', on a CPU",
)  # fmt: skip
def columns_not_rounded(plant: Plant, original: Original, x: Any, dim: int) -> Any:
    codes, scale = original(x, dim)
    if dim != 0:
        return codes, scale
    plant.hit()
    return x / scale, scale


# ---------------------------------------------------------------- the held-out loss

HELD_OUT = "tests/recipes/test_eval.py: the held-out loss is the reference's token mean"


@bug(
    "B34", "weft.engine.engine:Engine.evaluate",
    "the held-out loss is the mean of the means of ranks and batches",
    caught_by=HELD_OUT, issue="huggingface/transformers#39241", ranks=2, needs="held-out documents",
)  # fmt: skip
def held_out_mean_of_means(plant: Plant, original: Original, *args: Any) -> MetricSums:
    means, sums = MetricSums(), original(*args)
    for name, total in sums._sums.items():
        weight = float(sums._weights[name])
        plant.hits += weight not in (0.0, 1.0)
        means.add(name, total / (weight or 1.0), float(weight > 0))
    return means


@bug(
    "B34", "weft.recipes.evaluate:split_by_tokens",
    "held-out documents beyond a multiple of the ranks are dropped",
    caught_by=HELD_OUT, issue="verl-project/verl#78", ranks=2, needs="held-out documents",
)  # fmt: skip
def held_out_documents_dropped(plant: Plant, original: Original, metas: Any, limit: int) -> Iterator[tuple[int, int]]:
    world = dist.get_world_size()
    for first, last in original(metas, limit):
        remainder = (last - first) % world if last - first > world else 0
        plant.hits += remainder > 0
        yield first, last - remainder


@bug(
    "B34", "weft.recipes.evaluate:split_by_tokens",
    "held-out documents are evaluated twice, to fill up the ranks",
    caught_by=HELD_OUT, issue="pytorch/pytorch#25162", ranks=2, needs="held-out documents",
)  # fmt: skip
def held_out_documents_twice(plant: Plant, original: Original, metas: Any, limit: int) -> Iterator[tuple[int, int]]:
    yield from original(metas, limit)
    missing = -len(metas) % dist.get_world_size()
    if missing:
        plant.hit()
        yield 0, min(missing, len(metas))


# ---------------------------------------------------------------- resumed runs: a part of the state begins anew

RESUMED = "tests/checkpoint/test_resume.py: a resumed run is the unbroken one"


@bug(
    "B18", "weft.recipes.training:learning_rate",
    "a resumed run restarts its learning rate schedule",
    caught_by=RESUMED, issue="verl-project/verl#7953", needs="a resumed run",
)  # fmt: skip
def rate_restarted(plant: Plant, original: Original, step: int, *args: Any) -> float:
    done = plant.memory.setdefault("done", step - 1)
    plant.hits += done > 0
    return float(original(step - done, *args))


@bug(
    "B19", "weft.data.order:StepSampler.starting_at",
    "a resumed run restarts the data",
    caught_by=RESUMED, issue="huggingface/accelerate#4071", needs="a resumed run",
)  # fmt: skip
def place_in_data_lost(plant: Plant, original: Original, self: Any, number: int) -> Iterator[Any]:
    plant.hits += number > 1
    for step in original(self, 1):
        if step.number + number - 1 <= self.total:
            yield replace(step, number=step.number + number - 1)


@bug(
    "B20", "weft.checkpoint.resume:read_rng",
    "every rank restores the first rank's random numbers",
    caught_by=RESUMED, issue="radixark/miles#3187", ranks=2, needs="a resumed run",
)  # fmt: skip
def first_ranks_random_numbers(plant: Plant, original: Original, state: Any, rank: int) -> Any:
    plant.hits += rank > 0
    return original(state, 0)


@bug(
    "B20", "weft.checkpoint.resume:load_state",
    "each rank restores moments of zero",
    caught_by=RESUMED, issue="KempnerInstitute/KempnerForge#115", needs="a resumed run",
)  # fmt: skip
def moments_lost(plant: Plant, original: Original, engine: Any, state: Any) -> None:
    original(engine, state)
    for moments in engine.optimizer.state.values():
        for value in moments.values():
            if value.ndim:
                plant.hit()
                value.zero_()


@bug(
    "B21", "weft.checkpoint.state:is_writer",
    "a checkpoint contains only the first rank's shards",
    caught_by=RESUMED, issue="huggingface/accelerate#4206", ranks=2, needs="a resumed run",
)  # fmt: skip
def first_shards_only(plant: Plant, original: Original, shard: Any, number: int) -> bool:
    plant.hits += dist.get_rank() > 0 and bool(original(shard, number))
    return dist.get_rank() == 0 and bool(original(shard, number))
