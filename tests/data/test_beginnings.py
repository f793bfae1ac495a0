"""What documents of a group have in common is metadata: trees are planned without the documents of other ranks."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from tests.engine.test_trees import COSTS
from tests.support.rl_samples import algorithm, rl_config
from weft.data import table
from weft.data.documents import Documents
from weft.data.encode import Encoded
from weft.data.limits import Limits
from weft.data.order import SourceShare
from weft.data.records import Record, Role
from weft.data.scored_documents import ScoredDocuments
from weft.engine.batch import prefixes
from weft.engine.batch.document import Costs, Document, DocumentMeta, MeasuredDocuments, choose, document_metadata
from weft.engine.step_plan.plan import plan_step
from weft.engine.step_plan.trees import segments_of, tree_tokens
from weft.inference.types import Prompt, Sample
from weft.rl.documents import ReadSamples, TrainedSamples
from weft.rl.serialization import SampleBatch

# Two answers that part in their first, a later, or no token of the shorter one; the last two are alike up to padding.
PAIRS = [
    ("abcde", "abxyz"), ("a", "b"), ("abcd", "abcdefgh"), ("hello there", "hello"), ("ab", "abc"), ("q" * 40, "y"),
    ("hi", "hizz"), ("hzz", "hz"), ("hz", "hza"),
]  # fmt: skip


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, no tokens are compared, and no document is built."""
    compared = mock.patch.object(prefixes, "_beginnings", side_effect=AssertionError("compared"))
    read = mock.patch.object(table.TokenTable, "tokens", side_effect=AssertionError("read"))
    with compared, read:
        yield


def metadata_of(documents: Sequence[Document], costs: Costs = COSTS) -> list[DocumentMeta]:
    return document_metadata(documents, costs, lambda length: True, (7,))


def same_trees(measured: Sequence[DocumentMeta], built: Sequence[DocumentMeta]) -> None:
    """All rows of one group, and of any selection, are laid out alike."""
    assert [replace(meta, path=()) for meta in measured] == [replace(meta, path=()) for meta in built]
    shared = 0
    for start in range(len(measured)):
        rows = [metas[start : start + 7] for metas in (measured, built)]
        first, second = map(segments_of, rows)
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert (first.lengths, first.parents, first.last_segments) == (
                second.lengths,
                second.parents,
                second.last_segments,
            )
            assert tree_tokens(rows[0], range(len(rows[0]))) == sum(first.lengths)
            shared += 1
    assert shared


def pairs(longest: int = 10**6) -> Documents:
    """Of one token a character, behind a prompt."""
    texts = [f"What? {answer}".encode() for pair in PAIRS for answer in pair]
    encoded = [Encoded([*text], [0] * 6 + [1] * (len(text) - 6)) for text in texts]
    roles: list[Role] = ["chosen", "rejected"]
    records = [Record("", "prompt", {"prompt": ""}, role=roles[index % 2]) for index in range(len(texts))]
    chunk = table.Chunk.from_records([index // 2 + 1 for index in range(len(texts))], records, encoded)
    piece = Limits(longest, long="truncate").select(table.in_memory("pairs.jsonl", True, [chunk]), "")
    return Documents([piece], [SourceShare(len(texts))])


def check(documents: Documents, *omitted: int) -> None:
    """That pairs are laid out alike by metadata and by tokens. omitted: tokens at their ends that no forward reads."""
    chosen = choose(documents, range(len(documents)))
    for count in omitted:
        costs = replace(COSTS, omitted=lambda length, count=count: count)
        with unseen():
            measured = metadata_of(chosen, costs)
        same_trees(measured, metadata_of(list(chosen), costs))


@pytest.mark.parametrize("longest", [10**6, 9])
def test_answers_of_a_pair_are_planned_without_their_tokens(longest: int) -> None:
    check(pairs(longest), 0, 1)
    single_answers = choose(pairs(), [0, 3, 4])  # one answer of each
    assert not any(meta.path for meta in metadata_of(single_answers))


@pytest.mark.parametrize("pad", [None, ord("z")])
def test_scored_answers_are_planned_without_their_tokens(pad: int | None) -> None:
    """No forward reads their end mark, and trailing padding is no part of them."""
    check(ScoredDocuments(pairs(), pad, "margin"), 1)


def samples(routed: bool) -> list[Sample]:
    """Of two prompts, which fork late, end where others go on, and have other experts from some token on."""
    source, drawn = random.Random(0), []
    for index in range(2):
        start = [source.randrange(50, 60) for _ in range(12)]
        longest = [*start, *(source.randrange(50, 60) for _ in range(10))]
        for number in range(6):
            ids = [*longest[: source.randint(13, 22)], *(source.randrange(50, 60) for _ in range(source.randint(0, 4)))]
            sampled = np.arange(len(ids)) >= len(start)
            routes = np.zeros((len(ids) - number % 2, 2, 3), np.uint8)
            routes[5 + number :] = number // 3
            drawn.append(
                Sample(
                    Prompt(index, 0, tuple(start), "p"),
                    number,
                    np.array(ids),
                    sampled,
                    np.zeros(len(ids), np.float32),
                    np.zeros(len(ids), np.int32),
                    "end",
                    reward=1.0,
                    advantages=np.ones(len(ids), np.float32),
                    routes=routes if routed else None,
                )
            )
    return drawn


@pytest.mark.parametrize("routed", [True, False])
def test_samples_are_planned_without_their_tokens_and_routes(routed: bool) -> None:
    """The controller notes beginnings; trainers replay the routes, other models do not."""
    originals = samples(routed)
    sent: list[Sample] = pickle.loads(pickle.dumps(SampleBatch(originals)))
    sent[2].reward = originals[2].reward = None  # is not trained
    for sample in originals:
        sample.beginnings = None
    config = rl_config(algorithm("grpo"))
    views: list[tuple[MeasuredDocuments, MeasuredDocuments]] = [
        (TrainedSamples(sent, config), TrainedSamples(originals, config)),
        (ReadSamples(sent, routed=False), ReadSamples(originals, routed=False)),
    ]
    forwarded = []
    for noted, computed in views:
        with unseen():
            measured = metadata_of(noted)
        same_trees(measured, metadata_of(list(computed)))
        same_trees(measured, metadata_of(computed))
        forwarded.append(plan_step(measured, ranks=1, budget=500).tokens_forwarded / len(measured))
    assert (forwarded[0] > forwarded[1] + 1) == routed
