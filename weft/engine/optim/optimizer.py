"""The optimizer of a run, and clipping by the global gradient norm.

Parameters are plain tensors or DTensors (FSDP2), on one mesh or several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from weft.config.schema import OptimizerConfig
from weft.engine.optim.adafactor import ADAFACTOR
from weft.engine.optim.adamw import ADAMW
from weft.engine.optim.custom_optimizer import CustomOptimizerSpec, ShardOptimizer
from weft.engine.optim.early_norms import CPU_CHUNK, EarlyNorms, counted_parts, norm_dtype
from weft.engine.optim.groups import NamedParameters, ParamGroupRule, param_group_rules, set_rates
from weft.engine.optim.kinds import MatrixBoxes, OptimizerKind, ParameterSet, WholeTensor
from weft.engine.optim.lion import LION
from weft.engine.optim.low_bit import LowBitAdamW, StatePart
from weft.engine.optim.muon import MUON
from weft.engine.optim.placement import Placements
from weft.engine.optim.sgd import SGD
from weft.launch.simulated import device_kind, read
from weft.launch.timing import waiting
from weft.ops.communicator import process_group
from weft.parallel.memory import StateBytes
from weft.parallel.mesh import local_shard
from weft.parallel.shards.cuts import ShardSpecs

OPTIMIZERS: dict[str, OptimizerKind] = {
    "adafactor": ADAFACTOR, "adamw": ADAMW, "lion": LION, "muon": MUON, "sgd": SGD,
}  # fmt: skip


def build_optimizer(
    named_parameters: NamedParameters,
    config: OptimizerConfig,
    rule: CustomOptimizerSpec | None = None,
    all_parameters: NamedParameters | None = None,
    placements: Placements | None = None,
    matrices: MatrixBoxes | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer | ShardOptimizer:
    """The optimizer for the parameters that require a gradient: one of OPTIMIZERS, or `rule`.

    rule: the optimizer at the import path config.name, or None if the name is in OPTIMIZERS. all_parameters: parameters
    of the full model, if named_parameters are only one pipeline stage's. placements: the default is for parameters that
    neither tp nor ep shards. matrices: for Muon (matrices.py). seed: for stochastic rounding.

    A group has one rule and one mesh, because torch's list kernels accept tensors of one mesh only. State is sharded
    like its parameter. Call `set_learning_rate` before each step. Parameters without a gradient are skipped.
    """
    named_parameters = list(named_parameters)
    names = {parameter: name for name, parameter in reversed(named_parameters)}
    groups: dict[tuple[ParamGroupRule, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter, group_rule in param_group_rules(named_parameters, config).items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) and rule is None else None
        groups.setdefault((group_rule, mesh), []).append(parameter)
    settings: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": group_rule.weight_decay, "lr_scale": group_rule.lr_scale}
        for (group_rule, _), parameters in groups.items()
    ]
    if rule is not None:
        all_rules = (
            None if all_parameters is None else list(dict.fromkeys(param_group_rules(all_parameters, config).values()))
        )
        numbers = None if all_rules is None else [all_rules.index(group_rule) for group_rule, _ in groups]
        return ShardOptimizer(settings, rule, numbers)
    assert config.name in OPTIMIZERS, config.name
    return OPTIMIZERS[config.name].build(
        config, ParameterSet(settings, names, placements or Placements({}), matrices or {}, seed)
    )


def moments(config: OptimizerConfig, master: torch.dtype, rule: CustomOptimizerSpec | None) -> tuple[torch.dtype, ...]:
    """Dtypes of the state tensors that have a matrix's shape, one entry per tensor."""
    return OPTIMIZERS[config.name].moments(config, master) if rule is None else rule.moments


def state_bytes(
    config: OptimizerConfig, master: torch.dtype, rule: CustomOptimizerSpec | None, matrices: MatrixBoxes
) -> StateBytes:
    """A function: (name, shape, number of elements held) of a tensor -> bytes of the optimizer state for them."""

    def count(name: str, shape: Sequence[int], elements: int) -> int:
        if rule is not None:
            return elements * sum(dtype.itemsize for dtype in rule.moments)
        tensor = WholeTensor(name, shape, name in matrices)
        return OPTIMIZERS[config.name].state_bytes(config, master, tensor, elements)

    return count


def lossy_parts(config: OptimizerConfig, master: torch.dtype) -> list[str]:
    """Texts that describe the inexact parts of the optimizer. docs/how-to/optimizers.md has measured errors."""
    texts = []
    if config.name in OPTIMIZERS:
        state = {torch.int8: "state in 8-bit codes", torch.bfloat16: "state rounded to bf16"}
        texts += [f"{state[dtype]}: not exact" for dtype in moments(config, master, None)[:1] if dtype in state]
    if master == torch.bfloat16:
        roundings = {
            "nearest": "to nearest", "stochastic": "stochastically", "kahan": "with the rounding errors kept in bf16",
        }  # fmt: skip
        rounding = config.rounding if config.name == "adamw" else "nearest"
        texts.append(f"master weights rounded {roundings[rounding]}: not exact")
    return texts


def set_learning_rate(optimizer: torch.optim.Optimizer | ShardOptimizer, lr: float) -> None:
    """Set the learning rate of the next step: `lr` x the lr_scale of each group."""
    set_rates(optimizer.param_groups, lr)


def stepped_by(
    optimizer: torch.optim.Optimizer | ShardOptimizer, parameter: nn.Parameter
) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """(The optimizer with torch's interface, the tensor that it updates). The tensor is the parameter, or this rank's
    shard of it for an optimizer by import path."""
    return optimizer.stepped(parameter) if isinstance(optimizer, ShardOptimizer) else (optimizer, parameter)


def counters(optimizer: torch.optim.Optimizer | ShardOptimizer) -> dict[int, tuple[dict[str, Any], tuple[str, ...]]]:
    """Index of a group in the full model -> (the parameter group, names of its entries that are state)."""
    if not isinstance(optimizer, ShardOptimizer):
        return {}
    return {number: (group, optimizer.counters) for number, group in optimizer.numbered_groups.items()}


def parts_of_state(
    optimizer: torch.optim.Optimizer | ShardOptimizer, parameter: nn.Parameter, key: str
) -> tuple[tuple[int, ...], list[StatePart]] | None:
    """(Shape of the full state tensor, this rank's parts of it). None for state with the parameter's shape, and for
    state that is equal on every rank."""
    return optimizer.parts_of(parameter, key) if isinstance(optimizer, LowBitAdamW) else None


def empty_state(optimizer: torch.optim.Optimizer | ShardOptimizer, parameter: nn.Parameter, key: str) -> Tensor | None:
    """This rank's part of a state tensor before the first step, or None if the optimizer does not define it."""
    if not isinstance(optimizer, LowBitAdamW) or key not in optimizer.keys_of(parameter):
        return None
    return optimizer.empty_state(parameter, key)


def stepped_on_device(optimizer: torch.optim.Optimizer | ShardOptimizer) -> set[nn.Parameter]:
    """Parameters whose state scalars (`step`) must be on the parameter's device, not on the host."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {parameter for group in groups for parameter in group["params"]}


@torch.no_grad()
def unscale_gradients(named_parameters: NamedParameters, scale: float) -> None:
    """Divide the gradients by the loss scale."""
    multiply_gradients((parameter for _, parameter in named_parameters), 1.0 / scale)


@dataclass(frozen=True)
class OtherStages:
    """The stages of a pipeline. group: this rank and its peers in other stages. counted_elsewhere: names of this rank's
    parameters that another stage counts, such as tied embeddings."""

    group: dist.ProcessGroup
    counted_elsewhere: frozenset[str]


@torch.no_grad()
def clip_gradients(
    named_parameters: NamedParameters,
    max_norm: float | None,
    cuts: ShardSpecs | None = None,
    pp: OtherStages | None = None,
) -> float:
    """Scale the gradients to a global L2 norm of at most `max_norm`. Returns the norm before scaling.

    The factor is min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_. With max_norm=None, or if the
    norm is not finite, gradients do not change. cuts: how tp and ep shard parameters. Collective, with the same
    parameters on every rank of a stage.
    """
    named = list(named_parameters)
    norm = global_norm(named, cuts, pp)
    multiply_gradients((parameter for _, parameter in named), clipping_factor(norm, max_norm))
    return norm


@torch.no_grad()
def multiply_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all existing gradients by a number."""
    gradients = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if factor == 1.0 or not gradients:
        return
    if gradients[0].is_cpu:  # torch._foreach_mul_ on CPU first rounds the factor to the dtype of bf16 tensors (2.13)
        for gradient in gradients:
            gradient.mul_(factor)
    else:
        torch._foreach_mul_(gradients, factor)


def clipping_factor(norm: float, max_norm: float | None) -> float:
    """The factor by which clip_gradients multiplies gradients of this norm; 1.0 leaves them unchanged."""
    return 1.0 if max_norm is None or not math.isfinite(norm) else min(1.0, max_norm / (norm + 1e-6))


def clipping_divisor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """The number by which clip_gradients divides gradients of this norm, an fp32 scalar on the device. None without
    clipping."""
    return None if max_norm is None else ((norm + 1e-6) / max_norm).clamp(min=1.0).float()


@torch.no_grad()
def global_norm(
    named_parameters: NamedParameters,
    cuts: ShardSpecs | None = None,
    pp: OtherStages | None = None,
    early: EarlyNorms | None = None,
) -> float:
    """L2 norm of all gradients together, equal on every rank. early: norms that were computed during backward."""
    return float(read(device_norm(named_parameters, cuts, pp, early)[None], lambda: [1.0])[0])


@torch.no_grad()
def device_norm(
    named_parameters: NamedParameters,
    cuts: ShardSpecs | None = None,
    pp: OtherStages | None = None,
    early: EarlyNorms | None = None,
) -> Tensor:
    """`global_norm` as an fp64 scalar on the parameters' device, without waiting for the device.

    Every element counts once, also if several tp ranks or stages hold it. Sums of squares are all-reduced once per mesh
    axis on which gradients are sharded, and then over the stages.
    """
    # The keys come from the parameters, not from the gradients that exist here: every rank must call the same
    # collectives in the same order.
    shards: dict[tuple[tuple[dist.ProcessGroup, ...], int], list[_GradientPart]] = {}
    device = torch.device("cpu")
    for name, parameter in named_parameters:
        if pp is not None and name in pp.counted_elsewhere:
            continue
        groups, device = sharding_groups(parameter), parameter.device
        local = [] if parameter.grad is None else counted_parts(name, parameter, cuts)
        cut = None if cuts is None else cuts.get(name)
        numbers: tuple[int, ...] = (1,)
        if cut is not None:
            groups, numbers = (*groups, *(process_group(ranks) for ranks in cut.axes)), cut.copies
        for copies in numbers:
            shards.setdefault((groups, copies), [])
        early_norms = None if early is None else early.norms_of(parameter)
        for number, (copies, part) in enumerate(local):
            shards[groups, copies].append((part, None if early_norms is None else early_norms[number]))
    if not shards and pp is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    squares = {key: _sum_of_squares(parts, device) / key[1] for key, parts in shards.items()}
    for group in dict.fromkeys(group for groups, _ in squares for group in groups):
        keys = [key for key in squares if group in key[0]]
        stacked = torch.stack([squares[key] for key in keys])
        with waiting():
            dist.all_reduce(stacked, group=group)
        squares |= zip(keys, stacked.unbind(), strict=True)
    total = torch.stack([*squares.values(), torch.zeros((), dtype=torch.float64, device=device)]).sum()
    if pp is not None:
        with waiting():
            dist.all_reduce(total, group=pp.group)
    return total.sqrt()


def sharding_groups(parameter: nn.Parameter) -> tuple[dist.ProcessGroup, ...]:
    """The process groups whose ranks hold different elements of this parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    if parameter.grad is not None:
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == placements, parameter.grad
    assert not any(isinstance(placement, Partial) for placement in placements), placements
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(placements)
        if not isinstance(placement, Replicate) and mesh.size(axis) > 1
    )


# Elements of a gradient, and the norms of their chunks if backward has computed them.
_GradientPart = tuple[Tensor, list[Tensor] | None]


def _sum_of_squares(parts: Sequence[_GradientPart], device: torch.device) -> Tensor:
    """The sum of squares of all elements, computed from norms in fp32 or fp64: an fp64 scalar on `device`."""
    chunks = [[] if norms is not None else _chunks(part) for part, norms in parts]
    to_compute = [chunk for part_chunks in chunks for chunk in part_chunks]
    computed = iter(torch._foreach_norm(to_compute, 2.0, dtype=norm_dtype(to_compute[0])) if to_compute else ())
    all_norms = [
        norm
        for (_, norms), part_chunks in zip(parts, chunks, strict=True)
        for norm in ([next(computed) for _ in part_chunks] if norms is None else norms)
    ]
    if not all_norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(all_norms).double().square().sum()


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.numel() == 0:
        return ()
    return tensor.reshape(-1).split(CPU_CHUNK) if device_kind(tensor.device) == "cpu" else (tensor,)


class Ema:
    """Exponential moving average of the trained weights: e_0 = w_0, and e_t = d e_(t-1) + (1 - d) w_t after update t,
    with d = optimizer.ema_decay (as in torch.optim.swa_utils).

    Each rank keeps the average of its shards in fp32, in addition to the master weights.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        """Initialise the average with the current weights."""
        self.decay = decay
        self.shards: dict[nn.Parameter, Tensor] = {
            parameter: local_shard(parameter.detach()).to(torch.float32, copy=True)
            for parameter in parameters
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the average."""
        weights = [local_shard(parameter).float() for parameter in self.shards]
        torch._foreach_lerp_(list(self.shards.values()), weights, 1.0 - self.decay)
