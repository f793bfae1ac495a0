"""Sharing of device memory between trainers and rollout engines: each sleeps while the other works.

During a weight sync both are awake, so each keeps only what the sync needs: the policy's parameters, and the engine's
weights. The trainers' other parts move to host memory before the sync. The engine's cache is allocated after the
parameters have moved to host memory too.

Reward models in the trainers' ranks score after all samples of a round are drawn, so they wake with the trainers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from weft.config.devices import device_lists, roles_on
from weft.config.rl_schema import RlConfig
from weft.engine.sleep import PARTS, Part
from weft.inference.base import EnginePart, RolloutEngine, Synced
from weft.launch.ray_actors import gather_calls
from weft.launch.summary import Phases
from weft.rl.trainer_group import RankGroup


def shares_devices(config: RlConfig, role: str = "trainer") -> bool:
    """Whether engines and the processes of a role (config/devices.py) use the same devices. cluster.placement must be
    resolved."""
    if config.rollout.engine == "embedded" or not config.cluster.devices:
        is_shared = config.rollout.engine == "embedded" or config.cluster.placement == "colocated"
        return is_shared and role == "trainer"
    return role in roles_on(device_lists(config.cluster.devices), "rollout")


def sleeping_parts(config: RlConfig, device: str, role: str = "trainer") -> tuple[Part, ...]:
    """The parts of a role's processes that sleep during rollouts: cluster.offload_during_rollout, by default all on
    CUDA and none on CPU. None sleep if these and the engines use different devices. device: the trainers' device
    type."""
    if not shares_devices(config, role):
        return ()
    if config.cluster.offload_during_rollout is not None:
        return tuple(part for part in PARTS if part in config.cluster.offload_during_rollout)
    return PARTS if device == "cuda" else ()


class DeviceSharing:
    """Switches between rollouts and training: `await switch.to_rollouts(version)`, generate, `await
    switch.to_training()`, train.

    sharing: the trainers, and the separate ranks of other models, that use the engines' devices; empty if none does;
    then all stay awake. parts: the parts that sleep during rollouts. scores: whether reward models are among the
    sharing ranks.
    """

    def __init__(
        self, engine: RolloutEngine, sharing: Sequence[RankGroup], *, parts: Sequence[Part] = (), scores: bool = False,
    ) -> None:  # fmt: skip
        self.engine, self._sharing, self._parts = engine, sharing, list(parts)
        self._shared = bool(sharing)
        self.scores_last = self._shared and scores  # whether samples are scored when all are drawn
        self._phases = Phases()
        self._version: int | None = None  # of the weights that engines have
        self._trained = 0  # of the trainers' weights
        self._asleep = False  # whether the engines are

    async def to_rollouts(self, version: int) -> Synced:
        """Sync the trainers' current weights to the engines as `version`, and give the engines the devices."""
        if self._shared:
            await self._offload_trainers(sends=True)
            await self._wake_engine("weights")
        with self._phases("sync"):
            synced = await self.engine.sync(version)
        if self._shared:
            await self._offload_trainers()
            await self._wake_engine("cache")
        self._version, self._trained, self._asleep = version, version, False
        return synced

    async def to_generation(self) -> None:
        """Give the devices back to the engines, if to_scoring has given them to the trainers."""
        if self.scores_last and self._asleep:
            await self.to_rollouts(self._trained)

    async def to_scoring(self) -> None:
        """Give the devices to reward models in the trainers' ranks. Called when all samples of a round are drawn."""
        if self.scores_last and self._parts:
            await self.to_training()

    async def to_training(self) -> None:
        """Give the devices to the trainers, whose weights may change from here on. Engines that share them must be
        idle."""
        await self.engine.hold()
        if not self._shared or self._asleep:
            return
        with self._phases("sleep"):
            await self.engine.sleep()
        self._version, self._asleep = None, True
        if self._parts:
            with self._phases("wake"):
                await gather_calls([group.call_all("wake") for group in self._sharing])

    @asynccontextmanager
    async def trainers_awake(self, *, back: bool) -> AsyncIterator[None]:
        """Inside, the trainers have the devices, for example to save. back: whether the engines get them back after."""
        version = self._version if self._parts else None
        if version is not None:
            await self.to_training()
        yield
        if version is not None and back:
            await self.to_rollouts(version)

    def take_seconds(self) -> dict[str, float]:
        """Seconds of `sync`, `sleep` and `wake` since the last call."""
        phases, self._phases = self._phases, Phases()
        return phases.seconds

    async def _offload_trainers(self, sends: bool = False) -> None:
        if self._parts:
            with self._phases("sleep"):
                await gather_calls([group.call_all("sleep", self._parts, sends) for group in self._sharing])

    async def _wake_engine(self, part: EnginePart) -> None:
        if self._asleep:
            with self._phases("wake"):
                await self.engine.wake(part)
