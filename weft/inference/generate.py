"""Batched generation with a plain HuggingFace causal LM: many requests at once, on one device (continuous batching).

Rows are samples in progress. A prompt is forwarded once for its whole group. A finished sample leaves the batch, and
waiting samples replace it. A sample depends only on the weights, its prompt, its seed and its sampling options.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weft.data.image_opener import ImageOpener
from weft.engine.batch.media import Media
from weft.engine.selfcheck.architecture import compute_exactly, implementation, resolve_attention
from weft.errors import UserError
from weft.inference.base import Completion, Finish, Request, SamplingParams
from weft.inference.cache_support import open_rows
from weft.inference.rows import Routes
from weft.inference.token_sampling import SampledTokens, sample_tokens, uniforms
from weft.launch import flight
from weft.models import hf
from weft.models.fused_norms import fuse_norms
from weft.ops.exact import numerics

MAX_TOKENS = 65_536  # default of max_tokens; runs set rollout.kv_cache_tokens
_JOIN = 0.25  # share of free room from which samples join a running batch, because every join costs a forward


@dataclass
class GeneratorStats:
    """Statistics of a generator. prompts: forwarded prompts. tokens: sampled tokens. steps: forwards of one token per
    row. row_steps: sum of rows over steps. most_rows: the largest number of rows at once."""

    prompts: int = 0
    tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    most_rows: int = 0


@dataclass(eq=False)
class _ActiveSample:
    """One seed of a request in progress. versions: (version, tokens) in order."""

    job: _ActiveRequest
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masses: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + 1)
        else:
            self.versions.append((version, 1))

    def forget(self) -> None:
        """Discard all tokens, so that the sample starts again."""
        for values in (self.tokens, self.logprobs, self.masses, self.versions, self.routes):
            values.clear()

    @property
    def so_far(self) -> tuple[int, ...]:
        """Prompt and sampled tokens."""
        return (*self.job.request.tokens, *self.tokens)

    def completion(self) -> Completion:
        assert self.finish is not None
        mass = tuple(self.masses) if self.job.request.sampling.truncated else None
        routes = np.concatenate(self.routes) if self.routes else None
        return Completion(tuple(self.tokens), tuple(self.logprobs), self.finish, tuple(self.versions), mass, routes)


@dataclass(eq=False)
class _ActiveRequest:
    """A request and its samples."""

    request: Request
    samples: list[_ActiveSample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.samples = [_ActiveSample(self, seed) for seed in self.request.seeds]

    @property
    def length(self) -> int:
        """The most tokens that a sample may have, including the prompt."""
        return len(self.request.tokens) + self.request.sampling.max_new_tokens

    @property
    def ended(self) -> bool:
        return all(sample.finish is not None for sample in self.samples)


@dataclass(eq=False)
class _WaitingSamples:
    """Waiting samples of one job that continue the same tokens, which are forwarded once for all that join together."""

    job: _ActiveRequest
    tokens: tuple[int, ...]
    samples: list[_ActiveSample]


Finished = list[tuple[Request, list[Completion]]]
Numbered = dict[int, list[Completion]]  # by the number of the request, which the caller of advance() chose


class Generator:
    """Completes requests with `model`, which it owns. Call add() and step(), or advance(), or generate().

    version: of the weights, for completions; set it when they change. Global random number generators are not used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        version: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens: int = MAX_TOKENS,
        exact: bool = False,
        routes: bool = False,
        opener: ImageOpener | None = None,
        fused_norms: bool | None = None,
    ) -> None:
        """tokenizer: needed only for stop texts. max_tokens: capacity of the cache in tokens; a sample counts with its
        greatest possible length. One sample can always run. exact: as in EngineConfig. routes: whether to record the
        chosen experts. opener: opens images of requests. fused_norms: whether to fuse RMSNorms, which are most of
        the operations that the host launches for a token; None: on CUDA, unless `exact`."""
        hf.register_kernels()
        resolve_attention(model.config)
        if exact:
            compute_exactly(model)
        else:
            hf.set_attention(model, implementation(model.config, "auto"))
        if fused_norms or (fused_norms is None and not exact and model.device.type == "cuda"):
            fuse_norms(model)
        self.version, self.max_tokens, self.work = version, max_tokens, GeneratorStats()
        self._tokenizer, self._rows, self._exact = tokenizer, open_rows(model.eval(), routes), exact
        self._device, self._opener = model.device, opener
        self._waiting: deque[_WaitingSamples] = deque()
        self._running: list[_ActiveSample] = []  # row by row
        self._request_numbers: dict[int, int] = {}  # of advance(): id() of an unfinished request -> its number

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request. UserError if it cannot be served."""
        if not request.tokens or request.sampling.max_new_tokens < 1:
            raise UserError(
                f"{request.id}: a request must have at least one prompt token, and max_new_tokens of at least 1."
            )
        if request.sampling.stop and self._tokenizer is None:
            raise UserError(f"{request.id}: stop texts need a tokenizer, but this engine was opened without one.")
        if request.images is not None and self._opener is None:
            raise UserError(f"{request.id}: has images, but this engine was opened for a text-only model.")
        job = _ActiveRequest(request)
        self._waiting.append(_WaitingSamples(job, request.tokens, list(job.samples)))

    def step(self) -> Finished:
        """Sample one token for every running sample, then let waiting samples join and sample their first token.
        Returns the finished requests with their completions."""
        flight.beat()
        with torch.inference_mode(), numerics(self._exact):
            jobs = self._advance() + self._admit()
        ended = [job for job in dict.fromkeys(jobs) if job.ended]
        return [(job.request, [sample.completion() for sample in job.samples]) for job in ended]

    def advance(self, requests: Mapping[int, Request], seconds: float) -> tuple[Numbered, int]:
        """Add `requests`, by number, and work on all requests until they have finished or `seconds` have passed.
        Returns finished completions by number, and the number of tokens sampled in this call. Weights may change
        between two calls (renew)."""
        end, before = time.monotonic() + seconds, self.work.tokens
        for number, request in requests.items():
            self.add(request)
            self._request_numbers[id(request)] = number
        finished: Numbered = {}
        while self.busy:
            finished |= self._numbered(self.step())
            if time.monotonic() >= end:
                break
        return finished, self.work.tokens - before

    def end(self) -> Numbered:
        """End all requests of advance(); returns their completions, with finish `abort` for unfinished samples."""
        return self._numbered(self.abort())

    def _numbered(self, finished: Finished) -> Numbered:
        return {self._request_numbers.pop(id(request)): completions for request, completions in finished}

    def renew(self, version: int, keep: bool = True) -> None:
        """Continue with new weights of this version. keep: whether unfinished samples keep their tokens, whose keys and
        values are computed again; otherwise they start again from the same seeds."""
        self.version = version
        unfinished, self._running = self._running, []
        self.drop_cache()
        joining = dict[tuple[int, tuple[int, ...]], _WaitingSamples]()
        for sample in unfinished:
            if not keep:
                sample.forget()
            entry = joining.setdefault((id(sample.job), sample.so_far), _WaitingSamples(sample.job, sample.so_far, []))
            entry.samples.append(sample)
        self._waiting.extendleft(reversed(joining.values()))

    def drop_cache(self) -> None:
        """Free the cache. No sample may be running."""
        assert not self._running, "samples are being written"
        self._rows.drop()

    def abort(self) -> Finished:
        """End all requests; returns their completions, with finish `abort` for unfinished samples."""
        waiting = (entry.job for entry in self._waiting)
        jobs = list(dict.fromkeys([*(sample.job for sample in self._running), *waiting]))
        for job in jobs:
            for sample in job.samples:
                sample.finish = sample.finish or "abort"
        self._leave()
        self._waiting.clear()
        return [(job.request, [sample.completion() for sample in job.samples]) for job in jobs]

    def generate(
        self, requests: Sequence[Request], proceed: Callable[[], bool] | None = None
    ) -> list[list[Completion]]:
        """The completions of each request, one per seed. proceed: called before every step; it may block, and ends all
        requests by returning False. UserError if two requests have the same id."""
        assert not self.busy
        if len({request.id for request in requests}) < len(requests):
            raise UserError("two requests of a batch have the same id.")
        for request in requests:
            self.add(request)
        completions_by_id: dict[str, list[Completion]] = {}
        while self.busy:
            finished = self.step() if proceed is None or proceed() else self.abort()
            completions_by_id.update((request.id, completions) for request, completions in finished)
        return [completions_by_id[request.id] for request in requests]

    # ------------------------------------------------------------ admission

    def _admit(self) -> list[_ActiveRequest]:
        """Let waiting samples join and sample their first token; returns their jobs. A group is split only if it can
        never fit as a whole."""
        joining: list[_WaitingSamples] = []
        while self._waiting:
            entry = self._waiting[0]
            count = self._fitting(entry, joining)
            if count == 0:
                break
            joining.append(replace(entry, samples=entry.samples[:count]))
            if count < len(entry.samples):
                self._waiting[0] = replace(entry, samples=entry.samples[count:])
                break
            self._waiting.popleft()
        if not joining:
            return []
        joining.sort(key=lambda entry: len(entry.tokens))  # rows of similar lengths need less padding
        counts, media = [len(entry.samples) for entry in joining], [self._media(entry) for entry in joining]
        logits_PV = self._rows.join([entry.tokens for entry in joining], counts, media)
        new = [sample for entry in joining for sample in entry.samples]
        owner = np.repeat(np.arange(len(joining)), counts)
        self.work.prompts += len(joining)
        self._running += new
        self.work.most_rows = max(self.work.most_rows, len(self._running))
        if self._rows.routes:
            for sample, prompt_index in zip(new, owner.tolist(), strict=True):
                num_known = sum(map(len, sample.routes))  # a sample that continues keeps the routes it was sampled with
                sample.routes.append(self._rows.routes[prompt_index][num_known:])
        self._take(new, logits_PV[torch.from_numpy(owner).to(self._device)])
        self._leave()
        return [entry.job for entry in joining]

    def _media(self, entry: _WaitingSamples) -> Media | None:
        images = entry.job.request.images
        return None if images is None or self._opener is None else self._opener(images)

    def _fitting(self, entry: _WaitingSamples, joining: Sequence[_WaitingSamples]) -> int:
        """The number of samples of an entry that may join now, besides the running ones and `joining`. An entry joins
        as a whole, or waits; a part of it joins only if nothing else runs or joins."""
        running = len(self._running) + sum(len(entry_joining.samples) for entry_joining in joining)
        lengths = [
            entry.job.length,
            *(sample.job.length for sample in self._running),
            *(entry_joining.job.length for entry_joining in joining),
        ]
        room = max(1, self.max_tokens // max(lengths))  # rows, if each gets the greatest length
        num_waiting, free = len(entry.samples), room - running
        if self._running and free < _JOIN * room:
            return 0
        if num_waiting <= free:
            return num_waiting
        return max(free, 1) if running == 0 else 0

    def _leave(self) -> None:
        finished_rows = [row for row, sample in enumerate(self._running) if sample.finish is not None]
        if finished_rows:
            order = self._rows.leave(finished_rows)
            self._running = [self._running[row] for row in order]

    # ------------------------------------------------------------ sampling

    def _advance(self) -> list[_ActiveRequest]:
        """Sample one more token for all running samples; returns their jobs."""
        if not self._running:
            return []
        running = list(self._running)
        self.work.steps += 1
        self.work.row_steps += len(running)
        logits_RV = self._rows.advance([sample.tokens[-1] for sample in running])
        for sample, routes in zip(running, self._rows.routes, strict=False):  # empty if they are not recorded
            sample.routes.append(routes)
        self._take(running, logits_RV)
        self._leave()
        return [sample.job for sample in running]

    def _take(self, samples: Sequence[_ActiveSample], logits_RV: Tensor) -> None:
        """Sample the next token of each sample, and set `finish` where it ends."""
        by_sampling: dict[SamplingParams, list[int]] = {}
        for row, sample in enumerate(samples):
            by_sampling.setdefault(sample.job.request.sampling, []).append(row)
        for sampling, rows in by_sampling.items():
            is_mixed = len(by_sampling) > 1
            chosen = [samples[row] for row in rows] if is_mixed else samples
            drawn = sample_tokens(logits_RV[rows] if is_mixed else logits_RV, sampling, self._uniforms(chosen))
            self._write(chosen, sampling, drawn)

    def _uniforms(self, samples: Sequence[_ActiveSample]) -> Tensor:
        seeds = np.array([sample.seed for sample in samples], dtype=np.uint64)
        places = np.array([len(sample.tokens) for sample in samples], dtype=np.uint64)
        return torch.from_numpy(uniforms(seeds, places)).to(self._device)

    def _write(self, samples: Sequence[_ActiveSample], sampling: SamplingParams, drawn: SampledTokens) -> None:
        logprobs = drawn.logprobs_R.tolist()
        self.work.tokens += len(samples)
        for sample, token, logprob in zip(samples, drawn.tokens_R.tolist(), logprobs, strict=True):
            if logprob != logprob:
                raise RuntimeError(f"{sample.job.request.id}: the model's logits are not finite.")
            sample.add(token, logprob, self.version)
            if token in sampling.ends or (sampling.stop and self._stops(sample)):
                sample.finish = "end"
            elif len(sample.tokens) == sampling.max_new_tokens:
                sample.finish = "length"
        if drawn.kept_logmass_R is not None:
            for sample, mass in zip(samples, drawn.kept_logmass_R.tolist(), strict=True):
                sample.masses.append(mass)

    def _stops(self, sample: _ActiveSample) -> bool:
        """Whether the last token completed a stop text. Only the last tokens are decoded: a character takes at most
        four."""
        assert self._tokenizer is not None
        stops = sample.job.request.sampling.stop
        reach = 4 * max(map(len, stops)) + 8
        text = self._tokenizer.decode(sample.tokens[-reach:], skip_special_tokens=False)
        return any(stop in text for stop in stops)
