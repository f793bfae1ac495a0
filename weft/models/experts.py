"""The forward of fused experts behind transformers' experts interface: dispatch, this rank's experts, combine.

T tokens, K experts chosen per token, S = T K rows, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models import hf
from weft.models.low_rank import LowRank
from weft.models.quantised import GroupedLinear, QuantisedWeight
from weft.ops.dispatch import ExpertPlacement, combine, dispatch, permuted, rows_of, sort_by_expert, sum_of_choices
from weft.ops.recompute import reuse_in_recompute
from weft.ops.swiglu import weighted_swiglu


def group_experts(module: nn.Module) -> None:
    """Make all fused experts below `module` run `experts_forward`, which takes 0.67 of the time of transformers'
    function on an H200 (docs/benchmarks/gpu.md, a layer of experts). Their config is a copy: small copies that are
    built from the model's, to check against, run transformers' function."""
    for child in module.modules():
        if hf.is_fused_experts(child):
            child.config = copy.copy(child.config)
            use_experts_forward(child)


def use_experts_forward(experts: Any) -> None:
    """Make `experts`, and all fused experts that share their config, run `experts_forward`."""
    hf.set_experts_function(experts, experts_forward)


def find_experts(module: nn.Module) -> dict[str, Any]:
    """Name -> experts module, for all inside `module` whose parameters are [experts, ., .]."""
    return {name: child for name, child in module.named_modules() if is_experts(child)}


def is_experts(module: Any) -> bool:
    """Whether the module holds all experts of a layer, in one tensor per projection."""
    return getattr(getattr(module, "down_proj", None), "ndim", 0) == 3


def expert_blocks(layer: nn.Module) -> list[nn.Module]:
    """The children of a decoder layer that contain experts: blocks of experts with their router, in most families."""
    return [child for child in layer.children() if find_experts(child)]


def hides_routers(layers: Iterable[nn.Module]) -> bool:
    """Whether experts and routers of these layers stay outside of the graphs when the layers are compiled: a block of
    each layer contains both. False for a layer that calls its experts itself (gemma4), and without known experts."""
    names = [name for layer in layers for name in find_experts(layer)]
    return bool(names) and all("." in name for name in names)


def hide(block: Any) -> None:
    """Hide a block and its hooks from torch.compile: graphs end before it and begin again after it.

    torch compiles hooks into a graph and ignores hooks that are registered later (skip_nnmodule_hook_guards), but
    choices of experts are read and replaced by such hooks.
    """
    kind: Any = type(block)
    block.__class__ = _hidden(kind)


@cache
def _hidden(kind: Any) -> Any:
    """A class, not a function per module, because compiled layers share graphs only if their modules have the same
    class."""

    @torch.compiler.disable
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.__call__(self, *args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__call__": call, **names})


def experts_forward(experts: Any, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted sum of the outputs of each token's chosen experts, [T, H].

    Rows are sorted by expert, so that each projection, and each adapter matrix (`lora_NAME`), is one grouped matmul.
    Router weights multiply the input of the last projection, not its output. The input is narrower in most families,
    and the gradient of the weights then does not need the output or the exchange again.
    """
    axis: ExpertPlacement | None = getattr(experts, "weft_axis", None)
    sort = partial(sort_by_expert, chosen_TK, experts.num_experts)
    # A recomputed layer exchanges the rows that its forward has exchanged, whose counts it keeps.
    order_S, ends_E = sort() if axis is None else reuse_in_recompute(sort)
    chosen = chosen_TK.shape[1]
    rows, weights_S = rows_of(hidden_TH, order_S, chosen), permuted(weights_TK.reshape(-1), order_S)
    if axis is None:
        rows = _own_experts(experts, rows, weights_S, ends_E)
    else:
        sent = dispatch(rows, ends_E, axis, weights_S)
        assert sent.weights_R is not None
        rows = combine(_own_experts(experts, sent.rows_RH, sent.weights_R, sent.ends), sent, axis)
    return sum_of_choices(rows, order_S, chosen).to(hidden_TH.dtype)


def _own_experts(experts: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Outputs of this rank's experts for rows sorted by expert, times the rows' weights. ends: where each expert's rows
    end."""
    number = torch.arange(len(rows), device=rows.device)
    expert = torch.searchsorted(ends, number, right=True) if experts.has_bias else None
    between = _project(experts, "gate_up_proj" if experts.has_gate else "up_proj", rows, expert, ends)
    if hf.is_swiglu(experts):
        between = weighted_swiglu(between, weights)
    else:
        between = (experts._apply_gate if experts.has_gate else experts.act_fn)(between) * weights[:, None]
    share = weights * getattr(experts, "weft_bias_share", 1.0)
    return _project(experts, "down_proj", between.to(rows.dtype), expert, ends, share)


def _project(
    experts: Any, name: str, rows: Tensor, expert: Tensor | None, ends: Tensor, bias_shares: Tensor | None = None
) -> Tensor:
    """Each row times its expert's matrix `name`, plus the adapter's output. bias_shares: of the rows; None: 1."""
    weight = getattr(experts, name)
    bias = None if expert is None else getattr(experts, f"{name}_bias")[expert]
    if bias is not None and bias_shares is not None:
        bias = (bias * bias_shares[:, None]).to(rows.dtype)
    if isinstance(weight, QuantisedWeight):
        out = GroupedLinear.apply(rows, weight, ends, bias, experts.is_transposed)
    else:
        out = grouped_linear(rows, weight, ends, bias, experts.is_transposed)
    adapter: LowRank | None = getattr(experts, f"lora_{name}", None)
    if adapter is None or not adapter.switch.on:
        return out
    count = len(weight)
    a_Eri = adapter.A.view(count, -1, adapter.A.shape[1])
    b_Eor = adapter.B.view(len(adapter.B), -1, count).permute(2, 0, 1)
    missing = -a_Eri.shape[1] % (16 // rows.element_size())  # grouped matmuls need rows of a multiple of 16 bytes
    a_Eri, b_Eor = F.pad(a_Eri, (0, 0, 0, missing)), F.pad(b_Eor, (0, missing)).contiguous()
    inner = grouped_linear(rows, a_Eri, ends, None, False) * adapter.scale
    return out + grouped_linear(inner, b_Eor, ends, None, False).to(out.dtype)


# Types of devices whose grouped matmul does not write the gradients of experts without rows (weft/upstream.py).
# engine/selfcheck/device.py fills it, before a model is built.
UNWRITTEN = set[str]()


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """hf.grouped_linear, with gradients of 0 for experts without rows on every device."""
    if rows.device.type in UNWRITTEN:
        weight = _ZeroWithoutRows.apply(weight, ends)
    return hf.grouped_linear(rows, weight, ends, bias, transposed)


class _ZeroWithoutRows(torch.autograd.Function):
    """Identity in forward. In backward the gradient of experts without rows becomes 0, because some kernels leave it
    uninitialised."""

    @staticmethod
    def forward(ctx: Any, weight_EXY: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(ends_E)
        return weight_EXY.view_as(weight_EXY)

    @staticmethod
    def backward(ctx: Any, grad_EXY: Tensor) -> tuple[Tensor, None]:
        (ends_E,) = ctx.saved_tensors
        rows_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        return torch.where(rows_E[:, None, None] > 0, grad_EXY, 0.0), None  # no multiplication: it may hold NaN
