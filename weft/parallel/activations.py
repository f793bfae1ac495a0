"""Estimates activation memory from shapes. The model runs on the meta device, which stores no values."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PretrainedConfig

from weft.config.recompute import KINDS, SELECTIVE, Activations, Kind, RecomputePolicy
from weft.config.schema import LoraConfig
from weft.models import hf
from weft.models.experts import expert_blocks, group_experts, hides_routers
from weft.models.fused_norms import fuse_norms
from weft.models.lora import attach, freeze_base
from weft.models.train_module import StageIO, TrainModule
from weft.models.transforms import tile_mlps
from weft.ops.communicator import MetaCommunicator
from weft.ops.context import repeats
from weft.ops.offload import LAYERS_IN_FLIGHT, NARROW, PAGE
from weft.ops.recompute import LayerResults, contexts, reuse_in_recompute
from weft.ops.shapes import GroupedProducts
from weft.parallel.mesh import TPAxis
from weft.parallel.pp.model import PlaceholderLayer
from weft.parallel.shards.adapter_files import plan_lora
from weft.parallel.tp.divide import tensor_parallel

_ATTENTION = "weft_shapes"
_TOKENS = 240  # length of the row that runs on meta; memory is proportional to the number of tokens


@dataclass(frozen=True)
class RowSharing:
    """How ranks share the work of a row.

    tp: number of ranks that split layers. ring, ulysses: numbers of ranks that split a document. sequence: whether tp
    also splits the tokens between layers. paths: number of keys that attention gathers for the segments of a row of
    trees, as a multiple of the row's tokens; 1 if it gathers none.
    """

    tp: int = 1
    ring: int = 1
    ulysses: int = 1
    sequence: bool = False
    paths: float = 1.0

    def keys(self, heads: int, query_heads: int) -> float:
        """Number of keys that attention stores, as a multiple of the rank's tokens. heads: number of key heads.

        In a ring of n ranks, a rank has chunks i and 2 n - 1 - i of 2 n chunks. Their queries together see 2 n + 1
        chunks of keys, (n + 0.5) x the rank's two chunks.
        """
        return repeats(heads, query_heads, self.ulysses) * (self.ring + 0.5 if self.ring > 1 else 1.0)


@dataclass(frozen=True)
class Saved:
    """Bytes per token of a row that autograd stores on a rank.

    layers: in each decoder layer. passed: hidden states between two layers. before_layers: in modules before the
    layers. after_layers: in modules between the layers and the head. kept: kind of results -> bytes that recomputation
    keeps in each layer. wide, wide_tensors: the bytes and the number of these tensors that can be offloaded to the
    host. tiled: bytes that each layer's MLPs store while a tile runs, in addition to `layers`; 0 for MLPs that run
    without tiles."""

    layers: tuple[float, ...]
    passed: float
    before_layers: float
    after_layers: float
    kept: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    wide: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    wide_tensors: Mapping[Kind, tuple[int, ...]] = field(default_factory=dict)
    tiled: tuple[float, ...] = ()

    def bytes(
        self, tokens: int, activations: Activations, layers: Sequence[int] | None = None, rows: float = 1.0
    ) -> int:
        """Bytes on the device for rows of `tokens` tokens, including all activations of one recomputed layer. layers:
        indices, by default all. rows: number of rows in flight."""
        return self.after_forward(tokens, activations, layers, rows) + self.recomputed(tokens, activations, layers)

    def after_forward(
        self, tokens: int, activations: Activations, layers: Sequence[int] | None = None, rows: float = 1.0
    ) -> int:
        """Bytes on the device between forward and backward. The arguments are those of `bytes`."""
        numbers = range(len(self.layers)) if layers is None else layers
        stored = sum(self._stored(layer, activations) for layer in numbers)
        outside = self.before_layers + (self.after_layers if len(self.layers) - 1 in numbers else 0.0)
        return round(((stored + outside) * rows + self._in_flight(numbers, activations)) * tokens)

    def recomputed(self, tokens: int, activations: Activations, layers: Sequence[int] | None = None) -> int:
        """Bytes that the largest layer stores, besides kept tensors, while backward recomputes it or a tile of it."""
        numbers, recompute = range(len(self.layers)) if layers is None else layers, activations.recompute
        tile = min(1.0, (activations.tile or 0) / max(1, tokens))
        largest = 0.0
        for layer in numbers:
            size = tile * self.tiled[layer] if self.tiled else 0.0
            if recompute is not None and recompute.covers(layer):
                size += self.layers[layer] - self._bytes_kept(layer, recompute)
            largest = max(largest, size)
        return round(largest * tokens)

    def moved(self, tokens: int, activations: Activations, layers: Sequence[int] | None = None) -> int:
        """Bytes of a row that forward copies to the host, and backward copies back."""
        numbers = range(len(self.layers)) if layers is None else layers
        return round(sum(self._hosted(layer, activations) for layer in numbers) * tokens)

    def on_host(
        self, tokens: int, activations: Activations, layers: Sequence[int] | None = None, rows: float = 1.0
    ) -> int:
        """Bytes on the host for rows of `tokens` tokens. Each tensor starts a new page."""
        numbers = range(len(self.layers)) if layers is None else layers
        covered = [layer for layer in numbers if self._hosted(layer, activations)]
        tensors = sum(1 + sum(self.wide_tensors[kind][i] for kind in activations.hosted_kinds) for i in covered)
        return round((self.moved(tokens, activations, layers) + tensors * PAGE) * rows)

    def _stored(self, layer: int, activations: Activations) -> float:
        recompute = activations.recompute
        if recompute is None or not recompute.covers(layer):
            return self.layers[layer]
        return self.passed + self._bytes_kept(layer, recompute) - self._hosted(layer, activations)

    def _bytes_kept(self, layer: int, recompute: RecomputePolicy) -> float:
        return sum(self.kept[kind][layer] for kind in recompute.keep if kind in self.kept)

    def _hosted(self, layer: int, activations: Activations) -> float:
        """Bytes per token that a layer offloads to the host."""
        recompute = activations.recompute
        if activations.offload == "off" or recompute is None or not recompute.covers(layer):
            return 0.0
        return self.passed + sum(self.wide[kind][layer] for kind in activations.hosted_kinds if kind in self.wide)

    def _in_flight(self, layers: Sequence[int], activations: Activations) -> float:
        """Bytes per token that are both on the host and on the device, because their copies may still run."""
        return sum(sorted((self._hosted(layer, activations) for layer in layers), reverse=True)[:LAYERS_IN_FLIGHT])


@dataclass(frozen=True)
class LayerSetup:
    """How layers are set up, as far as it decides what they store. tiled: whether MLPs run over tiles of tokens.
    fused_norms: the engine's decision for model.fused_norms. compiled: whether layers are compiled. lora: the adapters
    of a frozen base; None if all weights are trained. exchanged: whether rows are sent to experts of other ranks."""

    tiled: bool = False
    fused_norms: bool = False
    compiled: bool = False
    lora: LoraConfig | None = None
    exchanged: bool = False


def saved_bytes(
    config: PretrainedConfig, dtype: torch.dtype, shared: RowSharing = RowSharing(), setup: LayerSetup = LayerSetup()
) -> Saved:
    """The bytes that autograd stores on a rank for a model computed in `dtype`.

    shared: how ranks share a row. The row is then part of one document. Excluded are weights, the head, attention
    masks, and temporary memory of kernels. Of layers with equal structure, only one runs. Raises the model's own
    exception if it cannot run on meta.

    A compiled layer stores what matmuls and attention read or write; its graphs compute all other results again. Blocks
    of experts outside of the graphs store what they do in plain layers.
    """
    products = _Products()
    AttentionInterface.register(_ATTENTION, partial(_attend, shared, products))
    model = hf.build_meta(copy.deepcopy(config), dtype=dtype, attention=_ATTENTION).train()
    adapters = None if setup.lora is None else plan_lora(model, setup.lora)
    module = TrainModule(model)
    if not setup.exchanged:
        # Rows that are exchanged exist twice. Simulations of mesh.ep agree with what stock experts store.
        group_experts(module)
    if adapters is not None:
        attach(module, adapters)
        freeze_base(module, adapters)
    firsts = keep_one_of_each_kind(module)
    if setup.fused_norms:
        fuse_norms(module)
    if shared.tp > 1:
        ranks = MetaCommunicator(shared.tp)
        tensor_parallel(module, TPAxis(0, shared.tp, ranks, lambda _: ranks), model.config, sequence=shared.sequence)
    if setup.tiled:
        tile_mlps(_TOKENS // 2, module, required=False)
    weights = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that their addresses are not reused
    by_layer = [0] * len(firsts)
    outside, inside, passed, layers_started = [0, 0], list[int](), 0, False
    in_graphs: dict[int, list[int]] = {}  # layer -> storages that its graphs' part stores if it runs eagerly
    results, running = dict[int, LayerResults](), ExitStack()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if _storage(tensor) not in weights and _storage(tensor) not in storages:
            storages[_storage(tensor)] = storage
            if inside and products.watching:
                in_graphs.setdefault(inside[-1], []).append(_storage(tensor))
            elif inside:
                by_layer[inside[-1]] += storage.nbytes()
            else:
                outside[layers_started] += storage.nbytes()
        return tensor

    def enter(number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal passed, layers_started
        layers_started = True
        hidden = args[0] if args else kwargs["hidden_states"]
        passed = max(passed, hidden.untyped_storage().nbytes())
        inside.append(number)
        products.watch(setup.compiled)
        results[number] = LayerResults(SELECTIVE)
        running.enter_context(contexts(results=results[number])[0])

    def leave(*_: Any) -> None:
        if setup.compiled:
            stored = {
                address: storages[address] for address in in_graphs.get(inside[-1], []) if address in products.seen
            }
            stored |= {key: storage for key, storage in products.written.items() if key not in weights}
            by_layer[inside[-1]] += sum(storage.nbytes() for storage in stored.values())
        products.watch(False)
        products.written.clear()
        inside.clear()
        running.close()

    hidden = setup.compiled and hides_routers(layer for _, layer in module.layers)
    for number, (_, layer) in enumerate(module.layers):
        if firsts[number] == number:
            layer.register_forward_pre_hook(partial(enter, number), with_kwargs=True)
            layer.register_forward_hook(leave)
            for block in expert_blocks(layer) if hidden else ():
                block.register_forward_pre_hook(lambda *_: products.watch(False))
                block.register_forward_hook(lambda *_: products.watch(True))
    ids_BT = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    positions_BT = torch.arange(_TOKENS, device="meta")[None]
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        GroupedProducts(),
        products,
        running,
    ):
        out = module.base(input_ids=ids_BT, position_ids=positions_BT, use_cache=False)
    del out
    # For a document that ranks share, mixers with state gather the hidden states of the other ranks.
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
    if shared.ulysses > 1:  # the gathered hidden states, and the partial results that ranks sum
        kept["collectives"] = tuple(
            size + 2 * count * shared.ulysses * width for size, count in zip(kept["collectives"], mixers, strict=True)
        )
    saved = Saved(per_token, passed / _TOKENS, outside[0] / _TOKENS, outside[1] / _TOKENS, kept, wide, wide_tensors)
    if not setup.tiled:
        return saved
    untiled = saved_bytes(config, dtype, shared, replace(setup, tiled=False)).layers
    return replace(saved, tiled=tuple(more - less for more, less in zip(untiled, per_token, strict=True)))


class _Products(TorchDispatchMode):
    """While it watches: the storages that matmuls and attention read or write."""

    def __init__(self) -> None:
        super().__init__()
        self.watching = False
        self.seen: dict[int, torch.UntypedStorage] = {}  # kept alive, so that their addresses are not reused
        self.written: dict[int, torch.UntypedStorage] = {}

    def watch(self, watching: bool) -> None:
        self.watching = watching

    def add(self, inputs: Iterable[Any], output: Tensor) -> None:
        """Record a matmul or attention."""
        if self.watching:
            tensors = [value for value in (*inputs, output) if isinstance(value, Tensor)]
            self.seen |= {_storage(tensor): tensor.untyped_storage() for tensor in tensors}
            self.written[_storage(output)] = output.untyped_storage()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"):
            self.add(args, out)
        return out


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors. A shared storage counts once."""
    return sum({_storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def keep_one_of_each_kind(module: TrainModule) -> list[int]:
    """Keep the first of all layers with equal structure, and replace the others by placeholders, which return their
    input. Returns, for each layer, the index of the layer that represents it."""
    types = getattr(module.hf_model.config.get_text_config(), "layer_types", None) or ()
    layer_list: Any = module.get_submodule(module.facts.layers)
    first_index: dict[object, int] = {}
    firsts = []
    for number, (_, layer) in enumerate(module.layers):
        structure = (
            type(layer),
            types[number] if number < len(types) else None,
            tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()),
        )
        firsts.append(first_index.setdefault(structure, number))
        if firsts[-1] != number:
            layer_list[number] = placeholder = PlaceholderLayer(
                layer, 0, StageIO(is_last=False), returns_received=False, keeps_input=False
            )
            layer_list[firsts[-1]].register_forward_hook(partial(_copy_outputs, placeholder))
    return firsts


def _copy_outputs(placeholder: PlaceholderLayer, _: nn.Module, args: Any, output: Any) -> None:
    """A forward hook: make the placeholder return as many outputs as the layer that represents it."""
    placeholder.num_outputs = len(output) if isinstance(output, tuple) else 0


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _attend(
    shared: RowSharing,
    products: _Products,
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
    if shared.ulysses > 1:  # the exchange of heads for tokens, and its inverse
        received += query_BHTD.numel() + copies * keys + query_BHTD.shape[:3].numel() * value_BKTE.shape[3]
    reuse_in_recompute(lambda: query_BHTD.new_empty(received), "collectives")
    stored = factor * shared.paths
    if stored > 1:
        key_BKTD, value_BKTE = (
            x.new_empty(*x.shape[:2], int(stored * x.shape[2]), x.shape[3]) for x in (key_BKTD, value_BKTE)
        )
    out: Tensor = _Attended.apply(query_BHTD, key_BKTD, value_BKTE)
    products.add((query_BHTD, key_BKTD, value_BKTE), out)
    return out.transpose(1, 2), None


class _Attended(torch.autograd.Function):
    """Saves the same tensors as the kernels of ops/attention.py: inputs, output and the logsumexp of each query."""

    @staticmethod
    def forward(ctx: Any, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor) -> Tensor:
        batch, heads, tokens, _ = query_BHTD.shape

        def compute() -> tuple[Tensor, Tensor]:
            out = query_BHTD.new_empty(batch, heads, tokens, value_BKTE.shape[3])
            return out, query_BHTD.new_empty(batch, heads, tokens, dtype=torch.float32)

        out, sums = reuse_in_recompute(compute, "attention")
        ctx.save_for_backward(query_BHTD, key_BKTD, value_BKTE, out, sums)
        return out
