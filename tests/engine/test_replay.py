"""Documents carry the routes by which they were drawn, and the engine follows them."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from tests.support.rl_samples import PROMPT, algorithm, rl_config, sample
from tests.support.toy_tokenizers import byte_tokenizer
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.engine.batch.document import Document
from weft.engine.batch.replay import LIVE, align_routes
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.engine.step_plan.plan import StepPlan
from weft.errors import UserError
from weft.inference.base import Request, SamplingParams
from weft.models.routing import replace_choices, replaced
from weft.rl.documents import build_documents
from weft.rl.trainer import TrainerRank
from weft.verify.documents import awkward_steps
from weft.verify.harness import GRADIENT, SCALAR, compare_gradients
from weft.verify.observed import Tensors, to_documents

STEP = awkward_steps(128)[0]
LAYERS, EXPERTS, CHOSEN = 2, 5, 2


def drawn_routes() -> list[Tensor]:
    """[T, layers, k] of each document: others than the model would choose, and none of its last token."""
    generator = torch.Generator().manual_seed(3)
    routes = [torch.rand(len(ids), LAYERS, EXPERTS, generator=generator).topk(CHOSEN)[1] for ids, _ in STEP]
    return [align_routes(record[:-1], len(record)) for record in routes]


def documents_of(engine: Engine, routes: list[Tensor] | None) -> tuple[dict[int, Document], StepPlan]:
    documents, _ = to_documents(engine, STEP)
    if routes is not None:
        documents = {i: replace(d, routes=routes[i]) for i, d in documents.items()}
    return documents, engine.plan(engine.planner.metadata(documents.values()))


def replayed_step(path: str, mesh: str, recompute: str) -> tuple[dict[str, Any], Tensors, dict[int, Tensor]]:
    """(metrics, gradients, logprobs)."""
    engine = open_engine(path, mesh, model={"recompute": recompute}, step={"max_tokens_per_device": 61})
    documents, plan = documents_of(engine, drawn_routes())
    metrics = engine.accumulate(plan, documents, CrossEntropy())
    gradients = {name: g for name, g in engine.gradients() if g is not None}
    engine.drop_gradients()
    logprobs = {i: values["logprob"] for i, values in engine.readout(plan, documents).items()}
    plain = documents_of(engine, None)
    assert "routing/differing" not in engine.accumulate(plain[1], plain[0], CrossEntropy())
    return metrics, gradients, logprobs


def plain(path: str) -> tuple[float, float, Tensors, list[Tensor]]:
    """(loss, share of choices that differ, gradients, logprobs) of a plain model whose routers are told."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    total, differing, recorded = sum(sum(mask[1:]) for _, mask in STEP), 0, 0
    losses, logprobs = [], []
    for (ids, mask), routes in zip(STEP, drawn_routes(), strict=True):

        def choose(layer: int, scores: Tensor, out: Any, recorded_routes: Tensor = routes) -> Any:
            nonlocal differing, recorded
            indices = out[1].clone()
            for token, chosen in enumerate(recorded_routes[:, layer].tolist()):
                if chosen[0] != LIVE:
                    differing += set(chosen) != set(indices[token].tolist())
                    recorded += 1
                    indices[token] = torch.tensor(chosen)
            return replaced(scores, out, indices)

        with replace_choices(list(model.model.layers), EXPERTS, CHOSEN, choose):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        logprob = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]
        logprobs.append(logprob.detach())
        losses.append(-(torch.tensor(mask[1:]) * logprob).sum() / total)
    loss = torch.stack(losses).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), differing / recorded, gradients, logprobs


@pytest.mark.parametrize(("mesh", "recompute"), [("2", "full"), ("1", "none")])
def test_routes_are_followed_in_forward_and_recompute_and_routers_learn(mesh: str, recompute: str) -> None:
    path = saved_model("qwen3_moe")
    by_rank = run(world_of(mesh), replayed_step, path, mesh, recompute)
    loss, differing, expected, values = plain(path)
    metrics, gradients, _ = by_rank[0]
    assert metrics["loss"] == pytest.approx(loss, rel=SCALAR)
    assert metrics["routing/differing"] == pytest.approx(differing, abs=1e-9) and 0.5 < differing < 1
    figures = compare_gradients(gradients, expected, {})
    assert all(figure.value <= GRADIENT for figure in figures), figures
    assert all(gradients[f"model.layers.{layer}.mlp.gate.weight"].any() for layer in range(LAYERS))
    for _, _, logprobs in by_rank:
        for index, logprob in logprobs.items():
            torch.testing.assert_close(logprob[1:], values[index], rtol=SCALAR, atol=SCALAR)


def ignored(path: str) -> tuple[bool, bool, bool]:
    """Whether the routes make no difference: to a reference; to the base under adapters; to the adapted model."""
    unchanged = []
    for lora, replay in ((None, False), (4, True), (4, True)):
        engine = open_engine(path, "1", lora={"rank": lora}, replay=replay)
        base = engine.without_adapter() if len(unchanged) == 1 else nullcontext()
        with base:
            with_routes, without = (
                engine.readout(plan, documents)
                for documents, plan in (documents_of(engine, routes) for routes in (drawn_routes(), None))
            )
        unchanged.append(all(torch.equal(with_routes[i]["logprob"], without[i]["logprob"]) for i in without))
    return unchanged[0], unchanged[1], unchanged[2]


def test_reference_and_base_choose_their_own_routes() -> None:
    assert run(1, ignored, saved_model("qwen3_moe")) == [(True, True, False)]


def test_samples_become_documents_with_their_routes() -> None:
    record = np.arange(2 * 3 * 2, dtype=np.uint8).reshape(2, 3, 2)
    drawn = sample(1, 2, 1.0, old_logprobs=[0, 0], advantages=[1, 1])
    drawn.routes = np.concatenate([record, record])
    (document,) = build_documents([drawn], rl_config(algorithm()))
    assert document.routes is not None and document.meta().routed
    assert document.routes.tolist() == [*record.tolist(), *record.tolist(), [[LIVE] * 2] * 3]


def own_routes(path: str) -> float | None:
    """The share that differs where the record is what the model chooses by itself."""
    engine = open_engine(path, "1", step={"max_tokens_per_device": 512})
    documents, plan = documents_of(engine, None)
    record: dict[int, Tensor] = {}

    def keep(layer: int, scores: Tensor, out: Any) -> Any:
        record[layer] = out[1]
        return out

    with replace_choices([layer for _, layer in engine.module.layers], EXPERTS, CHOSEN, keep):
        engine.readout(plan, documents)
    (row,) = plan.rows_of_rank(0)
    stacked = torch.stack([record[layer] for layer in range(LAYERS)], 1)
    parts = dict(zip(row, stacked.split([plan.documents[i].read for i in row]), strict=True))
    documents, plan = documents_of(engine, [align_routes(parts[i], len(documents[i])) for i in range(len(documents))])
    return engine.accumulate(plan, documents, CrossEntropy())["routing/differing"]


def test_the_models_own_routes_do_not_differ() -> None:
    assert run(1, own_routes, saved_model("qwen3_moe")) == [0.0]


def refusals(path: str, dense: str) -> list[str]:
    """What records that cannot be followed are answered with."""
    engine, messages = open_engine(path, "1"), []
    with mock.patch("weft.engine.executor.hides_routers", return_value=False):
        compiled = open_engine(path, "1", model={"compile": True})
    right = drawn_routes()
    wrong: list[tuple[Engine, Tensor]] = [
        (engine, right[0][1:]),  # of one token less
        (engine, right[0][:, :1]),
        (engine, right[0][..., :1]),
        (engine, right[0] + 3),
        (open_engine(dense, "1"), right[0]),
        (compiled, right[0]),
    ]
    for changed, routes in wrong:
        documents, plan = documents_of(changed, [routes, *right[1:]])
        with pytest.raises((ValueError, UserError)) as caught:
            changed.accumulate(plan, documents, CrossEntropy())
        messages.append(str(caught.value))
    return messages


def test_records_that_do_not_fit_are_named() -> None:
    (messages,) = run(1, refusals, saved_model("qwen3_moe"), saved_model("llama"))
    assert messages[0] == (
        "routes of a document have shape [36, 2, 2], but must have [37, 2, 2]: tokens, decoder layers, "
        "experts per token. They belong to other tokens or to another model."
    )
    assert "[37, 1, 2], but must have [37, 2, 2]" in messages[1] and "[37, 2, 1], but must have" in messages[2]
    assert messages[3].endswith("contain expert 7, but the model has experts 0 to 4")
    assert "this model has no experts" in messages[4] and "Set model.compile=false" in messages[5]
    with pytest.raises(ValueError, match="routes of 5 tokens for a sample of 7"):
        align_routes(torch.zeros(5, 2, 2), 7)


# ---------------------------------------------------------------- with the embedded engine


def drawn_and_trained(path: str) -> tuple[float, list[float]]:
    """(largest difference of recorded and read logprobs, share of choices that differ at each of two updates)."""
    keys = ["rl.reward=[length]", "rl.correction=none", "rollout.max_new_tokens=9", "rollout.max_prompt_tokens=9"]
    config = load_config([], [f"model.path={path}", "data.path=owner/data", "optimizer.lr=0.05", *keys], RlConfig)
    trainer = TrainerRank(config, "cpu")
    trainer.sync(1)
    (completions,) = trainer.embedded.generate([Request("p", PROMPT, (0, 1, 2, 3), SamplingParams(9))])
    samples, worst = [], 0.0
    for number, completion in enumerate(completions):
        arrays = {"rollout_logprobs": completion.logprobs, "advantages": [(-1.0) ** number] * len(completion.tokens)}
        drawn = sample(number, len(completion.tokens), 1.0, **arrays)
        drawn.tokens[drawn.sampled], drawn.routes = completion.tokens, completion.routes
        samples.append(drawn)
    for index, old in trainer.read("policy", samples).items():
        samples[index].old_logprobs = old
        worst = max(worst, float(np.abs(old - samples[index].rollout_logprobs).max()))
    lines = [trainer.update(samples, number, 2, 1, 0.05).line for number in (1, 2)]
    return worst, [float(str(line["routing/differing"])) for line in lines]


def test_what_the_embedded_engine_drew_is_trained_along_its_routes(tmp_path: Path) -> None:
    path = saved_model("qwen3_moe", vocab_size=264)
    shutil.copytree(path, tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    ((worst, shares),) = run(1, drawn_and_trained, str(tmp_path / "model"))
    assert worst < 1e-4 and shares[0] == 0.0 and 0.0 < shares[1] < 1.0, (worst, shares)


def copied_routes(path: str) -> list[int]:
    """Samples whose routes this rank copies to read 8, and to train them."""
    config = load_config([], [f"model.path={path}", "data.path=owner/data", "rl.reward=[length]"], RlConfig)
    trainer, counts = TrainerRank(config, "cpu"), []
    samples = [sample(n, 9, 1.0, rollout_logprobs=[-1.0] * 9, advantages=[1.0] * 9) for n in range(8)]
    for number, drawn in enumerate(samples):
        drawn.routes = np.full((len(drawn) - 1, LAYERS, CHOSEN), [number % 2, 2], np.int16)
    with mock.patch("weft.rl.documents.align_routes", wraps=align_routes) as counting:
        read = trainer.read("policy", samples)
        counts.append(counting.call_count)
        for old in gather_objects(read):
            for index, values in old.items():
                samples[index].old_logprobs = samples[index].correction = values
        trainer.update(samples, 1, 1, 1, 0.05)
        counts.append(counting.call_count - counts[0])
    return [*counts, len(read)]


def gather_objects(local: Any) -> list[Any]:
    """Of all ranks."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    return parts


def test_a_rank_copies_the_routes_of_its_own_samples_only(tmp_path: Path) -> None:
    path = saved_model("qwen3_moe", vocab_size=264)
    shutil.copytree(path, tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    assert run(2, copied_routes, str(tmp_path / "model")) == [[4, 4, 4], [4, 4, 4]]
