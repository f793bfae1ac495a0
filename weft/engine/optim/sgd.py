"""SGD: torch's, or RoundedSGD if momentum or parameters are in bf16 (optimizer.state_dtype, fsdp.master_dtype).

torch's SGD keeps the momentum in the parameter's dtype and rounds every operation to it. RoundedSGD computes an update
in fp32 and then rounds momentum and parameter to nearest in their dtypes. Each operation is rounded separately, so that
the result of an element does not depend on its index in a shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.config.schema import OptimizerConfig
from weft.engine.optim.kinds import ElementwiseOptimizer, OptimizerKind, ParameterSet, WholeTensor, state_dtype
from weft.parallel.mesh import local_shard


class RoundedSGD(ElementwiseOptimizer):
    """SGD with momentum in `state_dtype`. Weight decay is added to the gradient, as in torch."""

    def __init__(self, params: Any, state_dtype: torch.dtype, lr: float, momentum: float) -> None:
        super().__init__(params, state_dtype, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, shard = self.state[parameter], local_shard(parameter)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        stored, weight = local_shard(state["momentum_buffer"]), shard.float()
        gradient = gradient + weight * group["weight_decay"]
        # In the first step the momentum is zero, so this is the gradient itself, as in torch.
        velocity = stored.float().mul_(group["momentum"]).add_(gradient)
        shard.copy_(weight.sub_(velocity * group["lr"]))
        stored.copy_(velocity)


def build_sgd(config: OptimizerConfig, parameters: ParameterSet) -> torch.optim.Optimizer:
    """SGD. It has momentum if config.momentum is above 0."""
    state = state_dtype(config, parameters.dtype)
    if config.momentum > 0 and (state != parameters.dtype or state == torch.bfloat16):
        return RoundedSGD(parameters.groups, state, config.lr, config.momentum)
    # Not fused=True: the fused SGD kernel does not support DTensors.
    return torch.optim.SGD(parameters.groups, lr=config.lr, momentum=config.momentum, foreach=True)


def sgd_moments(config: OptimizerConfig, master: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtype of the momentum, if there is any."""
    return (state_dtype(config, master),) * int(config.momentum > 0)


def sgd_bytes(config: OptimizerConfig, master: torch.dtype, tensor: WholeTensor, elements: int) -> int:
    """Bytes of the momentum."""
    return elements * sum(dtype.itemsize for dtype in sgd_moments(config, master))


SGD = OptimizerKind(build_sgd, sgd_moments, sgd_bytes)
