"""Reinforcement learning. Called, as in `weft.rl(model=..., data=..., reward=...)`, it is weft.api.rl: a folder and a
function of one name."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any


class _Called(ModuleType):
    """This module, which can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from weft.api import rl

        return rl(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        from weft.api import rl

        return inspect.signature(rl)


sys.modules[__name__].__class__ = _Called
