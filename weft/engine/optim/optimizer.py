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
    """The optimizer over the parameters that require a gradient: one of OPTIMIZERS, or `rule`.

    rule: the optimizer of config.name, if that is an import path. all_parameters: parameters of the whole model, if
    named_parameters are those of a pipeline stage. placements: default: nothing is divided by tp or ep. matrices: for
    Muon (matrices.py). seed: of what is rounded at random. Parameters with different treatment or different meshes are
    in different groups, because torch's list kernels take one mesh at a time. State has the sharding of its parameter.
    `set_learning_rate` sets the rate before each step; parameters without a gradient are skipped.
    """
    named_parameters = list(named_parameters)
    names = {parameter: name for name, parameter in reversed(named_parameters)}
    groups: dict[tuple[ParamGroupRule, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter, treatment in param_group_rules(named_parameters, config).items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) and rule is None else None
        groups.setdefault((treatment, mesh), []).append(parameter)
    settings: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": treatment.weight_decay, "lr_scale": treatment.lr_scale}
        for (treatment, _), parameters in groups.items()
    ]
    if rule is not None:
        all_rules = (
            None if all_parameters is None else list(dict.fromkeys(param_group_rules(all_parameters, config).values()))
        )
        numbers = None if all_rules is None else [all_rules.index(treatment) for treatment, _ in groups]
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
    """The bytes of the optimizer's state of some elements of a tensor."""

    def count(name: str, shape: Sequence[int], elements: int) -> int:
        if rule is not None:
            return elements * sum(dtype.itemsize for dtype in rule.moments)
        tensor = WholeTensor(name, shape, name in matrices)
        return OPTIMIZERS[config.name].state_bytes(config, master, tensor, elements)

    return count


def lossy_parts(config: OptimizerConfig, master: torch.dtype) -> list[str]:
    """The inexact parts of the optimizer, as text. docs/how-to/optimizers.md has measured errors."""
    parts = []
    if config.name in OPTIMIZERS:
        state = {torch.int8: "in codes of 8 bits", torch.bfloat16: "rounded to bf16"}
        parts += [f"{state[dtype]}: not exact" for dtype in moments(config, master, None)[:1] if dtype in state]
    if master == torch.bfloat16:
        how = {"nearest": "to nearest", "stochastic": "at random", "kahan": "with what is lost kept in bf16"}
        rounding = config.rounding if config.name == "adamw" else "nearest"
        parts.append(f"masters rounded {how[rounding]}: not exact")
    return parts


def set_learning_rate(optimizer: torch.optim.Optimizer | ShardOptimizer, lr: float) -> None:
    """Set the rate of the next step: `lr` times each group's share."""
    set_rates(optimizer.param_groups, lr)


def stepped_by(
    optimizer: torch.optim.Optimizer | ShardOptimizer, parameter: nn.Parameter
) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """(Optimizer with torch's interface, the tensor that it updates: the parameter, or this rank's shard)."""
    return optimizer.stepped(parameter) if isinstance(optimizer, ShardOptimizer) else (optimizer, parameter)


def counters(optimizer: torch.optim.Optimizer | ShardOptimizer) -> dict[int, tuple[dict[str, Any], tuple[str, ...]]]:
    """Number of a group in the whole model -> (the parameter group, names of its entries that belong to the state)."""
    if not isinstance(optimizer, ShardOptimizer):
        return {}
    return {number: (group, optimizer.counters) for number, group in optimizer.numbered_groups.items()}


def parts_of_state(
    optimizer: torch.optim.Optimizer | ShardOptimizer, parameter: nn.Parameter, key: str
) -> tuple[tuple[int, ...], list[StatePart]] | None:
    """(Shape of the whole state tensor, this rank's parts of it); None for state of the parameter's shape, and for
    state that is equal on every rank."""
    return optimizer.parts_of(parameter, key) if isinstance(optimizer, LowBitAdamW) else None


def empty_state(optimizer: torch.optim.Optimizer | ShardOptimizer, parameter: nn.Parameter, key: str) -> Tensor | None:
    """This rank's part of a state tensor before the first step, where the optimizer itself decides on it."""
    if not isinstance(optimizer, LowBitAdamW) or key not in optimizer.keys_of(parameter):
        return None
    return optimizer.empty_state(parameter, key)


def stepped_on_device(optimizer: torch.optim.Optimizer | ShardOptimizer) -> set[nn.Parameter]:
    """Parameters whose scalars in the state (`step`) must be on the parameter's device instead of the host."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {parameter for group in groups for parameter in group["params"]}


@torch.no_grad()
def unscale_gradients(named_parameters: NamedParameters, scale: float) -> None:
    """Divide the gradients by the loss scale."""
    multiply_gradients((parameter for _, parameter in named_parameters), 1.0 / scale)


@dataclass(frozen=True)
class OtherStages:
    """The stages of a pipeline. borrowed: names of parameters of this rank that another stage counts."""

    group: dist.ProcessGroup
    borrowed: frozenset[str]


@torch.no_grad()
def clip_gradients(
    named_parameters: NamedParameters,
    max_norm: float | None,
    cuts: ShardSpecs | None = None,
    pp: OtherStages | None = None,
) -> float:
    """Scale the gradients to a global L2 norm of at most `max_norm`; returns the norm before.

    The factor is min(1, max_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_. max_norm=None only measures.
    Gradients with a non-finite norm stay as they are. cuts: how tp and ep divide parameters. Collective, with the same
    parameters on every rank of a stage.
    """
    named = list(named_parameters)
    norm = global_norm(named, cuts, pp)
    multiply_gradients((parameter for _, parameter in named), clipping_factor(norm, max_norm))
    return norm


@torch.no_grad()
def multiply_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply the gradients that there are by a number."""
    gradients = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if factor == 1.0 or not gradients:
        return
    if gradients[0].is_cpu:  # where the list kernel rounds the factor to bf16 first (torch 2.13)
        for gradient in gradients:
            gradient.mul_(factor)
    else:
        torch._foreach_mul_(gradients, factor)


def clipping_factor(norm: float, max_norm: float | None) -> float:
    """The factor by which clip_gradients multiplies gradients of this norm; 1.0 leaves them unchanged."""
    return 1.0 if max_norm is None or not math.isfinite(norm) else min(1.0, max_norm / (norm + 1e-6))


def clipping_divisor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """What clip_gradients divides by, on the device; None if nothing is clipped."""
    return None if max_norm is None else ((norm + 1e-6) / max_norm).clamp(min=1.0).float()


@torch.no_grad()
def global_norm(
    named_parameters: NamedParameters,
    cuts: ShardSpecs | None = None,
    pp: OtherStages | None = None,
    early: EarlyNorms | None = None,
) -> float:
    """L2 norm of all gradients together, equal on every rank. early: norms that are known already."""
    return float(read(device_norm(named_parameters, cuts, pp, early)[None], lambda: [1.0])[0])


@torch.no_grad()
def device_norm(
    named_parameters: NamedParameters,
    cuts: ShardSpecs | None = None,
    pp: OtherStages | None = None,
    early: EarlyNorms | None = None,
) -> Tensor:
    """As `global_norm`: a scalar, fp64, on the parameters' device. Sharded elements and elements that ranks of tp, or
    stages, replicate count once. Sums of squares are all-reduced once per mesh axis on which a gradient is sharded, and
    then over the stages."""
    # Keyed by the parameters and not by the gradients at hand, so that all ranks make the same collectives.
    shards: dict[tuple[tuple[dist.ProcessGroup, ...], int], list[_Part]] = {}
    device = torch.device("cpu")
    for name, parameter in named_parameters:
        if pp is not None and name in pp.borrowed:
            continue
        groups, device = sharding_groups(parameter), parameter.device
        local = [] if parameter.grad is None else counted_parts(name, parameter, cuts)
        cut = None if cuts is None else cuts.get(name)
        numbers: tuple[int, ...] = (1,)
        if cut is not None:
            groups, numbers = (*groups, *(process_group(ranks) for ranks in cut.axes)), cut.copies
        for copies in numbers:
            shards.setdefault((groups, copies), [])
        known = None if early is None else early.known(parameter)
        for number, (copies, part) in enumerate(local):
            shards[groups, copies].append((part, None if known is None else known[number]))
    if not shards and pp is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    squares = {key: _sum_of_squares(parts, device) / key[1] for key, parts in shards.items()}
    for group in dict.fromkeys(group for groups, _ in squares for group in groups):
        keys = [key for key in squares if group in key[0]]
        part = torch.stack([squares[key] for key in keys])
        with waiting():
            dist.all_reduce(part, group=group)
        squares |= zip(keys, part.unbind(), strict=True)
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


# Elements of a gradient, and the norms of their pieces if these are known.
_Part = tuple[Tensor, list[Tensor] | None]


def _sum_of_squares(parts: Sequence[_Part], device: torch.device) -> Tensor:
    """The sum of the squares of all elements, computed from norms in fp32 or better: a scalar, fp64, on `device`."""
    pieces = [[] if norms is not None else _pieces(part) for part, norms in parts]
    to_compute = [piece for of_part in pieces for piece in of_part]
    computed = iter(torch._foreach_norm(to_compute, 2.0, dtype=norm_dtype(to_compute[0])) if to_compute else ())
    all_norms = [
        norm
        for (_, norms), of_part in zip(parts, pieces, strict=True)
        for norm in ([next(computed) for _ in of_part] if norms is None else norms)
    ]
    if not all_norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(all_norms).double().square().sum()


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.numel() == 0:
        return ()
    return tensor.reshape(-1).split(CPU_CHUNK) if device_kind(tensor.device) == "cpu" else (tensor,)


class Ema:
    """Exponential moving average of the trained weights: e_0 = w_0, and e_t = d e_(t-1) + (1 - d) w_t after update t,
    with d = optimizer.ema_decay (as torch.optim.swa_utils).

    Each rank keeps the average of its shards in fp32, beside the masters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        """Start with the present weights."""
        self.decay = decay
        self.shards: dict[nn.Parameter, Tensor] = {
            parameter: local_shard(parameter.detach()).to(torch.float32, copy=True)
            for parameter in parameters
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Include the present weights."""
        weights = [local_shard(parameter).float() for parameter in self.shards]
        torch._foreach_lerp_(list(self.shards.values()), weights, 1.0 - self.decay)
