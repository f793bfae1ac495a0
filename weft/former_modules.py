"""Import paths that the docs once named: programs written with them import the modules that are there now."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Former name -> present name; None: a folder that has no present one.
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


class _FormerModules:
    """Finder and loader that imports a module of FORMER_MODULES as the module that it became. The base classes of
    importlib.abc are not used: importing them takes 7 ms of every start."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        loader: Any = self  # typing wants an importlib.abc.Loader
        return ModuleSpec(name, loader, is_package=True) if name in FORMER_MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        present = FORMER_MODULES[spec.name]
        if present is None:
            return None
        module = import_module(present)
        spec.loader_state = dict(vars(module))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore a module's name and spec, which Python has replaced: the module has run under its present name."""
        assert module.__spec__ is not None
        vars(module).update(module.__spec__.loader_state or {})


def install() -> None:
    """Add the finder behind Python's own finders, which find all modules that exist."""
    sys.meta_path.append(_FormerModules())
