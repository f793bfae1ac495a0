"""train.loss: the trained loss, which may be a user's class."""

from __future__ import annotations

from typing import Any

from weft.engine.losses.base import CrossEntropy, Loss
from weft.errors import UserError
from weft.importing import import_named
from weft.models.readouts import OFFERED, ReadoutSpec

_METHODS = ("normaliser", "logprob_grad", "__call__")


def choose_objective(path: str | None, objective: Loss | None = None) -> Loss:
    """`objective` itself, or the loss at the import path `package.module:Name`; cross entropy for None.

    A class is created without arguments. Modules are also searched in the working directory. Raises UserError if the
    path does not exist, or does not lead to a loss (weft/engine/losses/base.py).
    """
    if objective is not None:
        return check_objective(objective, type(objective).__name__)
    if path is None:
        return CrossEntropy()
    loaded = import_named(path, "train.loss")
    if isinstance(loaded, type):
        try:
            loaded = loaded()
        except TypeError as error:
            raise UserError(
                f"train.loss: {path} cannot be created without arguments: {error}. Give its arguments defaults, or "
                "name an object of the module instead of the class."
            ) from error
    return check_objective(loaded, path)


def check_objective(objective: Any, name: str) -> Loss:
    """Return `objective` if it has the interface of a loss, else raise UserError. name: for the message."""
    former = {"logprob_grad": "upstream"}  # still accepted
    missing = [
        name
        for name in _METHODS
        if not callable(getattr(objective, name, getattr(objective, former.get(name, name), None)))
    ]
    missing += [field for field in ("readouts", "every_token") if not hasattr(objective, field)]
    if missing:
        raise UserError(
            f"train.loss: {name} is not a loss: it has no {', '.join(missing)}. docs/how-to/objective.md has a "
            "complete example."
        )
    if isinstance(objective.readouts, str):
        raise UserError(
            f"train.loss: {name} has a string as `readouts`; it must be a set of names, such as "
            f'frozenset({{"{objective.readouts}"}}).'
        )
    unknown = ReadoutSpec.parse(objective.readouts).unknown
    if unknown or not objective.readouts:
        problem = f"names {', '.join(unknown)}" if unknown else "names nothing"
        raise UserError(f"train.loss: {name} {problem} in `readouts`; the names are {OFFERED}.")
    if "chosen_logits" in objective.readouts and not callable(getattr(objective, "token_ids", None)):
        raise UserError(
            f"train.loss: {name} has chosen_logits in `readouts`, but has no method token_ids(targets_N, "
            "arrays) that returns the tokens. docs/how-to/objective.md has an example."
        )
    checked: Loss = objective
    return checked
