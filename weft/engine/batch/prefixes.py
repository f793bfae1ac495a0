"""Shared prefixes of the documents of a group.

The documents of a group form a trie. A document's path is the list of nodes from the trie's root to its last token; a
node ends where documents diverge, and where a document ends. A node is named by a digest of everything up to its end,
so that two documents share a node exactly if they share its tokens, whichever process compares them. Paths are
metadata: with them a rank plans trees of documents that it does not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class PathNode(NamedTuple):
    """A node of a path: its tokens from the previous node's end up to `end`. cost, tower_tokens: of a document that
    ends here, as in DocumentMeta."""

    digest: int
    end: int
    cost: float = 0.0
    tower_tokens: int = 0

    @property
    def room(self) -> int:
        """DocumentMeta.room of a document that ends here."""
        return self.end + self.tower_tokens


Path = tuple[PathNode, ...]


class Beginning(NamedTuple):
    """The prefix that a document shares with others of its group. path: up to its last token, without costs.
    images_end: tokens up to the end of its images; 0 without images."""

    path: Path
    images_end: int = 0

    def path_of(self, read: int) -> Path:
        """The path of its first `read` tokens, which are all or all but the last."""
        before = [node for node in self.path if node.end < read]
        return (*before, self.path[len(before)]._replace(end=read))


class TokenKeys(NamedTuple):
    """bytes_Tk: [T, k] uint8, the key of each token; tokens with equal keys are shared. images_end: as in Beginning."""

    bytes_Tk: NDArray[np.uint8]
    images_end: int = 0


def token_keys(
    tokens_T: NDArray[Any], placeholders: Sequence[int], images: bytes, columns: Sequence[NDArray[Any]] = ()
) -> TokenKeys | None:
    """The keys of a document; None if it shares nothing, because it has images that the model cannot share.

    placeholders: ids of tokens that stand for images, in a model that takes images. images: digest of the document's
    images; empty if it has none. columns: further values of each token, each [T, ...]. Documents diverge either before
    their images or after all of them: the key of a placeholder contains the digest of the images and of every token up
    to the last placeholder.
    """
    if images and not placeholders:
        return None
    columns, end = [tokens_T.astype(np.int32), *columns], 0
    if placeholders:
        image_T, is_image_T = np.zeros(len(tokens_T), np.int64), np.isin(tokens_T, placeholders)
        if images and is_image_T.any():
            end = int(np.flatnonzero(is_image_T)[-1]) + 1
            beginning = np.ascontiguousarray(tokens_T[:end], np.int64)
            image_T[is_image_T] = (
                int.from_bytes(blake2b(images + beginning.tobytes(), digest_size=8).digest(), "little") >> 1 | 1
            )
        columns.append(image_T)
    flat = [np.ascontiguousarray(column.reshape(len(tokens_T), -1)).view(np.uint8) for column in columns]
    return TokenKeys(np.concatenate(flat, 1), end)


def beginnings_of(groups: Mapping[int, Hashable], keys: Mapping[int, TokenKeys]) -> dict[int, Beginning]:
    """The shared prefix, by index, of each document whose first token is also another's of its group. groups: the group
    of each document, by index. Documents without keys share nothing."""
    by_group: dict[Hashable, dict[int, TokenKeys]] = defaultdict(dict)
    for index, of_document in keys.items():
        by_group[groups[index], of_document.bytes_Tk.shape[1]][index] = of_document
    beginnings: dict[int, Beginning] = {}
    for name, members in by_group.items():
        if len(members) > 1:
            beginnings |= _beginnings(members, repr(name).encode())
    return beginnings


def pair_beginning(pair: int, common: int, lengths: tuple[int, int], answer: int, images_end: int = 0) -> Beginning:
    """The shared prefix of an answer of a pair. pair: its index. common: number of tokens that both answers share at
    their beginning, at least 1. lengths: of both answers. answer: 0 or 1."""
    ends = {common, lengths[answer], *({common - 1} if common in lengths else ())} - {0}
    path = (PathNode(((3 * pair + (end > common) * (1 + answer)) << 32) + end, end) for end in sorted(ends))
    return Beginning(tuple(path), images_end)


def _beginnings(keys: dict[int, TokenKeys], salt: bytes) -> dict[int, Beginning]:
    texts = {index: of_document.bytes_Tk.tobytes() for index, of_document in keys.items()}
    lengths = {len(of_document.bytes_Tk) for of_document in keys.values()}
    order = sorted(texts, key=lambda index: texts[index])  # sorted neighbours share the longest prefixes
    common = [_common(keys[a].bytes_Tk, keys[b].bytes_Tk) for a, b in pairwise(order)]
    beginnings = {}
    for position, index in enumerate(order):
        ends = {*_falling(common[position:]), *_falling(common[:position][::-1])}
        if ends:
            # Forwards may omit the last token of a document that is a prefix of another.
            ends |= {end - 1 for end in ends if end in lengths and end > 1}
            count, width = keys[index].bytes_Tk.shape
            beginnings[index] = Beginning(
                _nodes(texts[index], sorted(ends | {count}), width, salt), keys[index].images_end
            )
    return beginnings


def _common(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> int:
    """The length of the common prefix of two documents."""
    length = min(len(first), len(second))
    differing = (first[:length] != second[:length]).any(1)
    return int(differing.argmax()) if differing.any() else length


def _falling(common: Sequence[int]) -> set[int]:
    """The lengths of the prefixes that a document shares with any sorted neighbour on one side, from the lengths that
    neighbours share with the next."""
    ends: set[int] = set()
    lowest = 1 << 62
    for count in common:
        lowest = min(lowest, count)
        if not lowest:
            break
        ends.add(lowest)
    return ends


def _nodes(text: bytes, ends: Sequence[int], bytes_per_token: int, salt: bytes) -> Path:
    hashed, start, nodes = blake2b(salt, digest_size=8), 0, list[PathNode]()
    for end in ends:
        hashed.update(text[start * bytes_per_token : end * bytes_per_token])
        nodes.append(PathNode(int.from_bytes(hashed.copy().digest(), "little") >> 1, end))
        start = end
    return tuple(nodes)
