"""The images of documents that mesh.cp cuts: each image, or frame of a video, is computed by one of the ranks that
share its document, and its features are sent to the ranks that have its tokens.

F features of a document: those of its images in order, then those of its videos.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.batch.row import Row
from weft.engine.step_plan.plan import StepPlan
from weft.errors import UserError
from weft.models.vision import Vision
from weft.ops.communicator import CPAxis, FeatureExchange

Numbers = NDArray[np.int64]
_FEATURES = 32  # bits for the number of a feature in its document


def deal_images(
    row: Row,
    documents: Mapping[int, Document],
    plan: StepPlan,
    micro_batch: int,
    rank: int,
    axis: CPAxis,
    vision: Vision,
) -> Row:
    """This rank's part of a row (context_row.cut_row), with the images that this rank computes in place of those of
    whole documents. Called on all ranks of the group if any of them shares a document with images."""
    held, seen = plan.ranges_by_rank(micro_batch, rank), list[_Seen]()
    for index in row.documents:
        media = documents[index].media
        if media is not None:
            places = [n for n, own in enumerate(held) if index in own]
            seen.append(_Seen.of(index, documents[index], plan.documents[index].read, places, held, vision))
    own = [(one, unit) for one in seen for unit in np.flatnonzero(one.owner_U == axis.rank).tolist()]
    exchange = plan_exchange(seen, row.documents, held[axis.rank], axis)
    media_of = dict(vision.smallest)
    if own:
        media_of["pixel_values"] = torch.cat([one.pixels[unit] for one, unit in own])
        media_of["image_grid_thw"] = torch.tensor([[1, *one.sides[unit]] for one, unit in own])
    if len(exchange.order) > exchange.images:  # the model asks for features of videos only if it gets pixels
        media_of |= {
            "pixel_values_videos": media_of["pixel_values"][:0], "video_grid_thw": media_of["image_grid_thw"][:0],
        }  # fmt: skip
    return replace(row, media=media_of, borrowed=not own, exchange=exchange)


@dataclass(frozen=True)
class _Seen:
    """The images of one document, U images and frames. pixels, sides: of each, its rows of patches and (height, width)
    in patches. owner_U: the rank that computes each. owner_F, holder_F: of each feature, the rank that computes it and
    the rank that has its token. feature_T: the feature of each token, -1 for text. images: number of features of
    images."""

    index: int
    pixels: list[Tensor]
    sides: list[tuple[int, int]]
    owner_U: Numbers
    owner_F: Numbers
    holder_F: Numbers
    feature_T: Numbers
    images: int

    @classmethod
    def of(
        cls,
        index: int,
        document: Document,
        read: int,
        places: Sequence[int],
        held: Sequence[Mapping[int, Sequence[tuple[int, int]]]],
        vision: Vision,
    ) -> _Seen:
        """read: tokens of the document that a forward reads. places: the ranks of the group that share the document.
        held: as StepPlan.held."""
        assert document.media is not None
        inputs, tokens = document.media.inputs, document.tokens[:read].numpy()
        images, videos = (_sides(inputs.get(name)) for name in ("image_grid_thw", "video_grid_thw"))
        patches = [height * width for height, width in (*images, *videos)]
        counts = [own // vision.merge**2 for own in patches]
        token_F = np.concatenate([np.flatnonzero(tokens == kind) for kind in (vision.image, vision.video)])
        if len(token_F) != sum(counts):
            raise UserError(
                f"{document.source or f'document {index} of the step'}: has {len(token_F)} placeholders of images, "
                f"which have {sum(counts)} features."
            )
        owner_U = _dealt(patches, places)
        holder_T, feature_T = np.full(read, -1), np.full(read, -1)
        for rank, own in enumerate(held):
            for start, stop in own.get(index, ()):
                holder_T[start:stop] = rank
        feature_T[token_F] = np.arange(len(token_F))
        pixels = torch.cat([inputs[name] for name in ("pixel_values", "pixel_values_videos") if name in inputs])
        return cls(
            index, list(pixels.split(patches)), [*images, *videos], owner_U, np.repeat(owner_U, counts),
            holder_T[token_F], feature_T, sum(counts[: len(images)]),
        )  # fmt: skip


def _sides(grids: Tensor | None) -> list[tuple[int, int]]:
    """(height, width) of each image, and of each frame, which the tower computes separately."""
    if grids is None:
        return []
    return [(height, width) for time, height, width in grids.tolist() for _ in range(time)]


def _dealt(patches: Sequence[int], places: Sequence[int]) -> Numbers:
    """The rank that computes each image: the one with the fewest patches so far."""
    spent, owners = dict.fromkeys(places, 0), []
    for count in patches:
        owners.append(min(places, key=lambda place: (spent[place], place)))
        spent[owners[-1]] += count
    return np.array(owners, np.int64)


def plan_exchange(
    seen: Sequence[_Seen],
    documents: Sequence[int],
    held: Mapping[int, Sequence[tuple[int, int]]],
    axis: CPAxis,
) -> FeatureExchange:
    """The features that this rank sends and receives. seen: the images of its documents, in the order of its row. held:
    the tokens that it has of each document."""
    rising, first = sorted(seen, key=lambda one: one.index), dict[int, Numbers]()
    computed = 0
    for one in seen:  # where each feature that is computed here lies in what the tower returns
        mine = one.owner_F == axis.rank
        first[one.index] = computed + np.cumsum(mine) - 1
        computed += int(mine.sum())
    sent = [_joined(first[s.index][_between(s, axis.rank, to)] for s in rising) for to in range(axis.size)]
    received = [_joined(_keys(s, _between(s, of, axis.rank)) for s in rising) for of in range(axis.size)]
    wanted = dict[bool, list[Numbers]]({False: [], True: []})
    by_index = {one.index: one for one in seen}
    for index in documents:
        for start, stop in held[index] if index in by_index else ():
            features = by_index[index].feature_T[start:stop]
            features = features[features >= 0]
            for of_video in wanted:
                own = features[(features >= by_index[index].images) == of_video]
                wanted[of_video].append((index << _FEATURES) + own)
    images, keys = _joined(wanted[False]), _joined(received)
    order = np.argsort(keys)
    found = order[np.searchsorted(keys[order], np.concatenate([images, _joined(wanted[True])]))]
    return FeatureExchange(
        axis.ranks, torch.from_numpy(_joined(sent)), [len(own) for own in sent], [len(own) for own in received],
        torch.from_numpy(found), len(images),
    )  # fmt: skip


def _between(seen: _Seen, of: int, to: int) -> Numbers:
    """The features that rank `of` computes and whose tokens are on rank `to`."""
    return np.flatnonzero((seen.owner_F == of) & (seen.holder_F == to))


def _keys(seen: _Seen, features: Numbers) -> Numbers:
    return (seen.index << _FEATURES) + features


def _joined(parts: Iterable[Numbers]) -> Numbers:
    return np.concatenate([np.zeros(0, np.int64), *parts])
