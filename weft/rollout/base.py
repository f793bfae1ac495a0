"""The vocabulary of generation, and what every rollout engine promises. Imports no torch: engines may run without it.

Tokens in, tokens out: no engine is ever given text, and text is never tokenised again between turns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

# How a completion ended: by an end token or a stop text, at max_new_tokens, or because the engine was told to stop.
Finish = Literal["end", "length", "abort"]
EnginePart = Literal["weights", "cache"]  # of an engine's memory: weights go over before a cache has to have room


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    temperature: 0 takes the likeliest token each time. top_p, top_k (0: all), min_p: which tokens are kept before one
    is drawn. ends: tokens that end a completion, which they belong to. stop: texts that end it once they are written.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    ends: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be drawn, so that what is drawn follows another distribution than the model's."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt that is continued once for each seed. id: names it in messages, as in "step 3, prompt 17, turn 1"."""

    id: str
    tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Completion:
    """What one seed became. G tokens.

    tokens: with the one that ended it. logprobs: of each token, of the distribution that it was drawn from: after
    temperature, and where tokens are left out, among those that are kept (with temperature 0: of temperature 1).
    kept_logmass: [G] log of what the kept tokens have of the whole distribution; None where none are left out.
    versions: (version of the weights, tokens it wrote) in order; more than one where weights changed meanwhile.
    routes: what an engine that records them sends along for a mixture of experts: [tokens of prompt and completion - 1,
    layers, top_k] uint8 or int16 array; None elsewhere.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    versions: tuple[tuple[int, int], ...]
    kept_logmass: tuple[float, ...] | None = None
    routes: Any = None


class RolloutEngine(Protocol):
    """What generates, as the controller sees it. Every call ends within its own time limit, or raises.

    Engines take weights by a sync (weft/rollout/sync); `version` is that of the last one that was proven. drawn: tokens
    so far, as far as they are known before requests are answered.
    """

    drawn: int

    async def generate(self, request: Request) -> list[Completion]:
        """One completion for each of the request's seeds, in their order. Many requests may wait at once."""
        ...

    async def pause(self) -> None:
        """Hold all that is being generated, so that weights may change; new requests wait."""
        ...

    async def resume(self) -> None:
        """Go on with it, under the weights that there are now."""
        ...

    async def abort(self) -> None:
        """End all that is being generated: what there is of it is returned, with finish `abort`."""
        ...

    async def sleep(self) -> None:
        """Give up memory: weights and caches go. Nothing may be under way."""
        ...

    async def wake(self, part: EnginePart) -> None:
        """Take memory again: the weights', then a sync must come, and then the cache's, which sets it going."""
        ...

    async def close(self) -> None:
        """End the engine and what it has started."""
        ...


@dataclass(frozen=True, slots=True)
class Synced:
    """What a sync delivered. version: that the engine samples with from now on."""

    version: int
    tensors: int
    bytes: int
    seconds: float
    extra: Mapping[str, float] = field(default_factory=dict)


def seed_of(run: int, prompt: str, sample: int, turn: int = 0) -> int:
    """The seed of one completion: of the run's seed, the prompt's id (with its visit), the sample and the turn, so that
    it depends neither on the engine that draws nor on what is drawn beside it."""
    digest = hashlib.blake2b(f"{run}:{prompt}:{sample}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # engines take signed 64-bit integers


def spans_of(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Versions token by token as (version, tokens) in order."""
    spans: list[tuple[int, int]] = []
    for version in versions:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + 1)
        else:
            spans.append((version, 1))
    return tuple(spans)
