"""Reward models: scores, losses and gradients are those of transformers' classifier in one process, pair by pair."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from tests.support.cases import open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from tests.support.vision_zoo import saved_vision_model
from tests.support.zoo import LAYOUT_FAMILIES, tiny_config
from weft.checkpoint.save import Saver
from weft.config.schema import CheckpointConfig
from weft.engine.batch.document import Document
from weft.engine.batch.media import Media
from weft.engine.engine import Engine
from weft.engine.losses.base import Loss
from weft.engine.losses.reward import BradleyTerryLoss, ScoreClassificationLoss, ScoreRegressionLoss
from weft.engine.score_head import ScoreSpec
from weft.engine.scores import parts_pairs, scored_document, scored_length, step_scores
from weft.engine.selfcheck.architecture import examine, forget_checks
from weft.engine.selfcheck.score import check_scores
from weft.errors import UserError
from weft.launch.options import MergeOptions
from weft.models import hf
from weft.recipes.merge import run as merge
from weft.verify.harness import GRADIENT, SCALAR, compare_gradients
from weft.verify.image_documents import shown
from weft.verify.image_reference import ImageReference
from weft.verify.observed import Tensors
from weft.verify.plants import planted

CENTER, LR, VOCABULARY = 0.05, 0.05, 100
LENGTHS = ((9, 3, 30), (30, 17, 2), (5, 1, 1), (16, 23, 40), (12, 7, 8))  # of a prompt, its chosen and rejected answer
Answers = list[tuple[list[int], float]]  # (ids, margin)


@cache
def steps(count: int = 3) -> list[Answers]:
    """Three steps of pairs: five, one, and three; chosen and rejected answer after each other."""
    source, result = random.Random(7), list[Answers]()
    for part in (LENGTHS, LENGTHS[1:2], LENGTHS[2:])[:count]:
        step: Answers = []
        for prompt, *answers in part:
            ids, margin = [source.randrange(3, VOCABULARY) for _ in range(prompt)], source.random()
            step += [(ids + [source.randrange(3, VOCABULARY) for _ in range(n)], margin) for n in answers]
        result.append(step)
    return result


def documents_of(step: Answers, images: dict[tuple[int, ...], Any] | None = None) -> list[Document]:
    media = images or {}
    return [
        scored_document(torch.tensor(ids), None, {"margin": margin}, media=media.get(tuple(ids)))
        for ids, margin in step
    ]


def reward_engine(path: str, mesh: str, labels: int = 1, task: hf.ScoreTask = "sequence", **sections: Any) -> Engine:
    """With mesh.cp, rows are so short that answers are cut."""
    spec, tokens = ScoreSpec(labels, "transformers", task, end_marked=True), 32 if "cp" in mesh else 64
    optimizer = {"name": "sgd", "weight_decay": 0.0}
    sections = {"step": {"max_tokens_per_device": tokens}, "optimizer": optimizer} | sections
    return open_engine(path, mesh, score=spec, **sections)


def train(engine: Engine, objective: Loss, all_steps: list[list[Document]]) -> list[tuple[dict[str, Any], Tensors]]:
    """(Metrics, gradients) of each step."""
    results = []
    for documents in all_steps:
        plan, local = engine.plan_step(documents)
        if isinstance(objective, BradleyTerryLoss):
            objective.scores = step_scores(engine, plan, local) if parts_pairs(plan) else {}
        metrics = engine.accumulate(plan, local, objective)
        results.append((dict(metrics) | {"rows": plan.micro_batches, "parted": parts_pairs(plan)},
                        {name: g.clone() for name, g in engine.gradients() if g is not None}))  # fmt: skip
        engine.apply(LR)
    return results


def weft_steps(path: str, mesh: str, sections: dict[str, Any]) -> tuple[Tensors, Any]:
    """(Weights at first, results of the steps)."""
    engine = reward_engine(path, mesh, **sections)
    weights = {name: tensor.clone() for name, tensor in engine.tensors()}
    return weights, train(engine, BradleyTerryLoss(CENTER), [documents_of(step) for step in steps()])


def ours_planted(plant: str | None, path: str, mesh: str) -> tuple[Tensors, Any]:
    with planted(plant):
        return weft_steps(path, mesh, {})


def holds_with(plant: str | None) -> bool:
    """Whether the steps on two ranks are the plain ones, with this bug planted."""
    path = saved_model("llama")
    weights, results = run(2, ours_planted, plant, path, "2")[0]
    try:
        check(results, plain(path, weights))
    except AssertionError:
        return False
    return True


def plain_model(path: str, weights: Tensors, labels: int = 1, task: str = "Sequence") -> Any:
    """Transformers' classifier with our first head."""
    auto_class = getattr(transformers, f"AutoModelFor{task}Classification")
    model = auto_class.from_pretrained(path, num_labels=labels, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("score.", "classifier.")):
                parameter.copy_(weights[name])
    return model


Figures = dict[str, float | Tensor]


def descend(model: Any, losses: Sequence[Callable[[], Figures]]) -> list[tuple[Figures, Tensors]]:
    """(Figures, gradients) of each step of SGD."""
    results, optimizer = [], torch.optim.SGD(model.parameters(), lr=LR)
    for compute in losses:
        figures = compute()
        optimizer.zero_grad(set_to_none=True)
        figures["loss"].backward()  # type: ignore[union-attr]
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        results.append(({name: float(torch.as_tensor(value).detach()) for name, value in figures.items()}, gradients))
    return results


def pair_figures(model: Any, step: Answers, images: Callable[[list[int]], dict[str, Any]]) -> Figures:
    """One answer at a time."""
    values = [model(input_ids=torch.tensor([ids]), use_cache=False, **images(ids)).logits[0, 0] for ids, _ in step]
    chosen, rejected = torch.stack(values).view(-1, 2).unbind(1)
    margin = torch.tensor([margin for _, margin in step[::2]])
    loss = (-F.logsigmoid(chosen - rejected - margin)).mean() + CENTER * ((chosen + rejected) ** 2).mean()
    return {
        "loss": loss, "accuracy": (chosen > rejected).float().mean(), "margin": (chosen - rejected).mean(),
        "scores/chosen": chosen.mean(), "scores/rejected": rejected.mean(),
    }  # fmt: skip


def plain(path: str, weights: Tensors) -> list[tuple[Figures, Tensors]]:
    model = plain_model(path, weights)
    return descend(model, [partial(pair_figures, model, step, lambda ids: {}) for step in steps()])


def check(actual: Any, expected: Any, tolerance: float = GRADIENT) -> None:
    for number, ((metrics, gradients), (figures, truth)) in enumerate(zip(actual, expected, strict=True)):
        for name in figures:
            assert metrics[name] == pytest.approx(figures[name], rel=SCALAR, abs=SCALAR), (number, name)
        bad = [f for f in compare_gradients(gradients, truth, {}) if not f.value <= tolerance]
        assert not bad, (number, bad)


CASES = [
    ("llama", "2x2"), ("gemma3_text", "tp2"), ("qwen3", "cp2"), ("llama", "pp2"),
    ("qwen3_moe", "ep2"), ("qwen3_5_text", "2"),
]  # fmt: skip
TABLE = [
    (family, mesh)
    for family in ("llama", "llama_tied", "qwen3", "gemma3_text", "qwen3_moe", "qwen3_5_text")
    for mesh in ("1", "2", "2x2", "tp2", "cp2", "cp2u2", "pp2", "ep2", "2xtp2", "2xcp2")
    if (family != "qwen3_5_text" or mesh != "cp2")  # its states are shared by heads alone
    and (family, mesh) not in CASES
    and (mesh != "ep2" or family == "qwen3_moe")
]


@pytest.mark.parametrize(("family", "mesh"), pairs(CASES, TABLE))
def test_pairs(family: str, mesh: str) -> None:
    """Rows of 64 tokens: a step has several micro-batches, and its pairs are on several rows and ranks."""
    path = saved_model(family)
    weights, actual = run(world_of(mesh), weft_steps, path, mesh, {})[0]
    assert actual[0][0]["parted"] and actual[0][0]["rows"] * world_of(mesh) > 1
    check(actual, plain(path, weights))


@pytest.mark.parametrize("mesh", ["1"])
def test_pairs_that_are_not_parted(mesh: str) -> None:
    path = saved_model("qwen3")
    weights, actual = run(1, weft_steps, path, mesh, {"step": {"max_tokens_per_device": 512}})[0]
    assert not any(metrics["parted"] for metrics, _ in actual)
    check(actual, plain(path, weights))


# ---------------------------------------------------------------- other losses


def labelled(step: Answers, kind: str) -> list[Document]:
    """Documents with a label: a number or a class per answer, or a class at three tokens of it (or fewer)."""
    result = []
    for number, document in enumerate(documents_of(step)):
        length = len(document)
        label = torch.full((length,), number % 3 if kind == "class" else 0.3 * number - 1.0)
        weights = document.weights
        if kind == "steps":
            label, weights = (torch.arange(length) % 2).float(), torch.zeros(length)
            weights[torch.tensor(sorted({1 + length // 3, length - 2, length - 1} & set(range(1, length))))] = 1.0
        result.append(replace(document, arrays={"label": label}, weights=weights))
    return result


KINDS: dict[str, tuple[type[Loss], int, hf.ScoreTask]] = {
    "number": (ScoreRegressionLoss, 1, "sequence"), "class": (ScoreClassificationLoss, 3, "sequence"),
    "steps": (ScoreClassificationLoss, 2, "token"),
}  # fmt: skip


def ours_labelled(path: str, mesh: str, kind: str) -> tuple[Tensors, Any]:
    loss, labels, task = KINDS[kind]
    engine = reward_engine(path, mesh, labels, task)
    weights = {name: tensor.clone() for name, tensor in engine.tensors()}
    return weights, train(engine, loss(), [labelled(step, kind) for step in steps()])


def labelled_loss(model: Any, documents: list[Document], kind: str) -> Figures:
    """The mean over the step's labels, one answer at a time."""
    terms = []
    for document in documents:
        tokens, places = document.tokens[:-1], document.weights.nonzero()[:, 0]
        scores, labels = model(input_ids=tokens[None], use_cache=False).logits[0], document.arrays["label"][places]
        if kind == "number":
            terms.append((scores - labels) ** 2)
        else:
            rows = scores[places - 1] if kind == "steps" else scores[None]
            terms.append(F.cross_entropy(rows, labels.long(), reduction="none"))
    return {"loss": torch.cat(terms).mean()}


@pytest.mark.parametrize(("kind", "family", "mesh"), pairs(
    [("number", "qwen3", "2"), ("class", "llama", "tp2"), ("steps", "qwen3", "2xcp2"), ("steps", "gpt2", "pp2")],
    [(kind, "llama", mesh) for kind in KINDS for mesh in ("1", "2x2", "cp2", "pp2")],
))  # fmt: skip
def test_labels(kind: str, family: str, mesh: str) -> None:
    path, (_, labels, task) = saved_model(family), KINDS[kind]
    weights, actual = run(world_of(mesh), ours_labelled, path, mesh, kind)[0]
    model = plain_model(path, weights, labels, task.capitalize())
    documents = [labelled(step, kind) for step in steps()]
    check(actual, descend(model, [partial(labelled_loss, model, step, kind) for step in documents]))


# ---------------------------------------------------------------- images


def ours_with_images(path: str, mesh: str) -> tuple[Tensors, Any, list[Answers], Any]:
    engine = reward_engine(path, mesh, step={"max_tokens_per_device": 256})
    base = hf.build_random(hf.read_config(path), dtype=torch.float32, attention="eager", seed=0).model
    shown_steps, images, _ = shown(engine, [[(ids, [0.0] * len(ids)) for ids, _ in step] for step in steps()], base)
    all_steps = [[(ids, 0.1) for ids, _ in step] for step in shown_steps]
    vision = engine.built.vision
    assert vision is not None and any(images)
    media = {ids: Media.from_inputs(dict(inputs), vision.patches(inputs)) for ids, inputs in images.items()}
    weights = {name: tensor.clone() for name, tensor in engine.tensors()}
    results = train(engine, BradleyTerryLoss(CENTER), [documents_of(step, media) for step in all_steps])
    return weights, results, all_steps, images


@pytest.mark.parametrize(("family", "mesh"), pairs([("gemma3", "2")], [("gemma3", "tp2"), ("gemma3", "2x2")]))
def test_pairs_with_images(family: str, mesh: str) -> None:
    path = saved_vision_model(family)
    weights, actual, all_steps, images = run(world_of(mesh), ours_with_images, path, mesh)[0]
    reference = ImageReference(images, path)
    reference.plain = model = plain_model(path, weights)
    losses = [partial(pair_figures, model, step, lambda ids: reference.images([ids])) for step in all_steps]
    check(actual, descend(model, losses))


# ---------------------------------------------------------------- checkpoints


def saved(path: str, mesh: str, folder: str, sections: dict[str, Any]) -> list[float]:
    """The scores of the first step after a training step that is saved."""
    engine = reward_engine(path, mesh, **sections)
    documents = documents_of(steps()[0])
    train(engine, BradleyTerryLoss(CENTER), [documents])
    with Saver(engine, Path(folder), CheckpointConfig(async_=False), {}) as saver:
        saver.save(1, {})
        saver.finish()
    plan, local = engine.plan_step(documents)
    return list(step_scores(engine, plan, local).values())


def pooled(model: Any, padding: int) -> Tensor:
    """The scores of the first step as transformers pools them, in one right-padded batch."""
    ids = [torch.tensor(ids) for ids, _ in steps()[0]]
    batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=padding)
    mask = torch.stack([torch.arange(batch.shape[1]) < len(i) for i in ids])
    with torch.no_grad():
        return model.eval()(input_ids=batch, attention_mask=mask).logits[:, 0]


@pytest.mark.parametrize("mesh", ["2", "pp2"])
def test_a_saved_model_gives_its_scores_in_transformers(mesh: str, tmp_path: Path) -> None:
    scores = run(2, saved, saved_model("llama_tied"), mesh, str(tmp_path), {})[0]
    model, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "checkpoints" / "step-000001", dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and type(model).__name__.startswith("Llama")
    assert model.num_labels == 1 and model.config.pad_token_id == 0
    torch.testing.assert_close(pooled(model, 0), torch.tensor(scores), rtol=1e-4, atol=1e-4)


def test_a_saved_adapter_holds_the_head(tmp_path: Path) -> None:
    """In peft's format of task_type SEQ_CLS. The head is trained whole, and no adapter is put on it."""
    path = saved_model("qwen3")
    scores = run(2, saved, path, "2", str(tmp_path), {"lora": {"rank": 4}})[0]
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    described = json.loads((checkpoint / "adapter_config.json").read_text())
    assert described["task_type"] == "SEQ_CLS" and described["modules_to_save"] == ["score"]
    assert "score" not in described["target_modules"]
    merged = merge(MergeOptions(path=str(checkpoint)))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(merged, dtype=torch.float32)
    assert model.num_labels == 1
    torch.testing.assert_close(pooled(model, 0), torch.tensor(scores), rtol=1e-4, atol=1e-4)
    reloaded = run(1, adapter_scores, path, str(checkpoint))[0]
    torch.testing.assert_close(torch.tensor(reloaded), torch.tensor(scores), rtol=1e-5, atol=1e-5)


def adapter_scores(path: str, adapter: str) -> list[float]:
    engine = reward_engine(path, "1", lora={"path": adapter})
    plan, local = engine.plan_step(documents_of(steps()[0]))
    return list(step_scores(engine, plan, local).values())


# ---------------------------------------------------------------- families


FAMILIES = ("llama", "gpt2", "qwen3_5_text")
OTHER_FAMILIES = tuple(
    (family,)
    for family in LAYOUT_FAMILIES
    if family not in FAMILIES and tiny_config(family).model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
)


@pytest.mark.parametrize("family", pairs([(family,) for family in FAMILIES], OTHER_FAMILIES))
def test_classifiers_of_a_family_are_tried(family: str) -> None:
    for task in hf.ScoreTask.__args__[:2]:
        config = hf.without_noise(tiny_config(family))
        if task == "token" and config.model_type not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES:
            continue
        check_scores(hf.with_scores(config, 2, task), examine(config))


def test_a_class_that_computes_something_else_is_refused() -> None:
    config = tiny_config("llama")
    support, scores = examine(config), hf.with_scores(config)
    forward = transformers.LlamaForSequenceClassification.forward

    def doubled(self: Any, *arguments: Any, **options: Any) -> Any:
        out = forward(self, *arguments, **options)
        out.logits = out.logits * 2
        return out

    forget_checks()
    with (
        mock.patch.object(transformers.LlamaForSequenceClassification, "forward", doubled),
        pytest.raises(UserError, match="differ from its head"),
    ):
        check_scores(scores, support)
    forget_checks()


def test_the_scored_token_is_the_last_that_is_no_padding() -> None:
    tokens = torch.tensor([5, 0, 7, 0, 0])
    assert [scored_length(tokens, pad) for pad in (None, 3, 0)] == [5, 5, 3]
    assert scored_length(torch.zeros(3), 0) == 1
