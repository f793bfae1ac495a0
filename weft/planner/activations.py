"""Activation memory, from shapes alone: the model runs on the meta device, which stores nothing."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PretrainedConfig

from weft.models import hf
from weft.models.train_module import TrainModule
from weft.ops.communicator import MetaCommunicator
from weft.ops.context import repeats
from weft.parallel.mesh import Axis
from weft.parallel.tensor import tensor_parallel

_ATTENTION = "weft_shapes"
_TOKENS = 240  # of the row that is run; what is kept grows with the tokens


@dataclass(frozen=True)
class RowSharing:
    """Over how many ranks a row's work is divided: layers (tp), and a cut document (ring x ulysses). sequence: tokens
    between layers are divided over tp too."""

    tp: int = 1
    ring: int = 1
    ulysses: int = 1
    sequence: bool = False

    def keys(self, heads: int, query_heads: int) -> float:
        """Keys that attention stores, relative to the rank's own tokens. In a ring of n, a rank holds chunks i and 2 n
        - 1 - i of 2 n, whose queries see 2 n + 1 chunks together."""
        return repeats(heads, query_heads, self.ulysses) * (self.ring + 0.5 if self.ring > 1 else 1.0)


def saved_bytes(
    config: PretrainedConfig, tokens: int, dtype: torch.dtype, *, recompute: bool, shared: RowSharing = RowSharing()
) -> int:
    """Bytes that autograd stores for the layers on a rank with `tokens` tokens of a row, computed in `dtype`.

    recompute: as model.recompute=full; includes everything of the one layer that is recomputed. shared: the row is a
    part of one document. Excluded: weights, the head, masks (of kernels that build one, and of windows on CPU), and
    temporary memory of kernels. Raises whatever a family raises that cannot run on meta.
    """
    kept = _saved(config, dtype, shared, recompute=recompute)
    if recompute:
        kept += _saved(config, dtype, shared, recompute=False) // config.get_text_config().num_hidden_layers
    return kept * tokens // _TOKENS


def _saved(config: PretrainedConfig, dtype: torch.dtype, shared: RowSharing, *, recompute: bool) -> int:
    AttentionInterface.register(_ATTENTION, partial(_attend, shared))
    model = hf.build_meta(copy.deepcopy(config), dtype=dtype, attention=_ATTENTION).train()
    if recompute:
        hf.enable_recompute(model)
    module = TrainModule(model)
    if shared.tp > 1:
        ranks = MetaCommunicator(shared.tp)
        tensor_parallel(module, Axis(0, shared.tp, ranks, lambda _: ranks), model.config, sequence=shared.sequence)
    weights = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.UntypedStorage] = {}  # kept alive: another would get the number of one that is gone

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in weights:
            found[_storage(tensor)] = tensor.untyped_storage()
        return tensor

    ids_BT = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    positions_BT = torch.arange(_TOKENS, device="meta")[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _Grouped():
        out = module.base(input_ids=ids_BT, position_ids=positions_BT, use_cache=False)
    del out
    kept = sum(storage.nbytes() for storage in found.values())
    return kept if recompute else kept + _gathered(module, shared) * dtype.itemsize


def _gathered(module: TrainModule, shared: RowSharing) -> int:
    """Elements of other ranks' hidden states, which each mixer that carries state reads of a cut document."""
    hidden = int(module.get_submodule(module.facts.embedding).weight.shape[1])
    return (shared.ulysses - 1) * len(module.mixers) * hidden * _TOKENS


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Grouped(TorchFunctionMode):
    """Products of tokens with the weights of their experts, of any dtype: on meta, torch has them in bf16 alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("grouped_mm", "_grouped_mm"):
            return func(*args, **(kwargs or {}))
        return _GroupedProduct.apply(*args)


class _GroupedProduct(torch.autograd.Function):
    """[S, in], [experts, in, out] -> [S, out]."""

    @staticmethod
    def forward(ctx: Any, tokens_SI: Tensor, weight_EIO: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_SI, weight_EIO)
        return tokens_SI.new_empty(tokens_SI.shape[0], weight_EIO.shape[2])


def _attend(
    shared: RowSharing,
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTE: Tensor,
    mask: Any,
    **others: Any,
) -> tuple[Tensor, None]:
    seen = shared.keys(key_BKTD.shape[1], query_BHTD.shape[1])
    if seen > 1:
        key_BKTD, value_BKTE = (
            x.new_empty(*x.shape[:2], int(seen * x.shape[2]), x.shape[3]) for x in (key_BKTD, value_BKTE)
        )
    out: Tensor = _Attended.apply(query_BHTD, key_BKTD, value_BKTE)
    return out.transpose(1, 2), None


class _Attended(torch.autograd.Function):
    """Counts what the kernels of ops/attention.py keep: inputs, output and the logsumexp of each query."""

    @staticmethod
    def forward(ctx: Any, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTE: Tensor) -> Tensor:
        batch, heads, tokens, _ = query_BHTD.shape
        out = query_BHTD.new_empty(batch, heads, tokens, value_BKTE.shape[3])
        sums = query_BHTD.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query_BHTD, key_BKTD, value_BKTE, out, sums)
        return out
