"""Frozen models on separate ranks (reference.ranks, teacher.ranks): both sides of the exchange.

The trained model and the frozen models have separate process groups (launch/process.py:join), so that no collective of
one side waits for the other. The first rank of each side communicates through the store at which the run's ranks met.
Both sides read the same data, so a request contains the indices of documents in a data set, and the answer some bytes,
such as a logprob sum for each document. Requests are answered in order. The request for a step is sent while the
previous step is trained. Data too large for the store is sent from rank to rank (remote_teachers.py).
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

# (Number of a request, the request) -> its answer; the first rank's answer is sent. Collective on the frozen side.
Answer = Callable[[int, Mapping[str, Any]], bytes]

_POLL_SECONDS = 0.002
_EARLY_SECONDS = 5.0
_IDLE_SECONDS = 1.0  # after which an idle frozen side marks its ranks and its watchdog as idle


class FrozenSide:
    """The frozen models, seen from the trained model's ranks. It is a context around all work of these ranks. name: of
    the models, for messages, such as `reference`. ranks: the trained model's ranks.

    At its end the ranks wait until the frozen side knows that the run has ended. If a signal ended the run, they wait
    for at most a few seconds; the launcher also sends a signal when a rank has died.
    """

    def __init__(self, name: str, ranks: Ranks) -> None:
        assert ranks.store is not None
        self.name, self.ranks, self.store = name, ranks, ranks.store
        self._number, self._lock = 0, threading.Lock()
        self._requests: dict[tuple[str, tuple[int, ...]], list[int]] = {}  # numbers of requests, the oldest first

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_stopped = kind is not None and issubclass(kind, StoppedError)
        if self.ranks.is_first and (kind is None or is_stopped):
            with self._lock:
                self._post({})
            _wait(self.store, "exchange/ended", _EARLY_SECONDS if is_stopped else None)

    def wait_until_ready(self, data: Mapping[str, Any]) -> list[str]:
        """The frozen side's first lines, which it sends once its models are loaded. data: digests of the data that this
        side read. Raises RuntimeError, on every rank, if the frozen side read other data. Collective."""
        flight.enter("load")
        message = json.loads(self._from_first(lambda: _wait(self.store, "exchange/ready")))
        if message["data"] != data:
            raise RuntimeError(
                f"the {self.name}'s ranks read other data ({message['data']}) than the trained model's ({dict(data)}): "
                "all machines need the same files."
            )
        return [str(line) for line in message["lines"]]

    def ask(self, name: str, indices: Sequence[int], **keys: Any) -> None:
        """Sends a request for the frozen models' results on these documents of a data set, ahead of `answer`. keys:
        further entries of the request. Any thread may call it."""
        if self.ranks.is_first and indices:
            with self._lock:
                number = self._post({"name": name, "indices": list(indices), **keys})
                self._requests.setdefault((name, tuple(indices)), []).append(number)

    def is_asked(self, name: str, index: int) -> bool:
        """Whether an unanswered request contains this document."""
        with self._lock:
            return any(data_set == name and index in indices for data_set, indices in self._requests)

    def answer(self, name: str, indices: Sequence[int], **keys: Any) -> bytes:
        """The answer to a request. If the request was not sent yet, it is sent now. Collective."""

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

        with flight.computing(f"the {self.name} on separate ranks"):
            return self._from_first(read)

    def _post(self, request: Mapping[str, Any]) -> int:
        number, self._number = self._number, self._number + 1
        self.store.set(f"exchange/{number}/request", json.dumps(request))
        return number

    def _from_first(self, read: Callable[[], bytes]) -> bytes:
        """The bytes that the first rank reads, on every rank of the trained model. Collective."""
        shared: list[bytes] = [read() if self.ranks.is_first else b""]
        dist.broadcast_object_list(shared, src=0, group=self.ranks.group)
        return shared[0]


class ModelRanks(ABC):
    """The ranks of reference.ranks or teacher.ranks, in the form that the loop uses (recipe.py:SeparateRanks)."""

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
        """(The function that answers requests of the trained model's ranks, lines for the opening). data: None if they
        were not read. weights: False in a dry run. Raises UserError for a config that the run would refuse. Collective
        on these ranks."""


def serve(answer: Answer, ranks: Ranks, data: Mapping[str, Any], lines: Sequence[str]) -> None:
    """The frozen side: answers requests until the trained model's side ends. data, lines: as in
    FrozenSide.wait_until_ready. Raises StoppedError if a signal ended the run early. Collective."""
    store = ranks.store
    assert store is not None
    if ranks.is_first:
        store.set("exchange/ready", json.dumps({"data": dict(data), "lines": list(lines)}))
    number = 0
    with StopSignals() as signals:  # the trained model's ranks determine when the run ends
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
    """The value of a key, as soon as it exists. seconds: time after which the result is b""; None: a watchdog ends a
    wait that takes too long (train.timeout)."""
    end = None if seconds is None else time.monotonic() + seconds
    while not store.check([key]):
        if end is not None and time.monotonic() > end:
            return b""
        time.sleep(_POLL_SECONDS)
    value: bytes = store.get(key)
    return value
