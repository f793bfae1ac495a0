"""Checks pipeline parallelism before a model is split. A small random copy runs with each layer as a separate stage,
and readouts and all gradients must equal the undivided copy's. A traced forward shows the order in which its modules
run."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from weft.engine.batch.rows import Row
from weft.engine.selfcheck.architecture import ModelSupport, once_per_process, small_copy
from weft.engine.selfcheck.harness import (
    Result,
    backward_row,
    compare,
    copy_of,
    forward_row,
    gradients_of,
    image_documents,
    refusal,
    row_of,
    run_row,
    sum_by_name,
    text_documents,
)
from weft.engine.selfcheck.image import IMAGES, VIDEOS
from weft.errors import first_line
from weft.models.train_module import TrainModule
from weft.models.vision import find_vision
from weft.parallel.pp.model import LayerInterface, keep_stages, plan_pipeline
from weft.parallel.pp.schedule import Placement
from weft.parallel.pp.weight_gradients import WeightGradients


@once_per_process
def check_pipeline(
    config: PretrainedConfig, support: ModelSupport, compute: torch.dtype, *, delayed: bool = False
) -> LayerInterface:
    """Determine how the model's code runs its layers. Raises UserError, with family and reason, if stages are not
    exact.

    delayed: gradients of weights are computed after the backward.
    """
    small = small_copy(config, "per_document")
    reference = copy_of(small)
    row = row_of(text_documents(reference, support.longest), support.layout)
    try:
        interface = _Trace(copy_of(small), compute).run(row, support)
    except _UnfitError as error:
        raise refusal("pp", config, str(error)) from error
    except Exception as error:  # any exception type: the family's code ran
        raise refusal("pp", config, f"its layers could not be traced ({first_line(error)})") from error
    rows, vision = [row], None if support.images else find_vision(reference.base, reference.facts)
    if vision is not None:
        rows.append(row_of(image_documents(reference, vision, IMAGES if support.videos else VIDEOS), vision=vision))
    for row in rows:
        expected = run_row(copy.deepcopy(reference), row, support.uses_bounds)
        compare("pp", config, partial(_run_staged, small, row, support, interface, delayed=delayed), expected)
    return interface


class _UnfitError(Exception):
    """The layers read inputs that a pipeline does not send."""


def _run_staged(
    small: PreTrainedModel, row: Row, support: ModelSupport, interface: LayerInterface, *, delayed: bool
) -> Result:
    """Readouts, and gradients summed over stages. Each stage has one layer, and stages run in turn."""
    stages, count = list[TrainModule](), len(copy_of(small).layers)
    for rank in range(count):
        module = copy_of(small)
        pipeline = plan_pipeline(module, [(n, n + 1) for n in range(count)], Placement(count), interface)
        keep_stages(module, pipeline, rank, dtype=torch.float32, device=torch.device("cpu"))
        stages.append(module)
    weights = [WeightGradients(module) for module in stages] if delayed else []
    received: Tensor | None = None
    boundaries: list[tuple[Tensor, Tensor]] = []  # hidden states as sent, and as received
    for module in stages[:-1]:
        sent = forward_row(module, row, support.uses_bounds, received)["sent"]
        received = sent.detach().requires_grad_()
        boundaries.append((sent, received))
    readouts = backward_row(forward_row(stages[-1], row, support.uses_bounds, received), row)
    for sent, received in reversed(boundaries):
        sent.backward(received.grad)
    for add in [add for of_stage in weights for add in of_stage.take()]:
        add()
    return readouts, sum_by_name(gradients_of(module) for module in stages)


class _Trace:
    """One forward of a model in the compute dtype, in which hooks record the order of modules."""

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
        forward_row(self.module, row, support.uses_bounds)
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
        inputs = [*args[1:], *(value for key, value in kwargs.items() if args or key != "hidden_states")]
        self.begun += 1
        if any(tensor.requires_grad for tensor in _tensors(inputs)):
            raise _UnfitError(
                "layers read values other than hidden states that other layers, or weights outside of layers, "
                f"computed ({type(module).__name__})"
            )

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        items, hidden = (len(output), output[0]) if isinstance(output, tuple) else (0, output)
        if not isinstance(hidden, Tensor) or self.outputs.setdefault(type(module).__name__, items) != items:
            raise _UnfitError(f"its layers return {type(output).__name__}s of several kinds")
        if hidden.ndim != 3:
            raise _UnfitError(f"its layers return hidden states of {hidden.ndim} dimensions")
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
