"""Noise on embeddings: NEFTune's, against plain transformers with the same noise added by hand, on every mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.support.cases import engine_config, pairs, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import Sections, equal, lines, process, whole_state
from tests.support.vision_zoo import saved_vision_model
from weft.config.schema import DataConfig, ModelConfig, SftConfig, TrainConfig
from weft.data.order import SampledStep
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.errors import UserError
from weft.launch.process import join
from weft.models import embedding_noise, hf
from weft.models.embedding_noise import StepNoise, noise_of
from weft.recipes import training
from weft.recipes.plan.simulate import Step as SimulatedStep
from weft.recipes.plan.simulate import rows_of
from weft.recipes.verify import verified_config
from weft.verify.documents import awkward_steps
from weft.verify.image_documents import shown
from weft.verify.image_reference import ImageReference
from weft.verify.observed import to_documents
from weft.verify.reference import Document, Reference

ALPHA, SEED, STEP = 8.0, 5, 3
_MASK = (1 << 64) - 1


def by_hand(seed: int, step: int, document: int, length: int, width: int, alpha: float = ALPHA) -> NDArray[np.float64]:
    """[length, width]: the noise of one document, in Python's own integers."""

    def hashed(key: int, number: int) -> int:
        key = (key + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        return key ^ (key >> 31)

    key = hashed(hashed(hashed(0, seed), step), document)
    bits = [[hashed(hashed(key, token), index) >> 40 for index in range(width)] for token in range(length)]
    return ((np.array(bits) + 0.5) / 2**23 - 1) * alpha / np.sqrt(length * width)


def open_noisy(path: str, mesh: str, sections: dict[str, dict[str, Any]], alpha: float | None = ALPHA) -> Engine:
    config = replace(engine_config(path, mesh, **sections), seed=SEED, neftune_noise_alpha=alpha)
    return Engine(config, join("cpu"))


def observed(path: str, mesh: str, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Loss and gradients of a step with noise; readouts and an evaluation, which have none."""
    engine = open_noisy(path, mesh, sections)
    documents, metas = to_documents(engine, awkward_steps(128)[0])
    plan = engine.plan(metas)
    rows = engine.rows(plan, documents, CrossEntropy(), STEP)
    loss = engine.accumulate(plan, rows, CrossEntropy())["loss"]
    gradients = {name: gradient.cpu() for name, gradient in engine.gradients() if gradient is not None}
    still = engine.readout(plan, documents)
    evaluated = engine.evaluate(plan, documents, CrossEntropy()).reduce(engine.mesh.world_group)["loss"]
    return {
        "loss": loss, "gradients": gradients,
        "readouts": {index: readout["logprob"] for index, readout in still.items()},
        "evaluated": evaluated, "cut": any(plan.shared_documents(m, 0) for m in range(plan.micro_batches)),
        "sequence": engine.divided.sequence, "layout": engine.built.layout,
    }  # fmt: skip


def expected(path: str, balance: float = 0.0) -> tuple[float, dict[str, Tensor], dict[int, Tensor], float]:
    """(Loss and gradients with noise, logprobs and loss without it) of plain transformers."""
    reference = Reference(path, balance=balance, whole_step=balance > 0)
    step = awkward_steps(128)[0]
    quiet = {index: reference.logprobs(ids)[0] for index, (ids, _) in enumerate(step)}
    calm, _ = reference.gradients(step)
    return *with_noise(reference, step), quiet, calm


def with_noise(reference: Reference, step: list[Document]) -> tuple[float, dict[str, Tensor]]:
    """(Loss, gradients) of plain transformers with noise added by hand to each document's embeddings."""
    called: list[int] = []

    def add(_: Any, __: Any, output: Tensor) -> Tensor:
        called.append(len(called))
        return output + torch.tensor(by_hand(SEED, STEP, called[-1], *output.shape[1:]), dtype=torch.float32)

    reference.plain.get_input_embeddings().register_forward_hook(add)
    loss, gradients = reference.gradients(step)
    assert len(called) == len(step)
    return loss, gradients


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Every parameter's gradient, as `weft verify` compares them."""
    assert actual.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((actual[name] - gradient).abs().max()) <= tolerance * scale, name


SHORT = {"step": {"max_tokens_per_device": 32}}
CASES = [
    ("llama", "2", SHORT | {"step": {"max_tokens_per_device": 64}}),
    ("llama", "cp2u2", SHORT),
    ("llama", "pp2i", {}),
    ("falcon", "2", {}),  # its documents are padded
    ("gpt2", "2", {}),
    ("gemma3_text", "tp2", {}),
    ("qwen3_moe", "pp2", {"model": {"router_aux_loss": "step", "router_aux_loss_coef": 0.02}}),  # counted before
    ("llama", "2", {"fsdp": {"wrap": ("layers", "embedding", "head")}, "model": {"recompute": "full"}}),
]


TABLE = [
    ("llama", "1", {}), ("llama", "tp2", {}), ("llama", "cp2", SHORT), ("llama", "pp2", {}), ("llama", "2xtp2", {}),
]  # fmt: skip


@pytest.mark.covers("train.neftune_noise_alpha")
@pytest.mark.parametrize(("family", "mesh", "sections"), pairs(CASES, TABLE))
def test_gradients_are_those_of_transformers_with_the_same_noise(
    family: str, mesh: str, sections: dict[str, dict[str, Any]]
) -> None:
    path = saved_model(family, **({"num_hidden_layers": 4} if mesh == "pp2i" else {}))
    loss, gradients, quiet, calm = expected(path, sections.get("model", {}).get("router_aux_loss_coef", 0.0))
    ranks = run(world_of(mesh), observed, path, mesh, sections)
    assert abs(loss - calm) > 1e-3
    for rank in ranks:
        assert rank["loss"] == pytest.approx(loss, rel=1e-6) and rank["evaluated"] == pytest.approx(calm, rel=1e-6)
        for index, logprobs in rank["readouts"].items():
            torch.testing.assert_close(logprobs, quiet[index], rtol=1e-4, atol=1e-5)
        assert_close(rank["gradients"], gradients)
    assert ranks[0]["cut"] == mesh.startswith("cp") and ranks[0]["sequence"] == ("tp" in mesh)


def observed_images(path: str, mesh: str) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
    """(Gradients of a step of documents with images, plain transformers'), on the first rank."""
    engine = open_noisy(path, mesh, {"step": {"max_tokens_per_device": 128}})
    plain = hf.build_random(hf.read_config(path), dtype=torch.float32, attention="eager", seed=0)
    steps, images, _ = shown(engine, awkward_steps(100), plain.model, True, False)
    documents, metas = to_documents(engine, steps[0], images)
    plan = engine.plan(metas)
    engine.accumulate(plan, engine.rows(plan, documents, CrossEntropy(), STEP), CrossEntropy())
    gradients = {name: gradient.cpu() for name, gradient in engine.gradients() if gradient is not None}
    if not engine.ranks.is_first:
        return None
    return gradients, with_noise(ImageReference(images, path), steps[0])[1]


@pytest.mark.parametrize(("family", "mesh"), [("qwen2_5_vl", "cp2"), ("gemma3", "2")])
def test_documents_with_images_have_the_noise_of_all_their_tokens(family: str, mesh: str) -> None:
    gradients = run(2, observed_images, saved_vision_model(family, 2, 1), mesh)[0]
    assert_close(*gradients)


# ---------------------------------------------------------------- the numbers


def test_it_is_uniform_and_another_for_each_seed_step_document_and_token() -> None:
    documents, tokens = torch.arange(20).repeat_interleave(30), torch.arange(30).repeat(20)
    noises: list[Tensor] = []
    for seed, step in ((0, 1), (0, 2), (1, 1), (1, 2), (2**40, 2**33)):
        keys = StepNoise(1.0, seed, step).keys(documents, tokens)
        assert len(set(keys.tolist())) == 600
        noises.append(noise_of(keys, torch.full((600,), 2.0), 64, torch.float32))
    joined = torch.cat(noises)
    assert len(joined.unique()) > 0.98 * joined.numel()  # of 2 ** 24 numbers some come twice
    assert float(joined.abs().max()) <= 0.25 < 1.001 * float(joined.abs().max())  # 2 / sqrt(64)
    assert float(joined.mean()) == pytest.approx(0.0, abs=1e-3)
    assert float(joined.square().mean()) == pytest.approx(0.25**2 / 3, rel=1e-2)
    counts = torch.histc(joined, 16, -0.25, 0.25)
    assert float((counts / counts.mean() - 1).abs().max()) < 0.05
    correlations = torch.corrcoef(torch.stack([noise.flatten() for noise in noises]))
    assert float((correlations - torch.eye(len(noises))).abs().max()) < 0.03


def test_it_does_not_depend_on_how_many_are_computed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, sizes = StepNoise(1.0, 0, 1).keys(torch.arange(50), torch.arange(50)), torch.rand(50)
    noise = noise_of(keys, sizes, 24, torch.bfloat16)
    monkeypatch.setattr(embedding_noise, "_CHUNK", 24 * 7)
    assert torch.equal(noise_of(keys, sizes, 24, torch.bfloat16), noise)


def refused() -> None:
    engine = open_noisy(saved_model("llama"), "1", {})
    documents, metas = to_documents(engine, awkward_steps(128)[0])
    plan = engine.plan(metas)
    with pytest.raises(ValueError, match="noise on embeddings depends on the step"):
        engine.accumulate(plan, documents, CrossEntropy())
    simulated = rows_of(engine, plan, SimulatedStep([meta.length for meta in metas], CrossEntropy()))
    assert simulated.noisy and simulated.ahead().noisy
    embedding = engine.module.get_submodule(engine.module.facts.embedding)
    engine.module.base.register_forward_pre_hook(lambda *_: embedding(torch.ones(1, 3, dtype=torch.int64)) and None)
    with pytest.raises(UserError, match=r"the embedding returns \(1, 3, 64\) for a row of"):
        engine.accumulate(plan, engine.rows(plan, documents, CrossEntropy(), STEP), CrossEntropy())


def test_it_is_refused_where_it_would_be_left_out_or_another() -> None:
    run(1, refused)


# ---------------------------------------------------------------- runs


def test_weft_verify_has_none() -> None:
    train = TrainConfig(neftune_noise_alpha=ALPHA)
    config = SftConfig(model=ModelConfig(path="m"), data=DataConfig(path="d.jsonl"), train=train)
    assert EngineConfig.from_config(config).neftune_noise_alpha == ALPHA
    assert EngineConfig.from_config(verified_config(config, "m")).neftune_noise_alpha is None


def test_a_run_says_which_step_it_lays_out() -> None:
    engine, objective = mock.Mock(), CrossEntropy()
    engine.plan_step.return_value = ("the plan", "documents")
    training.prepare_step(engine, [], objective, SampledStep(7, 1, []))
    engine.rows.assert_called_once_with("the plan", "documents", objective, 7)


def test_a_resumed_run_has_the_same_noise(tmp_path: Path) -> None:
    noisy: Sections = {"train": {"steps": 4, "epochs": None, "seed": 3, "neftune_noise_alpha": ALPHA}}
    process(tmp_path / "unbroken", "2", sections=noisy)
    process(tmp_path / "broken", "2", steps=2, sections=noisy)
    process(tmp_path / "broken", "2", resume=True, sections=noisy)
    losses = [[line["loss"] for line in lines(tmp_path / name)] for name in ("unbroken", "broken")]
    assert losses[0] == losses[1]
    assert equal(whole_state(tmp_path / "unbroken", 4), whole_state(tmp_path / "broken", 4))
    quiet: Sections = {"train": {**noisy["train"], "neftune_noise_alpha": None}}
    with pytest.raises(AssertionError, match=r"train.neftune_noise_alpha: 8.0 -> null"):
        process(tmp_path / "broken", "2", resume=True, sections=quiet)
