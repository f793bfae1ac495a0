"""A rollout engine that is a server, as the controller calls it (HostedServer), without a server.

The standalone generator answers, so that runs with engine=vllm and sglang can be compared bit for bit. What the real
servers answer is tested in tests/vllm; the routes of SGLang in tests/inference/test_servers.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from weft.config.rl_schema import RlConfig
from weft.inference.base import Completion
from weft.inference.generate import Generator
from weft.inference.standalone import Standalone
from weft.models import hf


class ContractServer(Standalone):
    """See above. started: how often; a server that runs is not started again."""

    def __init__(self, config: RlConfig) -> None:
        lora = config.lora if config.lora.on else None
        super().__init__(config.model.path, lora, dtype=torch.float32, exact=config.rl.on_policy == "exact")
        self.started = 0

    def check(self, is_local: bool) -> None:
        """Its host has what it needs."""

    def start(self, run: str, compute: str, devices: str | None = None) -> None:
        self.started += 1

    def ask(self, method: str, *args: Any) -> Any:
        if method == "generate":
            completions: list[Completion] = self.generate([args[0]])[0]
            return completions
        if method == "receive":
            return self.receive(*args)
        if method == "sleep":
            return self.sleep()
        assert method in ("pause", "resume", "abort", "wake"), method
        return None

    def reload(self, folder: Path, version: int) -> None:
        """Read a HuggingFace directory, as SGLang does."""
        model = hf.build_meta(hf.without_noise(hf.read_config(str(folder))), dtype=self.dtype, attention=None)
        model.to_empty(device="cpu")
        read = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
        model.load_state_dict(read, strict=False)
        model.tie_weights()
        hf.rebuild_buffers(model)
        self._generator = Generator(model.eval(), version, None, self.max_tokens, self.exact)
        self.version = version

    def close(self) -> None:
        self.version = None
