"""The harness of the checks before a model is divided over an axis of the mesh.

Each check divides a small random copy over simulated ranks (threads, or pipeline stages that run in turn). It runs the
same documents on them, joins the results, and compares readouts and every gradient with the undivided copy's.

N predictions of a row.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BrokenBarrierError
from typing import Literal, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from weft.engine.batch.document import Document
from weft.engine.batch.media import Media
from weft.engine.batch.rows import Row, build_row
from weft.engine.selfcheck.architecture import documents_of, text_vocabulary
from weft.engine.selfcheck.image import MediaKind, documents_with
from weft.errors import UserError, first_line
from weft.models.families.family import Layout
from weft.models.train_module import TrainModule
from weft.models.vision import Vision
from weft.ops.communicator import Communicator, ThreadCommunicator, ThreadGroup

T = TypeVar("T")
Groups = Callable[[tuple[int, ...], int], Communicator]  # (members, rank) -> their communicator
Result = tuple[Tensor, dict[str, Tensor]]  # [2, N] log-probabilities and entropies; gradient of each parameter
STAND_IN = "acts as a rank"  # prefix of the names of such threads

# Relative to the largest gradient. A wrong division changes gradients by a large fraction; rounding changes gradients
# of small copies by 1e-6 to 2e-5.
GRADIENT_TOLERANCE = 5e-4
# Mixers that carry state amplify rounding: dividing them changes gradients of copies by up to 3e-4.
STATE_TOLERANCE = 2e-3
READOUT_TOLERANCE = 1e-4

Axis = Literal["tp", "ep", "cp", "pp"]
# axis -> (the action that weft refuses if the check fails; the object that is split over the ranks)
_AXES: dict[Axis, tuple[str, str]] = {
    "tp": ("divide {family}", "its heads"),
    "ep": ("divide the experts of {family}", "its experts"),
    "cp": ("cut documents of {family}", "documents"),
    "pp": ("cut the layers of {family} into stages", "its layers"),
}


def refusal(axis: Axis, config: PretrainedConfig, reason: str) -> UserError:
    """The error of a model that cannot be divided over this axis."""
    action = _AXES[axis][0].format(family=f"model_type {config.get_text_config().model_type!r}")
    return UserError(f"mesh.{axis}: weft cannot {action}: on a small copy, {reason}. Set mesh.{axis}=1.")


def compare(
    axis: Axis,
    config: PretrainedConfig,
    run: Callable[[], Result],
    expected: Result,
    tolerance: float = GRADIENT_TOLERANCE,
) -> float:
    """The largest difference of a gradient, relative to the largest gradient of its parameter.

    run: returns the results of the divided copy. Raises UserError, with the family and the reason, if a difference is
    too large or the divided copy fails.
    """
    try:
        readouts, gradients = run()
    except UserError:
        raise
    except Exception as error:  # shapes no longer fit somewhere in the family's code
        reason = f"its code does not run with parts of {_AXES[axis][1]} ({first_line(error)})"
        raise refusal(axis, config, reason) from error
    difference = float((readouts - expected[0]).abs().max() / expected[0].abs().max())
    if not difference <= READOUT_TOLERANCE:
        raise refusal(axis, config, f"log-probabilities differ by {difference:.1e}")
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    share = {name: gradient_difference(gradients[name], g, largest) for name, g in expected[1].items()}
    worst = max(share, key=lambda name: share[name] if share[name] == share[name] else float("inf"))
    if not share[worst] <= tolerance:
        raise refusal(axis, config, f"the gradient of {worst} differs by {share[worst]:.1e} of its largest")
    return share[worst]


def gradient_difference(gradient: Tensor, expected: Tensor, largest: float) -> float:
    """max|g - g_ref| / max(max|g_ref|, 1e-3 G), with `largest` as G, the model's largest |g_ref|: some true gradients
    are zero. The plain difference if G is zero."""
    scale = max(float(expected.abs().max()), 1e-3 * largest)
    difference = float((gradient - expected).abs().max())
    return difference / scale if scale > 0 else difference


def tolerance_of(module: TrainModule) -> float:
    """The tolerance for gradients of a small copy."""
    return STATE_TOLERANCE if module.mixers else GRADIENT_TOLERANCE


# ---------------------------------------------------------------- rows


def text_documents(module: TrainModule, longest: int) -> dict[int, Document]:
    """Documents with the lengths in architecture.LENGTHS, and with a different loss weight for each token. longest: of
    ModelSupport."""
    weights, vocabulary = torch.linspace(0.5, 1.5, max(64, longest)), text_vocabulary(module)
    return {n: Document(ids, weights[: len(ids)]) for n, ids in enumerate(documents_of(vocabulary, longest))}


def image_documents(module: TrainModule, vision: Vision, kinds: Sequence[Sequence[MediaKind]]) -> dict[int, Document]:
    """Documents with these images and videos."""
    documents = {}
    for number, (ids, inputs) in enumerate(documents_with(kinds, vision, module.base, text_vocabulary(module))):
        media = Media.from_inputs(inputs, vision.patches(inputs)) if inputs else None
        positions = None if media is None else vision.positions(module.base, ids, inputs)
        documents[number] = Document(ids, torch.linspace(0.5, 1.5, len(ids)), positions, media=media)
    return documents


def row_of(
    documents: Mapping[int, Document],
    layout: Layout = "packed",
    vision: Vision | None = None,
    indices: Sequence[int] | None = None,
) -> Row:
    """Whole documents, and their images, in one row. indices: default all documents."""
    indices = list(documents) if indices is None else indices
    read = [len(documents[index]) for index in indices]
    images = any(documents[index].media for index in indices)
    length = sum(read) if layout == "packed" else max(read)
    return build_row(
        indices, documents, read=read, length=length, layout=layout, every_token=True, vision=vision, images=images
    )


def forward_row(module: TrainModule, row: Row, uses_bounds: bool, received: Tensor | None = None) -> dict[str, Tensor]:
    """TrainModule.forward of a row. received: hidden states of the previous pipeline stage."""
    outputs: dict[str, Tensor] = module(
        row.input_ids_BT, row.position_ids_BT, row.bounds if uses_bounds else None, row.selected_N, row.targets_N,
        ("logprob", "entropy"), media=row.media if received is None else None, received=received,
        exchange=row.exchange if received is None else None,
    )  # fmt: skip
    return outputs


def backward_row(outputs: Mapping[str, Tensor], row: Row) -> Tensor:
    """Differentiate a weighted sum of log-probabilities and entropies; returns both, [2, N]."""
    ((outputs["logprob"] + 0.3 * outputs["entropy"]) * row.weights_N).sum().backward()
    return torch.stack([outputs["logprob"], outputs["entropy"]]).detach()


def run_row(module: TrainModule, row: Row, uses_bounds: bool = True) -> Result:
    """Readouts and gradients of one row on a module without gradients."""
    return backward_row(forward_row(module, row, uses_bounds), row), gradients_of(module)


def gradients_of(module: TrainModule) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def sum_by_name(gradients: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients of several ranks, summed."""
    total: dict[str, Tensor] = {}
    for by_name in gradients:
        for name, gradient in by_name.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def copy_of(small: PreTrainedModel) -> TrainModule:
    """A separate copy of a small model, to run or to divide."""
    return TrainModule(copy.deepcopy(small))


# ---------------------------------------------------------------- ranks


def in_threads(ranks: int, run: Callable[[int, Groups], T]) -> list[T]:
    """Run `run(rank, groups)` in one thread per rank; returns the results. An error of one thread ends the others and
    is raised."""
    thread_groups: dict[tuple[int, ...], ThreadGroup] = {}
    lock = threading.Lock()

    def groups(members: tuple[int, ...], rank: int) -> ThreadCommunicator:
        with lock:
            if failed:
                raise BrokenBarrierError
            group = thread_groups.setdefault(members, ThreadGroup(len(members)))
        return ThreadCommunicator(group, members.index(rank))

    failed: list[BaseException] = []

    def run_rank(rank: int) -> T:
        try:
            return run(rank, groups)
        except BaseException as error:
            with lock:
                failed.append(error)
                for group in thread_groups.values():
                    group.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks, STAND_IN) as pool:
        results = [pool.submit(run_rank, rank) for rank in range(ranks)]
    errors = [error for result in results if (error := result.exception()) is not None]
    # Raise the error that broke the barrier before the errors of threads that waited at it.
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [result.result() for result in results]
