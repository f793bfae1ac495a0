"""Segments of a row against their definition: a document is the path from a root to its last segment."""

from __future__ import annotations

import random

import pytest
import torch

from weft.ops.segments import ROOT, Segments

CPU = torch.device("cpu")
# [P | a | b | b1 | b2 | plain | padding]: documents P a, P b b1, P b b2, P b, plain
TREE = Segments((4, 2, 3, 1, 2, 5, 2), (ROOT, 0, 0, 2, 2, ROOT, ROOT), (1, 3, 4, 2, 5))


def test_a_segment_s_keys_are_its_path_and_its_own_tokens() -> None:
    assert TREE.path(4) == (0, 2) and TREE.path(0) == () and TREE.path(6) == ()
    assert TREE.before == (0, 4, 4, 7, 7, 0, 0)
    assert TREE.key_lengths == (4, 6, 7, 8, 9, 5, 2)
    keys = TREE.key_tokens(CPU).split(list(TREE.key_lengths))
    assert keys[4].tolist() == [0, 1, 2, 3, 6, 7, 8, 10, 11]
    assert keys[5].tolist() == [12, 13, 14, 15, 16]


def test_a_document_s_places_are_those_of_its_whole_path() -> None:
    assert TREE.document_lengths == (6, 8, 9, 7, 5)
    places = TREE.document_tokens(CPU).split(list(TREE.document_lengths))
    assert places[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert places[3].tolist() == [0, 1, 2, 3, 6, 7, 8]
    assert TREE.document_tokens(CPU) is TREE.document_tokens(CPU)  # made once per row


def test_a_token_counts_as_often_as_documents_hold_it() -> None:
    expected = [4] * 4 + [1] * 2 + [3] * 3 + [1] + [1] * 2 + [1] * 5 + [0] * 2
    assert TREE.multiplicity_T(CPU).tolist() == expected


def test_segments_after_one_are_a_row_of_their_own() -> None:
    tail = TREE.after(5)
    assert (tail.lengths, tail.parents, tail.last_segments) == ((5, 2), (ROOT, ROOT), (0,))


def test_depth_first_order_is_told_from_others() -> None:
    assert TREE.depth_first
    assert not Segments((1, 1, 1, 1), (ROOT, 0, ROOT, 0), ()).depth_first  # the last follows another tree
    assert not Segments((1, 1, 1, 1), (ROOT, 0, 0, 1), ()).depth_first  # or another branch


def test_a_parent_lies_before_its_children() -> None:
    with pytest.raises(AssertionError):
        Segments((1, 1), (1, ROOT), (0,))


def test_random_trees_hold_each_document_s_tokens_in_order() -> None:
    draw = random.Random(0)
    for _ in range(100):
        count = draw.randint(1, 9)
        lengths = tuple(draw.randint(1, 4) for _ in range(count))
        parents = tuple(draw.randint(ROOT, index - 1) for index in range(count))
        documents = tuple(draw.randrange(count) for _ in range(draw.randint(0, 5)))
        tree = Segments(lengths, parents, documents)
        counts = torch.zeros(sum(lengths), dtype=torch.int64)
        for places in tree.document_tokens(CPU).split(list(tree.document_lengths)):
            assert (places.diff() > 0).all()
            counts[places] += 1
        assert torch.equal(counts, tree.multiplicity_T(CPU))
        for segment, keys in enumerate(tree.key_tokens(CPU).split(list(tree.key_lengths))):
            positions = torch.arange(tree.starts[segment], tree.starts[segment] + lengths[segment])
            assert torch.equal(keys[-lengths[segment] :], positions)
