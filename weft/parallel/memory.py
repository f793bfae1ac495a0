"""Memory of weights, gradients and optimizer state, estimated from shapes alone, and advice before anything is
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

# (name of a tensor, its whole shape, a number of its elements) -> bytes of the optimizer's state of these elements.
StateBytes = Callable[[str, Sequence[int], int], int]
SMALL = 0.4  # share of a device that a whole model may take, to leave room for activations


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes per rank: the maximum over ranks, equal on all. gathered: the largest set of gathered parameters, in the
    compute dtype. unsharded: what a rank would hold if nothing were sharded, without `gathered`. average: the average
    of the weights (optimizer.ema_decay)."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    unsharded: int
    average: int = 0

    @property
    def resident(self) -> int:
        """Bytes between steps; gradients are included, because they exist at the end of a step."""
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
    """What training stores besides weights and gradients. state: bytes of the optimizer's state. average: whether an
    fp32 average of the weights is kept."""

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
    """The needs of a sharded module, which may be on meta. training: None for inference. reshard:
    fsdp.reshard_after_forward. cuts: how tp and ep divide parameters."""
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
    """Bytes of one engine that a rank holds on the host for a while. saved: the copy of which a checkpoint is written.
    asleep: parts that are on the host while the engine sleeps."""

    saved: int
    asleep: int

    @staticmethod
    def estimate(
        needs: MemoryNeeds, *, adapters: bool, state: bool, replicas: int, parts: Collection[str]
    ) -> HostNeeds:
        """adapters: only trained parameters are saved. state: trainer state is saved with the weights. replicas: number
        of ranks that hold the same and share the writing. parts: parts that sleep ("parameters", "optimizer")."""
        masters = needs.gradients if adapters else needs.weights  # as many elements as have a gradient, in its dtype
        moments = needs.optimizer + needs.average
        slept = needs.weights * ("parameters" in parts) + moments * ("optimizer" in parts)
        return HostNeeds((masters + moments * state) // replicas, slept)


def host_bytes(engines: Sequence[HostNeeds]) -> int:
    """Size of the host pool that a rank's engines share (engine/host.py); saving and sleeping take turns."""
    return max(sum(needs.saved for needs in engines), sum(needs.asleep for needs in engines))


def host_shortage(needed: int, ranks: int) -> str:
    """What to say if this machine has not `needed` bytes free for each of its ranks; "" if it has. ranks: in all."""
    local = local_ranks(ranks)
    free = psutil.virtual_memory().available // local
    if needed <= free:
        return ""
    return f", and this machine has {byte_count(free)} free for each of its {counted(local, 'rank')}"


def capacity(storage: torch.device, local_ranks: int, assumed: Accelerator | None = None) -> int:
    """Bytes available to a rank for its shards: on its accelerator, or its part of the host's memory."""
    if storage.type == "cuda" and assumed is not None:
        return assumed.memory
    if storage.type == "cuda":
        return int(torch.cuda.get_device_properties(storage).total_memory)
    total, limit = int(psutil.virtual_memory().total), Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        total = min(total, int(limit.read_text()))
    return total // local_ranks


def local_ranks(world: int) -> int:
    """Number of ranks on this machine, which share its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def check_fits(needs: MemoryNeeds, room: int, mesh: Mesh, fsdp: FsdpConfig, optimizer: OptimizerConfig) -> None:
    """Raise UserError, with three keys that help, if a rank cannot hold its shards even without activations."""
    if needs.resident <= room:
        return
    raise UserError(
        f"the model does not fit: {needs}, but a rank has {byte_count(room)} of memory, and activations come on top. "
        f"What helps: {'; '.join(_remedies(mesh, fsdp, optimizer)[:3])}."
    )


def check_draws(elements: int, room: int) -> None:
    """Raise UserError if a rank has too little host memory to draw all initial weights in fp32."""
    drawn = elements * torch.float32.itemsize
    if drawn > room:
        raise UserError(
            f"model.init=random: each rank draws the whole model, {byte_count(drawn)}, and has {byte_count(room)} of "
            "this machine's memory. What helps: fewer ranks on a machine; weights that are drawn once and saved by "
            "transformers, as model.path; a smaller model."
        )


def hint(needs: MemoryNeeds, room: int, mesh: Mesh) -> str | None:
    """Advice if one accelerator could hold the whole model with ease, so that sharding only costs speed; else None."""
    if mesh.shards == 1 or needs.unsharded > SMALL * room:
        return None
    return (
        f"the whole model takes {byte_count(needs.unsharded)} of {byte_count(room)} on each device: with "
        f"mesh.dp_replicate={mesh.loss_ranks // mesh.cp_size} mesh.dp_shard=1 nothing needs to be gathered, which is "
        "faster"
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
    """Upper bound of a KV cache's bytes per token: keys and values of all layers."""
    widths = 0.0
    for layer in hf.layer_configs(config):
        heads = layer.num_attention_heads
        width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        widths += (getattr(layer, "num_key_value_heads", None) or heads) * width
    return int(2 * widths * itemsize)


def _elements_on_rank(parameters: Iterable[nn.Parameter]) -> int:
    """Elements on the rank that holds most of them: shards are rounded up to whole rows."""
    return sum(math.prod(_largest_shard(parameter)) for parameter in parameters)


def _largest_shard(parameter: nn.Parameter) -> list[int]:
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                shape[placement.dim] = math.ceil(shape[placement.dim] / parameter.device_mesh.size(axis))
    return shape


def _gathered(parameters: Sequence[nn.Parameter], units: Sequence[Unit], reshard: bool | int, compute: int) -> int:
    """Bytes of gathered parameters. Integers, the bytes of quantised weights, keep their dtype."""

    def elements(parameters: Iterable[nn.Parameter]) -> int:
        sharded = (p for p in parameters if isinstance(p, DTensor))  # FSDP leaves others as they are
        return sum(p.numel() * (compute if p.is_floating_point() else p.element_size()) for p in sharded)

    owned = [(elements(local), unit.keep) for unit, local in zip(units, parameters_by_unit(units), strict=True)]
    root = elements(parameters) - sum(count for count, _ in owned)
    return gathered_elements([*owned, (root, True)], reshard)


def gathered_elements(units: Iterable[tuple[int, bool]], reshard: bool | int) -> int:
    """Elements that are gathered at the same time: units that stay gathered, and the two largest of the others, because
    the next unit is gathered while one runs.

    units: (elements, whether they stay gathered) of each unit, with the root. reshard: fsdp.reshard_after_forward; a
    number n keeps 1/n of the remaining units.
    """
    units = list(units)
    stays = sum(count for count, keep in units if keep)
    rest_sorted = sorted((count for count, keep in units if not keep), reverse=True)
    if reshard is False:
        return stays + sum(rest_sorted)
    part = 0 if reshard is True else sum(rest_sorted[2:]) // reshard
    return stays + sum(rest_sorted[:2]) + part
