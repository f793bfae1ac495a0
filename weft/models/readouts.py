"""Names of the readouts that an objective may ask for, per prediction of a row."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

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
