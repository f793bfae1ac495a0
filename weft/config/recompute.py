"""What backward runs again, and what it takes from forward instead: the values of model.recompute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import UserError

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
RecomputeSetting = Literal["none", "full", "selective", "auto"] | RecomputePolicy
Offload = Literal["off", "inputs", "kept"]
TileSetting = Literal["auto", "off"] | int
AUTO_TILE = 16_384  # tokens of a tile under model.tiled_mlp=auto, for rows that have at least _AUTO_TILES
_AUTO_TILES = 4


@dataclass(frozen=True)
class Activations:
    """What a run stores for backward, and where. tile: tokens for which an MLP runs at a time; None for all."""

    recompute: RecomputePolicy | None
    offload: Offload = "off"
    tile: int | None = None

    @staticmethod
    def of(config: Any) -> Activations:
        """As the sections `model`, `lora` and `step` of a config say."""
        model, policy = config.model, policy_of(config.model.recompute)
        tile = None if isinstance(model.tiled_mlp, str) else model.tiled_mlp
        if (
            model.tiled_mlp == "auto"
            and policy is not None
            and config.step.max_tokens_per_device >= _AUTO_TILES * AUTO_TILE
            and model.compile is not True
            and not config.lora.dropout
        ):
            tile = AUTO_TILE
        return Activations(policy, model.offload_activations, tile)

    @property
    def hosted_kinds(self) -> tuple[Kind, ...]:
        """The kinds of results that go to the host, beside layers' inputs."""
        return self.recompute.keep if self.offload == "kept" and self.recompute is not None else ()


STORE_ALL = Activations(None)


def policy_of(setting: RecomputeSetting) -> RecomputePolicy | None:
    """The policy that a value of model.recompute chooses; None: nothing is run again. Raises UserError for `auto`,
    which is resolved before."""
    if isinstance(setting, RecomputePolicy):
        return setting
    if setting == "auto":
        raise UserError(
            "model.recompute=auto is chosen at the start of weft sft, dpo, reward and distill, and by weft plan: set "
            "model.recompute to none, selective or full here."
        )
    return {"none": None, "full": FULL, "selective": SELECTIVE}[setting]
