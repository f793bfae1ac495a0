"""weft post-trains HuggingFace models with PyTorch FSDP2. Importing it imports no torch."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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

# Modules that the docs once named, and where they are now: programs written with them still run. None: a folder.
FORMER_MODULES = {
    "weft.cluster": None,
    "weft.cluster.process": "weft.launch.process",
    "weft.engine.document": "weft.engine.batch.document",
    "weft.engine.plan": "weft.engine.step_plan.plan",
    "weft.objectives": None,
    "weft.objectives.base": "weft.engine.losses.base",
    "weft.objectives.cross_entropy": "weft.engine.losses.base",
    "weft.optim": None,
    "weft.optim.schedule": "weft.engine.optim.schedule",
    "weft.rl.builtin_rewards": "weft.rl.rewards",
    "weft.rollout": None,
    "weft.rollout.base": "weft.inference.base",
    "weft.rollout.vllm": "weft.inference.vllm",
    "weft.rollout.vllm.engine": "weft.inference.vllm.engine",
    "weft.rollout.vllm.server": "weft.inference.vllm.server",
    "weft.sharding": None,
    "weft.sharding.walker": "weft.parallel.shards.walker",
}


class _FormerModules(MetaPathFinder, Loader):
    """Imports a module of FORMER_MODULES as the module that it became."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in FORMER_MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        present = FORMER_MODULES[spec.name]
        if present is None:
            return None
        module = import_module(present)
        spec.loader_state = dict(vars(module))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give a module its own name and spec back, which Python has replaced: it has run under its present name."""
        assert module.__spec__ is not None
        vars(module).update(module.__spec__.loader_state or {})


sys.meta_path.append(_FormerModules())  # after Python's own finders, which find what exists
