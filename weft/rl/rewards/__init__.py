"""Rewards: the built-in ones, the processes that call them, what a reward function receives."""

from weft.rl.rewards.builtin import completion_text

__all__ = ["completion_text"]
