"""Records what trainers of TRL do in each step. Imports no weft, which their environment lacks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class StepRecord(TrainerCallback):
    """seconds: from the end of one step to that of the next, with the data loader, without what comes before. losses,
    norms: of each step that the trainer logs."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.clock = clock
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = self.clock()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = self.clock()
        self.seconds.append(now - self.last)
        self.last = now

    def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(logs["grad_norm"])
