"""Rewards: built-in functions, the processes that run reward functions, and their arguments."""

from weft.rl.rewards.builtin import completion_text

__all__ = ["completion_text"]
