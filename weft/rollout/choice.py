"""Which rows a model gets: with a cache, where that is exact for its family."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from weft.models import hf
from weft.models.facts import position_limit
from weft.models.families import family_of
from weft.models.startup import LOGIT_TOLERANCE, small_copy
from weft.ops.attention import ADAPTERS
from weft.rollout.rows import CachedRows, Rows, WholeRows

_PROMPTS = ([*range(3, 8)], [*range(10, 33)], [*range(40, 77)])  # longer than the windows and chunks of a small copy
_tried: dict[str, bool] = {}  # config as JSON -> whether its cache is exact


def open_rows(model: PreTrainedModel, routes: bool = False) -> Rows:
    """With a cache; without, which is slow and right, where the family's is not understood or not exact. routes:
    wanted."""
    return (CachedRows if caches(model.config) else WholeRows)(model, routes)


def caches(config: PretrainedConfig) -> bool:
    """Whether CachedRows serve this architecture; tried once on a small random copy."""
    text = config.get_text_config()
    if (
        family_of(text.model_type).attention is not None  # attention of their own reads another mask
        or text.model_type in ADAPTERS  # what they do to bounds is not worked out for one token
        or position_limit(text) is not None  # the rotary table of a row depends on its length
    ):
        return False
    key = config.to_json_string(use_diff=False)
    if key not in _tried:
        _tried[key] = _is_exact(config)
    return _tried[key]


def _is_exact(config: PretrainedConfig) -> bool:
    """Whether logits with a cache are those without, for rows of uneven lengths that come and go."""
    small = small_copy(config)
    if not hf.takes_dynamic_cache(small):
        return False
    with torch.inference_mode():
        vocabulary = small.config.get_text_config().vocab_size
        pairs = list(zip(*(_walk(rows, vocabulary) for rows in (CachedRows(small), WholeRows(small))), strict=True))
    worst = torch.stack([(cached - whole).abs().max() for cached, whole in pairs]).max()
    largest = torch.stack([whole.abs().max() for _, whole in pairs]).max()
    return bool(worst <= LOGIT_TOLERANCE * largest)


def _walk(rows: Rows, vocabulary: int) -> list[Tensor]:
    """Logits of every forward while rows join, go on, leave and are joined by others."""
    prompts = [[token % vocabulary for token in prompt] for prompt in _PROMPTS]
    found = [rows.join(prompts[:2], (2, 1))]
    found += [rows.advance(_tokens(rows.lengths, vocabulary)) for _ in range(3)]
    rows.leave([0])
    found.append(rows.join(prompts[2:], (2,)))
    return found + [rows.advance(_tokens(rows.lengths, vocabulary)) for _ in range(3)]


def _tokens(lengths: Iterable[int], vocabulary: int) -> list[int]:
    return [(3 + (7 * row + 5 * int(length)) % 90) % vocabulary for row, length in enumerate(lengths)]
