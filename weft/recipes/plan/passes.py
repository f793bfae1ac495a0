"""The bytes that a decoder layer and the head read and write outside of matmuls and attention: norms, rotations,
activation functions, residual sums, casts, softmax. Each eager operation passes over complete tensors, which takes an
accelerator half as long as the matmuls.

They are counted, not estimated: one layer of each kind runs forward and backward on the meta device, which stores
nothing, and every operation is observed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PretrainedConfig

from weft.launch.simulated import Simulation
from weft.models import hf
from weft.models.experts import expert_blocks, group_experts, hides_routers
from weft.models.fused_norms import fuse_norms
from weft.models.train_module import TrainModule
from weft.ops.communicator import MetaCommunicator
from weft.ops.head import KnownGrad, LogitTransform, chunked_readouts
from weft.ops.shapes import GroupedProducts
from weft.parallel.activations import RowSharing, keep_one_of_each_kind
from weft.parallel.mesh import TPAxis
from weft.parallel.tp.divide import tensor_parallel

_ATTENTION = "weft_passes"
_NOT_SHARED = RowSharing()
_TOKENS = 240  # tokens of the row that is run; bytes are proportional to tokens
_HEAD_TOKENS = 2048  # some tiles of a large vocabulary
_PRODUCTS = frozenset(
    ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward", "linear", "matmul")
)
_FREE_OPERATIONS = frozenset(
    ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "_unsafe_view", "lift_fresh")
)


@dataclass(frozen=True)
class Work:
    """One direction of a layer. bytes: read and written per token, without matmuls and attention. operations: launched
    by the host for a row, including matmuls. experts: the part of `bytes` in blocks of routers and experts that stay
    outside of the graphs of compiled layers."""

    bytes: float
    operations: int
    experts: float = 0.0


@dataclass(frozen=True)
class LayerPasses:
    """The passes of one decoder layer on a rank."""

    forward: Work
    backward: Work


class _Counted(TorchDispatchMode):
    """Counts operations, and the bytes of operations that are not matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in _FREE_OPERATIONS or func.namespace == "prim":
            return out
        self.operations += 1
        if name not in _PRODUCTS:
            self.bytes += sum(map(_bytes, tree_leaves((args, kwargs, out))))
        return out


def _bytes(value: Any) -> int:
    """Bytes that a pass over a tensor moves. An expanded tensor is read once."""
    if not isinstance(value, Tensor):
        return 0
    return min(value.numel() * value.element_size(), value.untyped_storage().nbytes())


class _Attention(torch.autograd.Function):
    """Replaces a kernel of ops/attention.py, whose time is counted by its FLOPs. It only produces shapes."""

    @staticmethod
    def forward(ctx: Any, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor) -> Tensor:
        ctx.save_for_backward(query_BHTD, key_BKTD, value_BKTE)
        batch, heads, tokens, _ = query_BHTD.shape
        # Token by token, in the layout of varlen attention, so that later operations need no copy.
        return query_BHTD.new_empty(batch, tokens, heads, value_BKTE.shape[3]).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def _attend(
    paths: float, module: nn.Module, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """paths: as in RowSharing."""
    if paths > 1:
        index = torch.empty(int(paths * key_BKTD.shape[2]), dtype=torch.int64, device=key_BKTD.device)
        key_BKTD, value_BKTE = (x.index_select(2, index) for x in (key_BKTD, value_BKTE))
    out: Tensor = _Attention.apply(query_BHTD, key_BKTD, value_BKTE)
    return out.transpose(1, 2), None


def layer_passes(
    config: PretrainedConfig, dtype: torch.dtype, shared: RowSharing = _NOT_SHARED, *, fused_norms: bool = False
) -> list[LayerPasses]:
    """The passes of each decoder layer of a rank, for a model computed in `dtype`. shared: how ranks of mesh.tp split a
    layer. fused_norms: the engine's decision for model.fused_norms. Of equally built layers, only one is run. Raises
    the error of a family that cannot run on meta."""
    AttentionInterface.register(_ATTENTION, partial(_attend, shared.paths))
    model = hf.build_meta(copy.deepcopy(config), dtype=dtype, attention=_ATTENTION).train()
    module = TrainModule(model)
    group_experts(module)
    firsts = keep_one_of_each_kind(module)
    if fused_norms:
        fuse_norms(module)
    if shared.tp > 1:
        ranks = MetaCommunicator(shared.tp)
        tensor_parallel(module, TPAxis(0, shared.tp, ranks, lambda _: ranks), model.config, sequence=shared.sequence)
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def keep(number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(number, (args, kwargs))

    hooks = [
        layer.register_forward_pre_hook(partial(keep, number), with_kwargs=True)
        for number, (_, layer) in enumerate(module.layers)
        if firsts[number] == number
    ]
    ids_BT = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    positions_BT = torch.arange(_TOKENS, device="meta")[None]
    with torch.no_grad(), GroupedProducts():
        module.base(input_ids=ids_BT, position_ids=positions_BT, use_cache=False)
    for hook in hooks:
        hook.remove()
    hidden = hides_routers(layer for _, layer in module.layers)
    by_layer = {number: _of_layer(module.layers[number][1], *call, hidden) for number, call in calls.items()}
    return [by_layer[first] for first in firsts]


def usual_passes(layers: int, hidden: int, tp: int) -> list[LayerPasses]:
    """The passes of layers that cannot be run: 240 and 530 bytes per token for each hidden state, in bf16, as for
    Qwen3-4B."""
    usual = LayerPasses(Work(240.0 * hidden / tp, 55), Work(530.0 * hidden / tp, 105))
    return [usual] * layers


def _of_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: bool) -> LayerPasses:
    """Runs the layer on its arguments, with gradients of its hidden states and weights. hidden: whether blocks of
    experts stay outside of graphs."""
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    blocks = expert_blocks(layer) if hidden else []
    hooks = [block.register_forward_pre_hook(lambda *call: calls.append(call), with_kwargs=True) for block in blocks]
    forward, backward = _run(layer, args, kwargs)
    for hook in hooks:
        hook.remove()
    of_blocks = [_run(*call) for call in calls]
    return LayerPasses(
        replace(forward, experts=sum(ahead.bytes for ahead, _ in of_blocks)),
        replace(backward, experts=sum(back.bytes for _, back in of_blocks)),
    )


def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Work, Work]:
    """The work of a module's forward and backward, whose gradients are the first of the module's weights."""
    module.zero_grad(set_to_none=True)
    args = _trained(args)
    if "hidden_states" in kwargs:
        kwargs = kwargs | {"hidden_states": _trained((kwargs["hidden_states"],))[0]}
    with GroupedProducts(), _Counted() as forward:
        out = module(*args, **kwargs)
    hidden: Tensor = out[0] if isinstance(out, tuple) else out
    upstream = torch.empty_like(hidden)
    with GroupedProducts(), _Counted() as backward:
        hidden.backward(upstream)
    return Work(forward.bytes / _TOKENS, forward.operations), Work(backward.bytes / _TOKENS, backward.operations)


def _trained(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a layer; the first are its hidden states."""
    first = args[0].detach().requires_grad_() if args and isinstance(args[0], Tensor) else None
    return (first, *args[1:]) if first is not None else tuple(args)


def head_passes(vocabulary: int, hidden: int, dtype: torch.dtype, *, trained: bool, entropy: bool) -> float:
    """Bytes that the head's readouts read and write per token and word of the vocabulary, forward and backward, on an
    accelerator. trained: whether the weight is trained. entropy: whether entropies are computed, as for rollouts."""
    simulation = Simulation("cuda")
    with simulation.running(), _Counted() as counted:
        states = torch.empty(_HEAD_TOKENS, hidden, dtype=dtype, requires_grad=True)
        weight = torch.empty(vocabulary, hidden, dtype=dtype, requires_grad=trained)
        targets = torch.empty(_HEAD_TOKENS, dtype=torch.long)
        direction = None if entropy else KnownGrad(torch.empty(_HEAD_TOKENS))
        logprob, _ = chunked_readouts(
            states, weight, None, targets, LogitTransform(), entropy=entropy, known_grad=direction
        )
        logprob.sum().backward()
    return counted.bytes / _HEAD_TOKENS / vocabulary
