"""How far rollouts are that are under way: samples, tokens, and rewards that are waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

Show = Callable[[str], None]  # is given what there is to say now; "": nothing any more
_SECONDS = 0.5  # between two looks


class Meter:
    """what: the rollouts, for `text`. drawn: how many tokens the engine has drawn since it began.

    wanted, done: samples. judged: samples that have been handed to reward functions and have not come back.
    """

    def __init__(self, what: str, drawn: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self._drawn, self._clock = what, drawn, clock
        self.wanted = self.done = self.judged = 0
        self._began, self._before = clock(), drawn()

    def text(self) -> str:
        """`rollout step 3: 96/256 samples, 1,234 tokens/s, 12 rewards waited for`."""
        rate = (self._drawn() - self._before) / max(self._clock() - self._began, 1e-9)
        words = [f"{self.what}: {self.done:,}/{self.wanted:,} samples"]
        words += [f"{rate:,.0f} tokens/s"] if self.done < self.wanted else []
        words += [f"{self.judged:,} rewards waited for"] if self.judged else []
        return ", ".join(words)

    @contextmanager
    def judging(self, samples: int) -> Iterator[None]:
        """While reward functions have so many samples."""
        self.judged += samples
        try:
            yield
        finally:
            self.judged -= samples

    @asynccontextmanager
    async def shown(self, show: Show) -> AsyncIterator[None]:
        """Tell `show` again and again how far they are, while what is inside goes on."""

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
