"""Compares optimizer steps of an engine with the same steps of one process, from equal gradients.

Rounding in a step (bf16 masters, 8-bit or bf16 state) and jumps (the sign in Lion) turn differences in the last bits of
a gradient into different weights. So both sides get the engine's gradients, and their weights are compared element by
element. The gradients are compared with those of plain transformers at the same rounded weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from weft.config.schema import OptimizerConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.engine.optim.kinds import state_dtype
from weft.engine.optim.optimizer import clipping_factor, lossy_parts
from weft.verify.adapter import as_in_files, randomize_adapters, saved_adapter
from weft.verify.expected import ReferenceTrainer, norm_of, plain_optimizer, recording
from weft.verify.harness import GRADIENT, SCALAR, Figure, compare_gradients, relative, trainer_of, worst_of
from weft.verify.observed import Step, Tensors, following, gradient_of, to_documents
from weft.verify.reference import Reference
from weft.verify.reference_low_bit import CodedAdamW
from weft.verify.reference_muon import PlainMuon
from weft.verify.reference_optimizer import PlainLion, PlainSGD
from weft.verify.routing import Recorder, Routes

# Low-bit AdamW, SGD with rounded momentum and Lion consist of operations that are rounded one by one, so their bits
# equal the reference's. This does not hold for fused kernels and sums over a matrix: this share of a tensor's elements
# may be rounded to the other neighbour in bf16, and others may differ by this share of the tensor's largest step.
# Muon's five matmuls amplify rounding in matrices of low rank, such as a small router's.
SHARE, SMALL, MUON = 0.01, 1e-3, 0.05


class MasterReference:
    """One process with weights in the engine's master dtype, which uses the engine's gradients."""

    def __init__(self, engine: Engine, trainer: ReferenceTrainer, start: Tensors) -> None:
        """start: the engine's trained weights, with the names of the plain side."""
        config, dtype = trainer.config, engine.precision.master
        self.plain: Reference = trainer.reference()
        named = [(name, parameter) for name, parameter in self.plain.named() if parameter.requires_grad]
        first = {parameter: name for name, parameter in reversed(named)}  # the first name of tied parameters
        self.masters = {
            name: nn.Parameter(start[name].to(parameter.device, dtype, copy=True)) for parameter, name in first.items()
        }
        self.before = start
        optimizer = plain_optimizer(config, trainer.seed, trainer.aliases, trainer.matrices)
        state = torch.float32 if config.state_dtype == "int8" else state_dtype(config, dtype)
        rounding = config.rounding if dtype == torch.bfloat16 else "nearest"
        self.optimizer = replace(optimizer, state=state, rounding=rounding).over(
            [(name, self.masters[first[parameter]]) for name, parameter in named]
        )
        self.exact = isinstance(self.optimizer, (CodedAdamW, PlainSGD, PlainLion))
        self.clip = config.max_grad_norm

    def gradients(self, step: Step) -> tuple[float, Tensors]:
        """(Loss, gradients) in fp32 at the current weights."""
        for name, parameter in self.plain.named():
            if name in self.masters:
                parameter.data.copy_(self.masters[name])
        loss, gradients = self.plain.gradients(step)
        return loss, {name: gradient.cpu() for name, gradient in gradients.items()}

    def update(self, gradients: Tensors, norm: float, lr: float) -> None:
        """Run an optimizer step. norm: of these gradients."""
        for name, master in self.masters.items():
            if name in gradients:
                master.grad = gradients[name].to(master, copy=True).mul_(clipping_factor(norm, self.clip))
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def follow(self, weights: Tensors) -> Iterator[tuple[Figure, Figure]]:
        """For each parameter, (share of elements that differ from these weights, size of the difference). Then continue
        from these weights."""
        for name, master in self.masters.items():
            actual, expected = weights[name].to(master.dtype), master.detach().cpu()
            largest = float((expected.float() - self.before[name].float()).abs().max())
            off = (actual.float() - expected.float()).abs()
            neighbour = torch.maximum(actual.abs(), expected.abs()).float() * torch.finfo(master.dtype).eps
            share, distance = (
                float((off > 0).double().mean()),
                float(((off - neighbour).max() / (largest or 1.0)).clamp(0)),
            )
            muon = isinstance(self.optimizer, PlainMuon)
            yield Figure(name, share, MUON if muon else SHARE), Figure(name, distance, MUON if muon else SMALL)
            master.copy_(actual)
        self.before = weights


def compare_steps(engine: Engine, path: str, steps: Sequence[Step], lr: float) -> list[Figure]:
    """Figures of steps from equal weights and gradients, on the first rank; none on others. Trains the engine, which
    has the weights at `path`. Collective."""
    randomize_adapters(engine)
    start, facts, eps = _weights(engine), engine.built.flops, torch.finfo(engine.precision.master).eps
    losses, gradients, norms, shares, distances = (list[Figure]() for _ in range(5))
    with saved_adapter(engine) as adapter:
        reference = None
        if engine.ranks.is_first:
            reference = MasterReference(engine, trainer_of(engine, path, (), adapter, {}), start)
        for step in steps:
            recorder = Recorder(facts.experts, facts.experts_per_token) if facts.expert else None
            if reference is not None:
                with recording(recorder, reference.plain, engine.module.facts.layers):
                    expected_loss, expected = reference.gradients(step)
            routes: list[Routes] = [{} if recorder is None else recorder.routes]
            dist.broadcast_object_list(routes, src=0, group=engine.ranks.group)
            documents, metas = to_documents(engine, step)
            with following(engine, routes[0]):
                loss, actual, norm = gradient_of(engine, engine.plan(metas), documents, CrossEntropy(), keep=True)
            engine.apply(lr)
            weights = _weights(engine)
            if reference is None:
                continue
            actual = as_in_files(engine, actual)
            losses.append(Figure("", relative(loss, expected_loss), SCALAR))
            norms.append(Figure("", relative(norm, norm_of(actual)), SCALAR))
            wide = {name: gradient.float() for name, gradient in actual.items()}
            gradients += [replace(f, tolerance=eps + 10 * GRADIENT) for f in compare_gradients(wide, expected, {})]
            reference.update(actual, norm, lr)
            for share, distance in reference.follow(weights):
                shares.append(share)
                distances.append(distance)
    if reference is None:
        return []
    masters = f"masters in {str(engine.precision.master).removeprefix('torch.')}"
    compared = [
        worst_of(f"{masters}: loss along {len(steps)} steps", losses),
        worst_of(f"{masters}: gradient norm along {len(steps)} steps", norms),
        worst_of(f"{masters}: gradients of {len(steps)} steps", gradients),
        worst_of(f"{masters}: weights that differ", shares),
    ]
    if reference.exact:
        return [*compared[:3], replace(compared[3], tolerance=0.0)]
    return [*compared, worst_of(f"{masters}: weights beyond rounding", distances)]


def rounds_steps(config: OptimizerConfig, master: torch.dtype) -> bool:
    """Whether a step of the optimizer rounds or jumps, so that weft compares it with one process from equal
    gradients."""
    return bool(lossy_parts(config, master)) or config.name == "lion"


def _weights(engine: Engine) -> Tensors:
    return as_in_files(engine, {name: tensor.detach().cpu().clone() for name, tensor in engine.tensors()})
