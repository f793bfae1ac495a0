"""The update of every algorithm against plain PyTorch (tests/support/plain_rl.py), by `weft verify`'s measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from tests.support import plain_rl
from tests.support.cases import open_engine, pairs, saved_model, world_of
from tests.support.plain_rl import LONGEST, Row
from tests.support.pool import run
from tests.support.rl_samples import algorithm, rl_config
from weft.config.rl_schema import RlAlgorithm, RlConfig
from weft.engine.engine import Engine
from weft.engine.losses.policy import PolicyLoss
from weft.inference.types import Prompt, Sample, SampleGroup
from weft.recipes.verify import EPSILON
from weft.rl import advantages
from weft.rl.corrections import correct, old_is_current
from weft.rl.documents import TrainedSamples, build_documents, is_trained
from weft.verify.harness import ADAMW, GRADIENT, SCALAR, compare_gradients
from weft.verify.observed import Tensors
from weft.verify.plants import planted

TEMPERATURE = 0.7
LR = 1e-3

# The same algorithms in weft's keys.
_UNBIASED: dict[str, Any] = {
    "kl_coef": 0.1,
    "kl_unbiased": True,
    "old_logprobs": "rollout",
    "loss_aggregation": "token_mean",
}
CONFIGS: dict[str, RlAlgorithm] = {
    "grpo": algorithm("grpo", kl_coef=0.05, entropy_coef=0.01),
    "dr_grpo": algorithm("dr_grpo"),
    "dapo": algorithm("dapo", dual_clip=1.3, correction="none"),
    "rloo": algorithm("rloo", kl_coef=0.1),
    "reinforce++": algorithm("reinforce++", kl_coef=0.1, gamma=0.9),
    "reinforce++_baseline": algorithm("reinforce++_baseline", kl_coef=0.1),
    "gspo": algorithm("gspo", clip=(0.05, 0.08), correction_level="geometric", correction_limits=(0.0, 1.02)),
    "cispo": algorithm("cispo", clip=(0.3, 0.3), correction="icepop", correction_limits=(0.8, 1.5)),
    "ppo": algorithm("ppo", kl_coef=0.1, kl_estimator="k3", gamma=0.95, gae_lambda=0.9),
    "reinforce": algorithm(
        "grpo", advantage_norm="none", policy_loss="reinforce", correction="mis", correction_level="sequence",
        correction_limits=(0.0, 1.5),
    ),
    "whole samples": algorithm(
        "rloo", policy_loss="ppo_sequence", loss_aggregation="sequence_mean", correction="none"
    ),
    "kl clamp": algorithm(
        "grpo", kl_coef=0.5, kl_clamp=0.05, dual_clip=3.0, loss_aggregation="token_mean", correction="none"
    ),
    "entropy by tokens": algorithm("grpo", entropy_coef=0.3, entropy_aggregation="token_mean", correction="none"),
    "entropy by samples": algorithm(
        "dr_grpo", advantage_norm="group", entropy_coef=0.3, entropy_aggregation="sequence_mean", correction="none"
    ),
    "masked counted": algorithm("grpo", mask_truncated=True, count_masked=True, correction="none"),
    "sequence mask": algorithm(
        "grpo", loss_aggregation="token_mean", correction="mis", correction_level="sequence",
        correction_limits=(0.0, 1.3)
    ),
    **{f"kl {kind}": algorithm("grpo", kl_estimator=kind, **_UNBIASED) for kind in ("k1", "k2", "k3")},
}  # fmt: skip


@cache
def rollouts(path: str) -> list[Row]:
    """Four groups: one with a sample without a reward, one without signal, one of a single sample that counts; lengths
    1 to 20, tokens of an environment in between; policies near each other, so that some ratios are clipped."""
    source = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=source))

    def noise(like: Tensor, size: float) -> Tensor:
        return torch.randn(like.shape, generator=source) * size

    model = plain_model(path)
    rewards = [[1.0, 0.0, 0.5, None, 0.0], [1.0, 1.0, 1.0], [None, 0.3], [0.0, 2.0, 0.0]]
    rows = []
    for group, group_rewards in enumerate(rewards):
        prompt = [draw(3, 128) for _ in range(draw(1, 9))]
        for reward in group_rewards:
            length = draw(1, LONGEST + 1)
            drawn = [len(prompt) + n for n in range(length) if n % 6 != 4 or n == length - 1]
            row = Row([*prompt, *(draw(3, 128) for _ in range(length))], drawn, group, reward, *[torch.zeros(0)] * 4)
            with torch.no_grad():
                now = plain_rl.current(model, row, TEMPERATURE)[0]
            row.old = now + noise(now, 0.25)
            row.rollout = row.old + noise(now, 0.25)
            row.reference = now + noise(now, 0.5)
            row.values = noise(now, 0.5)
            rows.append(row)
    return rows


def plain_model(path: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def groups_of(rows: Sequence[Row]) -> list[SampleGroup]:
    """The same rollouts in weft's words."""
    groups: dict[int, SampleGroup] = {}
    for row in rows:
        prompt = Prompt(row.group, 0, tuple(row.ids[: row.drawn[0]]), "")
        group = groups.setdefault(row.group, SampleGroup(prompt, []))
        sampled = np.isin(np.arange(len(row.ids)), row.drawn)
        names = {"old_logprobs": "old", "rollout_logprobs": "rollout", "ref_logprobs": "reference", "values": "values"}
        arrays = {name: np.zeros(len(row.ids), np.float32) for name in names}
        for name, array in arrays.items():
            array[sampled] = getattr(row, names[name]).numpy()
        versions = np.zeros(len(row.ids), np.int32)
        group.samples.append(
            Sample(prompt, len(group.samples), np.array(row.ids), sampled, versions=versions,
                   finish="length" if len(row.drawn) > plain_rl.CUT else "end",
                   reward=row.reward, **arrays)
        )  # fmt: skip
    return list(groups.values())


def accumulate(engine: Engine, rows: Sequence[Row], config: RlConfig, budget: int | None = None) -> float:
    """The gradient of one update, as the recipe has it made; the loss."""
    groups = groups_of(rows)
    samples = [sample for group in groups for sample in group.samples]
    if config.rl.old_logprobs == "rollout":
        for sample in samples:
            sample.old_logprobs = None
    correct(samples, config.rl)
    advantages.advantages(groups, config.rl)
    documents = dict(enumerate(build_documents(samples, config)))
    plan = engine.plan(engine.planner.metadata(documents.values()), budget=budget)
    masked = TrainedSamples(samples, config).masked
    loss = engine.accumulate(plan, documents, PolicyLoss(config.rl, masked=masked))["loss"]
    assert loss is not None
    return loss


def accumulate_fresh(engine: Engine, rows: Sequence[Row], config: RlConfig) -> tuple[float, dict[int, Tensor]]:
    """The same where no step lies between rollout and update; and what it says of the old policy, by place."""
    groups = groups_of(rows)
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        sample.old_logprobs = None
    advantages.advantages(groups, config.rl)
    documents = dict(enumerate(build_documents(samples, config)))
    plan = engine.plan(engine.planner.metadata(documents.values()))
    masked = TrainedSamples(samples, config).masked
    objective = PolicyLoss(config.rl, old_is_current=True, masked=masked)
    loss = engine.accumulate(plan, documents, objective)["loss"]
    assert loss is not None
    places = [position for position, sample in enumerate(samples) if is_trained(sample, config)]
    return loss, {places[index]: logprobs for index, logprobs in objective.old_logprobs().items()}


FRESH = [name for name, rl in CONFIGS.items() if old_is_current(rl_config(rl))]


def ours_fresh(path: str, mesh: str, rows: list[Row]) -> tuple[dict[str, tuple[float, Tensors]], dict[int, Tensor]]:
    """(loss, gradients) of each algorithm, and what this rank says of the old policy, by place."""
    engine = open_engine(path, mesh, temperature=TEMPERATURE, step={"max_tokens_per_device": 40})
    updates, read = {}, dict[int, Tensor]()
    for name in FRESH:
        loss, read = accumulate_fresh(engine, rows, rl_config(CONFIGS[name], max_new_tokens=LONGEST))
        updates[name] = loss, {n: g for n, g in engine.gradients() if g is not None}
        engine.drop_gradients()
    return updates, read


def weft_updates(
    path: str, mesh: str, rows: list[Row], budget: int
) -> tuple[dict[str, tuple[float, Tensors]], Tensors]:
    """(loss, gradients) of each algorithm, and the weights after one step of each in turn."""
    engine = open_engine(path, mesh, temperature=TEMPERATURE, step={"max_tokens_per_device": budget})
    updates = {}
    for name, rl in CONFIGS.items():
        loss = accumulate(engine, rows, rl_config(rl, max_new_tokens=LONGEST))
        updates[name] = loss, {n: g for n, g in engine.gradients() if g is not None}
        engine.drop_gradients()
    for rl in CONFIGS.values():
        accumulate(engine, rows, rl_config(rl, max_new_tokens=LONGEST), budget=2 * budget)
        engine.apply(LR)
    return updates, dict(engine.tensors())


@cache
def plain(path: str) -> tuple[dict[str, tuple[float, Tensors]], Tensors, Tensors]:
    """The same without weft, and the weights before it."""
    model, rows, updates = plain_model(path), rollouts(path), {}

    def update(name: str) -> float:
        model.zero_grad(set_to_none=True)
        return plain_rl.update(model, rows, name, TEMPERATURE)

    for name in CONFIGS:
        updates[name] = update(name), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    decayed = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decayed, lr=LR, betas=(0.9, 0.95), eps=EPSILON)
    for name in CONFIGS:
        update(name)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return updates, {n: p.detach() for n, p in model.named_parameters()}, start


def one_update(plant: str | None, path: str, rows: list[Row]) -> Tensors:
    with planted(plant):
        engine = open_engine(path, "1", temperature=TEMPERATURE)
        accumulate(engine, rows, rl_config(CONFIGS["grpo"], max_new_tokens=LONGEST))
        return {n: g for n, g in engine.gradients() if g is not None}


def update_is_the_plain_one(plant: str | None) -> bool:
    """Every gradient of one update, with a known bug planted or none."""
    path = saved_model("llama")
    gradients = run(1, one_update, plant, path, rollouts(path))[0]
    return all(figure.value <= GRADIENT for figure in compare_gradients(gradients, plain(path)[0]["grpo"][1], {}))


@pytest.mark.covers("rl.policy_loss", "rl.clip", "rl.kl_clamp", "rl.entropy_aggregation", "rl.count_masked")
@pytest.mark.parametrize(
    ("family", "mesh", "budget"),
    pairs([("llama", "1", 64), ("llama", "2", 40), ("qwen3_moe", "2x2", 40)],
          [("llama", "4", 128), ("llama", "2x2", 30)]),
)  # fmt: skip
def test_every_algorithm(family: str, mesh: str, budget: int) -> None:
    path = saved_model(family)
    expected, after, start = plain(path)
    updates, weights = run(world_of(mesh), weft_updates, path, mesh, rollouts(path), budget)[0]
    precise = plain_model(path).double() if family == "llama" else None  # transformers' experts have no fp64
    for name, (loss, gradients) in expected.items():
        assert updates[name][0] == pytest.approx(loss, rel=SCALAR, abs=SCALAR), name
        _require_near(updates[name][1], gradients, precise, rollouts(path), name)
    for name, weight in after.items():
        moved, deviation = (weight - start[name]).norm(), (weights[name] - weight).norm()
        assert deviation <= ADAMW * moved, (name, float(deviation / moved))


def test_an_update_that_reads_the_old_policy_itself() -> None:
    """Where no step lies between rollout and update, old is current: without a forward of its own, all is the same."""
    assert {"grpo", "dr_grpo", "gspo", "cispo", "reinforce"} <= set(FRESH)
    assert not {"reinforce++", "kl k1"} & set(FRESH)  # the reward asks for it; the rollout's is taken
    path, rows = saved_model("llama"), []
    model = plain_model(path)
    for row in rollouts(path):
        with torch.no_grad():
            now = plain_rl.current(model, row, TEMPERATURE)[0]
        rows.append(replace(row, old=now, rollout=now + (row.rollout - row.old)))
    parts = run(4, ours_fresh, path, "2x2", rows)
    updates, read = parts[0][0], {index: logprobs for _, part in parts for index, logprobs in part.items()}
    assert len(read) == sum(row.reward is not None for row in rows)
    assert max(float((rows[index].old - logprobs).abs().max()) for index, logprobs in read.items()) <= 1e-5
    # The ratio of a whole sample multiplies what its tokens round: from here on both have the same old policy.
    rows = [replace(row, old=read.get(index, row.old)) for index, row in enumerate(rows)]
    precise = plain_model(path).double()
    for name in FRESH:
        loss, gradients = plain_update(model, rows, name)
        assert updates[name][0] == pytest.approx(loss, rel=SCALAR, abs=SCALAR), name
        _require_near(updates[name][1], gradients, precise, rows, name)


def _require_near(actual: Tensors, gradients: Tensors, precise: Any, rows: list[Row], name: str) -> None:
    """The ratio of a whole sample brings what the plain update itself rounds to the tolerance: twice that is allowed.
    precise: the plain model in fp64; None: nothing more than the tolerance is allowed."""
    exact = gradients if precise is None else {n: g.float() for n, g in plain_update(precise, rows, name)[1].items()}
    noise = {figure.name: figure.value for figure in compare_gradients(gradients, exact, {})}
    assert max(noise.values()) <= 2 * GRADIENT
    for figure in compare_gradients(actual, gradients, {}):
        assert figure.value <= max(GRADIENT, 2 * noise[figure.name]), (name, figure)


def plain_update(model: Any, rows: list[Row], name: str) -> tuple[float, Tensors]:
    model.zero_grad(set_to_none=True)
    loss = plain_rl.update(model, rows, name, TEMPERATURE)
    return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
