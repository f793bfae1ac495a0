"""Games of Gymnasium's API (`reset`, `step`) whose observations are texts, as environments. Imports no torch.

A class that is named by its import path needs no package of Gymnasium's.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Sequence
from typing import Any

from weft.config.checks import IMPORT_PATH
from weft.errors import UserError, first_line
from weft.importing import import_named
from weft.inference.types import Prompt
from weft.rl.environments.base import Environment, Reply

KEY = "rl.environment"
_ANSI = "ansi"  # the render mode in which `render()` returns a text
_COLOUR, _COLOUR_ENDS = re.compile(r"(\x1b\[[1-9][\d;]*m)+"), re.compile(r"(\x1b\[0?m)+")


def environment(name: str) -> type[Environment]:
    """The Environment that plays the game `name`: an id of Gymnasium, or the import path of a class. UserError if there
    is no such game."""
    make = import_named(name, KEY) if IMPORT_PATH.fullmatch(name) else _registered(name)
    if not callable(make):
        raise UserError(f"{KEY}: gymnasium:{name} is not a class or function that creates a game.")
    return type("Game", (Game,), {"make": staticmethod(make)})


def _registered(name: str) -> Callable[[], Any]:
    """A function that makes the game with this id."""
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise UserError(
            f"{KEY}: gymnasium:{name} is an id of the package gymnasium, which is not installed: "
            f"pip install gymnasium; or name a class by its import path, as in gymnasium:my_games:Maze."
        ) from error
    try:
        spec = gymnasium.spec(name)
        modes = gymnasium.make(spec).unwrapped.metadata.get("render_modes", ())
    except Exception as error:  # of Gymnasium, and of the game
        raise UserError(f"{KEY}: gymnasium:{name} cannot be created: {first_line(error)}") from error
    return lambda: gymnasium.make(spec, **({"render_mode": _ANSI} if _ANSI in modes else {}))


class Game(Environment):
    """One episode of a game. Each observation is a user message; the first follows the prompt.

    It reads the columns `seed` (default: the prompt's index, so that all samples of a prompt begin in the same state)
    and `options`, which are arguments of `reset`. An observation that is not a text is rendered, if the game has the
    render mode `ansi`; coloured text is put in brackets. An action is the answer's text; for a Discrete space it is the
    last whole number in the text, and an answer without a valid number costs a turn.
    """

    gives_reward = True
    make: Callable[[], Any]

    def __init__(self) -> None:
        self.game = self.make()
        space: Any = getattr(self.game, "action_space", None)
        self.start_of_actions = int(getattr(space, "start", 0))
        self.number_of_actions = int(space.n) if hasattr(space, "n") else None
        if self.number_of_actions is None and type(space).__name__ not in ("Text", "NoneType"):
            raise TypeError(
                f"the game's actions are {type(space).__name__}, but an answer is a text. Wrap the game in an "
                "ActionWrapper whose action_space is Text or Discrete"
            )

    def start(self, prompt: Prompt) -> Reply:  # type: ignore[override]  # a plain method is run in the main thread
        columns = prompt.columns
        observation, _ = self.game.reset(seed=int(columns.get("seed", prompt.index)), options=columns.get("options"))
        return Reply(messages=[self._message(observation)])

    def step(self, text: str, tokens: Sequence[int]) -> Reply:  # type: ignore[override]
        action: Any = text.strip()
        if self.number_of_actions is not None:
            written = re.findall(r"-?\d+", text)
            first, last = self.start_of_actions, self.start_of_actions + self.number_of_actions - 1
            if not written or not first <= (action := int(written[-1])) <= last:
                return Reply(messages=[{"role": "user", "content": f"Answer with a number from {first} to {last}."}])
        observation, reward, terminated, truncated, _ = self.game.step(action)
        ended = {"terminated": bool(terminated), "truncated": bool(truncated)}
        if terminated or truncated:
            return Reply(done=True, reward=float(reward), notes=ended)
        return Reply(messages=[self._message(observation)], reward=float(reward))

    def close(self) -> None:  # type: ignore[override]
        if hasattr(self.game, "close"):
            self.game.close()

    def _message(self, observation: Any) -> dict[str, str]:
        if not isinstance(observation, str) and getattr(self.game, "render_mode", None) == _ANSI:
            # Coloured text (the player's position) is put in brackets.
            observation = _COLOUR_ENDS.sub("]", _COLOUR.sub("[", self.game.render()))
        if isinstance(observation, numbers.Number):
            observation = str(observation)
        if not isinstance(observation, str):
            raise TypeError(
                f"an observation is {type(observation).__name__}, not a text. Wrap the game in an ObservationWrapper "
                "that returns a text"
            )
        return {"role": "user", "content": observation}
