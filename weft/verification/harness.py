"""The parity harness: an Engine on any mesh against the reference, by DESIGN's measure. `weft verify` and the tests
call the same `verify`.

Gradient of a parameter: max|g - g_ref| / max(max|g_ref|, 1e-3 G), G the model's largest |g_ref|, at most 1e-5. Weights
after the steps: ||w - w_ref|| / ||w_ref - w_0||, at most 2e-4 per parameter under AdamW, 1e-5 over all together under
SGD. Beside each figure stands the reference's own noise: the larger of the same documents in another order, and of the
same documents as right-padded batches of four. A tolerance widens to ten times that noise, and never beyond 1e-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from weft.config.schema import OptimizerConfig
from weft.engine.document import Document, DocumentMeta
from weft.engine.engine import Engine
from weft.objectives.cross_entropy import CrossEntropy
from weft.verification import reference

GRADIENT = 1e-5
ADAMW = 2e-4
SGD = 1e-5
WIDEST = 1e-3
SCALAR = 1e-5

Tensors = dict[str, Tensor]
Step = Sequence[reference.Document]


@dataclass(frozen=True)
class Figure:
    """One comparison. value <= tolerance passes; noise is the reference's own; note names where the worst was."""

    name: str
    value: float
    tolerance: float
    noise: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.tolerance  # a NaN fails


@dataclass(frozen=True)
class Verdict:
    """figures in the order of the checks; worst: the five parameters whose gradients differ most; remarks in words."""

    figures: list[Figure]
    worst: list[Figure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(figure.passed for figure in self.figures)

    @property
    def failed(self) -> list[str]:
        return [figure.name for figure in self.figures if not figure.passed]


@dataclass
class Observed:
    """What the engine computed, whole, on rank 0."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    micro_loss: float = 0.0
    micro_gradients: Tensors = field(default_factory=dict)
    readouts: dict[int, Tensors] = field(default_factory=dict)
    alone: dict[int, Tensors] = field(default_factory=dict)
    neighbours: float = 0.0
    trained: list[tuple[float, float]] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)


def verify(engine: Engine, path: str, steps: Sequence[Step], lrs: Sequence[float]) -> Verdict | None:
    """Compare the engine, whose weights are those at `path`, with the reference; the verdict is on rank 0.

    steps: the documents of each optimizer step; lrs: their learning rates. Trains the engine.
    """
    observed = observe(engine, steps, lrs)
    if engine.ranks.rank != 0:
        return None
    return judge(observed, path, steps, lrs, engine.config.optimizer, str(engine.device))


# ---------------------------------------------------------------- the engine's side


def observe(engine: Engine, steps: Sequence[Step], lrs: Sequence[float]) -> Observed:
    """Run every check's engine side; collective."""
    seen = Observed()
    for step in steps:
        loss, gradients, norm = _one_gradient(engine, step, None)
        seen.losses.append(loss)
        seen.gradients.append(gradients)
        seen.norms.append(norm)
    longest = max(len(ids) for ids, _ in steps[0])
    seen.micro_loss, seen.micro_gradients, _ = _one_gradient(engine, steps[0], longest)
    seen.readouts = _readouts(engine, steps[0], None)
    seen.alone = _readouts(engine, steps[0], longest)
    seen.neighbours = _neighbours(engine, steps[0], seen.readouts)
    for step, lr in zip(steps, lrs, strict=True):
        documents, metas = to_documents(engine, step)
        metrics = engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        result = engine.apply(lr)
        seen.trained.append((metrics["loss"] or 0.0, result.grad_norm))
    seen.weights = {name: tensor.cpu() for name, tensor in engine.tensors()}
    return seen


def to_documents(engine: Engine, step: Step) -> tuple[dict[int, Document], list[DocumentMeta]]:
    """The step as weft's Documents, by index, and their metadata."""
    documents = {
        index: Document(torch.tensor(ids), torch.tensor(mask, dtype=torch.float32))
        for index, (ids, mask) in enumerate(step)
    }
    return documents, [engine.meta(document) for document in documents.values()]


def _one_gradient(engine: Engine, step: Step, budget: int | None) -> tuple[float, Tensors, float]:
    """(loss, whole gradients on the CPU, their norm), with the gradient dropped afterwards."""
    documents, metas = to_documents(engine, step)
    metrics = engine.accumulate(engine.plan(metas, budget=budget), documents, CrossEntropy())
    gradients = {name: g.cpu() for name, g in engine.gradients() if g is not None}
    norm = engine.gradient_norm()
    engine.drop_gradients()
    return metrics["loss"] or 0.0, gradients, norm


def _readouts(engine: Engine, step: Step, budget: int | None) -> dict[int, Tensors]:
    """Readouts of all documents, from all ranks, on every rank."""
    documents, metas = to_documents(engine, step)
    mine = engine.readout(engine.plan(metas, budget=budget), documents, ("logprob", "entropy"))
    gathered: list[dict[int, Tensors]] = [{} for _ in range(engine.ranks.world)]
    dist.all_gather_object(gathered, mine)
    return {index: values for part in gathered for index, values in part.items()}


def _neighbours(engine: Engine, step: Step, before: dict[int, Tensors]) -> float:
    """Change the longest document: the largest move of any other document's logprobs."""
    longest = max(range(len(step)), key=lambda i: len(step[i][0]))
    ids, mask = step[longest]
    changed = [*step[:longest], (ids[::-1], mask), *step[longest + 1 :]]
    after = _readouts(engine, changed, None)
    moves = [float((after[i]["logprob"] - before[i]["logprob"]).abs().max()) for i in before if i != longest]
    return max(moves, default=0.0)


# ---------------------------------------------------------------- the verdict


def judge(
    seen: Observed, path: str, steps: Sequence[Step], lrs: Sequence[float], optimizer: OptimizerConfig, device: str
) -> Verdict:
    """Compute the reference and compare everything with it."""
    plain = reference.Reference(path, device)
    figures, worst = _gradient_figures(seen, plain, steps)
    figures = [*_readout_figures(seen, plain, steps[0]), *figures]
    figures += _training_figures(seen, path, steps, lrs, optimizer, device)
    return Verdict(figures, worst)


def _readout_figures(seen: Observed, plain: reference.Reference, step: Step) -> list[Figure]:
    worst = {"logprob": 0.0, "entropy": 0.0}
    for index, (ids, _) in enumerate(step):
        for name, expected in zip(worst, plain.logprobs(ids), strict=True):
            scale = max(1.0, float(expected.abs().max()))
            worst[name] = _larger(worst[name], float((seen.readouts[index][name] - expected).abs().max()) / scale)
    alone = max(float((seen.alone[i]["logprob"] - seen.readouts[i]["logprob"]).abs().max()) for i in range(len(step)))
    return [
        Figure("readout: logprob", worst["logprob"], SCALAR),
        Figure("readout: entropy", worst["entropy"], SCALAR),
        Figure("packed against alone", alone, SCALAR),
        Figure("neighbours do not move", seen.neighbours, SCALAR / 10),
    ]


def _gradient_figures(
    seen: Observed, plain: reference.Reference, steps: Sequence[Step]
) -> tuple[list[Figure], list[Figure]]:
    """Loss, norm and every parameter's gradient for each step's documents; the worst five parameters by name."""
    figures, parameters, micro = [], [], []
    for number, step in enumerate(steps):
        loss, expected = plain.gradients(step)
        expected = {name: g.cpu() for name, g in expected.items()}
        noise = _gradient_noise(plain, step, expected)
        norm = float(torch.stack([g.double().norm() for g in expected.values()]).norm())
        figures.append(Figure(f"loss, documents {number + 1}", _relative(seen.losses[number], loss), SCALAR))
        figures.append(Figure(f"gradient norm, documents {number + 1}", _relative(seen.norms[number], norm), SCALAR))
        parameters += compare_gradients(seen.gradients[number], expected, noise)
        if number == 0:
            figures.append(Figure("loss, many micro-batches", _relative(seen.micro_loss, loss), SCALAR))
            micro = compare_gradients(seen.micro_gradients, expected, noise)
    figures.append(_worst("gradients, every parameter", parameters))
    figures.append(_worst("gradients, many micro-batches", micro))
    return figures, sorted(parameters, key=_excess, reverse=True)[:5]


def _gradient_noise(plain: reference.Reference, step: Step, expected: Tensors) -> dict[str, float]:
    """The reference against itself, in another order and as padded batches."""
    _, reordered = plain.gradients(list(step)[::-1])
    others = [reordered, plain.padded_gradients(step)]
    found: dict[str, float] = dict.fromkeys(expected, 0.0)
    for other in others:
        for figure in compare_gradients({n: g.cpu() for n, g in other.items()}, expected, {}):
            found[figure.name] = max(found.get(figure.name, 0.0), figure.value)
    return found


def compare_gradients(gradients: Tensors, expected: Tensors, noise: dict[str, float]) -> list[Figure]:
    """A figure for each parameter; one that only one side has a gradient for differs by infinity, unless it is zero."""
    largest = max(float(g.abs().max()) for g in expected.values())
    out = []
    for name in sorted(gradients.keys() | expected.keys()):
        ours, theirs = gradients.get(name), expected.get(name)
        if ours is None or theirs is None:
            present = ours if ours is not None else theirs
            assert present is not None
            value = float("inf") if float(present.abs().max()) > 0 or ours is None else 0.0
        else:
            scale = max(float(theirs.abs().max()), 1e-3 * largest)
            value = float((ours - theirs).abs().max()) / scale if scale > 0 else float((ours - theirs).abs().max())
        own = noise.get(name, 0.0)
        out.append(Figure(name, value, _widened(GRADIENT, own), own))
    return out


def _training_figures(
    seen: Observed,
    path: str,
    steps: Sequence[Step],
    lrs: Sequence[float],
    optimizer: OptimizerConfig,
    device: str,
) -> list[Figure]:
    """Losses and norms along the steps, and the weights after them."""
    start, expected, curve = _train(path, steps, lrs, optimizer, device)
    others = [
        _train(path, [list(step)[::-1] for step in steps], lrs, optimizer, device)[1],
        _train(path, steps, lrs, optimizer, device, padded=True)[1],
    ]
    losses = max(_relative(ours[0], theirs[0]) for ours, theirs in zip(seen.trained, curve, strict=True))
    norms = max(_relative(ours[1], theirs[1]) for ours, theirs in zip(seen.trained, curve, strict=True))
    name = f"weights after {len(steps)} steps"
    if optimizer.name == "sgd":
        value, *noises = (_distance(w, expected, start, None) for w in (seen.weights, *others))
        noise = max(noises)
        weights = Figure(name, value, _widened(SGD, noise), noise, "all together")
    else:
        noise_of = {n: max(_distance(other, expected, start, n) for other in others) for n in expected}
        each = [
            Figure(n, _distance(seen.weights, expected, start, n), _widened(ADAMW, noise_of[n]), noise_of[n])
            for n in expected
        ]
        weights = _worst(name, each)
    return [
        Figure(f"loss along {len(steps)} steps", losses, 10 * SCALAR),
        Figure(f"gradient norm along {len(steps)} steps", norms, 10 * SCALAR),
        weights,
    ]


def _train(
    path: str,
    steps: Sequence[Step],
    lrs: Sequence[float],
    config: OptimizerConfig,
    device: str,
    padded: bool = False,
) -> tuple[Tensors, Tensors, list[tuple[float, float]]]:
    """(weights before, weights after, (loss, norm) of each step) of the reference."""
    plain = reference.Reference(path, device)
    start = plain.weights()
    plain.start(
        reference.Optimizer(
            config.name, config.betas, config.eps, config.weight_decay, config.momentum, config.max_grad_norm
        )
    )
    curve = [plain.step(step, lr, padded) for step, lr in zip(steps, lrs, strict=True)]
    return ({n: w.cpu() for n, w in start.items()}, {n: w.cpu() for n, w in plain.weights().items()}, curve)


def _distance(weights: Tensors, expected: Tensors, start: Tensors, name: str | None) -> float:
    """||w - w_ref|| / ||w_ref - w_0|| of one parameter, or of all together."""
    names = expected.keys() if name is None else [name]
    error = sum(float((weights[n].double() - expected[n].double()).square().sum()) for n in names)
    moved = sum(float((expected[n].double() - start[n].double()).square().sum()) for n in names)
    if moved == 0:
        return 0.0 if error == 0 else float("inf")
    return float((error / moved) ** 0.5)


def _widened(tolerance: float, noise: float) -> float:
    return min(max(tolerance, 10 * noise), WIDEST)


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-6)


def _larger(a: float, b: float) -> float:
    """The maximum, with NaN as the largest."""
    return b if b != b or b > a else a


def _excess(figure: Figure) -> float:
    return float("inf") if figure.value != figure.value else figure.value / figure.tolerance


def _worst(name: str, figures: Sequence[Figure]) -> Figure:
    """The figure closest to, or furthest beyond, its tolerance, under a common name."""
    worst = max(figures, key=_excess)
    return Figure(name, worst.value, worst.tolerance, worst.noise, worst.name)


def compare_once(engine: Engine, path: str, step: Step) -> str:
    """Loss and worst gradient of one step in the engine's own dtype, in words: information, not a verdict."""
    loss, gradients, _ = _one_gradient(engine, step, None)
    if engine.ranks.rank != 0:
        return ""
    plain = reference.Reference(path, str(engine.device))
    expected_loss, expected = plain.gradients(step)
    worst = max(compare_gradients(gradients, {n: g.cpu() for n, g in expected.items()}, {}), key=lambda f: f.value)
    return (
        f"in the configured dtypes ({engine.precision.compute}, reduced in {engine.precision.reduce}; no verdict): "
        f"loss differs by {_relative(loss, expected_loss):.1e}, the worst gradient by {worst.value:.1e} ({worst.name})"
    )
