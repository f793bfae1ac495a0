"""Frozen models on ranks of their own (reference.ranks, teacher.ranks): both sides of the exchange.

The trained model and the frozen ones have a process group each (launch/process.py:join), so that no collective of one
side waits for the other. The first rank of each side talks through the store that the run's ranks met at. Both sides
read the same data, so a request is the places of documents in a data set, and its answer some bytes, such as a logprob
sum for each. Requests are answered in the order in which they were made; that for a step is made while the step before
is trained. What is too large for the store goes from rank to rank (remote_teachers.py).
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from weft.config.frozen_ranks import frozen_ranks, frozen_section
from weft.config.schema import SftConfig
from weft.errors import StoppedError
from weft.launch import flight
from weft.launch.process import Ranks
from weft.launch.stopping import StopSignals
from weft.recipes.run_data import RunData

# (Number of a request, the request) -> its answer, of which the first rank's counts. Collective on the frozen side.
Answer = Callable[[int, Mapping[str, Any]], bytes]

_POLL_SECONDS = 0.002
_EARLY_SECONDS = 5.0
_IDLE_SECONDS = 1.0  # after which a waiting frozen side tells its ranks, and its watchdog, that it waits


class FrozenSide:
    """The frozen models, as the trained model's ranks reach them; a context around all that these do. name: of the
    models, for messages, such as `reference`. ranks: those of the trained model.

    After it they wait until the frozen side knows that the run has ended: a few seconds at most where a signal ended
    it, which the launcher also sends when a rank has died.
    """

    def __init__(self, name: str, ranks: Ranks) -> None:
        assert ranks.store is not None
        self.name, self.ranks, self.store = name, ranks, ranks.store
        self._number, self._lock = 0, threading.Lock()
        self._requests: dict[tuple[str, tuple[int, ...]], list[int]] = {}  # numbers of requests, the first ones first

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_stopped = kind is not None and issubclass(kind, StoppedError)
        if self.ranks.is_first and (kind is None or is_stopped):
            with self._lock:
                self._post({})
            _wait(self.store, "exchange/ended", _EARLY_SECONDS if is_stopped else None)

    def wait_until_ready(self, data: Mapping[str, Any]) -> list[str]:
        """What the frozen side says at its start, once its models are loaded. data: digests of the data as this side
        read them. Raises RuntimeError, on every rank, if the frozen side read others. Collective."""
        flight.enter("load")
        message = json.loads(self._from_first(lambda: _wait(self.store, "exchange/ready")))
        if message["data"] != data:
            raise RuntimeError(
                f"the {self.name}'s ranks read other data ({message['data']}) than the trained model's ({dict(data)}): "
                "give all machines the same files."
            )
        return [str(line) for line in message["lines"]]

    def ask(self, name: str, indices: Sequence[int], **keys: Any) -> None:
        """Asks for what the models read of these documents of a data set, ahead of `answer`. keys: further ones of the
        request. Any thread may call it."""
        if self.ranks.is_first and indices:
            with self._lock:
                number = self._post({"name": name, "indices": list(indices), **keys})
                self._requests.setdefault((name, tuple(indices)), []).append(number)

    def is_asked(self, name: str, index: int) -> bool:
        """Whether a request that is not answered yet has this document."""
        with self._lock:
            return any(data_set == name and index in indices for data_set, indices in self._requests)

    def answer(self, name: str, indices: Sequence[int], **keys: Any) -> bytes:
        """The answer to a request, which is made now if it was not. Collective."""

        def read() -> bytes:
            key = name, tuple(indices)
            if key not in self._requests:
                self.ask(name, indices, **keys)
            with self._lock:
                number, *later = self._requests.pop(key)
                if later:
                    self._requests[key] = later
            value = _wait(self.store, f"exchange/{number}/answer")
            self.store.delete_key(f"exchange/{number}/answer")
            return value

        with flight.computing(f"the {self.name} on ranks of its own"):
            return self._from_first(read)

    def _post(self, request: Mapping[str, Any]) -> int:
        number, self._number = self._number, self._number + 1
        self.store.set(f"exchange/{number}/request", json.dumps(request))
        return number

    def _from_first(self, read: Callable[[], bytes]) -> bytes:
        """What the first rank reads, on every rank of the trained model. Collective."""
        shared: list[bytes] = [read() if self.ranks.is_first else b""]
        dist.broadcast_object_list(shared, src=0, group=self.ranks.group)
        return shared[0]


class ModelRanks(ABC):
    """The ranks of reference.ranks or teacher.ranks, as the loop has them (recipe.py:SeparateRanks)."""

    side: FrozenSide

    def __init__(self, config: SftConfig) -> None:
        section = frozen_section(config)
        assert section is not None
        self.name, self.count = section[0], frozen_ranks(config)

    def alongside(self, ranks: Ranks) -> AbstractContextManager[None]:
        if ranks.is_frozen:
            return nullcontext()
        self.side = FrozenSide(self.name, ranks)
        return self.side

    def serve(self, ranks: Ranks, data: RunData) -> None:
        answer, lines = self.open_frozen(ranks, data)
        serve(answer, ranks, data.digests, lines)

    def dry_run(self, ranks: Ranks, data: RunData | None) -> list[str]:
        return self.open_frozen(ranks, data, weights=False)[1]

    @abstractmethod
    def open_frozen(self, ranks: Ranks, data: RunData | None, *, weights: bool = True) -> tuple[Answer, list[str]]:
        """(What answers the requests of the trained model's ranks, lines for the opening). data: None if they were not
        read. weights: False in a dry run. Raises UserError for what the run would refuse. Collective on these
        ranks."""


def serve(answer: Answer, ranks: Ranks, data: Mapping[str, Any], lines: Sequence[str]) -> None:
    """The frozen side: answers requests until the trained model's side ends. data, lines: as in
    FrozenSide.wait_until_ready. Raises StoppedError if a signal ended the run early. Collective."""
    store = ranks.store
    assert store is not None
    if ranks.is_first:
        store.set("exchange/ready", json.dumps({"data": dict(data), "lines": list(lines)}))
    number = 0
    with StopSignals() as signals:  # the trained model's ranks decide when the run ends
        while True:
            flight.enter("waiting")
            shared: list[Any] = [None]
            if ranks.is_first:
                key, until = f"exchange/{number}/request", time.monotonic() + _IDLE_SECONDS
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
            value = answer(number, request)
            if ranks.is_first:
                store.set(f"exchange/{number}/answer", value)
            number += 1
    if ranks.is_first:
        store.set("exchange/ended", b"1")
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
