"""An environment: a number of the row's column `secret` is guessed. rl.environment=guess"""

from __future__ import annotations

from collections.abc import Sequence

from weft.inference.types import Prompt
from weft.rl.environments import Environment, Reply


class Guess(Environment):
    gives_reward = True

    async def start(self, prompt: Prompt) -> Reply:
        self.secret = int(prompt.columns.get("secret", 5))
        return Reply(messages=[{"role": "user", "content": "Guess a number from 0 to 9."}])

    async def step(self, text: str, tokens: Sequence[int]) -> Reply:
        digits = [int(character) for character in text if character.isdigit()]
        if digits and digits[-1] == self.secret:
            return Reply(done=True, reward=1.0)
        return Reply(messages=[{"role": "user", "content": "No. Guess again."}], reward=0.0)
