"""Distributes the images of documents that mesh.cp splits over ranks. One of the ranks that share a document computes
each image, or frame of a video, and sends its features to the ranks that have its tokens.

F features of a document: first of its images in order, then of its videos.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.step_plan.plan import StepPlan
from weft.errors import UserError
from weft.models.vision import Vision
from weft.ops.communicator import CPAxis, FeatureExchange

Numbers = NDArray[np.int64]
_FEATURES = 32  # bits for the number of a feature in its document


def assign_images(
    indices: Sequence[int],
    documents: Mapping[int, Document],
    plan: StepPlan,
    micro_batch: int,
    rank: int,
    axis: CPAxis,
    vision: Vision,
) -> dict[str, Any]:
    """The fields of a rank's row (`cut_row`) for images: the rank computes its assigned images instead of all images of
    its documents, `indices`. If any rank of the group shares a document with images, all of them call this."""
    by_rank, with_images = plan.ranges_by_rank(micro_batch, rank), list[_DocumentImages]()
    for index in indices:
        media = documents[index].media
        if media is not None:
            places = [n for n, local in enumerate(by_rank) if index in local]
            with_images.append(
                _DocumentImages.from_document(
                    index, documents[index], plan.documents[index].read, places, by_rank, vision
                )
            )
    local = [(images, unit) for images in with_images for unit in np.flatnonzero(images.owner_U == axis.rank).tolist()]
    exchange = plan_exchange(with_images, indices, by_rank[axis.rank], axis)
    media_of = dict(vision.smallest)
    if local:
        media_of["pixel_values"] = torch.cat([images.pixels[unit] for images, unit in local])
        media_of["image_grid_thw"] = torch.tensor([[1, *images.sides[unit]] for images, unit in local])
    if len(exchange.order) > exchange.images:  # the model asks for features of videos only if it gets pixels
        media_of |= {
            "pixel_values_videos": media_of["pixel_values"][:0], "video_grid_thw": media_of["image_grid_thw"][:0],
        }  # fmt: skip
    return {"media": media_of, "placeholder": not local, "exchange": exchange}


@dataclass(frozen=True)
class _DocumentImages:
    """The images of one document, U images and frames. pixels, sides: the patches of each image, and its (height,
    width) in patches. owner_U: the rank that computes each. owner_F, holder_F: the rank that computes each feature, and
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
    def from_document(
        cls,
        index: int,
        document: Document,
        read: int,
        places: Sequence[int],
        ranges_by_rank: Sequence[Mapping[int, Sequence[tuple[int, int]]]],
        vision: Vision,
    ) -> _DocumentImages:
        """read: number of tokens of the document that a forward reads. places: the ranks of the group that share it.
        ranges_by_rank: as StepPlan.held."""
        assert document.media is not None
        inputs, tokens = document.media.inputs, document.tokens[:read].numpy()
        images, videos = (_sides(inputs.get(name)) for name in ("image_grid_thw", "video_grid_thw"))
        patches = [height * width for height, width in (*images, *videos)]
        counts = [count // vision.merge**2 for count in patches]
        token_F = np.concatenate([np.flatnonzero(tokens == kind) for kind in (vision.image, vision.video)])
        if len(token_F) != sum(counts):
            raise UserError(
                f"{document.source or f'document {index} of the step'}: has {len(token_F)} placeholder tokens for "
                f"images, but its images have {sum(counts)} features. Both numbers must be equal."
            )
        owner_U = _balance(patches, places)
        holder_T, feature_T = np.full(read, -1), np.full(read, -1)
        for rank, ranges in enumerate(ranges_by_rank):
            for start, stop in ranges.get(index, ()):
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


def _balance(patches: Sequence[int], places: Sequence[int]) -> Numbers:
    """The rank that computes each image: the rank with the fewest patches so far."""
    spent, owners = dict.fromkeys(places, 0), []
    for count in patches:
        owners.append(min(places, key=lambda rank: (spent[rank], rank)))
        spent[owners[-1]] += count
    return np.array(owners, np.int64)


def plan_exchange(
    by_document: Sequence[_DocumentImages],
    documents: Sequence[int],
    ranges: Mapping[int, Sequence[tuple[int, int]]],
    axis: CPAxis,
) -> FeatureExchange:
    """The features that this rank sends and receives. by_document: the images of its documents, in the order of its
    row. ranges: the tokens that it has of each document."""
    rising, first = sorted(by_document, key=lambda image_set: image_set.index), dict[int, Numbers]()
    computed = 0
    for image_set in by_document:  # index in the tower's output of each feature that this rank computes
        is_local = image_set.owner_F == axis.rank
        first[image_set.index] = computed + np.cumsum(is_local) - 1
        computed += int(is_local.sum())
    sent = [_joined(first[s.index][_between(s, axis.rank, to)] for s in rising) for to in range(axis.size)]
    received = [_joined(_keys(s, _between(s, source, axis.rank)) for s in rising) for source in range(axis.size)]
    needed = dict[bool, list[Numbers]]({False: [], True: []})
    by_index = {image_set.index: image_set for image_set in by_document}
    for index in documents:
        for start, stop in ranges[index] if index in by_index else ():
            features = by_index[index].feature_T[start:stop]
            features = features[features >= 0]
            for of_video in needed:
                of_kind = features[(features >= by_index[index].images) == of_video]
                needed[of_video].append((index << _FEATURES) + of_kind)
    images, keys = _joined(needed[False]), _joined(received)
    order = np.argsort(keys)
    feature_order = order[np.searchsorted(keys[order], np.concatenate([images, _joined(needed[True])]))]
    return FeatureExchange(
        axis.ranks, torch.from_numpy(_joined(sent)), [len(part) for part in sent], [len(part) for part in received],
        torch.from_numpy(feature_order), len(images),
    )  # fmt: skip


def _between(images: _DocumentImages, source: int, target: int) -> Numbers:
    """The features that rank `source` computes and whose tokens are on rank `target`."""
    return np.flatnonzero((images.owner_F == source) & (images.holder_F == target))


def _keys(images: _DocumentImages, features: Numbers) -> Numbers:
    return (images.index << _FEATURES) + features


def _joined(parts: Iterable[Numbers]) -> Numbers:
    return np.concatenate([np.zeros(0, np.int64), *parts])
