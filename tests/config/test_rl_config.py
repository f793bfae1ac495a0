"""Keys of `weft rl`: every one that is accepted has an effect, and a test that shows it; ranges; what does not go
together."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from weft.config import SftConfig, load_config, to_dict, to_yaml
from weft.config.keys import schema_keys
from weft.config.rl_checks import RANGES
from weft.config.rl_schema import RlConfig
from weft.errors import UserError

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "weft"

RUN = "rl/test_rl_run.py::test_a_run_and_what_it_leaves"
SIGNAL = "rl/test_environments.py::test_groups_without_signal_are_replaced_in_the_order_of_the_data"
ALGORITHMS = "parity/test_policy_parity.py::test_every_algorithm"
SERVER = "inference/test_servers.py::test_keys_reach_the_server"
APART = "rl/test_rl_run.py::test_a_reference_and_a_critic_with_ranks_of_their_own"
BESIDE = "rl/test_critic.py::test_what_is_said_is_the_engines_own"
SYNC = "inference/test_weight_sync.py::test_after_each_sync_an_engine_is_one_loaded_from_the_export"
# key -> the test that shows its effect. Those that `weft sft` has, too, are in config/test_every_key_has_an_effect.py.
EFFECTS: dict[str, str] = {
    "rl.reward": "rl/test_rewards.py::test_trls_signature_with_columns_and_weights",
    "rl.reward_weights": "rl/test_rewards.py::test_trls_signature_with_columns_and_weights",
    "rl.reward_column": "rl/test_rewards.py::test_a_column_says_which_functions_are_asked",
    "rl.reward_options": "rl/test_rewards.py::test_trls_signature_with_columns_and_weights",
    "rl.reward_timeout": "rl/test_rewards.py::test_what_fails_costs_its_sample",
    "rl.reward_workers": "rl/test_rewards.py::test_so_many_processes_work_side_by_side",
    "rl.environment": "rl/test_environments.py::test_the_calculator_offers_its_tool_and_answers_calls",
    "rl.max_turns": "rl/test_environments.py::test_where_a_conversation_ends",
    "rl.environment_timeout": "rl/test_environments.py::test_an_environment_that_fails_costs_one_sample",
    "rl.algorithm": "rl/test_rl_math.py::test_a_preset_sets_what_nobody_has",
    "rl.preset": "rl/test_rl_math.py::test_the_defaults_of_another_trainer",
    "rl.prompts_per_step": RUN,
    "rl.group_size": RUN,
    "rl.minibatches": RUN,
    "rl.chat": "rl/test_prompts.py::test_keys_of_the_config",
    "rl.instruction": "rl/test_prompts.py::test_files_of_other_trainers",
    "rl.epochs": "rl/test_rl_run.py::test_samples_may_be_trained_more_than_once_and_from_python",
    "rl.advantage": "rl/test_rl_math.py::test_rewards_are_compared_within_a_group",
    "rl.advantage_norm": "rl/test_rl_math.py::test_rewards_are_compared_within_a_group",
    "rl.gamma": "rl/test_rl_math.py::test_reinforce_plus_plus_whitens_over_the_tokens_of_the_step",
    "rl.gae_lambda": "rl/test_rl_math.py::test_gae_and_its_returns",
    "rl.policy_loss": ALGORITHMS,
    "rl.clip": ALGORITHMS,
    "rl.dual_clip": "engine/test_policy_loss.py::test_metrics",
    "rl.loss_aggregation": "rl/test_rl_math.py::test_documents",
    "rl.kl_coef": "rl/test_rl_math.py::test_kl_in_the_reward",
    "rl.measure_kl": "engine/test_policy_loss.py::test_a_kl_of_weight_0_is_measured_and_trains_nothing",
    "rl.kl_in": "rl/test_rl_math.py::test_kl_in_the_reward",
    "rl.kl_estimator": "engine/test_policy_loss.py::test_what_the_gradient_of_a_kl_estimate_is_the_gradient_of",
    "rl.kl_clamp": ALGORITHMS,
    "rl.kl_unbiased": "engine/test_policy_loss.py::test_what_the_gradient_of_a_kl_estimate_is_the_gradient_of",
    "rl.entropy_coef": "engine/test_policy_loss.py::test_metrics",
    "rl.entropy_aggregation": ALGORITHMS,
    "rl.old_logprobs": "rl/test_rl_math.py::test_old_logprobs_of_the_rollout",
    "rl.on_policy": "rl/test_exact.py::test_it_is_proven_on_the_model_before_training_or_refused",
    "rl.correction": "rl/test_rl_math.py::test_corrections",
    "rl.correction_level": "rl/test_rl_math.py::test_corrections",
    "rl.correction_limits": "rl/test_rl_math.py::test_corrections",
    "rl.dynamic_sampling": SIGNAL,
    "rl.mask_truncated": "rl/test_rl_math.py::test_documents",
    "rl.count_masked": ALGORITHMS,
    "rl.overlong_buffer": "rl/test_rl_math.py::test_overlong_shaping",
    "rl.overlong_penalty": "rl/test_rl_math.py::test_overlong_shaping",
    "rollout.engine": "rl/test_rl_run.py::test_engines_of_their_own_run_ahead_of_training",
    "rollout.max_prompt_tokens": "rl/test_prompts.py::test_keys_of_the_config",
    "rollout.max_new_tokens": "inference/test_generate.py::test_keys_of_the_config_are_those_of_the_draws",
    "rollout.temperature": "inference/test_generate.py::test_keys_of_the_config_are_those_of_the_draws",
    "rollout.top_p": "inference/test_generate.py::test_keys_of_the_config_are_those_of_the_draws",
    "rollout.top_k": "inference/test_generate.py::test_keys_of_the_config_are_those_of_the_draws",
    "rollout.min_p": "inference/test_generate.py::test_keys_of_the_config_are_those_of_the_draws",
    "rollout.allow_truncated": "rl/test_rl_math.py::test_truncated_samples_of_an_engine_that_does_not_say_the_kept_share",
    "rollout.stop": "inference/test_generate.py::test_keys_of_the_config_are_those_of_the_draws",
    "rollout.on_weight_update": "rl/test_colocation.py::test_completions_that_are_unfinished_when_weights_change",
    "rollout.transport": SYNC,
    "rollout.bucket_mb": SYNC,
    "rollout.verify_every": "inference/test_weight_sync.py::test_values_are_compared_at_an_engines_first_sync_and_every_so_often",
    "rollout.kv_cache_tokens": "inference/test_generate.py::test_room_is_what_the_config_says",
    "rollout.python": "inference/test_servers.py::test_the_interpreter_is_found_and_its_version_checked",
    "rollout.num_engines": SERVER,
    "rollout.tp": SERVER,
    "rollout.gpu_memory_utilization": SERVER,
    "rollout.dtype": SERVER,
    "rollout.engine_kwargs": SERVER,
    "rollout.timeout": SERVER,
    "reference.path": "rl/test_critic.py::test_what_is_not_said_of_reference_and_critic_is_as_the_policys",
    "reference.param_dtype": BESIDE,
    "reference.ranks": APART,
    "reference.dp_replicate": BESIDE,
    "reference.dp_shard": BESIDE,
    "reference.tp": BESIDE,
    "reference.pp": BESIDE,
    "reference.cpu_offload": BESIDE,
    "reference.max_tokens_per_device": BESIDE,
    "critic.path": "rl/test_critic.py::test_what_is_not_said_of_reference_and_critic_is_as_the_policys",
    "critic.head": "rl/test_critic.py::test_values_loss_and_gradients",
    "critic.lr": "rl/test_critic.py::test_a_critic_learns_returns_beside_a_policy_and_its_reference",
    "critic.clip": "rl/test_critic.py::test_values_loss_and_gradients",
    "critic.ranks": APART,
    "critic.dp_replicate": BESIDE,
    "critic.dp_shard": BESIDE,
    "critic.tp": BESIDE,
    "critic.pp": BESIDE,
    "critic.cpu_offload": BESIDE,
    "critic.max_tokens_per_device": BESIDE,
    "cluster.address": "rl/test_rl_run.py::test_a_cluster_that_is_not_there_is_named",
    "cluster.trainer_ranks": "rl/test_rl_run.py::test_a_cluster_that_is_not_there_is_named",
    "cluster.placement": "rl/test_placement.py::test_what_needs_no_trial",
    "cluster.offload_during_rollout": "rl/test_colocation.py::test_which_parts_sleep",
    "cluster.max_staleness": "rl/test_rl_run.py::test_engines_of_their_own_run_ahead_of_training",
    "eval.samples": "rl/test_rl_eval.py::test_pass_at_k_of_answers_that_are_drawn",
    "eval.pass_at": "rl/test_rl_eval.py::test_what_is_correct_and_how_many_are_drawn",
    "eval.top_p": "rl/test_rl_eval.py::test_pass_at_k_of_answers_that_are_drawn",
    "eval.top_k": "rl/test_rl_eval.py::test_pass_at_k_of_answers_that_are_drawn",
    "eval.correct_from": "rl/test_rl_eval.py::test_what_is_correct_and_how_many_are_drawn",
}
TRUNCATED = ("rollout.engine=vllm", "rollout.top_p=0.99", "rollout.top_k=100", "rollout.allow_truncated=true")
OWN = [name for name in schema_keys(RlConfig) if name not in schema_keys(SftConfig)]


def load(*overrides: str) -> RlConfig:
    given = {word.partition("=")[0] for word in overrides}
    needed = ("model.path=org/m", "data.path=org/d", "rl.reward=[math]")
    return load_config([], [*(w for w in needed if w.partition("=")[0] not in given), *overrides], RlConfig)


def test_every_key_has_its_line() -> None:
    assert list(EFFECTS) == OWN


@pytest.mark.parametrize("shown_by", sorted(set(EFFECTS.values())))
def test_the_test_that_shows_it_exists(shown_by: str) -> None:
    file, _, name = shown_by.partition("::")
    assert f"def {name}(" in (TESTS / file).read_text()


def test_every_key_is_read_outside_the_config_package() -> None:
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name not in ("config", "trainers"):
            tree = ast.parse(path.read_text())
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name.partition(".")[2] for name in OWN} - read == set()


OUT_OF_RANGE: dict[str, Any] = {
    "rl.prompts_per_step": 0, "rl.group_size": 0, "rl.minibatches": 0, "rl.epochs": 0, "rl.clip": "[0, 0.2]", "rl.kl_coef": -1,
    "rl.entropy_coef": -1, "rl.dynamic_sampling": -1, "rollout.max_prompt_tokens": 0, "rollout.max_new_tokens": 0,
    "rollout.temperature": 0, "rollout.top_p": 0, "rollout.top_k": -1, "rollout.min_p": 1, "cluster.trainer_ranks": 0,
    "cluster.max_staleness": -1, "rl.max_turns": 0, "rl.reward_timeout": 0,
}  # fmt: skip


@pytest.mark.parametrize("key", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused(key: str) -> None:
    with pytest.raises(UserError) as error:
        load(f"{key}={OUT_OF_RANGE[key]}")
    assert RANGES[key][1] in str(error.value) or "would have no effect" in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["step.documents=8"],
            "step.documents would have no effect: a rollout step has rl.prompts_per_step x rl.group_size",
        ),
        (["cluster.max_staleness=1"], "the embedded engine takes turns with training: set rollout.engine=hf or vllm"),
        (
            ["cluster.max_staleness=1", "rollout.engine=hf", "cluster.placement=colocated"],
            "with cluster.placement=colocated engines take turns with training: set cluster.max_staleness=0, or",
        ),
        (["cluster.placement=colocated"], "cluster.placement would have no effect: rollout.engine=embedded is in"),
        (
            ["rollout.engine=hf", "rollout.on_weight_update=drop"],
            "rollout.on_weight_update would have no effect: nothing is unfinis",
        ),
        (
            ["rollout.engine=hf", "cluster.placement=disaggregated", "cluster.offload_during_rollout=[optimizer]"],
            "trainers stay awake",
        ),
        (["cluster.offload_during_rollout=[weights]"], "cluster.offload_during_rollout"),
        (["rollout.max_new_tokens=9000"], "set step.max_tokens_per_device="),
        (
            ["rl.prompts_per_step=3", "rl.minibatches=2"],
            "rl.minibatches is 2, which does not divide rl.prompts_per_step = 3",
        ),
        (["rl.kl_coef=0.1", "rl.measure_kl=true"], "rl.measure_kl would have no effect: rl.kl_coef is above 0"),
        (["rollout.engine=vllm", "rollout.top_p=0.99"], "rollout.allow_truncated=true"),
        (["rollout.engine=vllm", "rollout.allow_truncated=true"], "leave no token out"),
        (["rollout.top_k=5", "rollout.allow_truncated=true"], "only engines that are servers read it"),
        ([*TRUNCATED, "rl.correction_level=sequence"], "set rl.correction_level=token, or geometric"),
        ([*TRUNCATED, "rl.old_logprobs=rollout"], "set rl.old_logprobs=recompute"),
        (["data.long_documents=truncate"], "a prompt without its end asks something else"),
        (["rollout.bucket_mb=1"], "rollout.bucket_mb would have no effect"),
        (["rl.reward=[]"], "rl.reward is empty"),
        (["reference.path=m"], "reference.path would have no effect"),
        (["rl.on_policy=exact", "rl.old_logprobs=rollout"], "takes the engine's logprobs unread, so that nothing"),
        (["rl.on_policy=exact", "mesh.tp=2"], "with mesh.tp = 2 the sums of a layer are made of those of 2 ranks"),
        (["rl.on_policy=exact", "rl.algorithm=ppo", "critic.tp=4"], "set critic.tp=1"),
        (["model.dcp_weights=.", "rollout.engine=sglang"], "weft export . --model org/m, and set model.path to that"),
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
