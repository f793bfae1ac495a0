"""rl.on_policy=exact: what the embedded engine records when it samples is, to the last bit, what the trainer reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from tests.support.rl_samples import sample
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.errors import UserError
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.embedded import EmbeddedEngine
from weft.inference.types import Prompt, Sample
from weft.ops import exact
from weft.ops.attention_call import Bounds, Call
from weft.ops.exact_attention import attend_exactly
from weft.ops.per_document import per_document
from weft.parallel.mesh import local_shard
from weft.rl import exact as proof
from weft.rl.exact import ExactnessResult, prove_exact, require_exact, try_engine
from weft.verify.adapter import randomize_adapters

TEMPERATURE = 0.9
# Prompt, completion and samples: over a block of keys in the prompt, in the completion, and in neither.
SHAPES = ((1, 70, 1), (14, 40, 3), (63, 2, 1), (64, 41, 2), (90, 30, 1))


def opened(path: str, mesh: str, **keys: Any) -> tuple[Engine, EmbeddedEngine]:
    engine = open_engine(path, mesh, exact=True, temperature=TEMPERATURE, step={"max_tokens_per_device": 300}, **keys)
    embedded = EmbeddedEngine(engine)
    embedded.wake()
    return engine, embedded


def requests() -> list[Request]:
    generator = np.random.default_rng(1)
    return [
        Request(str(n), tuple(generator.integers(3, 120, prompt).tolist()), tuple(range(samples)),
                SamplingParams(completion, TEMPERATURE))
        for n, (prompt, completion, samples) in enumerate(SHAPES)
    ]  # fmt: skip


def mismatch(engine: Engine, batch: list[Request], answers: list[list[Completion]]) -> tuple[int, int]:
    """(tokens, those of them whose logprob the trainer has otherwise), of the documents that this rank reads."""
    pairs = [(request, completion) for request, group in zip(batch, answers, strict=True) for completion in group]
    tokens_of = [torch.tensor(request.tokens + completion.tokens) for request, completion in pairs]
    documents = {n: Document(tokens, torch.ones(len(tokens))) for n, tokens in enumerate(tokens_of)}
    plan = engine.plan(engine.planner.metadata(documents.values()))
    compared = differing = 0
    for n, readout in engine.readout(plan, {i: documents[i] for i in engine.planner.local_documents(plan)}).items():
        recorded = torch.tensor(pairs[n][1].logprobs)
        compared += len(recorded)
        differing += int((readout["logprob"][-len(recorded) :] != recorded).sum())
    return compared, differing


def exactness(path: str, mesh: str, plant: bool) -> dict[str, tuple[int, int] | bool]:
    engine, embedded = opened(path, mesh)
    batch = requests()
    answers = embedded.generate(batch)
    verdicts: dict[str, tuple[int, int] | bool] = {"exact": mismatch(engine, batch, answers)}
    assert embedded.generator is not None
    embedded.generator.max_tokens = 200  # few rows at a time
    verdicts["the same in other batches"] = embedded.generate(batch[::-1])[::-1] == answers
    for name in ("_ROWS", "_ELEMENTS") if plant else ():
        original = getattr(exact, name)
        setattr(exact, name, 1)
        try:
            verdicts[f"planted: {name}"] = mismatch(engine, batch[1:2], embedded.generate(batch[1:2]))
        finally:
            setattr(exact, name, original)
    engine.module.hf_model.set_attn_implementation("weft_per_document")
    verdicts["planted: attention"] = mismatch(engine, batch, answers)
    engine.module.hf_model.set_attn_implementation("weft_exact")
    if engine.ranks.rank == 0:
        local_shard(engine.module.layers[0][1].get_parameter("self_attn.q_proj.weight").detach()).view(-1)[0] += 1e-6
    verdicts["a weight moved"] = mismatch(engine, batch, answers)
    embedded.wake()
    verdicts["exact after the next sync"] = mismatch(engine, batch[:2], embedded.generate(batch[:2]))
    return verdicts


@pytest.mark.parametrize(
    ("family", "mesh"), [("llama", "1"), ("qwen3", "2"), ("gemma3_text", "1"), ("qwen3_moe", "pp2x2")]
)
def test_logprobs_are_recorded_as_the_trainer_reads_them(family: str, mesh: str) -> None:
    """Over hundreds of tokens, whole weights or shards, with windows, experts; and each thing done for it is needed."""
    ranks = run(world_of(mesh), exactness, saved_model(family), mesh, family == "llama")
    assert all(verdicts.pop("the same in other batches") for verdicts in ranks)
    total = {name: np.sum([verdicts[name] for verdicts in ranks], 0) for name in ranks[0]}
    tokens, differing = total.pop("exact")
    assert tokens > 300 and differing == total.pop("exact after the next sync")[1] == 0
    if torch.backends.cpu.get_cpu_capability() == "AVX2":  # there (an AMD EPYC) remainders are rounded as vectors are
        total.pop("planted: _ELEMENTS", None)
    assert all(compared > 0 for _, compared in total.values()), total


# ---------------------------------------------------------------- attention by itself


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "kind", [{}, {"window": 16, "softcap": 5.0}, {"sinks": True}], ids=["plain", "window", "sinks"]
)
def test_exact_attention_is_attention(kind: dict[str, Any], padded: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths, batch = ((70, 1, 300, 64, 9), 1) if not padded else ((90, 90), 2)
    length = sum(lengths) if not padded else lengths[0]
    query, key, value = (
        torch.randn(batch, length, heads, width, generator=generator).transpose(1, 2).requires_grad_()
        for heads, width in ((4, 16), (2, 16), (2, 24))
    )
    sinks = torch.randn(4, generator=generator).requires_grad_() if kind.get("sinks") else None
    call = Call(query, key, value, Bounds(lengths, padded), 0.3, kind.get("window"), kind.get("softcap"), sinks)
    inputs: list[Tensor] = [x for x in (query, key, value, sinks) if x is not None]
    actual, expected = attend_exactly(call), per_document(call)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
    upstream = torch.randn(expected.shape, generator=generator)
    for gradient, reference in zip(
        *(torch.autograd.grad(out, inputs, upstream) for out in (actual, expected)), strict=True
    ):
        assert torch.equal(gradient, reference)


def test_a_token_sees_the_same_in_a_row_and_in_a_cache() -> None:
    """Whole documents in a row, and each alone with the keys that a cache has, in a batch of other rows."""
    generator = torch.Generator().manual_seed(1)
    lengths = (70, 300, 9)
    query, key, value = (torch.randn(1, heads, 379, 16, generator=generator) for heads in (6, 2, 2))
    uncached = attend_exactly(Call(query, key, value, Bounds(lengths), 0.3, 100, None, None))[0]
    for past in (0, 5, 63, 64, 255, 256, 299):
        rows = [(start, min(past, length - 1)) for start, length in zip((0, 70, 370), lengths, strict=True)]
        slots = max(n for _, n in rows) + 1
        keys, values = (torch.zeros(3, 2, slots, 16) for _ in range(2))
        for row, (start, n) in enumerate(rows):
            keys[row, :, : n + 1], values[row, :, : n + 1] = (x[0, :, start : start + n + 1] for x in (key, value))
        asking = torch.stack([query[0, :, start + n : start + n + 1] for start, n in rows])
        bounds = Bounds((1,) * 3, padded=True, past=torch.tensor([n for _, n in rows]))
        out = attend_exactly(Call(asking, keys, values, bounds, 0.3, 100, None, None))
        assert torch.equal(out[:, :, 0], torch.stack([uncached[:, start + n] for start, n in rows])), past


# ---------------------------------------------------------------- the proof at start, and of every sample


def proofs(path: str, lora: dict[str, Any]) -> ExactnessResult | str:
    try:
        engine = open_engine(path, "2", exact=True, **({"lora": {"rank": 4, **lora}} if lora else {}))
        randomize_adapters(engine)
        embedded = EmbeddedEngine(engine)
        embedded.wake()
        return prove_exact(engine, embedded, 40, 20)
    except UserError as error:
        return str(error)


@pytest.mark.covers("rl.on_policy")
def test_it_is_proven_on_the_model_before_training_or_refused() -> None:
    tokens = 6 + 2 * 9 + 3 * 20 + 1 + 2 * 5 + 3 * 20
    assert run(2, proofs, saved_model("qwen3"), {}) == [ExactnessResult(tokens, 0, 0.0, 0)] * 2
    first, second = run(2, proofs, saved_model("llama"), {"sampling": "merged"})
    assert first == second
    assert "have a different logprob in the trainer, by at most" in first and "set lora.sampling=separate" in first


WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@pytest.mark.parametrize(
    "lora",
    [
        {"base": "nf4", "dora": True},
        {"base": "int8", "init": "pissa", "modules_to_save": ("lm_head",)},
        pytest.param({"base": "fp8", "targets": ("all-linear", "embed_tokens")}, marks=pytest.mark.table),
        pytest.param({"sampling": "separate", "rslora": True}, marks=pytest.mark.table),
    ],
)
def test_adapters_beside_the_base_are_exact(lora: dict[str, Any]) -> None:
    """And over a quantised base: the engine has the trainer's bytes, and computes what the trainer does."""
    results = run(2, proofs, saved_model("llama", **WIDE), lora)
    assert all(isinstance(result, ExactnessResult) and result.exact and result.tokens > 100 for result in results)


@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        ("qwen3_moe", {"targets": ("mlp.experts.down_proj",)}, "Remove experts from lora.targets"),
        ("qwen3_moe", {"base": "int8"}, "experts in lora.base=int8 are not exact"),
        ("llama", {"targets": ("lm_head",), "sampling": "separate"}, "remove the head from lora.targets"),
    ],
)
def test_adapters_that_are_not_exact_are_refused(family: str, lora: dict[str, Any], words: str) -> None:
    assert words in run(2, proofs, saved_model(family), lora)[0]


def test_completions_that_depend_on_the_batch_alone_are_said_without_logprobs() -> None:
    words = "for the check at start, 3 completions depend on the other requests of the batch. Because"
    with (
        mock.patch.object(proof, "_compare", return_value=ExactnessResult(10, 0, 0.0, 3)),
        mock.patch.object(proof, "_requests"),
        mock.patch.object(proof, "_reason", return_value="Because."),
        pytest.raises(UserError, match=words),
    ):
        prove_exact(mock.Mock(), mock.Mock(), 40, 20)


class SeparateEngine:
    """An engine of its own."""

    async def generate(self, request: Request) -> list[Completion]:
        assert request.sampling.max_new_tokens == 64
        return [Completion((5, 6), (-1.0, -2.0), "end", ((0, 2),)) for _ in request.seeds]


async def tried(difference: float) -> str:
    async def read(samples: Sequence[Sample]) -> None:
        for drawn_sample in samples:
            drawn_sample.old_logprobs = drawn_sample.rollout_logprobs.copy()
            drawn_sample.old_logprobs[-1] += difference

    config: Any = SimpleNamespace(rollout=SimpleNamespace(engine="vllm"), train=SimpleNamespace(seed=0))
    prompts = [Prompt(number, 0, (3, 4), "") for number in range(9)]
    engine: Any = SeparateEngine()
    return await try_engine(config, engine, read, prompts, SamplingParams(100))


def test_an_engine_of_its_own_is_tried_on_the_runs_prompts_before_training() -> None:
    assert asyncio.run(tried(0.0)).startswith("exact    64 tokens sampled by vllm")
    with pytest.raises(UserError) as refused:
        asyncio.run(tried(2.0**-20))
    assert "32 of 64 tokens that it sampled for 8 of this run's prompts have a different logprob" in str(refused.value)
    assert "by 4.8e-07 on average and at most 9.5e-07" in str(refused.value)
    assert "VLLM_BATCH_INVARIANT" in str(refused.value) and "rollout.engine=embedded" in str(refused.value)


def test_a_sample_that_differs_in_one_bit_is_named() -> None:
    compared = sample(0, 3, 1.0, old_logprobs=[-1.0, -2.0, -3.0], rollout_logprobs=[-1.0, -2.0, -3.0])
    require_exact([compared, sample(1, 3, None)])  # that one is not trained
    compared.rollout_logprobs[4] = np.nextafter(np.float32(-2.0), np.float32(0))
    with pytest.raises(UserError, match=r"sample 0\.0/0: 1 of 3 tokens .* The first is sampled token 1:"):
        require_exact([compared])
