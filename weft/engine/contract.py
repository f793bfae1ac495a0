"""The dtype contract: dtypes of storage, compute, reduction and optimizer, checked after the first step."""

from __future__ import annotations

import torch

from weft.engine.engine import Engine
from weft.errors import UserError
from weft.models.lora import is_adapters
from weft.parallel.fsdp import casts_inputs, observed_dtypes
from weft.parallel.mesh import local_shard


def check_contract(engine: Engine) -> None:
    """Raises RuntimeError if masters, optimizer state, buffers, compute or reduction have another dtype than in the
    table printed at start.

    Raises UserError if a module of fsdp.cast_forward_inputs had no input to cast, or an adapter was not used.
    """
    assert engine.optimizer is not None
    state = engine.optimizer.state
    for name, parameter in engine.module.named_parameters():
        stored = engine.precision.master if parameter.requires_grad else engine.precision.frozen
        if parameter.is_floating_point() and parameter.dtype != stored:
            raise RuntimeError(f"dtype contract broken: {name} is stored as {parameter.dtype}, not {stored}")
        if parameter.device.type != engine.storage.type:
            raise RuntimeError(f"{name} is stored on {parameter.device.type}, not {engine.storage.type}")
        if not parameter.requires_grad and (parameter.grad is not None or parameter in state):
            raise RuntimeError(f"{name} is frozen (model.freeze, lora) and has a gradient or optimizer state")
        for key, value in state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor) or local_shard(value).shape != local_shard(parameter.detach()).shape:
                continue
            if value.dtype not in engine.state_dtypes:
                expected = ", ".join(map(str, engine.state_dtypes))
                raise RuntimeError(
                    f"dtype contract broken: optimizer state {key} of {name} is {value.dtype}, not {expected}"
                )
    _check_adapters(engine)
    for name, buffer in engine.module.named_buffers():
        built = engine.built.buffer_dtypes[name]
        if buffer.dtype != built:
            raise RuntimeError(f"dtype contract broken: buffer {name} is {buffer.dtype}, and was built as {built}")
    if casts_inputs(engine.module):
        raise RuntimeError("dtype contract broken: FSDP casts the inputs of a unit, including rotary tables")
    for name, dtypes in engine.input_casts.input_dtypes.items():
        if not dtypes:
            raise UserError(
                f"fsdp.cast_forward_inputs: {name} got no floating-point input in this step, or was not called as a "
                "module, so nothing was cast. Remove it from the list."
            )
    promised = (engine.precision.compute, engine.precision.reduce)
    for dtypes_seen in observed_dtypes(engine.module):
        if dtypes_seen != promised:
            raise RuntimeError(f"dtype contract broken: FSDP computes and reduces in {dtypes_seen}, not {promised}")


def _check_adapters(engine: Engine) -> None:
    """Raises UserError if an adapter was not used: some families read a layer's weight and never call the layer."""
    assert engine.optimizer is not None
    stepped = engine.optimizer.state
    if engine.lora is None or not stepped:
        return
    idle = [n for n, p in engine.module.named_parameters() if p.requires_grad and is_adapters(n) and p not in stepped]
    if idle:
        owners = list(dict.fromkeys(name.rsplit(".", 2)[0] for name in idle))
        raise UserError(
            f"lora.targets: the adapter of {owners[0]} had no gradient in this step, like {len(owners)} adapters in "
            "all: this model does not call these modules, so their adapters have no effect. Remove them from "
            "lora.targets."
        )
