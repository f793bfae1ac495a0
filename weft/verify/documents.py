"""Synthetic documents with edge cases, for checks without user data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

import torch.distributed as dist

from weft.engine.engine import Engine
from weft.verify.reference import Document, Reference

# One token, two tokens, lengths near small windows and chunks (16), and primes; their sum is longer than any window.
LENGTHS = (37, 1, 23, 30, 2, 61, 16, 17, 5)


def awkward_steps(
    vocabulary: int, seed: int = 0, scale: float = 1.0, special: Sequence[int] = ()
) -> list[list[Document]]:
    """Three steps: many documents, one of them untrained; a single document, so that some ranks have none; three
    documents of uneven lengths.

    scale: factor on the lengths, for models with long windows. special: ids that replace random ones in the first step,
    each as an input and as a trained target, never as the first token; as many as there is room for.
    """
    source = random.Random(seed)
    documents = [_document(source, vocabulary, max(1, round(n * scale))) for n in LENGTHS]
    ids, mask = documents[3]
    documents[3] = (ids, [0.0] * len(mask))
    remaining = list(dict.fromkeys(special))
    for ids, mask in documents:
        count = min(len(remaining), (len(ids) - 1) // 2 if any(mask) else 0)
        first = len(ids) - 1 - count  # the last token is not the input of a prediction
        ids[first : first + count], remaining = remaining[:count], remaining[count:]
    single = [_document(source, vocabulary, max(2, round(29 * scale)))]
    three = [_document(source, vocabulary, max(2, round(n * scale))) for n in (53, 7, 19)]
    return [documents, single, three]


def forest_steps(vocabulary: int, seed: int = 1) -> list[list[Document]]:
    """Three steps of documents with shared prefixes: with nested branches, suffixes of one and of no token, equal
    documents, a document that is another's prefix, and trained tokens in prefixes; a pair; two prompts.

    Prefixes and suffixes are longer than small windows and chunks (16).
    """
    source = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [source.randrange(3, vocabulary) for _ in range(count)]

    prompt, second_prompt, turn, answer = tokens(23), tokens(9), tokens(5), tokens(19)
    beginnings = [prompt] * 3 + [prompt + turn] * 3 + [prompt + turn + answer[:4]] * 2
    suffixes = [tokens(1), [], answer, tokens(17), answer, tokens(6), tokens(2), tokens(11)]
    forest = [*map(list.__add__, beginnings, suffixes), prompt + answer, tokens(13)]
    pair = [prompt + answer, prompt + tokens(8)]
    prompts = [
        beginning + tokens(count)
        for beginning, count in ((prompt, 4), (second_prompt, 21), (prompt, 18), (second_prompt, 3))
    ]
    return [[(ids, [source.choice([0.0, 0.5, 1.0]) for _ in ids]) for ids in step] for step in (forest, pair, prompts)]


def boundary_ids(vocabulary: int, ranks: int) -> list[int]:
    """The first and the last id of each shard of a vocabulary that 1 to `ranks` ranks split, the shards of `ranks`
    first. Random documents rarely contain these ids, and an error at the border of a shard appears in no other
    token."""
    ids = list[int]()
    for shards in range(ranks, 0, -1):
        ends = [vocabulary * shard // shards for shard in range(shards + 1)]
        ids += [token for start, end in pairwise(ends) for token in (start, end - 1)]
    return list(dict.fromkeys(ids))


def special_ids(engine: Engine, path: str) -> tuple[list[int], str]:
    """(The padding id and boundary_ids of this mesh; a remark if ids are omitted, otherwise ""). Collective.

    The padding id is omitted if the model's gradients are not finite with it. If they are still not finite, all ids are
    omitted. No such id is the first token of a document: padding embeds to zero, so all states of the document's first
    token would be zero. A root of their mean square has an infinite slope (gemma3n), and each norm multiplies gradients
    by a thousand, until they overflow (gemma4).
    """
    config = engine.built.config.get_text_config()
    pad, vocabulary = getattr(config, "pad_token_id", None), config.vocab_size
    borders = boundary_ids(vocabulary, engine.mesh.tp_size)
    padding = [pad] if isinstance(pad, int) and 0 <= pad < vocabulary else []
    candidates = list(dict.fromkeys([*padding, *borders]))
    chosen = [candidates]
    if engine.ranks.is_first:
        plain, step = Reference(path, str(engine.device)), vocabulary // 3
        for special in (candidates, [token for token in borders if token not in padding], []):
            chosen = [special]
            loss, gradients = plain.gradients([([step, *special, step], [1.0] * (len(special) + 2))])
            if isfinite(loss) and all(bool(g.isfinite().all()) for g in gradients.values()):
                break
    dist.broadcast_object_list(chosen, src=0, group=engine.ranks.group)
    remaining = ", ".join(str(token) for token in candidates if token not in chosen[0])
    remark = (
        f"tokens   no document has {remaining}: plain transformers' gradients are not finite then" if remaining else ""
    )
    return chosen[0], remark


def _document(source: random.Random, vocabulary: int, length: int) -> Document:
    """A document of random tokens. As in a chat, the first part is not trained. Loss weights are 1 or 0.5."""
    ids = [source.randrange(3, vocabulary) for _ in range(length)]
    trained = source.randrange(0, max(1, length // 2))
    weight = source.choice([1.0, 1.0, 0.5])
    return ids, [0.0 if index < trained else weight for index in range(length)]
