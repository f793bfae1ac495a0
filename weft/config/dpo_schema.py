"""The keys of `weft dpo` that are not shared with `weft sft` (schema.py). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from weft.config.conditions import Unread
from weft.config.keys import key
from weft.config.preference_losses import LOSSES, LossFacts, facts_of
from weft.config.ranges import NOT_NEGATIVE, POSITIVE, Range
from weft.config.schema import FrozenRanksConfig, PolicyOptimizerConfig, SftConfig


def _reads(*names: str) -> Unread:
    """Only these losses read the key."""
    return Unread(lambda c: not {*names} & {*c.preference.losses}, f"only preference.loss={'|'.join(names)} reads it")


_NO_SMOOTHING = Unread(
    lambda c: not any(facts.smoothing for facts in c.preference.facts), "no loss in preference.loss reads it"
)
_NO_REFERENCE = Unread(lambda c: not c.preference.has_reference, "no loss in preference.loss reads a reference")
_NO_LOSS_READS = Unread(lambda c: not c.preference.has_reference, "no loss in preference.loss reads it")
_ONE_LOSS = Unread(lambda c: len(c.preference.losses) == 1, "preference.loss contains one loss")


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """The preference loss, and how the reference is computed. See docs/how-to/dpo.md."""

    loss: str | tuple[str, ...] = key(
        "The loss, or several that are added, as in [sigmoid, sft]: "
        + ", ".join(f"`{name}`" for name in LOSSES)
        + "; or the import path of your function. docs/reference/preference-losses.md has the formulas.",
        "sigmoid",
        within=Range(lambda v: len(v) > 0, "one loss or more"),
    )
    weights: tuple[float, ...] | None = key(
        "Factor on each loss of preference.loss; null: 1 for each.", None, unread=(_ONE_LOSS,)
    )
    beta: float = key(
        "How strongly the reference constrains the policy: factor on log ratios, and so on rewards. For ipo it is "
        "tau, for orpo lambda.",
        0.1,
        within=POSITIVE,
    )
    label_smoothing: float = key(
        "Probability that a pair's label is wrong (cDPO, robust DPO).",
        0.0,
        within=Range(lambda v: 0 <= v < 0.5, "0 or more and below 0.5"),
        unread=(_NO_SMOOTHING,),
    )
    f_divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = key(
        "Divergence from the reference whose derivative gives an answer's score (f-DPO, arXiv:2309.16240), in "
        "sigmoid, hinge, ipo, robust, exo_pair, discopop and sigmoid_norm.",
        "reverse_kl",
        unread=(_NO_REFERENCE,),
    )
    f_alpha: float = key(
        "alpha of f_divergence=alpha_divergence; at 1 it is reverse_kl.",
        0.5,
        within=POSITIVE,
        unread=(Unread(lambda c: c.preference.f_divergence != "alpha_divergence", "only alpha_divergence reads it"),),
    )
    ld_alpha: float | None = key(
        "Factor on the log probabilities of an answer's tokens beyond the length of the shorter answer of its pair "
        "(LD-DPO, arXiv:2409.06411), for policy and reference; null: 1.",
        None,
        within=Range(lambda v: 0 <= v <= 1, "0 to 1, or null"),
    )
    discopop_tau: float = key("Temperature of discopop's blend.", 0.05, within=POSITIVE, unread=(_reads("discopop"),))
    gamma: float = key(
        "simpo: margin between the rewards of the two answers.", 0.5, within=NOT_NEGATIVE, unread=(_reads("simpo"),)
    )
    cpo_alpha: float = key(
        "cpo: factor on the cross entropy of the chosen answers.", 1.0, within=NOT_NEGATIVE, unread=(_reads("cpo"),)
    )
    desirable_weight: float = key(
        "kto, apo_zero_unpaired: factor on the losses of desired answers.",
        1.0,
        within=POSITIVE,
        unread=(_reads("kto", "apo_zero_unpaired"),),
    )
    undesirable_weight: float = key(
        "kto, apo_zero_unpaired: factor on the losses of undesired answers.",
        1.0,
        within=POSITIVE,
        unread=(_reads("kto", "apo_zero_unpaired"),),
    )
    cache: Literal["off", "memory", "disk"] = key(
        "Caching of the reference's log probabilities. `off`: computed at each step. `memory`: kept for later epochs "
        "and evaluations. `disk`: computed for all data before the first step and stored below data.cache, for later "
        "runs on any mesh; the reference is then freed.",
        "memory",
        unread=(_NO_REFERENCE,),
    )

    @property
    def losses(self) -> tuple[str, ...]:
        """The names of the losses."""
        return (self.loss,) if isinstance(self.loss, str) else self.loss

    @property
    def facts(self) -> tuple[LossFacts, ...]:
        """The facts of each loss."""
        return tuple(facts_of(name) for name in self.losses)

    @property
    def has_reference(self) -> bool:
        """Whether a loss reads a reference."""
        return any(facts.reference for facts in self.facts)

    @property
    def is_paired(self) -> bool:
        """Whether the losses read pairs of answers; otherwise they read single answers."""
        return self.facts[0].paired


@dataclass(frozen=True, kw_only=True)
class _ModelPath:
    """A base class, so that the docs list the path before the keys of FrozenRanksConfig."""

    path: str | None = key(
        "A HuggingFace model directory or hub id; null: the model before training. With lora that is the base under "
        "the adapters, which needs no second copy.",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class DpoReferenceConfig(FrozenRanksConfig, _ModelPath):
    """The reference of the preference loss: a separate engine without training, on separate ranks or alternating with
    the trained model."""


@dataclass(frozen=True, kw_only=True)
class DpoConfig(SftConfig):
    """The config of `weft dpo`."""

    command: ClassVar[str] = "dpo"

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    reference: DpoReferenceConfig = field(default_factory=DpoReferenceConfig, metadata={"unread": (_NO_LOSS_READS,)})
    optimizer: PolicyOptimizerConfig = field(default_factory=PolicyOptimizerConfig)

    @property
    def reads_preferences(self) -> bool:
        return True

    @property
    def tail_weight(self) -> float | None:
        return self.preference.ld_alpha


def own_reference(config: Any) -> bool:
    """Whether the reference is a separate engine; otherwise it is the trained model without its adapters."""
    base_is_start = config.lora.on and config.lora.path is None and not config.lora.modules_to_save
    return bool(config.preference.has_reference and not (base_is_start and config.reference.path is None))
