"""Batched generation: transformers' tokens, the distribution's logprobs, and nothing that depends on the batch."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PretrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.cases import saved_model
from tests.support.pool import run
from tests.support.toy_tokenizers import byte_tokenizer
from tests.support.zoo import tiny_config
from weft.config.rl_schema import DataConfig, ModelConfig, RlAlgorithm, RlConfig, RolloutConfig
from weft.errors import UserError
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.cache_support import caches
from weft.inference.generate import Generator
from weft.inference.rows import CachedRows
from weft.inference.token_sampling import kept_tokens, sample_tokens, uniforms
from weft.models import hf
from weft.models.fused_norms import FusedNorm
from weft.models.routing import differ, replace_choices
from weft.recipes.rl import sampling_of
from weft.rl.model_engines import notes_on_generation
from weft.rl.trainer import TrainerRank

ENDS = (2, 17, 40)
PROMPTS = [(5,), (9, 8, 7, 6, 5, 4, 3), (11, 12) * 10, (3, 100, 50), (3, 100, 51)]


@cache
def plain(family: str) -> PreTrainedModel:
    return build(family)


def build(family: str) -> PreTrainedModel:
    changes = {} if family == "zamba2" else {"initializer_range": 0.2}  # as saved_model does, for the same reason
    config = tiny_config(family, **changes)
    return hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).eval()


def requests(sampling: SamplingParams, samples: int = 1) -> list[Request]:
    return [
        Request(str(n), prompt, tuple(range(100 * n, 100 * n + samples)), sampling) for n, prompt in enumerate(PROMPTS)
    ]


@torch.no_grad()
def true_logprobs(family: str, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Of each token of a completion, by one forward of transformers' own eager code without a cache."""
    logits = plain(family)(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    all_logprobs = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return all_logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def assert_logprobs(family: str, prompt: Sequence[int], completion: Completion, temperature: float = 1.0) -> None:
    actual = torch.tensor(completion.logprobs)
    expected = true_logprobs(family, prompt, completion.tokens, temperature)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


# ---------------------------------------------------------------- what is generated


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_fused_norms_generate_the_same(family: str) -> None:
    """As on CUDA, where norms are most of what the host launches; Gemma's formula stays as it is."""
    model = build(family)
    completions = Generator(model, fused_norms=True).generate(requests(SamplingParams(12, 0.0)))
    assert any(isinstance(module, FusedNorm) for module in model.modules()) == (family != "gemma3_text")
    for prompt, (completion,) in zip(PROMPTS, completions, strict=True):
        assert_logprobs(family, prompt, completion)
    unfused = build(family)
    Generator(unfused)
    assert not any(isinstance(module, FusedNorm) for module in unfused.modules())


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "stablelm", "lfm2", "qwen3_next",
     "falcon", "mamba2", "llama4_text", "falcon_h1", "mpt", "mimo_v2_flash"],
)  # fmt: skip
def test_greedy_is_transformers(family: str) -> None:
    """With so little room that samples wait for others to end, and join beside longer ones."""
    generator = Generator(build(family), max_tokens=140)
    completions = generator.generate(requests(SamplingParams(24, 0.0, ends=ENDS)))
    assert 1 < generator.work.most_rows < len(PROMPTS)
    for prompt, (completion,) in zip(PROMPTS, completions, strict=True):
        with torch.no_grad():
            expected = plain(family).generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=24, do_sample=False, eos_token_id=list(ENDS), pad_token_id=0,
            )[0, len(prompt) :].tolist()  # fmt: skip
        assert list(completion.tokens) == expected
        assert completion.finish == ("end" if expected[-1] in ENDS else "length")
        assert_logprobs(family, prompt, completion)


def test_a_rotary_table_that_depends_on_length_is_that_of_the_length() -> None:
    """longrope changes tables at 32 tokens; every token is the likeliest of a forward of all tokens before it."""
    (completion,) = Generator(build("phi3_longrope")).generate(
        [Request("a", PROMPTS[2], (0,), SamplingParams(16, 0.0))]
    )[0]
    row = list(PROMPTS[2])
    for token in completion.tokens:
        with torch.no_grad():
            logits = plain("phi3_longrope")(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1]
        assert token == int(logits.argmax())
        row.append(token)


@pytest.mark.parametrize(
    ("family", "cached"),
    [
        ("qwen3", True),
        ("qwen3_next", True),
        ("stablelm", True),
        ("gemma2", True),
        ("gemma3_text", True),
        ("gpt_oss", True),
        ("recurrent_gemma", False),
        ("llama4_text", False),
        ("phi3_longrope", False),
    ],
)
def test_a_cache_is_used_where_it_is_exact(family: str, cached: bool) -> None:
    """recurrent_gemma: transformers' own cache gives other logits than a forward without one."""
    if family == "recurrent_gemma":
        config: PretrainedConfig = RecurrentGemmaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
            attention_window_size=16, lru_width=64,
        )  # fmt: skip
        config.architectures = ["RecurrentGemmaForCausalLM"]
    else:
        config = tiny_config(family, vocab_size=14)  # fewer tokens than the trial is long
    assert caches(config) == cached


def test_generation_without_a_cache_is_said(tmp_path: Path) -> None:
    for family, words in (
        ("llama4_text", "warning  llama4_text cannot generate exactly with a key-value cache"),
        ("qwen3", ""),
    ):
        tiny_config(family).save_pretrained(tmp_path / family)
        for engine in ("embedded", "vllm"):
            config_of_run = config(str(tmp_path / family), engine=engine)
            notes = notes_on_generation(config_of_run, hf.read_config(config_of_run.model.path))
            assert [note.startswith(words) for note in notes] == [True] * bool(words and engine == "embedded")


@pytest.mark.parametrize("bug", ["a row that stays where it was", "a position too many", "another row's token"])
def test_the_trial_of_a_cache_sees(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave, advance = CachedRows.leave, CachedRows.advance

    def wrong(rows: CachedRows, index: Any) -> Any:
        if bug == "a row that stays where it was":
            saved = {layer: tuple(x.clone() for x in pair) for layer, pair in rows._tensors_by_layer.items()}
            order = leave(rows, index)
            rows._tensors_by_layer.update(saved)  # type: ignore[arg-type]
            return order
        if bug == "a position too many":
            rows.lengths = rows.lengths + 1
            return advance(rows, index)
        return advance(rows, index[::-1])

    monkeypatch.setattr(CachedRows, "leave" if bug.startswith("a row") else "advance", wrong)
    assert not caches(tiny_config("llama"))


@pytest.mark.parametrize(("family", "temperature"), [("llama", 0.7), ("gemma2", 1.0), ("lfm2", 1.3)])
def test_samples_are_the_same_in_any_batch(family: str, temperature: float) -> None:
    sampling = SamplingParams(20, temperature, ends=ENDS)
    batch = requests(sampling, samples=3)
    generator = Generator(build(family))
    batched = generator.generate(batch)
    crowded = Generator(build(family), max_tokens=170).generate(batch[::-1])[::-1]
    for request, group, crowded_group in zip(batch, batched, crowded, strict=True):
        for seed, completion, crowded_completion in zip(request.seeds, group, crowded_group, strict=True):
            ((single,),) = generator.generate([Request("alone", request.tokens, (seed,), sampling)])
            assert completion.tokens == single.tokens == crowded_completion.tokens
            assert completion.logprobs == pytest.approx(single.logprobs, abs=2e-5)
            assert_logprobs(family, request.tokens, completion, temperature)
    assert len({completion.tokens for group in batched for completion in group}) > 10


def test_a_prompt_is_forwarded_once_and_what_has_ended_leaves() -> None:
    model = build("llama")
    shapes: list[tuple[int, ...]] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    generator = Generator(model)
    batch = [
        Request(str(n), (n + 3, 5, 7), tuple(range(9 * n, 9 * n + 8)), SamplingParams(30, ends=ENDS)) for n in range(4)
    ]
    completions = [completion for group in generator.generate(batch) for completion in group]
    lengths = [len(completion.tokens) for completion in completions]
    assert shapes[0] == (4, 3) and generator.work.prompts == 4  # 32 samples, 4 prompts of 3 tokens
    assert [rows for rows, _ in shapes[1:]] == [sum(n > step for n in lengths) for step in range(1, max(lengths))]
    assert len(set(lengths)) > 3 and generator.work.row_steps == sum(lengths) - len(lengths)


# ---------------------------------------------------------------- how tokens are drawn


def test_seeds_give_the_numbers_of_splitmix64() -> None:
    """The first outputs of the published generator for seed 1234567, of which the upper 53 bits are taken."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    numbers = uniforms(np.full(4, 1234567, dtype=np.uint64), np.arange(4, dtype=np.uint64))
    assert numbers.tolist() == [(number >> 11) / 2**53 for number in published]


@pytest.mark.parametrize("vocabulary", [7, 3000])
def test_draws_follow_the_distribution(vocabulary: int) -> None:
    """Evenly spaced numbers give every token its share, to one draw; seeds in a row give it to chance (chi-square)."""
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = -math.inf
    count, shares = 20_000, (logits / 0.8).softmax(-1)[0].double()
    even = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = torch.cat(
        [sample_tokens(logits.expand(2000, -1), SamplingParams(1, 0.8), part).tokens_R for part in even.split(2000)]
    )
    drawn = tokens.bincount(minlength=vocabulary)
    assert (drawn - count * shares).abs().max() <= 1 and drawn[3] == 0
    if vocabulary < 10:
        numbers = uniforms(np.arange(count, dtype=np.uint64), np.full(count, 5, dtype=np.uint64))
        tokens = sample_tokens(logits.expand(count, -1), SamplingParams(1, 0.8), torch.from_numpy(numbers)).tokens_R
        difference = tokens.bincount(minlength=vocabulary) - count * shares
        likely = shares > 0
        assert (difference[likely] ** 2 / (count * shares[likely])).sum() < 23.5  # 5 degrees of freedom: 3e-4


SHARES = [0.05, 0.4, 0.2, 0.3, 0.05]
TRUNCATIONS: dict[str, tuple[SamplingParams, list[int]]] = {
    "top_k": (SamplingParams(1, top_k=2), [1, 3]),
    "top_p": (SamplingParams(1, top_p=0.75), [1, 2, 3]),
    "top_p within the first": (SamplingParams(1, top_p=0.3), [1]),
    "min_p": (SamplingParams(1, min_p=0.45), [1, 2, 3]),
    "top_p of what top_k leaves": (SamplingParams(1, top_k=2, top_p=0.55), [1]),
    "min_p of nothing": (SamplingParams(1, min_p=1.0), [1]),
    "of more tokens than there are": (SamplingParams(1, top_k=9, top_p=0.99), [0, 1, 2, 3, 4]),
    "temperature comes first": (SamplingParams(1, 0.5, min_p=0.45), [1, 3]),  # 0.25 and 0.5625 of the likeliest
}


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_what_is_kept_and_its_mass(name: str) -> None:
    sampling, expected = TRUNCATIONS[name]
    shares = np.array(SHARES) ** (1 / sampling.temperature)
    shares /= shares.sum()
    logits = torch.tensor([SHARES]).log() + 3.0
    for number in (0.001, 0.4, 0.6, 0.999):
        drawn = sample_tokens(logits, sampling, torch.tensor([number], dtype=torch.float64))
        token, mass = int(drawn.tokens_R), shares[expected].sum()
        assert token in expected and drawn.kept_logmass_R is not None
        assert float(drawn.kept_logmass_R) == pytest.approx(math.log(mass), abs=1e-6)
        assert float(drawn.logprobs_R) == pytest.approx(math.log(shares[token] / mass), abs=1e-6)
    drawn = sample_tokens(logits.expand(500, -1), sampling, (torch.arange(500, dtype=torch.float64) + 0.5) / 500)
    assert drawn.tokens_R.unique().tolist() == expected


def test_what_is_kept_is_what_transformers_keeps() -> None:
    logits = 2 * torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    for top_k, top_p, min_p in ((40, 0.9, 0.0), (0, 0.5, 0.02), (10, 1.0, 0.1), (50, 0.95, 0.01)):
        warpers = LogitsProcessorList([TopKLogitsWarper(top_k)] if top_k else [])
        warpers += [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
        expected = warpers(torch.zeros(64, 1, dtype=torch.int64), logits) > -math.inf
        actual = kept_tokens(logits.log_softmax(-1), SamplingParams(1, 1.0, top_p, top_k, min_p))
        assert torch.equal(actual, expected)


def test_truncation_reaches_completions() -> None:
    sampling = SamplingParams(12, 0.9, top_p=0.8, top_k=20)
    batch = [*requests(sampling, 2), Request("all", PROMPTS[0], (1,), SamplingParams(12, 0.9))]
    *truncated, (untruncated,) = Generator(build("llama")).generate(batch)
    assert untruncated.kept_logmass is None
    assert_logprobs("llama", PROMPTS[0], untruncated, 0.9)
    for prompt, group in zip(PROMPTS, truncated, strict=True):
        for completion in group:
            assert completion.kept_logmass is not None and max(completion.kept_logmass) < 0
            under = np.add(completion.logprobs, completion.kept_logmass)  # of the whole distribution
            expected = true_logprobs("llama", prompt, completion.tokens, 0.9)
            torch.testing.assert_close(torch.tensor(under, dtype=torch.float32), expected, rtol=0, atol=3e-5)


# ---------------------------------------------------------------- routes of a mixture of experts


ROUTED = {"qwen3_moe": [0, 1], "deepseek_v3": [1, 2], "llama4_text": [0, 1, 2, 3]}  # layers with experts


@pytest.mark.parametrize("family", ROUTED)
def test_routes_are_those_of_one_forward_of_the_whole(family: str) -> None:
    """Of the model's own eager code, token by token; layers without experts say -1."""
    model, expected_routes = build(family), dict[int, torch.Tensor]()
    chosen = 1 if family == "llama4_text" else 2
    experts = {"qwen3_moe": 5, "deepseek_v3": 8, "llama4_text": 4}[family]
    batch = requests(SamplingParams(9, ends=ENDS), 2)
    completions = Generator(build(family), max_tokens=140, routes=True).generate(batch)

    def note(layer: int, scores: torch.Tensor, out: Any) -> Any:
        expected_routes[layer] = out[1]
        return out

    for prompt, group in zip(PROMPTS, completions, strict=True):
        for completion in group:
            with torch.no_grad(), replace_choices(list(model.model.layers), experts, chosen, note):
                model(input_ids=torch.tensor([[*prompt, *completion.tokens[:-1]]]), use_cache=False)
            routes = torch.from_numpy(completion.routes).long()
            assert routes.shape == (len(prompt) + len(completion.tokens) - 1, len(model.model.layers), chosen)
            for layer in range(len(model.model.layers)):
                if layer in ROUTED[family]:
                    assert not differ(routes[:, layer], expected_routes[layer]).any()
                else:
                    assert (routes[:, layer] == -1).all()
    assert Generator(build(family)).generate(batch[:1])[0][0].routes is None


# ---------------------------------------------------------------- how completions end


def test_stop_texts_end_what_is_written() -> None:
    tokenizer = byte_tokenizer(None)
    generator = Generator(build("llama"), tokenizer=tokenizer)
    ((unstopped,),) = generator.generate([Request("a", PROMPTS[1], (3,), SamplingParams(30))])
    text = tokenizer.decode(unstopped.tokens)
    stop = text[4:6]
    ((stopped,),) = generator.generate([Request("a", PROMPTS[1], (3,), SamplingParams(30, stop=("never this", stop)))])
    assert stopped.finish == "end" and stopped.tokens == unstopped.tokens[: len(stopped.tokens)]
    assert stop in tokenizer.decode(stopped.tokens) and stop not in tokenizer.decode(stopped.tokens[:-1])


def test_weights_that_change_are_told_apart_and_abort_returns_what_there_is() -> None:
    generator = Generator(build("llama"), version=4, max_tokens=100)
    for request in requests(SamplingParams(20)):
        generator.add(request)
    done: dict[str, list[Completion]] = {}
    for _ in range(5):
        done |= {request.id: completions for request, completions in generator.step()}
    generator.version = 5
    done |= {request.id: completions for request, completions in generator.step()}
    done |= {request.id: completions for request, completions in generator.abort()}
    assert not generator.busy and sorted(done) == ["0", "1", "2", "3", "4"]
    ordered = [done[key][0] for key in sorted(done)]
    assert [completion.finish for completion in ordered] == ["abort"] * 5
    assert ordered[0].versions == ((4, 5), (5, 1)) and len(ordered[0].tokens) == 6
    assert (ordered[-1].tokens, ordered[-1].versions) == ((), ())  # it had no room yet
    assert ordered[0].tokens == generator.generate(requests(SamplingParams(20))[:1])[0][0].tokens[:6]


@pytest.mark.parametrize(("family", "keep"), [  # the first family with a cache, the second without
    ("qwen3_moe", True), ("llama4_text", False), pytest.param("qwen3_moe", False, marks=pytest.mark.table),
    pytest.param("llama4_text", True, marks=pytest.mark.table),
])  # fmt: skip
def test_samples_that_go_on_under_new_weights_draw_on_and_those_that_begin_again_draw_the_same(
    family: str, keep: bool
) -> None:
    """The new weights are the old ones here, so that nothing but the versions may change."""
    batch = requests(SamplingParams(12, ends=ENDS), samples=2)
    uninterrupted = Generator(build(family), routes=True).generate(batch)
    generator, by_id = Generator(build(family), routes=True, max_tokens=200), dict[str, list[Completion]]()
    for request in batch:
        generator.add(request)
    for count in range(200):
        if count == 5:
            generator.renew(1, keep)
        by_id |= {request.id: completions for request, completions in generator.step()}
    assert not generator.busy
    for before, after in zip(uninterrupted, (by_id[request.id] for request in batch), strict=True):
        for expected, actual in zip(before, after, strict=True):
            assert expected.tokens == actual.tokens and np.array_equal(expected.routes, actual.routes)
            np.testing.assert_allclose(expected.logprobs, actual.logprobs, atol=2e-5)
    versions = {version for completions in by_id.values() for c in completions for version in c.versions}
    assert ((0, 5) in versions) == keep and any(v == 1 for v, _ in versions)


def test_proceed_is_asked_before_every_step() -> None:
    answers = iter([True, True, False])
    completions = Generator(build("llama")).generate(requests(SamplingParams(20)), lambda: next(answers))
    assert all(len(completion.tokens) == 2 and completion.finish == "abort" for (completion,) in completions)


def config(path: str, **rollout: Any) -> RlConfig:
    rl = RlAlgorithm(reward=("length",))
    return RlConfig(model=ModelConfig(path=path), data=DataConfig(path="d"), rl=rl, rollout=RolloutConfig(**rollout))


@pytest.mark.covers(
    "rollout.max_new_tokens", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.stop"
)
def test_keys_of_the_config_are_those_of_the_draws() -> None:
    keys = dict(max_new_tokens=33, temperature=0.7, top_p=0.9, top_k=7, min_p=0.1, stop=("ab",))
    assert sampling_of(config("m", **keys), [2, 5]) == SamplingParams(**keys, ends=(2, 5))


def most_rows(path: str, tokens: int) -> int:
    trainer = TrainerRank(config(path, max_tokens_per_device=tokens), "cpu")
    trainer.sync(1)
    trainer.generate(dict(enumerate(requests(SamplingParams(9), 2))), 60.0)
    assert trainer.embedded.generator is not None
    return trainer.embedded.generator.work.most_rows


@pytest.mark.covers("rollout.kv_cache_tokens")
def test_room_is_what_the_config_says(tmp_path: Path) -> None:
    """The longest sample is counted at 20 + 9 tokens; groups begin together."""
    shutil.copytree(saved_model("llama"), tmp_path / "model")
    byte_tokenizer(None).save_pretrained(tmp_path / "model")
    path = str(tmp_path / "model")
    assert [run(1, most_rows, path, tokens)[0] for tokens in (29 * 4 + 20, 65_536)] == [4, 10]


def test_one_sample_runs_however_little_room_there_is() -> None:
    generator, roomy = Generator(build("llama"), max_tokens=1), Generator(build("llama"))
    tight, spacious = (g.generate(requests(SamplingParams(3), 2)) for g in (generator, roomy))
    assert [[c.tokens for c in group] for group in tight] == [[c.tokens for c in group] for group in spacious]
    assert generator.work.most_rows == 1 and generator.work.prompts == 10


def test_requests_that_cannot_be_served_are_refused() -> None:
    generator = Generator(build("llama"))
    for request, words in (
        (Request("p", (), (1,), SamplingParams(3)), "p: a request must have at least one prompt token"),
        (Request("p", (5,), (1,), SamplingParams(0)), "p: .* must have at least one"),
        (Request("p", (5,), (1,), SamplingParams(3, stop=("a",))), "p: stop texts need a tokenizer"),
    ):
        with pytest.raises(UserError, match=words):
            generator.add(request)
    with pytest.raises(UserError, match="two requests of a batch have the same id"):
        generator.generate([Request("p", (5,), (1,), SamplingParams(3)), Request("p", (6,), (1,), SamplingParams(3))])
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(RuntimeError, match="p: the model's logits are not finite"):
            Generator(model).generate([Request("p", (5,), (1,), SamplingParams(3, temperature))])
