"""`weft verify` for a config of `weft distill`: compares training by its loss with full logits of two plain models.

The plain side is transformers in one process, one document at a time, with separate formulas. It shares nothing with
ops/divergence.py. Lists from data or a server (distill.teacher) are replaced by random lists on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.config.distill_schema import DistillSection
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.base import Loss
from weft.engine.losses.distillation import DistillationLoss, Listed
from weft.engine.step_plan.plan import StepPlan
from weft.engine.teachers import TeacherSource, pack_lists, with_teachers
from weft.importing import import_named
from weft.verify.adapter import randomize_adapters
from weft.verify.harness import Figure, cut_documents, trainer_of
from weft.verify.image_reference import ImageReference, Images
from weft.verify.observed import Step, short_budget, to_documents
from weft.verify.plain_divergence import divergence_of
from weft.verify.reference import Reference
from weft.verify.training import TrainedLoss, verify_training

NAME = "distillation: "


_LISTED = 7  # tokens of a random list


class DrawnLists:
    """A teacher given by random lists. vocabulary: number of its tokens."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def read(self, documents: Sequence[Document]) -> dict[int, Tensor]:
        lists = [self.lists(document.tokens.tolist()) for document in documents]
        return {index: pack_lists(ids, logprobs) for index, (ids, logprobs) in enumerate(lists)}

    def head(self, student: Engine) -> Listed:
        return Listed()

    def lists(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(ids, log-probabilities) of a document, [T, K] each. The last entry of every second token is unused. The tail
        has a tenth or more of the probability."""
        generator = torch.Generator().manual_seed(sum(tokens) + len(tokens))
        logits = torch.randn(len(tokens), self.vocabulary, generator=generator)
        top, ids = logits.topk(_LISTED, 1)
        logprobs = (0.9 * top.softmax(1)).log()
        ids[::2, -1] = -1
        return ids, logprobs


@dataclass(frozen=True)
class PlainTeachers:
    """The teachers on the plain side. named: for each, the path of a model, or random lists. chosen: the teacher of
    each document of each step."""

    named: Sequence[str | DrawnLists]
    chosen: Sequence[Sequence[int]]


class _TaughtSteps:
    """The mesh's side of the steps (training.py:PreparedSteps)."""

    def __init__(
        self, engine: Engine, steps: Sequence[Step], objective: DistillationLoss, teachers: Sequence[TeacherSource],
        chosen: Sequence[Sequence[int]], images: Images,
    ) -> None:  # fmt: skip
        self.engine, self.steps, self.teachers, self.chosen = engine, steps, teachers, chosen
        self.images = images
        objective.heads = [head for teacher in teachers if (head := teacher.head(engine)) is not None]
        self.objective: Loss = objective
        metadata = [meta for step in steps for meta in to_documents(engine, step, images)[1]]
        cut_documents(engine, max(len(ids) for step in steps for ids, _ in step), metadata)
        self.short = [short_budget(engine, steps[0], images)]

    def prepare(self, number: int, budget: int | None) -> tuple[StepPlan, Mapping[int, Document]]:
        engine, chosen = self.engine, list(self.chosen[number]) if len(self.teachers) > 1 else None
        documents, metas = to_documents(engine, self.steps[number], self.images)
        plan = engine.plan(metas, budget=budget)
        local = {index: documents[index] for index in engine.planner.local_documents(plan)}
        return plan, with_teachers(self.teachers, chosen, list(documents.values()), local, engine)


def verify_distillation(
    engine: Engine, path: str, steps: Sequence[Step], objective: DistillationLoss, teachers: Sequence[TeacherSource],
    plain_teachers: PlainTeachers, config: DistillSection, lr: float, images: Images,
) -> tuple[list[Figure], list[Figure]]:  # fmt: skip
    """(Figures, the parameters that differ most); empty except on the first rank. Trains the engine. Collective. path:
    of the student's weights. images: by the ids of their documents."""
    randomize_adapters(engine)
    prepared = _TaughtSteps(engine, steps, objective, teachers, plain_teachers.chosen, images)
    models: list[Reference | DrawnLists] = []
    logits_of: dict[tuple[int, tuple[int, ...]], Tensor] = {}  # (teacher, document) -> logits

    def open_plain(adapter: str | None) -> Reference:
        if not models:
            device = str(engine.device)
            models.extend(
                t if isinstance(t, DrawnLists) else ImageReference(images, t, device) for t in plain_teachers.named
            )
        return trainer_of(engine, path, [], adapter, images).reference()

    @torch.no_grad()
    def logits(teacher: Reference, number: int, ids: list[int]) -> Tensor:
        key = number, tuple(ids)
        if key not in logits_of:
            logits_of[key] = teacher.logits(ids)[:-1].cpu()
        return logits_of[key].to(teacher.device)

    def losses(student: Reference, step: Sequence[tuple[list[int], list[float], int]]) -> Iterator[Tensor]:
        total = sum(sum(mask[1:]) for _, mask, _ in step) or 1.0
        scale = config.temperature**2 if config.temperature_squared else 1.0
        for ids, mask, number in step:
            z_TV, teacher = student.logits(ids)[:-1], models[number]
            if isinstance(teacher, DrawnLists):
                top_ids, logprobs = (x[1:].to(z_TV.device) for x in teacher.lists(ids))
                log_p, log_q = _bins((z_TV / config.temperature).log_softmax(-1), top_ids, logprobs)
            else:
                z_q_TV = logits(teacher, number, ids)
                common = min(z_TV.shape[1], z_q_TV.shape[1])
                log_p, log_q = ((x[:, :common] / config.temperature).log_softmax(-1) for x in (z_TV, z_q_TV))
            ce = -z_TV.log_softmax(-1).gather(1, torch.tensor(ids[1:], device=z_TV.device)[:, None])[:, 0]
            terms_T = config.alpha * ce + (1 - config.alpha) * scale * _divergence(log_p, log_q, config)
            yield torch.tensor(mask[1:], device=z_TV.device) * terms_T / total

    examples = [
        [(*document, number) for document, number in zip(step, chosen, strict=True)]
        for step, chosen in zip(steps, plain_teachers.chosen, strict=True)
    ]
    return verify_training(engine, TrainedLoss(NAME, prepared, examples, losses), open_plain, lr)


def _bins(log_p_TV: Tensor, ids_TK: Tensor, logprobs_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(log p, log q), [T, K + 1], of the listed tokens and the tail. Unused entries have probability e^-60 in both,
    which affects no figure."""
    is_used = ids_TK >= 0
    listed = torch.where(is_used, log_p_TV.gather(1, ids_TK.clamp(min=0)), -60.0)
    is_listed = torch.zeros_like(log_p_TV, dtype=torch.bool)
    for ids, row in zip(ids_TK, is_listed, strict=True):
        row[ids[ids >= 0]] = True
    tail = log_p_TV.masked_fill(is_listed, float("-inf")).logsumexp(1, keepdim=True)
    log_q = torch.where(is_used, logprobs_TK, -60.0)
    tail_q = (1 - log_q.exp().sum(1, keepdim=True)).log()
    return torch.cat([listed, tail], 1), torch.cat([log_q, tail_q], 1)


def _divergence(log_p: Tensor, log_q: Tensor, config: DistillSection) -> Tensor:
    """[T] by the definitions, or by the user's function."""
    if config.loss in ("forward_kl", "reverse_kl", "jsd"):
        return divergence_of(config.loss, log_p, log_q, config.beta)
    terms: Tensor = import_named(config.loss, "distill.loss")(log_p, log_q)
    return terms.sum(-1)
