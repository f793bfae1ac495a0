"""weft post-trains HuggingFace models with PyTorch FSDP2. Importing it imports no torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from weft.version import __version__ as __version__

if TYPE_CHECKING:
    from weft.api import Run, rl, sft
    from weft.engine.engine import Engine

__all__ = ["Engine", "Run", "rl", "sft"]


def __getattr__(name: str) -> object:
    """Import public names at their first use: programs that only read configs need nothing else."""
    if name == "Engine":
        from weft.engine import engine

        return engine.Engine
    if name in __all__:
        from weft import api

        return getattr(api, name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


class _Weft(ModuleType):
    """The module weft, in which `weft.rl` is always the function, even after the folder weft/rl was imported. The
    function gets the folder's modules as attributes, for `import weft.rl.rewards.base as rewards`."""

    @property
    def rl(self) -> Any:
        function, folder = __getattr__("rl"), vars(sys.modules.get("weft.rl", ModuleType("")))
        vars(function).update((name, value) for name, value in folder.items() if isinstance(value, ModuleType))
        return function

    @rl.setter
    def rl(self, module: ModuleType) -> None:
        """Ignored: Python sets it to the folder's module."""

    def __dir__(self) -> list[str]:
        return __all__


sys.modules[__name__].__class__ = _Weft
