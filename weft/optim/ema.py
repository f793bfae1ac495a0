"""An exponential moving average of the weights (Polyak & Juditsky 1992 average evenly; torch.optim.swa_utils as here).

e_0 = w_0,    e_t = d e_(t-1) + (1 - d) w_t        after every update t, d = optimizer.ema_decay
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from weft.parallel.mesh import own_part


class Ema:
    """This rank's shards of the average, in fp32, where the masters are. What is not trained has none: it stays."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        """The average of one set of weights is those weights."""
        self.decay = decay
        self.shards: dict[nn.Parameter, Tensor] = {
            parameter: own_part(parameter.detach()).to(torch.float32, copy=True)
            for parameter in parameters
            if parameter.requires_grad
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of this moment in."""
        weights = [own_part(parameter).float() for parameter in self.shards]
        torch._foreach_lerp_(list(self.shards.values()), weights, 1.0 - self.decay)
