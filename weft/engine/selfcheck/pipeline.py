"""Checks pipeline parallelism before a model is cut: a small random copy is run layer by layer, each a stage of its
own, and readouts and all gradients must equal those of the whole copy. A traced forward shows when its modules run."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from weft.engine.batch.document import Document
from weft.engine.batch.media import Media
from weft.engine.batch.rows import Row, build_row
from weft.engine.selfcheck.architecture import ModelSupport, documents_of, once_per_process, small_copy, text_vocabulary
from weft.engine.selfcheck.division import Ran, compare
from weft.engine.selfcheck.image import IMAGES, VIDEOS, documents_with
from weft.errors import UserError, first_line
from weft.models.train_module import TrainModule
from weft.models.vision import Vision, find_vision
from weft.parallel.pp.model import LayerInterface, keep_stages, plan_pipeline
from weft.parallel.pp.schedule import Placement
from weft.parallel.pp.weight_gradients import WeightGradients


@once_per_process
def check_pipeline(
    config: PretrainedConfig, support: ModelSupport, compute: torch.dtype, *, delayed: bool = False
) -> LayerInterface:
    """Find how the model's code runs its layers. Raises UserError, with family and reason, if stages are not exact.

    delayed: gradients of weights are computed after the backward.
    """
    small = small_copy(config, "per_document")
    whole = TrainModule(copy.deepcopy(small))
    row = _row(text_vocabulary(whole), support)
    refusal = partial(_refusal, config)
    try:
        interface = _Trace(TrainModule(copy.deepcopy(small)), compute).run(row, support)
    except _UnfitError as error:
        raise refusal(str(error)) from error
    except Exception as error:  # of any type: the family's code ran
        raise refusal(f"its layers could not be traced ({first_line(error)})") from error
    vision = None if support.images else find_vision(whole.base, whole.facts)
    for tried in [row] if vision is None else [row, _row_with_images(whole, vision, support)]:
        expected = _run([copy.deepcopy(whole)], tried, support, [])
        compare(partial(_staged, small, tried, support, interface, delayed=delayed), expected, refusal, "its layers")
    return interface


class _UnfitError(Exception):
    """The layers take something that a pipeline does not send."""


def _refusal(config: PretrainedConfig, reason: str) -> UserError:
    return UserError(
        f"mesh.pp: weft cannot cut the layers of model_type {config.get_text_config().model_type!r} into stages: on a "
        f"small copy, {reason}. Set mesh.pp=1."
    )


def _row(vocabulary: int, support: ModelSupport) -> Row:
    """Documents in one row, in this family's layout."""
    weights = torch.linspace(0.5, 1.5, 64)
    documents = {n: Document(ids, weights[: len(ids)]) for n, ids in enumerate(documents_of(vocabulary))}
    read = [len(d) for d in documents.values()]
    length = sum(read) if support.layout == "packed" else max(read)
    return build_row(list(documents), documents, read=read, length=length, layout=support.layout, every_token=True)


def _row_with_images(module: TrainModule, vision: Vision, support: ModelSupport) -> Row:
    """Documents with images in one row; also with videos, if the model takes them."""
    documents, kinds = {}, IMAGES if support.videos else VIDEOS
    for number, (ids, inputs) in enumerate(documents_with(kinds, vision, module.base, text_vocabulary(module))):
        media = Media.from_inputs(inputs, vision.patches(inputs)) if inputs else None
        positions = None if media is None else vision.positions(module.base, ids, inputs)
        documents[number] = Document(ids, torch.linspace(0.5, 1.5, len(ids)), positions, media=media)
    read = [len(document) for document in documents.values()]
    return build_row(
        list(documents), documents, read=read, length=sum(read), layout="packed", every_token=True, vision=vision,
        images=True,
    )  # fmt: skip


def _forward(module: TrainModule, row: Row, support: ModelSupport, received: Tensor | None) -> dict[str, Tensor]:
    found: dict[str, Tensor] = module(
        row.input_ids_BT, row.position_ids_BT, row.bounds if support.uses_bounds else None, row.selected_N,
        row.targets_N, ("logprob", "entropy"), media=row.media if received is None else None, received=received,
    )  # fmt: skip
    return found


def _run(stages: list[TrainModule], row: Row, support: ModelSupport, delayed: Sequence[WeightGradients]) -> Ran:
    """(log-probabilities and entropies of a row, gradient of each parameter, summed over the stages that hold it)."""
    received: Tensor | None = None
    passed: list[tuple[Tensor, Tensor]] = []
    for module in stages[:-1]:
        sent = _forward(module, row, support, received)["sent"]
        received = sent.detach().requires_grad_()
        passed.append((sent, received))
    got = _forward(stages[-1], row, support, received)
    ((got["logprob"] + 0.3 * got["entropy"]) * row.weights_N).sum().backward()
    for sent, received in reversed(passed):
        sent.backward(received.grad)
    for add in [add for of_stage in delayed for add in of_stage.take()]:
        add()
    gradients: dict[str, Tensor] = {}
    for module in stages:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                before = gradients.get(name)
                gradients[name] = parameter.grad if before is None else before + parameter.grad
    return torch.stack([got["logprob"], got["entropy"]]).detach(), gradients


def _staged(
    small: PreTrainedModel, row: Row, support: ModelSupport, interface: LayerInterface, *, delayed: bool
) -> Ran:
    """Readouts and gradients, as `_run` gives them, of stages of one layer each."""
    modules = []
    count = len(TrainModule(copy.deepcopy(small)).layers)
    for place in range(count):
        module = TrainModule(copy.deepcopy(small))
        pipeline = plan_pipeline(module, [(n, n + 1) for n in range(count)], Placement(count), interface)
        keep_stages(module, pipeline, place, dtype=torch.float32, device=torch.device("cpu"))
        modules.append(module)
    return _run(modules, row, support, [WeightGradients(module) for module in modules] if delayed else [])


class _Trace:
    """One forward of a model in the compute dtype, in which hooks note which modules run when."""

    def __init__(self, module: TrainModule, compute: torch.dtype) -> None:
        self.module, self.places = module, {name: number for number, (name, _) in enumerate(module.layers)}
        self.outputs: dict[str, int] = {}
        self.ran: list[int] = []  # layers, in the order of their ends
        self.begun = 0
        self.used: dict[str, set[str]] = {}  # module -> when it ran
        self.wide = False
        if compute.itemsize < 4:
            for parameter in module.parameters():
                parameter.data = parameter.data.bfloat16()

    def run(self, row: Row, support: ModelSupport) -> LayerInterface:
        """The model's Anatomy. Raises _UnfitError if a pipeline cannot run these layers."""
        layers = f"{self.module.facts.layers}."
        for name, child in self.module.named_modules():
            if name in self.places:
                child.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
                child.register_forward_hook(partial(self._leave, name))
            elif not name.startswith(layers) and any(True for _ in child.parameters(recurse=False)):
                child.register_forward_pre_hook(partial(self._note, name))
        _forward(self.module, row, support, None)
        if self.ran != sorted(self.places.values()):
            raise _UnfitError(f"its layers run in the order {self.ran}")
        between = [name for name, when in self.used.items() if when - {"before"} and when - {"after"}]
        if between:
            raise _UnfitError(f"{between[0]} is used between layers")
        return LayerInterface(
            self.outputs, frozenset(n for n, when in self.used.items() if when == {"after"}), self.wide
        )

    def _note(self, name: str, module: nn.Module, args: Any) -> None:
        when = "between" if self.begun else "before"
        self.used.setdefault(name, set()).add("after" if len(self.ran) == len(self.places) else when)

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = [*args[1:], *(value for key, value in kwargs.items() if args or key != "hidden_states")]
        self.begun += 1
        if any(tensor.requires_grad for tensor in _tensors(others)):
            raise _UnfitError(
                "layers take more than hidden states of what others, or weights outside of them, have computed "
                f"({type(module).__name__})"
            )

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        items, hidden = (len(output), output[0]) if isinstance(output, tuple) else (0, output)
        if not isinstance(hidden, Tensor) or self.outputs.setdefault(type(module).__name__, items) != items:
            raise _UnfitError(f"its layers return {type(output).__name__}s of several kinds")
        self.ran.append(self.places[name])
        self.wide = hidden.dtype == torch.float32


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
