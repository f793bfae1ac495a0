"""Separate ranks of a frozen model. If they die or hang, weft starts them again while the run continues.

A frozen model has no state: new ranks load the same weights, and the failed call is repeated with the same arguments,
so its result does not change.
"""

from __future__ import annotations

from typing import Any

from weft.errors import ActorError
from weft.launch.ray_actors import ActorGroup
from weft.rl.restarts import RestartBudget

_OF_PROCESSES = ("killed", "hang", "peer")  # kinds of failure that new processes may avoid


class FrozenRanks:
    """The ranks of a reference or a reward model, called as an ActorGroup is."""

    def __init__(self, group: ActorGroup, restarts: RestartBudget) -> None:
        self._group, self._restarts = group, restarts
        self._opened: tuple[Any, ...] | None = None  # the arguments of open_run
        self._is_new = False

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """ActorGroup.call_all, repeated on new ranks if the ranks die or hang. ActorError if they raise, or if the
        budget of restarts is used up."""
        while True:
            try:
                if self._is_new and self._opened is not None:
                    await self._group.call_all("open_run", *self._opened)
                self._is_new = False
                results = await self._group.call_all(method, *args)
            except ActorError as error:
                await self._restart(error)
                continue
            if method == "open_run":
                self._opened = args
            return results

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        """ActorGroup.call_one."""
        return await self._group.call_one(number, method, *args)

    async def _restart(self, error: ActorError) -> None:
        """Start all ranks again after this error; raise it if a restart cannot help or the budget is used up. Ranks
        that die while they start count as another failure."""
        name, started = self._group.name, False
        if error.kind not in _OF_PROCESSES or not self._restarts.limit or not self._group.can_restart:
            raise error
        while not started:
            self._restarts.spend(name, None, error)
            try:
                await self._group.restart()
                started = True
            except ActorError as failure:
                error = failure
        self._is_new = True
        self._restarts.show(f"restart  {name}s load their model again")
