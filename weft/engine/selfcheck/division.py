"""Checks tensor parallelism before a model is divided: a small random copy of its architecture is divided over threads
that act as ranks, and readouts and all gradients must equal those of the undivided copy."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from weft.engine.selfcheck.architecture import (
    ModelSupport,
    bounds_of,
    documents_of,
    hidden_of,
    once_per_process,
    small_copy,
    text_vocabulary,
)
from weft.errors import UserError, first_line
from weft.models.families import carries_state
from weft.models.mixer_shards import mixer_style
from weft.models.train_module import TrainModule
from weft.ops.communicator import Communicator, ThreadCommunicator, ThreadGroup
from weft.parallel.mesh import TPAxis
from weft.parallel.tp.divide import sum_partial_gradients, tensor_parallel

T = TypeVar("T")
Groups = Callable[[tuple[int, ...], int], Communicator]  # (members, own place) -> their communicator
STAND_IN = "stands for a rank"  # how the names of such threads begin
# Relative to the largest. A wrong division changes gradients by a share of themselves; rounding changes those of small
# copies by 1e-6 to 2e-5.
GRADIENT_TOLERANCE = 5e-4
# Mixers that carry state amplify rounding: dividing them changes gradients of copies by up to 3e-4.
STATE_TOLERANCE = 2e-3
READOUT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Division:
    """How the model can be divided. error: largest difference of a gradient, relative to the largest gradient of its
    parameter. sequence: tokens can be divided between blocks."""

    error: float
    sequence: bool


@once_per_process
def check_division(config: PretrainedConfig, support: ModelSupport, tp: int) -> Division:
    """Check a division over `tp` ranks. Raises UserError, with the family and what differs, if it is not exact."""
    small = small_copy(config, "per_document")
    whole, ranks = TrainModule(copy.deepcopy(small)), _ranks(small, tp)
    documents = documents_of(text_vocabulary(whole))
    expected = run_copy(whole, documents, support, weights_of(documents))

    def error(sequence: bool) -> float:
        divided = _divided(small, documents, support, ranks, sequence=sequence)
        return compare(divided, expected, partial(_refusal, config), "its heads", tolerance_of(whole))

    # Mixers with state, and code that adds values of all tokens to hidden states, need whole rows between blocks.
    with suppress(UserError):
        return Division(error(True), True)
    return Division(error(False), False)


Ran = tuple[Tensor, dict[str, Tensor]]  # readouts, gradients


def tolerance_of(module: TrainModule) -> float:
    """The tolerance for a small copy's gradients."""
    return STATE_TOLERANCE if module.mixers else GRADIENT_TOLERANCE


def compare(
    divided: Callable[[], Ran],
    expected: Ran,
    refusal: Callable[[str], UserError],
    parts: str,
    tolerance: float = GRADIENT_TOLERANCE,
) -> float:
    """The largest difference of a gradient, relative to the largest gradient of its parameter. Raises `refusal`, with
    the reason, where one is too large or the divided copy fails."""
    try:
        found, joined = divided()
    except UserError:
        raise
    except Exception as error:  # shapes no longer fit somewhere in the family's code
        raise refusal(f"its code does not run with parts of {parts} ({first_line(error)})") from error
    readouts, gradients = expected
    off = float((found - readouts).abs().max() / readouts.abs().max())
    if not off <= READOUT_TOLERANCE:
        raise refusal(f"log-probabilities differ by {off:.1e}")
    largest = max(float(g.abs().max()) for g in gradients.values())
    share = {name: _difference(joined[name], g, largest) for name, g in gradients.items()}
    worst = max(share, key=lambda name: share[name] if share[name] == share[name] else float("inf"))
    if not share[worst] <= tolerance:
        raise refusal(f"the gradient of {worst} differs by {share[worst]:.1e} of its largest")
    return share[worst]


def _refusal(config: PretrainedConfig, reason: str) -> UserError:
    return UserError(
        f"mesh.tp: weft cannot divide model_type {config.get_text_config().model_type!r}: on a small copy, {reason}. "
        "Set mesh.tp=1."
    )


def _difference(found: Tensor, expected: Tensor, largest: float) -> float:
    """Relative to the parameter's largest gradient, or to a thousandth of the model's."""
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-3 * largest)


def _ranks(small: PreTrainedModel, tp: int) -> int:
    """Number of ranks for the copy: tp, if that is 4 or less and its heads allow it, else 2."""
    heads = int(getattr(small.config.get_text_config(), "num_attention_heads", None) or tp)
    styles = [mixer_style(mixer) for mixer in small.modules() if carries_state(mixer)]
    divide = heads % tp == 0 and all(style is None or style.divides(tp) for style in styles)
    return tp if tp <= 4 and divide else 2


def weights_of(documents: list[Tensor]) -> Tensor:
    """[2, N]: weights of the log-probabilities and entropies of all predictions."""
    weights = torch.linspace(0.5, 1.5, sum(len(ids) - 1 for ids in documents))
    return torch.stack([weights, 0.3 * weights.flip(0)])


def run_copy(module: TrainModule, documents: list[Tensor], support: ModelSupport, weights: Tensor) -> Ran:
    """(log-probabilities and entropies of a row, gradient of each parameter by its first name). weights: as
    weights_of."""
    hidden = hidden_of(module, documents, support.layout, bounds_of(documents, support.layout, support.uses_bounds))
    chosen = torch.cat([h[:-1] for h in hidden])
    targets = torch.cat([ids[1:] for ids in documents])
    got = module.head(chosen, targets, ["logprob", "entropy"])
    found = torch.stack([got["logprob"], got["entropy"]])
    (found * weights).sum().backward()
    return found.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _divided(
    small: PreTrainedModel, documents: list[Tensor], support: ModelSupport, ranks: int, *, sequence: bool
) -> Callable[[], Ran]:
    """A function that computes readouts and whole gradients, as `run_copy` does, in `ranks` threads."""

    def one(place: int, groups: Groups) -> Ran:
        def neighbours(size: int) -> Communicator:
            first = place // size * size
            return groups(tuple(range(first, first + size)), place)

        axis = TPAxis(place, ranks, neighbours(ranks), neighbours)
        return _of_rank(small, documents, support, axis, sequence=sequence)

    return lambda: in_threads(ranks, one)[0]


def in_threads(ranks: int, run: Callable[[int, Groups], T]) -> list[T]:
    """Run `run(place, groups)` in one thread per rank; returns the results. An error of one thread ends the others and
    is raised."""
    thread_groups: dict[tuple[int, ...], ThreadGroup] = {}
    lock = threading.Lock()

    def groups(members: tuple[int, ...], place: int) -> ThreadCommunicator:
        with lock:
            if failed:
                raise BrokenBarrierError
            return ThreadCommunicator(
                thread_groups.setdefault(members, ThreadGroup(len(members))), members.index(place)
            )

    failed: list[BaseException] = []

    def one(place: int) -> T:
        try:
            return run(place, groups)
        except BaseException as error:
            with lock:
                failed.append(error)
                for group in thread_groups.values():
                    group.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks, STAND_IN) as pool:
        results = [pool.submit(one, place) for place in range(ranks)]
    errors = [error for result in results if (error := result.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [result.result() for result in results]


def _of_rank(
    small: PreTrainedModel, documents: list[Tensor], support: ModelSupport, axis: TPAxis, *, sequence: bool
) -> Ran:
    module = TrainModule(copy.deepcopy(small))
    whole = {name: parameter.detach() for name, parameter in module.named_parameters()}
    divided = tensor_parallel(module, axis, small.config, sequence=sequence)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(divided.cuts[name].take(whole[name]))
    readouts, gradients = run_copy(module, documents, support, weights_of(documents))
    sum_partial_gradients(module, divided)
    return readouts, {name: divided.cuts[name].join(gradient) for name, gradient in gradients.items()}
