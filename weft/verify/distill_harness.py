"""`weft verify` of a config of `weft distill`: its loss and gradients against full logits of two plain models.

The plain side is transformers in one process, one document at a time, and formulas of its own; it shares nothing with
ops/divergence.py. In place of lists of the data or of a server (distill.teacher) both sides get drawn lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.config.distill_schema import DistillSection
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.distillation import DistillationLoss, Listed
from weft.engine.teachers import TeacherSource, pack_lists, with_teachers
from weft.importing import import_named
from weft.verify.adapter import as_in_files, randomize_adapters, saved_adapter
from weft.verify.expected import ExpectedGradient, norm_of, on_cpu
from weft.verify.harness import Figure, objective_figures, trainer_of
from weft.verify.observed import Step, Tensors, gradient_of, short_budget, to_documents
from weft.verify.reference import Reference

NAME = "distillation"


_LISTED = 7  # tokens of a drawn list


class DrawnLists:
    """A teacher that is known by lists, which are drawn. vocabulary: its tokens."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def read(self, documents: Sequence[Document]) -> dict[int, Tensor]:
        lists = [self.lists(document.tokens.tolist()) for document in documents]
        return {index: pack_lists(ids, logprobs) for index, (ids, logprobs) in enumerate(lists)}

    def head(self, student: Engine) -> Listed:
        return Listed()

    def lists(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(ids, log-probabilities) of a document, [T, K] each, of which the last entry of every second token is not
        used; a tenth and more of the probability is the tail's."""
        generator = torch.Generator().manual_seed(sum(tokens) + len(tokens))
        logits = torch.randn(len(tokens), self.vocabulary, generator=generator)
        top, ids = logits.topk(_LISTED, 1)
        logprobs = (0.9 * top.softmax(1)).log()
        ids[::2, -1] = -1
        return ids, logprobs


@dataclass(frozen=True)
class PlainTeachers:
    """The teachers on the plain side. named: of each, the path of a model, or drawn lists. chosen: which one each
    document has."""

    named: Sequence[str | DrawnLists]
    chosen: Sequence[int]


def verify_distillation(
    engine: Engine,
    path: str,
    step: Step,
    objective: DistillationLoss,
    teachers: Sequence[TeacherSource],
    plain_teachers: PlainTeachers,
    config: DistillSection,
) -> list[Figure]:
    """Figures of one step, in rows as configured and in short ones; empty except on the first rank. The engine keeps
    its weights. Collective. path: of the student's weights."""
    randomize_adapters(engine)
    objective.heads = [head for teacher in teachers if (head := teacher.head(engine)) is not None]
    chosen = list(plain_teachers.chosen) if len(teachers) > 1 else None
    documents, metas = to_documents(engine, step)
    observed = []
    for budget in (None, short_budget(engine, step)):
        plan = engine.plan(metas, budget=budget)
        local = {index: documents[index] for index in engine.planner.local_documents(plan)}
        local = with_teachers(teachers, chosen, list(documents.values()), local, engine)
        loss, gradients, _ = gradient_of(engine, plan, local, objective)
        observed.append((loss, as_in_files(engine, gradients)))
    with saved_adapter(engine) as adapter:
        if not engine.ranks.is_first:
            return []
        student = trainer_of(engine, path, [], adapter, {}).reference()
        models = [
            teacher if isinstance(teacher, DrawnLists) else Reference(teacher, str(engine.device))
            for teacher in plain_teachers.named
        ]
        loss, gradients = _plain(student, models, step, plain_teachers.chosen, config)
        reverse = _plain(student, models, step[::-1], plain_teachers.chosen[::-1], config)[1]
    return objective_figures(NAME, observed, ExpectedGradient(loss, norm_of(gradients), gradients, [reverse]))


def _plain(
    student: Reference,
    teachers: Sequence[Reference | DrawnLists],
    step: Step,
    chosen: Sequence[int],
    config: DistillSection,
) -> tuple[float, Tensors]:
    """(Loss, gradients) of sum w (alpha ce + (1 - alpha) scale divergence) / sum w."""
    student.model.zero_grad(set_to_none=True)
    total, loss_sum = sum(sum(mask[1:]) for _, mask in step) or 1.0, 0.0
    scale = config.temperature**2 if config.temperature_squared else 1.0
    for (ids, mask), number in zip(step, chosen, strict=True):
        z_TV = student.logits(ids)[:-1]
        teacher = teachers[number]
        if isinstance(teacher, DrawnLists):
            top_ids, logprobs = (x[1:].to(z_TV.device) for x in teacher.lists(ids))
            log_p, log_q = _bins((z_TV / config.temperature).log_softmax(-1), top_ids, logprobs)
        else:
            with torch.no_grad():
                of_teacher_TV = teacher.logits(ids)[:-1]
            common = min(z_TV.shape[1], of_teacher_TV.shape[1])
            log_p, log_q = ((x[:, :common] / config.temperature).log_softmax(-1) for x in (z_TV, of_teacher_TV))
        weights = torch.tensor(mask[1:], device=z_TV.device)
        ce = -z_TV.log_softmax(-1).gather(1, torch.tensor(ids[1:], device=z_TV.device)[:, None])[:, 0]
        divergence = _divergence(log_p, log_q, config)
        loss = (weights * (config.alpha * ce + (1 - config.alpha) * scale * divergence)).sum() / total
        if loss.requires_grad:
            loss.backward()
        loss_sum += float(loss.detach())
    return loss_sum, on_cpu(student.current_gradients())


def _bins(log_p_TV: Tensor, ids_TK: Tensor, logprobs_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(log p, log q), [T, K + 1], of the listed tokens and the tail. Entries that are not used have probability
    e^-60 of both, which no figure sees."""
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
    """[T] by the definitions."""

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if config.loss == "forward_kl":
        return kl(log_q, log_p)
    if config.loss == "reverse_kl":
        return kl(log_p, log_q)
    if config.loss == "jsd":
        log_m = (config.beta * log_q.exp() + (1 - config.beta) * log_p.exp()).log()
        return config.beta * kl(log_q, log_m) + (1 - config.beta) * kl(log_p, log_m)
    terms: Tensor = import_named(config.loss, "distill.loss")(log_p, log_q)
    return terms.sum(-1)
