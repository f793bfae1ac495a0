"""Compares the training of any loss by an engine with plain PyTorch in one process, with the measures of harness.py.

It compares the loss and every parameter's gradient of the first step, in rows as configured and in short rows, and
losses, gradient norms and weights along all steps. `weft verify` for dpo, reward and distill calls `verify_training`;
for RL it uses the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.base import Loss
from weft.engine.step_plan.plan import StepPlan
from weft.models import hf
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.cuts import full_shape, shards_of
from weft.verify.adapter import (
    as_in_files,
    engine_names,
    matrix_parts,
    optimizer_by_files,
    saved_adapter,
)
from weft.verify.expected import norm_of, on_cpu, plain_optimizer, recording, widen
from weft.verify.harness import (
    SCALAR,
    Figure,
    Verdict,
    compare_gradients,
    compare_weights,
    gradient_noise,
    may_be_rounding,
    widened,
    without_gradient,
    worst_five,
    worst_of,
)
from weft.verify.observed import Tensors, following, gradient_of
from weft.verify.reference import Reference
from weft.verify.routing import Recorder

DISTURBED = 0.02  # relative change of a weight by `disturb_weights`


@dataclass
class ModelResults:
    """One side's results for a trained model. first: (loss, size, norm, gradients) of the first update. micro: (loss,
    gradients) of the same update in short rows, for each length of rows. curve: (loss, size, gradient norm) of each
    update. weights: after all updates. size: sum of the absolute values of the loss's terms; 1 on the mesh's side."""

    first: tuple[float, float, float, Tensors] = (0.0, 0.0, 0.0, {})
    micro: list[tuple[float, Tensors]] = field(default_factory=list)
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)


# The plain side of a loss: (model, examples of a step) -> tensors whose sum over all elements is the step's loss.
PlainLoss = Callable[[Reference, Sequence[Any]], Iterable[Tensor]]


class PreparedSteps(Protocol):
    """The mesh's side of some steps. objective: the loss. short: token budgets of rows with which the first step has
    many micro-batches."""

    objective: Loss
    short: list[int]

    def prepare(self, number: int, budget: int | None) -> tuple[StepPlan, Mapping[int, Document]]:
        """(The plan of step `number`, at least this rank's documents). The loss has then received the step. budget:
        tokens of a row; None: as configured. Collective."""
        ...


@dataclass(frozen=True)
class TrainedLoss:
    """A loss and the steps that are trained with it, on both sides. name: prefix of the figures. steps: the examples of
    each step, in the form that `plain` reads."""

    name: str
    prepared: PreparedSteps
    steps: Sequence[Sequence[Any]]
    plain: PlainLoss


def full_tensors(engine: Engine) -> Tensors:
    """Copies of all weights, with the names of the plain side. Collective."""
    tensors = {name: tensor.detach().cpu().float().clone() for name, tensor in engine.tensors()}
    return as_in_files(engine, tensors)


@torch.no_grad()
def disturb_weights(engine: Engine, seed: int = 0) -> None:
    """Change the trained weights by about DISTURBED, so that they differ from a reference with the same files. The same
    on every mesh."""
    cuts = engine.divided.cuts
    for number, (name, parameter) in enumerate(engine.module.named_parameters()):
        if not parameter.requires_grad:
            continue
        shape, generator = full_shape(name, parameter, cuts), torch.Generator().manual_seed(1000 * seed + number)
        factors = 1 + DISTURBED * torch.randn(shape, generator=generator)
        for shard in shards_of(parameter, cuts.get(name)):
            shard.values.mul_(factors[shard.box.within(Box.from_shape(shape))].to(shard.values))


def verify_training(
    engine: Engine, loss: TrainedLoss, open_plain: Callable[[str | None], Reference], lr: float
) -> tuple[list[Figure], list[Figure]]:
    """(Figures of the loss, the five parameters that differ most); empty except on the first rank. Trains the engine.
    Collective.

    open_plain: a fresh plain model, given the folder of the engine's adapter or None. It receives the engine's weights.
    lr: the learning rate of every step.
    """
    start = full_tensors(engine)
    facts, optimizer = engine.built.flops, engine.config.optimizer
    state = min(engine.state_dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    with saved_adapter(engine) as adapter:

        def plain_run(*, reverse: bool = False, double: bool = False, recorder: Recorder | None = None) -> ModelResults:
            plain = open_plain(adapter)
            with torch.no_grad():
                for name, parameter in plain.named():
                    if name in start:
                        parameter.copy_(start[name])
            config = optimizer_by_files(engine)
            rule = plain_optimizer(config, engine.config.seed, engine_names(engine), matrix_parts(engine))
            narrow = torch.bfloat16 if config.state_dtype == "bf16" else torch.float32
            if double:
                widen(plain.model)
            plain.start(rule.over(plain.named()), config.max_grad_norm, narrow)
            with recording(recorder, plain, engine.module.facts.layers, follow=double):
                if not double:
                    return _train(plain, loss, lr, reverse, recorder)
                with hf.in_double():
                    return _train(plain, loss, lr, reverse, recorder)

        plain, recorder = None, Recorder(facts.experts, facts.experts_per_token) if facts.expert else None
        if engine.ranks.is_first:
            plain = plain_run(recorder=recorder)
        routes: list[Any] = [recorder.routes if recorder is not None else {}]
        dist.broadcast_object_list(routes, src=0, group=engine.ranks.group)
        observed = _observe(engine, loss, lr, routes[0])
        if plain is None:
            return [], []
        noise_runs = list[ModelResults]()

        def judge() -> Verdict:
            figures, worst = figures_of(observed, plain, noise_runs, start, optimizer.name, loss.name, state)
            return Verdict(figures, worst)

        verdict = judge()
        if not verdict.passed:
            noise_runs.append(plain_run(reverse=True))
            verdict = judge()
        if may_be_rounding(verdict):
            noise_runs.append(plain_run(double=True, recorder=recorder))
            verdict = judge()
    return verdict.figures, verdict.worst


def _train(plain: Reference, loss: TrainedLoss, lr: float, reverse: bool, recorder: Recorder | None) -> ModelResults:
    """The plain side. reverse: process examples in another order, which changes only rounding."""
    results = ModelResults()
    for number, step in enumerate(loss.steps):
        if recorder is not None:
            recorder.stage = number
        plain.model.zero_grad(set_to_none=True)
        value = size = 0.0
        for terms in loss.plain(plain, step[::-1] if reverse else step):
            if terms.requires_grad:
                terms.sum().backward()
            value, size = value + float(terms.detach().sum()), size + float(terms.detach().abs().sum())
        gradients = {name: gradient.float().cpu() for name, gradient in plain.current_gradients().items()}
        if not number:
            results.first = value, size, norm_of(gradients), gradients
        results.curve.append((value, size, plain.update(lr)))
    results.weights = {name: weight.float() for name, weight in on_cpu(plain.weights()).items()}
    return results


def _observe(engine: Engine, loss: TrainedLoss, lr: float, routes: Any) -> ModelResults:
    """The mesh's side, which follows the plain side's routes through experts. Collective."""
    results = ModelResults()
    with following(engine, routes) as replay:
        for budget in (*loss.prepared.short, None):
            plan, documents = loss.prepared.prepare(0, budget)
            value, gradients, norm = gradient_of(engine, plan, documents, loss.prepared.objective)
            gradients = as_in_files(engine, gradients)
            if budget is None:
                results.first = value, 1.0, norm, gradients
            else:
                results.micro.append((value, gradients))
        for number in range(len(loss.steps)):
            if replay is not None:
                replay.stage = number
            plan, documents = loss.prepared.prepare(number, None)
            value = engine.accumulate(plan, documents, loss.prepared.objective)["loss"] or 0.0
            results.curve.append((value, 1.0, engine.apply(lr).grad_norm))
    results.weights = full_tensors(engine)
    return results


# ---------------------------------------------------------------- figures


def figures_of(
    observed: ModelResults,
    plain: ModelResults,
    noise_runs: Sequence[ModelResults],
    start: Tensors,
    optimizer: str,
    prefix: str,
    state: torch.dtype = torch.float32,
) -> tuple[list[Figure], list[Figure]]:
    """(Figures of a trained model, its five parameters that differ most). noise_runs: the plain side's results with
    other orders of summation, and in fp64. start: the weights before training. optimizer: its name. prefix: of the
    figures' names. state: dtype of the optimizer's state."""
    noise_of_gradients = gradient_noise(plain.first[3], [run.first[3] for run in noise_runs])
    loss, size, norm, expected = plain.first
    parameters = compare_gradients(observed.first[3], expected, noise_of_gradients)
    micro = [figure for _, g in observed.micro for figure in compare_gradients(g, expected, noise_of_gradients)]
    losses = [abs(value - loss) / max(size, 1e-6) for value in (observed.first[0], *(v for v, _ in observed.micro))]
    updates, along = len(plain.curve), _along(observed, plain)
    moved = [_along(run, plain) for run in noise_runs]
    noises = [max((pair[position] for pair in moved), default=None) for position in range(2)]
    weights = [run.weights for run in noise_runs]
    figures = [
        Figure("loss", losses[0], SCALAR),
        Figure("loss, many micro-batches", max(losses[1:], default=0.0), SCALAR),
        Figure("gradient norm", abs(observed.first[2] - norm) / max(norm, 1e-6), SCALAR),
        worst_of("gradients, every parameter", parameters),
        worst_of("gradients, many micro-batches", micro),
        *(
            Figure(f"{name} along {updates} updates", value, widened(10 * SCALAR, noise), noise)
            for name, value, noise in zip(("loss", "gradient norm"), along, noises, strict=True)
        ),
        compare_weights(
            f"weights after {updates} updates",
            observed.weights,
            plain.weights,
            start,
            weights,
            optimizer,
            state,
            without_gradient(expected),
        ),
    ]
    worst = [replace(figure, name=prefix + figure.name, note="") for figure in worst_five(parameters)]
    return [replace(figure, name=prefix + figure.name) for figure in figures], worst


def _along(side: ModelResults, plain: ModelResults) -> tuple[float, float]:
    """The largest differences of the losses and of the gradient norms of all updates from those of the plain side."""
    pairs = list(zip(side.curve, plain.curve, strict=True))
    losses = [abs(actual[0] - loss) / max(size, 1e-6) for actual, (loss, size, _) in pairs]
    norms = [abs(actual[2] - norm) / max(norm, 1e-6) for actual, (_, _, norm) in pairs]
    return max(losses), max(norms)
