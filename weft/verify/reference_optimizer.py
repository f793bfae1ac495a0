"""The reference's optimizer: torch's own over plain parameters, one group per parameter. Imports nothing of weft."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Optimizer:
    """AdamW, SGD or the class at an import path; only matrices and embeddings decay.

    groups: (patterns of names, factor of the learning rate, decay or None); the first that matches a parameter counts.
    """

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[tuple[Sequence[str], float, float | None]] = ()

    def over(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """A fresh optimizer. named: (name, parameter); a tied parameter comes under each name."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in named:
            names.setdefault(parameter, []).append(name)
        groups = [self._group(parameter, tensor_names) for parameter, tensor_names in names.items()]
        if self.name == "sgd":
            return torch.optim.SGD(groups, lr=0.0, momentum=self.momentum)
        if self.name == "adamw":
            return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.eps)
        module, _, kind = self.name.replace(":", ".").rpartition(".")
        built: torch.optim.Optimizer = getattr(importlib.import_module(module), kind)(groups, lr=1.0, **self.options)
        return built

    def _group(self, parameter: nn.Parameter, names: Sequence[str]) -> dict[str, Any]:
        decay = self.weight_decay if decays(names[0], parameter) else 0.0
        for patterns, factor, options in self.groups:
            if any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns for name in names):
                return {"params": [parameter], "factor": factor, "weight_decay": decay if options is None else options}
        return {"params": [parameter], "factor": 1.0, "weight_decay": decay}


def decays(name: str, parameter: Tensor) -> bool:
    """Whether a parameter decays: matrices and embeddings, but no biases, norms, 1-d convolutions or A_log of any
    shape."""
    last, module = name.split(".")[-1], name.split(".")[-2:][0]
    if parameter.ndim < 2 or "bias" in last or last == "A_log":
        return False
    return not ("norm" in module or module.startswith("ln_") or ("conv" in module and parameter.ndim == 3))
