"""Estimates the memory of weights, gradients and optimizer state from shapes, and gives advice before weights are
loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PretrainedConfig

from weft.config.schema import FsdpConfig, OptimizerConfig
from weft.errors import UserError
from weft.launch.machine import Accelerator
from weft.models import hf
from weft.parallel.mesh import Mesh
from weft.parallel.parallelize import Precision
from weft.parallel.shards.cuts import ShardSpecs, full_shape
from weft.parallel.units import Unit, parameters_by_unit
from weft.terminal import byte_count, counted

# (name of a tensor, its full shape, a number of its elements) -> bytes of optimizer state for these elements.
StateBytes = Callable[[str, Sequence[int], int], int]
SMALL = 0.4  # a model that takes at most this share of a device leaves enough memory for activations


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes per rank. Each number is the maximum over ranks, and is equal on all ranks.

    gathered: parameters that are gathered at the same time, in the compute dtype. unsharded: total without sharding,
    excluding `gathered`. average: the moving average of the weights (optimizer.ema_decay).
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    unsharded: int
    average: int = 0

    @property
    def resident(self) -> int:
        """Bytes at the end of a step, which include gradients."""
        return self.weights + self.gradients + self.optimizer + self.average

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("average", self.average),
        )
        words = " + ".join(f"{name} {byte_count(size)}" for name, size in parts if size)
        return f"{words} = {byte_count(self.resident)} a rank, gathered units {byte_count(self.gathered)}"


@dataclass(frozen=True)
class TrainingState:
    """Memory of training besides weights and gradients. state: computes the bytes of optimizer state. average: whether
    there is an fp32 moving average of the weights."""

    state: StateBytes
    average: bool = False


def memory_needs(
    module: nn.Module,
    units: Sequence[Unit],
    precision: Precision,
    training: TrainingState | None,
    reshard: bool | int = True,
    cuts: ShardSpecs | None = None,
) -> MemoryNeeds:
    """The memory of a sharded module, which may be on meta. training: None for inference. reshard:
    fsdp.reshard_after_forward. cuts: how tp and ep shard parameters."""
    named, parameters = list(module.named_parameters()), list(module.parameters())
    trained = [p for p in parameters if p.requires_grad and training is not None]
    master = precision.master.itemsize

    def moments(count: Callable[[nn.Parameter], int]) -> int:
        if training is None:
            return 0
        return sum(training.state(n, full_shape(n, p, cuts or {}), count(p)) for n, p in named if p.requires_grad)

    average = torch.float32.itemsize if training is not None and training.average else 0
    return MemoryNeeds(
        weights=sum(math.prod(_largest_shard(p)) * p.element_size() for p in parameters),
        gradients=_elements_on_rank(trained) * master,
        optimizer=moments(lambda p: _elements_on_rank([p])),
        gathered=_gathered(parameters, units, reshard, precision.compute.itemsize),
        unsharded=sum(p.numel() * p.element_size() for p in parameters)
        + sum(p.numel() for p in trained) * (master + average)
        + moments(nn.Parameter.numel),
        average=_elements_on_rank(trained) * average,
    )


@dataclass(frozen=True)
class HostNeeds:
    """Temporary host memory of one engine on a rank, in bytes. saved: the copy from which a checkpoint is written.
    asleep: the parts that are on the host while the engine sleeps."""

    saved: int
    asleep: int

    @staticmethod
    def estimate(
        needs: MemoryNeeds, *, adapters: bool, state: bool, replicas: int, parts: Collection[str]
    ) -> HostNeeds:
        """adapters: whether only trained parameters are saved. state: whether trainer state is also saved. replicas:
        number of ranks with equal tensors, which share the writing. parts: the parts that move to the host in sleep
        ("parameters", "optimizer")."""
        masters = needs.gradients if adapters else needs.weights  # trained parameters are as large as the gradients
        moments = needs.optimizer + needs.average
        slept = needs.weights * ("parameters" in parts) + moments * ("optimizer" in parts)
        return HostNeeds((masters + moments * state) // replicas, slept)


def host_bytes(engines: Sequence[HostNeeds]) -> int:
    """Size of the host pool that a rank's engines share (engine/host.py). The engines never save and sleep at the same
    time."""
    return max(sum(needs.saved for needs in engines), sum(needs.asleep for needs in engines))


def host_shortage(needed: int, ranks: int) -> str:
    """The end of a message if this machine has less than `needed` bytes free for each of its ranks, else "". ranks:
    total number of ranks."""
    local = local_ranks(ranks)
    free = psutil.virtual_memory().available // local
    if needed <= free:
        return ""
    return f", and this machine has {byte_count(free)} free for each of its {counted(local, 'rank')}"


def capacity(storage: torch.device, local_ranks: int, assumed: Accelerator | None = None) -> int:
    """Bytes available to a rank for its shards: of its accelerator, or its part of the host's memory. assumed: an
    accelerator to simulate."""
    if storage.type == "cuda" and assumed is not None:
        return assumed.memory
    if storage.type == "cuda":
        return int(torch.cuda.get_device_properties(storage).total_memory)
    total, limit = int(psutil.virtual_memory().total), Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
    return total // local_ranks


def local_ranks(world: int) -> int:
    """Number of ranks on this machine. world: total number of ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def check_fits(needs: MemoryNeeds, room: int, mesh: Mesh, fsdp: FsdpConfig, optimizer: OptimizerConfig) -> None:
    """Raise UserError, with up to three remedies, if a rank's shards do not fit even without activations. room: bytes
    available to a rank."""
    if needs.resident <= room:
        return
    raise UserError(
        f"the model does not fit: {needs}, without activations, but a rank has {byte_count(room)} of memory. "
        f"Set one of: {'; '.join(_remedies(mesh, fsdp, optimizer)[:3])}."
    )


def check_draws(elements: int, room: int) -> None:
    """Raise UserError if a rank has too little host memory to draw all initial weights in fp32. elements: of the
    model. room: bytes available to a rank."""
    drawn = elements * torch.float32.itemsize
    if drawn > room:
        raise UserError(
            f"model.init=random: each rank draws all weights of the model, {byte_count(drawn)}, but has "
            f"{byte_count(room)} of this machine's memory. Start fewer ranks per machine, use a smaller model, or "
            "initialise the weights once with transformers, save them, and set model.path to them."
        )


def hint(needs: MemoryNeeds, room: int, mesh: Mesh) -> str | None:
    """Advice if the full model easily fits into one accelerator, so that sharding only costs speed. Else None."""
    if mesh.shards == 1 or needs.unsharded > SMALL * room:
        return None
    return (
        f"the full model takes {byte_count(needs.unsharded)} of {byte_count(room)} on each device: "
        f"mesh.dp_replicate={mesh.loss_ranks // mesh.cp_size} mesh.dp_shard=1 is faster, because it gathers no weights"
    )


def _remedies(mesh: Mesh, fsdp: FsdpConfig, optimizer: OptimizerConfig) -> list[str]:
    remedies = []
    if mesh.dp_replicate > 1:
        remedies.append(f"mesh.dp_replicate=1 mesh.dp_shard={mesh.loss_ranks // mesh.cp_size} (shards over all ranks)")
    else:
        remedies.append(f"more ranks to shard over (mesh.dp_shard is {mesh.dp_shard})")
    if mesh.dp.device_type != "cpu" and not fsdp.cpu_offload:
        remedies.append("fsdp.cpu_offload=true (slow)")
    if optimizer.name == "adamw" and optimizer.state_dtype in ("auto", "fp32") and fsdp.master_dtype == "fp32":
        remedies.append("optimizer.state_dtype=int8 (not exact)")
    if fsdp.master_dtype == "fp32":
        remedies.append("fsdp.master_dtype=bf16 (small updates are lost)")
    if optimizer.ema_decay is not None:
        remedies.append("optimizer.ema_decay=null (no average)")
    return [*remedies, "lora.rank=16 or model.freeze (less is trained)", "a smaller model"]


def cache_bytes(config: PretrainedConfig, itemsize: int) -> int:
    """Upper bound on the bytes per token of a KV cache: keys and values of all layers. itemsize: bytes per element."""
    widths = 0.0
    for layer in hf.layer_configs(config):
        heads = layer.num_attention_heads
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        widths += (getattr(layer, "num_key_value_heads", None) or heads) * width
    return int(2 * widths * itemsize)


def _elements_on_rank(parameters: Iterable[nn.Parameter]) -> int:
    """The largest number of elements on a rank. (FSDP pads shards to equal numbers of rows.)"""
    return sum(math.prod(_largest_shard(parameter)) for parameter in parameters)


def _largest_shard(parameter: nn.Parameter) -> list[int]:
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                shape[placement.dim] = math.ceil(shape[placement.dim] / parameter.device_mesh.size(axis))
    return shape


def _gathered(parameters: Sequence[nn.Parameter], units: Sequence[Unit], reshard: bool | int, compute: int) -> int:
    """Bytes of parameters that are gathered at the same time. compute: bytes of an element in the compute dtype.
    Integer tensors, the codes of quantised weights, keep their dtype."""

    def elements(parameters: Iterable[nn.Parameter]) -> int:
        sharded = (p for p in parameters if isinstance(p, DTensor))  # FSDP does not gather plain tensors
        return sum(p.numel() * (compute if p.is_floating_point() else p.element_size()) for p in sharded)

    owned = [(elements(local), unit.keep) for unit, local in zip(units, parameters_by_unit(units), strict=True)]
    root = elements(parameters) - sum(count for count, _ in owned)
    return gathered_elements([*owned, (root, True)], reshard)


def gathered_elements(units: Iterable[tuple[int, bool]], reshard: bool | int) -> int:
    """Number of elements that are gathered at the same time: all units that stay gathered, and the two largest other
    units, because FSDP gathers the next unit while one runs.

    units: (elements, whether it stays gathered) of each unit and of the root. reshard: fsdp.reshard_after_forward. With
    a number n, 1/n of the other units stay gathered.
    """
    units = list(units)
    staying = sum(count for count, keep in units if keep)
    resharded = sorted((count for count, keep in units if not keep), reverse=True)
    if reshard is False:
        return staying + sum(resharded)
    partial = 0 if reshard is True else sum(resharded[2:]) // reshard
    return staying + sum(resharded[:2]) + partial
