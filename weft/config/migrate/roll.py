"""The algorithm of a ROLL config in weft's keys, one quantity at a time.

Many switches of ROLL define an algorithm. Their defaults are in roll/configs/base_config.py (PPOConfig),
roll/pipeline/rlvr/rlvr_config.py and roll/configs/*_args.py. The computations are in roll/utils/functionals.py
(rewards, advantages, aggregation), roll/pipeline/rlvr/actor_worker.py and actor_pg_worker.py (the loss),
roll/pipeline/base_worker.py (the critic) and roll/utils/train_infer_corrections.py, at commit 8eb27cc2.

Every key that defines the algorithm is written into the draft. No such key is left to weft's default. If weft computes
a quantity differently, `Quantity.is_equal` is False, and the user must confirm the draft.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

from weft.config.conditions import KEEPS_ALL, SERVERS
from weft.config.migrate.algorithm import Algorithm
from weft.config.migrate.draft import numbers_of
from weft.config.migrate.rollouts import settle_rollouts
from weft.config.yaml12 import show

# Name -> ROLL's default, for every name that this file reads.
DEFAULTS: dict[str, Any] = {
    "adv_estimator": "gae",
    "gamma": 1.0,
    "lambd": 0.95,
    "norm_mean_type": None,
    "norm_std_type": None,
    "whiten_rewards": False,
    "whiten_advantages": False,
    "reward_clip": None,
    "advantage_clip": None,
    "pg_clip": 0.2,
    "use_pg_clip_range": False,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "dual_clip_loss": False,
    "importance_sampling": "token",
    "actor_train.worker_cls": None,
    "actor_train.pg_variant": None,
    "actor_train.tis_lower_bound": 0.0,
    "actor_train.tis_upper_bound": 1.0,
    "actor_train.cispo_epsilon_low": 0.1,
    "actor_train.cispo_epsilon_high": 0.1,
    "loss_agg_mode": "seq-mean-token-mean",
    "rl_loss_coef": 1.0,
    "difficulty_loss_weight": False,
    "length_loss_weight": False,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "add_token_level_kl": False,
    "init_kl_coef": 0.2,
    "kl_penalty": "kl",
    "target_kl": None,
    "kl_horizon": 10000,
    "entropy_loss_coef": 0.0,
    "train_infer_correction.is_weight.enabled": False,
    "train_infer_correction.is_weight.weight_type": "token",
    "train_infer_correction.is_weight.upper_bound": 1.2,
    "train_infer_correction.is_weight.detach": True,
    "train_infer_correction.filters": (),
    "max_len_mask": False,
    "difficulty_mask": False,
    "difficulty_low_threshold": 0.0,
    "difficulty_high_threshold": 1.0,
    "error_max_len_clip": False,
    "error_max_len_threshold": 9999999999,
    "is_use_additional_prompts": False,
    "value_clip": None,
    "reward_pretrain": None,
    "critic.model_args.model_name_or_path": None,
    "critic_warmup": 0,
    "ppo_epochs": 1,
    "max_grad_norm": 1.0,
    "num_return_sequences_in_group": 1,
    "actor_infer.generating_args.num_return_sequences": None,  # num_return_sequences_in_group replaces it
    "actor_infer.generating_args.temperature": 0.95,
    "actor_infer.generating_args.top_p": 0.7,
    "actor_infer.generating_args.top_k": 50,
    "actor_infer.generating_args.repetition_penalty": 1.0,
    "actor_infer.generating_args.num_beams": 1,
    "actor_infer.generating_args.stop_strings": None,
    "validation.generating_args.temperature": 0.95,
    "validation.generating_args.top_p": 0.7,
    "validation.generating_args.top_k": 50,
    "validation.generating_args.num_return_sequences": 1,
}
# Names in the critic's training_args -> the key of weft that both models share, and ROLL's default.
_CRITIC = {
    "weight_decay": ("optimizer.weight_decay", 0.0),
    "adam_beta1": ("optimizer.betas", 0.9),
    "adam_beta2": ("optimizer.betas", 0.999),
    "lr_scheduler_type": ("schedule.name", "linear"),
    "warmup_steps": ("schedule.warmup_steps", 0),
    "warmup_ratio": ("schedule.warmup_ratio", 0.0),
}
# Names that no code of ROLL reads.
UNREAD = (
    "use_topr_loss", "use_topr_neg_loss_coef", "postive_loss_coef", "use_policy_loss_type", "use_reward_scaling",
    "use_reward_norm", "add_len_reward", "l2", "mask_type", "balance_length", "minibatch_data_iter_num",
    "reward_norm", "reward_shift", "reward_scale",
)  # fmt: skip
# Names that settle_algorithm converts; no table has entries for them.
ALGORITHM = frozenset({*DEFAULTS, *UNREAD, "critic.training_args.learning_rate"} - {"num_return_sequences_in_group"})
_PG_WORKER = "ActorPGWorker"  # the only worker that reads pg_variant
_WITHIN_1 = ("math",)  # weft's rewards that equal ROLL's, between 0 and 1
_SCALES = {None: "none", "group": "group", "batch": "batch"}


class Roll(Algorithm):
    """The algorithm of ROLL's RLVR and agentic pipelines. samples: number in an optimizer step; None if unknown."""

    defaults = DEFAULTS

    @classmethod
    def handles(cls, name: str) -> bool:
        return name in ALGORITHM

    def settle(self, gpus: int | None, data_ranks: int | None) -> None:
        assert self.draft.rl is not None
        self.group = int(self.number("num_return_sequences_in_group"))
        trajectories, total = self.settings.get("train_env_manager.group_size"), self.draft.value("rl.prompts_per_step")
        if isinstance(trajectories, int) and trajectories > 0 and isinstance(total, int):
            self.group = trajectories
            self.take("rl.prompts_per_step", max(1, total // trajectories), "rollout_batch_size",
                      f"{total} trajectories / train_env_manager.group_size {trajectories}")  # fmt: skip
            self.draft.take("rl.group_size", trajectories, "train_env_manager.group_size")
        self.samples = settle_rollouts(self.draft, self.draft.rl, self.settings, gpus, data_ranks)
        if isinstance(trajectories, int) and self.draft.value("rollout.max_new_tokens", 1) < 1:
            self.take("rollout.max_new_tokens", self.settings.get("actor_infer.generating_args.max_new_tokens"),
                      "actor_infer.generating_args.max_new_tokens", "of one turn")  # fmt: skip
        for name in self.settings:
            if name in UNREAD and self.settings[name]:
                self.draft.notes[name] = "no code of ROLL reads it: remove it."
        self.take("rl.epochs", int(self.number("ppo_epochs")), "ppo_epochs")
        self.take("rl.group_size", self.group, "num_return_sequences_in_group")
        text = (
            "ROLL's pipeline for images renders prompts"
            if self.draft.images
            else "ROLL continues a text without a template"
        )
        self.take("rl.chat", self.draft.images, "rl.chat", text)
        self.rewards()
        estimator = self.advantage()
        self.clips()
        self.policy_loss()
        self.kl()
        self.corrections()
        self.masks()
        if estimator == "gae":
            self.critic()
        else:
            self.agrees("critic", "none", "none")
        self.sampling()
        self.evaluation()
        self.steps()

    # ------------------------------------------------------------ rewards and advantages

    def rewards(self) -> None:
        """Convert rewards of several kinds, from which ROLL chooses by each row's tag."""
        of_domain: dict[str, list[str]] = {}
        for name, value in self.settings.items():
            if fnmatchcase(name, "rewards.*.tag_included"):
                of_domain[name.split(".")[1]] = [str(tag) for tag in value or ()]
        names = self.draft.value("rl.reward") or []
        columns = self.draft.value("data.columns") or {}
        if "math" in names and "answer" not in columns and not self.draft.images:
            origin = "ROLL's columns, and ground_truth, which MathRuleRewardWorker reads"
            self.take("data.columns", {**columns, "answer": "ground_truth"}, "data_args.messages", origin)
        classes = (value for name, value in self.settings.items() if fnmatchcase(name, "rewards.*.worker_cls"))
        class_names = ", ".join(str(value).rpartition(".")[2] for value in classes)
        drafted = ", ".join(names) or "none yet"
        self.agrees("reward", class_names or "none", drafted)
        self.domains = max(len(names), len(of_domain))
        if len(names) > 1:
            tags = "; ".join(
                f"{domain}: {', '.join(tags_of_domain) or 'no tag'}" for domain, tags_of_domain in of_domain.items()
            )
            self.take("rl.reward_column", "domain", "rewards", "set it: the column with the name of a row's reward")
            self.agrees("reward of a row", f"by its tag ({tags})", "by rl.reward_column, a name of rl.reward")
        probabilities = {name: value for name, value in self.settings.items() if ".domain_interleave_probs." in name}
        if len(probabilities) > 1:
            shares = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in probabilities.items())
            self.differs("prompts of a step", shares, "in the order of the data: split them into `data.sources`")
        for name, value in self.settings.items():
            if fnmatchcase(name, "rewards.*.*_filter_config.type") and value not in (None, "no_filter"):
                self.differs("filter of groups", f"{name}: {value}", "none; the nearest is `rl.dynamic_sampling`")
        if any(name.split(".")[0] in ("custom_envs", "train_env_manager") for name in self.settings):
            self.differs("pipeline", "agents: rewards of a trajectory, normalised by reward_normalization",
                         "`rl.environment`; see the rewards below")  # fmt: skip

    def advantage(self) -> str:
        """Set rl.algorithm, rl.advantage, rl.advantage_norm, rl.gamma, rl.gae_lambda. Returns the name of the
        estimator."""
        estimator = str(self.value("adv_estimator"))
        grpo = estimator == "grpo"
        mean, std = ("group", "group") if grpo else (self.value("norm_mean_type"), self.value("norm_std_type"))
        whitened, gamma = self.on("whiten_advantages"), self.number("gamma")
        penalised = self.on("add_token_level_kl")
        affine = mean in (None, "batch", "running") and std in (None, "batch", "running")
        is_known = estimator in ("gae", "grpo", "reinforce")
        parts = [f"{estimator}: reward"]
        if mean:
            parts.append(f"- mean of the {mean}")
        if std:
            parts.append(f"/ standard deviation of the {std}")
        description = " ".join(parts) + (", whitened over all tokens" if whitened else "")
        origin = self.origin("adv_estimator")
        if whitened:
            origin += ", whiten_advantages"
        if estimator == "gae":
            algorithm, estimator_name = "ppo", "gae"
            scale = "batch" if whitened else "none"
            exact = mean is None and std is None
            drafted = "gae: reward, " + ("whitened over all tokens" if whitened else "not whitened")
        elif mean == "group" and not whitened and std in _SCALES:
            algorithm, estimator_name, scale = "grpo", "grpo", _SCALES[std]
            exact = gamma == 1 and not penalised
            over = "" if scale == "none" else f" / standard deviation of the {scale}"
            drafted = f"grpo: reward - mean of the group{over}"
        elif mean == "group" and whitened and std != "group":
            algorithm, estimator_name, scale = "reinforce++_baseline", "reinforce++_baseline", None
            exact = gamma == 1 and not penalised
            drafted = "reinforce++_baseline: reward - mean of the group, whitened over all tokens"
        elif mean == "group":
            algorithm, estimator_name, scale, exact = "grpo", "grpo", "group", False
            drafted = "grpo: reward - mean of the group / standard deviation of the group, not whitened"
        else:
            algorithm, estimator_name, scale = "reinforce++", "reinforce++", None
            constant = (mean is None or gamma == 1) and (not penalised or (mean is None and std is None))
            exact = whitened and affine and constant  # whitening removes terms and factors that all tokens share
            drafted = "reinforce++: reward, whitened over all tokens"
        if not is_known:
            description = f"{estimator}, which weft does not have"
        self.algorithm = algorithm
        self.take("rl.algorithm", algorithm, "adv_estimator", origin)
        self.take("rl.advantage", estimator_name, "adv_estimator", origin)
        if scale is not None:
            self.take(
                "rl.advantage_norm", scale, "whiten_advantages" if estimator_name == "gae" else "norm_std_type", origin
            )
        (self.agrees if is_known and exact else self.differs)("advantage", description, drafted)
        if (other := self.alone(estimator_name)) != estimator_name:
            self.algorithm = estimator_name = other
        if estimator_name in ("gae", "reinforce++"):
            self.take("rl.gamma", gamma, "gamma")
        self.agrees(
            "gamma", show(gamma), show(gamma) if estimator_name in ("gae", "reinforce++") or gamma == 1 else "not read"
        )
        if estimator_name == "gae":
            self.take("rl.gae_lambda", self.number("lambd"), "lambd")
            self.agrees("lambda", show(self.number("lambd")), show(self.number("lambd")))
        if self.on("whiten_rewards"):
            self.differs("whitening of rewards", "each token's reward, over all tokens", "none")
        else:
            self.agrees("whitening of rewards", "none", "none")
        if self.domains > 1 and (whitened or "batch" in (mean, std)):
            self.differs(
                "mean and deviation of a batch", "over each domain's samples", "over all samples of a rollout step"
            )
        if whitened and self.on("max_len_mask"):
            self.differs("whitening with max_len_mask", "over the trained tokens", "over all sampled tokens")
        self.bounds(mean, std, whitened)
        return estimator

    def bounds(self, mean: str | None, std: str | None, whitened: bool) -> None:
        """Note clips of rewards and advantages, which weft does not have, unless values never reach them."""
        small = all(name in _WITHIN_1 for name in self.draft.value("rl.reward") or ["?"])
        largest = math.inf  # of a normalised reward
        if mean == "group" and std == "group":
            largest = (self.group - 1) / math.sqrt(self.group)  # one sample of a group differs from all others
        elif small and std is None and mean in (None, "group"):
            largest = 1.0
        if self.on("add_token_level_kl"):
            largest = math.inf
        for name, quantity, bound in (
            ("reward_clip", "clip of rewards", largest),
            ("advantage_clip", "clip of advantages", largest if mean == "group" and not whitened else math.inf),
        ):
            value = self.value(name)
            if value is None or (name == "reward_clip" and not value):
                self.agrees(quantity, "none", "none")
            elif self.number(name) >= bound and self.number("gamma") == 1:
                self.agrees(quantity, f"{show(value)}, never reached", "none")
            else:
                self.differs(quantity, f"at most {show(value)} from 0", "none")

    # ------------------------------------------------------------ the loss

    def clips(self) -> None:
        """Set rl.clip and rl.dual_clip."""
        clip = self.number("pg_clip")
        low, high, name = clip, clip, "pg_clip"
        if self.on("use_pg_clip_range"):
            low, high, name = self.number("pg_clip_low"), self.number("pg_clip_high"), "pg_clip_low"
        else:
            for unused in ("pg_clip_low", "pg_clip_high"):
                if unused in self.settings:
                    self.draft.notes[unused] = "it has no effect without use_pg_clip_range."
        origin = "pg_clip_low, pg_clip_high" if name == "pg_clip_low" else self.origin(name)
        self.take("rl.clip", [low, high], name, origin)
        self.agrees("clip of the ratio", f"1 - {low:g} to 1 + {high:g}", f"1 - {low:g} to 1 + {high:g}")
        dual = 1 + 2 * clip if self.on("dual_clip_loss") else None  # from pg_clip, even with use_pg_clip_range
        self.take("rl.dual_clip", dual and float(f"{dual:.6g}"), "dual_clip_loss",
                  "dual_clip_loss: 1 + 2 x pg_clip" if dual else "")  # fmt: skip
        text = "none" if dual is None else f"{dual:g} x advantage, if that is negative"
        self.agrees("dual clip", text, text)

    def policy_loss(self) -> None:
        """Set rl.policy_loss, rl.loss_aggregation and rl.entropy_coef."""
        worker, variant = self.value("actor_train.worker_cls"), self.value("actor_train.pg_variant")
        if str(worker or "").endswith(_PG_WORKER):
            self.variant(str(variant or "vanilla"))
        else:
            if variant:
                self.draft.notes["actor_train.pg_variant"] = f"only {_PG_WORKER} reads it: remove it."
            level = str(self.value("importance_sampling"))
            equivalent = "gspo" if level == "seq" else "ppo"
            self.take("rl.policy_loss", equivalent, "importance_sampling")
            text = "clipped ratio of " + ("complete samples" if equivalent == "gspo" else "each token")
            constant = equivalent == "ppo" or (self.number("gamma") == 1 and self.algorithm != "ppo")
            (self.agrees if constant else self.differs)("policy loss", text, f"{equivalent}: {text}")
        self.aggregation(str(self.value("loss_agg_mode")), "loss_agg_mode", "max_grad_norm")
        entropy = self.number("entropy_loss_coef")
        self.take("rl.entropy_coef", entropy, "entropy_loss_coef")
        self.agrees("entropy", show(entropy), show(entropy))
        coefficient = self.number("rl_loss_coef")
        if coefficient != 1:
            self.differs("weight of the loss", f"rl_loss_coef {coefficient:g}", "1")
        for name in ("difficulty_loss_weight", "length_loss_weight"):
            if self.on(name):
                self.differs("weights of samples", name, "all equal")

    def variant(self, variant: str) -> None:
        """Set rl.policy_loss from pg_variant (ActorPGWorker), and rl.clip if the variant has separate bounds."""
        origin, low, high = "actor_train.pg_variant", 0.0, 0.0
        if variant == "cispo":
            low, high = (self.number(f"actor_train.cispo_epsilon_{end}") for end in ("low", "high"))
        elif variant == "tis":
            low = 1 - self.number("actor_train.tis_lower_bound")
            high = self.number("actor_train.tis_upper_bound") - 1
        if variant in ("vanilla", "ppo"):
            equivalent = {"vanilla": "reinforce", "ppo": "ppo"}[variant]
            self.take("rl.policy_loss", equivalent, origin)
            self.agrees("policy loss", variant, equivalent)
            if equivalent == "reinforce":
                self.without("rl.clip", "rl.dual_clip")
        elif variant in ("cispo", "tis") and 0 < low <= 1 and high > 0:
            self.take("rl.policy_loss", "cispo", origin)
            self.take("rl.clip", [low, high], origin, f"bounds of pg_variant {variant}")
            self.without("rl.dual_clip")
            text = f"logprobs weighted by the ratio, clipped to {1 - low:g} to {1 + high:g}"
            self.agrees("policy loss", f"{variant}: {text}", f"cispo: {text}")
        else:
            near = "cispo" if variant in ("tis", "topr") else "ppo"
            self.take("rl.policy_loss", near, origin)
            self.without(*(["rl.dual_clip"] if near == "cispo" else []))
            bounds = f" (the ratio from {1 - low:g} to {1 + high:g})" if variant == "tis" else ""
            self.differs("policy loss", f"pg_variant {variant}{bounds}, which weft does not have", near)

    def without(self, *keys: str) -> None:
        """Remove the keys of ppo's clips from the draft, for a policy loss that does not read them."""
        for key in keys:
            self.draft.values.pop(key)
        self.draft.quantities = [
            quantity for quantity in self.draft.quantities if quantity.name not in ("clip of the ratio", "dual clip")
        ]

    def kl(self) -> None:
        """Set rl.kl_coef and the related keys."""
        in_loss = self.on("use_kl_loss") and self.number("kl_loss_coef") > 0
        in_reward = self.on("add_token_level_kl") and self.number("init_kl_coef") > 0
        terms = []
        if in_loss:
            terms.append(f"{self.number('kl_loss_coef'):g} in the loss, k3 clamped at 10")
        if in_reward:
            terms.append(f"{self.number('init_kl_coef'):g} in the reward, {self.value('kl_penalty')}")
        if not terms:
            for switch, weight in (("use_kl_loss", "kl_loss_coef"), ("add_token_level_kl", "init_kl_coef")):
                if weight in self.settings and self.number(weight) and not self.on(switch):
                    self.draft.notes[weight] = f"it has no effect without {switch}."
            self.take("rl.kl_coef", 0.0, "use_kl_loss")
            self.agrees("KL", "none", "none")
            return
        name = "kl_loss_coef" if in_loss else "init_kl_coef"
        self.take("rl.kl_coef", self.number(name), name)
        self.take("rl.kl_in", "loss" if in_loss else "reward", "use_kl_loss" if in_loss else "add_token_level_kl")
        penalty = "k3" if in_loss else str(self.value("kl_penalty"))
        estimator = {"kl": "k1", "mse": "k2", "k3": "k3"}.get(penalty, "k1")
        origin = "ROLL's KL in the loss" if in_loss else self.origin("kl_penalty")
        self.take("rl.kl_estimator", estimator, "kl_penalty", origin)
        self.take("rl.kl_clamp", 10.0 if estimator == "k3" else None, "kl_penalty", f"ROLL's limit of {estimator}")
        if in_loss:
            self.take("rl.kl_unbiased", False, "use_kl_loss", "ROLL's KL in the loss")
        adaptive = in_reward and self.value("target_kl") is not None
        exact = len(terms) == 1 and (in_loss or penalty in ("kl", "mse", "k3")) and not adaptive
        description = " and ".join(terms) + (f", adapted to target_kl {self.value('target_kl')}" if adaptive else "")
        used_in = "loss" if in_loss else "reward"
        limit = " cut at 10" if estimator == "k3" else ""
        drafted = f"{self.number(name):g} in the {used_in}, {estimator}{limit}"
        (self.agrees if exact else self.differs)("KL", description, drafted)

    def corrections(self) -> None:
        """Set rl.old_logprobs and rl.correction."""
        self.take("rl.old_logprobs", "recompute", "enable_old_logprobs_recompute", "the trainer's, as in ROLL")
        prefix = "train_infer_correction.is_weight"
        enabled = self.on(f"{prefix}.enabled")
        self.take("rl.correction", "tis" if enabled else "none", f"{prefix}.enabled")
        if enabled:
            level, bound = str(self.value(f"{prefix}.weight_type")), self.value(f"{prefix}.upper_bound")
            # A sample without an environment is one segment, whose ratio is the geometric mean of its tokens'.
            equivalent = {"segment": "geometric"}.get(level, level)
            self.take("rl.correction_level", equivalent, f"{prefix}.weight_type")
            limit = 1e30 if bound is None else self.number(f"{prefix}.upper_bound")
            self.take("rl.correction_limits", [0.0, limit], f"{prefix}.upper_bound")
            description = f"ratio of each {level}, at most {'any' if bound is None else f'{limit:g}'}"
            exact = self.on(f"{prefix}.detach") and limit >= 1
            (self.agrees if exact else self.differs)("correction", description, f"tis: {equivalent}, 0 to {limit:g}")
        else:
            self.agrees("correction", "none", "none")
        filters = self.value("train_infer_correction.filters") or ()
        active = [correction for correction in filters if isinstance(correction, dict) and correction.get("enabled")]
        if active:
            filters_text = "; ".join(
                f"{correction.get('agg_type', 'token')} ratio {correction.get('ratio_low', 0.8):g} to "
                f"{correction.get('ratio_high', 1.2):g}"
                for correction in active
            )
            self.differs("filter of tokens", filters_text, "none; `rl.correction: icepop` is the nearest")

    def masks(self) -> None:
        """Set rl.mask_truncated, rl.count_masked and rl.dynamic_sampling."""
        masked = self.on("max_len_mask")
        self.take("rl.mask_truncated", masked, "max_len_mask")
        if masked and self.draft.value("rl.loss_aggregation") != "token_mean":
            self.take("rl.count_masked", False, "max_len_mask", "ROLL divides by the number of trained samples")
        text = "are not trained" if masked else "are trained"
        self.agrees("samples of the maximum length", text, text)
        self.take("rl.dynamic_sampling", 0, "is_use_additional_prompts")
        self.take("rl.overlong_buffer", None, "rl.overlong_buffer", "ROLL has none")
        if self.on("difficulty_mask"):
            low, high = (self.number(f"difficulty_{end}_threshold") for end in ("low", "high"))
            self.differs("groups by difficulty", f"trained if their mean score is between {low:g} and {high:g}",
                         "all are trained; `rl.dynamic_sampling` replaces groups with equal rewards")  # fmt: skip
        if self.on("error_max_len_clip"):
            self.differs("long wrong samples", "are not trained (error_max_len_clip)", "are trained")
        if self.on("is_use_additional_prompts"):
            self.differs("further prompts", "until enough groups pass the filter", "none; see `rl.dynamic_sampling`")

    # ------------------------------------------------------------ critic, sampling, steps

    def critic(self) -> None:
        """Set critic.lr, critic.clip and critic.path."""
        draft, lr = self.draft, "critic.training_args.learning_rate"
        rate = next(numbers_of(self.settings.get(lr, 5e-5)), 5e-5)
        self.take("critic.lr", rate, lr, lr if lr in self.settings else "ROLL's default learning rate")
        self.agrees("critic's learning rate", f"{rate:g}", f"{rate:g}")
        clip = self.value("value_clip")
        self.take("critic.clip", clip, "value_clip")
        self.agrees("clip of values", show(clip), show(clip))
        path = self.value("critic.model_args.model_name_or_path") or self.value("reward_pretrain")
        if path is not None:
            self.take("critic.path", path, "reward_pretrain")
        self.differs("aggregation of the critic's loss", "the mean of each sample, then over samples",
                     "the mean over tokens")  # fmt: skip
        if self.number("critic_warmup"):
            warmup = self.number("critic_warmup")
            self.differs("warm-up of the critic", f"{warmup:g} steps without the policy", "none")
        for leaf, (key, default) in _CRITIC.items():
            policy = self.settings.get(f"actor_train.training_args.{leaf}", default)
            critic = self.settings.get(f"critic.training_args.{leaf}", default)
            if policy != critic:
                values = f"critic {show(critic)}, policy {show(policy)}"
                self.differs(f"{leaf} of the critic", values, f"the policy's ({key})")
        batches = [
            math.prod(
                self.settings.get(f"{role}.training_args.{leaf}", default)
                for leaf, default in draft.trainer.table.per_device.items()
            )
            for role in ("actor_train", "critic")
        ]
        if batches[0] != batches[1]:
            values = f"critic {batches[1]} per rank, policy {batches[0]}"
            self.differs("samples of an optimizer step of the critic", values, "as for the policy (rl.minibatches)")
        if draft.value("optimizer.max_grad_norm") != self.value("max_grad_norm"):
            self.differs("gradient norm of the critic", show(self.value("max_grad_norm")), "the policy's")

    def sampling(self) -> None:
        """Set rollout.temperature, top_p, top_k, min_p and stop."""
        draft, prefix = self.draft, "actor_infer.generating_args"
        temperature = self.number(f"{prefix}.temperature")
        self.take("rollout.temperature", temperature, f"{prefix}.temperature")
        self.agrees("temperature of sampling", f"{temperature:g}", f"{temperature:g}")
        if temperature != 1:
            self.differs("temperature of training", "1: logprobs of the unscaled logits",
                         f"{temperature:g}: training also divides the logits by it")  # fmt: skip
        engine = draft.value("rollout.engine")
        top_k = max(0, int(self.number(f"{prefix}.top_k")))
        limits = {"top_p": self.number(f"{prefix}.top_p"), "top_k": top_k}
        cut = {leaf: value for leaf, value in limits.items() if value != KEEPS_ALL[leaf]}
        allowed = "rollout.allow_truncated" in draft.keys  # the engine does not report the share of its samples
        for leaf, value in limits.items():
            name, text = f"{prefix}.{leaf}", f"{value:g}"
            if leaf in cut and engine in SERVERS and not allowed:
                self.take(f"rollout.{leaf}", KEEPS_ALL[leaf], name, f"{engine} does not report the share of {leaf}")
                self.differs(leaf, text, f"{KEEPS_ALL[leaf]}: all tokens; `rollout.engine: hf` supports {leaf}")
            else:
                self.take(f"rollout.{leaf}", value, name)
                self.agrees(leaf, text, text)
        if cut and engine in SERVERS and allowed:
            self.take(
                "rollout.allow_truncated",
                True,
                prefix,
                "ROLL trains such samples as if they were drawn from all tokens",
            )
        self.take("rollout.min_p", 0.0, "rollout.min_p", "ROLL has none")
        stop = self.value(f"{prefix}.stop_strings")
        if stop:
            self.take("rollout.stop", stop, f"{prefix}.stop_strings")
        for leaf, default in (("repetition_penalty", 1), ("num_beams", 1)):
            if self.number(f"{prefix}.{leaf}") != default:
                self.differs(leaf, show(self.value(f"{prefix}.{leaf}")), "none")

    def evaluation(self) -> None:
        """Set how answers to held-out prompts are drawn."""
        if "eval.path" not in self.draft.values and "eval.sources" not in self.draft.values:
            return
        prefix = "validation.generating_args"
        self.take("eval.samples", max(1, int(self.number(f"{prefix}.num_return_sequences"))),
                  f"{prefix}.num_return_sequences")  # fmt: skip
        self.take("eval.temperature", self.number(f"{prefix}.temperature"), f"{prefix}.temperature")
        self.take("eval.top_p", self.number(f"{prefix}.top_p"), f"{prefix}.top_p")
        self.take("eval.top_k", max(0, int(self.number(f"{prefix}.top_k"))), f"{prefix}.top_k")

    def steps(self) -> None:
        """Note prompts, samples, updates, lengths and learning rate."""
        draft = self.draft
        warmup = "schedule.warmup_steps" if "schedule.warmup_steps" in draft.values else "schedule.warmup_ratio"
        self.compare_values({
            "prompts of a rollout step": "rl.prompts_per_step", "samples of a prompt": "rl.group_size",
            "epochs": "rl.epochs", "longest prompt": "rollout.max_prompt_tokens",
            "longest completion": "rollout.max_new_tokens", "learning rate": "optimizer.lr", "warm-up": warmup,
        })  # fmt: skip
        samples = draft.value("rl.prompts_per_step", 0) * self.group
        if "rl.minibatches" in draft.values:
            text = f"{draft.value('rl.minibatches')} x {self.samples} samples"
            self.agrees("optimizer steps of a rollout step", text, text)
        else:
            draft.values["rl.minibatches"] = (
                None,
                f"set it: {samples} samples / the samples of an optimizer step (per device x accumulation x data "
                f"ranks)",
                "rl.minibatches",
            )
