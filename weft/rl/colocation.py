"""Role has the memory of the devices: trainers and rollout engines that share them take turns.

The weights go over while both are there, so as little as possible is awake then: of the trainers the policy's
parameters, of an engine its weights. The trainers' other parts sleep before, and an engine's cache wakes after the
parameters have gone to sleep, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from weft.cluster.rays import ActorGroup
from weft.config.rl_schema import RlConfig
from weft.engine.sleep import PARTS, Part
from weft.rollout.base import EnginePart, Synced
from weft.telemetry.summary import Phases


def shares_devices(config: RlConfig) -> bool:
    """Whether engines and trainers have the same devices. cluster.placement is settled."""
    return config.rollout.engine == "embedded" or config.cluster.placement == "colocated"


def sleeping_parts(config: RlConfig, device: str) -> tuple[Part, ...]:
    """What of the trainers sleeps while engines generate: cluster.sleep, or all of it on accelerators that are shared.
    On CPU the host's memory would be copied to the host's memory."""
    if not shares_devices(config):
        return ()
    if config.cluster.sleep is not None:
        return tuple(part for part in PARTS if part in config.cluster.sleep)
    return PARTS if device == "cuda" else ()


class PhaseSwitch:
    """`synced = await switch.to_rollouts(version)`, generate, `await switch.to_training()`, train; and again.

    shared: whether trainers and engines have the same devices; otherwise both are always awake. parts: what of the
    trainers sleeps. take_seconds: of `sync`, `sleep` and `wake`.
    """

    def __init__(self, engine: Any, trainers: ActorGroup, *, shared: bool, parts: Sequence[Part] = ()) -> None:
        self.engine, self._trainers, self._shared, self._parts = engine, trainers, shared, list(parts)
        self._phases = Phases()
        self._version: int | None = None  # of the weights that engines have
        self._asleep = False  # the engines

    async def to_rollouts(self, version: int) -> Synced:
        """The engines get the trainers' weights as they are now, and the devices."""
        if self._shared:
            await self._rest(sends=True)
            await self._wake_engine("weights")
        with self._phases("sync"):
            synced: Synced = await self.engine.sync(version)
        if self._shared:
            await self._rest()
            await self._wake_engine("cache")
        self._version, self._asleep = version, False
        return synced

    async def to_training(self) -> None:
        """The trainers get the devices. Nothing may be under way in the engines that share them."""
        if not self._shared or self._asleep:
            return
        with self._phases("sleep"):
            await self.engine.sleep()
        self._version, self._asleep = None, True
        if self._parts:
            with self._phases("wake"):
                await self._trainers.all("wake")

    @asynccontextmanager
    async def trainers_awake(self, *, back: bool) -> AsyncIterator[None]:
        """For what trainers do while engines have the devices, such as saving. back: engines get them again."""
        version = self._version if self._parts else None
        if version is not None:
            await self.to_training()
        yield
        if version is not None and back:
            await self.to_rollouts(version)

    def take_seconds(self) -> dict[str, float]:
        """Of each phase, since they were last taken."""
        taken, self._phases = self._phases, Phases()
        return taken.seconds

    async def _rest(self, sends: bool = False) -> None:
        if self._parts:
            with self._phases("sleep"):
                await self._trainers.all("sleep", self._parts, sends)

    async def _wake_engine(self, part: EnginePart) -> None:
        if self._asleep:
            with self._phases("wake"):
                await self.engine.wake(part)
