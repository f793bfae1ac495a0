"""The data of generation, and the interface of rollout engines. Imports no torch: engines may run without it.

Engines take tokens and return tokens. Text is never tokenised again between turns.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from weft.data.image_files import PromptImages
from weft.inference.engine_clock import EngineClock

# How a completion ended: by an end token or a stop text, at max_new_tokens, or by abort().
Finish = Literal["end", "length", "abort"]
EnginePart = Literal["weights", "cache"]  # parts of an engine's memory; the cache is not allocated during a sync


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled. temperature: 0 is greedy. top_p, top_k (0: all), min_p: truncation. ends: tokens that end
    a completion and are part of it. stop: texts that end a completion."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    ends: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def truncated(self) -> bool:
        """Whether some tokens cannot be sampled, so that samples do not follow the model's distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be completed once per seed. id: for messages, such as "17.0/3 turn 1". images: one for each image
    placeholder in the tokens, in order. queued: the Unix time at which the request was made."""

    id: str
    tokens: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: SamplingParams
    images: PromptImages | None = None
    queued: float = field(default_factory=time.time, compare=False)


@dataclass(frozen=True, slots=True)
class CallTimes:
    """When a request was generated, in Unix seconds by the controller's clock: queued, handed to `engine` (its number;
    if engines failed, the last), and complete with all its seeds."""

    engine: int
    queued: float
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion of one seed, with G tokens.

    tokens: [G], including the end token. logprobs: [G] under the distribution that each token was sampled from: after
    temperature, and renormalised over the kept tokens if sampling is truncated (with temperature 0: under temperature
    1). kept_logmass: [G] log of the probability mass of the kept tokens; None without truncation, or from engines that
    do not report it. versions: (version of the weights, number of tokens sampled with it) in order; several if weights
    changed meanwhile. routes: experts chosen by a mixture of experts, [tokens of prompt and completion - 1, layers,
    top_k] uint8 or int16, from engines that record them; else None. times: set by the controller.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    versions: tuple[tuple[int, int], ...]
    kept_logmass: tuple[float, ...] | None = None
    routes: Any = None
    times: CallTimes | None = field(default=None, compare=False)


class Generates(Protocol):
    """The source of samples: a rollout engine, or a wrapper of one."""

    async def generate(self, request: Request) -> list[Completion]:
        """One completion per seed, in order. Many requests may be concurrent."""
        ...


class RolloutEngine(Generates, Protocol):
    """The interface of a rollout engine, as the controller uses it. Every call ends within its own time limit, or
    raises.

    drawn: number of tokens sampled so far, including those of unfinished requests if the engine knows them. clock: the
    time of its engines.
    """

    drawn: int
    clock: EngineClock

    async def pause(self) -> None:
        """Pause generation, so that weights may change; new requests wait."""
        ...

    async def resume(self) -> None:
        """Continue generation with the current weights."""
        ...

    async def abort(self) -> None:
        """End all requests; each returns the tokens that it has, with finish `abort`."""
        ...

    async def sync(self, version: int) -> Synced:
        """Receive the trainers' current weights as `version` (weft/inference/weight_sync)."""
        ...

    async def hold(self) -> None:
        """Called before the trainers' weights change: until the next sync no engine may receive them."""
        ...

    async def sleep(self) -> None:
        """Free the memory of weights and cache. No request may be running."""
        ...

    async def wake(self, part: EnginePart) -> None:
        """Allocate memory again: first `weights`, then a sync must follow, then `cache`, which resumes generation."""
        ...

    async def close(self) -> None:
        """End the engine and all its processes."""
        ...


@dataclass(frozen=True, slots=True)
class Synced:
    """The outcome of a sync. version: of the engine's weights. tensors: number of sent tensors. extra: further metrics.
    note: a line for the user, or ""."""

    version: int
    tensors: int
    bytes: int
    seconds: float
    extra: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def seed_of(run: int, prompt: str, sample: int, turn: int = 0) -> int:
    """The seed of a completion: a hash of the run's seed, the prompt's id (which includes its visit), the sample's
    number and the turn. It depends neither on the engine nor on other samples."""
    digest = hashlib.blake2b(f"{run}:{prompt}:{sample}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # engines take signed 64-bit integers


def spans_of(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Run-length encode the versions of tokens: (version, tokens) in order."""
    spans: list[tuple[int, int]] = []
    for version in versions:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + 1)
        else:
            spans.append((version, 1))
    return tuple(spans)
