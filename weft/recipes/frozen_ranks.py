"""A reference of preferences on ranks of its own (reference.ranks): both sides of the exchange.

The two models have a process group each (launch/process.py:join), so that no collective of one waits for the other. The
first rank of each side talks through the store that the run's ranks met at. Both sides read the same data, so a request
is the places of documents in a data set, and its answer a logprob sum for each. Requests are answered in the order in
which they were made; that for a step is made while the step before is trained.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from weft.config.dpo_schema import DpoConfig, reference_ranks
from weft.engine.batch.document import Document, choose
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.frozen import open_frozen
from weft.errors import StoppedError
from weft.launch import flight
from weft.launch.process import Ranks
from weft.launch.stopping import StopSignals
from weft.recipes.frozen_models import preference_reference
from weft.recipes.reference_sums import ReferenceSums
from weft.recipes.run_data import RunData

_POLL_SECONDS = 0.002
_EARLY_SECONDS = 5.0
_IDLE_SECONDS = 1.0  # after which a waiting reference tells its ranks, and its watchdog, that it waits


class RemoteReference:
    """The trained model's side, a context around all that its ranks do. ranks: these ranks.

    After it they wait until the reference's ranks know that the run has ended: a few seconds at most where a signal
    ended it, which the launcher also sends when a rank has died.
    """

    def __init__(self, ranks: Ranks) -> None:
        assert ranks.store is not None
        self.ranks, self.store = ranks, ranks.store
        self._number, self._lock = 0, threading.Lock()
        self._asked: dict[tuple[str, tuple[int, ...]], int] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_stopped = kind is not None and issubclass(kind, StoppedError)
        if self.ranks.is_first and (kind is None or is_stopped):
            with self._lock:
                self._post({})
            _wait(self.store, "reference/ended", _EARLY_SECONDS if is_stopped else None)

    def wait_until_ready(self, data: Mapping[str, Any]) -> str:
        """What the reference says of its memory, once it is loaded. data: digests of the data as this side read them.
        Raises RuntimeError, on every rank, if the reference read others. Collective."""
        flight.enter("load")
        ready = json.loads(self._from_first(lambda: _wait(self.store, "reference/ready")))
        if ready["data"] != data:
            raise RuntimeError(
                f"the reference's ranks read other data ({ready['data']}) than the trained model's ({dict(data)}): "
                "give all machines the same files."
            )
        return str(ready["memory"])

    def ask(self, name: str, indices: Sequence[int]) -> None:
        """Asks for the sums of these documents of a data set, ahead of `sums`. Any thread may call it."""
        if self.ranks.is_first and indices:
            with self._lock:
                self._asked[name, tuple(indices)] = self._post({"name": name, "indices": list(indices)})

    def is_asked(self, name: str, index: int) -> bool:
        """Whether a request that is not answered yet has this document."""
        with self._lock:
            return any(asked == name and index in indices for asked, indices in self._asked)

    def sums(self, name: str, indices: Sequence[int]) -> Tensor:
        """[indices] fp64: the sums of documents of a data set, asked for now if they were not. Collective."""

        def read() -> bytes:
            key = name, tuple(indices)
            if key not in self._asked:
                self.ask(name, indices)
            with self._lock:
                answer = f"reference/{self._asked.pop(key)}/sums"
            values = _wait(self.store, answer)
            self.store.delete_key(answer)
            return values

        with flight.computing("the reference on ranks of its own"):
            flight.enter("logprobs")
            values = np.frombuffer(self._from_first(read), "<f8")
        if len(values) != len(indices):
            raise RuntimeError(f"the reference answered {len(values)} sums for {len(indices)} documents")
        return torch.from_numpy(values.copy())

    def _post(self, request: Mapping[str, Any]) -> int:
        number, self._number = self._number, self._number + 1
        self.store.set(f"reference/{number}/request", json.dumps(request))
        return number

    def _from_first(self, read: Any) -> bytes:
        shared: list[bytes] = [read() if self.ranks.is_first else b""]
        dist.broadcast_object_list(shared, src=0, group=self.ranks.group)
        return shared[0]


class RemoteSums(ReferenceSums):
    """The sums of a reference on ranks of its own."""

    def __init__(self, config: DpoConfig, documents: Mapping[str, Sequence[Document]], remote: RemoteReference) -> None:
        super().__init__(config, None, documents, adapters_off=False)
        self.remote = remote

    def announce(self, name: str, indices: Sequence[int]) -> None:
        missing = self.missing(name, indices)
        if self.config.preference.cache == "memory":  # the present step's are on their way
            missing = [index for index in missing if not self.remote.is_asked(name, index)]
        self.remote.ask(name, missing)

    def read_of(self, name: str, indices: Sequence[int]) -> Tensor:
        return self.remote.sums(name, indices)


class ReferenceRanks:
    """The ranks of reference.ranks, as the loop has them (recipe.py:SeparateRanks)."""

    remote: RemoteReference

    def __init__(self, config: DpoConfig) -> None:
        self.config, self.count = config, reference_ranks(config)

    def alongside(self, ranks: Ranks) -> AbstractContextManager[None]:
        if ranks.is_frozen:
            return nullcontext()
        self.remote = RemoteReference(ranks)
        return self.remote

    def open(self, data: RunData) -> tuple[ReferenceSums, list[str]]:
        """On the trained model's ranks, as open_reference, once the reference is loaded. Collective."""
        memory = self.remote.wait_until_ready(data.digests)
        return RemoteSums(self.config, data.data_sets, self.remote), [self._line(memory)]

    def serve(self, ranks: Ranks, data: RunData) -> None:
        model = self._model(ranks, data)
        serve(ReferenceSums(self.config, model, data.data_sets, adapters_off=False), ranks, data.digests)

    def dry_run(self, ranks: Ranks, data: RunData | None) -> list[str]:
        return [self._line(str(self._model(ranks, data, weights=False).memory))]

    def _model(self, ranks: Ranks, data: RunData | None, *, weights: bool = True) -> Engine:
        frozen = preference_reference(self.config, EngineConfig.from_config(self.config))
        assert frozen is not None
        model = open_frozen("reference", frozen, ranks, weights=weights)
        for documents in () if data is None else data.data_sets.values():
            model.planner.check_images(documents)
        return model

    def _line(self, memory: str) -> str:
        path = self.config.reference.path or self.config.model.path
        return f"against  {path}, a reference on {self.count} rank{'s' * (self.count > 1)} of its own: {memory}"


def serve(reference: ReferenceSums, ranks: Ranks, data: Mapping[str, Any]) -> None:
    """The reference's side: answers requests until the trained model's side ends. data: as in
    RemoteReference.wait_until_ready. Raises StoppedError if a signal ended the run early. Collective."""
    store, documents = ranks.store, reference.documents
    assert store is not None and reference.engine is not None
    if ranks.is_first:
        store.set("reference/ready", json.dumps({"data": dict(data), "memory": str(reference.engine.memory)}))
    number = 0
    with StopSignals() as signals:  # the trained model's ranks decide when the run ends
        while True:
            flight.enter("waiting")
            shared: list[Any] = [None]
            if ranks.is_first:
                key, until = f"reference/{number}/request", time.monotonic() + _IDLE_SECONDS
                while not (is_there := store.check([key])) and time.monotonic() < until:
                    time.sleep(_POLL_SECONDS)
                if is_there:
                    shared = [json.loads(store.get(key))]
                    store.delete_key(key)
            dist.broadcast_object_list(shared, src=0, group=ranks.group)
            request = shared[0]
            if request is None:
                continue
            if not request:
                break
            sums = reference.read(choose(documents[request["name"]], request["indices"]))
            if ranks.is_first:
                store.set(f"reference/{number}/sums", sums.numpy().astype("<f8").tobytes())
            number += 1
    if ranks.is_first:
        store.set("reference/ended", b"1")
    if signals.number:
        raise StoppedError(signals.number)


def _wait(store: dist.Store, key: str, seconds: float | None = None) -> bytes:
    """The value of a key, once it is there. seconds: after which it is b"" instead; None: a watchdog ends a wait that
    takes too long (train.timeout)."""
    end = None if seconds is None else time.monotonic() + seconds
    while not store.check([key]):
        if end is not None and time.monotonic() > end:
            return b""
        time.sleep(_POLL_SECONDS)
    value: bytes = store.get(key)
    return value
