"""Prompts with the answers of other prompts, over which KTO estimates its z (arXiv:2402.01306, section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.data.documents import Documents
from weft.engine.batch.document import Document


def mismatched(documents: Documents, index: int, limit: int) -> Document:
    """The prompt of a document with an answer of the example before it in the data, cut to `limit` tokens. It depends
    on the data alone, and not on the order or the cut of steps."""
    ends = documents.example_ends
    example = int((ends > index).argmax())
    begin = int(ends[example - 1]) if example else 0
    other = example - 1 if example else len(ends) - 1
    first, last = (int(ends[other - 1]) if other else 0), int(ends[other])
    own, source = documents.build(index), documents.build(min(first + index - begin, last - 1))
    start, answer = _answer_start(own.weights), _answer_start(source.weights)
    tokens = torch.cat([own.tokens[:start], source.tokens[answer:]])[:limit]
    weights = torch.cat([torch.zeros(start), (source.weights[answer:] != 0).float()])[:limit]
    return Document(tokens, weights, media=own.media, source=f"{own.source} with the answer of {source.source}")


def _answer_start(weights: Tensor) -> int:
    return int((weights != 0).nonzero()[0, 0])
