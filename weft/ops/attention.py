"""Attention within documents: one function for every HuggingFace family, and the table of its kernels.

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

EXACT = "exact"  # with rl.on_policy=exact, replaces the kernels of the table


# ---------------------------------------------------------------- kernels: each returns [B, H, T, E]


def varlen(call: Call) -> Tensor:
    """torch's variable-length flash attention (CUDA, 16-bit): one kernel call for all documents of the row."""
    return _in_one_call(call)


def flash4(call: Call) -> Tensor:
    """Variable-length attention from the package flash-attn-4: one kernel call for all documents of the row."""
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

    cu_queries, cu_keys: cumulative lengths of the documents, int32. longest, longest_key: the largest numbers of
    queries and keys of a document. window: number of tokens that a token sees to its left and to its right; -1 is
    unlimited. kernel: a replacement for torch's varlen_attn, with the same arguments.

    Kernels need equal head widths for queries, keys and values, a multiple of 8. Heads are padded with zeros, which do
    not change the result.
    """
    width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    out: Tensor = (kernel or varlen_attention())(
        q, k, v, cu_queries, cu_keys, longest, longest_key, scale=scale, window_size=window
    )
    return out[..., : value.shape[-1]]


def _cumulative(call: Call) -> tuple[Tensor, int]:
    """(cumulative lengths over the flattened batch, the largest length). In a padded batch, lengths include padding."""
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
    """torch's flex attention (CUDA, compiled). Unlike flash kernels it supports soft-caps and sinks."""
    from weft.ops.flex import flex_documents

    with compiled_kernel():
        return flex_documents(call)


@dataclass(frozen=True)
class Kernel:
    """A kernel and the calls that it supports.

    any_scores: supports soft-caps, sinks, and tokens that see later tokens. widths: supported head widths of queries,
    keys and values. capability: the lowest supported CUDA compute capability. package: a package that it needs.
    """

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
        """The beginning of a sentence that advises to set another kernel: "Install PACKAGE, or set" if the package is
        all that is missing, else "Set"."""
        with_package = replace(self, package="")
        package_suffices = self.package and all(with_package.suits(device, dtype, traits) for traits in calls)
        return f"Install {self.package}, or set" if package_suffices else "Set"


# In order of preference: `auto` selects the first kernel that supports the call. Flash kernels and flex's tiles need
# Ampere or later; flash kernels support widths up to 256. flash-attn-4 needs Hopper or later, and on Blackwell it
# supports widths up to 128. flex needs a width of at least 16. Above 256 flex's tiles do not fit every GPU's shared
# memory; per_document then runs torch's memory-efficient kernel, which supports any width.
_AMPERE, _HOPPER = (8, 0), (9, 0)
# No name may contain "flash": transformers would then require its flash-attention package.
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
    """The name of the kernel for calls with these traits. preference: a name in KERNELS, or `auto` for the first kernel
    that supports them. Raises ValueError if the preferred kernel does not support them."""
    if preference == "auto":
        return next(name for name, kernel in KERNELS.items() if kernel.suits(device, dtype, traits))
    kernel = KERNELS[preference]
    if not kernel.suits(device, dtype, traits):
        raise ValueError(
            f"model.attention={preference} does not support attention in {dtype} on {device.type} with {traits}. "
            f"{kernel.remedy(device, dtype, [traits])} model.attention=auto."
        )
    return preference


# ---------------------------------------------------------------- the function registered with transformers

# model_type -> function (module, query, kwargs) -> (query, bounds), for families whose attention calls must be changed
# because HuggingFace's arguments do not describe them fully.
Adapter = Callable[[nn.Module, Tensor, dict[str, Any]], tuple[Tensor, Bounds | None]]
ADAPTERS: dict[str, Adapter] = {}
_watching: list[Callable[[Call], None]] = []


@contextmanager
def watched(look: Callable[[Call], None]) -> Iterator[None]:
    """A context in which every attention call is also passed to `look`."""
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
    """The attention function that weft registers with transformers. Returns ([B, T, H, E], None).

    preference: a name in KERNELS, `auto`, or EXACT. Raises RuntimeError if the bounds of documents do not arrive.
    """
    bounds: Bounds | None = kwargs.get(BOUNDS_ARGUMENT)
    adapter = ADAPTERS.get(getattr(getattr(module, "config", None), "model_type", ""))
    if adapter is not None:
        query, bounds = adapter(module, query, kwargs)
    if bounds is None:
        raise RuntimeError(
            f"{type(module).__name__}: the bounds of documents did not reach attention, so documents would see each "
            "other. This family cannot be trained with packed rows; please report it."
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
    """[B, H, T, E]: the result of kernel `run` for a row in which documents may share prefixes (ops/segments.py).

    The queries of a segment see the keys of its path and of the segment itself. These keys are gathered here. The
    backward of the gather sums the gradients that all children give to a shared token.
    """
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
        assert call.bounds.last_seen is None, "rl.on_policy=exact does not support image tokens that see later tokens"
        return attend_exactly
    if call.bounds.past is not None:
        return one_token
    kernel = KERNELS[choose(preference, call.query_BHTD.device, call.query_BHTD.dtype, call.traits)]
    return shapes_of_flash if is_simulated() and kernel.cuda_only else kernel.run
