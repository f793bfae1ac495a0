"""All training ranks as one object for the controller: the policy's, and separate ranks of a reference or critic, which
work at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from weft.config.rl_schema import RlConfig
from weft.engine.batch.media import ImageRoom
from weft.errors import first_line
from weft.inference.types import Sample
from weft.launch.ray_actors import ActorGroup, gather_calls
from weft.observe.opening import ModelOpening
from weft.rl.frozen_ranks import FrozenRanks
from weft.rl.reference_critic import CRITIC, Role, set_readings
from weft.rl.serialization import SampleBatch
from weft.terminal import say

RankGroup = ActorGroup | FrozenRanks


class TrainerGroup:
    """trainers: the policy's ranks, which also do the work of every role without ranks in `reference_critic`."""

    def __init__(self, config: RlConfig, trainers: ActorGroup, reference_critic: Mapping[Role, RankGroup]) -> None:
        self.config, self._trainers, self._reference_critic = config, trainers, reference_critic
        self._is_saving = False

    async def describe(self) -> ModelOpening:
        """The opening about the models. The first call waits until all ranks have built their engines."""
        (opening, *_), *other_groups = await gather_calls([group.call_all("describe") for group in self._all])
        described: ModelOpening = opening
        return described.followed_by(line for first, *_ in other_groups for line in first)

    async def check_images(self, samples: Sequence[tuple[str, int, int]]) -> None:
        """TrainerRank.check_images on all ranks."""
        if samples:
            await gather_calls([group.call_all("check_images", samples) for group in self._all])

    async def image_room(self) -> ImageRoom:
        """The smallest image room of all models that read samples."""
        return ImageRoom.smallest(await gather_calls([group.call_one(0, "image_room") for group in self._all]))

    async def open_run(
        self, folder: str, token: str, constants: Mapping[str, Any], last: int, texts: Mapping[str, str]
    ) -> list[str]:
        """Call open_run on all ranks; returns the messages of the policy's first rank."""
        notes, *_ = await gather_calls(
            [
                self._trainers.call_all("open_run", folder, token, constants, last, texts),
                *(group.call_all("open_run", folder, constants, last) for group in self._reference_critic.values()),
            ]
        )
        first: list[str] = notes[0]
        return first

    async def read(self, roles: Sequence[Role], samples: Sequence[Sample]) -> None:
        """Let each role read the samples, and set its array on them (READS). Each group of ranks gets the samples
        once."""
        groups_by_role = {role: self._reference_critic.get(role, self._trainers) for role in roles}
        batch = SampleBatch(samples)

        async def read_with(group: RankGroup) -> None:
            group_roles = tuple(role for role in roles if groups_by_role[role] is group)
            if isinstance(group, FrozenRanks):
                await group.call_all("read_all", group_roles, batch, accept=partial(set_readings, samples))
            else:
                set_readings(samples, await group.call_all("read_all", group_roles, batch))

        await gather_calls([read_with(group) for group in dict.fromkeys(groups_by_role.values())])

    async def update(self, samples: Sequence[Sample], number: int, steps: int, epoch: int, lr: float) -> dict[str, Any]:
        """One optimizer step over these samples (TrainerRank.update); returns its line of metrics.jsonl. Sets `old` on
        samples without it."""
        batch, share = SampleBatch(samples), lr / self.config.optimizer.lr
        updated, *critics = await gather_calls(
            [
                self._trainers.call_all("update", batch, number, steps, epoch, lr),
                *(group.call_all("update", batch, number, steps, share) for group in self._critics),
            ]
        )
        for part in updated:
            for index, old in part.old.items():
                samples[index].old_logprobs = old
        line = dict(updated[0].line)
        for metrics, *_ in critics:
            line |= metrics
        return line

    async def save(self, step: int, progress: Mapping[str, Any]) -> list[str]:
        """Start saving the state after this optimizer step; returns messages about earlier saves."""
        earlier = (await self.finish())[1] if self._critics else []  # both checkpoints of that step are complete then
        self._is_saving = True
        news = await gather_calls([group.call_all("save", step, progress) for group in self._savers])
        return [*earlier, *(text for of_group in news for text in of_group[0])]

    async def finish(self) -> tuple[str, list[str]]:
        """Wait for the last save; returns its folder and messages."""
        (saved, news), *other_news = [
            results[0] for results in await gather_calls([group.call_all("finish") for group in self._savers])
        ]
        self._is_saving = False
        return saved, [*news, *(text for texts in other_news for text in texts)]

    async def ending(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Exit callback: after an error, finish the save in progress within train.timeout, if the ranks still run."""
        if error is None or not self._is_saving:
            return
        finishing, timeout = asyncio.ensure_future(self.finish()), self.config.train.timeout
        with suppress(Exception):  # the first error is the one to show
            if not (await asyncio.wait([finishing], timeout=1.0))[0]:
                reason = first_line(error) if isinstance(error, Exception) else type(error).__name__
                text = f"ending   {reason}: weft first finishes a checkpoint, within {timeout:g} s"
                say(f"{text} (train.timeout)", error=True)
            _, news = await asyncio.wait_for(finishing, timeout)
            say(*news, error=True)

    async def close(self) -> None:
        """All ranks leave their process groups."""
        await gather_calls([group.call_all("close") for group in self._all])

    @property
    def _all(self) -> list[RankGroup]:
        return [self._trainers, *self._reference_critic.values()]

    @property
    def _savers(self) -> list[RankGroup]:
        """The groups that save: all but the reference, which does not change."""
        return [self._trainers, *self._critics]

    @property
    def _critics(self) -> list[RankGroup]:
        return [group for role, group in self._reference_critic.items() if role == CRITIC]
