"""The defaults that rl.algorithm, rl.preset and lora set for keys that the user has not set. Imports no torch.

Each entry of PRESETS is the algorithm as in its paper; what a paper does not say is left to the schema's default.
"""

from __future__ import annotations

from typing import Any

from weft.config.keys import get, schema_keys

# Command -> key -> its default where lora is on. Adapters learn best at about ten times the rate of all weights, in
# fine-tuning and in reinforcement learning alike (Schulman et al. 2025, "LoRA Without Regret").
ADAPTER_DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"optimizer.lr": 1.0e-4, "optimizer.weight_decay": 0.0},
    "rl": {"optimizer.lr": 1.0e-5},
}

# algorithm -> key of `rl` -> value
PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, arXiv:2402.03300, equation 3
    "grpo": {"advantage": "grpo", "advantage_norm": "group", "policy_loss": "ppo", "loss_aggregation": "sequence_mean"},
    # Liu et al. 2025, arXiv:2503.20783: neither the standard deviation nor the length of a sample divides
    "dr_grpo": {"advantage": "grpo", "advantage_norm": "none", "policy_loss": "ppo",
        "loss_aggregation": "sequence_sum"},
    # Yu et al. 2025, arXiv:2503.14476, equation 8; over-long shaping asks for a length, rl.overlong_buffer
    "dapo": {
        "advantage": "grpo", "advantage_norm": "group", "policy_loss": "ppo", "loss_aggregation": "token_mean",
        "clip": [0.2, 0.28],
        "dynamic_sampling": 10,
    },
    # Ahmadian et al. 2024, arXiv:2402.14740
    "rloo": {"advantage": "rloo", "policy_loss": "ppo", "loss_aggregation": "sequence_sum", "kl_in": "reward",
             "kl_estimator": "k1"},
    # Hu et al. 2025, arXiv:2501.03262
    "reinforce++": {"advantage": "reinforce++", "policy_loss": "ppo", "loss_aggregation": "token_mean",
        "kl_in": "reward",
                    "kl_estimator": "k1"},
    "reinforce++_baseline": {"advantage": "reinforce++_baseline", "policy_loss": "ppo",
        "loss_aggregation": "token_mean",
                             "kl_in": "loss", "kl_estimator": "k2"},
    # Zheng et al. 2025, arXiv:2507.18071, equation 5 and section 5.1
    "gspo": {"advantage": "grpo", "advantage_norm": "group", "policy_loss": "gspo", "loss_aggregation": "sequence_mean",
             "clip": [3e-4, 4e-4]},
    # MiniMax 2025, arXiv:2506.13585, equations 4 and 5: no bound below; the upper one is Khatri et al.'s 2025,
    # arXiv:2510.13786
    "cispo": {"advantage": "grpo", "advantage_norm": "group", "policy_loss": "cispo", "loss_aggregation": "token_mean",
              "clip": [1.0, 4.0]},
    # Schulman et al. 2017, arXiv:1707.06347, with the KL of Ouyang et al. 2022, arXiv:2203.02155, in the reward
    "ppo": {"advantage": "gae", "advantage_norm": "batch", "policy_loss": "ppo", "loss_aggregation": "token_mean",
            "kl_in": "reward", "kl_estimator": "k1"},
}  # fmt: skip

_TRL: dict[str, Any] = {
    "clip": [0.2, 0.2], "dual_clip": None, "loss_aggregation": "token_mean", "kl_in": "loss", "kl_estimator": "k3",
    "kl_clamp": None, "kl_unbiased": False, "correction": "mis", "correction_level": "sequence",
    "correction_limits": [0.0, 3.0], "count_masked": True, "dynamic_sampling": 0,
}  # fmt: skip
_VERL: dict[str, Any] = {
    "clip": [0.2, 0.2], "dual_clip": 3.0, "loss_aggregation": "token_mean", "kl_clamp": 10.0, "kl_unbiased": False,
    "correction": "none", "count_masked": False,
}  # fmt: skip
_NEMO_RL: dict[str, Any] = {
    "clip": [0.2, 0.2], "dual_clip": None, "loss_aggregation": "token_mean", "kl_coef": 0.01, "kl_in": "loss",
    "kl_estimator": "k3", "kl_clamp": 10.0, "kl_unbiased": False, "correction": "none", "count_masked": False,
}  # fmt: skip

# roll/configs/base_config.py (PPOConfig) and roll/pipeline/rlvr/actor_worker.py: KL in the loss is k3, cut at 10
_ROLL: dict[str, Any] = {
    "clip": [0.2, 0.2], "dual_clip": None, "loss_aggregation": "sequence_mean", "kl_in": "loss", "kl_estimator": "k3",
    "kl_clamp": 10.0, "kl_unbiased": False, "correction": "none", "count_masked": False, "dynamic_sampling": 0,
}  # fmt: skip
# miles/utils/arguments.py and loss_hub/math_utils.py; slime/utils/arguments.py and ppo_utils.py
_SLIME: dict[str, Any] = {
    "clip": [0.2, 0.2], "dual_clip": None, "loss_aggregation": "sequence_mean", "kl_in": "loss", "kl_estimator": "k1",
    "kl_clamp": None, "kl_unbiased": False, "correction": "none", "count_masked": False, "dynamic_sampling": 0,
}  # fmt: skip
# openrlhf/cli/train_ppo_ray.py, openrlhf/models/loss.py (PolicyLoss) and models/utils.py (compute_approx_kl)
_OPENRLHF: dict[str, Any] = {
    "clip": [0.2, 0.2], "dual_clip": None, "loss_aggregation": "token_mean", "kl_coef": 0.01, "kl_in": "reward",
    "kl_estimator": "k1", "kl_clamp": 10.0, "correction": "none", "count_masked": False,
}  # fmt: skip


def _but(common: dict[str, Any], *without: str, **changed: Any) -> dict[str, Any]:
    return {name: value for name, value in common.items() if name not in without} | changed


# trainer -> algorithm -> key of `rl` -> the trainer's default. TRL: GRPOConfig (loss_type dapo,
# vllm_importance_sampling_mode sequence_mask at 3) and RLOOConfig; verl: actor.yaml and core_algos.py; NeMo RL:
# grpo_math_1B.yaml. No trainer has defaults for the bounds of gspo and cispo; those of the papers stay.
LIKE: dict[str, dict[str, dict[str, Any]]] = {
    "trl": {
        "grpo": _TRL,
        "dr_grpo": _but(_TRL, loss_aggregation="sequence_sum"),
        "dapo": _TRL,
        "gspo": _but(_TRL, "clip", "loss_aggregation"),
        "cispo": _but(_TRL, "clip", "dual_clip"),
        "rloo": {
            "clip": [0.2, 0.2], "policy_loss": "ppo_sequence", "loss_aggregation": "sequence_mean", "kl_coef": 0.05,
            "kl_in": "reward", "kl_estimator": "k1", "correction": "none", "count_masked": True,
        },
    },
    "verl": {
        "grpo": _but(_VERL, kl_in="loss", kl_estimator="k3"),
        "dr_grpo": _but(_VERL, loss_aggregation="sequence_sum"),
        "dapo": _but(_VERL, "clip"),
        "gspo": _but(_VERL, "clip", loss_aggregation="sequence_mean", dual_clip=None),
        "cispo": _but(_VERL, "clip", "dual_clip"),
        **dict.fromkeys(("rloo", "reinforce++", "reinforce++_baseline", "ppo"), _VERL),
    },
    "roll": {
        "grpo": _ROLL,
        "gspo": _but(_ROLL, "clip"),
        **{
            name: _but(_ROLL, kl_in="reward", kl_estimator="k1", kl_clamp=None)
            for name in ("reinforce++", "reinforce++_baseline")
        },
        "ppo": _but(_ROLL, kl_in="reward", kl_estimator="k1", kl_clamp=None, advantage_norm="none", gae_lambda=0.95),
    },
    **{name: {"grpo": _SLIME, "gspo": _but(_SLIME, "clip")} for name in ("miles", "slime")},
    "openrlhf": {"ppo": _OPENRLHF, "reinforce++": _OPENRLHF},
    "nemo-rl": {"grpo": _NEMO_RL, "gspo": _but(_NEMO_RL, "clip", loss_aggregation="sequence_mean")},
}  # fmt: skip

# Values of rl.advantage. COMPARING: those that compare the samples of a prompt.
COMPARING = ("grpo", "rloo", "reinforce++_baseline")
ADVANTAGES = (*COMPARING, "reinforce++", "gae")
POLICY_LOSSES = ("ppo", "gspo", "ppo_sequence", "cispo", "reinforce")


def default_of_command(config: Any, name: str) -> str:
    """Whose default the value of a key is, as in "weft rl" or "weft sft with lora"; "" if it is not the default."""
    command = "rl" if hasattr(config, "rl") else "sft"
    adapted = ADAPTER_DEFAULTS[command] if config.lora.on else {}
    if get(config, name) != adapted.get(name, schema_keys(type(config))[name].default):
        return ""
    return f"weft {command}{' with lora' * (name in adapted)}"
