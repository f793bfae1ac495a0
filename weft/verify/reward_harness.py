"""`weft verify` for a config of `weft reward`: compares its loss, gradients and training with transformers' classifier
in one process, one answer at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from weft.verify.image_documents import prompts_for, without_placeholders
from weft.verify.image_reference import ImageReference, Images
from weft.verify.observed import media_of
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
    """ids: of prompt and answer. prompt: tokens of the prompt. value: the margin of its pair, or the label of the
    answer. marks: position of the last token of a step -> the step's label, for process rewards."""

    ids: list[int]
    prompt: int
    value: float
    marks: dict[int, int]


Example = tuple[ScoredAnswer, ...]  # (chosen, rejected), or one answer


def verify_reward(
    engine: Engine, path: str, prepared: PreparedSteps, steps: Sequence[Sequence[Example]], config: RewardLossConfig,
    lr: float, images: Images,
) -> tuple[list[Figure], list[Figure]]:  # fmt: skip
    """(Figures, the parameters that differ most); empty except on the first rank. Trains the engine. Collective. path:
    of the model's weights. prepared: the mesh's side of the steps. images: by the ids of their prompts."""

    def open_plain(adapter: str | None) -> Reference:
        device = str(engine.device)
        if adapter is not None:
            return _PeftScorer(path, adapter, device, config, trainer_of(engine, path, [], adapter, images))
        return PlainScorer(path, device, resolved(engine.module, engine.config.model.freeze), config, images)

    def losses(plain: Reference, step: Sequence[Example]) -> Iterator[Tensor]:
        yield _losses(plain, step, config)

    return verify_training(engine, TrainedLoss(NAME, prepared, steps, losses), open_plain, lr)


def awkward_answers(
    engine: Engine, path: str, vocabulary: int, config: RewardLossConfig, seed: int = 0
) -> tuple[list[list[Example]], Images]:
    """(Steps of pairs, or of answers with a label, of random tokens; the images of their prompts, by the prompts' ids).
    Arguments: see prompts_for. Collective."""
    source, steps = random.Random(seed), list[list[Example]]()

    def answer(prompt: list[int], count: int, margin: float) -> ScoredAnswer:
        ids = prompt + [source.randrange(3, vocabulary) for _ in range(count)]
        ends = {*range(len(prompt) + _STEP - 1, len(ids), _STEP), len(ids) - 1}
        marks = {end: source.randrange(2) for end in sorted(ends)} if config.loss == "process" else {}
        value = source.randrange(config.labels) if config.loss == "classification" else source.uniform(-1, 1)
        return ScoredAnswer(ids, len(prompt), margin if config.loss == "bradley_terry" else value, marks)

    for shape in _PAIRS:
        pairs = list[Example]()
        for length, *lengths in shape:
            prompt, margin = [source.randrange(3, vocabulary) for _ in range(length)], source.random()
            pairs.append(tuple(answer(prompt, count, margin) for count in lengths))
        steps.append(pairs)
    images: Images = {}
    if config.loss != "process":
        bare = [[pair[0].ids[: pair[0].prompt] for pair in step] for step in steps]
        shown, images = prompts_for(engine, path, bare)
        steps = [
            [tuple(_behind(engine, prompt, each) for each in pair) for prompt, pair in zip(*of_step, strict=True)]
            for of_step in zip(shown, steps, strict=True)
        ]
    if config.loss != "bradley_terry":
        singles: list[list[Example]] = [[(each,) for pair in step for each in pair] for step in steps]
        steps = [answers[: len(step) + 2] for answers, step in zip(singles, steps, strict=True)]
    return steps, images


def _behind(engine: Engine, prompt: list[int], answer: ScoredAnswer) -> ScoredAnswer:
    """The answer to a prompt with images."""
    ids = [*prompt, *without_placeholders(engine, answer.ids[answer.prompt :])]
    return replace(answer, ids=ids, prompt=len(prompt))


def answer_data(
    engine: Engine, steps: Sequence[Sequence[Example]], config: RewardLossConfig, images: Images
) -> Documents:
    """The data set of these examples."""
    documents = list[SyntheticDocument]()
    for number, example in enumerate((example for step in steps for example in step), start=1):
        for index, answer in enumerate(example):
            trained = [answer.marks[i] + 1 if i in answer.marks else 0 for i in range(len(answer.ids))]
            if not answer.marks:
                trained[-1] = 1
            role: Role = ""
            if config.loss == "bradley_terry":
                role = "rejected" if index else "chosen"
            media = media_of(engine, answer.ids[: answer.prompt], images)
            documents.append(SyntheticDocument(answer.ids, trained, number, role, answer.value, media, answer.prompt))
    return synthetic_data(documents)


class PlainScorer(ImageReference):
    """transformers' classifier of sequences, or of tokens for process rewards."""

    def __init__(self, path: str, device: str, freeze: Sequence[str], config: RewardLossConfig, images: Images) -> None:
        self.config = config
        super().__init__(images, path, device, freeze)

    def load(self, path: str, **options: Any) -> Any:
        kind = "Token" if self.config.loss == "process" else "Sequence"
        auto_class = getattr(transformers, f"AutoModelFor{kind}Classification")
        return auto_class.from_pretrained(path, num_labels=self.config.labels, trust_remote_code=False, **options)


class _PeftScorer(PlainScorer, PeftReference):
    """A PlainScorer with an adapter, whose head is in the adapter's files."""

    def __init__(
        self, path: str, adapter: str, device: str, config: RewardLossConfig, trainer: ReferenceTrainer
    ) -> None:
        self.config, self.inputs_by_ids = config, trainer.images
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
