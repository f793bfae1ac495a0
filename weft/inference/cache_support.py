"""The choice between cached and uncached generation: with a cache if that is exact for the model family."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from weft.engine.selfcheck.architecture import LOGIT_TOLERANCE, once_per_process, resolve_attention, small_copy
from weft.inference.rows import CachedRows, DecodingRows, UncachedRows
from weft.models import hf
from weft.models.facts import position_limit
from weft.models.families import family_of

_PROMPTS = (5, 23, 37)  # lengths in tokens; some exceed the windows and chunks of a small copy


def open_rows(model: PreTrainedModel, routes: bool = False) -> DecodingRows:
    """CachedRows if they are exact for this family; else UncachedRows, which are slow and exact. routes: whether to
    record the chosen experts."""
    return (CachedRows if caches(model.config) else UncachedRows)(model, routes)


def caches(config: PretrainedConfig) -> bool:
    """Whether CachedRows support this architecture; tested once on a small random copy."""
    resolve_attention(config)
    text = config.get_text_config()
    if family_of(text.model_type).attention is not None or position_limit(text) is not None:
        return False  # own attention reads another mask; or the rotary table depends on a row's length
    return _is_exact(config)


@once_per_process
def _is_exact(config: PretrainedConfig) -> bool:
    """Whether logits with and without a cache agree within LOGIT_TOLERANCE, for uneven rows that join and leave."""
    small = small_copy(config)
    if not hf.takes_dynamic_cache(small):
        return False
    vocabulary = small.get_input_embeddings().weight.shape[0]
    with torch.inference_mode():
        uncached = _walk(UncachedRows(small), vocabulary)
        try:
            cached = _walk(CachedRows(small), vocabulary)
        except (ValueError, RuntimeError, LookupError, AttributeError, TypeError):  # the family's code failed
            return False
    pairs = list(zip(cached, uncached, strict=True))
    worst = torch.stack([(a - b).abs().max() for a, b in pairs]).max()
    largest = torch.stack([b.abs().max() for _, b in pairs]).max()
    return bool(worst <= LOGIT_TOLERANCE * largest)


def _walk(rows: DecodingRows, vocabulary: int) -> list[Tensor]:
    """The logits of every forward while rows join, advance and leave, and others join."""
    prompts = [[(3 + 5 * index) % vocabulary for index in range(length)] for length in _PROMPTS]

    def advance() -> Tensor:
        return rows.advance([(3 + 7 * row + 5 * int(length)) % vocabulary for row, length in enumerate(rows.lengths)])

    logits = [rows.join(prompts[:2], (2, 1)), *(advance() for _ in range(3))]
    rows.leave([0])
    return [*logits, rows.join(prompts[2:], (2,)), *(advance() for _ in range(3))]
