"""Rollout engines that are servers of their own, by the config."""

from __future__ import annotations

from pathlib import Path

from weft.config.rl_schema import RlConfig
from weft.rollout.sglang import SglangEngine
from weft.rollout.vllm.engine import VllmEngine
from weft.rollout.vllm.interpreter import Interpreter, find, program_of
from weft.rollout.vllm.server import settings_of


def interpreter_of(config: RlConfig) -> Interpreter:
    """The Python that rollout.engine runs with. Raises UserError, with what to do, where there is none."""
    if config.rollout.engine == "vllm":
        return find(config.rollout.python)
    assert config.rollout.python is not None, "checked with the config"
    return Interpreter(program_of(Path(config.rollout.python).expanduser()), "", cpu=False)


async def start(config: RlConfig, name: str, run: Path, compute: str, version: int | None) -> VllmEngine | SglangEngine:
    """Start an engine and wait until it answers.

    name: in messages, and of its log in RUN/engines. compute: the trainer's dtype, as in "bf16". version: of the
    weights at model.path; None: those are not to be sampled from, and requests wait for the first sync.
    """
    settings = settings_of(config, interpreter_of(config), name, run, compute)
    if config.rollout.engine == "sglang":
        return await SglangEngine.start(settings, version or 0)
    return await VllmEngine.start(settings, version)
