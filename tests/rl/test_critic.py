"""A critic: values of every token, their loss and its gradients beside plain PyTorch; as a checkpoint; and how it lives
beside a policy and a reference in the same ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import inputs
from tests.support.rl_samples import group
from weft.checkpoint.save import Saver
from weft.checkpoint.state import load_state, read_state
from weft.config.keys import get, schema_keys
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.config.schema import CheckpointConfig
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.engine.losses.value import ValueLoss
from weft.engine.score_head import First, ScoreSpec
from weft.engine.step_plan.plan import StepPlan
from weft.errors import UserError
from weft.inference.types import Floats
from weft.launch.process import join
from weft.rl.advantages import advantages
from weft.rl.model_engines import critic_config, critic_engine, policy_config, reference_config, teacher_config
from weft.rl.trainer import Role, TrainerRank
from weft.verify.documents import awkward_steps
from weft.verify.harness import GRADIENT, SCALAR, compare_gradients
from weft.verify.observed import Tensors, to_documents

CLIP = 0.2
STEP = awkward_steps(128)[0]


@cache
def arrays() -> list[dict[str, Tensor]]:
    """Returns, and old values that are near to none of the critic's, of each document."""
    generator = torch.Generator().manual_seed(5)
    return [{name: torch.randn(len(ids), generator=generator) for name in ("returns", "values")} for ids, _ in STEP]


def documents_of(engine: Engine) -> tuple[dict[int, Document], StepPlan]:
    documents, metas = to_documents(engine, STEP)
    return {i: replace(d, arrays=arrays()[i]) for i, d in documents.items()}, engine.plan(metas)


def critic(path: str, mesh: str, first: First = "normal", **sections: Any) -> Engine:
    return open_engine(path, mesh, score=ScoreSpec(first=first), **{"step": {"max_tokens_per_device": 61}, **sections})


def values_of(engine: Engine) -> dict[int, Tensor]:
    """Of all documents, on every rank."""
    documents, plan = documents_of(engine)
    parts: list[dict[int, Tensors]] = [{} for _ in range(engine.ranks.world)]
    dist.all_gather_object(parts, engine.readout(plan, documents, ("value",)))
    return {index: values["value"] for part in parts for index, values in part.items()}


# ---------------------------------------------------------------- parity


def weft_step(path: str, mesh: str, clip: float | None) -> tuple[Tensors, dict[int, Tensor], dict[str, Any], Tensors]:
    """(weights, values, metrics, gradients)."""
    engine = critic(path, mesh)
    documents, plan = documents_of(engine)
    weights, values = dict(engine.tensors()), values_of(engine)
    metrics = engine.accumulate(plan, documents, ValueLoss(clip))
    return weights, values, metrics, {name: g for name, g in engine.gradients() if g is not None}


def plain(path: str, weights: Tensors, clip: float | None) -> tuple[list[Tensor], float, float, Tensors]:
    """(values of each document, loss, share of clipped tokens, gradients) by transformers' own classifier."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        model.score.weight.copy_(weights["score.weight"])
    total, clipped = sum(sum(mask[1:]) for _, mask in STEP), 0.0
    values, losses = [], []
    for (ids, mask), array in zip(STEP, arrays(), strict=True):
        value = model.score(model.base_model(input_ids=torch.tensor([ids])).last_hidden_state)[0, :-1, 0]
        values.append(value.detach())
        target, old, weight = array["returns"][1:], array["values"][1:], torch.tensor(mask[1:])
        loss = (value - target) ** 2
        if clip is not None:
            clipped_loss = (old + (value - old).clamp(-clip, clip) - target) ** 2
            clipped += float((weight * (clipped_loss > loss)).sum())
            loss = torch.stack([loss, clipped_loss]).amax(0)
        losses.append((weight * loss).sum() / 2 / total)
    loss = torch.stack(losses).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return values, float(loss.detach()), clipped / total, gradients


@pytest.mark.covers("critic.head", "critic.clip")
@pytest.mark.parametrize(
    ("family", "mesh", "clip"),
    [
        pytest.param("llama", "4", CLIP, marks=pytest.mark.table),
        ("qwen3", "2x2", CLIP),
        ("gpt2", "pp2", CLIP),
        ("qwen3_moe", "1", None),
    ],
)
def test_values_loss_and_gradients(family: str, mesh: str, clip: float | None) -> None:
    """qwen3's policy is tied: a critic's head has nothing to be tied to. On 4 ranks the head's one row is on one."""
    path = saved_model(family)
    weights, values, metrics, actual = run(world_of(mesh), weft_step, path, mesh, clip)[0]
    expected, loss, clipped, gradients = plain(path, weights, clip)
    for index, value in enumerate(expected):
        torch.testing.assert_close(values[index][1:], value, rtol=SCALAR, atol=SCALAR)
        assert values[index][0] == 0
    assert metrics["loss/value_avg"] == pytest.approx(loss, rel=SCALAR)
    assert (metrics["val/clipfrac_avg"] if clip else 0.0) == pytest.approx(clipped, rel=SCALAR)
    assert not clip or 0.1 < clipped < 0.9
    figures = compare_gradients(actual, gradients, {})
    assert len(figures) == len(weights) and all(figure.value <= GRADIENT for figure in figures), figures


# ---------------------------------------------------------------- checkpoints


def saved_and_resumed(path: str, mesh: str, folder: str) -> bool:
    """A policy and its critic in one checkpoint; another critic goes on from it as this one does."""
    policy, first = open_engine(path, mesh), critic(path, mesh, "zeros")
    assert not any(value.any() for value in values_of(first).values())  # zeros
    train(first)
    with Saver(policy, Path(folder), CheckpointConfig(async_=False), {}, further_engines={"critic": first}) as saver:
        saver.save(1, {})
        checkpoint = saver.finish()
    second = critic(str(checkpoint / "critic"), mesh)  # of a classifier, whose head is kept
    third = critic(path, mesh)
    load_state(third, read_state(checkpoint / "critic"))
    same = same_weights(first, second) and same_weights(first, third)
    train(first), train(third)
    return same and same_weights(first, third) and not same_weights(first, second)


def train(engine: Engine) -> None:
    documents, plan = documents_of(engine)
    engine.accumulate(plan, documents, ValueLoss(CLIP))
    engine.apply(1e-3)


def same_weights(first: Engine, second: Engine) -> bool:
    pairs = zip(first.tensors(), second.tensors(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("mesh", ["2", "pp2"])
def test_a_critic_is_saved_beside_its_policy_as_a_classifier_and_resumed(mesh: str, tmp_path: Path) -> None:
    path = saved_model("llama_tied")
    assert all(run(2, saved_and_resumed, path, mesh, str(tmp_path)))
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    assert (checkpoint / "trainer_state").is_dir() and (checkpoint / "critic" / "trainer_state").is_dir()
    assert transformers.AutoConfig.from_pretrained(checkpoint).architectures == ["LlamaForCausalLM"]
    read, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
        checkpoint / "critic", output_loading_info=True
    )
    assert read.num_labels == 1 and read.score.weight.any()
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]


def refusal(path: str) -> str:
    with pytest.raises(UserError) as caught:
        critic(path, "1")
    return str(caught.value)


def test_models_that_no_critic_can_be_made_of_are_named(tmp_path: Path) -> None:
    assert "no sequence classification for model_type 'granite'" in run(1, refusal, saved_model("granite"))[0]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(saved_model("llama"), num_labels=3)
    model.save_pretrained(tmp_path)
    assert "has 3 labels, but this run needs 1" in run(1, refusal, str(tmp_path))[0]


# ---------------------------------------------------------------- together


def beside_each_other(path: str, mesh: str, shared: bool) -> tuple[Tensors, Tensors, Tensors]:
    """(policy after a step, critic after a step, the reference's logprobs afterwards); the policy of another mesh."""
    policy = open_engine(path, mesh)
    opened: list[Engine] = [policy]
    if shared:
        opened += _reference_and_critic(path, mesh, policy)
        assert opened[1].mesh is policy.mesh is not opened[2].mesh
    documents, metas = to_documents(policy, STEP)
    policy.accumulate(policy.plan(metas), documents, CrossEntropy())
    policy.apply(1e-3)
    _, reference, value = opened if shared else (policy, *_reference_and_critic(path, mesh, None))
    train(value)
    readout = reference.readout(reference.plan(metas), documents)
    parts: list[dict[int, Tensors]] = [{} for _ in range(policy.ranks.world)]
    dist.all_gather_object(parts, readout)
    logprobs = {str(index): values["logprob"] for part in parts for index, values in part.items()}
    return dict(policy.tensors()), dict(value.tensors()), logprobs


def _reference_and_critic(path: str, mesh: str, policy: Engine | None) -> list[Engine]:
    reference = open_engine(path, mesh, purpose="inference", shares_with=policy, step={"max_tokens_per_device": 64})
    return [reference, critic(path, "4", shares_with=policy, model={"recompute": "full"})]


def test_three_engines_in_the_same_ranks_do_not_know_of_each_other() -> None:
    path = saved_model("qwen3_moe")
    shared_results, single_results = (run(4, beside_each_other, path, "2x2", shared)[0] for shared in (True, False))
    for actual, reference in zip(shared_results, single_results, strict=True):
        assert actual.keys() == reference.keys() and all(torch.equal(actual[name], reference[name]) for name in actual)
    start = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([STEP[0][0]])
    expected = start(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(shared_results[2]["0"][1:], expected.detach(), rtol=1e-4, atol=1e-4)


def learns(path: str, lora: str) -> tuple[list[float], list[float], bool]:
    """Twelve rollout steps of the same samples with PPO's advantages: (losses of the critic, shares of the returns'
    variance that it explains), and whether what reads the reference reads the policy as it was."""
    keys = ("rollout.max_new_tokens=20", "rollout.max_prompt_tokens=20", "critic.lr=3e-3", "optimizer.lr=1e-4")
    trainer = TrainerRank(
        read(*keys, f"model.path={path}", "mesh.dp_shard=2", "critic.clip=null", "rl.correction=none", lora), "cpu"
    )
    groups = [group([1.0, 0.0], [4, 6]), group([0.0, 1.0], [5, 3], index=1)]
    samples = [member for sample_group in groups for member in sample_group.samples]
    for index, member in enumerate(samples):
        member.tokens[member.sampled] += 7 * index  # what they drew tells them apart
    first, losses, explained = collect(trainer.read("policy", samples)), [], []
    for number in range(1, 13):
        reads: dict[Role, str] = {"policy": "old_logprobs", "reference": "ref_logprobs", "critic": "values"}
        for role, name in reads.items():
            for index, values in collect(trainer.read(role, samples)).items():
                setattr(samples[index], name, values)
        explained.append(advantages(groups, trainer.config.rl)["critic/explained_variance"])
        line = trainer.update(samples, number, 12, 1, 1e-4).line
        losses.append(float(str(line["loss/value_avg"])))
    moved = not any(np.array_equal(first[i], member.old_logprobs) for i, member in enumerate(samples))
    same = all(np.array_equal(first[i], member.ref_logprobs) for i, member in enumerate(samples))
    return losses, explained, same and moved


def collect(local: dict[int, Floats]) -> dict[int, Floats]:
    """Of all ranks."""
    parts: list[dict[int, Floats]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, local)
    return {index: values for part in parts for index, values in part.items()}


@pytest.mark.covers("critic.lr")
@pytest.mark.parametrize("lora", ["lora.rank=null", "lora.rank=4"])
def test_a_critic_learns_returns_beside_a_policy_and_its_reference(lora: str) -> None:
    for losses, explained, same in run(2, learns, str(inputs() / "model"), lora):
        assert same and losses[-1] < 0.5 * losses[0], (losses, explained)
        assert explained[0] == 0.0 and explained[-1] > 0.5, explained


# ---------------------------------------------------------------- keys

POLICY = (
    "model.path=m", "data.path=owner/data", "rl.reward=[length]", "rl.algorithm=ppo", "rl.kl_coef=0.1",
    "mesh.dp_shard=4",
    "optimizer.weight_decay=0.3", "rollout.temperature=0.7", "optimizer.ema_decay=0.9",
)  # fmt: skip


def read(*overrides: str) -> RlConfig:
    return load_config([], [*POLICY, *overrides], RlConfig)


@pytest.mark.covers("reference.path", "critic.path")
def test_what_is_not_said_of_reference_and_critic_is_as_the_policys() -> None:
    config = read("model.freeze=[lm_head]")
    policy, reference, value = policy_config(config), reference_config(config), critic_config(config)
    assert reference is not None and value is not None
    for model_config in (reference, value):
        assert (model_config.model.path, model_config.mesh, model_config.step) == ("m", policy.mesh, policy.step)
        assert model_config.fsdp == policy.fsdp and model_config.seed == policy.seed and not model_config.model.freeze
    assert reference.purpose == "inference" and reference.temperature == policy.temperature == 0.7
    assert reference.score is None and value.score == ScoreSpec(first="zeros") and value.purpose == "train"
    assert value.temperature == 1.0 and value.optimizer.weight_decay == 0.3 and value.optimizer.ema_decay is None


def test_weights_of_another_trainer_are_those_of_reference_and_critic_that_have_no_path_of_their_own() -> None:
    for overrides, expected in (((), "."), (("reference.path=r", "critic.path=r"), None)):
        config = read("model.dcp_weights=.", "optimizer.load_state=true", *overrides)
        reference, critic = reference_config(config), critic_config(config)
        assert reference is not None and critic is not None
        assert reference.model.dcp_weights == critic.model.dcp_weights == expected
        assert policy_config(config).optimizer.load_state and not critic.optimizer.load_state


@pytest.mark.covers(
    "reference.param_dtype",
    "reference.dp_replicate",
    "reference.dp_shard",
    "reference.tp",
    "reference.pp",
    "reference.cpu_offload",
    "reference.max_tokens_per_device",
    "critic.dp_replicate",
    "critic.dp_shard",
    "critic.tp",
    "critic.pp",
    "critic.cpu_offload",
    "critic.max_tokens_per_device",
    "teacher.param_dtype",
    "teacher.dp_replicate",
    "teacher.dp_shard",
    "teacher.tp",
    "teacher.pp",
    "teacher.cpu_offload",
    "teacher.max_tokens_per_device",
)
@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("path=r", "model.path", "r"),
        ("param_dtype=bf16", "fsdp.param_dtype", "bf16"),
        ("dp_replicate=2", "mesh.dp_replicate", 2),
        ("dp_shard=2", "mesh.dp_shard", 2),
        ("tp=2", "mesh.tp", 2),
        ("pp=2", "mesh.pp", 2),
        ("cpu_offload=true", "fsdp.cpu_offload", True),
        ("max_tokens_per_device=5000", "step.max_tokens_per_device", 5000),
        ("head=normal", "score", ScoreSpec(first="normal")),
        ("lr=3e-5", "optimizer.lr", 3e-5),
    ],
)
def test_what_is_said_is_the_engines_own(override: str, key: str, value: object) -> None:
    configs = {"reference": reference_config, "critic": critic_config, "teacher": teacher_config}
    for section, config_of in configs.items():
        if f"{section}.{override.partition('=')[0]}" not in schema_keys(RlConfig):
            continue
        before, after = read("rl.teacher=t"), read("rl.teacher=t", f"{section}.{override}")
        assert get(config_of(after), key) == value != get(config_of(before), key)
        assert policy_config(before) == policy_config(after)
        assert all(derive(before) == derive(after) for name, derive in configs.items() if name != section)


def test_engines_that_nothing_asks_for_are_not_opened_and_their_keys_refused() -> None:
    plain = load_config([], [*POLICY, "rl.algorithm=grpo", "rl.kl_coef=0"], RlConfig)
    assert reference_config(plain) is None and critic_config(plain) is None
    based = read("lora.rank=4")
    assert reference_config(based) is None, "the base under the adapters"
    replaced = reference_config(read("lora.rank=4", "lora.modules_to_save=[lm_head]"))
    assert replaced is not None and not replaced.lora.on
    for overrides, message in (
        (["rl.kl_coef=0", "rl.kl_in=null", "reference.path=r"], "reference.path would have no effect: rl.kl_coef is 0"),
        (["rl.algorithm=grpo", "critic.lr=1e-6"], "critic.lr would have no effect: only rl.advantage=gae has a critic"),
        (["lora.rank=4", "reference.dp_shard=2"], "reference.dp_shard would have no effect: the reference is the base"),
        (["critic.max_tokens_per_device=1500"], "critic.max_tokens_per_device = 1500"),
        (["critic.clip=0"], "critic.clip is 0.0; it must be above 0, or null"),
    ):
        with pytest.raises(UserError, match=message):
            read(*overrides)


def test_whose_model_it_is_that_cannot_be_read() -> None:
    (message,) = run(1, unreadable, saved_model("granite"))
    assert message.startswith("the critic (keys critic.*, others as the policy's): model.path: transformers")


def unreadable(path: str) -> str:
    with pytest.raises(UserError) as caught:
        critic_engine(read(f"critic.path={path}", "mesh.dp_shard=1"), join("cpu"))
    return str(caught.value)
