"""AdamW and SGD with state of another dtype than the parameters (optimizer.state_dtype).

torch's own keep state in the parameter's dtype. Here an update is computed in fp32 from stored state and parameter, one
parameter at a time, and both are rounded to nearest in their own dtypes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from weft.parallel.mesh import local_shard


class _Rounded(torch.optim.Optimizer, ABC):
    """Keeps state in `state_dtype`, also in load_state_dict, where torch casts state to the parameter's dtype."""

    state_dtype: torch.dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, local_shard(parameter.grad).float(), group)

    @abstractmethod
    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None: ...

    def _buffer(self, parameter: nn.Parameter, name: str) -> tuple[Tensor, Tensor]:
        """This rank's part of a state tensor, zeros at first: (as stored, in fp32)."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=self.state_dtype)
        stored = local_shard(state[name])
        return stored, stored.float()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, without its cast of the state to the parameter's dtype."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        places = [path for group in state_dict["param_groups"] for path in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for path, parameter in zip(places, parameters, strict=True):
            for name, value in state_dict["state"].get(path, {}).items():
                dtype = torch.float32 if name == "step" else self.state_dtype
                device = value.device if name == "step" else parameter.device
                self.state[parameter][name] = value.detach().clone().to(device=device, dtype=dtype)


class RoundedAdamW(_Rounded):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

    def __init__(
        self, params: Any, state_dtype: torch.dtype, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.state_dtype = state_dtype

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        step = self.state[parameter].setdefault("step", torch.tensor(0.0))
        first, first32 = self._buffer(parameter, "exp_avg")
        second, second32 = self._buffer(parameter, "exp_avg_sq")
        stored = local_shard(parameter)
        weight = stored.float()
        beta1, beta2 = group["betas"]
        adamw(
            [weight], [gradient], [first32], [second32], [], [step], foreach=False,
            amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip
        for target, result in ((stored, weight), (first, first32), (second, second32)):
            target.copy_(result)


class RoundedSGD(_Rounded):
    """SGD with momentum; weight decay is added to the gradient, as in torch."""

    def __init__(self, params: Any, state_dtype: torch.dtype, lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.state_dtype = state_dtype

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        stored = local_shard(parameter)
        weight = stored.float()
        velocity, velocity32 = self._buffer(parameter, "momentum_buffer")
        gradient = gradient.add(weight, alpha=group["weight_decay"])
        velocity32.mul_(group["momentum"]).add_(gradient)  # from zero this is the first gradient itself, as in torch
        stored.copy_(weight.add_(velocity32, alpha=-group["lr"]))
        velocity.copy_(velocity32)
