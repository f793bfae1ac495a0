"""Environments as users write them, good ones and bad ones. No torch, no transformers: processes import this."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.rl.environments import Environment, Reply


class Echo(Environment):
    """Says back what it hears, once."""

    gives_reward = True

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        if text.startswith("say "):
            return Reply(messages=[{"role": "tool", "content": text[4:]}], reward=0.25, notes={"heard": text})
        return Reply(done=True, reward=1.0)


class Blocking(Environment):
    """As Echo, by a plain function."""

    def step(self, text: str, tokens: Sequence[int]) -> Reply:  # type: ignore[override]
        return Reply(text="\n> ") if text.startswith("say ") else Reply(done=True)


class SilentEnvironment(Environment):
    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        return Reply()


class Again(Environment):
    """Asks once more, and rewards what is said then."""

    gives_reward = True

    def __init__(self) -> None:
        self.turns = 0

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        self.turns += 1
        return Reply(tokens=[10]) if self.turns == 1 else Reply(done=True, reward=float(len(text)))


class Faulty(Environment):
    """Fails in the way that the prompt's column `how` says; says where it lives, and what it has started."""

    gives_reward = True

    async def start(self, prompt: Any) -> None:
        self.how = prompt.columns["how"]
        self.turns = 0

    def step(self, text: str, tokens: Sequence[int]) -> Any:  # type: ignore[override]
        self.turns += 1
        if self.turns == 1:
            return Reply(text=" more ")
        return getattr(self, self.how)()

    def well(self) -> Reply:
        return Reply(done=True, reward=float(self.turns), notes={"process": os.getpid()})

    def hang(self) -> None:
        (Path(os.environ["STARTED"]) / str(os.getpid())).touch()
        child = subprocess.Popen(["sleep", "600"])
        (Path(os.environ["STARTED"]) / str(child.pid)).touch()
        time.sleep(600)

    def hold_the_lock(self) -> None:
        import re

        re.match("(a+)+$", "a" * 60 + "b")

    def leave(self) -> None:
        os._exit(9)

    def exit(self) -> None:
        sys.exit(3)

    def crash(self) -> None:
        ctypes.string_at(0)

    def be_killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def run_out(self) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        bytearray(1 << 34)

    def nothing(self) -> None:
        """Forgets to reply."""

    def nan(self) -> Reply:
        return Reply(done=True, reward=float("nan"))

    def unsendable(self) -> Reply:
        return Reply(done=True, notes={"file": sys.stderr})

    def words(self) -> Reply:
        return Reply(messages=["no dict"])  # type: ignore[list-item]


class Patient(Environment):
    """Waits without end; notes that it was closed."""

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        await asyncio.sleep(60)
        return Reply(done=True)

    async def close(self) -> None:
        Path(os.environ["CLOSED"]).touch()


class Broken(Environment):
    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        raise KeyError("nothing here")


class Gallery(Environment):
    """Shows an image after each answer: of a file, as bytes, as a picture in memory; with words of the column `ask`."""

    gives_reward = True

    async def start(self, prompt: Any) -> None:
        self.folder, self.ask, self.turns = prompt.columns["folder"], prompt.columns["ask"], 0

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        self.turns += 1
        if self.turns == 4:
            return Reply(done=True, reward=float(len(text) % 3))
        parts = [{"type": "image", "image": self._image()}, {"type": "text", "text": self.ask}]
        return Reply(messages=[{"role": "user", "content": parts}])

    def _image(self) -> Any:
        from PIL import Image

        path = f"{self.folder}/{'abc'[self.turns - 1]}.png"
        if self.turns == 1:
            return path
        return Path(path).read_bytes() if self.turns == 2 else Image.open(path)
