"""The keys of `weft reward` that are not shared with `weft sft` (schema.py). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from weft.config.conditions import Unread
from weft.config.keys import key
from weft.config.ranges import AT_LEAST_2, NOT_NEGATIVE
from weft.config.schema import LabelKind, SftConfig, UndecayedOptimizerConfig


def _only(*losses: str) -> Unread:
    """Only these losses read the key."""
    return Unread(lambda c: c.reward.loss not in losses, f"only reward.loss={'|'.join(losses)} reads it")


@dataclass(frozen=True, kw_only=True)
class RewardLossConfig:
    """The loss of a reward model. See docs/how-to/reward-models.md."""

    loss: Literal["bradley_terry", "regression", "classification", "process"] = key(
        "`bradley_terry`: the chosen answer of a pair gets the higher score (rows with `chosen` and `rejected`); "
        "`regression`: the score is a number of the row (`label`); `classification`: a score for each class, and "
        "`label` is the class, counted from 0; `process`: each step of an answer is right or wrong (rows with "
        "`prompt`, `completions` and `labels`).",
        "bradley_terry",
    )
    center_rewards_coefficient: float = key(
        "Factor on the square of the sum of a pair's scores, which keeps scores around zero (arXiv:2312.09244).",
        0.0,
        within=NOT_NEGATIVE,
        unread=(_only("bradley_terry"),),
    )
    num_labels: int = key("Number of classes.", 2, within=AT_LEAST_2, unread=(_only("classification"),))
    head: Literal["transformers", "zeros", "normal"] = key(
        "Initialisation of a new head, with train.seed. `transformers`: as in the family's class; `zeros`; `normal`: "
        "variance 1 / (hidden size + 1). If the model already has a head, it is kept.",
        "transformers",
    )
    step_separator: str = key(
        "Text between the steps of an answer; its last token is scored.", "\n", unread=(_only("process"),)
    )
    train_on_last_step_only: bool = key("Train only on the last step of an answer.", False, unread=(_only("process"),))

    @property
    def labels(self) -> int:
        """The number of outputs of the head for each token."""
        return {"classification": self.num_labels, "process": 2}.get(self.loss, 1)


@dataclass(frozen=True, kw_only=True)
class RewardConfig(SftConfig):
    """The config of `weft reward`."""

    command: ClassVar[str] = "reward"

    reward: RewardLossConfig = field(default_factory=RewardLossConfig)
    optimizer: UndecayedOptimizerConfig = field(default_factory=UndecayedOptimizerConfig)

    @property
    def reads_preferences(self) -> bool:
        return self.reward.loss == "bradley_terry"

    @property
    def row_options(self) -> dict[str, Any]:
        kinds: dict[str, LabelKind] = {"regression": "number", "classification": "class", "process": "steps"}
        reward = self.reward
        return {
            "preferences": self.reads_preferences, "label": kinds.get(reward.loss, ""), "num_labels": reward.labels,
            "step_separator": reward.step_separator, "last_step_only": reward.train_on_last_step_only,
        }  # fmt: skip
