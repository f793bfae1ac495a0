"""Mixers that continue from a state: siblings in a tree of documents begin with the state at their parent's end.

A mixer of transformers reads states from a cache, through a small interface. States replaces that cache, and stores
tensors of the forward without copies, so gradients flow through a fork. Mamba 1 accepts no state for several tokens:
transformers (5.19) silently ignores it. So a mixer must name its state when it calls its kernel, and a trial must agree
with the unfolded paths.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.mixer_kernels import TOLERANCES

CACHES = ("cache_params", "past_key_values")
_STATES = frozenset(("initial_state", "initial_states"))
# (Class of mixers, dtype) -> whether a trial agreed with the paths unfolded.
_TRIED: dict[tuple[type[nn.Module], torch.dtype], bool] = {}


class States:
    """The states of n sequences in one mixer, with the part of transformers' cache that a mixer uses.

    conv_states, recurrent_states: {0: [n, ...]}, empty before the first token. record_past: keeps mixers from their
    code for single tokens, which writes in place.
    """

    record_past = True

    def __init__(self, conv_states: dict[int, Tensor], recurrent_states: dict[int, Tensor]) -> None:
        self.conv_states, self.recurrent_states = conv_states, recurrent_states

    @property
    def layers(self) -> _SameLayer:
        """The layer of any index, because a mixer reads only its own."""
        return _SameLayer(self)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Whether the sequences already have tokens."""
        return bool(self.conv_states)

    def update_conv_state(self, inputs_BCT: Tensor, *_: Any, conv_kernel_size: int, **__: Any) -> Tensor:
        """The inputs of the convolution, preceded by the stored inputs. Stores the last inputs."""
        if self.conv_states:
            inputs_BCT = torch.cat([self.conv_states[0], inputs_BCT], -1)
        missing = max(0, conv_kernel_size - 1 - inputs_BCT.shape[-1])  # zeros, as before a document's first token
        self.conv_states = {0: F.pad(inputs_BCT[..., 1 - conv_kernel_size :], (missing, 0))}
        return inputs_BCT

    def update_recurrent_state(self, states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Store the final states."""
        self.recurrent_states = {0: states}
        return states


class _SameLayer:
    def __init__(self, states: States) -> None:
        self._states = states

    def __getitem__(self, index: int) -> States:
        return self._states


def joined_states(chosen: Sequence[tuple[States, int]]) -> States:
    """The states of sequences. chosen: for each, its States and its index in them."""
    first, index = chosen[0]
    if all(states is first and index_there == index for states, index_there in chosen):
        return States(*(_repeated(part, index, len(chosen)) for part in (first.conv_states, first.recurrent_states)))
    return States(
        {key: torch.stack([states.conv_states[key][index] for states, index in chosen]) for key in first.conv_states},
        {
            key: torch.stack([states.recurrent_states[key][index] for states, index in chosen])
            for key in first.recurrent_states
        },
    )


def _repeated(states: dict[int, Tensor], index: int, count: int) -> dict[int, Tensor]:
    return {key: value[index : index + 1].expand(count, *value.shape[1:]) for key, value in states.items()}


def can_fork(mixer: nn.Module) -> bool:
    """Whether the mixer's code accepts states for several tokens: it passes a state to its kernel, or has only a
    convolution."""
    forward = inspect.unwrap(type(mixer).forward)
    if _cache_argument(mixer) is None:
        return False
    names = {name for constant in forward.__code__.co_consts if isinstance(constant, tuple) for name in constant}
    methods = forward.__code__.co_names
    return "update_conv_state" in methods and (bool(_STATES & names) or "update_recurrent_state" not in methods)


def _cache_argument(mixer: nn.Module) -> str | None:
    parameters = inspect.signature(type(mixer).forward).parameters
    return next((name for name in CACHES if name in parameters), None)


def run_from_state(mixer: nn.Module, before: States | None, *args: Any, **kwargs: Any) -> tuple[Any, States]:
    """(Output of the mixer's forward, final states) of sequences that begin with these states."""
    states = States({}, {}) if before is None else States(before.conv_states, before.recurrent_states)
    call = inspect.signature(type(mixer).forward).bind(mixer, *args, **kwargs)
    call.arguments[str(_cache_argument(mixer))] = states
    return type(mixer).forward(*call.args, **call.kwargs), states


def tried(mixer: nn.Module, dtype: torch.dtype) -> bool | None:
    """Whether a trial of such mixers agreed with the unfolded paths; None without a trial."""
    return _TRIED.get((type(mixer), dtype))


def reset_trials() -> None:
    """Forget all trials."""
    _TRIED.clear()


def try_forks(mixer: nn.Module, hidden: Tensor, by_forks: Callable[[], Tensor], by_paths: Callable[[], Tensor]) -> bool:
    """Whether a row by forks agrees with the row of its paths. Tried once per class and dtype, without
    gradients."""
    key = type(mixer), hidden.dtype
    if key not in _TRIED:
        with torch.no_grad():
            expected = by_paths().double()
            try:
                error = float((by_forks().double() - expected).square().mean().sqrt())
            except Exception as failure:  # a mixer's code may raise any exception for a state
                error, reason = float("inf"), f"{type(failure).__name__}: {failure}"
            else:
                reason = f"off by {error:.1e}"
        scale = float(expected.square().mean().sqrt()) or 1.0
        _TRIED[key] = error <= TOLERANCES.get(hidden.dtype, 1e-8) * scale
        if not _TRIED[key]:
            name = type(mixer).__name__
            warnings.warn(f"{name} runs the documents of a tree separately, not from states: {reason}", stacklevel=2)
    return _TRIED[key]
