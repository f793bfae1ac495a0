"""Reduces a model to some of its decoder layers, which run inside HuggingFace's unchanged forward.

Layers of other stages become placeholders without weights, which return their input. So every stage computes rotary
tables and masks with the family's code. The placeholder before a stage's first layer returns the hidden states that the
previous stage sent. The placeholder after its last layer stores its input for sending. Weights outside the layers are
on the first stage if they are used before the layers, else on the last stage. If a rank has several stages, each stage
has its placeholders for all other layers, and they replace the layers during its forwards."""

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
from weft.parallel.pp.schedule import Placement

Span = tuple[int, int]  # index of a stage's first layer, index after its last layer


@dataclass(frozen=True)
class LayerInterface:
    """How a family's base model runs its layers. outputs: class of a layer -> length of the tuple that it returns, 0
    for a tensor. after: modules with weights outside the layers that run after the last layer. wide: whether hidden
    states between layers are fp32 for any compute dtype."""

    outputs: Mapping[str, int]
    after: frozenset[str]
    wide: bool = False


@dataclass(frozen=True)
class Pipeline:
    """How mesh.pp splits a model. spans: the layers of each stage. tensors: the full model's state dict, on meta.
    holders: name -> the ranks that hold the tensor (several for tied weights and buffers). The first of them writes
    it."""

    spans: tuple[Span, ...]
    placement: Placement
    tensors: Mapping[str, Tensor]
    holders: Mapping[str, tuple[int, ...]]
    interface: LayerInterface

    @property
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters of the full model. Tied parameters occur under each name."""
        return [(name, tensor) for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)]

    @property
    def parameter_names(self) -> list[str]:
        """Names of all parameters of the full model, in order. Tied parameters occur once."""
        first_names: dict[int, str] = {}
        for name, parameter in self.named_parameters:
            first_names.setdefault(id(parameter), name)
        return list(first_names.values())

    def shared_params(self, rank: int) -> frozenset[str]:
        """Names of parameters, trained or not, that both rank `rank` of pp and other ranks hold."""
        shared = (name for name, ranks in self.holders.items() if len(ranks) > 1 and rank in ranks)
        return frozenset(name for name in shared if isinstance(self.tensors[name], nn.Parameter))

    def tied_copies(self, rank: int) -> frozenset[str]:
        """Names of tensors that rank `rank` of pp holds, but that an earlier rank writes and counts."""
        return frozenset(n for n, ranks in self.holders.items() if rank in ranks and ranks[0] != rank)

    def missing_params(self, rank: int) -> frozenset[str]:
        """Names of tensors that rank `rank` of pp does not hold."""
        return frozenset(name for name, ranks in self.holders.items() if rank not in ranks)

    def stage_of(self, name: str, layers: str) -> int:
        """The stage that runs a module. layers: name of the list of decoder layers."""
        if not name.startswith(f"{layers}."):
            return len(self.spans) - 1 if name in self.interface.after else 0
        layer = int(name.removeprefix(f"{layers}.").partition(".")[0])
        return next(stage for stage, (first, end) in enumerate(self.spans) if first <= layer < end)


class PlaceholderLayer(nn.Module):
    """Replaces a layer of another stage. It has the layer's attributes, because the code of some families reads
    attributes of every layer (attention_type). It has no modules and no weights."""

    def __init__(
        self, layer: nn.Module, num_outputs: int, stage_io: StageIO, *, returns_received: bool, keeps_input: bool
    ) -> None:
        """num_outputs: length of the tuple that the layer returns, 0 for a tensor. returns_received: whether forward
        returns stage_io.received. keeps_input: whether forward stores its input in stage_io.sent."""
        super().__init__()
        module_attributes = vars(nn.Module()).keys()
        for name, value in vars(layer).items():
            if name not in module_attributes and not name.startswith("_") and not callable(value):
                setattr(self, name, value)
        self.stage_io, self.num_outputs = stage_io, num_outputs
        self.returns_received, self.keeps_input = returns_received, keeps_input

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Any = args[0] if args else kwargs["hidden_states"]
        if self.keeps_input:
            self.stage_io.sent = hidden
        if self.returns_received:
            hidden = self.stage_io.received
        return (hidden, *[None] * (self.num_outputs - 1)) if self.num_outputs else hidden


@contextmanager
def without_placeholders(model: nn.Module) -> Iterator[None]:
    """A context in which the model's lists of layers contain no placeholders, for code that accesses modules of every
    layer, such as falcon_h1's initialisation."""
    lists = [
        (module_list, module_list._modules) for module_list in model.modules() if isinstance(module_list, nn.ModuleList)
    ]
    for module_list, modules in lists:
        module_list._modules = {
            name: child for name, child in modules.items() if not isinstance(child, PlaceholderLayer)
        }
    try:
        yield
    finally:
        for module_list, modules in lists:
            module_list._modules = modules


class EmptyModule(nn.Module):
    """Replaces a module outside the layers that another stage runs.

    It returns zeros of the module's output shape for token ids and for inputs of a linear layer, and returns other
    hidden states unchanged. It holds the module's weights that this rank needs under another name (tied weights)."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device, token_parts: int) -> None:
        """dtype: of the returned embeddings, on which rotary tables depend. device: of forwards. token_parts: number of
        ranks that share the tokens between layers."""
        super().__init__()
        weight = getattr(module, "weight", None)
        self.width = weight.shape[-1] if isinstance(weight, Tensor) else 0
        self.outputs = hf.linear_widths(module)[1] if hf.is_plain_linear(module) else None
        self.dtype, self.token_parts = dtype, token_parts
        self.weight: Tensor = torch.empty(0, device=device)  # the code of some families reads weight.device

    def keep(self, name: str, parameter: nn.Parameter) -> None:
        """Add a weight of the replaced module."""
        if name == "weight":
            del self.weight
        self.register_parameter(name, parameter)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        if x.is_floating_point():
            return x if self.outputs is None else x.new_zeros(*x.shape[:-1], self.outputs)
        return torch.zeros(
            *x.shape[:-1], x.shape[-1] // self.token_parts, self.width, dtype=self.dtype, device=x.device
        )


def plan_pipeline(
    module: TrainModule, spans: Sequence[Span], placement: Placement, interface: LayerInterface
) -> Pipeline:
    """Assign the tensors of a full model (on meta) to ranks. Raises UserError if layers of different ranks share
    weights."""
    after = interface.after | {module.facts.head}
    pipeline = Pipeline(tuple(spans), placement, {}, {}, replace(interface, after=after))
    tensors = module.state_dict(keep_vars=True)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    ranks: dict[int, set[int]] = {}
    layers = module.facts.layers
    for name, tensor in tensors.items():
        holding_ranks = [placement.rank_of(pipeline.stage_of(name.rpartition(".")[0], layers))]
        if name not in parameters and not name.startswith(f"{layers}."):  # buffers are small: every stage holds them
            holding_ranks = [*range(placement.ranks)]
        ranks.setdefault(id(tensor), set()).update(holding_ranks)
    for name, tensor in tensors.items():
        if name.startswith(f"{layers}.") and len(ranks[id(tensor)]) > 1:
            raise UserError(
                f"mesh.pp: model_type {module.facts.model_type!r} uses {name} in several places, so two stages "
                "would need the weights of one layer. Set mesh.pp=1."
            )
    holders = {name: tuple(sorted(ranks[id(tensor)])) for name, tensor in tensors.items()}
    return replace(pipeline, tensors=tensors, holders=holders)


def keep_stages(
    module: TrainModule,
    pipeline: Pipeline,
    rank: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    token_parts: int = 1,
) -> None:
    """Reduce a full model, in place, to the modules of a rank's stages. dtype, device, token_parts: see EmptyModule."""
    layers, stages = module.facts.layers, pipeline.placement.stages_of(rank)
    outside = _modules_outside_layers(module)
    stage_of = {name: pipeline.stage_of(name, layers) for name in (*dict(module.layers), *outside)}
    empty_modules = {
        name: EmptyModule(child, dtype, device, token_parts)
        for name, child in outside.items()
        if not isinstance(child, Head)
    }
    replacements: list[tuple[StageIO, dict[str, nn.Module]]] = []
    for stage in stages:
        mixers = sum(pipeline.stage_of(name, layers) == stage for name in module.mixers)
        stage_io = StageIO(stage == len(pipeline.spans) - 1, mixers=mixers)
        modules: dict[str, nn.Module] = {name: m for name, m in empty_modules.items() if stage_of[name] != stage}
        first, end = pipeline.spans[stage]
        for index, (name, layer) in enumerate(module.layers):
            if not first <= index < end:
                num_outputs = pipeline.interface.outputs[type(layer).__name__]
                modules[name] = PlaceholderLayer(
                    layer, num_outputs, stage_io, returns_received=index == first - 1, keeps_input=index == end
                )
        replacements.append((stage_io, modules))
    local_names = {name for name, ranks in pipeline.holders.items() if rank in ranks}
    for name, stage in stage_of.items():
        if stage not in stages:
            _replace_module(module, name, replacements[0][1].get(name), local_names)
    for stage_io, modules in replacements:
        stage_io.placeholders = [
            (*_parent_and_name(module, n), m) for n, m in modules.items() if module.get_submodule(n) is not m
        ]
    names = {name for name, _ in module.named_modules()}
    module.mixers = {name: mixer for name, mixer in module.mixers.items() if name in names}
    module.stage_ios = [stage_io for stage_io, _ in replacements]


def _modules_outside_layers(module: TrainModule) -> dict[str, nn.Module]:
    """Name -> module, for the modules outside the layers that directly have weights. A vision tower and its projector
    each count as one module."""
    layers, vision = f"{module.facts.layers}.", vision_parts(module.base, module.facts)
    inside = (layers, *(f"{vision_module}." for vision_module in vision))
    return {
        name: child
        for name, child in module.named_modules()
        if not name.startswith(inside) and (name in vision or any(True for _ in child.parameters(recurse=False)))
    }


def _replace_module(
    module: TrainModule, name: str, placeholder: nn.Module | None, local_names: Collection[str]
) -> None:
    """Replace a module that no stage of this rank runs. Its weights in `local_names` are kept. placeholder: None for
    the head."""
    owner = module.get_submodule(name)
    local_parameters = {leaf: p for leaf, p in owner.named_parameters(recurse=False) if f"{name}.{leaf}" in local_names}
    if placeholder is None:  # the head stays without weights: it is never called, but other code reads its attributes
        for leaf in owner._parameters:
            owner._parameters[leaf] = local_parameters.get(leaf)
        return
    for leaf, parameter in local_parameters.items():
        assert isinstance(placeholder, EmptyModule)
        placeholder.keep(leaf, parameter)
    setattr(*_parent_and_name(module, name), placeholder)


def _parent_and_name(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """(parent of a module, the module's name there)."""
    parent, _, leaf = name.rpartition(".")
    return module.get_submodule(parent), leaf


def cut_layers(costs: Sequence[float], head: float, stages: int, min_layers: int = 1) -> list[Span]:
    """Spans of consecutive layers, one per stage, that minimise the cost of the costliest stage.

    costs: of each layer. head: cost of the head, which is in the last stage. min_layers: fewest layers of the first
    stage. The model must have enough layers. Of equally good solutions, this returns the one with more layers in the
    first stages.
    """
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: for the layers from n on and the current number of stages, (cost of the costliest stage, end of the first
    # stage).
    best = [(sums[count] - sums[n] + head, count) for n in range(count)]
    table = [best]
    for remaining in range(2, stages + 1):
        fewer_stages, best = best, []
        for first in range(count):
            ends = range(max(first + 1, min_layers if remaining == stages else 0), count - remaining + 2)
            options = [(max(sums[end] - sums[first], fewer_stages[end][0]), -end) for end in ends]
            costliest, end = min(options, default=(float("inf"), 0))
            best.append((costliest, -end))
        table.append(best)
    spans, first = [], 0
    for rows in reversed(table):
        spans.append((first, rows[first][1]))
        first = rows[first][1]
    return spans
