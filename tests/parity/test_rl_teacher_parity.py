"""rl.teacher, in the loss and in the advantages, against plain PyTorch on given samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.test_policy_parity import LONGEST, TEMPERATURE, groups_of, plain_model, rollouts
from tests.support import plain_rl
from tests.support.cases import engine_config, open_engine, saved_model, world_of
from tests.support.plain_distill import divergence
from tests.support.plain_rl import Row
from tests.support.pool import run
from tests.support.rl_samples import algorithm, rl_config
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.engine.engine import Engine
from weft.engine.losses.policy import PolicyLoss
from weft.engine.teachers import Teacher, with_teachers
from weft.errors import UserError
from weft.rl import advantages
from weft.rl import teacher as rl_teacher
from weft.rl.corrections import correct
from weft.rl.documents import build_documents
from weft.rl.stop_conditions import FlatSteps
from weft.verify.harness import GRADIENT, SCALAR, compare_gradients
from weft.verify.observed import Tensors

CASES: dict[str, dict[str, Any]] = {
    "loss": {"teacher_divergence": "jsd", "teacher_beta": 0.3, "teacher_coef": 0.7},
    "advantage": {"teacher_in": "advantage", "teacher_coef": 0.5},
}


def accumulate(
    path: str, of_teacher: str, mesh: str, case: str, rows: list[Row], rewarded: bool
) -> tuple[dict[str, float | None], Tensors]:
    """(Metrics, gradients) of an update, as the recipe has it made."""
    rl = algorithm("grpo", teacher=of_teacher, correction="none", **CASES[case])
    engine = open_engine(path, mesh, temperature=TEMPERATURE, step={"max_tokens_per_device": 40})
    config = replace(engine_config(of_teacher, mesh), purpose="inference", temperature=TEMPERATURE)
    teacher = Engine(config, engine.ranks, shares_with=engine)
    groups = groups_of(rows)
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        sample.reward = sample.reward if rewarded else 0.0
    correct(samples, rl)
    advantages.advantages(groups, rl)
    loss, metrics = None, dict[str, float]()
    if rl.teacher_in_advantage:
        for sample, row in zip(samples, rows, strict=True):
            sample.teacher_logprobs = torch.zeros(len(row.ids)).numpy()
            logprob = plain_rl.current(plain_model(of_teacher), row, TEMPERATURE)[0]
            sample.teacher_logprobs[sample.sampled] = logprob.detach().numpy()
        metrics = rl_teacher.add_teacher_advantages(samples, rl)
    else:
        loss = rl_teacher.teacher_loss(rl, teacher, engine, TEMPERATURE)
    documents = build_documents(samples, rl_config(rl, max_new_tokens=LONGEST))
    plan = engine.plan(engine.planner.metadata(documents))
    local = {index: documents[index] for index in engine.planner.local_documents(plan)}
    if loss is not None:
        local = with_teachers([Teacher(teacher)], None, documents, local, engine)
    result = engine.accumulate(plan, local, PolicyLoss(rl, teacher=loss))
    return metrics | result, {n: g.cpu() for n, g in engine.gradients() if g is not None}


def plain(path: str, of_teacher: str, case: str, rows: list[Row], rewarded: bool) -> tuple[dict[str, float], Tensors]:
    """(Metrics, gradients)."""
    keys, model, teacher = CASES[case], plain_model(path), plain_model(of_teacher)
    trained = [
        replace(row, reward=row.reward if rewarded else 0.0) for row in rows if not rewarded or row.reward is not None
    ]
    losses, divergences, agreements, sizes = [], list[Any](), list[Any](), [0.0, 0.0]
    for row, a in zip(trained, plain_rl.by_group(trained, plain_rl.reward, plain_rl.mean_std), strict=True):
        logp, _ = plain_rl.current(model, row, TEMPERATURE)
        with torch.no_grad():
            of_tokens = plain_rl.current(teacher, row, TEMPERATURE)[0]
        if case == "advantage":
            divergences.append(row.old - of_tokens)
            part = keys["teacher_coef"] * (of_tokens - row.old).double()
            rest = torch.as_tensor(a).expand(len(part))
            sizes = [size + float(x.abs().sum()) for size, x in zip(sizes, (part, rest), strict=True)]
            a = a + part
        loss = plain_rl.clipped(plain_rl.ratio(row, logp), a, 0.2, 0.2)
        if case == "loss":
            places = [position - 1 for position in row.drawn]
            z = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0][places] / TEMPERATURE
            with torch.no_grad():
                z_q = teacher(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0][places] / TEMPERATURE
            divergences.append(divergence("jsd", z.log_softmax(-1), z_q.log_softmax(-1), keys["teacher_beta"]))
            agreements.append((z.argmax(-1) == z_q.argmax(-1)).float())
            part = keys["teacher_coef"] * divergences[-1]
            sizes = [size + float(x.detach().abs().mean()) for size, x in zip(sizes, (part, loss), strict=True)]
            loss = loss + part
        losses.append(loss)
    total = plain_rl.sequence_mean(losses)
    total.backward()
    name = "teacher/divergence" if case == "loss" else "teacher/kl"
    metrics = {"loss": float(total.detach()), "teacher/share": sizes[0] / sum(sizes),
               name: float(torch.cat(divergences).detach().mean())}  # fmt: skip
    if agreements:
        metrics["teacher/agreement"] = float(torch.cat(agreements).mean())
    return metrics, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def differs(mesh: str, case: str, rewarded: bool, family: str = "llama", of_teacher: str = "qwen3") -> float:
    """The largest difference, relative to its tolerance."""
    path, teacher = saved_model(family), saved_model(of_teacher, num_hidden_layers=3)
    rows = rollouts(path)
    metrics, gradients = run(world_of(mesh), accumulate, path, teacher, mesh, case, rows, rewarded)[0]
    expected, of_plain = plain(path, teacher, case, rows, rewarded)
    figures = compare_gradients(gradients, of_plain, {})
    deviations = [abs((metrics[name] or 0.0) - x) / max(abs(x), 1.0) / SCALAR for name, x in expected.items()]
    return max(*deviations, *(figure.value / GRADIENT for figure in figures))


@pytest.mark.covers("rl.teacher", "rl.teacher_in", "rl.teacher_coef", "rl.teacher_divergence", "rl.teacher_beta")
@pytest.mark.parametrize(
    ("mesh", "case", "rewarded"),
    [
        ("1", "loss", False),
        ("2", "loss", True),
        ("tp2", "loss", True),
        ("2", "advantage", False),
        ("1", "advantage", True),
    ],
)
def test_an_update_with_a_teacher(mesh: str, case: str, rewarded: bool) -> None:
    assert differs(mesh, case, rewarded) <= 1.0


@pytest.mark.parametrize(("teacher_in", "lines"), [("loss", 0), ("advantage", 3)])
def test_equal_rewards_are_nothing_to_learn_from_only_without_a_teacher_in_the_loss(
    teacher_in: str, lines: int
) -> None:
    """Advantages that are all zero, as without rewards; a teacher in the advantages is part of them."""
    samples = groups_of(rollouts(saved_model("llama")))[0].samples
    for sample in samples:
        sample.reward, sample.advantages = 0.0, torch.zeros(len(sample)).numpy()
    flat = FlatSteps()
    config = rl_config(algorithm("grpo", teacher="t", teacher_in=teacher_in), max_new_tokens=LONGEST)
    counts = [flat.count(samples, config) for _ in range(3)]
    assert len(counts[-1]) == lines
    if not lines:
        flat.require_signal(3)


def test_a_teacher_compares_whole_distributions() -> None:
    """Generation with top_p below 1 and a loss over all tokens (TRL's DistillationConfig) is refused."""
    words = ["model.path=m", "data.path=org/d", "rl.teacher=t", "rollout.engine=vllm"]
    assert load_config([], words, RlConfig).rl.reward == ()
    for key, value in (("top_p", 0.95), ("top_k", 20), ("min_p", 0.1)):
        with pytest.raises(UserError, match=f"rollout.{key} is {value}, which excludes tokens"):
            load_config([], [*words, f"rollout.{key}={value}", "rollout.allow_truncated=true"], RlConfig)
    with pytest.raises(UserError, match="rl.dynamic_sampling is 3, but without rl.reward"):
        load_config([], [*words, "rl.dynamic_sampling=3"], RlConfig)
    with pytest.raises(UserError, match="set rl.old_logprobs=recompute"):
        load_config([], [*words, "rl.teacher_in=advantage", "rl.old_logprobs=rollout"], RlConfig)
    with pytest.raises(UserError, match="has a critic, which does not learn the teacher's term"):
        load_config([], [*words, "rl.teacher_in=advantage", "rl.algorithm=ppo"], RlConfig)
