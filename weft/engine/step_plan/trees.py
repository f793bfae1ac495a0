"""Trees in the step plan: documents that share a prefix are assigned to rows together, and laid out as segments.

All inputs and results are plain integers, equal on every rank. Paths: see weft/engine/batch/prefixes.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from weft.engine.batch.document import DocumentMeta
from weft.engine.batch.prefixes import PathNode
from weft.ops.segments import ROOT, Segments


class PlanItem(NamedTuple):
    """The unit that the plan assigns to a row: a document, or documents of one tree in depth-first order. read: tokens
    that a forward reads. room: as DocumentMeta.room. longest: tokens read of the longest document."""

    documents: tuple[int, ...]
    read: int
    room: int
    cost: float
    longest: int


def items_of(
    documents: Sequence[DocumentMeta], costs: Sequence[float], chosen: Collection[int], capacity: int, parts: int
) -> list[PlanItem]:
    """The chosen documents as items. Each tree is split into few parts of at most `capacity` tokens, or into about
    `parts` parts. costs: of each document."""
    items, trees = list[PlanItem](), dict[int, list[int]]()
    for index in chosen:
        document = documents[index]
        if document.path and document.room <= capacity:
            trees.setdefault(document.path[0].digest, []).append(index)
        else:
            items.append(PlanItem((index,), document.read, document.room, costs[index], document.read))
    for indices in trees.values():
        root = _grow(documents, indices)
        limit = capacity
        if parts > 1:
            largest = max(documents[index].room for index in indices)
            limit = min(capacity, max(largest, root.room + -(-(root.subtree_room - root.room) // parts)))
        for part in root.split(limit):
            longest = max(documents[index].read for index in part.documents)
            cost = tree_cost(documents, costs, part.documents)
            read = tree_tokens(documents, part.documents)
            items.append(PlanItem(tuple(part.documents), read, part.room, cost, longest))
    return items


@dataclass
class _Part:
    """Documents of a subtree. room: the room of the part of the subtree that they need, as DocumentMeta.room."""

    documents: list[int]
    room: int


@dataclass
class _Branch:
    """A node of a tree. room: the room of its tokens and images. documents: the documents that end at it."""

    room: int
    documents: list[int] = field(default_factory=list)
    children: list[_Branch] = field(default_factory=list)

    @property
    def subtree_room(self) -> int:
        """Room of the subtree."""
        return self.room + sum(child.subtree_room for child in self.children)

    def split(self, capacity: int) -> list[_Part]:
        """The subtree in parts of at most `capacity` tokens. Each part repeats this node, so the number of parts is
        kept low: first fit by falling size (Johnson 1973)."""
        room = capacity - self.room
        pieces = [part for child in self.children for part in child.split(room)]
        pieces.sort(key=lambda part: -part.room)
        parts = [_Part([], 0)]
        for piece in pieces:
            target = next((part for part in parts if part.room + piece.room <= room), None)
            if target is None:
                target = _Part([], 0)
                parts.append(target)
            target.documents += piece.documents
            target.room += piece.room
        parts[0].documents += self.documents
        return [_Part(part.documents, part.room + self.room) for part in parts]


def _grow(documents: Sequence[DocumentMeta], indices: Sequence[int]) -> _Branch:
    """The tree of documents that have the same first node."""
    branches: dict[int, _Branch] = {}
    root: _Branch | None = None
    for index in indices:
        parent, start = None, 0
        for node in documents[index].path:
            if node.digest not in branches:
                branches[node.digest] = _Branch(node.room - start)
                if parent is not None:
                    parent.children.append(branches[node.digest])
            parent, start = branches[node.digest], node.room
            root = root or parent
        assert parent is not None
        parent.documents.append(index)
    assert root is not None
    return root


def depth_first(documents: Sequence[DocumentMeta], indices: Sequence[int], level: int = 0) -> list[int]:
    """The documents, reordered so that documents with a common node are neighbours. A row may hold several parts of a
    tree, and attention needs the segments of a tree to be contiguous."""
    branches: dict[tuple[bool, int], list[int]] = {}
    for index in indices:
        path = documents[index].path
        key = (True, path[level].digest) if level < len(path) else (False, index)
        branches.setdefault(key, []).append(index)
    return [
        index
        for branch in branches.values()
        for index in (branch if len(branch) == 1 else depth_first(documents, branch, level + 1))
    ]


def tree_tokens(documents: Sequence[DocumentMeta], indices: Collection[int]) -> int:
    """The tokens that a forward of these documents in one row reads."""
    nodes: dict[int, int] = {}
    unshared = 0
    for index in indices:
        document = documents[index]
        if not document.path:
            unshared += document.read
            continue
        start = 0
        for node in document.path:
            nodes[node.digest] = node.end - start
            start = node.end
    return unshared + sum(nodes.values())


def tree_cost(documents: Sequence[DocumentMeta], costs: Sequence[float], indices: Collection[int]) -> float:
    """The cost of these documents in one row: the sum over nodes of the additional cost of a node."""
    nodes: dict[int, float] = {}
    unshared = list[float]()
    for index in indices:
        document = documents[index]
        if not document.path:
            unshared.append(costs[index])
            continue
        before = 0.0
        for node in document.path:
            price = node.cost or float(node.end)
            nodes.setdefault(node.digest, price - before)
            before = price
    return math.fsum([*unshared, *nodes.values()])


def segments_of(documents: Sequence[DocumentMeta], alone: Collection[int] = ()) -> Segments | None:
    """The segments of a row of these documents, without padding; None if none of them share tokens.

    alone: indices, among these documents, of split documents, which share no tokens.
    """
    paths = [() if index in alone else document.path for index, document in enumerate(documents)]
    uses = Counter(node.digest for path in paths for node in path)
    if all(count == 1 for count in uses.values()):
        return None
    lengths, parents, last_segments = list[int](), list[int](), list[int]()
    segments: dict[int, int] = {}
    for path, document in zip(paths, documents, strict=True):
        parent, start = ROOT, 0
        nodes = _joined(path, uses) or (PathNode(ROOT, document.read),)
        for node in nodes:
            if node.digest == ROOT or node.digest not in segments:
                segments[node.digest] = len(lengths)
                lengths.append(node.end - start)
                parents.append(parent)
            parent, start = segments[node.digest], node.end
        last_segments.append(parent)
    return Segments(tuple(lengths), tuple(parents), tuple(last_segments))


def _joined(path: Sequence[PathNode], uses: Mapping[int, int]) -> tuple[PathNode, ...]:
    """The path without nodes at whose end no document of the row diverges or ends."""
    between = [a for a, b in pairwise(path) if uses[a.digest] != uses[b.digest]]
    return (*between, *path[-1:])
