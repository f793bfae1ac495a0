"""Prompts with the answers of other prompts, on which KTO estimates its z (arXiv:2402.01306, section 4.1)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.data.documents import Documents
from weft.engine.batch.document import Document


def mismatched(documents: Documents, index: int, limit: int) -> Document:
    """The prompt of a document with an answer of the previous example in the data, truncated to `limit` tokens. It
    depends only on the data, not on the order or size of steps."""
    ends = documents.example_ends
    example = int(np.searchsorted(ends, index, side="right"))
    begin = int(ends[example - 1]) if example else 0
    before = (example or len(ends)) - 1  # the last example precedes the first
    first, last = (int(ends[before - 1]) if before else 0), int(ends[before])
    prompted, answered = documents.build(index), documents.build(min(first + index - begin, last - 1))
    start, answer = _answer_start(prompted.weights), _answer_start(answered.weights)
    tokens = torch.cat([prompted.tokens[:start], answered.tokens[answer:]])[:limit]
    weights = torch.cat([torch.zeros(start), (answered.weights[answer:] != 0).float()])[:limit]
    source = f"{prompted.source} with the answer of {answered.source}"
    return Document(tokens, weights, media=prompted.media, source=source)


def _answer_start(weights: Tensor) -> int:
    return int((weights != 0).nonzero()[0, 0])
