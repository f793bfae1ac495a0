"""Loads optimizer state from a torch.distributed.checkpoint directory (optimizer.load_state): moments and step counts
of another trainer's AdamW or SGD."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from weft.config.schema import OptimizerConfig
from weft.engine.optim.custom_optimizer import ShardOptimizer
from weft.engine.optim.optimizer import stepped_by, stepped_on_device
from weft.errors import UserError
from weft.models import hf
from weft.models.train_module import TrainModule
from weft.parallel.shards.cuts import ShardSpecs
from weft.parallel.shards.dcp_source import DcpSource
from weft.parallel.shards.layout import TensorMapping
from weft.parallel.shards.load import LoadPlan, fill_tensors

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_STEP = "step"
_ELSE = "Set optimizer.load_state=false to start with fresh optimizer state."


def check_state(module: TrainModule, plan: LoadPlan, optimizer: str) -> None:
    """Raises UserError if the directory lacks the state of a parameter that is trained, or has another optimizer's
    state. module: before it is sharded. optimizer: its name in the config."""
    source = _source_of(plan)
    if source.numbered:
        raise UserError(
            f"optimizer.load_state: {source.folder} stores optimizer state under parameter numbers instead of names. "
            f"Save it with get_state_dict of torch.distributed.checkpoint.state_dict, which stores names. {_ELSE}"
        )
    expected = {*_MOMENTS[optimizer], *((_STEP,) if optimizer == "adamw" else ())}
    foreign = sorted(source.keys - {*expected, _STEP})
    if foreign or not source.keys:
        has = f"the state of another optimizer ({', '.join(foreign)})" if foreign else "no optimizer state"
        raise UserError(f"optimizer.load_state: {source.folder} contains {has}; optimizer.name is {optimizer}. {_ELSE}")
    trained = [name for name, tensor in _trained(module).items() if name in plan.fills]
    lacking = [
        f"{file} ({key})"
        for name in trained
        for _, file in plan.fills[name]
        for key in sorted(expected)
        if _with_state(source, file, key, module) is None
    ]
    if lacking:
        ending = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise UserError(
            f"optimizer.load_state: {source.folder} lacks the state of {', '.join(lacking[:3])}{ending}. {_ELSE}"
        )


def load_state(
    optimizer: torch.optim.Optimizer | ShardOptimizer,
    module: TrainModule,
    plan: LoadPlan,
    name: str,
    dtypes: Sequence[torch.dtype],
    cuts: ShardSpecs,
) -> None:
    """Load the directory's state into a new optimizer; collective if shards are replicated. Each rank reads its own
    shards. name: of the optimizer, in the config. dtypes: of its moments."""
    source, trained = _source_of(plan), {n: p for n, p in _trained(module).items() if n in plan.fills}
    for key, dtype in zip(_MOMENTS[name], dtypes, strict=True):
        targets = {runtime: torch.zeros_like(parameter, dtype=dtype) for runtime, parameter in trained.items()}
        fills = {runtime: _renamed(plan, runtime, source, key, module) for runtime in trained}
        fill_tensors(targets, fills, source.moments(key), cuts)
        for runtime, parameter in trained.items():
            owner, stepped = stepped_by(optimizer, parameter)
            owner.state[stepped][key] = targets[runtime]
    on_device = stepped_on_device(optimizer)
    for runtime, parameter in trained.items() if name == "adamw" else ():
        owner, stepped = stepped_by(optimizer, parameter)
        device = stepped.device if stepped in on_device else torch.device("cpu")
        step = _step(runtime, _renamed(plan, runtime, source, _STEP, module), source)
        owner.state[stepped][_STEP] = torch.tensor(step, dtype=torch.float32, device=device)
    source.close()


def state_lines(plan: LoadPlan | None, config: OptimizerConfig) -> list[str]:
    """The lines printed at start about the optimizer of a model whose weights come from such a directory."""
    if plan is None or not isinstance(plan.source, DcpSource):
        return []
    source = plan.source
    if config.load_state:
        return [f"state    loaded from {source.folder}; step count and data order start from the beginning"]
    if source.numbered:
        return [f"state    fresh: {source.folder} stores optimizer state under parameter numbers, without names"]
    if source.keys:
        return [f"state    fresh; set optimizer.load_state=true to load the state in {source.folder}"]
    return ["state    fresh: the directory has no optimizer state"]


def _source_of(plan: LoadPlan) -> DcpSource:
    assert isinstance(plan.source, DcpSource), "optimizer.load_state needs model.dcp_weights"
    return plan.source


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are trained, tied ones under each of their names."""
    return {name: p for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}


def _with_state(source: DcpSource, file: str, key: str, module: TrainModule) -> str | None:
    """The name under which the directory stores this tensor's state: the tensor's name or that of a tied tensor; None
    if it stores none."""
    tied = hf.tied_parameters(module.hf_model)
    tied_names = [tied[file]] if file in tied else [name for name, owner in tied.items() if owner == file]
    return next((name for name in (file, *tied_names) if source.has_state(name, key)), None)


def _renamed(
    plan: LoadPlan, runtime: str, source: DcpSource, key: str, module: TrainModule
) -> list[tuple[TensorMapping, str]]:
    pairs = []
    for mapping, file in plan.fills[runtime]:
        name = _with_state(source, file, key, module)
        assert name is not None, (file, key)
        pairs.append((mapping, name))
    return pairs


def _step(runtime: str, mappings: Sequence[tuple[TensorMapping, str]], source: DcpSource) -> float:
    """The number of steps that a parameter has taken. Raises UserError if its parts have taken different numbers."""
    steps = {source.number(file, _STEP) for _, file in mappings}
    step = steps.pop()
    if steps or step is None or not 0 <= step < 1 << 24:
        raise UserError(
            f"optimizer.load_state: {source.folder} has several step counts, or none, for {runtime}. {_ELSE}"
        )
    return step
