"""Checks of a config of `weft dpo` that need neither torch nor a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from weft.config.checks import EXCLUSIVE, IMPORT_PATH, Inert, Rules, adapter_presets, inert_rules, training_combinations
from weft.config.dpo_schema import DpoConfig, DpoReferenceConfig, own_reference
from weft.config.preference_losses import LOSSES
from weft.config.yaml12 import override

_BASE_IS_READ = "the reference is the model without its adapters"
_INERT = (
    *inert_rules(DpoConfig),
    *(
        Inert(f"reference.{spec.name}", lambda c: not own_reference(c), _BASE_IS_READ)
        for spec in fields(DpoReferenceConfig)
        if spec.name != "path"
    ),
    Inert("train.loss", lambda c: True, "preference.loss defines the loss"),
    Inert("eval.target", lambda c: True, "preference data has no metric eval/exact"),
)


def _combinations(config: Any) -> Iterator[tuple[str, str]]:
    """(key, message) for each combination of values that weft refuses."""
    preference = config.preference
    names, facts = preference.losses, preference.facts
    for name in names:
        if name not in LOSSES and not IMPORT_PATH.fullmatch(name):
            hint = " The loss of DPO is sigmoid." if name == "dpo" else ""
            loss_names = ", ".join(LOSSES)
            yield "preference.loss", f"preference.loss: {name} is not one of {loss_names}, nor an import path.{hint}"
    if len({*names}) < len(names):
        yield "preference.loss", "preference.loss contains a loss twice: add its preference.weights, and remove one."
    if len({fact.paired for fact in facts}) > 1:
        unpaired = next(name for name, fact in zip(names, facts, strict=True) if not fact.paired)
        yield (
            "preference.loss",
            f"preference.loss: {unpaired} reads single answers, and cannot be combined with losses of pairs.",
        )
    if preference.weights is not None and len(preference.weights) != len(names):
        yield (
            "preference.weights",
            f"preference.weights has {len(preference.weights)} numbers for {len(names)} losses: set one for each loss.",
        )
    if "exo_pair" in names and not preference.label_smoothing:
        yield (
            "preference.label_smoothing",
            "preference.label_smoothing is 0, where exo_pair is undefined (log 0): set a value above 0, as in "
            "preference.label_smoothing=0.001.",
        )
    without_tail = [name for name, fact in zip(names, facts, strict=True) if not fact.tail]
    if preference.ld_alpha is not None and without_tail:
        yield (
            "preference.ld_alpha",
            f"preference.ld_alpha has no effect on {without_tail[0]}, which weights all tokens of an answer equally: "
            "set preference.ld_alpha=null.",
        )
    if config.lora.dropout:
        yield (
            "lora.dropout",
            "lora.dropout: answers on two ranks are compared by a forward without dropout, so the gradient would not "
            "be that of the loss. Set lora.dropout=0.",
        )
    if config.train.neftune_noise_alpha is not None:
        yield (
            "train.neftune_noise_alpha",
            "train.neftune_noise_alpha: both answers of a pair would have different noise, and the reference none. Set "
            "train.neftune_noise_alpha=null.",
        )
    if config.data.train_on != "answers":
        yield (
            "data.train_on",
            f"data.train_on is {config.data.train_on}: preferences compare the answers after the prompt. Set "
            f"{override('data.train_on', 'answers')}.",
        )
    if config.reference.ranks is not None and preference.cache == "disk":
        yield (
            "reference.ranks",
            "reference.ranks with preference.cache=disk: the reference computes everything before the first step, and "
            "its ranks would then be idle. Set preference.cache=memory, or reference.ranks=null.",
        )
    if config.reference.ranks is not None and "kto" in names:
        yield (
            "reference.ranks",
            "reference.ranks with preference.loss=kto: only the trained model's ranks compute the mismatched pairs of "
            "prompts and answers. Set reference.ranks=null.",
        )
    yield from training_combinations(config)


DPO = Rules(EXCLUSIVE, _INERT, _combinations, lambda value: adapter_presets(value, "dpo"))
