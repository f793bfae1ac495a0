"""Settings that save memory, other than the mesh: their valid combinations, and their overrides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeVar

from weft.config.recompute import AUTO_TILE, Activations, Offload, RecomputePolicy, RecomputeSetting, policy_of

T = TypeVar("T")
POLICIES: tuple[RecomputeSetting, ...] = (
    "none", RecomputePolicy(("attention",), 2), "selective", RecomputePolicy(("attention",)), "full",
)  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """The memory settings of a run. tile: tokens of an MLP's tile; None for no tiles. state_dtype, base: int8 and nf4
    are lossy."""

    recompute: RecomputeSetting
    offload: Offload
    tile: int | None
    cpu_offload: bool | Literal["optimizer"]
    state_dtype: Literal["auto", "fp32", "bf16", "int8"]
    base: Literal["compute", "nf4"]

    @staticmethod
    def from_config(config: Any) -> Choice:
        """The settings of a config, of a command or of an engine."""
        activations = Activations.from_config(config)
        return Choice(
            activations.recompute or "none", activations.offload, activations.tile, config.fsdp.cpu_offload,
            config.optimizer.state_dtype, config.lora.base,
        )  # fmt: skip

    @property
    def activations(self) -> Activations:
        return Activations(policy_of(self.recompute), self.offload, self.tile)

    def apply(self, config: Any) -> Any:
        """The config with these settings."""
        return replace(
            config,
            model=replace(
                config.model, recompute=self.recompute, offload_activations=self.offload, tiled_mlp=self.tile or "off"
            ),
            fsdp=replace(config.fsdp, cpu_offload=self.cpu_offload),
            optimizer=replace(config.optimizer, state_dtype=self.state_dtype),
            lora=replace(config.lora, base=self.base),
        )

    def changes(self, other: Choice) -> list[str]:
        """The overrides that change the other settings to these."""
        names = {
            "recompute": "model.recompute", "offload": "model.offload_activations", "tile": "model.tiled_mlp",
            "cpu_offload": "fsdp.cpu_offload", "state_dtype": "optimizer.state_dtype", "base": "lora.base",
        }  # fmt: skip
        overrides = []
        for field, key in names.items():
            value, before = getattr(self, field), getattr(other, field)
            if _policy(value) != _policy(before):
                text = str(value if value is not None else "off")
                text = text.lower() if isinstance(value, bool) else text
                overrides.append(f"'{key}={text}'" if "{" in text else f"{key}={text}")
        return overrides

    def overrides(self, config: Any) -> list[str]:
        """The overrides that change a config, of a command or of an engine, to these settings. A tile that
        model.tiled_mlp=auto chooses with this recomputation needs no override."""
        resolved = Activations.from_config(replace(config, model=replace(config.model, recompute=self.recompute)))
        return self.changes(replace(Choice.from_config(config), tile=resolved.tile))

    def lossy(self, other: Choice) -> int:
        """The number of lossy settings that are only in this choice."""
        return (self.state_dtype == "int8" != other.state_dtype) + (self.base == "nf4" != other.base)


NOTHING_SAVED = Choice("none", "off", None, False, "auto", "compute")


def _policy(value: Any) -> Any:
    return policy_of(value) if value in ("none", "full", "selective") else value


def choices(config: Any, *, adapters: bool) -> Iterator[list[list[Choice]]]:
    """Groups of settings. A group has the options of each recompute policy, the fastest first; policies are also
    ordered by time. The groups are tried in this order: exact settings; exact settings with the optimizer, or all
    shards, on the host; and lossy settings, alone and combined. adapters: whether LoRA adapters are trained."""
    base, stored = Choice.from_config(config), activation_choices(config)
    quantises = base.state_dtype in ("auto", "fp32") and config.optimizer.name == "adamw"
    lossy: list[dict[str, Any]] = [{"state_dtype": "int8"}] if quantises else []
    if adapters and base.base == "compute":
        lossy += [{"base": "nf4"}, *(options | {"base": "nf4"} for options in lossy)]
    on_host: list[dict[str, Any]] = [{"cpu_offload": "optimizer"}, {"cpu_offload": True}]
    for options in [
        {},
        *([] if base.cpu_offload else on_host),
        *lossy,
        *(options_alone | on_host[1] for options_alone in lossy),
    ]:
        yield [[replace(choice, **options) for choice in by_time] for by_time in stored]


def activation_choices(config: Any) -> list[list[Choice]]:
    """The config's settings with each recompute policy, tile and offload that the config allows, as in `choices`.
    Activations that the config sends to the host stay there."""
    base, compiled = Choice.from_config(config), config.model.compile is True
    by_policy = []
    for policy in (*POLICIES, *([] if base.recompute in POLICIES else [base.recompute])):
        keeps = policy_of(policy)
        if compiled and keeps is not None and keeps.keeps_operations:
            continue
        tile = Activations.from_config(replace(config, model=replace(config.model, recompute=policy))).tile
        tiles = dict.fromkeys((tile, None if compiled or config.lora.dropout > 0 else tile or AUTO_TILE))
        offloads = [offload for offload in _offloads(policy) if offload != "off" or base.offload == "off"]
        if offloads:
            base_choice = replace(base, recompute=policy)
            by_policy.append(
                [replace(base_choice, tile=tile, offload=offload) for tile, offload in product(tiles, offloads)]
            )
    return by_policy


def fitting(
    by_policy: Sequence[Sequence[Choice]], measure: Callable[[Choice], tuple[int, T]], room: float, *,
    every_policy: bool = True,
) -> tuple[list[tuple[Choice, int, T]], tuple[int, Choice]]:  # fmt: skip
    """([(settings, bytes, result)] of the first settings of each policy that fit, the settings that need least and
    their bytes). measure: returns the bytes that settings need, and a result. every_policy: also return slower
    policies, which come after a policy whose first settings fit."""
    matches: list[tuple[Choice, int, T]] = []
    least: tuple[int, Choice] | None = None
    for options in by_policy:
        for choice in options:
            size, result = measure(choice)
            least = (size, choice) if least is None or size < least[0] else least
            if size <= room:  # the other options of this policy take more time
                matches.append((choice, size, result))
                break
        if matches and matches[-1][0] is options[0] and not every_policy:
            break
    assert least is not None
    return matches, least


def _offloads(policy: RecomputeSetting) -> tuple[Offload, ...]:
    chosen = policy_of(policy)
    if chosen is None:
        return ("off",)
    return ("off", "inputs", "kept") if chosen.keep else ("off", "inputs")
