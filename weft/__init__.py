"""weft post-trains HuggingFace models with PyTorch FSDP2. Importing it imports no torch."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from weft.former_modules import install as install_former_modules
from weft.version import __version__ as __version__

if TYPE_CHECKING:
    from weft.api import Run, distill, dpo, reward, rl, sft
    from weft.engine.batch.document import Document
    from weft.engine.engine import Engine
    from weft.engine.losses import Batch, Loss, LossOutput
    from weft.rl.environments import Environment, Reply

__all__ = [
    "Batch", "Document", "Engine", "Environment", "Loss", "LossOutput", "Reply", "Run", "distill", "dpo", "reward",
    "rl", "sft",
]  # fmt: skip

_MODULES = {
    "Batch": "weft.engine.losses",
    "Document": "weft.engine.batch.document",
    "Engine": "weft.engine.engine",
    "Environment": "weft.rl.environments",
    "Loss": "weft.engine.losses",
    "LossOutput": "weft.engine.losses",
    "Reply": "weft.rl.environments",
    "Run": "weft.api",
    "distill": "weft.api",
    "dpo": "weft.api",
    "reward": "weft.api",
    "rl": "weft.api",
    "sft": "weft.api",
}


def __getattr__(name: str) -> object:
    """Import public names at their first use: programs that only read configs need nothing else."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


class _Weft(ModuleType):
    """The module weft, in which `weft.rl` is always the function, even after the folder weft/rl was imported. The
    function gets the folder's modules as attributes, for `import weft.rl.rewards.base as rewards`. Type checkers see
    only the function: they accept `from weft.rl.rewards import base`."""

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
install_former_modules()
