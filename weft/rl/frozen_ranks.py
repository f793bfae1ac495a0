"""Separate ranks of a frozen model. If they die, hang or give invalid answers, weft starts them again while the run
continues.

A frozen model has no state: new ranks load the same weights, and the failed call is repeated with the same arguments,
so its result does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.errors import ActorError
from weft.launch.ray_actors import ActorGroup
from weft.launch.status import failure_kind
from weft.rl.restarts import RestartBudget

_OF_PROCESSES = ("killed", "hang", "peer")  # kinds of failure that new processes may avoid


class FrozenRanks:
    """The ranks of a reference or a reward model, called as an ActorGroup is."""

    def __init__(self, group: ActorGroup, restarts: RestartBudget) -> None:
        self._group, self._restarts = group, restarts
        self._opened: tuple[Any, ...] | None = None  # the arguments of open_run
        self._is_new = False

    async def call_all(self, method: str, *args: Any, accept: Callable[[list[Any]], None] | None = None) -> list[Any]:
        """ActorGroup.call_all, repeated on new ranks if the ranks die or hang. ActorError if they raise, or if the
        budget of restarts is used up.

        accept: raises if an answer is invalid. Ranks that give one are started again, too: the memory of their device
        may be damaged. If the new ranks also give an invalid answer, its error is raised.
        """
        invalid = 0
        while True:
            try:
                if self._is_new and self._opened is not None:
                    await self._group.call_all("open_run", *self._opened)
                self._is_new = False
                results = await self._group.call_all(method, *args)
            except ActorError as error:
                if error.kind not in _OF_PROCESSES or not self._can_restart:
                    raise
                await self._restart(error)
                continue
            try:
                if accept is not None:
                    accept(results)
            except Exception as error:
                invalid += 1
                if invalid > 1 or not self._can_restart:
                    raise
                await self._restart(ActorError(str(error), failure_kind(error)))
                continue
            if method == "open_run":
                self._opened = args
            return results

    async def call_one(self, number: int, method: str, *args: Any) -> Any:
        """ActorGroup.call_one."""
        return await self._group.call_one(number, method, *args)

    @property
    def _can_restart(self) -> bool:
        return self._restarts.limit > 0 and self._group.can_restart

    async def _restart(self, error: ActorError) -> None:
        """Start all ranks again after this error; ActorError if the budget is used up. Ranks that die while they start
        count as another failure."""
        name, started = self._group.name, False
        while not started:
            self._restarts.spend(name, None, error)
            try:
                await self._group.restart()
                started = True
            except ActorError as failure:
                if not self._can_restart:
                    raise
                error = failure
        self._is_new = True
        self._restarts.show(f"restart  {name}s load their model again")
