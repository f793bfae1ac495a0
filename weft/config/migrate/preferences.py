"""The loss of another trainer's preference tuning in weft's keys. Several of its names together determine the loss."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from weft.config.migrate.draft import Draft, numbers_of
from weft.config.migrate.trainer import ANY
from weft.config.preference_losses import LOSSES, facts_of

_LOSS, _WEIGHTS = "preference.loss", "preference.weights"
_LOSSES_OF = {"dpo": "sigmoid", "ipo": "ipo", "kto": "kto", "orpo": "orpo", "cpo": "cpo", "simpo": "simpo"}
# TRL's names of losses -> weft's. CPOTrainer's losses differ, although some have the same names.
_RENAMED = {"aot_pair": "aot_unpaired"}
_OF_CPO = {"sigmoid": "cpo", "simpo": "simpo"}
# Names of the factor on the cross entropy of chosen answers, which is added to the loss.
_CROSS_ENTROPY = ("rpo_alpha", "pref_ftx", "sft_loss_weight", "nll_loss_coef")
# Loss -> the difference in weft's computation with more than one micro-batch. docs/reference/preference-losses.md has
# all.
_DIFFERS = {
    "kto": "in weft z of `kto` is the mean over the optimizer step, in the other trainer over a micro-batch.",
    "aot": "weft sorts the answers of the optimizer step; the other trainer sorts those of a micro-batch.",
    "aot_unpaired": "weft sorts the answers of the optimizer step; the other trainer sorts those of a micro-batch.",
    "orpo": "weft averages the cross entropy over the step's chosen tokens; TRL averages it over a micro-batch, with "
    "the tokens of prompts.",
    "cpo": "weft averages the cross entropy over the step's chosen tokens; the other trainer averages it over a "
    "micro-batch.",
    "sft": "weft's cross entropy is the mean over the step's chosen tokens; the other trainer's is the mean over a "
    "micro-batch, or over the means of the answers.",
}
# Keys that commands of pairs refuse -> why.
_REFUSED = {
    "lora.dropout": "`weft dpo` compares answers without dropout and refuses `lora.dropout`: the draft omits it.",
    "train.neftune_noise_alpha": "noise would differ between the answers of a pair: weft refuses it, the draft omits "
    "it.",
    "data.train_on": "preferences always compare the answers after the prompt: remove it.",
}


_TRAINERS = (
    "the file does not name its trainer, so the draft assumes DPOTrainer: set `preference.loss` to orpo for "
    "ORPOTrainer, to cpo for CPOTrainer, and to kto for KTOTrainer."
)


def settle_preferences(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Set preference.loss and preference.weights from the trainer's method, its losses and their factors. Remove keys
    that `weft dpo` refuses. settings: all names of the config with their values."""
    method, origin = method_of(draft, settings)
    named, loss_origin, name = draft.values.pop(_LOSS, (None, origin, _LOSS))
    losses = [named] if isinstance(named, str) else list(named or [_LOSSES_OF[method]])
    if named is not None:
        renamed = _OF_CPO if method == "cpo" else {loss: loss for loss in LOSSES} | _RENAMED
        if unknown := [loss for loss in losses if loss not in renamed]:
            draft.notes[name] = f"weft has no loss {', '.join(unknown)} of {method.upper()}: set `{_LOSS}`."
            draft.values[_LOSS] = (None, f"set it: {name} is {', '.join(unknown)}", name)
            return drop_refused(draft)
        losses = [renamed[loss] for loss in losses]
    elif origin == _LOSS and draft.trainer.name == "trl":
        draft.notes["(trainer)"] = _TRAINERS
    if method == "simpo" or (method == "cpo" and losses == ["simpo"]):
        _add_cross_entropy(draft, losses, *_popped(draft, "preference.cpo_alpha", 1.0))
    for alpha_name, value in settings.items():
        if draft.entry(alpha_name).rpartition(".")[2] in _CROSS_ENTROPY:
            _add_cross_entropy(draft, losses, next(numbers_of(value), 0), alpha_name)
    if losses == ["hinge"] and "preference.gamma" in draft.values:  # of torchtune's RSOLoss, whose gamma is beta
        gamma, gamma_origin, gamma_name = draft.values.pop("preference.gamma")
        draft.take("preference.beta", gamma, gamma_name, gamma_origin)
    if losses != ["sigmoid"] or origin != _LOSS or named is not None:
        draft.take(_LOSS, losses[0] if len(losses) == 1 else losses, name, loss_origin)
    for loss in losses:
        if loss in _DIFFERS:
            draft.notes[f"({loss})"] = _DIFFERS[loss]
    if any(not facts_of(loss).paired for loss in losses):
        draft.notes["(rows)"] = "with this loss a row is a prompt, a completion and a label: docs/how-to/dpo.md."
    drop_refused(draft)


def method_of(draft: Draft, settings: Mapping[str, Any]) -> tuple[str, str]:
    """(The trainer's method, a key of _LOSSES_OF; the name that selects it)."""
    methods = draft.job.methods if draft.job is not None else {}
    for name, value in settings.items():
        entry = name if name in methods else draft.entry(name)
        for pattern, method in methods.get(entry, {}).items():
            if value is not None and (pattern == ANY or fnmatchcase(str(value).lower(), pattern)):
                return method, f"{entry}: {value}"
    return "dpo", _LOSS


def _popped(draft: Draft, key: str, default: float) -> tuple[float, str]:
    """(The converted value of a key, which is removed from the draft, or the trainer's default; its origin)."""
    value, _, name = draft.values.pop(key, (default, "", f"{draft.trainer.short}'s default cpo_alpha"))
    return value, name


def _add_cross_entropy(draft: Draft, losses: list[str], factor: float, name: str) -> None:
    """Add the loss `sft` to `losses`, times `factor`. name: the trainer's name of the factor."""
    if not factor:
        draft.notes.pop(name, None)
        return
    weights = [*(draft.value(_WEIGHTS) or [1.0] * len(losses)), float(factor)]
    draft.notes.pop(name, None)
    losses.append("sft")
    draft.take(_WEIGHTS, weights, name, f"the last is {name}")


def drop_refused(draft: Draft) -> None:
    """Remove keys that weft refuses in comparisons of pairs, and note the reason."""
    for key, why in _REFUSED.items():
        value, _, name = draft.values.get(key, (None, "", ""))
        if value not in (None, 0, "answers"):
            del draft.values[key]
            if name == key and key.startswith("lora.") and draft.value("lora.rank") is None:
                continue  # a default of adapters, in a draft without adapters
            draft.notes[name if name != key else f"({key} {value}, {draft.trainer.short}'s default)"] = why
