"""Sampling the next token of each row from its logits. R rows, V vocabulary.

A row is sampled with one uniform number, which depends only on the sample's seed and the token's position. So the
result depends neither on the other rows nor on the machine that samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.inference.base import SamplingParams

_ONE_BLOCK = 1024  # largest vocabulary whose cumulative probabilities are computed in one step


@dataclass(frozen=True)
class SampledTokens:
    """tokens_R int64; logprobs_R and kept_logmass_R (None without truncation) fp32, as in Completion."""

    tokens_R: Tensor
    logprobs_R: Tensor
    kept_logmass_R: Tensor | None


def uniforms(seeds: NDArray[np.uint64], places: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, place): output `place` of SplitMix64 from this seed (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        z = seeds + (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    numbers: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def sample_tokens(logits_RV: Tensor, sampling: SamplingParams, uniforms_R: Tensor) -> SampledTokens:
    """Sample a token for each row. logits_RV: fp32, before temperature. uniforms_R: fp64 in [0, 1)."""
    if sampling.temperature == 0:
        tokens_R = logits_RV.argmax(-1)
        return SampledTokens(tokens_R, _chosen(logits_RV.log_softmax(-1), tokens_R), None)
    if sampling.temperature != 1:
        logits_RV = logits_RV / sampling.temperature
    logprobs_RV, mass_R = logits_RV.log_softmax(-1), None
    if sampling.truncated:
        logprobs_RV = logprobs_RV.masked_fill(~kept_tokens(logprobs_RV, sampling), float("-inf"))
        mass_R = logprobs_RV.logsumexp(-1)
        logprobs_RV = logprobs_RV - mass_R[:, None]
    tokens_R = _tokens_at(logprobs_RV.exp(), uniforms_R)
    return SampledTokens(tokens_R, _chosen(logprobs_RV, tokens_R), mass_R)


def kept_tokens(logprobs_RV: Tensor, sampling: SamplingParams) -> Tensor:
    """[R, V] bool: whether each token may be sampled. As in transformers, top_k keeps the k likeliest tokens; top_p, of
    these, the fewest whose renormalised probabilities reach top_p; min_p, of these, tokens at least min_p times as
    likely as the likeliest (Nguyen et al. 2024). The likeliest token is always kept."""
    ordered_RV, order_RV = logprobs_RV.sort(dim=-1, descending=True, stable=True)
    stays_RV = torch.ones_like(ordered_RV, dtype=torch.bool)
    if sampling.top_k > 0:
        stays_RV[:, sampling.top_k :] = False
    share_RV = ordered_RV.masked_fill(~stays_RV, float("-inf")).softmax(-1, dtype=torch.float64)
    if sampling.top_p < 1:
        stays_RV &= share_RV.cumsum(-1) - share_RV < sampling.top_p
    if sampling.min_p > 0:
        stays_RV &= ordered_RV >= ordered_RV[:, :1] + math.log(sampling.min_p)
    stays_RV[:, 0] = True
    return torch.zeros_like(stays_RV).scatter_(-1, order_RV, stays_RV)


def _chosen(logprobs_RV: Tensor, tokens_R: Tensor) -> Tensor:
    return logprobs_RV.gather(-1, tokens_R[:, None])[:, 0]


def _tokens_at(probabilities_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """[R] the token at which the cumulative probability passes each number. For a large V in two steps: first over sums
    of blocks of about sqrt(V) tokens, then within a block. Sums are fp64, so that no small probability is lost."""
    rows, vocabulary = probabilities_RV.shape
    width = vocabulary if vocabulary <= _ONE_BLOCK else math.isqrt(vocabulary - 1) + 1
    blocks = -(-vocabulary // width)
    if blocks == 1:
        return _first_above(probabilities_RV.double().cumsum(-1), uniforms_R)
    padded = torch.nn.functional.pad(probabilities_RV, (0, blocks * width - vocabulary)).view(rows, blocks, width)
    sums_RN = padded.sum(-1, dtype=torch.float64)
    until_RN = sums_RN.cumsum(-1)
    block_R = _first_above(until_RN, uniforms_R)
    row_indices = torch.arange(rows, device=block_R.device)
    left_R = uniforms_R * until_RN[:, -1] - (until_RN - sums_RN)[row_indices, block_R]
    within_RW = padded[row_indices, block_R].double().cumsum(-1)
    return block_R * width + _first_above(within_RW, left_R / within_RW[:, -1])


def _first_above(cumulative_RV: Tensor, shares_R: Tensor) -> Tensor:
    """[R] the first place where cumulative > share x the last cumulative value; never a token of probability 0. For
    NaN, the last place."""
    last_R = cumulative_RV[:, -1]
    wanted_R = (shares_R.clamp(0, 1) * last_R).minimum(last_R * (1 - 1e-15))
    places_R = torch.searchsorted(cumulative_RV, wanted_R[:, None], right=True)[:, 0]
    return places_R.clamp(max=cumulative_RV.shape[1] - 1)
