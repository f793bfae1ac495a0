"""Synthetic documents with edge cases, for checks without user data."""

from __future__ import annotations

import random

from weft.verification.reference import Document

# One token, two tokens, lengths around small windows and chunks (16), and primes; together longer than any of them.
LENGTHS = (37, 1, 23, 30, 2, 61, 16, 17, 5)


def awkward_steps(vocabulary: int, seed: int = 0, scale: float = 1.0) -> list[list[Document]]:
    """Three steps: many documents, one of them untrained; a single one, so that some ranks have none; three uneven
    ones.

    scale: factor on the lengths, for models with long windows.
    """
    source = random.Random(seed)
    many = [_document(source, vocabulary, max(1, round(n * scale))) for n in LENGTHS]
    ids, mask = many[3]
    many[3] = (ids, [0.0] * len(mask))
    single = [_document(source, vocabulary, max(2, round(29 * scale)))]
    three = [_document(source, vocabulary, max(2, round(n * scale))) for n in (53, 7, 19)]
    return [many, single, three]


def _document(source: random.Random, vocabulary: int, length: int) -> Document:
    """A document of random tokens. As in a chat, a first part is not trained; weights are 1 or 0.5."""
    ids = [source.randrange(3, vocabulary) for _ in range(length)]
    trained = source.randrange(0, max(1, length // 2))
    weight = source.choice([1.0, 1.0, 0.5])
    return ids, [0.0 if place < trained else weight for place in range(length)]
