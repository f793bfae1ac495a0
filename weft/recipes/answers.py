"""The stats about the answers of a step of `weft dpo` that are known before its gradient (StepAnswers)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weft.config.dpo_schema import DpoConfig, PreferenceConfig
from weft.data.documents import Documents, require_pairs
from weft.data.limits import length_limit
from weft.data.mismatched import mismatched
from weft.data.records import ROLES
from weft.engine.batch.document import Document, choose
from weft.engine.document_sums import read_sums
from weft.engine.engine import Engine
from weft.engine.losses.preference.objective import StepAnswers, split_examples
from weft.engine.step_plan.plan import StepPlan
from weft.recipes.reference_sums import ReferenceSums


def require_compared(documents: Sequence[Document], preference: PreferenceConfig) -> Sequence[Document]:
    """The documents. Raises UserError if the losses compare pairs, but a row has only one answer."""
    assert isinstance(documents, Documents)
    if preference.is_paired:
        require_pairs(
            documents,
            f"preference.loss={preference.losses[0]} compares the two answers of a pair: set preference.loss=kto, or "
            "write rows with `chosen` and `rejected`.",
        )
    return documents


def read_answers(
    config: DpoConfig,
    engine: Engine,
    reference: ReferenceSums,
    name: str,
    indices: Sequence[int],
    plan: StepPlan,
) -> StepAnswers:
    """Pairs the answers of a step, and computes the logprob sums that the loss needs before its gradient: those of the
    reference; and those of the trained model `engine`, if it is given, for the complete step or for pairs whose answers
    the plan puts on several ranks. Collective.

    name: the data set (ReferenceSums.documents). The step has its documents `indices`.
    """
    data, sums = reference.documents[name], reference.sums_of(name, indices)
    assert isinstance(data, Documents)
    preference, rows = config.preference, np.array(indices, np.int64)
    roles, paired = np.array(ROLES)[data.roles[rows]], config.preference.is_paired
    chosen = np.flatnonzero(roles == "chosen") if paired else np.arange(len(rows))
    rejected = np.flatnonzero(roles == "rejected") if paired else np.zeros(0, np.int64)
    policy = torch.full((len(rows),), torch.nan, dtype=torch.float64)
    columns = [chosen.tolist(), rejected.tolist()] if paired else [chosen.tolist()]
    whole_step = any(facts.whole_step for facts in preference.facts)
    examples = range(len(chosen)) if whole_step else split_examples(columns, plan)
    positions = sorted(column[example] for column in columns for example in examples)
    if positions:
        policy[positions] = read_sums(engine, choose(data, rows[positions].tolist()))
    return StepAnswers(
        torch.from_numpy(chosen),
        torch.from_numpy(rejected),
        sums,
        torch.from_numpy(data.trained[rows].astype(np.float64)),
        torch.from_numpy(data.margins[rows[chosen]].astype(np.float64)),
        torch.from_numpy(np.isin(roles, ("chosen", "desired")).astype(np.float64)),
        mismatched_kl(config, engine, reference, data, indices) if "kto" in preference.losses else 0.0,
        policy,
    )


def mismatched_kl(
    config: DpoConfig, engine: Engine, reference: ReferenceSums, data: Documents, indices: Sequence[int]
) -> float:
    """z of KTO, over the complete step: the mean log ratio of prompts with other prompts' answers, at least 0.
    Collective."""
    limit, _ = length_limit(config.data, config.step.max_tokens_per_device, config.mesh.cp)
    documents = [mismatched(data, index, limit) for index in indices]
    return max(0.0, float((read_sums(engine, documents) - reference.read(documents)).mean()))
