"""Keys of `weft rl`: every one that is accepted has an effect, and a test that shows it; ranges; what does not go
together."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from weft.config import SftConfig, load_config, to_dict, to_yaml
from weft.config.keys import schema_keys
from weft.config.rl_schema import RlConfig
from weft.errors import UserError

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "weft"

TRUNCATED = ("rollout.engine=vllm", "rollout.top_p=0.99", "rollout.top_k=100", "rollout.allow_truncated=true")
RL_KEYS = [name for name in schema_keys(RlConfig) if name not in schema_keys(SftConfig)]


def load(*overrides: str) -> RlConfig:
    overridden = {word.partition("=")[0] for word in overrides}
    needed = ("model.path=org/m", "data.path=org/d", "rl.reward=[math]")
    return load_config([], [*(w for w in needed if w.partition("=")[0] not in overridden), *overrides], RlConfig)


def test_every_key_is_read_outside_the_config_package() -> None:
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name not in ("config", "trainers"):
            tree = ast.parse(path.read_text())
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name.partition(".")[2] for name in RL_KEYS} - read == set()


OUT_OF_RANGE: dict[str, Any] = {
    "rl.prompts_per_step": 0, "rl.group_size": 0, "rl.minibatches": 0, "rl.epochs": 0,
    "rl.clip": "[0, 0.2]", "rl.kl_coef": -1,
    "rl.entropy_coef": -1, "rl.dynamic_sampling": -1, "rollout.max_prompt_tokens": 0, "rollout.max_new_tokens": 0,
    "rollout.temperature": 0, "rollout.top_p": 0, "rollout.top_k": -1, "rollout.min_p": 1, "cluster.trainer_ranks": 0,
    "cluster.max_staleness": -1, "rl.max_turns": 0, "rl.reward_timeout": 0,
}  # fmt: skip


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused(key: str) -> None:
    with pytest.raises(UserError) as error:
        load(f"{key}={OUT_OF_RANGE[key]}")
    within = schema_keys(RlConfig)[key].within
    assert (within is not None and within.words in str(error.value)) or "would have no effect" in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["step.documents=8"],
            "step.documents would have no effect: a rollout step has rl.prompts_per_step x rl.group_size",
        ),
        (["cluster.max_staleness=1"], "the embedded engine alternates with training: set rollout.engine=hf or vllm"),
        (
            ["cluster.max_staleness=1", "rollout.engine=hf", "cluster.placement=colocated"],
            "with cluster.placement=colocated engines alternate with training: set cluster.max_staleness=0, or",
        ),
        (["rl.agent=a:b", "rl.environment=c:D"], "rl.agent and rl.environment are both set"),
        (["rl.agent=a:b", "rl.advantage=reinforce++"], "set rl.advantage to one of grpo, rloo, max_rl"),
        (["rl.agent=a:b", "rl.policy_loss=gspo"], "set rl.policy_loss=ppo"),
        (["rl.agent=a:b", "rl.correction_level=sequence"], "set rl.correction_level=token"),
        (["rl.agent=a:b", "rl.overlong_buffer=2"], "set rl.overlong_buffer=null"),
        (["rl.agent=a:b", "rl.kl_coef=0.1", "rl.kl_in=reward"], "set rl.kl_in=loss"),
        (["rl.agents_at_once=2"], "rl.agents_at_once would have no effect: rl.agent is not set"),
        (["cluster.placement=colocated"], "cluster.placement would have no effect: rollout.engine=embedded is in"),
        (
            ["rollout.engine=hf", "rollout.on_weight_update=drop"],
            "rollout.on_weight_update would have no effect: cluster.max_staleness is 0",
        ),
        (
            ["rollout.engine=hf", "cluster.placement=disaggregated", "cluster.offload_during_rollout=[optimizer]"],
            "trainers need not free theirs",
        ),
        (["cluster.offload_during_rollout=[weights]"], "cluster.offload_during_rollout"),
        (["rollout.max_new_tokens=9000"], "set step.max_tokens_per_device="),
        (
            ["rl.prompts_per_step=3", "rl.minibatches=2"],
            "rl.minibatches is 2, which does not divide rl.prompts_per_step = 3",
        ),
        (["rl.kl_coef=0.1", "rl.measure_kl=true"], "rl.measure_kl would have no effect: rl.kl_coef is above 0"),
        (["rollout.engine=vllm", "rollout.top_p=0.99"], "rollout.allow_truncated=true"),
        (["rollout.engine=vllm", "rollout.allow_truncated=true"], "exclude no token"),
        (["rollout.top_k=5", "rollout.allow_truncated=true"], "only engines that are servers read it"),
        ([*TRUNCATED, "rl.correction_level=sequence"], "set rl.correction_level=token, or geometric"),
        ([*TRUNCATED, "rl.old_logprobs=rollout"], "Set rl.old_logprobs=recompute"),
        (["data.long_documents=truncate"], "a truncated prompt is another task"),
        (["rollout.bucket_mb=1"], "rollout.bucket_mb would have no effect"),
        (["rl.reward=[]"], "rl.reward is empty"),
        (["reference.path=m"], "reference.path would have no effect"),
        (["rl.on_policy=exact", "rl.old_logprobs=rollout"], "the trainer computes no logprobs to compare"),
        (["rl.on_policy=exact", "mesh.tp=2"], "with mesh.tp = 2 the sums of a layer are added from 2 ranks"),
        (["rl.on_policy=exact", "rl.algorithm=ppo", "critic.tp=4"], "set critic.tp=1"),
        (["lora.rank=4", "rollout.engine=sglang"], "Set rollout.engine=vllm, hf or embedded, or lora.rank=null"),
        (
            ["lora.rank=4", "lora.sampling=merged", "rollout.engine=vllm"],
            "Set lora.sampling=auto, or rollout.engine=hf",
        ),
        (
            ["lora.rank=4", "lora.base=nf4", "rollout.engine=vllm", "rollout.engine_kwargs={quantization: fp8}"],
            "rollout.engine_kwargs.quantization: vLLM has no format that rounds like lora.base=nf4",
        ),
        (
            ["lora.rank=4", "lora.base=nf4", "rollout.engine=hf", "rollout.transport=files"],
            "Set rollout.transport=auto, or lora.base=compute",
        ),
        (["model.dcp_weights=.", "rollout.engine=sglang"], "weft export . --model org/m, and set model.path to this"),
        (
            ["rl.prompts_per_step=100000", "rl.group_size=11"],
            "rl.prompts_per_step x rl.group_size is 1,100,000; it must be 1,000,000 or",
        ),
        (["rl.reward_workers=5000"], "it must be 1 to 4,096"),
        (["cluster.trainer_ranks=1000000000"], "it must be 1 to 1,000,000"),
    ],
)
def test_values_that_do_not_fit(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        load(*overrides)
    assert words in str(error.value)


def test_a_resolved_config_loads_to_itself(tmp_path: Path) -> None:
    config = load("rl.algorithm=dapo", "rollout.engine=hf", "cluster.max_staleness=1", "rl.kl_coef=0.1")
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config([str(tmp_path / "c.yaml")], [], RlConfig) == config
    assert "documents" not in to_dict(config)["step"]
