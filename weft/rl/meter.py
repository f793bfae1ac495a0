"""Progress of running rollouts: samples, tokens, and pending rewards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

Show = Callable[[str], None]  # displays a progress text; "" clears it
_SECONDS = 0.5  # between two progress texts


class Meter:
    """what: name of the rollouts in `text`. drawn: returns the number of tokens that the engine has sampled so far.
    expected, done: numbers of samples. pending: number of samples whose rewards are pending."""

    def __init__(self, name: str, drawn: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self._drawn, self._clock = name, drawn, clock
        self.expected = self.done = self.pending = 0
        self._began, self._before = clock(), drawn()

    def text(self) -> str:
        """For example `rollout step 3: 96/256 samples, 1,234 tokens/s, 12 rewards pending`."""
        rate = (self._drawn() - self._before) / max(self._clock() - self._began, 1e-9)
        words = [f"{self.name}: {self.done:,}/{self.expected:,} samples"]
        words += [f"{rate:,.0f} tokens/s"] if self.done < self.expected else []
        words += [f"{self.pending:,} rewards pending"] if self.pending else []
        return ", ".join(words)

    @contextmanager
    def scoring(self, samples: int) -> Iterator[None]:
        """Inside, the rewards of this number of samples count as pending."""
        self.pending += samples
        try:
            yield
        finally:
            self.pending -= samples

    @asynccontextmanager
    async def shown(self, show: Show) -> AsyncIterator[None]:
        """Inside, call `show` regularly with the progress text."""

        async def tell() -> None:
            while True:
                await asyncio.sleep(_SECONDS)
                show(self.text())

        telling = asyncio.ensure_future(tell())
        try:
            yield
        finally:
            telling.cancel()
            with suppress(asyncio.CancelledError):
                await telling
            show("")
