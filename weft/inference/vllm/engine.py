"""vLLM as a rollout engine: its own server in a separate process and environment, called over a Unix socket.

It uses these routes of vLLM 0.32: /inference/v1/generate for tokens, /v1/chat/completions/render for images, and
development routes to pause, update and abort.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from weft.data.image_files import PromptImages
from weft.errors import UserError
from weft.inference.base import Completion, EnginePart, Request
from weft.inference.http import Address, RefusedError
from weft.inference.process import EngineDiedError, EngineProcess
from weft.inference.served import Served, gather_or_cancel
from weft.inference.vllm.mapping import body_of, completion_of, features_of, images_body
from weft.inference.vllm.server import ADAPTER, Settings, command, environment, place_parts
from weft.inference.weight_sync.protocol import SyncError, Ticket

_TAGS = {"weights": "weights", "cache": "kv_cache"}  # of an engine's memory, as vLLM names its parts
_MAX_CALLS = 2048  # calls at once; the server queues them anyway


class VllmEngine:
    """One vLLM server. Implements RolloutEngine; created by `await VllmEngine.start(settings)`.

    version: of the weights that the server samples with; None: it has none, and is paused until a sync.
    """

    def __init__(self, settings: Settings, served: Served, folder: Path, version: int | None) -> None:
        self.settings, self.version = settings, version
        self._served = served
        self._numbers = itertools.count()
        self._adapters = folder / "adapter"
        self._adapter = False  # whether the server has loaded one
        self._based = False  # whether the server has received its base
        self._paused_by_caller = False  # whether the caller has paused the engine
        self._slept: int | None = None  # the version when the server went to sleep
        self._going = asyncio.Event()  # cleared while dropped requests wait to start again
        self._going.set()
        self._dropped = 0  # how often requests were dropped
        self._changing = asyncio.Lock()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._room = asyncio.Semaphore(max(1, min(_MAX_CALLS, files // 2)))

    @classmethod
    async def start(cls, settings: Settings, version: int | None = 0) -> VllmEngine:
        """Start a server and wait until it responds.

        version: of the weights at settings.model; None: there are none yet, and requests wait for a sync.
        EngineDiedError, with the end of the log, if the server does not start, for example because of an unknown
        option.
        """
        folder = Path(tempfile.mkdtemp(prefix="weft-vllm-"))
        socket = folder / "socket"
        process = EngineProcess(
            settings.name, command(settings, socket), environment(settings, place_parts(folder / "parts")),
            settings.folder / f"{settings.name}.log", folder,
        )  # fmt: skip
        engine = cls(settings, Served(process, Address(str(socket)), "/health", settings.silence), folder, None)
        try:
            await engine._served.wait_ready(settings.start)
            if version is None:
                await engine._pause()
            else:
                await engine._name_version(version)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def generate(self, request: Request) -> list[Completion]:
        """One completion per seed. While the engine is paused, requests wait."""
        features = None if request.images is None else await self._features(request, request.images)
        return await gather_or_cancel(self._complete(request, index, features) for index in range(len(request.seeds)))

    async def pause(self) -> None:
        """Pause all requests; returns when the server computes nothing."""
        async with self._changing:
            self._paused_by_caller = True
            await self._pause()

    async def resume(self) -> None:
        """Continue all requests. SyncError if there are no complete weights."""
        async with self._changing:
            if self.version is None:
                raise SyncError(
                    f"rollout engine {self.settings.name} has no complete weights, so it cannot resume: send "
                    "weights first."
                )
            self._paused_by_caller = False
            await self._resume()

    async def abort(self) -> None:
        """End all requests; each returns the tokens that it has."""
        await self._post("/abort_requests", {}, "aborting")

    async def receive(self, ticket: Ticket, version: int) -> None:
        """Receive weights from the ticket's sender. Requests are paused meanwhile. They continue with the new weights
        and recomputed caches, or start again with settings.drops. SyncError if the sync fails; the engine stays
        paused."""
        async with self._update(version) as had:
            arguments = [json.dumps(ticket.to_json()), version, had, self._based, str(self._adapters)]
            answers = await self._workers("weft_receive", arguments, f"receiving the weights of version {version}")
            self._based = True
            if answers[0]["adapter"]:
                await self._load_adapter()
            if answers[0]["verify"]:
                await self._workers("weft_check_adapter", [str(self._adapters)], "reading its adapter back")

    async def reload(self, folder: Path, version: int) -> None:
        """Load all weights from a HuggingFace directory; otherwise like receive()."""
        async with self._update(version):
            await self._workers("weft_reload", [str(folder)], f"reading {folder}")

    async def sleep(self) -> None:
        """Free memory. Weights are discarded (level 2), because the next sync replaces them. With adapters the base is
        moved to the host (level 1), because syncs bring only the adapter. On CPU vLLM cannot sleep: nothing happens."""
        if self.settings.interpreter.cpu:
            return
        async with self._changing:
            self._paused_by_caller = True
            await self._pause()
            level = 2 if self.settings.lora_rank is None else 1
            await self._post(f"/sleep?level={level}&mode=keep", None, "going to sleep")
            self._slept, self.version = self.version, None

    async def wake(self, part: EnginePart) -> None:
        """Allocate memory again: first `weights`, then a sync must follow, then `cache`, which resumes generation."""
        if self.settings.interpreter.cpu:
            return
        await self._post(f"/wake_up?tags={_TAGS[part]}", None, "waking up")
        if part == "cache":
            await self.resume()

    async def close(self) -> None:
        """End the server and all its processes."""
        await self._served.close()

    async def _features(self, request: Request, images: PromptImages) -> dict[str, Any]:
        """The request's `features`: the images as the server's own processor prepares them, and their places in the
        tokens."""
        description = f"reading the images of {request.id}"
        async with self._room:
            body = await asyncio.to_thread(images_body, images, self.settings.model)
            answer = await self._served.work("/v1/chat/completions/render", body, description)
        return features_of(answer, request)

    async def _complete(self, request: Request, index: int, features: Mapping[str, Any] | None) -> Completion:
        async with self._room:
            name = f"{request.id} #{index} ({next(self._numbers)})"
            description = f"generating {request.id}"
            while True:
                await self._going.wait()
                dropped = self._dropped
                body = body_of(request, index, name, ADAPTER if self._adapter else None, features)
                try:
                    completion = completion_of(await self._served.work("/inference/v1/generate", body, description))
                except UserError:
                    raise
                except (RefusedError, ValueError) as error:
                    raise RuntimeError(f"rollout engine {self.settings.name}, {description}: {error}") from error
                if completion.finish != "abort" or dropped == self._dropped:
                    return completion

    @asynccontextmanager
    async def _update(self, version: int) -> AsyncIterator[int | None]:
        """Inside, requests are paused and weights may change; yields the previous version. Afterwards caches of the old
        weights are dropped and this version is set. A SyncError inside leaves the engine paused."""
        async with self._changing, self._unfinished_again():
            await self._pause()
            had = self._slept if self.version is None else self.version
            self.version = self._slept = None
            try:
                yield had
                await self._post("/reset_prefix_cache?reset_running_requests=true", None, "dropping caches")
                await self._name_version(version)
            except SyncError as error:
                raise SyncError(
                    f"rollout engine {self.settings.name} did not receive version {version}, and is paused until a "
                    f"sync succeeds (it had version {had}): {error}"
                ) from error
            if not self._paused_by_caller:
                await self._resume()

    @asynccontextmanager
    async def _unfinished_again(self) -> AsyncIterator[None]:
        """Around a change of weights: with settings.drops, unfinished requests are aborted and start again after it."""
        if self.settings.drops:
            self._going.clear()
            self._dropped += 1
            await self.abort()
        try:
            yield
        finally:
            self._going.set()

    async def _workers(self, method: str, arguments: list[Any], description: str) -> list[dict[str, Any]]:
        """Call a method on all workers; returns their answers. SyncError if one reports an error."""
        answer = await self._post("/collective_rpc", {"method": method, "args": arguments}, description)
        answers: list[dict[str, Any]] = answer["results"]
        errors = dict.fromkeys(str(worker["error"]) for worker in answers if "error" in worker)
        if errors:
            raise SyncError("; ".join(errors))
        return answers

    async def _load_adapter(self) -> None:
        """Load the adapter in its folder. A later one replaces it under the same name and number, so that unfinished
        requests use it too."""
        if self._adapter:
            await self._workers("weft_adapter", [ADAPTER, str(self._adapters)], "loading an adapter")
            return
        body = {"lora_name": ADAPTER, "lora_path": str(self._adapters)}
        try:
            await self._served.order("/v1/load_lora_adapter", body, "loading an adapter")
        except RefusedError as error:
            raise SyncError(str(error)) from error
        self._adapter = True

    async def _name_version(self, version: int) -> None:
        await self._post("/update_weight_version", {"new_version": str(version)}, f"naming version {version}")
        self.version = version

    async def _pause(self) -> None:
        await self._post("/pause?mode=keep&clear_cache=false", None, "pausing")
        self._served.set_paused(True)

    async def _resume(self) -> None:
        self._served.set_paused(False)
        await self._post("/resume", None, "resuming")

    async def _post(self, path: str, body: Mapping[str, Any] | None, description: str) -> Any:
        try:
            return await self._served.order(path, body, description)
        except RefusedError as error:
            raise EngineDiedError(f"rollout engine {self.settings.name}, {description}: {error}") from error
