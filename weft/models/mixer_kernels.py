"""Kernels of causal-conv1d, flash-linear-attention (fla) and mamba-ssm that accept sequence boundaries, so a mixer runs
on a packed row at once. torch's code, document by document (ops/by_document.py), is the reference.

At import, transformers selects the function that a mixer calls: a package's if installed, else torch's, which ignores
documents. The decorated function passes on only the arguments that the selected function has: a version without
`seq_idx` would drop it silently. So this file inspects the decorated functions and requires the argument. Packages'
functions always need a GPU, and compile for minutes; `dispatch_by_device` runs them only on GPUs and in 16 bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from weft.ops.attention_call import Bounds

DEVICES = ("cuda",)
_DTYPES = (torch.bfloat16, torch.float16)  # in fp32, torch's code is the reference
# Kernel -> (its package on PyPI, the argument with the beginnings of documents).
KERNELS = {
    "causal_conv1d_fn": ("causal-conv1d", "seq_idx"),
    "chunk_gated_delta_rule": ("flash-linear-attention", "cu_seqlens"),
    "chunk_kda": ("flash-linear-attention", "cu_seqlens"),
    "mamba_chunk_scan_combined": ("mamba-ssm", "seq_idx"),
}
# All kernels of a mixer that pass state from token to token. Others, such as those of Mamba 1, ignore documents.
_MIXERS = (
    frozenset(("causal_conv1d_fn", "chunk_gated_delta_rule")),
    frozenset(("causal_conv1d_fn", "chunk_kda")),
    frozenset(("causal_conv1d_fn", "mamba_chunk_scan_combined")),
    frozenset(("causal_conv1d_fn",)),
)
# For single tokens in generation, never for a packed row.
_OF_TOKENS = frozenset(
    ("causal_conv1d_update", "selective_state_update", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda")
)
# Kernels for training that compute everything from the first projection's output to the last projection's. They read
# weights instead of calling norm and projection, so they would skip adapters; and mamba2's norm differs from
# transformers'.
FUSED = frozenset(("mamba_split_conv1d_scan_combined", "mamba_inner_fn"))
# RMS of the difference of a document by kernels and by torch, relative to the row's.
TOLERANCES = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class MixerKernels:
    """The kernels of a class of mixers. packages: name and version of each. arguments: of the mixer's forward, with the
    sequence boundaries. missing: the reason why the mixer runs document by document; "" if it does not."""

    packages: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    missing: str = ""

    def arguments_for(self, bounds: Bounds, device: torch.device) -> dict[str, Any]:
        """The arguments for a row."""
        documents = _documents(bounds, device)
        return {name: documents[name] for name in self.arguments}


def functions_of(mixer: type[nn.Module]) -> dict[str, Any]:
    """Name in the mixer's module -> function, of all functions that its forward may call."""
    forward = inspect.unwrap(mixer.forward)
    called = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    return {name: value for name, value in called.items() if inspect.isfunction(value) or isinstance(value, nn.Module)}


def kernels_of(mixer: type[nn.Module]) -> MixerKernels:
    """The kernels that a class of mixers calls in this process; searched once."""
    if mixer not in _KERNELS:
        _KERNELS[mixer] = _kernels_of(mixer)
    return _KERNELS[mixer]


_KERNELS: dict[type[nn.Module], MixerKernels] = {}
_FUSED: dict[type[nn.Module], bool] = {}


def _kernels_of(mixer: type[nn.Module]) -> MixerKernels:
    forward = inspect.unwrap(mixer.forward)
    chosen = choices_of(mixer)
    needed = chosen.keys() - _OF_TOKENS - FUSED
    if needed not in _MIXERS or (len(needed) == 1 and not mixer.__name__.endswith("ShortConv")):
        return MixerKernels(missing="no kernels accept sequence boundaries")
    packages = dict[str, None]()
    for name in sorted(needed):
        package, argument = KERNELS[name]
        if not chosen[name]["is_new_implementation"]:
            return MixerKernels(missing=f"{package} is not installed, or cannot be imported")
        packages[f"{package} {_version(package)}"] = None
        if argument not in chosen[name]["applicable_params"]:
            return MixerKernels(missing=f"{name} of {package} {_version(package)} has no argument {argument}")
    arguments = ["seq_idx"]
    if needed & {"chunk_gated_delta_rule", "chunk_kda"}:
        # Some mixers take fla's argument by the name that attention has for it.
        constants = forward.__code__.co_consts
        arguments += ["cu_seq_lens_q" if "cu_seq_lens_q" in constants else "cu_seqlens", "cu_seqlens_cpu"]
    parameters = inspect.signature(forward).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if lacking := [name for name in arguments if not any_name and name not in parameters]:
        return MixerKernels(missing=f"transformers' {mixer.__name__} has no argument {lacking[0]}")
    return MixerKernels(tuple(packages), tuple(arguments))


def describe_kernels(mixer: nn.Module, device: torch.device, dtype: torch.dtype) -> str:
    """A description of how the mixer runs packed rows in `dtype`."""
    kernels = kernels_of(type(mixer))
    if device.type not in DEVICES:
        return "document by document"
    if dtype not in _DTYPES:
        return f"document by document ({str(dtype).removeprefix('torch.')} has no kernels)"
    if kernels.missing:
        return f"document by document ({kernels.missing})"
    return f"by {', '.join(kernels.packages)}, tried in the first step"


def choice_of(function: Callable[..., Any]) -> Mapping[str, Any] | None:
    """The choice of transformers' decorator for functions with kernels: names of its closure; None for other
    functions."""
    closure = inspect.getclosurevars(_inner(function)).nonlocals
    return (
        closure
        if all(name in closure for name in ("func_name", "is_new_implementation", "applicable_params"))
        else None
    )


def choices_of(mixer: type[nn.Module]) -> dict[str, Mapping[str, Any]]:
    """Name of a kernel -> its choice_of, of all that the mixer's forward may call."""
    choices = (choice_of(function) for function in functions_of(mixer).values())
    return {choice["func_name"]: choice for choice in choices if choice is not None}


def _inner(function: Any) -> Any:
    """The function under transformers' decorator, without the wrappers of weft or of the package `kernels` (which makes
    a module whose forward calls `func`)."""
    function = getattr(function, "weft_chosen", function)
    if not isinstance(function, nn.Module):
        return function
    forward = type(function).forward
    return inspect.getclosurevars(forward).nonlocals.get("func", forward)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _documents(bounds: Bounds, device: torch.device) -> dict[str, Tensor]:
    """Sequence boundaries in the packages' formats, computed once per row: the number of each token's document ([1, T]
    int32), and cumulative lengths ([documents + 1] int64)."""
    if "mixer kernels" not in bounds.cache:
        lengths = torch.tensor(bounds.lengths)
        numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[None]
        ends = torch.tensor([0, *bounds.lengths]).cumsum(0)
        arguments = {"seq_idx": numbers, "cu_seqlens": ends}
        if device.type != "cpu":
            arguments = {name: value.pin_memory().to(device, non_blocking=True) for name, value in arguments.items()}
        bounds.cache["mixer kernels"] = arguments | {"cu_seq_lens_q": arguments["cu_seqlens"], "cu_seqlens_cpu": ends}
    documents: dict[str, Tensor] = bounds.cache["mixer kernels"]
    return documents


# ---------------------------------------------------------------- choosing for a row

# (Class of mixers, device type, dtype) -> why the kernels are not used there, after a trial; "" if they are right.
_TRIED: dict[tuple[type[nn.Module], str, torch.dtype], str] = {}


def find_kernels(mixer: nn.Module, bounds: Bounds, hidden: Tensor) -> MixerKernels | None:
    """The kernels for a packed row of these hidden states, [1, T, H]; None if there are none."""
    if hidden.device.type not in DEVICES or hidden.dtype not in _DTYPES or bounds.context is not None:
        return None
    kernels = kernels_of(type(mixer))
    return None if kernels.missing else kernels


def trial_result(mixer: nn.Module, hidden: Tensor) -> str | None:
    """The error of the kernels in a trial with such hidden states; "" if they were correct, None without a trial."""
    return _TRIED.get((type(mixer), hidden.device.type, hidden.dtype))


def try_kernels(
    mixer: nn.Module,
    hidden: Tensor,
    bounds: Bounds,
    by_kernels: Callable[[], Tensor],
    by_documents: Callable[[], Tensor],
) -> str:
    """Compare a row by kernels with the row document by document by torch, without gradients. Returns "" if they agree,
    else the error. The result is cached for such mixers in this process. Synchronises with the device."""
    key = type(mixer), hidden.device.type, hidden.dtype
    with torch.no_grad():
        with by_torch():
            expected = by_documents().double()
        try:
            error = by_kernels().double() - expected
        except Exception as failure:  # kernels raise any exception for a device or shape that they do not support
            text = str(failure).strip().splitlines() or [""]
            _TRIED[key] = f"they do not run ({type(failure).__name__}: {text[0]})"
            return _TRIED[key]
    worst = max(float(part.square().mean()) for part in error.split(bounds.lengths, dim=1)) ** 0.5
    scale, allowed = float(expected.square().mean().sqrt()) or 1.0, TOLERANCES[hidden.dtype]
    _TRIED[key] = "" if worst <= allowed * scale else f"off by {worst / scale:.1e} of a row, {allowed:.0e} is allowed"
    return _TRIED[key]


# ---------------------------------------------------------------- torch's functions in their place

_by_torch = False


@contextmanager
def by_torch() -> Iterator[None]:
    """A context in which mixers call torch's functions, also on a GPU."""
    global _by_torch
    before, _by_torch = _by_torch, True
    try:
        yield
    finally:
        _by_torch = before


def dispatch_by_device(mixer: type[nn.Module]) -> None:
    """Make this class of mixers call packages' functions only on a GPU and in 16 bits; elsewhere, as in fp32 and in the
    checks of small copies at the start, torch's functions. Without packages, nothing changes."""
    module = inspect.unwrap(mixer.forward).__globals__
    for name, function in functions_of(mixer).items():
        choice = choice_of(function)
        if choice is not None and choice["is_new_implementation"] and not hasattr(function, "weft_chosen"):
            module[name] = _dispatched(function)


def _dispatched(chosen: Callable[..., Any]) -> Callable[..., Any]:
    with_torch = inspect.unwrap(_inner(chosen))

    @wraps(with_torch)
    def call(*args: Any, **kwargs: Any) -> Any:
        packages = not _by_torch and args[0].device.type in DEVICES and args[0].dtype in _DTYPES
        return chosen(*args, **kwargs) if packages else with_torch(*args, **kwargs)

    call.__dict__["weft_chosen"] = chosen
    return call


def has_fused(mixer: type[nn.Module]) -> bool:
    """Whether this class of mixers calls one of FUSED in training; searched once."""
    if mixer not in _FUSED:
        _FUSED[mixer] = not FUSED.isdisjoint(choices_of(mixer))
    return _FUSED[mixer]
