"""Known silent bugs of post-training, each as a replacement for one function of weft. plants.py puts them in place.

A replacement is called with the Plant, the original and the arguments of the call. It calls `plant.hit()` only if it
changes the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from weft.engine.losses.base import LossOutput
from weft.engine.selfcheck.harness import STAND_IN

# Figures of `weft verify`.
LOSS = "loss, documents 1"
GRADIENTS = "gradients, every parameter"
NORM = "gradient norm, documents 1"
LOGPROB = "readout: logprob"
NEIGHBOURS = "neighbours do not move"
ACCURACY = "evaluation: accuracy"
TOKEN_ROWS = "gradients of each token's row, float16"
BALANCE_SCALE = "scale of the auxiliary loss, float16"
AGREE = "ranks that hold the same agree"
MASTERS = "masters in bfloat16: weights that differ"
FP8_OUTPUTS = "fp8: outputs of layers"
FP8_INPUTS = "fp8: gradients of layers' inputs"
# Tests that compare an SFT run with the reference, step by step.
RUN_LOSSES = "tests/verify/test_plants.py: losses of a run"
RUN_RATES = "tests/verify/test_plants.py: learning rates of a run"

Original = Callable[..., Any]
Replacement = Callable[..., Any]


@dataclass
class Plant:
    """A planted bug. hits: how often it changed a result, on this rank; over all ranks once the bug is removed.

    memory: values that the bug keeps from one call to the next.
    """

    name: str
    summary: str
    hits: int = 0
    memory: dict[str, Any] = field(default_factory=dict)

    def hit(self) -> None:
        """Count that the bug has changed a result."""
        self.hits += 1

    def averaged(self, output: LossOutput, weight: float) -> LossOutput:
        """The output averaged over its micro-batch in place of the step, on the scale of the first micro-batch, so that
        only unlike ones differ. weight: of the micro-batch; one of 0 stays as it is."""
        if not weight:
            return output
        self.hit()
        return replace(output, loss_sum=output.loss_sum / weight * self.memory.setdefault("first", weight))

    def leave_out(self, word: str, layers: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
        """The named layers, but those with this word in their names."""
        for name, layer in layers:
            if word in name:
                self.hit()
            else:
                yield name, layer

    def add(
        self, ending: str, module: nn.Module, layers: Iterable[tuple[str, nn.Module]]
    ) -> Iterator[tuple[str, nn.Module]]:
        """The named layers, and the parts of the module whose names end so."""
        yield from layers
        for name, child in module.named_modules():
            if name.endswith(ending):
                self.hit()
                yield name, child


@dataclass(frozen=True)
class Bug:
    """A bug that can be planted.

    id: the kind of bug; several may share one. target: "module:name" of the function that it replaces. caught_by: the
    check that catches it, a figure of `weft verify` or a test. issue: one of its kind, as
    "owner/repository#number". ranks: the fewest ranks with which it makes a difference. needs: other conditions, in
    words.
    """

    id: str
    name: str
    summary: str
    target: str
    caught_by: str
    issue: str
    ranks: int
    needs: str
    replacement: Replacement


PLANTS: dict[str, Bug] = {}


def rehearsing() -> bool:
    """Whether this thread stands for a rank in the checks of a small copy before the start."""
    return threading.current_thread().name.startswith(STAND_IN)


def bug(
    id: str, target: str, summary: str, *, caught_by: str, issue: str, ranks: int = 1, needs: str = ""
) -> Callable[[Replacement], Replacement]:
    """Register the decorated function as a replacement of `target`, under its own name."""

    def register(replacement: Replacement) -> Replacement:
        name = replacement.__name__.replace("_", "-")
        assert name not in PLANTS, name
        PLANTS[name] = Bug(id, name, summary, target, caught_by, issue, ranks, needs, replacement)
        return replacement

    return register
