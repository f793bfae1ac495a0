"""`weft verify` for a config of `weft dpo`: compares its loss, gradients, reference and training, pair by pair, with
plain transformers (preference_reference.py).

The trained model is moved away from the reference, so that log ratios are not zero. The mesh's side runs the same code
as a run: the data set's roles and weights, the reference with its cache, KTO's mismatched answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from weft.config.dpo_schema import DpoConfig, own_reference
from weft.data.documents import Documents
from weft.data.limits import length_limit
from weft.data.records import Role
from weft.engine.engine import Engine
from weft.verify.harness import SCALAR, Figure, trainer_of
from weft.verify.image_documents import prompts_for, without_placeholders
from weft.verify.image_reference import ImageReference, Images, PeftImageReference
from weft.verify.observed import media_of
from weft.verify.peft_reference import PeftReference
from weft.verify.preference_reference import ComparedAnswer, kl_of, plain_losses, read_reference
from weft.verify.reference import Reference
from weft.verify.synthetic_data import SyntheticDocument, synthetic_data
from weft.verify.training import PreparedSteps, TrainedLoss, verify_training

NAME = "preferences: "
Example = tuple[ComparedAnswer, ...]


@dataclass(frozen=True)
class Readings:
    """Numbers of the mesh's side other than the trained model's. reference: [answers] logprob sums; None without a
    reference. kl: KTO's z of the first step."""

    reference: Tensor | None
    kl: float = 0.0


# Steps of pairs: (tokens of the prompt, of the chosen answer, of the rejected answer). The answers of most pairs have
# equal lengths, because two models rank the log ratios of such pairs differently. The second step has a single pair, so
# some ranks have none.
_PAIRS = (
    ((9, 21, 21), (1, 13, 13), (17, 16, 16), (23, 1, 1), (5, 12, 12), (14, 8, 38), (11, 14, 14)),
    ((16, 17, 5),),
    ((3, 13, 13), (20, 2, 29), (11, 26, 7)),
)


def verify_preferences(
    engine: Engine, path: str, config: DpoConfig, prepared: PreparedSteps, steps: Sequence[Sequence[Example]],
    readings: Readings, lr: float, images: Images,
) -> tuple[list[Figure], list[Figure]]:  # fmt: skip
    """(Figures, the parameters that differ most); empty except on the first rank. Trains the engine. Collective.

    path: of the model's weights. prepared: the mesh's side of the steps. readings: of the mesh's side. images: by the
    ids of their prompts.
    """
    answers = [answer for step in steps for example in step for answer in example]
    figures: list[Figure] = []

    def open_plain(adapter: str | None) -> Reference:
        plain = trainer_of(engine, path, [], adapter, images).reference()
        if readings.reference is not None:
            with _plain_reference(plain, config, path, str(engine.device), images) as reference:
                read_reference(reference, answers)
        return plain

    def losses(plain: Reference, step: Sequence[Example]) -> Iterator[Tensor]:
        if not figures and readings.reference is not None:  # before the first update
            expected = torch.tensor([answer.reference for answer in answers], dtype=torch.float64)
            figures.append(Figure(f"{NAME}reference logprobs", _relative(readings.reference, expected), SCALAR))
            if "kto" in config.preference.losses:
                kl = kl_of(plain, [answer for example in step for answer in example])
                scale = float(expected.abs().max())  # z is a difference of sums of this size
                figures.append(Figure(f"{NAME}z of KTO", abs(readings.kl - kl) / scale, SCALAR))
        yield from plain_losses(plain, step, config.preference)

    loss = TrainedLoss(NAME, prepared, steps, losses)
    of_training, worst = verify_training(engine, loss, open_plain, lr)
    return [*figures, *of_training], worst


def awkward_preferences(
    engine: Engine, path: str, vocabulary: int, config: DpoConfig, seed: int = 0
) -> tuple[list[list[Example]], Images]:
    """(Steps of pairs or of single answers, of random tokens, with margins; the images of their prompts, by the
    prompts' ids). Arguments: see prompts_for. Collective."""
    source = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [source.randrange(3, vocabulary) for _ in range(count)]

    preference, steps = config.preference, list[list[Example]]()
    for shape in _PAIRS:
        pairs = list[Example]()
        for length, *lengths in shape:
            prompt, margin = tokens(length), source.random() / 2
            pair = tuple(
                ComparedAnswer(prompt + tokens(count), length, margin, desired=role == 0, shorter=min(lengths))
                for role, count in enumerate(lengths)
            )
            for answer in pair:
                answer.tail = 1.0 if preference.ld_alpha is None else preference.ld_alpha
            pairs.append(pair)
        steps.append(pairs)
    bare = [[chosen.ids[: chosen.prompt] for chosen, _ in step] for step in steps]
    shown, images = prompts_for(engine, path, bare)
    for pair, prompt in zip(chain(*steps), chain(*shown), strict=True):
        for answer in pair:
            answer.ids = [*prompt, *without_placeholders(engine, answer.ids[answer.prompt :])]
            answer.prompt = len(prompt)
    if preference.is_paired:
        return steps, images
    singles = [[answer for example in step for answer in example][: len(step) + 2] for step in steps]
    limit, _ = length_limit(config.data, config.step.max_tokens_per_device, config.mesh.cp)
    data = [answer for step in singles for answer in step]
    for answer, before in zip(data, [data[-1], *data[:-1]], strict=True):
        ids = [*answer.ids[: answer.prompt], *before.ids[before.prompt :]]
        answer.mismatched = ComparedAnswer(ids[:limit], answer.prompt)
    return [[(answer,) for answer in step] for step in singles], images


def shows_whole_step(config: DpoConfig, policy: Tensor, readings: Readings, kl: float) -> bool:
    """Whether a statistic of the complete first step that the losses read would differ for a part of the step. policy:
    [D] logprob sums of the first step. kl: KTO's z, which is cut off at 0."""
    losses, half = config.preference.losses, len(policy) // 4
    if "kto" in losses:
        return kl > 0
    if not {"aot", "aot_unpaired"} & {*losses} or readings.reference is None:
        return True
    chosen, rejected = policy.view(-1, 2).unbind(1)
    ref_chosen, ref_rejected = readings.reference[: len(policy)].view(-1, 2).unbind(1)
    if "aot" in losses:
        sides = chosen - rejected, ref_chosen - ref_rejected
    else:
        sides = chosen - ref_chosen, rejected - ref_rejected
    ranks = [side.argsort().argsort() for side in sides]
    return {*ranks[0][:half].tolist()} != {*ranks[1][:half].tolist()}


def preference_data(engine: Engine, steps: Sequence[Sequence[Example]], config: DpoConfig, images: Images) -> Documents:
    """The data set of these examples."""
    documents = list[SyntheticDocument]()
    for number, example in enumerate((example for step in steps for example in step), start=1):
        roles: tuple[Role, ...] = ("chosen", "rejected")
        if len(example) == 1:
            roles = ("desired" if example[0].desired else "undesired",)
        for role, answer in zip(roles, example, strict=True):
            trained = [int(index >= answer.prompt) for index in range(len(answer.ids))]
            media = media_of(engine, answer.ids[: answer.prompt], images)
            documents.append(SyntheticDocument(answer.ids, trained, number, role, answer.margin, media, answer.prompt))
    return synthetic_data(documents, config.tail_weight)


@contextmanager
def _plain_reference(
    policy: Reference, config: DpoConfig, path: str, device: str, images: Images
) -> Iterator[Reference]:
    """The reference on the plain side. With adapters it may be the trained model without them."""
    if not own_reference(config):
        assert isinstance(policy, PeftReference)
        with policy.model.disable_adapter():
            yield policy
    elif config.lora.path is not None and config.reference.path is None:
        yield PeftImageReference(images, path, config.lora.path, device)
    else:
        yield ImageReference(images, config.reference.path or path, device)


def _relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value if that is above 1."""
    return float((actual - expected).abs().max()) / max(1.0, float(expected.abs().max()))
