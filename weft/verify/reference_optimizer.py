"""The reference's optimizer: torch's over plain parameters, one group per parameter. Imports nothing of weft except
other parts of the reference."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Adafactor

from weft.verify.reference_low_bit import CodedAdamW
from weft.verify.reference_muon import Part, PlainMuon


@dataclass(frozen=True)
class Optimizer:
    """AdamW, SGD, Lion, Adafactor, Muon or the class at an import path. Only matrices and embeddings decay.

    groups: (patterns of names, factor of the learning rate, decay or None); the first that matches a parameter counts.
    coded: whether AdamW's state is in 8 bits; tensors with fewer than 4096 elements or 64 columns, or without decay,
    keep fp32 state. seed, aliases: of its random bits: the run's seed, and other names of parameters. state: dtype of
    other state. rounding: of weights in bf16, as in CodedAdamW. matrices: parts of parameters that Muon orthogonalises;
    muon_rate: their factor of the learning rate.
    """

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[tuple[Sequence[str], float, float | None]] = ()
    coded: bool = False
    seed: int = 0
    aliases: Mapping[str, str] = field(default_factory=dict)
    matrices: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    muon_rate: float = 1.0
    muon_momentum: float = 0.95
    muon_scale: str = "match_rms_adamw"
    state: torch.dtype = torch.float32
    rounding: str = "nearest"

    def over(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """A fresh optimizer. named: (name, parameter); a tied parameter occurs with each of its names."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in named:
            names.setdefault(parameter, []).append(name)
        groups = [self._group(parameter, tensor_names) for parameter, tensor_names in names.items()]
        dtype = next(iter(names)).dtype
        if self.name == "sgd":
            if self.momentum > 0 and (self.state != dtype or dtype == torch.bfloat16):
                return PlainSGD(groups, self.momentum, self.state)
            return torch.optim.SGD(groups, lr=0.0, momentum=self.momentum)
        if self.name == "lion":
            return PlainLion(groups, self.betas, self.state)
        if self.name == "adafactor":  # with the settings of transformers' Trainer
            return Adafactor(groups, lr=0.0, scale_parameter=False, relative_step=False)
        if self.name == "adamw" and (self.coded or self.state != dtype or self.rounding != "nearest"):
            first = {parameter: tensor_names[0] for parameter, tensor_names in names.items()}
            aliases = {parameter: self.aliases.get(name, name) for parameter, name in first.items()}
            coded = {parameter: self.coded and has_codes(name, parameter) for parameter, name in first.items()}
            return CodedAdamW(
                groups, aliases, coded, betas=self.betas, eps=self.eps, seed=self.seed, state=self.state,
                rounding=self.rounding,
            )  # fmt: skip
        if self.name == "muon":
            parts = {
                parameter: matrices
                for parameter, tensor_names in names.items()
                if (matrices := self._parts(tensor_names))
            }
            for group in groups:
                group["factor"] *= self.muon_rate if group["params"][0] in parts else 1.0
            return PlainMuon(
                groups, parts, betas=self.betas, eps=self.eps, momentum=self.muon_momentum, scale=self.muon_scale
            )
        if self.name == "adamw":
            # In 16 bits only the fused kernel computes a step in fp32.
            fused = dtype == torch.bfloat16
            return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=fused)
        module, _, kind = self.name.replace(":", ".").rpartition(".")
        built: torch.optim.Optimizer = getattr(importlib.import_module(module), kind)(groups, lr=1.0, **self.options)
        return built

    def _parts(self, names: Sequence[str]) -> Sequence[Part]:
        return next((self.matrices[name] for name in names if name in self.matrices), ())

    def _group(self, parameter: nn.Parameter, names: Sequence[str]) -> dict[str, Any]:
        decay = self.weight_decay if decays(names[0], parameter) else 0.0
        for patterns, factor, options in self.groups:
            if any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in patterns for name in names):
                return {"params": [parameter], "factor": factor, "weight_decay": decay if options is None else options}
        return {"params": [parameter], "factor": 1.0, "weight_decay": decay}


class PlainLion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, algorithm 2) with decoupled decay, computed in fp32. stored: dtype of the momentum."""

    def __init__(self, groups: Any, betas: tuple[float, float], stored: torch.dtype = torch.float32) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.betas, self.stored = betas, stored

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient."""
        (beta1, beta2), stored = self.betas, self.stored
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to(max(parameter.dtype, torch.float32, key=lambda x: x.itemsize))
                before = self.state[parameter].get("exp_avg", torch.zeros_like(parameter)).to(gradient)
                direction = torch.sign(beta1 * before + (1 - beta1) * gradient)
                kept = parameter.to(gradient) * (1 - group["lr"] * group["weight_decay"])
                parameter.copy_(kept - group["lr"] * direction)
                after = beta2 * before + (1 - beta2) * gradient
                self.state[parameter]["exp_avg"] = after if stored == torch.float32 else after.to(stored)


class PlainSGD(torch.optim.Optimizer):
    """torch.optim.SGD, computed in fp32, with its momentum in another dtype than the weights."""

    def __init__(self, groups: Any, momentum: float, stored: torch.dtype) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.momentum, self.stored = momentum, stored

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weight, before = parameter.float(), self.state[parameter].get("momentum_buffer", 0.0)
                velocity = self.momentum * before + (parameter.grad.float() + group["weight_decay"] * weight)
                parameter.copy_(weight - group["lr"] * velocity)
                self.state[parameter]["momentum_buffer"] = velocity.to(self.stored).float()


def has_codes(name: str, parameter: Tensor) -> bool:
    """Whether 8-bit state is in codes for this parameter."""
    return decays(name, parameter) and parameter.numel() >= 4096 and parameter.shape[-1] >= 64


def decays(name: str, parameter: Tensor) -> bool:
    """Whether a parameter decays: matrices and embeddings, but not biases, norms, 1-d convolutions or A_log of any
    shape."""
    last, module = name.split(".")[-1], name.split(".")[-2:][0]
    if parameter.ndim < 2 or "bias" in last or last == "A_log":
        return False
    return not ("norm" in module or module.startswith("ln_") or ("conv" in module and parameter.ndim == 3))
