"""`weft verify` of a config of `weft reward`: its loss, gradients and training against transformers' classifier in one
process, one answer at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from weft.config.reward_schema import RewardLossConfig
from weft.data.documents import Documents
from weft.data.records import Role
from weft.engine.engine import Engine
from weft.models.freeze import resolved
from weft.verify.expected import ReferenceTrainer
from weft.verify.harness import Figure, trainer_of
from weft.verify.peft_reference import PeftReference
from weft.verify.reference import Reference
from weft.verify.synthetic_data import SyntheticDocument, synthetic_data
from weft.verify.training import PreparedSteps, TrainedLoss, verify_training

NAME = "scores: "
# Steps of pairs: (tokens of the prompt, of the chosen answer, of the rejected one).
_PAIRS = (((9, 21, 3), (1, 30, 9), (17, 3, 16), (23, 1, 1), (5, 12, 38)), ((16, 17, 5),), ((3, 13, 2), (20, 2, 29)))
_STEP = 7  # tokens of a step of process rewards


@dataclass(frozen=True)
class ScoredAnswer:
    """ids: the whole document. value: the margin of its pair, or the label of the answer. marks: position of the last
    token of a step -> the step's label, for process rewards."""

    ids: list[int]
    value: float
    marks: dict[int, int]


Example = tuple[ScoredAnswer, ...]  # (chosen, rejected), or one answer


def verify_reward(
    engine: Engine, path: str, prepared: PreparedSteps, steps: Sequence[Sequence[Example]], config: RewardLossConfig,
    lr: float,
) -> tuple[list[Figure], list[Figure]]:  # fmt: skip
    """(Figures, the parameters that differ most); empty except on the first rank. Trains the engine. Collective. path:
    of the model's weights. prepared: the mesh's side of the steps."""

    def open_plain(adapter: str | None) -> Reference:
        device = str(engine.device)
        if adapter is not None:
            return _PeftScorer(path, adapter, device, config, trainer_of(engine, path, [], adapter, {}))
        return PlainScorer(path, device, resolved(engine.module, engine.config.model.freeze), config)

    def losses(plain: Reference, step: Sequence[Example]) -> Iterator[Tensor]:
        yield _losses(plain, step, config)

    return verify_training(engine, TrainedLoss(NAME, prepared, steps, losses), open_plain, lr)


def awkward_answers(vocabulary: int, config: RewardLossConfig, seed: int = 0) -> list[list[Example]]:
    """Steps of pairs, or of answers with a label, of random tokens."""
    source, steps = random.Random(seed), list[list[Example]]()

    def answer(prompt: list[int], count: int, margin: float) -> ScoredAnswer:
        ids = prompt + [source.randrange(3, vocabulary) for _ in range(count)]
        ends = {*range(len(prompt) + _STEP - 1, len(ids), _STEP), len(ids) - 1}
        marks = {end: source.randrange(2) for end in sorted(ends)} if config.loss == "process" else {}
        value = source.randrange(config.labels) if config.loss == "classification" else source.uniform(-1, 1)
        return ScoredAnswer(ids, margin if config.loss == "bradley_terry" else value, marks)

    for shape in _PAIRS:
        pairs = list[Example]()
        for length, *lengths in shape:
            prompt, margin = [source.randrange(3, vocabulary) for _ in range(length)], source.random()
            pairs.append(tuple(answer(prompt, count, margin) for count in lengths))
        if config.loss != "bradley_terry":
            singles: list[Example] = [(each,) for pair in pairs for each in pair]
            pairs = singles[: len(pairs) + 2]
        steps.append(pairs)
    return steps


def answer_data(steps: Sequence[Sequence[Example]], config: RewardLossConfig) -> Documents:
    """The data set of these examples."""
    documents = list[SyntheticDocument]()
    for number, example in enumerate((example for step in steps for example in step), start=1):
        for index, answer in enumerate(example):
            trained = [answer.marks[i] + 1 if i in answer.marks else 0 for i in range(len(answer.ids))]
            if not answer.marks:
                trained[-1] = 1
            if config.loss == "bradley_terry":
                role: Role = "rejected" if index else "chosen"
                documents.append(SyntheticDocument(answer.ids, trained, number, role, answer.value))
            else:
                documents.append(SyntheticDocument(answer.ids, trained, number, margin=answer.value))
    return synthetic_data(documents)


class PlainScorer(Reference):
    """transformers' classifier of sequences, or of tokens for process rewards."""

    def __init__(self, path: str, device: str, freeze: Sequence[str], config: RewardLossConfig) -> None:
        self.config = config
        super().__init__(path, device, freeze)

    def load(self, path: str, **options: Any) -> Any:
        kind = "Token" if self.config.loss == "process" else "Sequence"
        auto_class = getattr(transformers, f"AutoModelFor{kind}Classification")
        return auto_class.from_pretrained(path, num_labels=self.config.labels, trust_remote_code=False, **options)


class _PeftScorer(PlainScorer, PeftReference):
    """A PlainScorer with an adapter, whose head is in the adapter's files."""

    def __init__(
        self, path: str, adapter: str, device: str, config: RewardLossConfig, trainer: ReferenceTrainer
    ) -> None:
        self.config = config
        PeftReference.__init__(self, path, adapter, device, quantised=trainer.quantised, frozen=trainer.frozen)


def _losses(plain: Reference, step: Sequence[Example], config: RewardLossConfig) -> Tensor:
    """The terms of a step's loss."""
    answers = [answer for example in step for answer in example]
    scores = [plain.logits(answer.ids) for answer in answers]
    if config.loss == "process":
        rows = torch.cat([row[list(answer.marks)] for row, answer in zip(scores, answers, strict=True)])
        labels = torch.tensor([label for answer in answers for label in answer.marks.values()], device=rows.device)
        return F.cross_entropy(rows, labels, reduction="none") / len(rows)
    score_NL, value_N = torch.stack(scores), torch.tensor([answer.value for answer in answers], device=scores[0].device)
    if config.loss == "classification":
        return F.cross_entropy(score_NL, value_N.long(), reduction="none") / len(answers)
    if config.loss == "regression":
        return (score_NL[:, 0] - value_N) ** 2 / len(answers)
    chosen, rejected = score_NL[:, 0].view(-1, 2).unbind(1)
    losses = -F.logsigmoid(chosen - rejected - value_N[::2])
    return (losses + config.center_rewards_coefficient * (chosen + rejected) ** 2) / len(step)
