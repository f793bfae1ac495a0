"""FSDP2 on the data axes: how units are sharded, and how gradients are summed.

FSDP's averaging is off everywhere. The engine divides by the step's normaliser, which it computes on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from weft.config.schema import FsdpConfig
from weft.errors import UserError
from weft.launch import timing
from weft.launch.simulated import is_simulated
from weft.models.patterns import outermost, similar_names
from weft.models.train_module import TrainModule
from weft.parallel.mesh import Mesh
from weft.parallel.units import Strategy, Unit, inner_units
from weft.upstream import hsdp_offload_races
from weft.versions import all_gather_single, reduce_scatter_single

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(module: TrainModule, units: list[Unit], mesh: Mesh, config: FsdpConfig, compute: torch.dtype) -> None:
    """Apply fully_shard to every unit, then to the root. FSDP never casts inputs, because rotary tables and router
    inputs must stay fp32. compute: the compute dtype."""
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=DTYPES[config.reduce_dtype], cast_forward_inputs=False
    )
    # On one data rank, FSDP would gather a frozen parameter in the compute dtype by copying it. With one rank in total,
    # FSDP ignores such parameters instead. It must not with tp, ep or pp: an ignored parameter is a plain tensor, and
    # the code that writes files and syncs engines treats plain tensors as equal on all ranks.
    leaves_frozen = mesh.world.size() == 1 and not config.cpu_offload
    ignored = {
        p
        for p in module.parameters()
        if leaves_frozen and not p.requires_grad and (p.dtype == compute or not p.is_floating_point())
    }
    meshes: dict[Strategy, DeviceMesh] = {}
    for unit in units:
        if unit.shard not in meshes:
            meshes[unit.shard] = _mesh_of(unit.shard, mesh)
        unit_mesh = meshes[unit.shard]
        for child in unit.modules:
            child.register_forward_hook(_without_views)
        target = list(unit.modules) if len(unit.modules) > 1 else unit.modules[0]
        reshard = False if unit.keep else _reshard(config.reshard_after_forward, unit_mesh.size(unit_mesh.ndim - 1))
        fully_shard(
            target,
            mesh=unit_mesh,
            mp_policy=policy,
            offload_policy=_offload(config, unit_mesh),
            reshard_after_forward=reshard,
            ignored_params=ignored,
        )
    fully_shard(
        module,
        mesh=mesh.dp,
        mp_policy=policy,
        offload_policy=_offload(config, mesh.dp),
        reshard_after_forward=False,
        ignored_params=ignored,
    )
    if config.prefetch is not None:
        depth = config.prefetch if isinstance(config.prefetch, tuple) else (config.prefetch, config.prefetch)
        prefetch(module, units, *depth)
    for child in fsdp_modules(module):
        # One rank has nothing to average, but FSDP (torch 2.11 to 2.13) would divide by any factor in a separate pass.
        # With a factor, FSDP uses PREMUL_SUM, which gloo does not have, so the plain sum must be forced.
        if _ranks(child) > 1:
            child.set_gradient_divide_factor(1.0)
        else:
            child.set_custom_reduce_scatter(_ReduceInPlace())
        child.set_force_sum_reduction_for_comms(True)


class _ReduceInPlace:
    """The reduce-scatter of a single data rank: its output buffer is its input buffer.

    FSDP (torch 2.11 to 2.13) copies a unit's gradients into an input buffer, copies this to an output buffer, and keeps
    the input buffer until the backward of the next unit ends. One buffer for both saves the second copy and its memory.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP calls this for the input buffer, then for the output buffer. The second call is on the reduce stream,
        which adds the buffer to earlier gradients, so the allocator must not reuse it before."""
        if self._input is None:
            self._input = torch.empty(*size, dtype=dtype, device=device)
            return self._input
        output, self._input = self._input, None
        if device.type == "cuda":
            output.record_stream(torch.cuda.current_stream(device))
        return output

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. FSDP does not call this on one rank."""


def _offload(config: FsdpConfig, mesh: DeviceMesh) -> OffloadPolicy:
    """The offload policy of a unit with this mesh. Host memory is pinned on accelerators, so that copies overlap with
    computation. Exception: FSDP overwrites pinned gradients of replicated units too early (weft/upstream.py)."""
    if not config.cpu_offload:
        return OffloadPolicy()
    replicated = mesh.ndim > 1
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu" and not (replicated and hsdp_offload_races()))


def _ranks(unit: FSDPModule) -> int:
    """The number of ranks over which the unit's parameters are sharded or replicated. 1 without parameters."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return 1 if group is None else int(group.mesh_info.mesh.size())


@torch.compiler.disable
def _without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook that replaces outputs that are views by copies. FSDP's backward hooks do not work on views, and
    some layers return one (OPT reshapes its output)."""
    if type(output) is tuple:
        return tuple(_without_views(module, inputs, item) for item in output)
    is_view = isinstance(output, Tensor) and output.requires_grad and output._base is not None
    return output.clone() if is_view else output


def _mesh_of(strategy: Strategy, mesh: Mesh) -> DeviceMesh:
    """The mesh of a unit: (shard axis) or (replicate axis, shard axis)."""
    if strategy == "experts":
        assert mesh.experts is not None
        return mesh.experts
    return mesh.sharded_over(mesh.shards if strategy == "full" else 1 if strategy == "replicate" else strategy)


def _reshard(setting: bool | int, shards: int) -> bool | int:
    """reshard_after_forward of a unit. shards: number of its shards. A group size that does not divide it becomes
    True."""
    if isinstance(setting, bool) or (setting < shards and shards % setting == 0):
        return setting
    return True


def prefetch(root: nn.Module, units: Sequence[Unit], forward: int, backward: int) -> None:
    """Make each unit prefetch the next units, each with its inner units. forward, backward: number of units to
    prefetch.

    The root and units with inner units start with their first inner units (in backward, with their last). A unit
    prefetches only within the unit that contains it: in backward, recomputation runs a layer's forward again, and the
    next layer, which its forward would prefetch, is already done.
    """
    inside = inner_units(root, units)

    def with_inner(outer_units: Sequence[Unit], order: int) -> list[FSDPModule]:
        modules = []
        for unit in outer_units:
            modules += [_fsdp(unit.modules[0]), *with_inner(inside.get(id(unit.modules[0]), [])[::order], order)]
        return modules

    def look_ahead(child: nn.Module, later_units: Sequence[Unit], earlier_units: Sequence[Unit]) -> None:
        inner = inside.get(id(child), [])
        _fsdp(child).set_modules_to_forward_prefetch(with_inner([*inner[:forward], *later_units[:forward]], 1))
        first_in_backward = [*inner[::-1][:backward], *earlier_units[::-1][:backward]]
        _fsdp(child).set_modules_to_backward_prefetch(with_inner(first_in_backward, -1))

    look_ahead(root, (), ())
    for siblings in inside.values():
        for index, unit in enumerate(siblings):
            look_ahead(unit.modules[0], siblings[index + 1 :], siblings[:index])


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """The FSDP modules inside `module`, including the root."""
    return (child for child in module.modules() if isinstance(child, FSDPModule))


def reshard(module: nn.Module) -> None:
    """Free the gathered weights of all units, after a forward without a backward. After the next optimizer step they
    would be outdated."""
    for unit in fsdp_modules(module):
        unit.reshard()


class WorkingCopies:
    """Keeps gathered parameters for a full step, on a single data rank. They are copies in the compute dtype.

    FSDP (torch 2.11 to 2.13) copies a unit's parameters whenever it gathers the unit, also on one rank: in the forward
    and the backward of every micro-batch, on the compute stream. With kept parameters there is one copy per step.
    """

    def __init__(self, module: nn.Module, always: bool, device: torch.device) -> None:
        """always: keep them from the first step on. Else keep them once the measured memory of steps shows that they
        fit, on CUDA only."""
        units = [] if not isinstance(module, FSDPModule) else [*fsdp_modules(module)]
        self._units = units if all(_ranks(unit) == 1 for unit in units) else []
        groups = {unit: unit._get_fsdp_state()._fsdp_param_group for unit in self._units if unit is not module}
        self._freed = [unit for unit, group in groups.items() if group is not None and group._reshard_after_forward]
        self._always, self._device, self._peak, self.on = always, device, 0, False
        self._measured = False  # whether a step has shown how much memory it takes

    def decide(self) -> None:
        """Decide whether the next step keeps the copies. Call this at the start of each step."""
        keep = bool(self._units) and (self._always or self._fit())
        if keep != self.on:
            for unit in self._freed:
                unit.set_reshard_after_forward(not keep, recurse=False)
            self.on = keep

    def micro_batch(self, last: bool) -> None:
        """Announce the next micro-batch. After the backward of the last micro-batch the copies are freed, because the
        optimizer step makes them outdated."""
        if self.on:
            for unit in self._units:
                unit.set_reshard_after_backward(last, recurse=False)

    def _fit(self) -> bool:
        """Whether the largest memory of all steps so far, plus the copies, is at most 7/8 of the memory available to
        this process. If copies are already kept, whether it is at most 95%."""
        if self._device.type != "cuda" or is_simulated():
            return False
        self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device))
        if not self._measured:
            self._measured = True
            return False
        free, _ = torch.cuda.mem_get_info(self._device)
        room = free + torch.cuda.memory_reserved(self._device)
        return self._peak <= 0.95 * room if self.on else self._peak + self._bytes() <= 0.875 * room

    def _bytes(self) -> int:
        """Bytes of the copies that would otherwise be freed after forward."""
        groups = (unit._get_fsdp_state()._fsdp_param_group for unit in self._freed)
        return sum(
            parameter._orig_size.numel() * (parameter.param_dtype or parameter.orig_dtype).itemsize
            for group in groups
            if group is not None
            for parameter in group.fsdp_params
        )


def observed_dtypes(module: nn.Module) -> set[tuple[torch.dtype | None, torch.dtype | None]]:
    """(compute, reduce) dtype of every FSDP unit with parameters, as FSDP resolved them."""
    dtypes = set()
    for child in fsdp_modules(module):
        group = child._get_fsdp_state()._fsdp_param_group
        for parameter in [] if group is None else group.fsdp_params:
            if not parameter.orig_dtype.is_floating_point:
                continue  # codes of a quantised weight, which FSDP gathers without a cast
            compute = parameter.param_dtype or parameter.orig_dtype  # None: no cast is needed
            dtypes.add((compute, parameter.reduce_dtype or compute))
    return dtypes


def casts_inputs(module: nn.Module) -> bool:
    """Whether FSDP would cast the floating-point inputs of any unit."""
    return any(child._get_fsdp_state()._mp_policy.cast_forward_inputs for child in fsdp_modules(module))


Reduce = Literal["every", "scatter", "last", "later"]


def reduce_when(module: nn.Module, when: Reduce, *, last: bool, units: Iterable[FSDPModule] | None = None) -> None:
    """Set how the next backward reduces gradients.

    when: `every`: over shards and replicas. `scatter`: over shards, and over replicas in the last micro-batch only.
    `last`: in the last micro-batch only. `later`: not in backward. last: whether this is the step's last micro-batch.
    units: by default all.
    """
    for unit in fsdp_modules(module) if units is None else units:
        unit.set_requires_gradient_sync(when != "later" and (last or when != "last"), recurse=False)
        unit.set_requires_all_reduce(last or when == "every", recurse=False)


def end_backward(module: nn.Module, last: bool) -> None:
    """Set whether the next backward is the step's last. At its end FSDP waits for all reductions."""
    assert isinstance(module, FSDPModule)
    module.set_is_last_backward(last)


def reduce_now(module: nn.Module) -> None:
    """Run the reductions that FSDP runs at the end of backward, for gradients that were computed after backward.
    torch's zero-bubble schedules do the same (torch.distributed.pipelining, perform_reduce_grad)."""
    assert isinstance(module, FSDPModule)
    module._get_fsdp_state()._root_post_backward_final_callback()


class _AnnouncedReduceScatter:
    """A reduce-scatter that calls `announce` when its unit starts to reduce. FSDP then allocates the buffers."""

    def __init__(self, replaced: Any, announce: Callable[[], None]) -> None:
        """replaced: the unit's previous reduce-scatter, which does the work."""
        self._replaced, self._announce = replaced, announce

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._announce()
        buffer: Tensor = self._replaced.allocate(size, dtype=dtype, device=device)
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replaced(*args, **kwargs)


def announce_reductions(unit: FSDPModule, announce: Callable[[FSDPModule], None]) -> None:
    """Make a unit call `announce` when it starts to reduce its gradients, also on one rank. It may call it twice.

    FSDP's public hooks do not work here (torch 2.13). Its hook after an all-reduce would move copies to the host to
    another stream (hsdp-offload-race in weft/upstream.py). Its hooks after a gradient has accumulated would make these
    copies block.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is not None:
        replaced = group._reduce_scatter_comm
        unit.set_custom_reduce_scatter(_AnnouncedReduceScatter(replaced, partial(announce, unit)))


# ---------------------------------------------------------------- parameters that only some documents use


class UsedParameters:
    """Gives a parameter that this rank did not use a gradient of zeros, so that all ranks reduce the same parameters,
    and records which parameters this rank used in a step.

    Some models run a module for some documents only: a compressor of long documents, or an expert of a list that a
    token must choose. FSDP leaves parameters without a gradient out of a unit's reduction. Ranks with other documents
    would then reduce tensors of other sizes: gloo aborts, NCCL hangs. `set_reduce_scatter_unused_params` (torch 2.13)
    also reduces units that no rank ran, and records nothing.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], towers: Collection[str]) -> None:
        """names: parameters of the whole model, of all pipeline stages. towers: modules that either all ranks run in a
        micro-batch, or none."""
        index = {name: position for position, name in enumerate(names)}
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names, self._count = {p: index[name] for name, p in trained.items()}, len(names)
        prefixes = tuple(f"{name}." for name in towers)
        self._of_towers = {p for name, p in trained.items() if name.startswith(prefixes)}
        self._used: set[nn.Parameter] = set()
        self._filled: set[nn.Parameter] = set()
        for unit in fsdp_modules(module):
            group = unit._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group.post_backward = partial(self._post_backward, _UnitBackward(group, group.post_backward))

    def flags(self) -> Tensor:
        """[parameters] fp64 on the host: 1 for each parameter that this rank has used since forget()."""
        flags = [0.0] * self._count
        for parameter in self._used:
            flags[self._names[parameter]] = 1.0
        return torch.tensor(flags, dtype=torch.float64)

    def unused(self) -> Mapping[nn.Parameter, int]:
        """Parameters whose gradient is there although this rank did not use them, with their index in flags()."""
        return {parameter: self._names[parameter] for parameter in self._filled - self._used}

    def forget(self) -> None:
        """Begin a new step."""
        self._used, self._filled = set(), set()

    def _post_backward(self, unit: _UnitBackward, *unused: Any) -> None:
        """FSDP calls it when a unit's backward is done, and at the end of backward for units whose inputs have no
        gradient."""
        group = unit.group
        unit.ran |= group._training_state == TrainingState.PRE_BACKWARD
        if unit.ran and group.reduce_grads:
            # FSDP sums the reduced gradients of micro-batches over replicas, so all must reduce the same parameters.
            replicated = group.mesh_info.mesh.ndim > 1
            sums_up = replicated and (not group.all_reduce_grads or group._partial_reduce_output is not None)
            self._fill([p for p in group.fsdp_params if p.sharded_param.requires_grad], towers=sums_up)
            unit.ran = False
        unit.post_backward(*unused)

    def _fill(self, parameters: Sequence[Any], towers: bool) -> None:
        """Record the used parameters, and give the others gradients of zeros. towers: also parameters of towers that
        no rank ran."""
        used = [p for p in parameters if not (p.unsharded_accumulated_grad is p.unsharded_param.grad is None)]
        self._used.update(p.sharded_param for p in used)
        towers = towers or not self._of_towers.isdisjoint(p.sharded_param for p in used)
        # Gradients of earlier micro-batches that were not reduced are in the reduce dtype. FSDP reduces one dtype.
        accumulated = any(p.unsharded_accumulated_grad is not None for p in used)
        for parameter in parameters:
            if parameter.unsharded_accumulated_grad is not None:
                continue
            if parameter.unsharded_param.grad is None:
                if not towers and parameter.sharded_param in self._of_towers:
                    continue
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
                self._filled.add(parameter.sharded_param)
            if accumulated:
                parameter.to_accumulated_grad_if_needed()


@dataclass
class _UnitBackward:
    """A unit's parameters, FSDP's own method, and whether the unit ran in a backward that did not reduce it yet."""

    group: FSDPParamGroup
    post_backward: Callable[..., None]
    ran: bool = False


# ---------------------------------------------------------------- inputs cast to the compute dtype


class InputCasts:
    """Hooks that cast the floating-point inputs of modules to `dtype`. input_dtypes: name of a module -> dtypes of its
    inputs before the cast."""

    def __init__(self, root: nn.Module, patterns: Sequence[str], dtype: torch.dtype) -> None:
        """Hook the outermost modules that the patterns match. Raises UserError if a pattern matches nothing."""
        self.dtype = dtype
        self.input_dtypes: dict[str, set[torch.dtype]] = {}
        for pattern in patterns:
            matched = outermost(root, pattern)
            if not matched:
                names = [name for name, _ in root.named_modules() if name]
                raise UserError(
                    f"fsdp.cast_forward_inputs: {pattern!r} matches no module{similar_names(pattern, names)}"
                )
            self.input_dtypes |= {name: set() for name in matched}
        for name in self.input_dtypes:
            root.get_submodule(name).register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Any:
        def cast(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                self.input_dtypes[name].add(value.dtype)
                return value.to(self.dtype)
            if type(value) in (tuple, list):
                return type(value)(cast(item) for item in value)
            if type(value) is dict:
                return {key: cast(item) for key, item in value.items()}
            return value

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return cast(args), cast(kwargs)

        return hook


# ---------------------------------------------------------------- timing of collectives on CPU


def time_collectives(module: nn.Module) -> None:
    """Measure how long the units of `module` wait for gathers and reductions, in launch/timing.py. CPU only."""
    gather = TimedAllGather()
    for unit in fsdp_modules(module):
        group = unit._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        scatter = TimedReduceScatter(group._reduce_scatter_comm)
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
        unit.set_all_reduce_hook(scatter.reduced)


class TimedAllGather:
    """FSDP's all-gather of shards, timed."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        with timing.waiting():
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class TimedReduceScatter:
    """FSDP's reduce-scatter over shards and its later all-reduce over replicas, timed."""

    def __init__(self, replaced: Any) -> None:
        """replaced: the unit's previous reduce-scatter, which allocates the buffers."""
        self._ready_time, self._replaced = 0.0, replaced

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._ready_time = time.perf_counter()
        buffer: Tensor = self._replaced.allocate(size, dtype=dtype, device=device)
        return buffer

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        with timing.waiting():
            work = reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._ready_time = time.perf_counter()
        return work

    def reduced(self, _: Tensor) -> None:
        """A hook. FSDP2 calls it after the all-reduce over replicas, or immediately if there is none."""
        timing.waited(self._ready_time)
