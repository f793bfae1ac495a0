"""The algorithm of prime-rl (`rl @ rl.toml`) in weft's keys, one quantity at a time.

The defaults are in packages/prime-rl-configs/src/prime_rl/configs (rl.py, trainer.py, orchestrator.py, algorithm.py).
The computations are in src/prime_rl/orchestrator/algo (advantages), src/prime_rl/trainer/rl/loss.py (the loss) and
src/prime_rl/trainer/scheduler.py, at commit 559b4477. Prompts, rewards and turns come from an environment of the
package verifiers, which the draft does not set. Every key that defines the algorithm is written; see algorithm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.config.migrate.algorithm import Algorithm
from weft.config.migrate.draft import numbers_of

_SAMPLING, _MODEL, _LOSS = "orchestrator.train.sampling", "trainer.model", "trainer.loss"

# Name -> prime-rl's default, for every name that this file reads.
DEFAULTS: dict[str, Any] = {
    "max_steps": None,
    "seq_len": None,
    "orchestrator.algo.type": "grpo",
    "orchestrator.algo.teacher.name": None,
    "orchestrator.algo.length_penalty.type": None,
    "orchestrator.algo.length_penalty.num_output_tokens_weight": 0.25,
    "orchestrator.batch_size": None,
    "orchestrator.token_batch_size": None,
    "orchestrator.group_size": 1,
    "orchestrator.seq_len": 2048,
    "orchestrator.max_off_policy_steps": 8,
    "orchestrator.train.source": None,
    "orchestrator.train.filter_zero_advantages": True,
    f"{_SAMPLING}.temperature": 1.0,
    f"{_SAMPLING}.max_completion_tokens": None,
    f"{_SAMPLING}.extra_body.top_p": 1.0,
    f"{_SAMPLING}.extra_body.top_k": 0,
    f"{_SAMPLING}.extra_body.min_p": 0.0,
    f"{_LOSS}.type": "default",
    f"{_LOSS}.dppo_mask_low": 0.2,
    f"{_LOSS}.dppo_mask_high": 0.2,
    f"{_LOSS}.ipo_threshold": 0.1,
    f"{_LOSS}.adv_tau": 1.0,
    f"{_LOSS}.kl_tau": 1e-3,
    f"{_LOSS}.import_path": None,
    "trainer.optim.type": "adamw",
    "trainer.optim.max_norm": 1.0,
    "trainer.optim.betas1": 0.9,
    "trainer.optim.betas2": 0.999,
    "trainer.scheduler.type": "constant",
    "trainer.scheduler.warmup_steps": 10,
    "trainer.scheduler.decay_steps": 10,
    "trainer.scheduler.min_lr": 0.0,
    f"{_MODEL}.seq_len": 2048,
    f"{_MODEL}.ep": "auto",
    f"{_MODEL}.optim_cpu_offload": True,
    f"{_MODEL}.fsdp_cpu_offload": False,
    "deployment.gpus_per_node": 8,
    "deployment.num_train_gpus": 1,
    "deployment.num_infer_gpus": 1,
    "deployment.num_train_nodes": None,
    "deployment.num_infer_nodes": None,
    "inference.vllm.tensor_parallel_size": 1,
    "inference.vllm.enforce_eager": False,
}
_KL_TAU = 1e-3  # of `rl.policy_loss: dppo`; prime-rl's default
# orchestrator.algo.type -> (rl.algorithm, rl.advantage, in words)
_ALGOS = {
    "grpo": ("grpo", "grpo", "reward - mean of the group"),
    "max_rl": ("max_rl", "max_rl", "(reward - mean of the group) / mean of the group"),
}


class PrimeRl(Algorithm):
    """GRPO, MaxRL and on-policy distillation of prime-rl."""

    defaults = DEFAULTS

    def settle(self, gpus: int | None, data_ranks: int | None) -> None:
        self.environment()
        self.lengths()
        self.advantage()
        self.policy_loss()
        self.agrees("critic", "none", "none")
        self.draws(
            {
                "temperature": f"{_SAMPLING}.temperature",
                **{leaf: f"{_SAMPLING}.extra_body.{leaf}" for leaf in ("top_p", "top_k", "min_p")},
            },
            "vllm",
        )
        self.corrections()
        self.devices(gpus)
        self.steps()

    def environment(self) -> None:
        """Set rl.reward, if the config determines it without its environments."""
        sources = self.value("orchestrator.train.source")
        sources = [source for source in sources if isinstance(source, Mapping)] if isinstance(sources, list) else []
        names = [str(source.get("name") or source.get("id") or "?") for source in sources]
        self.differs("prompts and rewards", f"of the environments {', '.join(names) or '?'} of verifiers",
                     "none: set `data.path` and `rl.agent=verifiers:FILE.toml`, or `rl.reward`")  # fmt: skip
        for source in sources:
            for leaf in ("algo", "sampling", "group_size", "curriculum"):
                if leaf in source:
                    self.differs(f"{leaf} of {source.get('name', '?')}", str(source[leaf]), "that of all prompts")
        self.take("rl.chat", True, "rl.chat", "the model's renderer formats prompts")

    def lengths(self) -> None:
        """Set the longest prompt and completion."""
        name = "orchestrator.seq_len" if "orchestrator.seq_len" in self.settings else "seq_len"
        total = int(self.number(name)) or DEFAULTS["orchestrator.seq_len"]
        longest = f"{_SAMPLING}.max_completion_tokens"
        limit = int(self.number(longest))
        prompt = min(1024, max(1, total // 2)) if not 0 < limit < total else total - limit
        self.take("rollout.max_prompt_tokens", prompt, name, f"of seq_len {total}")
        self.take("rollout.max_new_tokens", limit if 0 < limit < total else total - prompt, longest,
                  "" if 0 < limit < total else f"seq_len {total} - {prompt}")  # fmt: skip
        if not 0 < limit < total:
            self.differs("longest completion", f"{total} tokens minus the prompt", f"{total - prompt}")
        self.take("data.long_documents", "error", "data.long_documents", "no prompt is omitted silently")
        row = f"{_MODEL}.seq_len" if f"{_MODEL}.seq_len" in self.settings else name
        self.take("step.max_tokens_per_device", int(self.number(row)) or total, row)
        self.draft.fit_row(total, "sample")

    def advantage(self) -> None:
        """Set rl.algorithm, rl.advantage, rl.advantage_norm, rl.dynamic_sampling, rl.mask_truncated and rl.teacher."""
        kind, name = str(self.value("orchestrator.algo.type")), "orchestrator.algo.type"
        algorithm, advantage, text = _ALGOS.get(kind, _ALGOS["grpo"])
        self.take("rl.algorithm", algorithm, name)
        self.take("rl.advantage", advantage, name)
        if advantage == "grpo":
            self.take("rl.advantage_norm", "none", name, "prime-rl does not divide")
        penalised = any(".length_penalty." in setting for setting in self.settings)
        original = f"{kind}: {text}" if kind in _ALGOS else f"{kind}, which weft does not have"
        if penalised:
            weight = self.number("orchestrator.algo.length_penalty.num_output_tokens_weight")
            original += f", after a penalty of long samples ({weight:g} x the share of correct ones)"
        if kind == "opd":
            teacher = self.value("orchestrator.algo.teacher.name")
            original = f"opd: log(teacher / policy) of each token, of {teacher}"
            self.draft.values["rl.teacher"] = (teacher, "the teacher, as a model in the trainers' ranks", name)
            self.take("rl.teacher_in", "advantage", name)
            text = "the same, in addition to rewards; without `rl.reward`, only the teacher determines advantages"
        is_same = kind in _ALGOS and not penalised
        (self.agrees if is_same else self.differs)("advantage", original, f"{advantage}: {text}")
        self.take("rl.dynamic_sampling", 0, "orchestrator.train.filter_zero_advantages")
        if self.on("orchestrator.train.filter_zero_advantages"):
            self.differs("samples without an advantage", "are omitted, and not counted in a batch",
                         "are counted; `rl.dynamic_sampling` replaces their groups")  # fmt: skip
        self.take("rl.mask_truncated", False, "rl.mask_truncated", "samples of the maximum length are trained")

    def policy_loss(self) -> None:
        """Set rl.policy_loss, rl.clip, rl.loss_aggregation, rl.kl_coef and rl.entropy_coef."""
        kind = str(self.value(f"{_LOSS}.type"))
        pull = f" + {self.number(f'{_LOSS}.kl_tau'):g} x log(ratio)^2"
        scale = self.number(f"{_LOSS}.adv_tau")
        factor = "" if scale == 1 else f"{scale:g} x "
        low, high = self.number(f"{_LOSS}.dppo_mask_low"), self.number(f"{_LOSS}.dppo_mask_high")
        if kind == "default":
            original = (
                f"-{factor}ratio to the engine x advantage, without tokens whose probability changed by over {high:g} "
            )
            original += f"up (advantage above 0) or {low:g} down (below 0){pull}"
        elif kind == "ipo":
            original = f"-{factor}ratio to the engine x advantage, without tokens whose probability changed by over "
            original += f"{self.number(f'{_LOSS}.ipo_threshold'):g}{pull}"
        else:
            original = f"{kind}: {self.value(f'{_LOSS}.import_path')}"
        if kind == "default" and scale == 1 and self.number(f"{_LOSS}.kl_tau") == _KL_TAU:
            self.take("rl.policy_loss", "dppo", f"{_LOSS}.type")
            self.take(
                "rl.clip", [low, high], f"{_LOSS}.dppo_mask_low", "dppo_mask_low and _high, which bound probabilities"
            )
            self.agrees("policy loss", original, "the same: dppo")
        else:
            self.take("rl.policy_loss", "ppo", f"{_LOSS}.type")
            self.differs("policy loss", original, "ppo: the ratio to the engine is clipped, and nothing pulls it to 1")
            self.clip_ratio(low, high, f"{_LOSS}.dppo_mask_low", "dppo_mask_low and _high, which bound probabilities",
                            None, f"{_LOSS}.type")  # fmt: skip
        self.penalty(0.0, f"{_LOSS}.kl_tau", "loss", "k3", None, False)
        self.aggregation("token-mean", f"{_LOSS}.type", "trainer.optim.max_norm")
        self.take("rl.entropy_coef", 0.0, "rl.entropy_coef", "prime-rl has none")

    def corrections(self) -> None:
        """Set rl.old_logprobs and rl.correction."""
        truncated = self.draft.value("rollout.allow_truncated", False)
        if "rl.teacher" in self.draft.values or truncated:  # both need the trainer's logprobs
            self.take(
                "rl.old_logprobs", "recompute", "rl.old_logprobs", "the trainer's, which rl.teacher and top_k need"
            )
            self.corrects("tis", "token", 0.0, 2.0, f"{_LOSS}.type", "none: ratios are to the engine's logprobs")
        else:
            self.take("rl.old_logprobs", "rollout", "rl.old_logprobs", "ratios are to the engine's logprobs")
            self.agrees("logprobs of the old policy", "the engine's", "the engine's")

    def devices(self, gpus: int | None) -> None:
        """Set the engines, the trainers' ranks, and the parts that stay in host memory."""
        per_node, tp = (
            int(self.number("deployment.gpus_per_node")),
            int(self.number("inference.vllm.tensor_parallel_size")),
        )
        sizes = {}
        for role in ("train", "infer"):
            nodes = int(self.number(f"deployment.num_{role}_nodes"))
            sizes[role] = nodes * per_node if nodes else int(self.number(f"deployment.num_{role}_gpus"))
        self.take("cluster.trainer_ranks", gpus or sizes["train"], "deployment.num_train_gpus")
        self.take("cluster.placement", "disaggregated", "deployment.type", "trainer and inference have separate GPUs")
        self.take("rollout.engine", "vllm", "inference.vllm", "prime-rl's engine")
        self.take("rollout.tp", tp, "inference.vllm.tensor_parallel_size")
        self.take("rollout.num_engines", max(1, sizes["infer"] // tp), "deployment.num_infer_gpus",
                  f"{sizes['infer']} GPUs / {tp}")  # fmt: skip
        if self.on("inference.vllm.enforce_eager"):
            self.take("rollout.engine_kwargs", {"enforce_eager": True}, "inference.vllm.enforce_eager")
        age = int(self.number("orchestrator.max_off_policy_steps"))
        self.take("cluster.max_staleness", age, "orchestrator.max_off_policy_steps")
        self.agrees("age of samples", *[f"at most {age} versions of the weights"] * 2)
        if self.on(f"{_MODEL}.fsdp_cpu_offload"):
            self.take("fsdp.cpu_offload", True, f"{_MODEL}.fsdp_cpu_offload")
        elif self.on(f"{_MODEL}.optim_cpu_offload"):
            self.take("fsdp.cpu_offload", "optimizer", f"{_MODEL}.optim_cpu_offload")
        if isinstance(ep := self.value(f"{_MODEL}.ep"), int) and ep > 1:
            self.take("mesh.ep", ep, f"{_MODEL}.ep")

    def steps(self) -> None:
        """Set prompts and samples of a step, the optimizer and its schedule."""
        draft, group = self.draft, self.group_size()
        if group > 1:
            self.take("rl.group_size", group, "orchestrator.group_size")
        else:
            text = "set it: one sample per prompt has no group to compare with, so no advantage"
            draft.values["rl.group_size"] = (None, text, "orchestrator.group_size")
        self.take("rl.minibatches", 1, "rl.minibatches", "a rollout step is one optimizer step")
        self.take("rl.epochs", 1, "rl.epochs", "samples are trained once")
        samples = int(self.number("orchestrator.batch_size"))
        if samples and group > 1 and samples % group == 0:
            self.take(
                "rl.prompts_per_step", samples // group, "orchestrator.batch_size", f"{samples} samples / {group}"
            )
        else:
            tokens = self.value("orchestrator.token_batch_size")
            text = f"set it: a step has {tokens} tokens" if tokens else "set it: samples of a step / rl.group_size"
            draft.values["rl.prompts_per_step"] = (None, text, "orchestrator.batch_size")
        if steps := int(self.number("max_steps")):
            self.take("train.steps", steps, "max_steps")
        kind = str(self.value("trainer.optim.type"))
        if kind == "adamw":
            self.take("optimizer.betas", [self.number("trainer.optim.betas1"), self.number("trainer.optim.betas2")],
                      "trainer.optim.betas1", "betas1, betas2")  # fmt: skip
        elif kind in ("muon", "sgd"):
            self.take("optimizer.name", kind, "trainer.optim.type")
        else:
            self.differs("optimizer", kind, str(draft.value("optimizer.name")))
        self.schedule(steps)
        self.compare_steps()
        self.warmed("lr x (k - 1) / W: the first update has a rate near 0")

    def group_size(self) -> int:
        """The samples of a prompt: the sources' number if all have the same, otherwise the orchestrator's."""
        sources = self.value("orchestrator.train.source")
        sizes = {source.get("group_size") for source in sources or () if isinstance(source, Mapping)}
        size = sizes.pop() if len(sizes) == 1 else None
        return int(size) if isinstance(size, int) else int(self.number("orchestrator.group_size"))

    def schedule(self, steps: int) -> None:
        """Set the schedule. steps: of the run; 0: unknown."""
        kind, name = str(self.value("trainer.scheduler.type")), "trainer.scheduler.type"
        decay, peak = (
            int(self.number("trainer.scheduler.decay_steps")),
            next(numbers_of(self.draft.value("optimizer.lr")), 0),
        )
        self.take("schedule.name", {"linear": "wsd"}.get(kind, kind), name)
        if kind == "constant":
            return
        self.draft.values.pop("schedule.warmup_ratio", None)
        self.take(
            "schedule.warmup_steps",
            int(self.number("trainer.scheduler.warmup_steps")),
            "trainer.scheduler.warmup_steps",
        )
        if peak:
            self.take("schedule.min_lr_ratio", float(f"{self.number('trainer.scheduler.min_lr') / peak:.6g}"),
                      "trainer.scheduler.min_lr", "min_lr / lr")  # fmt: skip
        if kind == "linear" and decay and steps:
            ratio = float(f"{decay / steps:.6g}")
            self.take("schedule.decay_ratio", ratio, "trainer.scheduler.decay_steps", f"{decay} / {steps} steps")
            self.take("schedule.decay", "linear", name)
        elif kind == "linear":
            self.take("schedule.name", "constant", name, "linear without decay_steps, or in a run without max_steps")
