"""A stage of a pipeline: a model that keeps some of its decoder layers and runs HuggingFace's own forward around them.

Layers of other stages become stand-ins without weights, which hand hidden states on. So rotary tables, masks and
whatever else a family computes for its layers are computed by its own code, on every stage. The stand-in before the
first own layer gives what the stage before has sent; the one after the last own layer keeps what is to be sent. Weights
outside of the layers are used before them, on the first stage, or after them, on the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UserError
from weft.models import hf
from weft.models.train_module import Head, Passage, TrainModule

Span = tuple[int, int]  # first layer of a stage, and the one after its last


@dataclass(frozen=True)
class Anatomy:
    """How a family's base model runs its layers. outputs: class of a layer -> length of the tuple that it returns, 0
    for a tensor. after: modules outside of the layers, with weights, that run after the last layer. wide: hidden states
    between layers are in fp32, whatever the compute dtype."""

    outputs: Mapping[str, int]
    after: frozenset[str]
    wide: bool = False


@dataclass(frozen=True)
class Pipeline:
    """A whole model over stages. spans: the layers of each stage. tensors: the whole model's state dict, on meta.
    holders: for each name of it, the stages that hold it; several hold what is tied, and the first one writes it."""

    spans: tuple[Span, ...]
    tensors: Mapping[str, Tensor]
    holders: Mapping[str, tuple[int, ...]]
    anatomy: Anatomy

    @property
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters, tied ones under each name."""
        return [(name, tensor) for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)]

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters, tied ones once, in the model's order."""
        first: dict[int, str] = {}
        for name, parameter in self.named_parameters:
            first.setdefault(id(parameter), name)
        return list(first.values())

    def shared(self, place: int) -> frozenset[str]:
        """Trained or not, parameters that a stage and others hold."""
        several = (name for name, stages in self.holders.items() if len(stages) > 1 and place in stages)
        return frozenset(name for name in several if isinstance(self.tensors[name], nn.Parameter))

    def borrowed(self, place: int) -> frozenset[str]:
        """What a stage holds and an earlier one writes and counts."""
        return frozenset(n for n, stages in self.holders.items() if place in stages and stages[0] != place)

    def elsewhere(self, place: int) -> frozenset[str]:
        """What a stage does not hold."""
        return frozenset(name for name, stages in self.holders.items() if place not in stages)


class StandIn(nn.Module):
    """A layer of another stage. It has that layer's attributes, but no modules and no weights."""

    def __init__(self, layer: nn.Module, items: int, passage: Passage, *, gives: bool, keeps: bool) -> None:
        """items: length of the tuple that the layer returns, 0 for a tensor. gives: what the stage before has sent.
        keeps: what is to be sent."""
        super().__init__()
        own = vars(nn.Module()).keys()
        for name, value in vars(layer).items():
            if name not in own and not name.startswith("_") and not callable(value):
                setattr(self, name, value)
        self.passage, self.items, self.gives, self.keeps = passage, items, gives, keeps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = args[0] if args else kwargs["hidden_states"]
        if self.keeps:
            self.passage.sent = hidden
        if self.gives:
            hidden = self.passage.received
        return (hidden, *[None] * (self.items - 1)) if self.items else hidden


@dataclass(frozen=True)
class Outside:
    """Of what stands in place of modules outside of the layers. dtype: of embeddings, on which tables of positions
    depend. device: of forwards. parts: so many ranks divide the tokens between layers."""

    dtype: torch.dtype
    device: torch.device
    parts: int = 1


class Idle(nn.Module):
    """A module outside of the layers that another stage runs: token ids, and what a linear layer takes, become zeros of
    the right shape; hidden states pass. It has the weights that this stage uses under another name (tied)."""

    def __init__(self, module: nn.Module, kind: Outside, kept: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        weight = getattr(module, "weight", None)
        self.width = weight.shape[-1] if isinstance(weight, Tensor) else 0
        self.outputs = hf.linear_widths(module)[1] if hf.is_plain_linear(module) else None
        self.dtype, self.parts = kind.dtype, kind.parts
        for name, parameter in kept.items():
            self.register_parameter(name, parameter)
        if "weight" not in kept:
            self.weight = torch.empty(0, device=kind.device)  # some families ask where it is

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if x.is_floating_point():
            return x if self.outputs is None else x.new_zeros(*x.shape[:-1], self.outputs)
        return torch.zeros(*x.shape[:-1], x.shape[-1] // self.parts, self.width, dtype=self.dtype, device=x.device)


def plan_pipeline(module: TrainModule, spans: Sequence[Span], anatomy: Anatomy) -> Pipeline:
    """Which stage holds what of a whole model (on meta). UserError where layers of several stages share weights."""
    stage_of = _Stages(module, spans, anatomy)
    tensors = module.state_dict(keep_vars=True)
    stages: dict[int, set[int]] = {}
    for name, tensor in tensors.items():
        stages.setdefault(id(tensor), set()).update(stage_of(name))
    for name, tensor in tensors.items():
        if stage_of.is_of_layer(name) and len(stages[id(tensor)]) > 1:
            raise UserError(
                f"mesh.pp: model_type {module.facts.model_type!r} uses {name} in several places, so that two stages "
                "would have to have one layer's weights. Set mesh.pp=1."
            )
    holders = {name: tuple(sorted(stages[id(tensor)])) for name, tensor in tensors.items()}
    return Pipeline(tuple(spans), tensors, holders, anatomy)


class _Stages:
    """The stages that use a tensor under one of its names."""

    def __init__(self, module: TrainModule, spans: Sequence[Span], anatomy: Anatomy) -> None:
        self._layers, self._anatomy, self._head = f"{module.facts.layers}.", anatomy, module.facts.head
        self._spans = spans
        self._parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}

    def is_of_layer(self, name: str) -> bool:
        return name.startswith(self._layers)

    def __call__(self, name: str) -> Sequence[int]:
        if self.is_of_layer(name):
            layer = int(name.removeprefix(self._layers).partition(".")[0])
            return [stage for stage, (first, end) in enumerate(self._spans) if first <= layer < end]
        if name not in self._parameters:  # a buffer: small, and of every stage
            return range(len(self._spans))
        owner = name.rpartition(".")[0]
        last = owner == self._head or owner in self._anatomy.after
        return [len(self._spans) - 1 if last else 0]


def keep_stage(module: TrainModule, pipeline: Pipeline, place: int, kind: Outside) -> None:
    """Leave of a whole model what one stage holds, in place."""
    first, end = pipeline.spans[place]
    passage = Passage(is_last=place == len(pipeline.spans) - 1)
    holder: Any = module.get_submodule(module.facts.layers)
    for number, (_, layer) in enumerate(module.layers):
        if not first <= number < end:
            items = pipeline.anatomy.outputs[type(layer).__name__]
            holder[number] = StandIn(layer, items, passage, gives=number == first - 1, keeps=number == end)
    held = {name for name, stages in pipeline.holders.items() if place in stages}
    for name, owner in _outside(module):
        kept = {leaf: p for leaf, p in owner.named_parameters(recurse=False) if f"{name}.{leaf}" in held}
        if not _runs(name, owner, pipeline, place):
            _idle(module, name, owner, kept, kind)
    names = {name for name, _ in module.named_modules()}
    module.mixers = {name: mixer for name, mixer in module.mixers.items() if name in names}
    module.passage = passage


def _outside(module: TrainModule) -> list[tuple[str, nn.Module]]:
    """(name, module) of those with weights of their own outside of the layers."""
    layers = f"{module.facts.layers}."
    return [
        (name, child)
        for name, child in module.named_modules()
        if not name.startswith(layers) and any(True for _ in child.parameters(recurse=False))
    ]


def _runs(name: str, owner: nn.Module, pipeline: Pipeline, place: int) -> bool:
    """Whether a stage runs a module outside of the layers."""
    after = isinstance(owner, Head) or name in pipeline.anatomy.after
    return place == (len(pipeline.spans) - 1 if after else 0)


def _idle(module: TrainModule, name: str, owner: nn.Module, kept: Mapping[str, nn.Parameter], kind: Outside) -> None:
    """Replace a module that another stage runs."""
    if isinstance(owner, Head):  # it is never called, and known by more than its weights
        for leaf in owner._parameters:
            owner._parameters[leaf] = kept.get(leaf)
        return
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, Idle(owner, kind, kept))


def cut_layers(costs: Sequence[float], head: float, stages: int) -> list[Span]:
    """Consecutive layers for each stage so that the dearest stage is as cheap as it can be; the last one has the head.

    Of equal cuts the one whose first stages have more layers. UserError where there are fewer layers than stages.
    """
    count = len(costs)
    if count < stages:
        raise UserError(f"mesh.pp={stages} is more than the {count} decoder layers of this model: set mesh.pp={count}.")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: (cost of the dearest stage, where it begins) for layers from n on over the stages counted so far
    best = [(sums[count] - sums[n] + head, count) for n in range(count)]
    table = [best]
    for left in range(2, stages + 1):
        before, best = best, []
        for first in range(count):
            ends = range(first + 1, count - left + 2)
            found = [(max(sums[end] - sums[first], before[end][0]), -end) for end in ends]
            dearest, end = min(found, default=(float("inf"), 0))
            best.append((dearest, -end))
        table.append(best)
    spans, first = [], 0
    for rows in reversed(table):
        spans.append((first, rows[first][1]))
        first = rows[first][1]
    return spans
