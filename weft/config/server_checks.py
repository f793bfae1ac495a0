"""Checks of the keys of rollout engines that are servers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.conditions import SERVERS
from weft.config.rl_schema import RolloutConfig

# Arguments of an engine's server that weft sets itself -> what to do instead.
_CHOSEN = "weft chooses where the server listens"
_DRAWS = "how tokens are drawn is in `rollout`"
_ADAPTERS = "set lora.rank instead"
_LENGTHS = "set rollout.max_prompt_tokens and rollout.max_new_tokens instead"
SERVER_OPTIONS = {
    **dict.fromkeys(("uds", "host", "port"), _CHOSEN),
    **dict.fromkeys(("model", "model_path"), "set model.path instead"),
    "dtype": "set rollout.dtype instead",
    **dict.fromkeys(("seed", "random_seed"), "set train.seed instead"),
    **dict.fromkeys(("tensor_parallel_size", "tp_size", "tp"), "set rollout.tp instead"),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), "set rollout.gpu_memory_utilization instead"),
    **dict.fromkeys(("max_model_len", "context_length"), _LENGTHS),
    "logprobs_mode": "logprobs are of the distribution that tokens are drawn from",
    "generation_config": _DRAWS,
    "worker_extension_cls": "weft's own takes the weights",
    **dict.fromkeys(("enable_lora", "max_lora_rank"), _ADAPTERS),
}
KEEPS_ALL = {"top_p": 1, "top_k": 0, "min_p": 0}
_COLDEST = 0.01  # vLLM raises lower temperatures to it


def server_combinations(rollout: RolloutConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of values that do not go together."""
    for name in rollout.engine_kwargs:
        instead = SERVER_OPTIONS.get(name.replace("-", "_"))
        if instead is not None:
            yield "rollout.engine_kwargs", f"rollout.engine_kwargs holds `{name}`, which weft passes itself: {instead}."
    if rollout.engine == "sglang" and rollout.python is None:
        yield (
            "rollout.python",
            "rollout.python is not set: weft installs no SGLang. Set it to the Python, or the folder of the "
            "environment, that has it.",
        )
    for name, neutral in KEEPS_ALL.items():
        value = getattr(rollout, name)
        if rollout.engine in SERVERS and value != neutral and not rollout.allow_truncated:
            yield (
                f"rollout.{name}",
                f"rollout.{name} is {value:g}, but {rollout.engine} does not say how much of the distribution the kept "
                f"tokens have, so that samples are not of the policy that is trained: set rollout.{name}={neutral} "
                "(evaluation has eval.top_p and eval.top_k of its own), or rollout.engine=embedded or hf, which say "
                "it, or accept the bias, which is measured: rollout.allow_truncated=true.",
            )
    if rollout.engine == "vllm" and 0 < rollout.temperature < _COLDEST:
        yield (
            "rollout.temperature",
            f"rollout.temperature is {rollout.temperature:g}, which vLLM would raise to {_COLDEST}: set that or more.",
        )
