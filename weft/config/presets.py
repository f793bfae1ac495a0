"""What rl.algorithm stands for: values of keys that nobody has set. Imports no torch.

Each line is the algorithm as its paper has it; what a paper does not say is the schema's default.
"""

from __future__ import annotations

from typing import Any

# algorithm -> key of `rl` -> value
PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, arXiv:2402.03300, equation 3
    "grpo": {"advantage": "grpo", "scale": "group", "policy_loss": "ppo", "aggregation": "sequence_mean"},
    # Liu et al. 2025, arXiv:2503.20783: neither the standard deviation nor the length of a sample divides
    "dr_grpo": {"advantage": "grpo", "scale": "none", "policy_loss": "ppo", "aggregation": "sequence_sum"},
    # Yu et al. 2025, arXiv:2503.14476, equation 8; over-long shaping asks for a length, rl.overlong_buffer
    "dapo": {
        "advantage": "grpo", "scale": "group", "policy_loss": "ppo", "aggregation": "token_mean", "clip": [0.2, 0.28],
        "dynamic_sampling": 10,
    },
    # Ahmadian et al. 2024, arXiv:2402.14740
    "rloo": {"advantage": "rloo", "policy_loss": "ppo", "aggregation": "sequence_sum", "kl_in": "reward",
             "kl_estimator": "k1"},
    # Hu et al. 2025, arXiv:2501.03262
    "reinforce++": {"advantage": "reinforce++", "policy_loss": "ppo", "aggregation": "token_mean", "kl_in": "reward",
                    "kl_estimator": "k1"},
    "reinforce++_baseline": {"advantage": "reinforce++_baseline", "policy_loss": "ppo", "aggregation": "token_mean",
                             "kl_in": "loss", "kl_estimator": "k2"},
    # Zheng et al. 2025, arXiv:2507.18071, equation 5 and section 5.1
    "gspo": {"advantage": "grpo", "scale": "group", "policy_loss": "gspo", "aggregation": "sequence_mean",
             "clip": [3e-4, 4e-4]},
    # MiniMax 2025, arXiv:2506.13585, equations 4 and 5: no bound below; the upper one is Khatri et al.'s 2025,
    # arXiv:2510.13786
    "cispo": {"advantage": "grpo", "scale": "group", "policy_loss": "cispo", "aggregation": "token_mean",
              "clip": [1.0, 4.0]},
    # Schulman et al. 2017, arXiv:1707.06347, with the KL of Ouyang et al. 2022, arXiv:2203.02155, in the reward
    "ppo": {"advantage": "gae", "scale": "batch", "policy_loss": "ppo", "aggregation": "token_mean",
            "kl_in": "reward", "kl_estimator": "k1"},
}  # fmt: skip

# rl.advantage: those that compare the samples of a prompt, and those that do not.
COMPARING = ("grpo", "rloo", "reinforce++_baseline")
ADVANTAGES = (*COMPARING, "reinforce++", "gae")
POLICY_LOSSES = ("ppo", "gspo", "cispo", "reinforce")
