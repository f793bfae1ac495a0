"""Activation memory, from shapes alone: the model runs on the meta device, which stores nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from weft.config.recompute import KINDS, SELECTIVE, Activations, Kind, RecomputePolicy
from weft.models import hf
from weft.models.train_module import StageIO, TrainModule
from weft.models.transforms import tile_mlps
from weft.ops.communicator import MetaCommunicator
from weft.ops.context import repeats
from weft.ops.offload import LAYERS_IN_FLIGHT, NARROW, PAGE
from weft.ops.recompute import LayerResults, contexts, reuse_in_recompute
from weft.ops.shapes import GroupedProducts
from weft.parallel.mesh import TPAxis
from weft.parallel.pp.model import PlaceholderLayer
from weft.parallel.tp.divide import tensor_parallel

_ATTENTION = "weft_shapes"
_TOKENS = 240  # of the row that is run; memory is proportional to tokens


@dataclass(frozen=True)
class RowSharing:
    """Numbers of ranks that divide the work of a row: tp divides layers, ring x ulysses a cut document. sequence:
    whether tp divides the tokens between layers, too. paths: keys that attention gathers for the segments of a row of
    trees, as a multiple of the row's tokens; 1 where it gathers none."""

    tp: int = 1
    ring: int = 1
    ulysses: int = 1
    sequence: bool = False
    paths: float = 1.0

    def keys(self, heads: int, query_heads: int) -> float:
        """Keys that attention stores, as a multiple of the rank's own tokens. In a ring of n, a rank holds chunks i and
        2 n - 1 - i of 2 n chunks; their queries together see 2 n + 1 chunks of keys."""
        return repeats(heads, query_heads, self.ulysses) * (self.ring + 0.5 if self.ring > 1 else 1.0)


@dataclass(frozen=True)
class Saved:
    """Bytes per token of a row that autograd stores on a rank. layers: in each decoder layer. passed: hidden states
    between two layers. before: in modules before the layers. after: between the layers and the head. kept: kind of
    results -> what recomputation keeps of them in each layer. wide: the part of it that may go to the host, in
    wide_tensors tensors. tiled: what each layer's MLPs store while a tile runs, beyond `layers`; 0 for MLPs that run
    whole."""

    layers: tuple[float, ...]
    passed: float
    before: float
    after: float
    kept: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    wide: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    wide_tensors: Mapping[Kind, tuple[int, ...]] = field(default_factory=dict)
    tiled: tuple[float, ...] = ()

    def bytes(
        self, tokens: int, activations: Activations, layers: Sequence[int] | None = None, rows: float = 1.0
    ) -> int:
        """Bytes of the device for rows of `tokens` tokens. layers: default all. rows: rows in flight. Includes
        everything in the one layer that is being recomputed."""
        return self.after_forward(tokens, activations, layers, rows) + self.recomputed(tokens, activations, layers)

    def after_forward(
        self, tokens: int, activations: Activations, layers: Sequence[int] | None = None, rows: float = 1.0
    ) -> int:
        """Bytes of the device between forward and backward, for which arguments are as in `bytes`."""
        numbers = range(len(self.layers)) if layers is None else layers
        stored = sum(self._stored(layer, activations) for layer in numbers)
        outside = self.before + (self.after if len(self.layers) - 1 in numbers else 0.0)
        return round(((stored + outside) * rows + self._in_flight(numbers, activations)) * tokens)

    def recomputed(self, tokens: int, activations: Activations, layers: Sequence[int] | None = None) -> int:
        """Bytes that the largest layer stores while backward recomputes it, or a tile of it, beyond kept tensors."""
        numbers, recompute = range(len(self.layers)) if layers is None else layers, activations.recompute
        tile = min(1.0, (activations.tile or 0) / max(1, tokens))
        most = 0.0
        for layer in numbers:
            size = tile * self.tiled[layer] if self.tiled else 0.0
            if recompute is not None and recompute.covers(layer):
                size += self.layers[layer] - self._kept(layer, recompute)
            most = max(most, size)
        return round(most * tokens)

    def moved(self, tokens: int, activations: Activations, layers: Sequence[int] | None = None) -> int:
        """Bytes of a row that go to the host in forward, and come back in backward."""
        numbers = range(len(self.layers)) if layers is None else layers
        return round(sum(self._hosted(layer, activations) for layer in numbers) * tokens)

    def on_host(
        self, tokens: int, activations: Activations, layers: Sequence[int] | None = None, rows: float = 1.0
    ) -> int:
        """Bytes of the host for rows of `tokens` tokens, each tensor of which begins a page."""
        numbers = range(len(self.layers)) if layers is None else layers
        covered = [layer for layer in numbers if self._hosted(layer, activations)]
        tensors = sum(1 + sum(self.wide_tensors[kind][i] for kind in activations.hosted_kinds) for i in covered)
        return round((self.moved(tokens, activations, layers) + tensors * PAGE) * rows)

    def _stored(self, layer: int, activations: Activations) -> float:
        recompute = activations.recompute
        if recompute is None or not recompute.covers(layer):
            return self.layers[layer]
        return self.passed + self._kept(layer, recompute) - self._hosted(layer, activations)

    def _kept(self, layer: int, recompute: RecomputePolicy) -> float:
        return sum(self.kept[kind][layer] for kind in recompute.keep if kind in self.kept)

    def _hosted(self, layer: int, activations: Activations) -> float:
        """Bytes per token of a layer that go to the host."""
        recompute = activations.recompute
        if activations.offload == "off" or recompute is None or not recompute.covers(layer):
            return 0.0
        return self.passed + sum(self.wide[kind][layer] for kind in activations.hosted_kinds if kind in self.wide)

    def _in_flight(self, layers: Sequence[int], activations: Activations) -> float:
        """Bytes per token of layers that are on the host and on the device, because copies may still run."""
        return sum(sorted((self._hosted(layer, activations) for layer in layers), reverse=True)[:LAYERS_IN_FLIGHT])


def saved_bytes(
    config: PretrainedConfig, dtype: torch.dtype, shared: RowSharing = RowSharing(), *, tiled: bool = False
) -> Saved:
    """What autograd stores on a rank for a model computed in `dtype`. shared: how ranks divide a row, which is then a
    part of one document. tiled: whether MLPs run over tiles of tokens.

    Excluded: weights, the head, masks (of kernels that build one, and of windows on CPU), and temporary memory of
    kernels. Of layers that are built alike, one is run. Errors of families that cannot run on meta are passed on.
    """
    AttentionInterface.register(_ATTENTION, partial(_attend, shared))
    model = hf.build_meta(copy.deepcopy(config), dtype=dtype, attention=_ATTENTION).train()
    module = TrainModule(model)
    firsts = keep_one_of_each_kind(module)
    if shared.tp > 1:
        ranks = MetaCommunicator(shared.tp)
        tensor_parallel(module, TPAxis(0, shared.tp, ranks, lambda _: ranks), model.config, sequence=shared.sequence)
    if tiled:
        tile_mlps(_TOKENS // 2, module, required=False)
    weights = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that numbers are not used again
    by_layer = [0] * len(firsts)
    outside, inside, passed, begun = [0, 0], list[int](), 0, False
    results, running = dict[int, LayerResults](), ExitStack()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if _storage(tensor) not in weights and _storage(tensor) not in storages:
            storages[_storage(tensor)] = storage
            if inside:
                by_layer[inside[-1]] += storage.nbytes()
            else:
                outside[begun] += storage.nbytes()
        return tensor

    def enter(number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal passed, begun
        begun = True
        hidden = args[0] if args else kwargs["hidden_states"]
        passed = max(passed, hidden.untyped_storage().nbytes())
        inside.append(number)
        results[number] = LayerResults(SELECTIVE)
        running.enter_context(contexts(results=results[number])[0])

    def leave(*_: Any) -> None:
        inside.clear()
        running.close()

    for number, (_, layer) in enumerate(module.layers):
        if firsts[number] == number:
            layer.register_forward_pre_hook(partial(enter, number), with_kwargs=True)
            layer.register_forward_hook(leave)
    ids_BT = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    positions_BT = torch.arange(_TOKENS, device="meta")[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), GroupedProducts(), running:
        out = module.base(input_ids=ids_BT, position_ids=positions_BT, use_cache=False)
    del out
    # A layer's mixers with state gather other ranks' hidden states for a cut document.
    width = int(module.get_submodule(module.facts.embedding).weight.shape[1]) * dtype.itemsize
    mixers = [sum(mixer.startswith(f"{name}.") for mixer in module.mixers) for name, _ in module.layers]
    per_token = tuple(
        by_layer[first] / _TOKENS + count * (shared.ulysses - 1) * width
        for first, count in zip(firsts, mixers, strict=True)
    )
    kept = {kind: tuple(_bytes(results[first].tensors(kind)) / _TOKENS for first in firsts) for kind in KINDS}
    wide_results = {
        kind: [[x for x in results[first].tensors(kind) if x.nbytes >= passed // NARROW] for first in firsts]
        for kind in KINDS
    }
    wide = {kind: tuple(_bytes(tensors) / _TOKENS for tensors in layers) for kind, layers in wide_results.items()}
    wide_tensors = {kind: tuple(map(len, layers)) for kind, layers in wide_results.items()}
    if shared.ulysses > 1:  # these hidden states, and the parts of the results that ranks sum
        kept["collectives"] = tuple(
            size + 2 * count * shared.ulysses * width for size, count in zip(kept["collectives"], mixers, strict=True)
        )
    saved = Saved(per_token, passed / _TOKENS, outside[0] / _TOKENS, outside[1] / _TOKENS, kept, wide, wide_tensors)
    if not tiled:
        return saved
    untiled = saved_bytes(config, dtype, shared).layers
    return replace(saved, tiled=tuple(more - less for more, less in zip(untiled, per_token, strict=True)))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """The memory of tensors, some of which may share it."""
    return sum({_storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def keep_one_of_each_kind(module: TrainModule) -> list[int]:
    """Keep the first of the layers that are built alike, and replace the others by stand-ins that pass hidden states
    on. Returns for each layer the number of the layer that runs for it."""
    types = getattr(module.hf_model.config.get_text_config(), "layer_types", None) or ()
    holder: Any = module.get_submodule(module.facts.layers)
    first: dict[object, int] = {}
    firsts = []
    for number, (_, layer) in enumerate(module.layers):
        kind = (
            type(layer),
            types[number] if number < len(types) else None,
            tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()),
        )
        firsts.append(first.setdefault(kind, number))
        if firsts[-1] != number:
            holder[number] = placeholder = PlaceholderLayer(
                layer, 0, StageIO(is_last=False), returns_received=False, keeps_input=False
            )
            holder[firsts[-1]].register_forward_hook(partial(_copy_outputs, placeholder))
    return firsts


def _copy_outputs(placeholder: PlaceholderLayer, _: nn.Module, args: Any, output: Any) -> None:
    """Let a placeholder return as many tensors as the layer that runs for it."""
    placeholder.num_outputs = len(output) if isinstance(output, tuple) else 0


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _attend(
    shared: RowSharing,
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTE: Tensor,
    mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    factor = shared.keys(key_BKTD.shape[1], query_BHTD.shape[1])
    copies = repeats(key_BKTD.shape[1], query_BHTD.shape[1], shared.ulysses)
    keys = key_BKTD.numel() + value_BKTE.numel()
    received = int((factor - copies) * keys)  # from other members of the ring
    if shared.ulysses > 1:  # heads for tokens, and back
        received += query_BHTD.numel() + copies * keys + query_BHTD.shape[:3].numel() * value_BKTE.shape[3]
    reuse_in_recompute(lambda: query_BHTD.new_empty(received), "collectives")
    stored = factor * shared.paths
    if stored > 1:
        key_BKTD, value_BKTE = (
            x.new_empty(*x.shape[:2], int(stored * x.shape[2]), x.shape[3]) for x in (key_BKTD, value_BKTE)
        )
    out: Tensor = _Attended.apply(query_BHTD, key_BKTD, value_BKTE)
    return out.transpose(1, 2), None


class _Attended(torch.autograd.Function):
    """Saves the tensors that the kernels of ops/attention.py save: inputs, output and the logsumexp of each query."""

    @staticmethod
    def forward(ctx: Any, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor) -> Tensor:
        batch, heads, tokens, _ = query_BHTD.shape

        def compute() -> tuple[Tensor, Tensor]:
            out = query_BHTD.new_empty(batch, heads, tokens, value_BKTE.shape[3])
            return out, query_BHTD.new_empty(batch, heads, tokens, dtype=torch.float32)

        out, sums = reuse_in_recompute(compute, "attention")
        ctx.save_for_backward(query_BHTD, key_BKTD, value_BKTE, out, sums)
        return out
