"""Training FLOPs of documents, peak rates of accelerators, and the share of the peak that a step reaches.

Conventions (Kaplan et al. 2020, arXiv:2001.08361, section 2.1; Chowdhery et al. 2022, arXiv:2204.02311, appendix B): a
multiplication and an addition are 2 FLOPs; backward costs twice forward, so a weight that multiplies a token costs 6,
and a frozen weight 4; recomputation does not count; the embedding is a look-up and does not count, but the head does;
attention costs 12 x heads x width for each visible (query, key) pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from weft.launch.accelerators import card_of


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """Attention of one layer. width: of a head; the mean of key and value width if they differ. window: number of keys
    that a token, or a patch, sees; None for all."""

    heads: int
    width: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class FlopFacts:
    """Numbers of weights that multiply tokens, and the attention, over all layers.

    dense: weights that every token uses, with the head, without the embedding. expert: weights of all routed experts; a
    token uses experts_per_token out of `experts`. frozen: dense and expert weights are not trained, so backward costs
    as much as forward. trained: further trained weights (adapters). tower: weights that multiply each patch of an
    image. tower_attention: attention of each tower layer; a patch sees its window on all sides. tower_frozen: the tower
    and its projector are not trained. tower_memory: activation memory of a patch, relative to a token's.
    """

    dense: int
    attention: tuple[AttentionFacts, ...] = ()
    expert: int = 0
    experts: int = 1
    experts_per_token: int = 1
    frozen: bool = False
    trained: float = 0.0
    tower: int = 0
    tower_attention: tuple[AttentionFacts, ...] = ()
    tower_frozen: bool = False
    tower_memory: float = 0.0


def model_flops(facts: FlopFacts, causal: bool = True) -> tuple[float, float]:
    """(linear, quadratic): a document of T tokens, T within every window, costs linear x T + quadratic x T^2 FLOPs.

    causal: count half of the pairs, which is what causal kernels compute; False: count all, as most papers' MFU does.
    """
    active = facts.dense + facts.expert * facts.experts_per_token / facts.experts
    pairs = 0.5 if causal else 1.0
    linear = (4.0 if facts.frozen else 6.0) * active + 6.0 * facts.trained
    return linear, pairs * sum(_per_pair(layer) for layer in facts.attention)


def document_flops(facts: FlopFacts, length: int, causal: bool = True) -> float:
    """Training FLOPs of one document of `length` tokens, with windows."""
    linear, _ = model_flops(facts)
    return linear * length + sum(_per_pair(a) * attention_pairs(length, a.window, causal) for a in facts.attention)


def tower_flops(facts: FlopFacts, patches: int, pairs: int) -> tuple[float, int]:
    """(training FLOPs of the vision tower for a document's images, number of tokens that need the same memory).

    patches: of all images. pairs: of patches of the same image. Smaller windows at an image's edge count as full.
    """
    pairs_per_layer = (min(pairs, patches * (layer.window or pairs)) for layer in facts.tower_attention)
    attention = sum(
        _per_pair(layer) * layer_pairs
        for layer, layer_pairs in zip(facts.tower_attention, pairs_per_layer, strict=True)
    )
    flops = 6.0 * facts.tower * patches + attention
    return flops / 3.0 if facts.tower_frozen else flops, math.ceil(facts.tower_memory * patches)


def attention_pairs(length: int, window: int | None = None, causal: bool = True) -> float:
    """(query, key) pairs of one document: T^2, or T^2 / 2 if causal (half of the diagonal is neglected).

    With a window W < T, a causal token sees W keys, and the first W tokens fewer: W T - W^2 / 2 pairs. Without
    causality the window reaches W to each side: twice as many pairs.
    """
    reach = length if window is None else min(window, length)
    half = reach * length - reach * reach / 2.0
    return half if causal else 2.0 * half


def _per_pair(layer: AttentionFacts) -> float:
    # Scores and weighted values cost 2 x width each; three times that with the backward.
    return 12.0 * layer.heads * layer.width


def peak_flops(device: torch.device) -> float | None:
    """Peak dense 16-bit FLOPs/s of one device; None for CPUs and unknown devices."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """Peak dense 16-bit FLOPs/s of the accelerator of this name; None if unknown."""
    card = card_of(name)
    return None if card is None else card.peak * 1e12


@dataclass(frozen=True, slots=True)
class Throughput:
    """The combined peak of all ranks. peak: FLOPs/s of one rank, None if unknown."""

    ranks: int
    peak: float | None

    def mfu(self, flops: float, seconds: float) -> float | None:
        """`flops` of all ranks / (peak of all ranks x `seconds`); None if the peak is unknown."""
        return None if self.peak is None or seconds <= 0 else flops / (self.peak * self.ranks * seconds)
