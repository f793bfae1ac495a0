"""Samples of the machine (track.system), and the record of starts."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weft.errors import StoppedError
from weft.observe import starts, system
from weft.observe.starts import STARTS, commit_of, note_end, note_start
from weft.observe.system import Gpus, SystemMonitor

GPUS = ["GPU-aa11", "GPU-bb22", "GPU-cc33"]


class Nvml:
    """The functions of NVML that are called, for three GPUs of which the last has no sensor of its power."""

    def __init__(self) -> None:
        self.calls = 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(GPUS)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 77
        return 0 if uuid == b"MIG-1234" else 6  # NVML_ERROR_NOT_FOUND

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, text: Any, size: int) -> int:
        text.value = GPUS[(handle.value or 0) - 1].encode()
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, rates: Any) -> int:
        self.calls += 1
        rates._obj.gpu = 10 * (handle.value or 0)
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.used = (handle.value or 0) << 30
        return 0

    def nvmlDeviceGetTemperature(self, handle: ctypes.c_void_p, sensor: int, celsius: Any) -> int:
        assert sensor == 0
        celsius._obj.value = 40 + (handle.value or 0)
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p, milliwatts: Any) -> int:
        milliwatts._obj.value = 250_500
        return 3 if handle.value == 3 else 0  # NVML_ERROR_NOT_SUPPORTED


def sampled_handles(monkeypatch: pytest.MonkeyPatch, visible: str | None, limit: int | None = None) -> list[float]:
    """The handles of the GPUs that are sampled, by their memory."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sample = Gpus(Nvml(), limit).sample()
    return [value for name, value in sample.items() if name.endswith("/memory_gib")]


def test_what_is_sampled_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert Gpus(Nvml()).sample() == {
        "system/gpu0/utilisation": 0.3, "system/gpu0/memory_gib": 3.0, "system/gpu0/celsius": 43.0,
        "system/gpu1/utilisation": 0.1, "system/gpu1/memory_gib": 1.0, "system/gpu1/celsius": 41.0,
        "system/gpu1/watts": 250.5,
    }  # fmt: skip
    assert Gpus(None).sample() == {}


@pytest.mark.parametrize(
    ("visible", "limit", "handles"),
    [
        (None, None, [1, 2, 3]), (None, 2, [1, 2]), (None, 0, []), ("", None, []), ("1", None, [2]),
        ("2,1", None, [3, 2]), ("1,-1,2", None, [2]), ("0,9,1", None, [1]),
        ("GPU-cc,GPU-aa11", None, [3, 1]), ("MIG-1234", None, [77]), ("MIG-9", None, []), ("2, 0", 1, [3]),
    ],
)  # fmt: skip
def test_which_gpus_are_sampled(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, limit: int | None, handles: list[int]
) -> None:
    assert sampled_handles(monkeypatch, visible, limit) == handles


def test_an_old_driver_gives_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Nvml, "nvmlDeviceGetPowerUsage")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert list(Gpus(Nvml()).sample()) == ["system/gpu0/utilisation", "system/gpu0/memory_gib", "system/gpu0/celsius"]


def test_memory_is_that_of_a_container_with_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_CGROUP", tmp_path)
    unlimited = system.host_sample()["system/memory_gib"]
    (tmp_path / "memory.max").write_text("max\n")
    assert system.host_sample()["system/memory_gib"] == pytest.approx(unlimited, rel=0.5)
    (tmp_path / "memory.max").write_text(f"{1 << 29}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 28}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {1 << 27}\n")
    assert system.host_sample()["system/memory_gib"] == 0.125


def test_the_thread_samples_and_ends_with_a_last_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, sent, enough_samples = Nvml(), list[Mapping[str, object]](), threading.Event()
    monkeypatch.setattr(system, "nvml", lambda: library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def send(line: Mapping[str, object]) -> None:
        sent.append(line)
        if len(sent) == 3:
            enough_samples.set()

    with SystemMonitor(tmp_path / "system.jsonl", 0.001, 1, 7, send) as monitor:
        assert enough_samples.wait(20)
        monitor.step = 8
    lines = [json.loads(line) for line in (tmp_path / "system.jsonl").read_text().splitlines()]
    assert len(lines) == len(sent) >= 4 and lines[0]["step"] == 7 and lines[-1]["step"] == 8
    assert [{name: value for name, value in line.items() if name != "time"} for line in lines] == sent
    assert set(lines[0]) == {
        "step", "time", "system/cpu", "system/memory_gib", "system/gpu0/utilisation", "system/gpu0/memory_gib",
        "system/gpu0/celsius", "system/gpu0/watts",
    }  # fmt: skip
    assert library.calls == len(lines), "one reading of each GPU a sample"
    assert not [thread for thread in threading.enumerate() if thread.name == "system"]


def test_a_full_disk_ends_the_samples_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SystemMonitor(tmp_path / "gone" / "system.jsonl", 0.001, 0, 0, lambda line: None) as monitor:
        monitor._thread.join(20)
    assert capsys.readouterr().err == "system   weft no longer writes system.jsonl: No such file or directory\n"


def test_a_sample_needs_no_torch() -> None:
    """So it cannot wait for a device's stream."""
    code = "import sys, weft.observe.system, weft.observe.starts; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


# ---------------------------------------------------------------- starts


def test_starts_and_ends_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/env/bin/weft", "sft", "a b.yaml", "step.documents=4"])
    note_start(tmp_path, 0, device="H100", ranks=8, mesh={"dp_shard": 8})
    note_end(tmp_path, ValueError("two lines\nof text"))
    monkeypatch.setattr(sys, "argv", ["/code/weft/__main__.py", "sft", "--resume", "run"])
    note_start(tmp_path, 20, device="H100", ranks=4, mesh={"dp_shard": 4})
    note_end(tmp_path, StoppedError(15))
    first, failed, second, stopped = (json.loads(line) for line in (tmp_path / STARTS).read_text().splitlines())
    assert first["command"] == "weft sft 'a b.yaml' step.documents=4" and first["mesh"] == {"dp_shard": 8}
    assert first["started"].endswith("+00:00") and first["versions"]["python"] and first["host"]
    assert failed["error"] == "ValueError: two lines" and stopped["error"] == ""
    assert second["command"] == "weft sft --resume run" and second["step"] == 20
    monkeypatch.setattr(sys, "argv", ["train.py", "-v"])
    assert starts.command() == "python train.py -v"
    note_end(tmp_path / "gone", None)  # a run does not end because its folder is gone


def test_the_commit_is_that_of_the_repository(tmp_path: Path) -> None:
    """As git finds it: in a branch, packed, detached, in a worktree; and nothing outside of a repository."""

    def git(*words: str, folder: Path = tmp_path) -> str:
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *name, *words], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    assert commit_of(tmp_path) == ""
    git("commit", "-q", "--allow-empty", "-m", "first")
    (tmp_path / "inside").mkdir()
    first = git("rev-parse", "HEAD")
    assert commit_of(tmp_path / "inside") == first != ""
    git("worktree", "add", "-q", "-b", "side", str(tmp_path / "tree"))
    git("commit", "-q", "--allow-empty", "-m", "second", folder=tmp_path / "tree")
    second = git("rev-parse", "HEAD", folder=tmp_path / "tree")
    assert commit_of(tmp_path / "tree") == second != first
    git("pack-refs", "--all")
    assert (commit_of(tmp_path), commit_of(tmp_path / "tree")) == (first, second)
    git("checkout", "-q", "--detach", "side")
    assert commit_of(tmp_path) == second
    (tmp_path / ".git" / "HEAD").write_text("ref: ../../secret\n")
    assert commit_of(tmp_path) == ""
