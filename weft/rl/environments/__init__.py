"""Environments: what users write (`Environment`, `Reply`) and the processes that run it."""

from weft.rl.environments.base import Environment, Reply

__all__ = ["Environment", "Reply"]
