"""Which parameters are trained."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from weft.errors import UserError
from weft.models.patterns import matches, similar_names


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that the patterns name.

    UserError where a pattern matches nothing, where only some names of a tied parameter match, or where nothing is left
    to train.
    """
    names = dict(module.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise UserError(f"model.freeze: {pattern!r} matches no parameter{similar_names(pattern, names)}")
    frozen = {name for name in names if any(matches(pattern, name) for pattern in patterns)}
    tied = {id(names[name]): name for name in frozen}
    for name, parameter in names.items():
        if id(parameter) in tied and name not in frozen:
            raise UserError(
                f"model.freeze: {tied[id(parameter)]} and {name} are one tensor (tied): freeze both or neither."
            )
    if names and len(frozen) == len(names):
        raise UserError("model.freeze: every parameter is frozen, so there is nothing to train: leave some out.")
    for name in frozen:
        names[name].requires_grad_(False)
