"""Lion (Chen et al. 2023, arXiv:2302.06675): every element moves by the same amount, in the direction of a sign.

    u = sign(b1 m + (1 - b1) g)
    w = w (1 - lr d) - lr u
    m = b2 m + (1 - b2) g

b1, b2 are optimizer.betas, d is the weight decay, lr the learning rate. The argument of sign() is computed with
separate operations, each rounded. A fused multiply-add could round the elements at the end of a shard differently, and
flip a sign.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.config.schema import OptimizerConfig
from weft.engine.optim.kinds import ElementwiseOptimizer, OptimizerKind, ParameterSet, WholeTensor, state_dtype
from weft.parallel.mesh import local_shard


class Lion(ElementwiseOptimizer):
    """Lion with its momentum in `state_dtype`, computed in fp32."""

    def __init__(self, params: Any, state_dtype: torch.dtype, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, state_dtype, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, shard, (beta1, beta2) = self.state[parameter], local_shard(parameter), group["betas"]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        stored = local_shard(state["exp_avg"])
        momentum = stored.float()
        change = (momentum * beta1).add_(gradient * (1 - beta1)).sign_().mul_(group["lr"])
        shard.copy_(change.neg_().add_(shard.float() * (1 - group["lr"] * group["weight_decay"])))
        stored.copy_((momentum * beta2).add_(gradient * (1 - beta2)))


def build_lion(config: OptimizerConfig, parameters: ParameterSet) -> torch.optim.Optimizer:
    """Lion, with optimizer.betas."""
    return Lion(parameters.groups, state_dtype(config, parameters.dtype), config.lr, config.betas)


def lion_moments(config: OptimizerConfig, master: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtype of the momentum."""
    return (state_dtype(config, master),)


def lion_bytes(config: OptimizerConfig, master: torch.dtype, tensor: WholeTensor, elements: int) -> int:
    """Bytes of the momentum."""
    return elements * state_dtype(config, master).itemsize


LION = OptimizerKind(build_lion, lion_moments, lion_bytes)
