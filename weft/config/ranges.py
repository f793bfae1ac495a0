"""Ranges of values. Keys name them in the schema: `key("...", 1, within=AT_LEAST_1)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The permitted values of a key. words: a description that completes "it must be ...", such as "1 or more"."""

    holds: Callable[[Any], bool]
    words: str


def up_to(maximum: int) -> Range:
    """An upper bound larger than any real run needs. Beyond it, a start would compute for minutes or exhaust memory."""
    return Range(lambda v: 1 <= v <= maximum, f"1 to {maximum:,}")


MOST_DOCUMENTS = 1_000_000  # of a step; planning so many takes ten seconds

POSITIVE = Range(lambda v: v > 0, "above 0")
NOT_NEGATIVE = Range(lambda v: v >= 0, "0 or more")
AT_LEAST_1 = Range(lambda v: v >= 1, "1 or more")
AT_LEAST_2 = Range(lambda v: v >= 2, "2 or more")
TWO_TOKENS = Range(lambda v: v >= 2, "2 or more (a document of one token predicts nothing)")
SHARE = Range(lambda v: 0 <= v <= 1, "between 0 and 1")
BELOW_1 = Range(lambda v: 0 <= v < 1, "0 or more and below 1")
UP_TO_1 = Range(lambda v: 0 < v <= 1, "above 0 and at most 1")
AXIS = Range(lambda v: v == -1 or v >= 1, "1 or more, or -1 for as many as the ranks allow")
INSIDE_0_1 = Range(lambda v: 0 < v < 1, "above 0 and below 1")
PROCESSES = up_to(4_096)  # on one host
RANKS = up_to(1_000_000)
ENGINE_COUNTS = Range(
    lambda v: not v or (set(v) == {"min", "max"} and 1 <= v["min"] <= v["max"] <= 4_096),
    "{min: ..., max: ...}: numbers from 1 to 4,096, the first not above the second; or {}",
)
POWER_OF_2 = Range(lambda v: v >= 1 and math.log2(v).is_integer(), "a power of 2, 1 or more")
RESHARDING = Range(lambda v: isinstance(v, bool) or v >= 2, "true, false, or a group of 2 or more")
SHARD_GROUPS = Range(
    lambda v: all(isinstance(group, str) or group >= 2 for group in v.values()),
    "of full, replicate, or groups of 2 or more",
)
RECOMPUTED = Range(
    lambda v: isinstance(v, str) or v.every >= 1, "none, full, selective, auto, or a mapping whose `every` is 1 or more"
)
TILE = Range(lambda v: isinstance(v, str) or v >= 1, "auto, off, or a number of tokens from 1")
UNITS_AHEAD = Range(
    lambda v: all(depth >= 1 for depth in (v if isinstance(v, tuple) else (v,))), "1 or more, or two such numbers"
)
PIXEL_LIMITS = Range(
    lambda v: (
        set(v) <= {"min", "max"}
        and all(pixels >= 1 for pixels in v.values())
        and v.get("min", 0) <= v.get("max", math.inf)
    ),
    "{min: PIXELS, max: PIXELS}, or one of both: numbers from 1, min not above max",
)

# Arguments of a chat template that weft sets.
RESERVED_KWARGS = ("messages", "tools", "documents", "add_generation_prompt")
TEMPLATE_KWARGS = Range(
    lambda v: not set(v) & set(RESERVED_KWARGS), f"without {', '.join(RESERVED_KWARGS)}, which come from the data"
)


def _limits_videos(limits: Mapping[str, float]) -> bool:
    names = [f"{edge}_{unit}" for unit in ("frames", "pixels") for edge in ("min", "max")]
    are_integers = all(limits[name] == int(limits[name]) >= 1 for name in names if name in limits)
    pairs = zip(names[::2], names[1::2], strict=True)
    ordered = all(limits.get(lower, 0) <= limits.get(upper, math.inf) for lower, upper in pairs)
    return set(limits) <= {"fps", *names} and 0 < limits.get("fps", 1) <= 1000 and are_integers and ordered


VIDEO_LIMITS = Range(
    _limits_videos,
    "{fps: ..., min_frames: ..., max_frames: ..., min_pixels: ..., max_pixels: ...}, or some of these: above 0, "
    "whole numbers (fps may be a fraction), no minimum above its maximum",
)
