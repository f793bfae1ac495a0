"""Per-token outputs that a loss reads: their names, and outputs of modules captured during a forward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UserError

NAMES = ("logprob", "entropy", "logsumexp", "chosen_logits")
TOP, TOP_IDS, HIDDEN = "top_logits/", "top_ids/", "hidden/"  # followed by a count, or by a module's name
OFFERED = "logprob, entropy, logsumexp, chosen_logits, top_logits/K (as in top_logits/20) and hidden/MODULE"


@dataclass(frozen=True)
class ReadoutSpec:
    """Parsed names. top: number of the largest logits. hidden: modules. unknown: names that are no readouts."""

    top: int
    hidden: tuple[str, ...]
    unknown: tuple[str, ...]

    @staticmethod
    def parse(readouts: Collection[str]) -> ReadoutSpec:
        hidden = sorted(name.removeprefix(HIDDEN) for name in readouts if name.startswith(HIDDEN))
        tops = [name.removeprefix(TOP) for name in readouts if name.startswith(TOP)]
        counts = [int(count) for count in tops if count.isdecimal() and int(count) > 0]
        argument = [name for name in readouts if not name.startswith((TOP, HIDDEN))]
        unknown = [
            *(name for name in argument if name not in NAMES),
            *([TOP + tops[0]] if len(counts) != len(tops) else []),
        ]
        return ReadoutSpec(max(counts, default=0), tuple(hidden), tuple(sorted(unknown)))


def needs_logits(readouts: Collection[str]) -> bool:
    """Whether any readout needs single logits."""
    return any(name.startswith(TOP) or name in ("logsumexp", "chosen_logits") for name in readouts)


def check_readouts(
    module: nn.Module, vocabulary: int, spec: ReadoutSpec, *, compiled: bool, mixers: Iterable[str] = ()
) -> None:
    """Raises UserError for readouts that this model lacks: more top logits than `vocabulary`, or hidden states of a
    module that is missing, compiled, or inside one of `mixers`, which run document by document."""
    names = [name for name, _ in module.named_modules() if name]
    for name in spec.hidden:
        if name not in names:
            near = get_close_matches(name, names, 3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UserError(f"train.loss: `{HIDDEN}{name}` in `readouts`: the model has no module {name}.{hint}")
        mixer = next((mixer for mixer in mixers if name.startswith(f"{mixer}.")), None)
        if mixer is not None:
            raise UserError(
                f"train.loss: `{HIDDEN}{name}` in `readouts`: {mixer} carries state, so its inner modules run "
                f"document by document. Read {mixer} or its layer."
            )
    if spec.hidden and compiled:
        raise UserError(
            f"train.loss: `{HIDDEN}{spec.hidden[0]}` in `readouts`: outputs inside compiled layers cannot be captured. "
            "Set model.compile=false."
        )
    if spec.top > vocabulary:
        raise UserError(
            f"train.loss: `{TOP}{spec.top}` in `readouts`: the model has {vocabulary} logits. Lower the number."
        )


@contextmanager
def capture_outputs(module: nn.Module, names: Sequence[str], tokens: int) -> Iterator[dict[str, Tensor]]:
    """Captures outputs of the named modules in forwards inside: name -> [tokens, width], differentiable, in fp32 or
    wider.

    tokens: length of the flattened row. Hooks end with the context, so recomputation in backward is not captured.
    """
    captured: dict[str, Tensor] = {}

    def keep(name: str, output: Any) -> None:
        values = output[0] if isinstance(output, tuple) else output
        is_float = isinstance(values, Tensor) and values.is_floating_point() and values.ndim >= 2
        if not is_float or tokens not in (len(values), len(values) * values.shape[1]):
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UserError(
                f"train.loss: `{HIDDEN}{name}` in `readouts`: the module returns {shape}, not a vector for each of "
                f"{tokens} tokens."
            )
        captured[name] = values.reshape(tokens, -1).to(torch.promote_types(values.dtype, torch.float32))

    hooks = [
        module.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        for name in names
    ]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()
