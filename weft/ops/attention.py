"""Attention that keeps documents apart: one function for every HuggingFace family, and the kernels behind it.

Shapes: B batch, T tokens of a row, H query heads, K key heads (H a multiple of K), D head width, E value width.
A row is packed (B = 1, documents end to end) or apart (documents right-padded, one per batch entry). Bounds travel
as the forward argument `doc_bounds`; the row's own mask is never trusted, because HuggingFace's is wrong for some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.ops.decode import one_token
from weft.versions import varlen_attention

BOUNDS_ARGUMENT = "doc_bounds"
EXACT = "exact"  # in place of a kernel of the table: rl.on_policy=exact


@dataclass(eq=False)
class Bounds:
    """Where the documents of a row begin and end.

    lengths: tokens of each document. apart: one document per batch entry, right-padded, instead of end to end.
    cu_seqlens: [documents + 1] int32 on the row's device, for kernels that want it there. seen: attention calls
    that received these bounds, so that a check can count them. cache: what a kernel derives once per row.
    past: where generation goes on, [B] tokens before the one of each entry; keys and values are then those of a cache.
    even: all of them are the same.
    """

    lengths: tuple[int, ...]
    apart: bool = False
    cu_seqlens: Tensor | None = None
    seen: int = 0
    cache: dict[Any, Any] = field(default_factory=dict)
    past: Tensor | None = None
    even: bool = False

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @staticmethod
    def packed(lengths: tuple[int, ...], device: torch.device) -> Bounds:
        """Bounds of a packed row; cumulative lengths go to the device only where a kernel reads them there."""
        cumulative = None
        if device.type != "cpu":
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            cumulative = ends.pin_memory().to(device, non_blocking=True)
        return Bounds(lengths, cu_seqlens=cumulative)


@dataclass(frozen=True, order=True)
class Traits:
    """What attention calls of one kind ask of a kernel beyond causality. width: of queries and keys, per head."""

    width: int
    value_width: int
    grouped: bool = False  # fewer key heads than query heads
    window: bool = False
    softcap: bool = False
    sinks: bool = False

    @property
    def names(self) -> list[str]:
        return [name for name in ("window", "softcap", "sinks") if getattr(self, name)]

    def __str__(self) -> str:
        widths = f"{self.width}" if self.value_width == self.width else f"{self.width}/{self.value_width}"
        return ", ".join([f"heads {widths} wide", *(["grouped"] if self.grouped else []), *self.names])


@dataclass(frozen=True)
class Call:
    """One attention call: tensors as HuggingFace passes them, keys and values not repeated."""

    query_BHTD: Tensor
    key_BKTD: Tensor
    value_BKTE: Tensor
    bounds: Bounds
    scaling: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks_H is None

    @property
    def traits(self) -> Traits:
        heads, width = self.query_BHTD.shape[1], self.query_BHTD.shape[3]
        return Traits(
            width, self.value_BKTE.shape[3], heads != self.key_BKTD.shape[1],
            self.window is not None, self.softcap is not None, self.sinks_H is not None,
        )  # fmt: skip

    def windowed(self, length: int) -> bool:
        return self.window is not None and self.window < length


# ---------------------------------------------------------------- kernels: each returns [B, H, T, E]


def per_document(call: Call) -> Tensor:
    """Each document by itself: the truth in fp32, and on CPU the fastest, because no work crosses documents.

    Neighbours of one length are one batch, which rows have many of, because their documents are sorted (plan_step).
    """
    if call.bounds.apart:
        return _one(call, call.query_BHTD, call.key_BKTD, call.value_BKTE)
    runs = [(length, len(list(same))) for length, same in groupby(call.bounds.lengths)]
    tokens = [length * count for length, count in runs]
    split = [x.split(tokens, dim=2) for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE)]
    found = []
    for (_, count), parts in zip(runs, zip(*split, strict=True), strict=True):
        out = _one(call, *(part[0].unflatten(1, (count, -1)).transpose(0, 1) for part in parts))
        found.append(out.transpose(1, 2).flatten(0, 1))
    return (found[0] if len(found) == 1 else torch.cat(found))[None].transpose(1, 2)


def _one(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if call.plain and not call.windowed(q.shape[2]):
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=call.scaling)
    return _explicit(call, q, k, v)


def _explicit(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(softcap(q k^T scale) + mask, sinks) v, written out; the softmax in at least fp32."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    scores = q @ k.transpose(2, 3) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    hidden = distance < 0
    if call.window is not None:
        hidden = hidden | (distance >= call.window)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(hidden, float("-inf"))
    if call.sinks_H is not None:
        sinks = call.sinks_H.to(scores.dtype).reshape(1, -1, 1, 1).expand(q.shape[0], -1, length, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(v.dtype) @ v


def varlen(call: Call) -> Tensor:
    """torch's variable-length flash attention (CUDA, 16-bit): one kernel for all documents of the row.

    It knows one width for all three, a multiple of 8: zeros behind them change no score, and come out as zeros.
    """
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (call.query_BHTD, call.key_BKTD, call.value_BKTE))
    width = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    cumulative, longest = _cumulative(call)
    left = -1 if call.window is None else call.window - 1
    out: Tensor = varlen_attention()(
        q, k, v, cumulative, cumulative, longest, longest, scale=call.scaling, window_size=(left, 0)
    )
    return out[..., : value.shape[-1]].unflatten(0, (call.query_BHTD.shape[0], -1)).transpose(1, 2)


def _cumulative(call: Call) -> tuple[Tensor, int]:
    """Cumulative lengths over the flattened batch; entries that are apart keep their padding as part of them."""
    bounds = call.bounds
    if not bounds.apart:
        assert bounds.cu_seqlens is not None
        return bounds.cu_seqlens, bounds.longest
    batch, length = call.query_BHTD.shape[0], call.query_BHTD.shape[2]
    if "cumulative" not in bounds.cache:
        device = call.query_BHTD.device
        bounds.cache["cumulative"] = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
    return bounds.cache["cumulative"], length


def flex(call: Call) -> Tensor:
    """torch's flex attention (CUDA, compiled): soft-caps and sinks, which flash kernels do not know."""
    from weft.ops.flex import flex_documents

    return flex_documents(call)


@dataclass(frozen=True)
class Kernel:
    """A kernel and the calls it is right for. widths: of queries, keys and values, per head."""

    run: Callable[[Call], Tensor]
    cuda_only: bool
    needs_16_bit: bool
    softcap_and_sinks: bool
    widths: range = range(1, 2**16)

    def suits(self, device: torch.device, dtype: torch.dtype, traits: Traits) -> bool:
        return (
            (device.type == "cuda" or not self.cuda_only)
            and (dtype in (torch.bfloat16, torch.float16) or not self.needs_16_bit)
            and (self.softcap_and_sinks or not (traits.softcap or traits.sinks))
            and traits.width in self.widths
            and traits.value_width in self.widths
        )


# In order of preference: `auto` takes the first that suits the call. Flash kernels end at a width of 256. flex begins
# at 16; beyond 256 its tiles do not fit every GPU's shared memory, and torch's memory-efficient kernel, which
# per_document runs there, takes any width.
KERNELS: dict[str, Kernel] = {
    "varlen": Kernel(varlen, cuda_only=True, needs_16_bit=True, softcap_and_sinks=False, widths=range(1, 257)),
    "flex": Kernel(flex, cuda_only=True, needs_16_bit=True, softcap_and_sinks=True, widths=range(16, 257)),
    "per_document": Kernel(per_document, cuda_only=False, needs_16_bit=False, softcap_and_sinks=True),
}


def choose(preference: str, device: torch.device, dtype: torch.dtype, traits: Traits) -> str:
    """The kernel for calls of this kind: the one asked for, or the first that suits them."""
    if preference == "auto":
        return next(name for name, kernel in KERNELS.items() if kernel.suits(device, dtype, traits))
    if not KERNELS[preference].suits(device, dtype, traits):
        raise ValueError(
            f"model.attention={preference} cannot serve a call in {dtype} on {device.type} with {traits}. "
            "Set model.attention=auto."
        )
    return preference


# ---------------------------------------------------------------- the function registered with transformers

# model_type -> what to do to a call of a family that HuggingFace's arguments do not fully describe.
Adapter = Callable[[nn.Module, Tensor, dict[str, Any]], tuple[Tensor, Bounds | None]]
ADAPTERS: dict[str, Adapter] = {}
_watching: list[Callable[[Call], None]] = []


@contextmanager
def watched(look: Callable[[Call], None]) -> Iterator[None]:
    """Meanwhile `look` is shown every call."""
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
    """transformers' attention function: returns ([B, T, H, E], None). Raises where the bounds did not arrive."""
    bounds: Bounds | None = kwargs.get(BOUNDS_ARGUMENT)
    adapter = ADAPTERS.get(getattr(getattr(module, "config", None), "model_type", ""))
    if adapter is not None:
        query, bounds = adapter(module, query, kwargs)
    if bounds is None:
        raise RuntimeError(
            f"{type(module).__name__}: document bounds did not reach attention, so documents would see each other. "
            "This family is not supported packed; please report it."
        )
    bounds.seen += 1
    scaling = kwargs.get("scaling")
    call = Call(
        query, key, value, bounds,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=kwargs.get("sliding_window"), softcap=kwargs.get("softcap"), sinks_H=kwargs.get("s_aux"),
    )  # fmt: skip
    for look in _watching:
        look(call)
    return _kernel(preference, call)(call).transpose(1, 2).contiguous(), None


def _kernel(preference: str, call: Call) -> Callable[[Call], Tensor]:
    if preference == EXACT:
        from weft.ops.exact_attention import attend_exactly

        return attend_exactly
    if call.bounds.past is not None:
        return one_token
    return KERNELS[choose(preference, call.query_BHTD.device, call.query_BHTD.dtype, call.traits)].run


def register() -> None:
    """Register `weft_auto`, `weft_per_document`, ... with transformers. Safe to call again."""
    from weft.models import hf

    for preference in ("auto", EXACT, *KERNELS):
        hf.register_attention(f"weft_{preference}", partial(attend, preference))


def stay_out_of_graphs() -> None:
    """Keep torch.compile from tracing attention, whose documents have other lengths in every row; kernels that are
    compiled themselves (flex) remain so."""
    from weft.models import hf

    for preference in ("auto", *KERNELS):
        hf.register_attention(f"weft_{preference}", torch.compiler.disable(partial(attend, preference)))
