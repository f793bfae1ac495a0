"""Reads the algorithm of another trainer's reinforcement learning, one quantity at a time.

Every key that defines the algorithm is written into the draft. No such key is left to weft's default. If weft computes
a quantity differently, `Quantity.is_equal` is False, and the user must confirm the draft.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from weft.config.conditions import KEEPS_ALL, SERVERS
from weft.config.migrate.draft import Draft, numbers_of
from weft.config.yaml12 import show


class Algorithm:
    """The algorithm of one config, while it is written into a draft. settings: all names of the config with their
    values. A subclass reads one trainer. defaults: name -> the trainer's default, for every name that is read."""

    defaults: ClassVar[Mapping[str, Any]]

    def __init__(self, draft: Draft, settings: Mapping[str, Any]) -> None:
        self.draft, self.settings = draft, settings
        for name in settings:
            if self.handles(name):
                draft.notes.pop(name, None)

    @classmethod
    def class_for(cls, settings: Mapping[str, Any]) -> type[Algorithm]:
        """The class that reads these settings, for a trainer with several classes of algorithms."""
        return cls

    @classmethod
    def handles(cls, name: str) -> bool:
        """Whether `settle` handles a name."""
        return name in cls.defaults

    def settle(self, gpus: int | None, data_ranks: int | None) -> None:
        """Set every key that defines the algorithm, and add each quantity to draft.quantities. gpus, data_ranks:
        numbers of the old run, if known."""
        raise NotImplementedError

    def value(self, name: str) -> Any:
        """The value of a name, or the trainer's default if the config does not set it."""
        return self.settings.get(name, self.defaults[name])

    def number(self, name: str) -> float:
        """The value of a name as a number; 0 for null. A value that is known only during the run, such as a variable,
        is not a number: the method then returns the trainer's default, and the draft reports it."""
        value = self.value(name)
        number = next(numbers_of(value), None)
        if number is None and isinstance(value, str) and value.lower() not in ("null", "none", "~", ""):
            default = self.defaults[name]
            if all(quantity.name != name for quantity in self.draft.quantities):
                self.differs(name, f"{value}, which is known only during the run", f"the default, {show(default)}")
            number = next(numbers_of(default), None)
        return number or 0

    def on(self, name: str) -> bool:
        """Whether a switch is true."""
        value = self.value(name)
        return value.lower() == "true" if isinstance(value, str) else bool(value)

    def origin(self, name: str) -> str:
        """The origin of the value of a name, in words."""
        if name in self.settings:
            return name
        return f"{self.draft.trainer.short}'s" + ("" if name in self.draft.keys else f" default of {name}")

    def take(self, key: str, value: Any, name: str, origin: str = "") -> None:
        """Write a key. name: the name that determines it. origin: words for the comment, instead of the name."""
        if value is None or key not in self.draft.keys:
            self.draft.values[key] = (value, origin or self.origin(name), name)
        else:
            self.draft.take(key, value, name, origin or self.origin(name))

    def agrees(self, name: str, original: str, drafted: str) -> None:
        """Note a quantity that both trainers compute equally."""
        self.draft.compare(name, original, drafted)

    def differs(self, name: str, original: str, drafted: str) -> None:
        """Note a quantity that weft computes differently."""
        self.draft.compare(name, original, drafted, is_equal=False)

    def compare_values(self, quantities: Mapping[str, str]) -> None:
        """Note quantities that the draft copies unchanged. quantities: their names -> weft's key."""
        for quantity, key in quantities.items():
            if key in self.draft.values:
                self.agrees(quantity, show(self.draft.value(key)), show(self.draft.value(key)))

    def draws(self, names: Mapping[str, str], engine: str) -> None:
        """Set rollout.temperature, top_p, top_k and min_p. names: leaf of `rollout` -> the trainer's name. Without a
        name for a leaf, the trainer samples from all tokens. engine: of the draft."""
        limits = {}
        for leaf, keeps_all in KEEPS_ALL.items():
            number = self.number(names[leaf]) if leaf in names else keeps_all
            limits[leaf] = max(0, int(number)) if leaf == "top_k" else number
        short = self.draft.trainer.short
        for leaf, value in {"temperature": self.number(names["temperature"]), **limits}.items():
            name = names.get(leaf, f"rollout.{leaf}")
            self.take(f"rollout.{leaf}", value, name, "" if leaf in names else f"{short} has none")
        self.compare_values({
            "temperature of sampling and training": "rollout.temperature",
            **{leaf: f"rollout.{leaf}" for leaf in names if leaf != "temperature"},
        })  # fmt: skip
        if limits != KEEPS_ALL and engine in SERVERS:
            self.take("rollout.allow_truncated", True, names["top_p"],
                      f"{short} trains such samples as if they were drawn from all tokens")  # fmt: skip

    def alone(self, advantage: str) -> str:
        """The advantage that the draft uses. With one sample per prompt, a group has nothing to compare, so reinforce++
        replaces advantages that compare a group."""
        if self.draft.value("rl.group_size") != 1 or advantage not in ("grpo", "rloo", "reinforce++_baseline"):
            return advantage
        for key in ("rl.algorithm", "rl.advantage"):
            self.take(key, "reinforce++", key, f"{advantage} needs two samples per prompt")
        self.draft.values.pop("rl.advantage_norm", None)
        self.differs("advantage of a group of one sample", f"{advantage}: the reward itself",
                     "reinforce++: returns, whitened over all tokens")  # fmt: skip
        return "reinforce++"

    def clip_ratio(self, low: float, high: float, name: str, origin: str, dual: float | None, dual_name: str) -> None:
        """Set rl.clip and rl.dual_clip of a clipped loss. name, dual_name: the names that determine them."""
        low = min(1.0, low)  # a ratio is never below 0
        self.take("rl.clip", [low, high], name, origin)
        self.agrees("clip of the ratio", *[f"{1 - low:g} to {1 + high:g}"] * 2)
        self.take("rl.dual_clip", dual, dual_name)
        self.agrees("dual clip", *["none" if dual is None else f"{dual:g} x advantage, if that is negative"] * 2)

    def penalty(
        self,
        coef: float,
        name: str,
        used_in: str,
        estimator: str,
        clamp: float | None,
        unbiased: bool,
        original: str = "",
    ) -> None:
        """Set rl.kl_coef and the related keys. name: the name of the coefficient. original: the trainer's computation,
        if weft does not have it; "" if both are the same."""
        self.take("rl.kl_coef", coef, name)
        if not coef:
            self.agrees("KL", "none", "none")
            return
        short = self.draft.trainer.short
        self.take("rl.kl_in", used_in, name, f"{short}'s KL is in the {used_in}")
        self.take("rl.kl_estimator", estimator, name, f"{short}'s estimate")
        self.take("rl.kl_clamp", clamp, name, f"{short}'s limit of {estimator}")
        if used_in == "loss":
            self.take("rl.kl_unbiased", unbiased, name, "" if unbiased else f"{short} has no such factor")
        text = f"{coef:g} in the {used_in}, {estimator}{f' cut at {clamp:g}' if clamp else ''}{' x ratio' * unbiased}"
        (self.differs if original else self.agrees)("KL", original or text, text)

    def corrects(self, kind: str, level: str, low: float, high: float, name: str, original: str = "") -> None:
        """Set rl.correction, its level and limits. name: the name that determines them. original: the trainer's
        computation, if weft does not have it; "" if both are the same."""
        self.take("rl.correction", kind, name)
        if kind == "none":
            (self.differs if original else self.agrees)(
                "correction of the engine's mismatch", original or "none", "none"
            )
            return
        self.take("rl.correction_level", level, name)
        self.take("rl.correction_limits", [low, high], name)
        text = f"{kind} of each {level}, {low:g} to {high:g}"
        differs = bool(original) or not low <= 1 <= high
        (self.differs if differs else self.agrees)("correction of the engine's mismatch", original or text, text)

    def functions(self, paths: Sequence[str], name: str, signature: str) -> None:
        """Set rl.reward to functions that the user must write. paths: the trainer's functions, as in a/b.py or a.b.c.
        signature: their signature, in words."""
        stems = [path.removesuffix(".py").rpartition("/")[2].rpartition(".")[2].rpartition(":")[2] for path in paths]
        rewards = [f"my_rewards:{re.sub(r'[^0-9A-Za-z_]', '_', stem)}" for stem in stems]
        self.take("rl.reward", rewards, name, f"write it after {', '.join(paths)}: docs/how-to/write-a-reward.md")
        self.differs("reward", f"{', '.join(paths)}, of {signature}", f"{', '.join(rewards)}, of lists of completions")

    def updates(self, samples: int, name: str, origin: str) -> int:
        """Set rl.minibatches from the samples of an optimizer step; null if they do not divide the samples of a rollout
        step. Returns the optimizer steps of one pass over a rollout step's samples, or 1 if they are unknown."""
        prompts, group = self.draft.value("rl.prompts_per_step", 0), self.draft.value("rl.group_size", 1)
        count = prompts * group // samples if samples and prompts * group % samples == 0 else 0
        if count and prompts % count == 0:
            self.take("rl.minibatches", count, name, f"{prompts * group} samples / {origin}")
            return count
        text = (
            f"set it: {prompts * group} samples / {origin}, if that is a whole number that divides rl.prompts_per_step"
        )
        self.draft.values["rl.minibatches"] = (None, text, name)
        return 1

    def compare_steps(self) -> None:
        """Note sizes, lengths and the learning rate, which the draft copies unchanged."""
        self.compare_values({
            "prompts of a rollout step": "rl.prompts_per_step", "samples of a prompt": "rl.group_size",
            "optimizer steps of a rollout step": "rl.minibatches", "epochs": "rl.epochs",
            "longest prompt": "rollout.max_prompt_tokens", "longest completion": "rollout.max_new_tokens",
            "learning rate": "optimizer.lr",
        })  # fmt: skip

    def warmed(self, original: str) -> None:
        """Note the learning rates of the warm-up, if there is one. original: the trainer's rate in update k of W,
        counted from 1."""
        steps = self.draft.value("schedule.warmup_steps")
        if steps or self.draft.value("schedule.warmup_ratio"):
            self.differs("warm-up of W updates, in update k", original, "lr x k / W")

    def aggregation(self, mode: str, name: str, norm_name: str) -> None:
        """Set rl.loss_aggregation, and adapt the gradient norm and eps to it. mode: in the words of ROLL and verl.
        name, norm_name: the names of this setting, and of the maximum gradient norm."""
        equivalent = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}.get(mode, "sequence_sum")
        self.take("rl.loss_aggregation", equivalent, name)
        longest = self.draft.value("rollout.max_new_tokens")
        norm = self.value(norm_name)
        if equivalent != "sequence_sum":
            self.agrees("aggregation of the loss", mode, equivalent)
        elif mode == "seq-mean-token-sum" and isinstance(longest, int):
            # weft's loss is theirs / the maximum completion length. With eps and the norm divided by the same number,
            # the factor does not change AdamW's updates.
            self.agrees(
                "aggregation of the loss", mode, f"sequence_sum: the same / {longest}, as max_grad_norm and eps"
            )
            self.take("optimizer.eps", 1e-8 / longest, name, f"1e-8 / {longest}, like the loss")
            norm = None if norm is None else self.number(norm_name) / longest
        else:
            self.differs(
                "aggregation of the loss", mode, "sequence_sum: the mean over samples of sums / max_new_tokens"
            )
        origin = self.origin(norm_name) + (f", / {longest}" if norm != self.value(norm_name) else "")
        self.take("optimizer.max_grad_norm", norm, norm_name, origin)
