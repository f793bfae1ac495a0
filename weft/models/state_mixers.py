"""Runs modules that carry state along the sequence document by document in a packed row, or on the row at once with
kernels that accept sequence boundaries (models/mixer_kernels.py).

The decoder layer receives the row's bounds as an argument and passes them to its mixers for one call, so a layer that
is recomputed in backward has the bounds of its row. The other modules of the layer process the packed row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.families import carries_state
from weft.models.mixer_kernels import by_torch, dispatch_by_device, find_kernels, has_fused, trial_result, try_kernels
from weft.models.mixer_shards import MixerShard, shard_for_documents, view
from weft.models.state_forks import CACHES, can_fork, joined_states, run_from_state, try_forks
from weft.ops.attention_call import BOUNDS_ARGUMENT, Bounds, ContextRow
from weft.ops.by_document import by_document, is_of_tokens
from weft.ops.by_path import by_forks, forked_row, unfolded_row
from weft.ops.context import gather_documents, sum_to_tokens


class PerDocumentMixer:
    """Replaces a mixer's forward. bounds: of the next call, set by the mixer's layer. calls: number of calls with
    packed rows. shard: the part of the mixer that this rank of mesh.tp computes; None: all of it."""

    def __init__(self, mixer: nn.Module) -> None:
        self.mixer = mixer
        self.bounds: Bounds | None = None
        self.calls = 0
        self.shard: MixerShard | None = None
        dispatch_by_device(type(mixer))
        self._run: Callable[..., Any] = self._run_documents
        mixer.__dict__["forward"] = self.forward

    def hide(self) -> None:
        """Hide the mixer from torch.compile, because lengths of documents differ in every row."""
        self._run = torch.compiler.disable(self._run_documents)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The mixer's forward, run separately on each document of a packed row."""
        return self._run(*args, **kwargs)

    def _run_documents(self, *args: Any, **kwargs: Any) -> Any:
        mixer = self.mixer if self.shard is None else view(self.mixer, self.shard)
        if mixer.training and has_fused(type(mixer)):
            mixer = _not_fused(mixer)
        forward = partial(type(mixer).forward, mixer)
        bounds, self.bounds = self.bounds, None
        kwargs.pop(BOUNDS_ARGUMENT, None)  # some mixers pass all arguments on to kernels
        if bounds is None or bounds.padded:
            return forward(*args, **kwargs)
        if any(kwargs.get(name) is not None for name in CACHES):
            raise RuntimeError(f"{type(self.mixer).__name__}: a packed row cannot be continued from a cache")
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = None
        self.calls += 1
        if bounds.context is not None:
            return self._run_over_ranks(mixer, bounds.context, *args, **kwargs)
        if bounds.segments is not None:
            return self._run_paths(mixer, bounds, *args, **kwargs)
        return self._run_row(mixer, bounds, *args, **kwargs)

    def _run_over_ranks(self, mixer: nn.Module, context: ContextRow, *args: Any, **kwargs: Any) -> Any:
        """by_document for a row that begins with parts of shared documents. Each rank of Ulysses computes all their
        tokens for its part of the heads, so states and convolutions see complete documents. Collective over cp."""
        x = args[0] if args else kwargs.pop("hidden_states")
        # These mixers read no per-token argument except hidden states (MixerSpec.hidden_alone).
        kwargs = {name: None if is_of_tokens(value, x.shape[1]) else value for name, value in kwargs.items()}
        axis, shard = context.axis, None
        if axis.ulysses is not None and axis.ring is None:
            shard = shard_for_documents(mixer, axis.rank, axis.ulysses, axis.size)
        if shard is None:
            raise RuntimeError(f"{type(mixer).__name__}: its heads cannot be divided over {axis.size} ranks of mesh.cp")
        part = view(mixer, shard)
        gathered = gather_documents(x[:, : context.tokens], context)
        documents = by_document(partial(type(part).forward, part), context.shared_bounds(x.device), gathered, **kwargs)
        parts = [sum_to_tokens(_first(documents), context)]
        if context.whole_lengths:
            bounds, complete = context.unshared_bounds(x.device), x[:, context.tokens :]
            if bounds.segments is None:
                parts.append(_first(by_document(partial(type(mixer).forward, mixer), bounds, complete, **kwargs)))
            else:
                parts.append(_first(self._run_paths(mixer, bounds, complete, **kwargs)))
        row = torch.cat(parts, 1)
        return (row, *documents[1:]) if isinstance(documents, tuple) else row

    def _run_paths(self, mixer: nn.Module, bounds: Bounds, *args: Any, **kwargs: Any) -> Any:
        """Runs the row's trees: by forks of states if the mixer's code continues from a state, else as a row of all
        paths."""
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        unfolded = unfolded_row(bounds, hidden.device)

        def by_paths() -> Any:
            parts, keywords = unfolded.unfold((args, kwargs))
            return unfolded.fold(self._run_row(mixer, unfolded.bounds, *parts, **keywords))

        forked = forked_row(bounds, hidden.device) if can_fork(mixer) else None
        if forked is None or find_kernels(mixer, bounds, hidden) is not None:
            return by_paths()
        forks = partial(by_forks, partial(run_from_state, mixer), joined_states, forked, *args, **kwargs)
        if try_forks(mixer, hidden, lambda: _first(forks()), lambda: _first(by_paths())):
            return forks()
        return by_paths()

    def _run_row(self, mixer: nn.Module, bounds: Bounds, *args: Any, **kwargs: Any) -> Any:
        """A packed row of documents."""
        forward = partial(type(mixer).forward, mixer)
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        by_documents = partial(by_document, forward, bounds, *args, **kwargs)
        kernels = find_kernels(mixer, bounds, hidden)
        if kernels is None:
            return by_documents()
        by_kernels = partial(forward, *args, **{**kwargs, **kernels.arguments_for(bounds, hidden.device)})
        problem = trial_result(mixer, hidden)
        if problem is None:
            problem = try_kernels(mixer, hidden, bounds, lambda: _first(by_kernels()), lambda: _first(by_documents()))
            if problem:
                name, packages = type(self.mixer).__name__, ", ".join(kernels.packages)
                warnings.warn(f"{name} runs document by document, not by {packages}: {problem}", stacklevel=2)
        if not problem:
            return by_kernels()
        with by_torch():
            return by_documents()


def _not_fused(mixer: nn.Module) -> nn.Module:
    """A copy of the mixer with the same parameters, in inference mode. It calls its norm and projections, not a fused
    kernel that reads their weights and so ignores adapters (mixer_kernels.FUSED)."""
    copy: nn.Module = object.__new__(type(mixer))
    copy.__dict__.update({name: value for name, value in mixer.__dict__.items() if name != "forward"}, training=False)
    return copy


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def run_per_document(layers: Sequence[tuple[str, nn.Module]]) -> dict[str, PerDocumentMixer]:
    """Give every mixer of these layers a PerDocumentMixer, unless it has one; returns them by the mixer's name."""
    result: dict[str, PerDocumentMixer] = {}
    for prefix, layer in layers:
        new = []
        for name, module in find_mixers(layer):
            owner = getattr(module.__dict__.get("forward"), "__self__", None)
            if not isinstance(owner, PerDocumentMixer):
                owner = PerDocumentMixer(module)
                new.append(owner)
            result[f"{prefix}.{name}"] = owner
        if new:
            layer.register_forward_pre_hook(partial(_pass_bounds, new), with_kwargs=True)
    return result


def _pass_bounds(
    mixers: Sequence[PerDocumentMixer], layer: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Pre-hook of a decoder layer: pass its bounds, from either argument, to its mixers."""
    name = next((name for name, value in kwargs.items() if isinstance(value, Bounds)), BOUNDS_ARGUMENT)
    for mixer in mixers:
        mixer.bounds = kwargs.get(name)
    return args, kwargs if name == BOUNDS_ARGUMENT else {**kwargs, name: None}


def find_mixers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, mixer) of the outermost modules that carry state."""
    for name, child in module.named_children():
        if carries_state(child):
            yield name, child
        else:
            yield from ((f"{name}.{inner}", mixer) for inner, mixer in find_mixers(child))
