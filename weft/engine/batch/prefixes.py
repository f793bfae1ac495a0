"""Documents of a group that begin alike: where their tokens part.

The documents of a group form a trie. A document's path is the list of nodes from the trie's root to its last token that
is read; nodes end where documents part, and where one ends. A node is named by a digest of everything up to its end, so
that two documents share a node exactly if they share its tokens, whichever process compares them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TokenKeys = NDArray[np.int64]  # [T, k]: what must be equal for a token to be shared


class PathNode(NamedTuple):
    """The tokens of a path between the end of the node before and `end`. cost: of a document that ends here, in the
    unit of DocumentMeta.cost. tower_tokens: of such a document, as in DocumentMeta."""

    digest: int
    end: int
    cost: float = 0.0
    tower_tokens: int = 0

    @property
    def room(self) -> int:
        """DocumentMeta.room of a document that ends here."""
        return self.end + self.tower_tokens


Path = tuple[PathNode, ...]


def image_column(tokens_T: NDArray[np.int64], placeholders: Sequence[int], images: bytes) -> NDArray[np.int64]:
    """[T]: what must be equal for placeholders to be shared: 0 for text; for a placeholder the images, and everything
    up to the last of them, so that documents part before their images or after all of them.

    placeholders: ids of tokens that stand for images. images: names the document's images; empty if it has none.
    """
    column_T = np.zeros(len(tokens_T), np.int64)
    is_image_T = np.isin(tokens_T, placeholders)
    if images and is_image_T.any():
        beginning = np.ascontiguousarray(tokens_T[: images_end(is_image_T)])
        digest = blake2b(images + beginning.tobytes(), digest_size=8).digest()
        column_T[is_image_T] = int.from_bytes(digest, "little") >> 1 | 1
    return column_T


def images_end(column_T: NDArray[Any]) -> int:
    """Tokens up to the last placeholder, and with it; 0 without one. column_T: as image_column returns it."""
    indices = np.flatnonzero(column_T)
    return int(indices[-1]) + 1 if len(indices) else 0


def shared_paths(
    groups: Sequence[Hashable | None], read: Sequence[int], keys: Callable[[int], TokenKeys | None]
) -> dict[int, Path]:
    """The paths, by index, of documents that begin like another of their group.

    groups: of each document; None shares nothing. read: tokens of each that a forward reads. keys: index -> TokenKeys
    of a document of a group; None if it shares nothing.
    """
    by_group: dict[Hashable, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        if group is not None:
            by_group[group].append(index)
    paths: dict[int, Path] = {}
    for group, indices in by_group.items():
        by_width: dict[int, dict[int, TokenKeys]] = defaultdict(dict)
        for index in indices if len(indices) > 1 else ():
            tokens = keys(index)
            if tokens is not None:
                by_width[tokens.shape[1]][index] = np.ascontiguousarray(tokens[: read[index]])
        for width, members in by_width.items():
            paths |= _paths(members, repr((group, width)).encode())
    return paths


def _paths(keys: dict[int, TokenKeys], salt: bytes) -> dict[int, Path]:
    texts = {index: tokens.tobytes() for index, tokens in keys.items()}
    order = sorted(texts, key=lambda index: texts[index])  # neighbours have the longest beginnings in common
    common = [_common(keys[a], keys[b]) for a, b in pairwise(order)]
    paths = {}
    for position, index in enumerate(order):
        ends = {*_falling(common[position:]), *_falling(common[:position][::-1])}
        if ends:
            tokens = keys[index]
            paths[index] = _nodes(texts[index], sorted(ends | {len(tokens)}), tokens.shape[1] * tokens.itemsize, salt)
    return paths


def _common(first: TokenKeys, second: TokenKeys) -> int:
    """The number of tokens that two documents have in common at their beginnings."""
    length = min(len(first), len(second))
    differing = (first[:length] != second[:length]).any(1)
    return int(differing.argmax()) if differing.any() else length


def _falling(common: Sequence[int]) -> set[int]:
    """The tokens that a document has in common with any of its neighbours on one side, from what each of them has in
    common with the next."""
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
