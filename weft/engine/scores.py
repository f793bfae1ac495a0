"""Documents whose last token is scored, and the scores of a step's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.document_sums import means_over_ranks
from weft.engine.engine import Engine
from weft.engine.losses.preference.objective import split_examples
from weft.engine.step_plan.plan import StepPlan

# Appended to a document whose last token is scored (ScoreSpec.end_marked). No forward reads its id.
END_MARK = 1


def with_end_mark(tokens: Tensor) -> Tensor:
    """[T + 1]: the tokens and the mark. The prediction of the mark is the score of the last token."""
    return torch.cat([tokens, tokens.new_full((1,), END_MARK)])


def scored_length(tokens: Tensor, pad: int | None) -> int:
    """The number of tokens up to the token that transformers scores: the last token that is not `pad`, the config's
    pad_token_id, even if the answer ends with it; 1 if all are `pad`."""
    if pad is None or int(tokens[-1]) != pad:
        return len(tokens)
    real = (tokens != pad).nonzero()
    return int(real[-1]) + 1 if len(real) else 1


def scored_document(
    tokens: Tensor, pad: int | None, arrays: Mapping[str, float] | None = None, **fields: Any
) -> Document:
    """A document whose last token is scored (scored_length). arrays: values of its prediction. fields: of Document."""
    tokens = with_end_mark(tokens[: scored_length(tokens, pad)])
    weights = torch.zeros(len(tokens))
    weights[-1] = 1.0
    filled = {name: torch.full((len(tokens),), value) for name, value in (arrays or {}).items()}
    return Document(tokens, weights, arrays=filled, **fields)


def parts_pairs(plan: StepPlan) -> bool:
    """Whether the two answers of a pair, documents 2 i and 2 i + 1, may be split or in different rows."""
    documents = range(len(plan.documents))
    return bool(split_examples([documents[::2], documents[1::2]], plan))


def step_scores(engine: Engine, plan: StepPlan, documents: Mapping[int, Document]) -> dict[int, float]:
    """The score of each document of a step, on every rank: at the prediction of its last token. Without gradients;
    costs a forward of each row. Collective.

    documents: this rank's.
    """
    read = engine.readout(plan, documents, ("score",))
    sums = torch.zeros(2, len(plan.documents), dtype=torch.float64)
    for index, values in read.items():
        sums[:, index] = torch.stack([values["score"][-1].double(), torch.ones((), dtype=torch.float64)])
    return dict(enumerate(means_over_ranks(engine, sums, "scores").tolist()))
