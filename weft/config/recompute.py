"""What backward runs again, and what it takes from forward instead: the values of model.recompute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["attention", "collectives", "matmuls"]
KINDS: tuple[Kind, ...] = ("attention", "collectives", "matmuls")


@dataclass(frozen=True)
class RecomputePolicy:
    """Which layers backward runs again, and what they take from their forward instead of computing it.

    keep: `attention`, the results of attention kernels; `collectives`, the results of exchanges over tp, cp and ep;
    `matmuls`, every second product with a weight. every: one layer in so many is run again, the first one included; the
    others store everything.
    """

    keep: tuple[Kind, ...] = ()
    every: int = 1

    def covers(self, layer: int) -> bool:
        """Whether backward runs this decoder layer again."""
        return layer % self.every == 0

    @property
    def keeps_operations(self) -> bool:
        """Whether results of single operations are kept, which compiled layers do not have."""
        return bool({"attention", "matmuls"} & {*self.keep})

    def repeated(self, kind: Kind) -> float:
        """The share of forward's work of this kind that backward does again."""
        kept = {"attention": 1.0, "collectives": 1.0, "matmuls": 0.5}[kind] if kind in self.keep else 0.0
        return (1.0 - kept) / self.every

    def __str__(self) -> str:
        """The value of model.recompute that chooses it, in YAML."""
        if self == FULL:
            return "full"
        if self == SELECTIVE:
            return "selective"
        parts = [f"keep: [{', '.join(self.keep)}]"] if self.keep else []
        return "{" + ", ".join([*parts, f"every: {self.every}"]) + "}"


FULL = RecomputePolicy()
SELECTIVE = RecomputePolicy(KINDS)
RecomputeSetting = Literal["none", "full", "selective"] | RecomputePolicy


def policy_of(setting: RecomputeSetting) -> RecomputePolicy | None:
    """The policy that a value of model.recompute chooses; None: nothing is run again."""
    if isinstance(setting, RecomputePolicy):
        return setting
    return {"none": None, "full": FULL, "selective": SELECTIVE}[setting]
