"""The engine's side of the parity harness: runs every check on the mesh and gathers complete results on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.batch.document import Document, DocumentMeta
from weft.engine.batch.media import Media
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy, HeldOutLoss, Loss
from weft.engine.step_plan.plan import StepPlan
from weft.errors import RanksDisagreeError
from weft.verify import reference
from weft.verify.image_reference import Images
from weft.verify.routing import Differences, Replay, Routes

Tensors = dict[str, Tensor]
Step = Sequence[reference.Document]
_NONE: Images = {}


@dataclass
class Observed:
    """The engine's results, as complete tensors. routing: choices of experts that differ from the reference's; None for
    dense models. behind: readouts and gradients of documents with images after a split document; None without such
    documents. evaluated: accuracy and share of exact documents. apart: the error if replicated weights became unequal
    on several ranks, which ends training; otherwise ""."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    micro_loss: float = 0.0
    micro_gradients: Tensors = field(default_factory=dict)
    readouts: dict[int, Tensors] = field(default_factory=dict)
    separate: dict[int, Tensors] = field(default_factory=dict)
    image_step: tuple[dict[int, Tensors], Tensors] | None = None
    evaluated: tuple[float, float] = (0.0, 0.0)
    neighbours: float = 0.0
    trained: list[tuple[float, float]] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)
    routing: Differences | None = None
    disagreement: str = ""


def observe(
    engine: Engine,
    steps: Sequence[Step],
    lrs: Sequence[float],
    routes: Routes,
    images: Images = _NONE,
    held_out: Step = (),
    image_step: Step = (),
) -> Observed:
    """Run the engine's side of every check, following the reference's routes if there are any. Collective.

    held_out: documents to evaluate. image_step: see documents_behind.
    """
    observed = Observed()
    with following(engine, routes) as replay:
        if held_out:
            documents, metas = to_documents(engine, held_out)
            sums = engine.evaluate(engine.plan(metas), documents, HeldOutLoss())
            result = sums.reduce(engine.mesh.world_group)
            observed.evaluated = result["accuracy"] or 0.0, result["exact"] or 0.0
        if image_step:
            budget = budget_behind(engine, image_step, images)
            if budget is not None:
                readouts = gather_readouts(engine, image_step, budget, images)
                observed.image_step = readouts, one_gradient(engine, image_step, budget, images)[1]
        _observe(engine, steps, lrs, observed, replay, images)
    if replay is not None:
        observed.routing = replay.differences.summed()
    return observed


@contextmanager
def following(engine: Engine, routes: Routes) -> Iterator[Replay | None]:
    """Inside, the engine follows the reference's routes, if there are any."""
    if not routes:
        yield None
        return
    replay = Replay(routes, engine.built.flops.experts, engine.built.flops.experts_per_token)
    adapters = None if engine.lora is None else engine.lora.switch
    with replay.replaying(engine.module, [layer for _, layer in engine.module.layers], adapters):
        yield replay


def _observe(
    engine: Engine,
    steps: Sequence[Step],
    lrs: Sequence[float],
    observed: Observed,
    replay: Replay | None,
    images: Images,
) -> None:
    longest = short_budget(engine, steps[0], images)
    observed.micro_loss, observed.micro_gradients, _ = one_gradient(engine, steps[0], longest, images)
    observed.readouts = gather_readouts(engine, steps[0], None, images)
    observed.separate = gather_readouts(engine, steps[0], longest, images)
    observed.neighbours = neighbours(engine, steps[0], observed.readouts, images)
    later = [one_gradient(engine, step, None, images) for step in steps[1:]]
    first = one_gradient(engine, steps[0], None, images, keep=True)  # also the first step of training
    for loss, gradients, norm in (first, *later):
        observed.losses.append(loss)
        observed.gradients.append(gradients)
        observed.norms.append(norm)
    try:
        for number, (step, lr) in enumerate(zip(steps, lrs, strict=True)):
            if replay is not None:
                replay.stage = number
            loss = first[0]
            if number:
                documents, metas = to_documents(engine, step, images)
                loss = engine.accumulate(engine.plan(metas), documents, CrossEntropy())["loss"] or 0.0
            observed.trained.append((loss, engine.apply(lr).grad_norm))
    except RanksDisagreeError as error:  # the same on all ranks
        observed.disagreement = " ".join(str(error).split())
    observed.weights = {name: tensor.cpu() for name, tensor in engine.tensors()}


def short_budget(engine: Engine, step: Step, images: Images = _NONE) -> int:
    """Tokens of a row that has room for about one document of the step."""
    return max(meta.room for meta in to_documents(engine, step, images)[1]) + 1


def budget_behind(engine: Engine, documents: Step, images: Images) -> int | None:
    """A token budget of rows (see Engine.plan) with which some of documents_behind are after the split document; None
    if there is none."""
    metas = to_documents(engine, documents, images)[1]
    rooms = [meta.room for meta in metas]
    ranks = 1 if engine.context is None else engine.context.size
    budgets = range(-(-rooms[-1] // ranks) + max(rooms[:-1]), rooms[-1])
    result = {budget: _documents_after_cut(engine.plan(metas, budget=budget)) for budget in budgets}
    best = max(result, key=lambda budget: result[budget], default=None)
    return best if best is not None and result[best] else None


def _documents_after_cut(plan: StepPlan) -> int:
    """The largest number of complete documents in a row after a part of a split document."""
    rows = [(micro, rank, row) for micro, ranks in enumerate(plan.rows) for rank, row in enumerate(ranks)]
    cut = [set(row) & set(plan.shared_documents(micro, rank)) for micro, rank, row in rows]
    return max(len(row) - len(shared) if shared else 0 for (_, _, row), shared in zip(rows, cut, strict=True))


def to_documents(engine: Engine, step: Step, images: Images = _NONE) -> tuple[dict[int, Document], list[DocumentMeta]]:
    """(Documents of a step by index, their metadata). They are one group with shared prefixes. images: by the token ids
    of their documents."""
    documents = {
        index: Document(
            torch.tensor(ids), torch.tensor(mask, dtype=torch.float32), media=media_of(engine, ids, images), group=0
        )
        for index, (ids, mask) in enumerate(step)
    }
    return documents, engine.planner.metadata(documents.values())


def media_of(engine: Engine, ids: Sequence[int], images: Images) -> Media | None:
    """The images of the document, or the prompt, with these token ids."""
    inputs, vision = images.get(tuple(ids)), engine.built.vision
    return None if inputs is None or vision is None else Media.from_inputs(dict(inputs), vision.patches(inputs))


def one_gradient(
    engine: Engine, step: Step, budget: int | None, images: Images = _NONE, objective: Loss | None = None,
    *, keep: bool = False,
) -> tuple[float, Tensors, float]:  # fmt: skip
    """(Loss, complete gradients on the CPU, their norm). budget: tokens of a row; None as configured. objective: the
    loss; None for cross entropy. keep: keep the gradients in the engine for its next update; otherwise they are
    dropped."""
    documents, metas = to_documents(engine, step, images)
    return gradient_of(engine, engine.plan(metas, budget=budget), documents, objective or CrossEntropy(), keep=keep)


def gradient_of(
    engine: Engine, plan: StepPlan, documents: Mapping[int, Document], objective: Loss, *, keep: bool = False
) -> tuple[float, Tensors, float]:
    """one_gradient of a plan. documents: this rank's or all, by their index in the plan."""
    loss = engine.accumulate(plan, documents, objective)["loss"] or 0.0
    gradients = {name: g.cpu() for name, g in engine.gradients() if g is not None}
    norm = engine.gradient_norm()
    if not keep:
        engine.drop_gradients()
    return loss, gradients, norm


def gather_readouts(
    engine: Engine, step: Step, budget: int | None = None, images: Images = _NONE
) -> dict[int, Tensors]:
    """Readouts of all documents, from all ranks, on every rank."""
    documents, metas = to_documents(engine, step, images)
    readouts = engine.readout(engine.plan(metas, budget=budget), documents, ("logprob", "entropy"))
    gathered: list[dict[int, Tensors]] = [{} for _ in range(engine.ranks.world)]
    dist.all_gather_object(gathered, readouts, group=engine.ranks.group)
    return {index: values for part in gathered for index, values in part.items()}


def neighbours(engine: Engine, step: Step, before: Mapping[int, Tensors], images: Images = _NONE) -> float:
    """The largest change of other documents' logprobs when the longest text document changes, from readout_distance. It
    is relative, because experts and ranks batch tokens by the content of a row, which changes rounding.

    before: the readouts of `step`, by document.
    """
    longest = max(range(len(step)), key=lambda i: (tuple(step[i][0]) not in images, len(step[i][0])))
    ids, mask = step[longest]
    changed = [*step[:longest], (ids[::-1], mask), *step[longest + 1 :]]
    after = gather_readouts(engine, changed, images=images)
    return largest(readout_distance(after[i]["logprob"], before[i]["logprob"]) for i in before if i != longest)


def largest(values: Iterable[float]) -> float:
    """The maximum, with NaN as the largest value; 0 for no values."""
    values = list(values)
    return next((value for value in values if value != value), max(values, default=0.0))


def readout_distance(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value if that is above 1."""
    return float((actual - expected).abs().max()) / max(1.0, float(expected.abs().max()))
