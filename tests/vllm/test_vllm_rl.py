"""`weft rl` with a real vLLM on CPU, as a user runs it: the demo by one change, what it trained served, its faults."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.support.machine import business
from tests.support.vllm_server import vllm_server
from tests.vllm.conftest import SETTINGS
from weft.inference.records import FOLDER, rollout_files

ROOT = Path(__file__).parents[2]
MEAN = 1e-5  # of |engine's logprob - trainer's|
STEPS = 150
TASK = [
    "rollout.engine=vllm", "rl.prompts_per_step=6", "rl.group_size=6", "rollout.max_prompt_tokens=6",
    "optimizer.lr=1e-4",
    "step.max_tokens_per_device=256", "schedule.name=constant", "schedule.warmup_steps=0", "rl.reward=[length]",
    "rl.reward_options={length.longest: 24}", "train.timeout=300",
]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder where `weft engine install vllm` seems to have been, and the demo's data."""
    home = tmp_path_factory.mktemp("home")
    (home / "weft/engines").mkdir(parents=True)
    (home / "weft/engines/vllm").symlink_to(Path(sys.executable).parents[1])
    subprocess.run([ROOT / ".venv/bin/python", ROOT / "examples/make_arithmetic_demo.py", home / ".demo"], check=True)
    return home


def environment(home: Path) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(home)}


def weft(home: Path, *words: str, status: int = 0) -> str:
    command = [str(ROOT / ".venv/bin/python"), "-m", "weft", *words]
    done = subprocess.run(
        command, cwd=home, capture_output=True, text=True, env=environment(home), timeout=900 * business()
    )
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@dataclass
class Sampled:
    """Of a sample in RUN/rollouts, what is compared here; arrays as weft.inference.types.Sample has them."""

    tokens: NDArray[np.int64]
    sampled: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


# vLLM's environment has no pyarrow.
READ = """
import json, sys
from pathlib import Path
from weft.inference.records import FOLDER, read_rollouts, rollout_files
from weft.inference.types import samples_of
files = rollout_files(Path(sys.argv[1]) / FOLDER)
names = "tokens", "sampled", "rollout_logprobs", "versions"
print(json.dumps({
    step: [[getattr(sample, name).tolist() for name in names] for sample in samples_of(read_rollouts(path))]
    for step, path in files.items()
}))
"""


def rollouts_of(run: Path) -> dict[int, list[Sampled]]:
    command = [ROOT / ".venv/bin/python", "-c", READ, run]
    out = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    dtypes = (np.int64, np.bool_, np.float32, np.int32)
    return {
        int(step): [Sampled(*(np.array(x, dtype) for x, dtype in zip(row, dtypes, strict=True))) for row in rows]
        for step, rows in json.loads(out.stdout).items()
    }


# ---------------------------------------------------------------- the demo


@pytest.fixture(scope="module")
def demo(home: Path) -> Path:
    """RUN of the demo's second half with vLLM, the first half of its steps."""
    weft(home, "sft", str(ROOT / "examples/sft_arithmetic_cpu.yaml"), "--nproc", "2")
    short = [f"train.steps={STEPS}", f"eval.every={STEPS}"]
    weft(home, "rl", str(ROOT / "examples/rl_arithmetic_cpu.yaml"), "rollout.engine=vllm", *short, "--nproc", "2")
    return home / ".demo/rl"


def test_the_demo_learns_with_vllm_by_one_change(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, *lines = lines_of(demo)
    rewards = [line["reward"] for line in lines]
    deviations = [line["sampling/sampling_logp_difference/mean"] for line in lines]
    means = {name: np.mean([line[f"seconds/{name}"] for line in lines[5:]]) for name in ("generate", "train", "sync")}
    with capsys.disabled():
        print(f"\nreward {np.mean(rewards[:10]):.3f} -> {np.mean(rewards[-10:]):.3f}", end="; ")
        print(f"accuracy {start['eval/accuracy']:.3f} -> {lines[-1]['eval/accuracy']:.3f}", end="; ")
        print(f"mismatch {np.mean(deviations):.1e} in the mean, {max(deviations):.1e} in the worst step", end="; ")
        print(f"seconds a step: {', '.join(f'{name} {value:.2f}' for name, value in means.items())}")
    assert len(lines) == STEPS and np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.05
    assert lines[-1]["eval/accuracy"] > start["eval/accuracy"]
    assert max(deviations) < MEAN and max(line["sampling/sampling_logp_difference/max"] for line in lines) < 1e-3
    assert all(line["staleness/max"] == 0 for line in lines)
    for step, samples in rollouts_of(demo).items():
        assert {int(v) for sample in samples for v in sample.versions[sample.sampled]} == {step - 1}


@pytest.fixture
def served(demo: Path, tmp_path: Path) -> Iterator[str]:
    """vLLM's own server of what the run saved, as docs/how-to/serve-with-vllm.md has it; its address."""
    with vllm_server(demo / "checkpoints/latest", "adder", tmp_path / "log") as url:
        yield f"{url}/completions"


def test_vllm_serves_what_was_trained(served: str, demo: Path) -> None:
    """Text in, text out; the answers are transformers' own."""
    path = str(demo / "checkpoints/latest")
    tokenizer, model = (
        AutoTokenizer.from_pretrained(path),
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
    )
    problems = [json.loads(line) for line in (demo.parent / "held-out.jsonl").read_text().splitlines()][:60]
    prompts = [problem["prompt"] for problem in problems]
    body = {"model": "adder", "prompt": prompts, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(served, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        answers = [choice["text"] for choice in json.load(answer)["choices"]]
    inputs = tokenizer(prompts, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        tokens = model.generate(inputs, do_sample=False, max_new_tokens=4, pad_token_id=12)[:, inputs.shape[1] :]
    assert answers == [tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
    assert sum(answer == problem["completion"] for answer, problem in zip(answers, problems, strict=True)) > 0.3 * 60


def test_exact_mode_is_refused_with_the_mismatch_that_was_measured(home: Path, demo: Path) -> None:
    words = ["rl", str(ROOT / "examples/rl_arithmetic_cpu.yaml"), "rollout.engine=vllm", "rl.on_policy=exact"]
    out = weft(home, *words, "run.dir=.demo/exact", status=2)
    match = re.search(
        r"rl.on_policy=exact: .*rollout.engine=vllm.* (\d+) of (\d+) tokens .* by (\S+) on average and at most (\S+)\.",
        out,
    )
    assert match, out
    differing, tokens, mean, largest = (float(number) for number in match.groups())
    assert 0 < differing <= tokens and 0 < mean < MEAN and mean <= largest < 1e-4
    assert "rollout.engine=embedded, which is exact" in out and "Traceback" not in out


# ---------------------------------------------------------------- updates while requests run, and faults


@pytest.fixture(scope="module")
def task(home: Path) -> Path:
    """A model with weights, whose completions have from one to 24 tokens."""
    folder = home / "task"
    torch.manual_seed(0)
    config = Qwen3Config(**{**json.loads((home / ".demo/adder/config.json").read_text()), "initializer_range": 0.2})
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(home / ".demo/adder").save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text("\n".join((home / ".demo/additions.jsonl").read_text().splitlines()[:60]) + "\n")
    return folder


def test_an_engine_that_is_killed_ends_the_run_and_versions_of_tokens_are_right(home: Path, task: Path) -> None:
    """Rollouts run ahead of training. Killed while generating; gone on with; every token is of its version."""
    run = task / "run"
    keys = [f"model.path={task}/model", f"data.path={task}/data.jsonl", f"run.dir={run}", "checkpoint.every=1"]
    overrides = ["rollout.max_new_tokens=24", "cluster.max_staleness=1", "checkpoint.keep=null", "train.steps=400"]
    overrides += ["rollout.restarts=0"]
    command = [str(ROOT / ".venv/bin/python"), "-m", "weft", "rl", *keys, *overrides, *TASK, "--nproc", "2"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=home, env=environment(home), **pipes) as process:
        end = time.monotonic() + 400 * business()
        while len(rollout_files(run / FOLDER)) < 6:
            assert process.poll() is None and time.monotonic() < end, process.communicate()[0][-4000:]
            time.sleep(0.2)
        core = next(child for child in psutil.Process(process.pid).children(recursive=True) if _is_core(child))
        core.send_signal(signal.SIGSTOP)  # until requests wait for it
        time.sleep(3)
        core.send_signal(signal.SIGKILL)
        began = time.monotonic()
        out, _ = process.communicate(timeout=120 * business())
    seconds = time.monotonic() - began
    print(f"{seconds:.1f} s from the kill to the end\n{out[-2500:]}")
    assert process.returncode == 10 and seconds < 20 * business()
    assert "rollout engine vllm-0" in out and "while generating" in out and f"{run}/engines/vllm-0.log" in out
    assert "Traceback" not in out
    done = int(os.readlink(run / "checkpoints/latest").removeprefix("step-"))
    assert f"resumed  step {done} of {done + 4}" in weft(
        home, "rl", "--resume", str(run), f"train.steps={done + 4}", "--nproc", "2"
    )
    assert [line["step"] for line in lines_of(run)] == list(range(1, done + 5))
    _check_versions(task, run)


def test_a_server_that_is_killed_or_stopped_is_replaced_and_the_run_goes_on(home: Path, task: Path) -> None:
    """Of two servers the core of one is killed while it generates, and later one is stopped. Each step has all of its
    samples once, of its version, and they are those of the run in which nothing happened."""
    data = [f"model.path={task}/model", f"data.path={task}/data.jsonl", "rollout.num_engines=2", "train.steps=6"]
    keys = ["rollout.max_new_tokens=24", "cluster.placement=disaggregated", "train.seed=3", "checkpoint.every=0"]
    words = ["rl", *data, *TASK, *keys, f"rollout.timeout={max(60, 15 * business()):.0f}", "--nproc", "1"]
    weft(home, *words, f"run.dir={task}/unbroken")
    run = task / "struck"
    command = [str(ROOT / ".venv/bin/python"), "-m", "weft", *words, f"run.dir={run}"]
    strikes = {2: signal.SIGKILL, 4: signal.SIGSTOP}  # rollouts on disk -> what happens then
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=home, env=environment(home), **pipes) as process:
        end = time.monotonic() + 400 * business()
        for steps, number in strikes.items():
            while len(rollout_files(run / FOLDER)) < steps:
                assert process.poll() is None and time.monotonic() < end, process.communicate()[0][-4000:]
                time.sleep(0.05)
            core = next(child for child in psutil.Process(process.pid).children(recursive=True) if _is_core(child))
            core.send_signal(number)
        out, _ = process.communicate(timeout=600 * business())
    print(out[-3000:])
    assert process.returncode == 0 and "Traceback" not in out
    assert out.count(" is replaced, restart 1 of 3") + out.count(" is replaced, restart 2 of 3") == 2
    assert [line["step"] for line in lines_of(run)] == list(range(1, 7))
    assert sum(line["rollout/engine_restarts"] for line in lines_of(run)) == 2
    same, steps = [], rollouts_of(run)
    for step, expected in rollouts_of(task / "unbroken").items():
        assert len(steps[step]) == len(expected) == 36
        assert {int(v) for sample in steps[step] for v in sample.versions[sample.sampled]} == {step - 1}
        same += [np.array_equal(a.tokens, b.tokens) for a, b in zip(steps[step], expected, strict=True)]
    print(f"{sum(same)} of {len(same)} samples have the tokens of the run in which nothing happened")
    assert np.mean(same) > 0.95  # another batch changes the last bits of vLLM's logprobs, and so a close draw


def test_adapters_over_a_quantised_base_are_what_the_trainer_computes(home: Path, task: Path) -> None:
    """vLLM gets the values of an nf4 base once, and adapters alone at each sync."""
    data = [f"model.path={task}/model", f"data.path={task}/data.jsonl", f"run.dir={task}/nf4", "train.steps=3"]
    keys = ["rollout.max_new_tokens=24", "lora.rank=4", "lora.base=nf4", "optimizer.lr=1e-2", "checkpoint.every=0"]
    weft(home, "rl", *data, *TASK, *keys, "--nproc", "1")
    lines = lines_of(task / "nf4")
    deviations = [line["sampling/sampling_logp_difference/mean"] for line in lines]
    print("mismatch of the steps:", [f"{value:.1e}" for value in deviations])
    assert len(lines) == 3 and max(deviations) < MEAN
    assert all(line["grad_norm"] > 0 for line in lines)
    weights = (task / "model/model.safetensors").stat().st_size
    assert max(line["sync/mb"] for line in lines) * 1e6 < 0.5 * weights


def _is_core(process: psutil.Process) -> bool:
    try:
        return "EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline())
    except psutil.Error:
        return False


@torch.no_grad()
def _check_versions(task: Path, run: Path) -> None:
    """Logprobs of tokens, by version, are those of a model with that version's weights."""
    lags, mixed, differences = set[int](), 0, list[np.ndarray[Any, Any]]()
    steps = rollouts_of(run)
    versions = {int(v) for samples in steps.values() for s in samples for v in s.versions[s.sampled]}
    for version in sorted(versions):
        folder = run / f"checkpoints/step-{version:06d}" if version else task / "model"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        for step, samples in steps.items():
            for sample in samples:
                of_version = sample.versions == version
                lags |= {step - 1 - version} if of_version.any() else set()
                if of_version.any():
                    tokens = torch.from_numpy(sample.tokens)
                    logprobs = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
                    read = logprobs.gather(1, tokens[1:, None])[:, 0].numpy()
                    differences.append(np.abs(read - sample.rollout_logprobs[1:])[of_version[1:]])
                    mixed += len(set(sample.versions[sample.sampled].tolist())) > 1
    joined = np.concatenate(differences)
    print(
        f"{len(joined)} tokens of versions {sorted(versions)}: {joined.mean():.1e} in the mean, "
        f"{joined.max():.1e} at most"
    )
    print(f"lags {lags}; samples of two versions, counted twice: {mixed}")
    assert lags == {0, 1} and mixed > 0
    assert joined.mean() < MEAN and joined.max() < 1e-3
