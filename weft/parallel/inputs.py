"""Casting the floating-point inputs of chosen modules to the compute dtype (fsdp.cast_forward_inputs).

FSDP2's own switch is off, because it applies to whole units and casts rotary tables too; hooks do it instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UserError
from weft.models.patterns import outermost, similar_names


class InputCasts:
    """Hooks that cast inputs. input_dtypes: module -> dtypes of its floating-point inputs before the cast."""

    def __init__(self, root: nn.Module, patterns: Sequence[str], dtype: torch.dtype) -> None:
        """Hook the outermost modules that the patterns match. Raises UserError if a pattern matches nothing."""
        self.dtype = dtype
        self.input_dtypes: dict[str, set[torch.dtype]] = {}
        for pattern in patterns:
            matched = outermost(root, pattern)
            if not matched:
                names = [name for name, _ in root.named_modules() if name]
                raise UserError(
                    f"fsdp.cast_forward_inputs: {pattern!r} matches no module{similar_names(pattern, names)}"
                )
            self.input_dtypes |= {name: set() for name in matched}
        for name in self.input_dtypes:
            root.get_submodule(name).register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Any:
        def cast(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                self.input_dtypes[name].add(value.dtype)
                return value.to(self.dtype)
            if type(value) in (tuple, list):
                return type(value)(cast(item) for item in value)
            if type(value) is dict:
                return {key: cast(item) for key, item in value.items()}
            return value

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return cast(args), cast(kwargs)

        return hook
