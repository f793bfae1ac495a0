"""The values of model.recompute: which results backward recomputes, and which results forward stores for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import UserError

Kind = Literal["attention", "collectives", "matmuls"]
KINDS: tuple[Kind, ...] = ("attention", "collectives", "matmuls")


@dataclass(frozen=True)
class RecomputePolicy:
    """The layers that backward recomputes, and the results of their forward that are stored instead.

    keep: `attention`, the results of attention kernels; `collectives`, the results of collectives over tp, cp and ep;
    `matmuls`, every second matmul with a weight. every: backward recomputes every n-th layer, starting with the first;
    the other layers store everything.
    """

    keep: tuple[Kind, ...] = ()
    every: int = 1

    def covers(self, layer: int) -> bool:
        """Whether backward recomputes this decoder layer."""
        return layer % self.every == 0

    @property
    def keeps_operations(self) -> bool:
        """Whether results of single operations are stored, which compiled layers do not support."""
        return bool({"attention", "matmuls"} & {*self.keep})

    def repeated(self, kind: Kind) -> float:
        """The share of forward's work of this kind that backward recomputes."""
        kept = {"attention": 1.0, "collectives": 1.0, "matmuls": 0.5}[kind] if kind in self.keep else 0.0
        return (1.0 - kept) / self.every

    def __str__(self) -> str:
        """The value of model.recompute for this policy, in YAML."""
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
AUTO_TILE = 16_384  # tokens of a tile with model.tiled_mlp=auto, for rows that have at least _AUTO_TILES tiles
_AUTO_TILES = 4


@dataclass(frozen=True)
class Activations:
    """The activations that a run stores for backward, and their location. tile: number of tokens that an MLP computes
    at a time; None for all."""

    recompute: RecomputePolicy | None
    offload: Offload = "off"
    tile: int | None = None

    @staticmethod
    def from_config(config: Any) -> Activations:
        """The values of the sections `model`, `lora` and `step` of a config."""
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
        """The kinds of results that are copied to the host, in addition to layers' inputs."""
        return self.recompute.keep if self.offload == "kept" and self.recompute is not None else ()


STORE_ALL = Activations(None)


def policy_of(setting: RecomputeSetting) -> RecomputePolicy | None:
    """The policy of a value of model.recompute; None if backward recomputes nothing. Raises UserError for `auto`, which
    must be resolved before."""
    if isinstance(setting, RecomputePolicy):
        return setting
    if setting == "auto":
        raise UserError(
            "model.recompute=auto is resolved at the start of weft sft, dpo, reward and distill, and by weft plan. "
            "Here set model.recompute to none, selective or full."
        )
    return {"none": None, "full": FULL, "selective": SELECTIVE}[setting]
