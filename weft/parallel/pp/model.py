"""Stages of a pipeline: a model that keeps some of its decoder layers and runs HuggingFace's own forward around them.

Layers of other stages become stand-ins without weights, which pass hidden states on. So every stage computes rotary
tables, masks and the like with the family's own code. The stand-in before the first own layer returns what the previous
stage sent; the one after the last own layer keeps its input for sending. Weights outside the layers are used before
them, on the first stage, or after them, on the last. If a rank has several stages, each has its own stand-ins for all
other layers, which are swapped into the model during its forwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UserError
from weft.models import hf
from weft.models.train_module import Head, StageIO, TrainModule
from weft.models.vision import vision_parts
from weft.parallel.pp.placement import Placement

Span = tuple[int, int]  # first layer of a stage, and one past its last


@dataclass(frozen=True)
class LayerInterface:
    """How a family's base model runs its layers. outputs: class of a layer -> length of the tuple that it returns, 0
    for a tensor. after: modules with weights, outside the layers, that run after the last layer. wide: hidden states
    between layers are fp32, whatever the compute dtype."""

    outputs: Mapping[str, int]
    after: frozenset[str]
    wide: bool = False


@dataclass(frozen=True)
class Pipeline:
    """A whole model over the ranks of mesh.pp. spans: the layers of each stage. tensors: the whole model's state dict,
    on meta. holders: name -> the ranks that hold the tensor, several for tied weights; the first one writes it."""

    spans: tuple[Span, ...]
    placement: Placement
    tensors: Mapping[str, Tensor]
    holders: Mapping[str, tuple[int, ...]]
    interface: LayerInterface

    @property
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters, tied ones under each name."""
        return [(name, tensor) for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)]

    @property
    def parameter_names(self) -> list[str]:
        """Names of all parameters, tied ones once, in the model's order."""
        first: dict[int, str] = {}
        for name, parameter in self.named_parameters:
            first.setdefault(id(parameter), name)
        return list(first.values())

    def shared_params(self, place: int) -> frozenset[str]:
        """Parameters, trained or not, that both the rank at `place` and others hold."""
        several = (name for name, ranks in self.holders.items() if len(ranks) > 1 and place in ranks)
        return frozenset(name for name in several if isinstance(self.tensors[name], nn.Parameter))

    def tied_copies(self, place: int) -> frozenset[str]:
        """Tensors that the rank at `place` holds and an earlier one writes and counts."""
        return frozenset(n for n, ranks in self.holders.items() if place in ranks and ranks[0] != place)

    def missing_params(self, place: int) -> frozenset[str]:
        """Tensors that the rank at `place` does not hold."""
        return frozenset(name for name, ranks in self.holders.items() if place not in ranks)

    def stage_of(self, name: str, layers: str) -> int:
        """The stage that runs a module. layers: name of the list of decoder layers."""
        if not name.startswith(f"{layers}."):
            return len(self.spans) - 1 if name in self.interface.after else 0
        layer = int(name.removeprefix(f"{layers}.").partition(".")[0])
        return next(stage for stage, (first, end) in enumerate(self.spans) if first <= layer < end)


class PlaceholderLayer(nn.Module):
    """A layer of another stage. It has that layer's attributes, but no modules and no weights."""

    def __init__(self, layer: nn.Module, items: int, passage: StageIO, *, gives: bool, keeps: bool) -> None:
        """items: length of the tuple that the layer returns, 0 for a tensor. gives: return what the previous stage
        sent. keeps: keep the input, for the next stage."""
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


@contextmanager
def own_layers(model: nn.Module) -> Iterator[None]:
    """Inside, the model's lists of layers are without stand-ins: for code that reads into every layer (falcon_h1's
    initialisation does)."""
    lists = [(each, each._modules) for each in model.modules() if isinstance(each, nn.ModuleList)]
    for each, held in lists:
        each._modules = {name: child for name, child in held.items() if not isinstance(child, PlaceholderLayer)}
    try:
        yield
    finally:
        for each, held in lists:
            each._modules = held


@dataclass(frozen=True)
class Outside:
    """Settings of Idle modules. dtype: of the embeddings they return, on which rotary tables depend. device: of
    forwards. parts: number of ranks that divide the tokens between layers."""

    dtype: torch.dtype
    device: torch.device
    parts: int = 1


class EmptyModule(nn.Module):
    """Stands in for a module outside the layers that another stage runs. Token ids, and inputs of a linear layer,
    become zeros of the output's shape; hidden states pass. It holds weights that this rank uses under another name
    (tied)."""

    def __init__(self, module: nn.Module, kind: Outside) -> None:
        super().__init__()
        weight = getattr(module, "weight", None)
        self.width = weight.shape[-1] if isinstance(weight, Tensor) else 0
        self.outputs = hf.linear_widths(module)[1] if hf.is_plain_linear(module) else None
        self.dtype, self.parts = kind.dtype, kind.parts
        self.weight: Tensor = torch.empty(0, device=kind.device)  # some families read its device

    def keep(self, name: str, parameter: nn.Parameter) -> None:
        """Hold this weight."""
        if name == "weight":
            del self.weight
        self.register_parameter(name, parameter)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if x.is_floating_point():
            return x if self.outputs is None else x.new_zeros(*x.shape[:-1], self.outputs)
        return torch.zeros(*x.shape[:-1], x.shape[-1] // self.parts, self.width, dtype=self.dtype, device=x.device)


def plan_pipeline(
    module: TrainModule, spans: Sequence[Span], placement: Placement, interface: LayerInterface
) -> Pipeline:
    """Plan which rank holds which tensors of a whole model (on meta). Raises UserError if layers of several ranks share
    weights."""
    after = interface.after | {module.facts.head}
    made = Pipeline(tuple(spans), placement, {}, {}, replace(interface, after=after))
    tensors = module.state_dict(keep_vars=True)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    ranks: dict[int, set[int]] = {}
    layers = module.facts.layers
    for name, tensor in tensors.items():
        own = [placement.rank_of(made.stage_of(name.rpartition(".")[0], layers))]
        if name not in parameters and not name.startswith(f"{layers}."):  # a buffer: small, so every stage holds it
            own = [*range(placement.ranks)]
        ranks.setdefault(id(tensor), set()).update(own)
    for name, tensor in tensors.items():
        if name.startswith(f"{layers}.") and len(ranks[id(tensor)]) > 1:
            raise UserError(
                f"mesh.pp: model_type {module.facts.model_type!r} uses {name} in several places, so that two stages "
                "would have to have one layer's weights. Set mesh.pp=1."
            )
    holders = {name: tuple(sorted(ranks[id(tensor)])) for name, tensor in tensors.items()}
    return replace(made, tensors=tensors, holders=holders)


def keep_stages(module: TrainModule, pipeline: Pipeline, place: int, kind: Outside) -> None:
    """Reduce a whole model, in place, to what the stages of the rank at `place` hold."""
    stages, outside = pipeline.placement.stages_of(place), dict(_outside(module))
    runs = {name: pipeline.stage_of(name, module.facts.layers) for name in (*dict(module.layers), *outside)}
    idle = {name: EmptyModule(owner, kind) for name, owner in outside.items() if not isinstance(owner, Head)}
    passages, others = [], []
    for stage in stages:
        mixers = sum(pipeline.stage_of(name, module.facts.layers) == stage for name in module.mixers)
        passages.append(StageIO(stage == len(pipeline.spans) - 1, mixers=mixers))
        own = {name: stand_in for name, stand_in in idle.items() if runs[name] != stage}
        others.append(own | _stand_ins(module, pipeline, stage, passages[-1]))
    held = {name for name, ranks in pipeline.holders.items() if place in ranks}
    for name, stage in runs.items():
        if stage not in stages:
            _leave_out(module, name, others[0].get(name), held)
    for passage, own in zip(passages, others, strict=True):
        passage.others = [(*_place(module, n), m) for n, m in own.items() if module.get_submodule(n) is not m]
    names = {name for name, _ in module.named_modules()}
    module.mixers = {name: mixer for name, mixer in module.mixers.items() if name in names}
    module.passages = passages


def _outside(module: TrainModule) -> list[tuple[str, nn.Module]]:
    """(name, module) of the modules outside the layers that have weights of their own; a vision tower and its projector
    each count as one module."""
    layers, whole = f"{module.facts.layers}.", vision_parts(module.base, module.facts)
    inside = (layers, *(f"{part}." for part in whole))
    return [
        (name, child)
        for name, child in module.named_modules()
        if not name.startswith(inside) and (name in whole or any(True for _ in child.parameters(recurse=False)))
    ]


def _stand_ins(module: TrainModule, pipeline: Pipeline, stage: int, passage: StageIO) -> dict[str, nn.Module]:
    """Name -> stand-in, for each layer that this stage does not run."""
    first, end = pipeline.spans[stage]
    found: dict[str, nn.Module] = {}
    for number, (name, layer) in enumerate(module.layers):
        if not first <= number < end:
            items = pipeline.interface.outputs[type(layer).__name__]
            found[name] = PlaceholderLayer(layer, items, passage, gives=number == first - 1, keeps=number == end)
    return found


def _leave_out(module: TrainModule, name: str, stand_in: nn.Module | None, held: Collection[str]) -> None:
    """Replace a module that no stage of this rank runs, keeping weights that the rank holds. stand_in: None for the
    head."""
    owner = module.get_submodule(name)
    kept = {leaf: p for leaf, p in owner.named_parameters(recurse=False) if f"{name}.{leaf}" in held}
    if stand_in is None:  # the head stays, emptied: it is never called, but other code reads it
        for leaf in owner._parameters:
            owner._parameters[leaf] = kept.get(leaf)
        return
    for leaf, parameter in kept.items():
        assert isinstance(stand_in, EmptyModule)
        stand_in.keep(leaf, parameter)
    setattr(*_place(module, name), stand_in)


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """(parent of a module, the module's name there)."""
    parent, _, leaf = name.rpartition(".")
    return module.get_submodule(parent), leaf


def cut_layers(costs: Sequence[float], head: float, stages: int, least: int = 1) -> list[Span]:
    """Spans of consecutive layers, one per stage, that minimise the cost of the dearest stage.

    costs: of each layer. head: cost of the head, in the last stage. least: fewest layers of the first stage. There must
    be enough layers. Of equally good cuts, the one whose first stages have more layers.
    """
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: (cost of the dearest stage, end of the first one) for layers from n on over the stages counted so far
    best = [(sums[count] - sums[n] + head, count) for n in range(count)]
    table = [best]
    for left in range(2, stages + 1):
        before, best = best, []
        for first in range(count):
            ends = range(max(first + 1, least if left == stages else 0), count - left + 2)
            found = [(max(sums[end] - sums[first], before[end][0]), -end) for end in ends]
            dearest, end = min(found, default=(float("inf"), 0))
            best.append((dearest, -end))
        table.append(best)
    spans, first = [], 0
    for rows in reversed(table):
        spans.append((first, rows[first][1]))
        first = rows[first][1]
    return spans
