"""Mutants of reinforcement learning: advantages, corrections, samples, drawing, sync."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant("rl/algorithms/grpo.py", "estimate", "returns.deviation(r) + returns.BESIDE_DEVIATION", "returns.deviation(r)", "tests/rl/test_rl_math.py"),
    Mutant("rl/algorithms/grpo.py", "estimate", "returns.deviation(np.concatenate(scores))", "returns.deviation(scores[0])", "tests/rl/test_rl_math.py"),
    Mutant("rl/algorithms/rloo.py", "estimate", "len(r) / max(1, len(r) - 1)", "1", "tests/rl/test_rl_math.py"),
    Mutant("rl/algorithms/returns.py", "deviation", "values.std(ddof=1)", "values.std(ddof=0)", "tests/rl/test_rl_math.py"),
    Mutant("rl/algorithms/returns.py", "whitened", "tokens.var(ddof=1)", "tokens.var(ddof=0)", "tests/rl/test_rl_math.py"),
    Mutant("rl/algorithms/ppo.py", "estimate", "config.gamma * following", "following", "tests/rl/test_rl_math.py tests/rl/test_critic.py"),
    Mutant("rl/algorithms/ppo.py", "estimate", "config.gamma * config.gae_lambda", "config.gae_lambda", "tests/rl/test_rl_math.py tests/rl/test_critic.py"),
    Mutant("rl/algorithms/ppo.py", "estimate", "advantage + values", "advantage", "tests/rl/test_rl_math.py tests/rl/test_critic.py"),
    Mutant("rl/algorithms/returns.py", "token_rewards", "rewards -= keys.kl_coef * kl(difference, keys.kl_estimator, keys.kl_clamp)", "rewards += keys.kl_coef * kl(difference, keys.kl_estimator, keys.kl_clamp)", "tests/rl/test_rl_math.py"),
    Mutant("rl/algorithms/returns.py", "token_rewards", "rewards[-1]", "rewards[0]", "tests/rl/test_rl_math.py"),
    Mutant("rl/advantages.py", "overlong_penalty", "length - (longest - buffer)", "length - longest", "tests/rl/test_rl_math.py"),
    Mutant("rl/advantages.py", "advantages", "[s for s in group.episodes if s.counts]", "[s for s in group.episodes]", "tests/rl/test_rl_math.py tests/rl/test_rewards.py"),
    Mutant("rl/advantages.py", "reward_metrics", "not group.has_signal", "group.has_signal", "tests/rl/test_rl_math.py"),
    Mutant("rl/corrections.py", "old_is_current", "rl.minibatches * rl.epochs == 1", "rl.minibatches == 1", "tests/rl/test_rl_math.py tests/parity/test_rl_parity.py tests/parity/test_policy_parity.py"),
    Mutant("rl/corrections.py", "comparable", "sample.rollout_logprobs + sample.kept_logmass", "sample.rollout_logprobs", "tests/rl/test_rl_math.py tests/parity/test_policy_parity.py"),
    Mutant("rl/corrections.py", "mismatch_metrics", "weights != ratios", "weights == ratios", "tests/rl/test_rl_math.py"),
    Mutant("rl/corrections.py", "mismatch_metrics", "ratios.sum() ** 2", "ratios.sum()", "tests/rl/test_rl_math.py"),
    Mutant("rl/algorithms/returns.py", "kl", "np.expm1(-difference) + difference", "np.expm1(difference) - difference", "tests/rl/test_rl_math.py"),
    Mutant("inference/types.py", "SampleGroup.has_signal", "{sample.reward for sample in self.samples if sample.counts}", "{sample.reward for sample in self.samples}", "tests/rl/test_rl_math.py tests/rl/test_prompts.py tests/rl/test_rewards.py"),
    Mutant("rl/documents.py", "_Samples.measures", "_trained_tokens(sample)[1:]", "_trained_tokens(sample)", "tests/data/test_steps_from_lengths.py tests/rl/test_rl_math.py tests/parity/test_policy_parity.py"),
    Mutant("rl/rollouts.py", "groups_to_train", "group.has_signal or rounds == 0", "True", "tests/rl/test_environments.py"),
    Mutant("rl/rollouts.py", "groups_to_train", "kept + aside[:missing]", "kept", "tests/rl/test_environments.py"),
    Mutant("rl/rollouts.py", "episode", "seed_of(seed, name, number, turn)", "seed_of(seed, name, number, 0)", "tests/rl/test_environments.py tests/rl/test_colocation.py"),
    Mutant("rl/rollouts.py", "episode", "transcript.length + len(following.tokens) >= episodes.max_completion_tokens(prompt, following.reply_images)", "transcript.length + len(following.tokens) > episodes.max_completion_tokens(prompt, following.reply_images)", "tests/rl/test_environments.py tests/rl/test_colocation.py"),
    Mutant("rl/documents.py", "_Samples._media", "sample.images", "sample.prompt.images", "tests/rl/test_reply_images.py"),
    Mutant("inference/records.py", "_row", "_replied(sample.reply_images)", "_replied(None)", "tests/rl/test_reply_images.py"),
    Mutant("rl/environments/episodes.py", "Episodes.max_completion_tokens", "self.room.tokens - self.room.in_tokens(reply_images.patches)", "self.room.tokens", "tests/rl/test_reply_images.py"),
    Mutant("rl/trajectory.py", "TrajectoryBuilder.sample", "not (self.error or self.untrained)", "True", "tests/rl/test_environments.py tests/rl/test_colocation.py"),
    Mutant("rl/evaluate.py", "RlEvaluator.due", "step == steps", "False", "tests/rl/test_rl_eval.py"),
    Mutant("inference/base.py", "seed_of", "f'{run}:{prompt}:{sample}:{turn}'", "f'{prompt}:{sample}:{turn}'", "tests/inference/test_generate.py tests/inference/test_embedded.py"),
    Mutant("inference/base.py", "seed_of", "f'{run}:{prompt}:{sample}:{turn}'", "f'{run}:{prompt}:{sample}'", "tests/inference/test_generate.py tests/rl/test_environments.py tests/rl/test_colocation.py"),
    Mutant("inference/token_sampling.py", "kept", "share_RV.cumsum(-1) - share_RV < sampling.top_p", "share_RV.cumsum(-1) < sampling.top_p", "tests/inference/test_generate.py tests/inference/test_embedded.py"),
    Mutant("inference/token_sampling.py", "kept", "stays_RV[:, 0] = True", "pass", "tests/inference/test_generate.py tests/inference/test_embedded.py"),
    Mutant("inference/token_sampling.py", "sample_tokens", "logprobs_RV - mass_R[:, None]", "logprobs_RV", "tests/inference/test_generate.py tests/inference/test_embedded.py"),
    Mutant("inference/token_sampling.py", "sample_tokens", "logits_RV / sampling.temperature", "logits_RV * sampling.temperature", "tests/inference/test_generate.py tests/inference/test_embedded.py"),
    Mutant("inference/generate.py", "Generator.generate", "len({request.id for request in requests}) < len(requests)", "False", "tests/inference/test_generate.py tests/inference/test_embedded.py"),
)  # fmt: skip
