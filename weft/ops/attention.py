"""Attention within documents: one function for every HuggingFace family, and the table of kernels behind it.

Shapes: see attention_call.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.launch.simulated import device_capability, device_kind, is_simulated
from weft.ops.attention_call import BOUNDS_ARGUMENT, Bounds, Call, Traits
from weft.ops.context import attend_in_context
from weft.ops.decode import one_token
from weft.ops.exact_attention import attend_exactly
from weft.ops.flash4 import FLASH4, flash4_attention
from weft.ops.per_document import per_document
from weft.ops.recompute import compiled_kernel
from weft.ops.shapes import shapes_of_flash
from weft.ops.tree_attention import attend_trees, suits_trees
from weft.versions import installed_version, varlen_attention

EXACT = "exact"  # used instead of the table's kernels with rl.on_policy=exact


# ---------------------------------------------------------------- kernels: each returns [B, H, T, E]


def varlen(call: Call) -> Tensor:
    """torch's variable-length flash attention (CUDA, 16-bit): one kernel for all documents of the row."""
    return _in_one_call(call)


def flash4(call: Call) -> Tensor:
    """The same by the package flash-attn-4."""
    return _in_one_call(call, flash4_attention)


def _in_one_call(call: Call, kernel: Callable[..., Tensor] | None = None) -> Tensor:
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE))
    cumulative, longest = _cumulative(call)
    cu_keys, longest_key = cumulative, longest
    if call.bounds.cu_keys is not None:
        cu_keys, longest_key = call.bounds.cu_keys, call.bounds.longest_keys
    left_window = -1 if call.window is None else call.window - 1
    window = (left_window, 0)
    out = flash_rows(query, key, value, cumulative, cu_keys, longest, longest_key, call.scaling, window, kernel)
    return out.unflatten(0, (call.query_BHTD.shape[0], -1)).transpose(1, 2)


def flash_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    longest: int,
    longest_key: int,
    scale: float,
    window: tuple[int, int],
    kernel: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Flash attention of documents laid end to end: [tokens, H, E] from tensors [tokens, heads, width].

    cu_queries, cu_keys: cumulative lengths of the documents, int32. window: tokens that a token sees to its left and to
    its right; -1: unlimited. kernel: in place of torch's varlen_attn, with its arguments. It needs one head width for
    queries, keys and values, a multiple of 8; heads are padded with zeros, which do not change the result.
    """
    width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    out: Tensor = (kernel or varlen_attention())(
        q, k, v, cu_queries, cu_keys, longest, longest_key, scale=scale, window_size=window
    )
    return out[..., : value.shape[-1]]


def _cumulative(call: Call) -> tuple[Tensor, int]:
    """(cumulative lengths over the flattened batch, the longest). Padding of a padded entry counts as part of it."""
    bounds = call.bounds
    if not bounds.padded:
        assert bounds.cu_seqlens is not None
        return bounds.cu_seqlens, bounds.longest
    batch, length = call.query_BHTD.shape[0], call.query_BHTD.shape[2]
    if "cumulative" not in bounds.cache:
        device = call.query_BHTD.device
        bounds.cache["cumulative"] = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    return bounds.cache["cumulative"], length


def flex(call: Call) -> Tensor:
    """torch's flex attention (CUDA, compiled), which supports soft-caps and sinks, unlike flash kernels."""
    from weft.ops.flex import flex_documents

    with compiled_kernel():
        return flex_documents(call)


@dataclass(frozen=True)
class Kernel:
    """A kernel and the calls that it supports. any_scores: supports soft-caps, sinks, and tokens that see later ones.
    widths: supported head widths of queries, keys and values. capability: the least of a CUDA device. package: that has
    to be installed."""

    run: Callable[[Call], Tensor]
    cuda_only: bool
    needs_16_bit: bool
    any_scores: bool
    widths: range = range(1, 2**16)
    capability: tuple[int, int] = (0, 0)
    package: str = ""

    def suits(self, device: torch.device, dtype: torch.dtype, traits: Traits) -> bool:
        return (
            (not self.cuda_only or (device_kind(device) == "cuda" and device_capability(device) >= self.capability))
            and (dtype in (torch.bfloat16, torch.float16) or not self.needs_16_bit)
            and (self.any_scores or not (traits.softcap or traits.sinks or traits.images))
            and traits.width in self.widths
            and traits.value_width in self.widths
            and (not self.package or bool(installed_version(self.package)))
        )

    def remedy(self, device: torch.device, dtype: torch.dtype, calls: Iterable[Traits]) -> str:
        """What to do, beside setting another kernel, so that it supports such calls: the beginning of a sentence."""
        with_package = replace(self, package="")
        would_do = self.package and all(with_package.suits(device, dtype, traits) for traits in calls)
        return f"Install {self.package}, or set" if would_do else "Set"


# In order of preference: `auto` takes the first that suits the call. Flash kernels begin with Ampere, as do flex's
# tiles, and support widths up to 256; flash-attn-4's with Hopper, and on Blackwell they end at 128. flex needs 16 or
# more; beyond 256 its tiles do not fit every GPU's shared memory, while torch's memory-efficient kernel, which
# per_document runs there, takes any width.
_AMPERE, _HOPPER = (8, 0), (9, 0)
# No name has "flash" in it: transformers would look for a package of its own.
KERNELS: dict[str, Kernel] = {
    "fa4": Kernel(
        flash4,
        cuda_only=True,
        needs_16_bit=True,
        any_scores=False,
        widths=range(1, 129),
        capability=_HOPPER,
        package=FLASH4,
    ),
    "varlen": Kernel(
        varlen, cuda_only=True, needs_16_bit=True, any_scores=False, widths=range(1, 257), capability=_AMPERE
    ),
    "flex": Kernel(flex, cuda_only=True, needs_16_bit=True, any_scores=True, widths=range(16, 257), capability=_AMPERE),
    "per_document": Kernel(per_document, cuda_only=False, needs_16_bit=False, any_scores=True),
}


def choose(preference: str, device: torch.device, dtype: torch.dtype, traits: Traits) -> str:
    """The kernel for calls of this kind: the preferred one or, for `auto`, the first that supports them. Raises
    ValueError if the preferred one does not."""
    if preference == "auto":
        return next(name for name, kernel in KERNELS.items() if kernel.suits(device, dtype, traits))
    kernel = KERNELS[preference]
    if not kernel.suits(device, dtype, traits):
        raise ValueError(
            f"model.attention={preference} cannot serve a call in {dtype} on {device.type} with {traits}. "
            f"{kernel.remedy(device, dtype, [traits])} model.attention=auto."
        )
    return preference


# ---------------------------------------------------------------- the function registered with transformers

# model_type -> function (module, query, kwargs) -> (query, bounds), for families whose calls need more than
# HuggingFace's arguments say.
Adapter = Callable[[nn.Module, Tensor, dict[str, Any]], tuple[Tensor, Bounds | None]]
ADAPTERS: dict[str, Adapter] = {}
_watching: list[Callable[[Call], None]] = []


@contextmanager
def watched(look: Callable[[Call], None]) -> Iterator[None]:
    """Call `look` with every attention call inside."""
    _watching.append(look)
    try:
        yield
    finally:
        _watching.remove(look)


def attend(
    preference: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: returns ([B, T, H, E], None). Raises RuntimeError without bounds."""
    bounds: Bounds | None = kwargs.get(BOUNDS_ARGUMENT)
    adapter = ADAPTERS.get(getattr(getattr(module, "config", None), "model_type", ""))
    if adapter is not None:
        query, bounds = adapter(module, query, kwargs)
    if bounds is None:
        raise RuntimeError(
            f"{type(module).__name__}: document bounds did not reach attention, so documents would see each other. "
            "This family is not supported packed; please report it."
        )
    scaling = kwargs.get("scaling")
    call = Call(
        query, key, value, bounds,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=kwargs.get("sliding_window"), softcap=kwargs.get("softcap"), sinks_H=kwargs.get("s_aux"),
    )  # fmt: skip
    for look in _watching:
        look(call)
    run = partial(attend_by_paths, _kernel(preference, call))
    out = run(call) if bounds.context is None else attend_in_context(call, bounds.context, run)
    return out.transpose(1, 2).contiguous(), None


def attend_by_paths(run: Callable[[Call], Tensor], call: Call) -> Tensor:
    """[B, H, T, E]: a kernel's result where documents may share their beginnings. The queries of a segment see the keys
    of its path and its own, gathered here; the gather's backward adds up what siblings owe to a shared token."""
    segments = call.bounds.segments
    if segments is None:
        return run(call)
    if run is per_document and suits_trees(call):
        return attend_trees(call)
    device = call.key_BKTD.device
    key, value = (x.index_select(2, segments.key_tokens(device)) for x in (call.key_BKTD, call.value_BKTE))
    return run(replace(call, key_BKTD=key, value_BKTE=value, bounds=call.bounds.by_paths(device)))


def _kernel(preference: str, call: Call) -> Callable[[Call], Tensor]:
    if preference == EXACT:
        assert call.bounds.last_seen is None, "rl.on_policy=exact has no attention for images that look ahead"
        return attend_exactly
    if call.bounds.past is not None:
        return one_token
    kernel = KERNELS[choose(preference, call.query_BHTD.device, call.query_BHTD.dtype, call.traits)]
    return shapes_of_flash if is_simulated() and kernel.cuda_only else kernel.run
