"""Known silent bugs of post-training, each a replacement for one function of weft. plants.py plants them.

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
NEIGHBOURS = "other documents do not change"
ACCURACY = "evaluation: accuracy"
TOKEN_ROWS = "gradients of each token's row, float16"
BALANCE_SCALE = "scale of the auxiliary loss, float16"
AGREE = "copies on several ranks are equal"
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
    """A planted bug. hits: number of results that it changed, on this rank; over all ranks after the bug is removed.

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
        """The output averaged over its micro-batch instead of the step, on the scale of the first micro-batch, so that
        only micro-batches of other weights change. weight: of the micro-batch; one of weight 0 does not change."""
        if not weight:
            return output
        self.hit()
        return replace(output, loss_sum=output.loss_sum / weight * self.memory.setdefault("first", weight))

    def leave_out(self, word: str, layers: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
        """The named layers, without those that have this word in their names."""
        for name, layer in layers:
            if word in name:
                self.hit()
            else:
                yield name, layer

    def add(
        self, ending: str, module: nn.Module, layers: Iterable[tuple[str, nn.Module]]
    ) -> Iterator[tuple[str, nn.Module]]:
        """The named layers, and the submodules of the module whose names end with one of these words."""
        yield from layers
        for name, child in module.named_modules():
            if name.endswith(ending):
                self.hit()
                yield name, child


@dataclass(frozen=True)
class Bug:
    """A bug that can be planted.

    id: the kind of bug; several may share one. target: "module:name" of the function that it replaces. caught_by: the
    check that fails, a figure of `weft verify` or a test. issue: an example, as "owner/repository#number". ranks: the
    smallest number of ranks with which it has an effect. needs: other conditions, in words.
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
    """Whether this thread plays a rank in the checks of a small copy before the start."""
    return threading.current_thread().name.startswith(STAND_IN)


def bug(
    id: str, target: str, summary: str, *, caught_by: str, issue: str, ranks: int = 1, needs: str = ""
) -> Callable[[Replacement], Replacement]:
    """Register the decorated function as a replacement of `target`, with the function's name."""

    def register(replacement: Replacement) -> Replacement:
        name = replacement.__name__.replace("_", "-")
        assert name not in PLANTS, name
        PLANTS[name] = Bug(id, name, summary, target, caught_by, issue, ranks, needs, replacement)
        return replacement

    return register
