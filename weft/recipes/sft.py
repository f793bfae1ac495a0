"""Supervised fine-tuning: `weft sft`, the loop of training.py with nothing added."""

from __future__ import annotations

from weft.config.schema import SftConfig
from weft.launch.options import TrainOptions
from weft.observe.hooks import NO_HOOKS, Hooks
from weft.recipes.recipe import Recipe
from weft.recipes.training import run as train


def run(config: SftConfig, options: TrainOptions, hooks: Hooks = NO_HOOKS) -> None:
    """Entry point of one rank. Raises StoppedError if a signal ended the run early."""
    train(Recipe, config, options, hooks)
