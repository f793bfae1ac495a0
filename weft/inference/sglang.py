"""SGLang as a rollout engine, through its documented HTTP interface (docs.sglang.io, "Sampling Parameters" and "SGLang
for RL Systems"). Not tested with a real SGLang: the tests use a server that responds as the documentation describes.

SGLang reports one weight version per completion, not per token. So an update ends running requests, and a new request
continues each after the tokens that it has.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.inference.base import Completion, EnginePart, Finish, Request, spans_of
from weft.inference.http import Address
from weft.inference.process import EngineProcess, inherited
from weft.inference.served import Served, gather_or_cancel
from weft.inference.vllm.server import Settings, option
from weft.inference.weight_sync.protocol import SyncError
from weft.launch.machine import free_port

_FINISHES: dict[str, Finish] = {"stop": "end", "length": "length", "abort": "abort"}
_TAGS = {"weights": "weights", "cache": "kv_cache"}  # of an engine's memory, as SGLang names its parts
_ALL = 1 << 30  # top_k that keeps all tokens, in SGLang


class SglangEngine:
    """One SGLang server. Implements RolloutEngine; weights come only from HuggingFace directories.

    settings.interpreter.python is the Python that has SGLang. version: of the weights that the server samples with;
    None: the last update failed, and requests wait.
    """

    def __init__(self, settings: Settings, served: Served, version: int) -> None:
        self.settings = settings
        self.version: int | None = version
        self._served = served
        self._numbers = itertools.count()
        self._going = asyncio.Event()
        self._going.set()
        self._sleeps = False
        self._aborts = 0  # number of calls of abort()
        self._changing = asyncio.Lock()

    @classmethod
    async def start(cls, settings: Settings, version: int = 0) -> SglangEngine:
        """Start a server and wait until it responds. version: of the weights at settings.model."""
        port, key = free_port(), secrets.token_hex(16)
        log = settings.folder / f"{settings.name}.log"
        process = EngineProcess(settings.name, command(settings, port, key), {**inherited(), **settings.variables}, log)
        engine = cls(settings, Served(process, Address(port, key), "/health", settings.silence), version)
        try:
            await engine._served.wait_ready(settings.start)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def generate(self, request: Request) -> list[Completion]:
        """One completion per seed. With truncated sampling, logprobs are under the full distribution, and the samples
        must not be trained on. UserError for a request with images."""
        if request.images is not None:
            raise UserError(
                f"{request.id}: rollout.engine=sglang does not support images in this version. Set "
                "rollout.engine=vllm or embedded."
            )
        return await gather_or_cancel(self._complete(request, index) for index in range(len(request.seeds)))

    async def pause(self) -> None:
        """Pause all requests."""
        async with self._changing:
            await self._pause()

    async def resume(self) -> None:
        """Continue all requests. SyncError if the last update failed."""
        if self.version is None:
            raise SyncError(f"rollout engine {self.settings.name} has no complete weights, so it cannot resume.")
        await self._resume()

    async def abort(self) -> None:
        """End all requests; each returns the tokens that it has."""
        self._aborts += 1
        await self._served.order("/abort_request", {"rid": "", "abort_all": True}, "aborting")

    async def reload(self, folder: Path, version: int) -> None:
        """Load all weights from a HuggingFace directory. Requests are paused meanwhile, and continue with the new
        weights, or start again with settings.drops. SyncError if loading fails."""
        async with self._changing:
            await self._pause()
            self.version = None
            body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
            answer = await self._served.order("/update_weights_from_disk", body, f"reading {folder}")
            if not answer["success"]:
                raise SyncError(
                    f"rollout engine {self.settings.name} did not load version {version}: {answer['message']}"
                )
            self.version = version
            if not self._sleeps:
                await self._resume()

    async def sleep(self) -> None:
        """Free weights and cache."""
        async with self._changing:
            await self._pause()
            await self._served.order("/release_memory_occupation", {}, "going to sleep")
            self._sleeps = True

    async def wake(self, part: EnginePart) -> None:
        """Allocate memory again: first `weights`, then reload() must follow, then `cache`, which resumes generation."""
        await self._served.order("/resume_memory_occupation", {"tags": [_TAGS[part]]}, "waking up")
        if part == "cache":
            self._sleeps = False
            await self.resume()

    async def close(self) -> None:
        """End the server and all its processes."""
        await self._served.close()

    async def _complete(self, request: Request, index: int) -> Completion:
        tokens, logprobs, versions = list[int](), list[float](), list[int]()
        aborts, max_new_tokens = self._aborts, request.sampling.max_new_tokens
        while True:
            await self._going.wait()
            version, description = self.version, f"generating {request.id}"
            assert version is not None, "resumed without weights"
            if self.settings.drops and versions and versions[-1] != version:
                tokens, logprobs, versions = [], [], []
            continuation = replace(
                request, tokens=(*request.tokens, *tokens),
                sampling=replace(request.sampling, max_new_tokens=max_new_tokens - len(tokens)),
            )  # fmt: skip
            name = f"{request.id} #{index} ({next(self._numbers)})"
            part = completion_of(
                await self._served.work("/generate", body_of(continuation, index, name), description), version
            )
            tokens += part.tokens
            logprobs += part.logprobs
            versions += [version] * len(part.tokens)
            if part.finish != "abort" or self._aborts > aborts:
                return Completion(tuple(tokens), tuple(logprobs), part.finish, spans_of(versions))

    async def _pause(self) -> None:
        self._going.clear()
        self._served.set_paused(True)
        await self._served.order("/pause_generation", {"mode": "abort"}, "pausing")

    async def _resume(self) -> None:
        await self._served.order("/continue_generation", {}, "resuming")
        self._served.set_paused(False)
        self._going.set()


def command(settings: Settings, port: int, key: str) -> list[str]:
    """The server's command line. key: the API key that it will require."""
    words = [
        str(settings.interpreter.python), "-m", "sglang.launch_server", "--model-path", settings.model,
        "--host", "127.0.0.1", "--port", str(port), "--api-key", key,
        "--dtype", settings.dtype, "--tp-size", str(settings.tp),
        "--context-length", str(settings.max_tokens), "--random-seed", str(settings.seed),
        "--enable-deterministic-inference",  # without it SGLang ignores a request's seed
    ]  # fmt: skip
    if settings.sleeps:
        words += ["--enable-memory-saver"]
    if settings.memory is not None:
        words += ["--mem-fraction-static", str(settings.memory)]
    for name, value in settings.options.items():
        words += option(name.replace("_", "-"), value)
    return words


def body_of(request: Request, index: int, name: str) -> dict[str, Any]:
    """The request body for the completion of the seed at index `index`. name: unique id of the call."""
    sampling = request.sampling
    return {
        "rid": name,
        "input_ids": list(request.tokens),
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or _ALL,
            "min_p": sampling.min_p,
            "sampling_seed": request.seeds[index],
            "stop_token_ids": list(sampling.ends),
            "ignore_eos": True,
            "stop": list(sampling.stop),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        },
    }


def completion_of(answer: Mapping[str, Any], version: int) -> Completion:
    """Parse a response. version: of the weights that sampled it. ValueError if it is not what was requested."""
    about = answer["meta_info"]
    drawn = about.get("output_token_logprobs") or []  # [logprob, token, text] of each
    tokens = tuple(int(token) for _, token, *_ in drawn)
    finish = _FINISHES.get(about["finish_reason"]["type"])
    if finish is None:
        raise ValueError(f"a completion ended by {about['finish_reason']}")
    output_ids = answer.get("output_ids")
    if output_ids is not None and tuple(output_ids) != tokens:
        raise ValueError(f"{len(output_ids)} tokens came with {len(tokens)} logprobs, or with logprobs of other tokens")
    logprobs = tuple(float(logprob) for logprob, *_ in drawn)
    return Completion(tokens, logprobs, finish, ((version, len(tokens)),) if tokens else ())
