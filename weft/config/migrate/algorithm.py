"""What the algorithms of other trainers' reinforcement learning are read by: one quantity after another.

Every key that defines the algorithm is written into the draft. None is left to weft's default. Where weft computes
something else, the quantity says so (`Quantity.same`), and the draft has to be confirmed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from weft.config.migrate.draft import Draft, numbers_of
from weft.config.yaml12 import show


class Algorithm:
    """One config's algorithm, being written into a draft. settings: all names of the config with their values. A
    subclass reads one trainer. defaults: name -> the trainer's default, of everything that is read."""

    defaults: ClassVar[Mapping[str, Any]]

    def __init__(self, draft: Draft, settings: Mapping[str, Any]) -> None:
        self.draft, self.settings = draft, settings
        for name in settings:
            if self.handles(name):
                draft.notes.pop(name, None)

    @classmethod
    def handles(cls, name: str) -> bool:
        """Whether `settle` says what becomes of a name."""
        return name in cls.defaults

    def settle(self, gpus: int | None, data_ranks: int | None) -> None:
        """Set every key that defines the algorithm, and note each quantity in draft.quantities. gpus, data_ranks: of
        the old run, if known."""
        raise NotImplementedError

    def value(self, name: str) -> Any:
        """The value of a name; the trainer's default if the config does not have it."""
        return self.settings.get(name, self.defaults[name])

    def number(self, name: str) -> float:
        """The value of a name as a number; 0 for null and for what is no number."""
        value = self.value(name)
        return next(numbers_of(value), 0) if value is not None else 0

    def on(self, name: str) -> bool:
        """Whether a switch is on."""
        value = self.value(name)
        return value.lower() == "true" if isinstance(value, str) else bool(value)

    def origin(self, name: str) -> str:
        """Where the value of a name comes from, in words."""
        return name if name in self.settings else f"{self.draft.trainer.short}'s default of {name}"

    def take(self, key: str, value: Any, name: str, origin: str = "") -> None:
        """Write a key. name: the name that decides it, unless `origin` says more."""
        if value is None or key not in self.draft.keys:
            self.draft.values[key] = (value, origin or self.origin(name), name)
        else:
            self.draft.take(key, value, name, origin or self.origin(name))

    def same(self, name: str, original: str, drafted: str) -> None:
        """Note a quantity that both compute alike."""
        self.draft.compare(name, original, drafted)

    def differs(self, name: str, original: str, drafted: str) -> None:
        """Note a quantity that weft computes otherwise."""
        self.draft.compare(name, original, drafted, same=False)

    def compare_values(self, quantities: Mapping[str, str]) -> None:
        """Note quantities that the draft takes unchanged. quantities: their names -> weft's key."""
        for quantity, key in quantities.items():
            if key in self.draft.values:
                self.same(quantity, show(self.draft.value(key)), show(self.draft.value(key)))

    def aggregation(self, mode: str, name: str, norm_name: str) -> None:
        """Set rl.loss_aggregation, and the gradient norm and eps that go with it. mode: as ROLL and verl name it. name,
        norm_name: of this setting, and of the largest gradient norm."""
        equivalent = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}.get(mode, "sequence_sum")
        self.take("rl.loss_aggregation", equivalent, name)
        longest = self.draft.value("rollout.max_new_tokens")
        norm = self.value(norm_name)
        if equivalent != "sequence_sum":
            self.same("aggregation of the loss", mode, equivalent)
        elif mode == "seq-mean-token-sum" and isinstance(longest, int):
            # weft's loss is theirs / the longest completion. AdamW does not see a factor once eps and the norm have it.
            self.same("aggregation of the loss", mode, f"sequence_sum: the same / {longest}, as max_grad_norm and eps")
            self.take("optimizer.eps", 1e-8 / longest, name, f"1e-8 / {longest}, as the loss")
            norm = None if norm is None else self.number(norm_name) / longest
        else:
            self.differs(
                "aggregation of the loss", mode, "sequence_sum: the mean over samples of sums / max_new_tokens"
            )
        origin = self.origin(norm_name) + (f", / {longest}" if norm != self.value(norm_name) else "")
        self.take("optimizer.max_grad_norm", norm, norm_name, origin)
