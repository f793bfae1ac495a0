"""Shards a plain model over the mesh, in numbered steps. The order of the steps matters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from weft.config.recompute import STORE_ALL, Activations
from weft.config.schema import FsdpConfig, ModelConfig
from weft.models import hf
from weft.models.experts import find_experts
from weft.models.train_module import TrainModule
from weft.models.transforms import chosen_transforms
from weft.parallel.ep.experts import expert_parallel
from weft.parallel.fsdp import DTYPES, shard
from weft.parallel.mesh import Mesh
from weft.parallel.pp.model import LayerInterface, Pipeline, Span, keep_stages, plan_pipeline
from weft.parallel.pp.schedule import Placement
from weft.parallel.quantise import BaseFormat, plan_quantised, quantise_base
from weft.parallel.tp.divide import TensorParallel, tensor_parallel
from weft.parallel.units import Unit, find_units


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run. master: of trained parameters and gradients. compute: of forward and backward. reduce: of
    gradient reductions. frozen: of frozen parameters."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    frozen: torch.dtype

    @staticmethod
    def from_config(config: FsdpConfig, device: torch.device, *, adapters: bool = False) -> Precision:
        """adapters: whether adapters are trained. Their frozen base is then stored in the compute dtype."""
        auto = torch.float32 if device.type == "cpu" else torch.bfloat16
        compute = auto if config.param_dtype == "auto" else DTYPES[config.param_dtype]
        master = DTYPES[config.master_dtype]
        return Precision(master, compute, DTYPES[config.reduce_dtype], frozen=compute if adapters else master)

    def remark(self) -> str:
        """A warning if master and compute dtype combine the disadvantages of both. "" for fp32 masters or equal
        dtypes."""
        master, compute = (str(dtype).removeprefix("torch.") for dtype in (self.master, self.compute))
        if self.master in (torch.float32, self.compute):
            return ""
        if self.compute == torch.float32:
            return (
                f"computing in {compute} with {master} master weights takes the time and memory of {compute}, but "
                f"weights have the precision of {master}: set fsdp.master_dtype=fp32 or fsdp.param_dtype=bf16"
            )
        return (
            f"computing in {compute} with {master} master weights has the range of {compute} and the precision of "
            f"{master}, the worse of each: set fsdp.master_dtype=fp32 or fsdp.param_dtype=bf16"
        )


@dataclass(frozen=True)
class StagePlan:
    """How mesh.pp splits the layers. spans: layers of each stage. costs: cost of each stage, in any unit."""

    spans: tuple[Span, ...]
    placement: Placement
    interface: LayerInterface
    costs: tuple[float, ...]


def layers_of(stages: StagePlan, rank: int) -> list[int]:
    """The indices of the layers of a rank of mesh.pp."""
    return [layer for stage in stages.placement.stages_of(rank) for layer in range(*stages.spans[stage])]


def parallelize(
    module: TrainModule,
    mesh: Mesh,
    config: PretrainedConfig,
    model: ModelConfig,
    fsdp: FsdpConfig,
    precision: Precision,
    device: torch.device,
    *,
    sequence: bool = False,
    stages: StagePlan | None = None,
    activations: Activations = STORE_ALL,
    fused_norms: bool = False,
    base: BaseFormat | None = None,
) -> tuple[list[Unit], TensorParallel, Pipeline | None]:
    """Shard the model in place. Returns its FSDP units, how tp and ep shard it, and the stages of pp (None for one).

    sequence: with tp, also shard tokens between blocks. stages: None for one stage. activations: the tensors that
    layers store for backward. fused_norms: use torch's fused RMSNorm. base: storage format of the frozen weights under
    adapters; None for the compute dtype. Raises UserError if a parameter cannot be sharded over these axes.
    """
    # 0. tp and ep shard parameters, before any other step reads their shapes.
    divided = tensor_parallel(module, mesh.tp, config, sequence=sequence)
    divided = replace(divided, cuts=expert_parallel(module, mesh.ep, divided.cuts))

    # 1. Transforms change how modules compute. They come before FSDP2, so that its hooks are outside compiled graphs.
    for transform in chosen_transforms(model, activations, fused_norms=fused_norms):
        transform.apply(module)

    # 2. Storage: trained parameters get the master dtype, frozen parameters their own. Buffers keep their dtype,
    # because
    #    rotary tables and router biases must stay fp32.
    for parameter in module.parameters():
        parameter.data = parameter.data.to(precision.master if parameter.requires_grad else precision.frozen)

    quantised = {} if base is None else plan_quantised(module, divided.cuts, base)

    # 3. Layers: a rank of pp keeps the layers of its stages. All steps that need the full model come before.
    pipeline = None
    if stages is not None:
        assert mesh.pp is not None
        pipeline = plan_pipeline(module, stages.spans, stages.placement, stages.interface)
        if stages.placement.chunks > 1 and model.router_aux_loss != "none":
            hf.record_outputs(module.base)
        wide = torch.float32 if stages.interface.wide else precision.compute
        token_parts = mesh.tp_size if sequence else 1
        keep_stages(module, pipeline, mesh.pp.rank, dtype=wide, device=device, token_parts=token_parts)

    if base is not None:
        quantise_base(module, quantised, divided.cuts, base)

    # 4. Data axes: FSDP2 or HSDP shards the remaining parameters.
    wrap = () if is_one_unit(module, mesh, fsdp, precision.compute, device) else fsdp.wrap
    units = find_units(module, wrap, fsdp.overrides, experts=[] if mesh.ep is None else [*find_experts(module)])
    shard(module, units, mesh, fsdp, precision.compute)

    # 5. FSDP does not move buffers: they go to the device that computes.
    move_buffers(module, device)
    return units, divided, pipeline


# Measured with Qwen3-0.6B on an H200, 256 tokens per step, torch 2.11: 232 ms with 28 units; 151 ms and 1.7 GiB more
# memory with one unit.
_ONE_UNIT_BYTES = 2**31


def is_one_unit(module: nn.Module, mesh: Mesh, config: FsdpConfig, compute: torch.dtype, device: torch.device) -> bool:
    """Whether fsdp.wrap=auto makes the full model one unit: a small model on a single CUDA device. There units save no
    communication, but each costs time of the host."""
    if config.wrap != "auto" or config.overrides or config.cpu_offload:
        return False
    gathered = [p for p in module.parameters() if p.requires_grad or (p.is_floating_point() and p.dtype != compute)]
    size = sum(parameter.numel() for parameter in gathered) * compute.itemsize
    return device.type == "cuda" and mesh.world.size() == 1 and size <= _ONE_UNIT_BYTES


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate uninitialised shards for a module that was sharded on meta.

    Tensors are swapped in place, because FSDP2 and tied modules refer to them by identity.
    """
    # Not with Module.to_empty: torch (2.13) refuses to swap a tensor that has weak references. In a simulation, plain
    # tensors have weak references once an operation has read or returned them. There, modules get new parameters.
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in module.parameters():
        allocated[parameter] = nn.Parameter(_empty(parameter, device), requires_grad=parameter.requires_grad)
    simulated = {parameter for parameter, empty in allocated.items() if isinstance(empty.data, FakeTensor)}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter in simulated:
                owner._parameters[name] = allocated[parameter]
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = _empty(buffer, device)
    for parameter in allocated.keys() - simulated:
        torch.utils.swap_tensors(parameter, allocated[parameter])


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move all buffers that are not on meta to `device`, in place."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.device.type != "meta":
                owner._buffers[name] = buffer.to(device)
