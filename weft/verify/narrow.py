"""Compares an engine in its configured 16-bit dtype, or in fp8, with plain transformers that round in the same way.

Both distances are to plain transformers in fp32: the engine's distance may be FACTOR times the distance of plain
transformers in this dtype. Rounding to 16 bits is noise of that size. Other losses of precision (a part of the loss
without the loss scale, matmuls summed in 16 bits) are far larger. Experts of all three follow the routes of fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.engine import Engine
from weft.verify.adapter import as_in_files, randomize_adapters, saved_adapter
from weft.verify.expected import ReferenceTrainer, on_cpu, recording
from weft.verify.harness import SCALAR, Figure, compare_gradients, relative, trainer_of, worst_of
from weft.verify.observed import Step, Tensors, following, gather_readouts, neighbours, one_gradient
from weft.verify.routing import Recorder, Routes

# For 58 pairs of a family and a dtype, on meshes of one and two ranks, the engine's distance was at most 1.4 times that
# of plain transformers. A missing part differs by 100%, compared with some percent of rounding in bf16, less in fp16.
FACTOR = 4.0
_SMALL = 1e-2  # a gradient counts as at least this share of the largest: smaller ones may be only rounding
# If rounding changes choices of experts, the auxiliary loss changes, and its gradient has another direction in 16 bits.
# Its component along that of fp32 stays near 1.
_BALANCE = 0.1
_MOST_HALVINGS = 24  # maximum number of halvings of the loss scale


@dataclass
class NarrowResults:
    """One side's results. logprobs: of each document. balance: gradients of only the experts' auxiliary loss; empty
    without one."""

    logprobs: list[Tensor]
    loss: float
    gradients: Tensors
    balance: Tensors


def narrow_dtype(engine: Engine) -> torch.dtype | None:
    """The dtype in which the engine computes, if it rounds to 16 or 8 bits and plain transformers can compute the
    same."""
    precision = engine.precision
    if precision.compute not in (torch.float16, torch.bfloat16) and not engine.config.model.transforms:
        return None
    return precision.compute if precision.master in (torch.float32, precision.compute) else None


def compare_as_configured(engine: Engine, path: str, step: Step) -> tuple[list[Figure], str]:
    """(Figures, remark) of an engine in its configured dtypes, with the weights at `path`; the remark is on the first
    rank. Collective.

    Isolation of documents is always judged, because rounding does not affect it. The other figures are judged if the
    engine computes in 16 bits or in fp8; otherwise they are a remark.
    """
    randomize_adapters(engine)
    with saved_adapter(engine) as adapter:
        return _compare(engine, trainer_of(engine, path, (), adapter, {}), step)


def _compare(engine: Engine, trainer: ReferenceTrainer, step: Step) -> tuple[list[Figure], str]:
    facts, dtype = engine.built.flops, narrow_dtype(engine)
    recorder = Recorder(facts.experts, facts.experts_per_token) if facts.expert else None
    exact = None
    if engine.ranks.is_first:
        exact = _of_reference(replace(trainer, fp8=False), step, torch.float32, recorder, 1.0)
    routes: list[Routes] = [recorder.routes if recorder is not None else {}]
    if recorder is not None:
        dist.broadcast_object_list(routes, src=0, group=engine.ranks.group)
    moves = neighbours(engine, step, gather_readouts(engine, step))
    with following(engine, routes[0]):
        readouts = gather_readouts(engine, step)
        loss, gradients = _finite_gradients(engine, step)
        balance = _finite_gradients(engine, _silent(step))[1] if engine.balance else {}
    moved = Figure("other documents do not change, configured dtypes", moves, SCALAR / 10)
    if exact is None:
        return [moved], ""
    logprobs = [readouts[index]["logprob"] for index in range(len(step))]
    observed = NarrowResults(logprobs, loss, as_in_files(engine, gradients), as_in_files(engine, balance))
    figures, why = [moved], "no verdict"
    if dtype is not None:
        plain = _finite_reference(trainer, step, dtype, recorder, engine)
        why = "no verdict: plain transformers are not finite in this dtype"
        if plain is not None:
            why = f"verdict: at most {FACTOR:g} times the difference of plain transformers in this dtype"
            head = f"{engine.module.facts.head}.weight"
            head = head if head in exact.gradients else f"{engine.module.facts.embedding}.weight"
            name = "fp8" if trainer.fp8 else str(dtype).removeprefix("torch.")
            figures += judge_narrow(observed, plain, exact, name, torch.finfo(dtype).eps, head)
    worst = max(compare_gradients(observed.gradients, exact.gradients, {}), key=lambda figure: figure.value)
    transforms = "".join(f", {name}" for name in engine.config.model.transforms)
    words = (
        f"as configured ({engine.precision.compute}, reduced in {engine.precision.reduce}{transforms}; {why}): loss "
        f"differs from fp32 by {relative(loss, exact.loss):.1e}, the worst gradient by {worst.value:.1e} ({worst.name})"
    )
    return figures, words


def judge_narrow(
    observed: NarrowResults, plain: NarrowResults, exact: NarrowResults, name: str, floor: float, head: str
) -> list[Figure]:
    """Figures of an engine (observed) and of plain transformers (plain), both with rounding, against fp32 (exact).
    name: of the dtype. floor: a distance that always passes. head: name of the weight in which each row is a
    token's."""

    def bounded(figure_name: str, actual: float, reference: float, note: str = "") -> Figure:
        return Figure(figure_name, actual, FACTOR * reference + floor, reference, note)

    def figure(figure_name: str, actual: float, reference: float, note: str = "") -> Figure:
        return bounded(f"{figure_name}, {name}", actual, reference, note)

    def gradients(figure_name: str, actual: Tensors, reference: Tensors, true: Tensors) -> Figure:
        off, noise = gradient_errors(actual, true), gradient_errors(reference, true)
        usual = median(noise.values())
        return worst_of(f"{figure_name}, {name}", [bounded(n, off[n], max(noise[n], usual)) for n in true])

    distance, noise = (_rms(side.logprobs, exact.logprobs) for side in (observed, plain))
    figures = [
        figure("readout: logprob", distance, noise),
        figure("loss", abs(observed.loss - exact.loss), max(noise, abs(plain.loss - exact.loss))),
        gradients("gradients, every parameter", observed.gradients, plain.gradients, exact.gradients),
    ]
    if head in exact.gradients:
        actual, reference = (row_errors(side.gradients[head], exact.gradients[head]) for side in (observed, plain))
        figures.append(figure("gradients of each token's row", actual, reference, head))
    if exact.balance:
        actual, reference = (abs(share_along(side.balance, exact.balance) - 1.0) for side in (observed, plain))
        scale = figure("scale of the auxiliary loss", actual, reference)
        figures.append(replace(scale, tolerance=max(scale.tolerance, _BALANCE)))
    return figures


def gradient_errors(actual: Tensors, exact: Tensors) -> dict[str, float]:
    """||g - g_exact|| / ||g_exact|| of each parameter; infinite if a gradient is missing."""
    threshold = _SMALL * max(float(g.norm()) for g in exact.values())
    return {
        name: float((actual[name].float() - g).norm()) / (max(float(g.norm()), threshold) or 1.0)
        if name in actual
        else float("inf") * bool(g.any())
        for name, g in exact.items()
    }


def share_along(actual: Tensors, exact: Tensors) -> float:
    """<g, g_exact> / <g_exact, g_exact>, over all parameters together: 1 if g is g_exact plus a part orthogonal to it,
    0 if g_exact is lost."""
    square = sum(float(g.double().square().sum()) for g in exact.values())
    return sum(float((actual[n].double() * g.double()).sum()) for n, g in exact.items() if n in actual) / (
        square or 1.0
    )


def row_errors(actual: Tensor, exact: Tensor) -> float:
    """The mean over rows of a matrix of ||row - row_exact|| / ||row_exact||, at most 1 for each row. So small rows,
    such as those of unlikely tokens, have the same influence as large ones."""
    size = exact.norm(dim=1)
    rows = size > 0
    off = (actual.float() - exact).norm(dim=1)[rows] / size[rows]
    return float(off.clamp(max=1.0).mean()) if bool(rows.any()) else 0.0


def _rms(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return float((torch.cat(list(actual)) - torch.cat(list(exact))).square().mean().sqrt())


def _silent(step: Step) -> Step:
    """The documents of a step, with no trained tokens."""
    return [(ids, [0.0] * len(ids)) for ids, _ in step]


def _finite_gradients(engine: Engine, step: Step) -> tuple[float, Tensors]:
    """(Loss, gradients) at the largest loss scale, up to the current one, at which they are finite. Training finds the
    loss scale in the same way."""
    while True:
        loss, gradients, _ = one_gradient(engine, step, None)
        finite = all(bool(g.isfinite().all()) for g in gradients.values())
        if finite or engine.loss_scale is None or not engine.loss_scale.overflow():
            return loss, gradients


def _of_reference(
    trainer: ReferenceTrainer, step: Step, dtype: torch.dtype, recorder: Recorder | None, scale: float
) -> NarrowResults:
    """Results of plain transformers in `dtype`. Without rounding the recorder records their routes; otherwise they
    follow it."""
    plain = trainer.reference(dtype)
    plain.scale = scale
    with recording(recorder, plain, trainer.layers, follow=trainer.fp8 or dtype != torch.float32):
        logprobs = [plain.logprobs(ids)[0] for ids, _ in step]
        loss, gradients = plain.gradients(step)
        balance = plain.gradients(_silent(step))[1] if trainer.balance else {}
    sides = [on_cpu({name: g.float() / scale for name, g in side.items()}) for side in (gradients, balance)]
    return NarrowResults(logprobs, loss, *sides)


def _finite_reference(
    trainer: ReferenceTrainer, step: Step, dtype: torch.dtype, recorder: Recorder | None, engine: Engine
) -> NarrowResults | None:
    """_of_reference at the largest loss scale, up to the engine's, at which it is finite; None if there is none."""
    scale = 1.0 if engine.loss_scale is None else engine.loss_scale.scale
    for _ in range(_MOST_HALVINGS):
        results = _of_reference(trainer, step, dtype, recorder, scale)
        if all(bool(g.isfinite().all()) for g in (*results.gradients.values(), *results.balance.values())):
            return results
        if dtype != torch.float16 or scale <= 1.0:
            return None
        scale /= 2
    return None
