"""Held-out evaluation: each prompt once, greedy; pass@k; nothing of it depends on training, or moves it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.support.rl_samples import sharing
from tests.support.toy_tokenizers import byte_tokenizer, write_jsonl
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.errors import UserError
from weft.inference.base import Completion, Request
from weft.rl import meter
from weft.rl.evaluate import EvaluationResult, RlEvaluator, pass_at, read_held_out_prompts
from weft.rl.rewards.base import Rewards

TOKENIZER = byte_tokenizer()


class Adder:
    """Adds two digits; drawn answers are right where their seed is even."""

    drawn = 0

    def __init__(self, seconds: float = 0.0) -> None:
        self.requests: list[Request] = []
        self.seconds = seconds

    async def generate(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        await asyncio.sleep(self.seconds * len(self.requests))
        return [self._answer(request, seed) for seed in request.seeds]

    def _answer(self, request: Request, seed: int) -> Completion:
        a, b = TOKENIZER.decode(list(request.tokens)).split("+")
        right = request.sampling.temperature == 0 or seed % 2 == 0
        text = str(int(a) + int(b)) if right and a != "9" else "wrong"
        tokens = tuple(TOKENIZER(text)["input_ids"][: request.sampling.max_new_tokens])
        finish = "end" if len(tokens) == len(text) else "length"
        return Completion(tokens, (0.0,) * len(tokens), finish, ((3, len(tokens)),))  # type: ignore[arg-type]


def config_of(folder: Path, *overrides: str) -> RlConfig:
    for name, first in (("low", (1, 2)), ("high", (8, 9, 9))):
        write_jsonl(folder / f"{name}.jsonl", *({"prompt": f"{a}+{i}", "answer": a + i} for i, a in enumerate(first)))
    sources = f"eval.sources=[{{path: {folder}/low.jsonl}}, {{path: {folder}/high.jsonl}}]"
    return load_config(
        [],
        ["model.path=none", f"data.path={folder}/low.jsonl", "rl.reward=[exact_match]", sources, *overrides],
        schema=RlConfig,
    )


def evaluated(config: RlConfig, engine: Adder) -> EvaluationResult:
    evaluator = RlEvaluator(
        config, read_held_out_prompts(config, TOKENIZER), sharing(engine), Rewards(config.rl), TOKENIZER
    )  # type: ignore[arg-type]
    return asyncio.run(evaluator())


def test_each_prompt_is_answered_once_greedily_and_named_sets_are_apart(tmp_path: Path) -> None:
    engine = Adder()
    evaluation = evaluated(config_of(tmp_path), engine)
    prompts = Counter(TOKENIZER.decode(list(request.tokens)) for request in engine.requests)
    assert prompts == {"1+0": 1, "2+1": 1, "8+0": 1, "9+1": 1, "9+2": 1}
    assert {request.sampling.temperature for request in engine.requests} == {0.0}
    figures = {name: value for name, value in evaluation.metrics.items() if not name.endswith("seconds")}
    assert figures["eval/accuracy"] == 0.6 and figures["eval/low/accuracy"] == 1.0
    assert figures["eval/high/accuracy"] == pytest.approx(1 / 3) and figures["eval/reward"] == 0.6
    assert figures["eval/length"] == (1 + 1 + 1 + 5 + 5) / 5 and figures["eval/failed"] == 0
    assert not any("pass" in name for name in figures)
    assert evaluation.line(20).startswith("eval     step 20: accuracy 60.0%, reward 0.600, low 100.0%, high 33.3% (")
    assert evaluation.greedy["high"][2].samples[0].prompt.text == "9+2"


@pytest.mark.covers("eval.samples", "eval.top_p", "eval.top_k")
def test_pass_at_k_of_answers_that_are_drawn(tmp_path: Path) -> None:
    engine = Adder()
    config = config_of(
        tmp_path, "eval.samples=4", "eval.temperature=0.7", "eval.top_k=5", "eval.top_p=0.9", "eval.max_new_tokens=3"
    )
    evaluation = evaluated(config, engine)
    drawn = [request for request in engine.requests if request.sampling.temperature == 0.7]
    assert len(drawn) == 5 and {(r.sampling.top_k, r.sampling.top_p) for r in drawn} == {(5, 0.9)}
    seeds = [seed for request in engine.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds) == 5 + 5 * 4
    right = [0 if r.tokens[0] == drawn[-1].tokens[0] else sum(s % 2 == 0 for s in r.seeds) for r in drawn]
    for k in (1, 2, 4):
        assert evaluation.metrics[f"eval/pass@{k}"] == pytest.approx(sum(pass_at(4, c, k) for c in right) / 5)
    assert "eval/low/pass@4" in evaluation.metrics and "eval/pass@8" not in evaluation.metrics
    assert evaluation.metrics["eval/high/clipped_ratio"] == pytest.approx(2 / 3)


def test_an_evaluation_repeats_itself_and_shares_no_seed_with_training(tmp_path: Path) -> None:
    first, second, other_seed = Adder(), Adder(), Adder()
    config = config_of(tmp_path, "eval.samples=2")
    evaluated(config, first)
    evaluated(config, second)
    evaluated(config_of(tmp_path, "eval.samples=2", "train.seed=9"), other_seed)
    assert first.requests == second.requests
    assert not {s for r in first.requests for s in r.seeds} & {s for r in other_seed.requests for s in r.seeds}
    assert all(request.id.startswith("eval/") for request in first.requests)


@pytest.mark.parametrize("n", [1, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_when_an_evaluation_is_due(tmp_path: Path) -> None:
    def due_steps(*overrides: str) -> list[int]:
        config = config_of(tmp_path, *overrides)
        evaluator = RlEvaluator(
            config, read_held_out_prompts(config, TOKENIZER), sharing(Adder()), Rewards(config.rl), TOKENIZER
        )  # type: ignore[arg-type]
        return [step for step in range(6) if evaluator.due(step, 5)]

    assert due_steps() == [5] and due_steps("eval.every=2") == [2, 4, 5] and due_steps("eval.at_start=true") == [0, 5]


def test_it_is_shown_how_far_an_evaluation_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "_SECONDS", 0.01)
    config, shown = config_of(tmp_path, "eval.samples=2"), list[str]()
    prompts = read_held_out_prompts(config, TOKENIZER)
    evaluator = RlEvaluator(
        config,
        prompts,
        sharing(Adder(0.05)),
        Rewards(config.rl),
        TOKENIZER,
        show=shown.append,  # type: ignore[arg-type]
    )
    asyncio.run(evaluator())
    done = [int(text.split()[1].partition("/")[0]) for text in shown if text]
    assert done == sorted(done) and len(set(done)) > 3
    assert shown[0].startswith("evaluation: 0/15 samples, 0 tokens/s") and shown[-1] == ""


def test_a_sample_that_failed_counts_as_wrong(tmp_path: Path) -> None:
    evaluation = evaluated(config_of(tmp_path, "rl.reward=[tests.support.reward_functions:of_nobody]"), Adder())
    assert (
        evaluation.metrics["eval/failed"] == 5
        and evaluation.metrics["eval/accuracy"] == evaluation.metrics["eval/reward"] == 0
    )


@pytest.mark.covers("eval.pass_at", "eval.correct_from")
def test_what_is_correct_and_how_many_are_drawn(tmp_path: Path) -> None:
    keys = ("rl.reward=[length]", "rl.reward_options={length.target: 2}", "eval.correct_from=-0.5")
    assert evaluated(config_of(tmp_path, *keys), Adder()).metrics["eval/accuracy"] == 0.6
    with pytest.raises(UserError, match="contains 8, but eval.samples draws only 4"):
        config_of(tmp_path, "eval.samples=4", "eval.pass_at=[1, 8]")
    evaluation = evaluated(config_of(tmp_path, "eval.samples=4", "eval.pass_at=[3]"), Adder())
    assert [name for name in evaluation.metrics if name.startswith("eval/pass")] == ["eval/pass@3"]
