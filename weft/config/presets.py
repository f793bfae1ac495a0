"""The defaults that rl.preset and lora set for other keys. Imports no torch.

The presets of rl.algorithm are in the files of the algorithms (weft/rl/algorithms).
"""

from __future__ import annotations

from typing import Any

from weft.config.keys import get, schema_keys

# Command -> key -> its default with lora. Adapters learn best at about ten times the learning rate of full training,
# both in fine-tuning and in reinforcement learning (Schulman et al. 2025, "LoRA Without Regret").
ADAPTER_DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"optimizer.lr": 1.0e-4, "optimizer.weight_decay": 0.0},
    "distill": {"optimizer.lr": 1.0e-4, "optimizer.weight_decay": 0.0},
    "dpo": {"optimizer.lr": 1.0e-5},
    "reward": {"optimizer.lr": 1.0e-4},
    "rl": {"optimizer.lr": 1.0e-5},
}

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


def _but(common: dict[str, Any], *without: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in common.items() if name not in without} | changes


# trainer -> algorithm -> key of `rl` -> the trainer's default. TRL: GRPOConfig (loss_type dapo,
# vllm_importance_sampling_mode sequence_mask at 3) and RLOOConfig; verl: actor.yaml and core_algos.py; NeMo RL:
# grpo_math_1B.yaml. No trainer has its own defaults for the bounds of gspo and cispo, so the papers' bounds apply.
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


def default_of_command(config: Any, name: str) -> str:
    """The source of a default value, such as "weft rl" or "weft sft with lora"; "" if the value is not the default."""
    command = config.command
    adapted = ADAPTER_DEFAULTS[command] if config.lora.on else {}
    if get(config, name) != adapted.get(name, schema_keys(type(config))[name].default):
        return ""
    return f"weft {command}{' with lora' * (name in adapted)}"
