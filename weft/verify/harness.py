"""The parity harness compares an Engine on any mesh with the reference. `weft verify` and the tests call the same
`verify`.

Gradient of a parameter: max|g - g_ref| / max(max|g_ref|, 1e-3 G), G the model's largest |g_ref|, at most 1e-5. Weights
after the steps: ||w - w_ref|| / ||w_ref - w_0||, at most 2e-4 per parameter with AdamW, 1e-5 over all together with
SGD. Noise is the largest of these differences between the reference and itself: with the documents in another order,
with right-padded batches of four, and in fp64 (with the same routes through experts). It is measured if a value is
beyond its tolerance. fp64 takes longest: it is measured at once if it will be needed, otherwise only if the other noise
does not explain the difference. A tolerance widens to ten times the noise, but never beyond 1e-3.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.batch.document import DocumentMeta
from weft.engine.engine import Engine
from weft.engine.losses.base import Loss
from weft.engine.selfcheck.harness import gradient_difference
from weft.errors import UserError
from weft.models.experts import hides_routers
from weft.models.facts import position_limit
from weft.models.freeze import resolved
from weft.verify.adapter import (
    engine_names,
    matrix_parts,
    optimizer_by_files,
    randomize_adapters,
    renamed,
    saved_adapter,
)
from weft.verify.expected import (
    Expected,
    ExpectedGradient,
    ReferenceTrainer,
    expect,
    norm_of,
    with_noise,
    with_rounding,
)
from weft.verify.image_reference import Images
from weft.verify.objective_check import LossAndGradients, divisor, expect_objective, observe_objective
from weft.verify.observed import (
    Observed,
    Step,
    Tensors,
    largest,
    observe,
    readout_distance,
    to_documents,
)
from weft.verify.routing import Differences

GRADIENT = 1e-5
ADAMW = 2e-4
SGD = 1e-5
WIDEST = 1e-3
SCALAR = 1e-5
# If the reference's movement of a parameter differs by this share between orders of summation, the true gradient is
# zero
# (a bias of keys, which softmax cancels), and AdamW's steps are rounding. Such a parameter may move up to ten times as
# far as in the reference.
_ROUNDING = 0.1
# The same holds for a parameter whose gradient is 0 except for rounding: it moves by less than this share of the
# largest movement of a parameter (root mean squares).
_STILL = 0.01
_CODE = 1 / 32  # distance of neighbouring codes of 8-bit state at a quarter of the largest code


@dataclass(frozen=True)
class Figure:
    """One comparison. It passes if value <= tolerance. noise: the reference's noise; None if it was not measured or
    does not count. note: position of the worst value."""

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
    """The result of a comparison. figures: in the order of the checks. worst: the five parameters whose gradients
    differ most. remarks: sentences for the user."""

    figures: list[Figure]
    worst: list[Figure] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(figure.passed for figure in self.figures)

    @property
    def failed(self) -> list[str]:
        return [figure.name for figure in self.figures if not figure.passed]


def verify(
    engine: Engine, path: str, steps: Sequence[Step], lrs: Sequence[float], images: Images | None = None,
    objective: Loss | None = None, image_step: Step = (),
) -> Verdict | None:  # fmt: skip
    """Compare the engine, which has the weights at `path`, with the reference. Returns the verdict on rank 0, None on
    others. Trains the engine. Collective.

    steps: documents of each optimizer step. lrs: learning rate of each step. images: by the token ids of their
    documents. objective: a loss that is also compared, on the documents of the first step; training is by cross
    entropy. image_step: documents with images to put after a document that is split (image_documents.documents_behind).
    The reference runs first, because the engine follows its routes through experts. Raises UserError for settings with
    which the engine cannot follow them.
    """
    compiles = engine.config.model.compile is True and engine.built.flops.expert
    if compiles and not hides_routers(layer for _, layer in engine.module.layers):
        raise UserError(
            "weft verify cannot follow the reference's routes through compiled routers: add model.compile=false."
        )
    if engine.config.model.router_bias_rate is not None:
        raise UserError(
            "weft verify follows the reference's routes, which model.router_bias_rate would change: add "
            "model.router_bias_rate=null."
        )
    if engine.config.model.recompute != "none" and engine.pipeline is not None and engine.built.flops.expert:
        raise UserError(
            "weft verify cannot follow the reference's routes if layers of several rows wait to be recomputed "
            "(mesh.pp): add model.recompute=none."
        )
    expected = None
    images = images or {}
    metadata = [meta for step in steps for meta in to_documents(engine, step, images)[1]]
    cut_documents(engine, max(len(ids) for step in steps for ids, _ in step), metadata)
    randomize_adapters(engine)
    with saved_adapter(engine) as adapter:
        if engine.ranks.is_first:
            trainer = trainer_of(engine, path, lrs, adapter, images)
            expected = expect(trainer, steps, engine.built.flops, image_step)
        shared: list[Any] = [expected.routes, expected.held_out] if expected is not None else [{}, ()]
        dist.broadcast_object_list(shared, src=0, group=engine.ranks.group)
        figures: list[Figure] = []
        if objective is not None:
            divisor_of_loss = divisor(engine, objective, steps[0], images)
            loss_results = observe_objective(engine, objective, steps[0], shared[0], images)
            if engine.ranks.is_first:
                expected_loss = expect_objective(trainer, objective, steps[0], divisor_of_loss)
                figures = objective_figures("train.loss", loss_results, expected_loss)
        observed = renamed(engine, observe(engine, steps, lrs, shared[0], images, shared[1], image_step))
        if expected is None:
            return None
        verdict = _judge_with_noise(engine, observed, expected, trainer, steps)
    remarks = [*verdict.remarks, *_context_remarks(engine, steps)]
    return replace(verdict, figures=[*verdict.figures, *figures], remarks=remarks)


def _judge_with_noise(
    engine: Engine, observed: Observed, expected: Expected, trainer: ReferenceTrainer, steps: Sequence[Step]
) -> Verdict:
    """All comparisons. The reference's noise is measured if a value is beyond its tolerance."""
    optimizer, facts, at_once = engine.config.optimizer.name, engine.built.flops, rounds(engine)
    state = min(engine.state_dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    verdict = judge(observed, expected, optimizer, state)
    if not verdict.passed:
        expected = with_noise(expected, trainer, steps)
        if at_once:
            expected = with_rounding(expected, trainer, steps, facts)
        verdict = judge(observed, expected, optimizer, state)
    if may_be_rounding(verdict) and not at_once:
        verdict = judge(observed, with_rounding(expected, trainer, steps, facts), optimizer, state)
    return verdict


def objective_figures(name: str, observed: LossAndGradients, expected: ExpectedGradient) -> list[Figure]:
    """Figures of a loss other than cross entropy, with its name."""
    noise, figures = gradient_noise(expected.gradients, expected.noise_samples), []
    for (loss, gradients), rows in zip(observed, ("", ", many micro-batches"), strict=True):
        figures.append(Figure(f"{name}: loss{rows}", relative(loss, expected.loss), SCALAR))
        parameters = compare_gradients(gradients, expected.gradients, noise)
        figures.append(worst_of(f"{name}: gradients{rows}", parameters))
    return figures


def may_be_rounding(verdict: Verdict) -> bool:
    """Whether only gradients, their norms and weights are beyond their tolerances, and none is beyond the maximum to
    which noise may widen its tolerance."""
    failed = [figure for figure in verdict.figures if not figure.passed]
    return bool(failed) and all(figure.noise is not None and figure.value <= WIDEST for figure in failed)


def cut_documents(engine: Engine, longest: int, metadata: Sequence[DocumentMeta] = ()) -> None:
    """If mesh.cp has several ranks, make rows so short that documents of `longest` tokens are split over all of them,
    except for models whose rotary table depends on a document's length. metadata: of documents; documents with images
    keep their room."""
    limit = position_limit(engine.built.config.get_text_config())
    room = -(-max((meta.room for meta in metadata if meta.patches), default=0) // engine.planner.image_room.ranks)
    if engine.context is not None and (limit is None or longest <= limit):
        engine.budget = min(engine.budget, max(room, -(-longest // engine.context.size) + 1))


def _context_remarks(engine: Engine, steps: Sequence[Step]) -> list[str]:
    if engine.mesh.cp_size == 1:
        return []
    context = engine.context
    if context is None or engine.budget >= max(len(ids) for step in steps for ids, _ in step):
        why = "its rotary table depends on a document's length"
        if context is None:
            why = (
                "its layers carry state that they cannot share"
                if engine.built.support.mixers
                else "its documents are padded"
            )
        return [f"cp       documents of this model are not split over the ranks of cp: {why}"]
    return [
        f"cp       documents longer than {engine.budget} tokens were split over {context.size} ranks "
        f"(ring {context.ring_size} x ulysses {context.ulysses_size})"
    ]


def trainer_of(
    engine: Engine, path: str, lrs: Sequence[float], adapter: str | None, images: Images
) -> ReferenceTrainer:
    """The trainer of references with the settings of this engine."""
    model, form = engine.config.model, engine.module.quantised_form
    rounded = engine.module.quantised_shapes.keys() - engine.module.kept_as_stored
    return ReferenceTrainer(
        path, lrs, optimizer_by_files(engine), str(engine.device), engine.module.facts.layers,
        resolved(engine.module, model.freeze),
        engine.balance, model.router_aux_loss == "step", adapter,
        pads=position_limit(engine.built.config.get_text_config()) is None, images=images,
        seed=engine.config.seed, aliases=engine_names(engine), matrices=matrix_parts(engine),
        quantised={} if form is None else dict.fromkeys(sorted(rounded), (form.name, form.block)),
        frozen=0 if engine.lora is None else engine.lora.frozen, fp8="fp8" in model.transforms,
    )  # fmt: skip


def rounds(engine: Engine) -> bool:
    """Whether the difference to fp64 is measured at once, because it will be needed: mesh.tp adds partial sums, and
    states along a sequence propagate rounding errors. With experts it takes long, and is seldom needed."""
    return (engine.mesh.tp_size > 1 or bool(engine.module.mixers)) and not engine.built.flops.expert


def judge(observed: Observed, expected: Expected, optimizer: str, state: torch.dtype = torch.float32) -> Verdict:
    """All comparisons of a run. state: the narrowest dtype of the optimizer's state."""
    figures, worst = _gradient_figures(observed, expected.steps)
    figures = [
        *_readout_figures(observed, expected),
        *figures,
        *_training_figures(observed, expected, optimizer, state),
    ]
    if observed.routing is None:
        return Verdict(figures, worst)
    figures.append(Figure("routes that differ without a tie", observed.routing.wrong, 0.0))
    return Verdict(figures, worst, [_routing_remark(observed.routing)])


def _routing_remark(routing: Differences) -> str:
    return (
        f"experts  the reference's routes were replayed; without replay this mesh would have chosen differently in "
        f"{routing.differing} of {routing.choices} (token, layer) pairs, {routing.wrong} of them not ties"
    )


def _readout_figures(observed: Observed, expected: Expected) -> list[Figure]:
    worst = {"logprob": 0.0, "entropy": 0.0}
    for index, pair in enumerate(expected.readouts):
        for name, values in zip(worst, pair, strict=True):
            worst[name] = largest([worst[name], readout_distance(observed.readouts[index][name], values)])
    moves = [
        readout_distance(observed.separate[i]["logprob"], values["logprob"]) for i, values in observed.readouts.items()
    ]
    accuracy, exact = observed.evaluated
    return [
        Figure("readout: logprob", worst["logprob"], SCALAR),
        Figure("readout: entropy", worst["entropy"], SCALAR),
        Figure("packed row vs. single documents", largest(moves), SCALAR),
        Figure("other documents do not change", observed.neighbours, SCALAR / 10),
        Figure("evaluation: accuracy", abs(accuracy - expected.accuracy), SCALAR),
        Figure("evaluation: exact", abs(exact - expected.exact), SCALAR),
        *_behind_figures(observed, expected),
    ]


def _behind_figures(observed: Observed, expected: Expected) -> list[Figure]:
    """Figures of documents with images in rows after a split document."""
    if observed.image_step is None:
        return []
    readouts, gradients = observed.image_step
    assert expected.image_step is not None
    logprobs, step = expected.image_step
    moves = [readout_distance(readouts[index]["logprob"], logprob) for index, logprob in enumerate(logprobs)]
    parameters = compare_gradients(gradients, step.gradients, gradient_noise(step.gradients, step.noise_samples))
    return [
        Figure("images after a split document: logprob", largest(moves), SCALAR),
        worst_of("images after a split document: gradients", parameters),
    ]


def _gradient_figures(observed: Observed, steps: Sequence[ExpectedGradient]) -> tuple[list[Figure], list[Figure]]:
    """(Figures of loss, norm and gradients for each step's documents, the five parameters that differ most)."""
    figures, parameters, micro = [], [], []
    for number, step in enumerate(steps):
        noise = gradient_noise(step.gradients, step.noise_samples)
        figures.append(Figure(f"loss, documents {number + 1}", relative(observed.losses[number], step.loss), SCALAR))
        norm, errors = (
            relative(observed.norms[number], step.norm),
            [relative(norm_of(o), step.norm) for o in step.noise_samples],
        )
        moved = max(errors, default=None)
        figures.append(Figure(f"gradient norm, documents {number + 1}", norm, widened(SCALAR, moved), moved))
        parameters += compare_gradients(observed.gradients[number], step.gradients, noise)
        if number == 0:
            figures.append(Figure("loss, many micro-batches", relative(observed.micro_loss, step.loss), SCALAR))
            micro = compare_gradients(observed.micro_gradients, step.gradients, noise)
    figures.append(worst_of("gradients, every parameter", parameters))
    figures.append(worst_of("gradients, many micro-batches", micro))
    return figures, worst_five(parameters)


def worst_five(parameters: Sequence[Figure]) -> list[Figure]:
    """The five parameters with the largest differences, each with its worst figure."""
    by_name: dict[str, Figure] = {}
    for figure in sorted(parameters, key=_excess):
        by_name[figure.name] = figure
    return sorted(by_name.values(), key=_excess, reverse=True)[:5]


def gradient_noise(gradients: Tensors, noise_samples: Sequence[Tensors]) -> dict[str, float]:
    """The noise of each parameter's gradient: the reference compared with itself with other orders of summation, and in
    fp64. Empty if there are no others."""
    figures: dict[str, float] = {}
    for noise in noise_samples:
        for figure in compare_gradients(noise, gradients, {}):
            figures[figure.name] = max(figures.get(figure.name, 0.0), figure.value)
    return figures


def compare_gradients(gradients: Tensors, expected: Tensors, noise: dict[str, float]) -> list[Figure]:
    """A figure per parameter. noise: by parameter. If only the reference has a gradient, or only the engine has a
    nonzero one, the difference is infinite."""
    largest = max(float(g.abs().max()) for g in expected.values())
    out = []
    for name in sorted(gradients.keys() | expected.keys()):
        actual, reference = gradients.get(name), expected.get(name)
        if actual is None or reference is None:
            present = actual if actual is not None else reference
            assert present is not None
            value = float("inf") if float(present.abs().max()) > 0 or actual is None else 0.0
        else:
            value = gradient_difference(actual, reference, largest)
        errors = noise.get(name)
        out.append(Figure(name, value, widened(GRADIENT, errors), errors))
    return out


def without_gradient(expected: Tensors) -> set[str]:
    """The parameters whose gradient compare_gradients cannot distinguish from 0."""
    largest = max(float(g.abs().max()) for g in expected.values())
    return {name for name, g in expected.items() if float(g.abs().max()) <= 1e-3 * GRADIENT * largest}


def _training_figures(observed: Observed, expected: Expected, optimizer: str, state: torch.dtype) -> list[Figure]:
    """Figures of losses and norms along the steps, of the weights after them, and of whether copies on several ranks
    stayed equal."""
    agree = Figure(
        "copies on several ranks are equal",
        float("inf") if observed.disagreement else 0.0,
        0.0,
        note=observed.disagreement,
    )
    if observed.disagreement:
        return [agree]
    pairs = list(zip(observed.trained, expected.curve, strict=True))
    losses = largest(relative(actual[0], reference[0]) for actual, reference in pairs)
    norms = largest(relative(actual[1], reference[1]) for actual, reference in pairs)
    name = f"weights after {len(pairs)} steps"
    return [
        agree,
        Figure(f"loss along {len(pairs)} steps", losses, 10 * SCALAR),
        Figure(f"gradient norm along {len(pairs)} steps", norms, 10 * SCALAR),
        compare_weights(
            name, observed.weights, expected.weights, expected.start, expected.noise_samples, optimizer, state
        ),
    ]


def compare_weights(
    name: str, weights: Tensors, after: Tensors, start: Tensors, noise_samples: Sequence[Tensors], optimizer: str,
    state: torch.dtype = torch.float32, unused: Collection[str] = (),
) -> Figure:  # fmt: skip
    """A figure for the engine's weights against the reference's, `after`, which started from `start`. noise_samples:
    the reference's weights with other orders of summation. unused: parameters without_gradient. state: dtype of the
    optimizer's state. In a narrow dtype one element may round differently, which in a small parameter is a large share
    of the total movement. The last bit of a gradient may also change the direction of a step of Lion: a thousandth of
    the elements may differ in this way (masters.py compares its steps from equal gradients)."""
    if optimizer == "sgd":
        value, *noises = (_distance(w, after, start, None) for w in (weights, *noise_samples))
        measured = max(noises, default=None)
        return Figure(name, value, widened(SGD, measured), measured, "all together")
    step = _CODE if state.itemsize == 1 else torch.finfo(state).eps if state.itemsize < 4 else 0.0

    def rounding(parameter: Tensor) -> float:
        flips = 2 * max(1e-3, 1 / parameter.numel()) ** 0.5 if optimizer == "lion" else 0.0
        return flips + step / 2 / float(parameter.numel() ** 0.5)

    moves = {n: _moved(after, start, n) / after[n].numel() ** 0.5 for n in after}
    still = {n for n in unused if n in moves and moves[n] <= _STILL * max(moves.values())}
    noise_of = {n: max((_distance(other, after, start, n) for other in noise_samples), default=None) for n in after}
    figures = [
        Figure(n, _distance(weights, after, start, n), widened(ADAMW + rounding(after[n]), noise), noise)
        if noise is None or noise < _ROUNDING
        else Figure(n, float(_moved(weights, start, n) > 10 * _moved(after, start, n)), 0.5, noise)
        for n, noise in noise_of.items()
        if n not in still
    ]
    for n in still:
        share = _moved(weights, start, n) / after[n].numel() ** 0.5 / (max(moves.values()) or 1.0)
        figures.append(Figure(n, float(share > _STILL), 0.5, note="has no gradient"))
    return worst_of(name, figures)


def _moved(weights: Tensors, start: Tensors, name: str) -> float:
    return float((weights[name].double() - start[name].double()).norm())


def _distance(weights: Tensors, expected: Tensors, start: Tensors, name: str | None) -> float:
    """||w - w_ref|| / ||w_ref - w_0|| of the parameter `name`, or of all together for None."""
    names = expected.keys() if name is None else [name]
    error = sum(float((weights[n].double() - expected[n].double()).square().sum()) for n in names)
    moved = sum(float((expected[n].double() - start[n].double()).square().sum()) for n in names)
    if moved == 0:
        return 0.0 if error == 0 else float("inf")
    return float((error / moved) ** 0.5)


def widened(tolerance: float, noise: float | None) -> float:
    """The tolerance of a figure whose reference value varies by `noise`, if that was measured."""
    return tolerance if noise is None else min(max(tolerance, 10 * noise), WIDEST)


def relative(value: float, expected: float) -> float:
    """The difference, relative to the expected value."""
    return abs(value - expected) / max(abs(expected), 1e-6)


def _excess(figure: Figure) -> float:
    return float("inf") if figure.value != figure.value else figure.value / figure.tolerance


def worst_of(name: str, figures: Sequence[Figure]) -> Figure:
    """The figure with the largest value / tolerance, with a common name."""
    worst = max(figures, key=_excess)
    return Figure(name, worst.value, worst.tolerance, worst.noise, worst.name)
