"""The parts of benchmarks/gpu.py but for training (gpu_sft.py), whole runs (gpu_run.py), reinforcement learning
(gpu_rl.py) and experts (gpu_moe.py)."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from subprocess import STDOUT, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpu_run, gpu_tests
from benchmarks.device import Device, copy_rate, matmul_rate, matmul_seconds
from benchmarks.gpu_moe import moe
from benchmarks.gpu_rl import rl
from benchmarks.gpu_rows import PartRun, Row
from benchmarks.gpu_sft import (
    config_of,
    document_lengths,
    open_engine,
    rows_of,
    sft,
    weft_step,
    write_model,
)
from benchmarks.head import LOSSES, HeadInputs
from weft.checkpoint.export import save_huggingface
from weft.checkpoint.save import Saver
from weft.config.schema import CheckpointConfig, ModelConfig
from weft.engine.builder import fuses_norms
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.launch.machine import ACCELERATORS, cpu_cores
from weft.launch.process import join
from weft.ops import attention
from weft.ops import head as head_ops
from weft.ops.attention_call import BOUNDS_ARGUMENT, Bounds
from weft.recipes.plan.passes import layer_passes
from weft.recipes.plan.timing import LAUNCHES_OF_UPDATE

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20


# ---------------------------------------------------------------- rates


def rates(run: PartRun) -> None:
    """Matrix products and copies: the floor of everything else."""
    device = run.device
    size = run.pick(8192, 256)
    run.attempt(run.add(what=f"matmul {size}^3"), lambda: {"rate": matmul_rate(device) / 1e12, "unit": "TFLOP/s"})
    lasting = run.add(what=f"matmul {size}^3, after two seconds of it")
    run.attempt(lasting, lambda: {"rate": _lasting_rate(device, size, run.pick(1500, 3)) / 1e12, "unit": "TFLOP/s"})
    tokens = run.pick(8192, 64)
    for shape in ("4b", "0.6b"):
        row = run.add(what=f"matmuls of a {shape} layer, forward and backward, {tokens} tokens")
        run.attempt(row, partial(_layer_rate, device, config_of(shape, run.tiny), tokens))
    _copy_rates(run, run.pick(2**31, 2**16))
    calls = run.pick(5000, 50)
    run.attempt(
        run.add(what="an operation's launch, on the host"),
        lambda: {"rate": _launch_seconds(device, calls) * 1e6, "unit": "us"},
    )
    run.attempt(
        run.add(what="an operation with autograd, forward and backward, on the host"),
        lambda: {"rate": _autograd_seconds(device, calls) * 1e6, "unit": "us"},
    )
    size = run.pick(2**30, 2**16)
    run.attempt(
        run.add(what="pinning of host memory"),
        lambda: {"rate": size / _pin_seconds(device, size) / 1e9, "unit": "GB/s"},
    )


def _lasting_rate(device: Device, size: int, products: int) -> float:
    """FLOP/s of the last half of so many products: at its limit of power a card lowers its clock after a second."""
    dtype = torch.bfloat16 if device.cuda else torch.float32
    a, b = (torch.randn(size, size, device=device.kind, dtype=dtype) for _ in range(2))
    for _ in range(products):
        a @ b
    began = device.now()
    for _ in range(products):
        a @ b
    return products * 2.0 * size**3 / (device.now() - began)


def _copy_rates(run: PartRun, elements: int) -> None:
    device = run.device
    target = torch.empty(elements, dtype=torch.uint8, device=device.kind)
    pairs: dict[str, Callable[[], float]] = {
        "device to device, read + written": lambda: copy_rate(device, target, torch.empty_like(target)),
        "host to device, pinned": lambda: copy_rate(device, device.on_host(elements), target),
        "device to host, pinned": lambda: copy_rate(device, target, device.on_host(elements)),
        "host to device, pageable": lambda: copy_rate(device, torch.ones(elements, dtype=torch.uint8), target),
    }
    for direction, rate in pairs.items():
        run.attempt(run.add(what=direction), lambda: {"rate": rate() / 1e9, "unit": "GB/s"})  # noqa: B023 - called at once


def _launch_seconds(device: Device, calls: int) -> float:
    """Of the host, for each of many small operations: a queue that is never full."""
    x = torch.zeros(1, device=device.kind)
    for _ in range(100):
        x.add_(1.0)
    times = []
    for _ in range(calls // 50):  # few enough for the queue of the device
        device.now()
        began = time.perf_counter()
        for _ in range(50):
            x.add_(1.0)
        times.append((time.perf_counter() - began) / 50)
    return statistics.median(times)


def _autograd_seconds(device: Device, calls: int) -> float:
    """Of the host, for each of a chain of small operations that autograd records."""
    x = torch.zeros(1, device=device.kind, requires_grad=True)
    times = []
    for _ in range(calls // 50):
        device.now()
        began = time.perf_counter()
        y = x
        for _ in range(50):
            y = y * 1.5
        y.backward()
        times.append((time.perf_counter() - began) / 50)
    return statistics.median(times)


def _pin_seconds(device: Device, size: int) -> float:
    began = device.now()
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.cuda)
    seconds = device.now() - began
    del pinned
    return max(seconds, 1e-9)


def _layer_rate(device: Device, config: dict[str, Any], tokens: int) -> Row:
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    linears = Counter([(hidden, heads), (hidden, keys), (hidden, keys), (heads, hidden)])
    linears += Counter([(hidden, inner), (hidden, inner), (inner, hidden)])
    seconds = flops = 0.0
    for (inputs, outputs), count in linears.items():
        for m, k, n in ((tokens, inputs, outputs), (tokens, outputs, inputs), (outputs, tokens, inputs)):
            seconds += count * matmul_seconds(device, m, k, n)
            flops += count * 2.0 * m * k * n
    return {"rate": flops / seconds / 1e12, "unit": "TFLOP/s"}


# ---------------------------------------------------------------- tests


def tests(run: PartRun) -> None:
    """tests/cuda by pytest, in a process of its own; its output is in tests.txt. Warnings end no test."""
    rows = [run.add(what="tests/cuda"), run.add(what="of these, flex attention")]
    run.attempt(rows[0], partial(_pytest, run, rows))


def _pytest(run: PartRun, rows: Sequence[Row]) -> Row:
    log, limit, note = run.out / "tests.txt", max(1.0, run.left - 3), ""
    report = run.out / "tests.jsonl"
    report.unlink(missing_ok=True)
    words = [
        str(ROOT / "tests/cuda"),
        "--rootdir",
        str(ROOT),
        "-c",
        str(ROOT / "pyproject.toml"),
        "-v",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        "-p",
        "benchmarks.gpu_tests",
    ]
    words += ["--continue-on-collection-errors"]
    if run.device.cuda and find_spec("xdist") is not None:  # much of a test is importing and the host's
        words += ["-n", str(min(6, max(1, cpu_cores() // 2)))]
    with log.open("w") as stream:
        process = Popen(
            [sys.executable, "-m", "pytest", *words], stdout=stream, stderr=STDOUT,
            env={**os.environ, gpu_tests.REPORT: str(report), "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            status = process.wait(limit)
        except TimeoutExpired:
            process.kill()
            status, note = process.wait(), f"stopped after {limit:.0f} s"
    read = gpu_tests.read_report(report)
    text = (log.read_text().strip().splitlines() or ["pytest said nothing"])[-1].strip("= ")
    if not note and status:
        no_tests = status in (4, 5)  # no such folder, or no test in it
        note = f"{'not run' if no_tests else 'failed'}: {text}; {', '.join(read.failed[:20])}".rstrip("; ")
    elif note and read.failed:
        note += f"; failed: {', '.join(read.failed[:20])}"
    rows[1].update(read.counts(flex=True))
    for text, count in read.warnings.most_common():
        run.add(warning=text, times=count)
    return read.counts(flex=False) | ({"note": note} if note else {})


# ---------------------------------------------------------------- the head


def head(run: PartRun) -> None:
    """The chunked head beside naive logits: time and memory beyond the gradients."""
    tokens = run.pick(8192, 64)
    options = argparse.Namespace(
        device=run.device.kind,
        dtype="bfloat16",
        width=run.pick(2560, 32),
        vocabulary=run.pick(151_936, 512),
    )
    naive: Row = {}
    variants: list[tuple[str, int | None]] = [("naive", None)]
    variants += [(name, None) for name in LOSSES if name.startswith("chunked")]
    variants += [("chunked, known direction", run.pick(size, size >> 16)) for size in (2**29, 2**30, 2**31)]
    for name, tile in variants:
        row = run.add(loss=name, **({} if tile is None else {"tile MiB": tile / MIB}))
        if run.attempt(row, partial(_time_loss, run.device, name, options, tokens, tile)):
            naive = naive or row
            row["/ naive"] = row["ms"] / naive["ms"]
            run.save()


def _time_loss(device: Device, name: str, options: argparse.Namespace, tokens: int, tile: int | None) -> Row:
    if tile is None:
        return _timed_loss(device, name, options, tokens)
    with mock.patch.object(head_ops, "tile_bytes", return_value=tile):
        return _timed_loss(device, name, options, tokens)


def _timed_loss(device: Device, name: str, options: argparse.Namespace, tokens: int) -> Row:
    problem = HeadInputs(options, tokens)
    matmul_rate(device)
    problem.run(LOSSES[name])
    problem.hidden.grad = problem.weight.grad = None
    base = device.reset_peak()
    _, loss = problem.run(LOSSES[name])
    assert problem.weight.grad is not None and problem.hidden.grad is not None
    extra = device.peak() - base - problem.weight.grad.nbytes - problem.hidden.grad.nbytes
    seconds = device.seconds(lambda: problem.run(LOSSES[name]), runs=5, warm=1)
    floor = 6.0 * tokens * options.vocabulary * options.width / matmul_rate(device)
    return {"ms": seconds * 1e3, "matmul share": floor / seconds, "extra MiB": extra / MIB, "value": loss}


# ---------------------------------------------------------------- attention


def kernels(run: PartRun) -> None:
    """Each kernel of ops/attention.py at the shape of a 4B layer, forward and backward."""
    tokens = run.pick(16_384, 64)
    for name in ("fa4", "varlen", "per_document", "flex"):  # the last is compiled, which takes long
        for lengths in (document_lengths(tokens, 0), [tokens]):
            row = run.add(kernel=name, documents=len(lengths), longest=max(lengths))
            run.attempt(row, partial(_time_kernel, run, name, tuple(lengths)), like=name)


def _time_kernel(run: PartRun, name: str, lengths: tuple[int, ...]) -> Row:
    heads, keys, width = run.pick((32, 8, 128), (4, 2, 16))
    dtype = torch.bfloat16 if run.device.cuda else torch.float32

    def draw(count: int) -> torch.Tensor:
        return torch.randn(1, sum(lengths), count, width, device=run.device.kind, dtype=dtype).transpose(1, 2)

    query, key, value = (draw(count).requires_grad_() for count in (heads, keys, keys))
    upstream = draw(heads).transpose(1, 2)

    def bounds() -> Bounds:
        return Bounds.packed(lengths, query.device)

    def forward_backward(row_bounds: Bounds) -> None:
        out, _ = attention.attend(name, nn.Module(), query, key, value, **{BOUNDS_ARGUMENT: row_bounds})
        torch.autograd.grad(out, (query, key, value), upstream)

    try:
        forward_backward(bounds())
    except ValueError as error:
        return {"note": f"not run: {error}"}
    shared_bounds = bounds()
    seconds = run.device.seconds(lambda: forward_backward(shared_bounds))
    base = run.device.reset_peak()
    forward_backward(shared_bounds)
    extra = run.device.peak() - base
    flops = sum(12.0 * heads * width * n * n / 2 for n in lengths)
    return {
        "ms": seconds * 1e3,
        "ms, new bounds": run.device.seconds(lambda: forward_backward(bounds())) * 1e3,
        "TFLOP/s": flops / seconds / 1e12,
        "extra MiB": extra / MIB,
    }


# ---------------------------------------------------------------- files


def files(run: PartRun) -> None:
    """A 4B model written and read, and the state of a 0.6B one saved beside training."""
    elements = run.pick(2**30, 2**16)
    target = torch.empty(elements, dtype=torch.uint8, device=run.device.kind)
    floor = copy_rate(run.device, run.device.on_host(elements), target)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = write_model(folder / "4b", config_of("4b", run.tiny))
        for kind, make in (
            ("plain write of zeros", partial(_plain_write, folder, elements)),
            ("export of 4b, bf16", partial(_export, run, model, folder / "export")),
            ("load of it into fp32 masters", partial(_load, run, folder / "export")),
            ("safetensors' load_file of it", partial(_load_file, run, folder / "export")),
        ):
            _rated(run, kind, make, floor)
        model = write_model(folder / "0.6b", config_of("0.6b", run.tiny))
        _save_state(run, model, folder / "run", floor)


def _rated(run: PartRun, kind: str, make: Callable[[], tuple[float, float]], floor: float) -> None:
    """make: does it; (bytes, seconds)."""

    def fill() -> Row:
        size, seconds = make()
        rate = size / seconds
        return {"GB": size / 1e9, "seconds": seconds, "GB/s": rate / 1e9, "of a pinned copy": rate / floor}

    run.attempt(run.add(what=kind), fill)


def _plain_write(folder: Path, size: int) -> tuple[float, float]:
    data, began = bytes(size), Device("cpu").now()
    with (folder / "plain").open("wb") as stream:
        stream.write(data)
        os.fsync(stream.fileno())
    (folder / "plain").unlink()
    return size, Device("cpu").now() - began


def _export(run: PartRun, model: str, target: Path) -> tuple[float, float]:
    engine = open_engine(model, run.device, 64)
    began = run.device.now()
    save_huggingface(engine, target)
    return _bytes(target), run.device.now() - began


def _load(run: PartRun, model: Path) -> tuple[float, float]:
    ranks = join(run.device.kind)  # type: ignore[arg-type]
    engine = Engine(EngineConfig(model=ModelConfig(path=str(model))), ranks)
    run.device.now()
    assert engine.loaded is not None
    return engine.loaded.bytes_read, engine.loaded.seconds


def _load_file(run: PartRun, model: Path) -> tuple[float, float]:
    began = run.device.now()
    for file in sorted(model.glob("*.safetensors")):
        load_file(file, device=run.device.kind)
    return _bytes(model), run.device.now() - began


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _save_state(run: PartRun, model: str, folder: Path, floor: float) -> None:
    """Two rows: until training goes on, and until the checkpoint is whole."""
    tokens = run.pick(2048, 64)
    engine = open_engine(model, run.device, tokens)
    (row,) = rows_of(tokens, engine.built.config.vocab_size, 1)
    weft_step(engine)(row)  # the optimizer has a state only then
    (folder / "checkpoints").mkdir(parents=True)
    saver = Saver(engine, folder, CheckpointConfig(), {})
    began = run.device.now()

    def wait() -> tuple[float, float]:
        saver.save(1, {})
        return engine.memory.resident - engine.memory.gradients, run.device.now() - began

    def finish() -> tuple[float, float]:
        saver.finish()
        return _bytes(folder), run.device.now() - began

    _rated(run, "checkpoint of 0.6b: training waits (copy of the state)", wait, floor)
    _rated(run, "checkpoint of 0.6b: whole on the disk", finish, floor)


# ---------------------------------------------------------------- profile

# Kind of work -> what its kernels (on CPU, its operations) are called; the first that matches.
KINDS = {
    "attention": r"flash|fmha|attention|attn|flex",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm|clip_grad",
    "matmul": r"gemm|nvjet|cutlass|cublas|xmma|wgmma|::(add|b|baddb)?mm\b|::matmul|::linear|grouped_mm",
    "copies, casts": r"memcpy|memset|copy|::cat|CatArray|fill|::to\b|nccl|c10d",
    "sort, index": r"sort|index|gather|scatter|embedding|cumsum|topk",
}
PROFILES = (("0.6b", "none", 8192), ("4b", "full", 16_384))  # shape, model.recompute, tokens of a row
_TOP = 30
_GAP = 200.0  # microseconds
_GAPS = 12  # frames that are listed


def profiled(run: PartRun) -> None:
    """0.6B without recomputation, 4B with it: tables by kind of work here, by kernel in profile-*.txt."""
    host = run.add(model="0.6b, 256 tokens", recompute="none", tokens=run.pick(256, 48))
    run.attempt(host, partial(_host_step, run, run.pick(256, 48)))
    for shape, recompute, tokens in PROFILES:
        tokens = run.pick(tokens, 48)
        run.attempt(
            run.add(model=shape, recompute=recompute, tokens=tokens), partial(_profile, run, shape, recompute, tokens)
        )


def _host_step(run: PartRun, tokens: int) -> Row:
    """A step with so little to compute that it takes what the host needs: for an operation of the planner's count."""
    with TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "0.6b", config_of("0.6b", run.tiny))
        engine = open_engine(path, run.device, tokens, compile=False)
        fused = fuses_norms(engine.config, engine.ranks.device)
        passes = layer_passes(engine.built.config, torch.bfloat16, fused_norms=fused)
        rows = rows_of(tokens, engine.built.config.vocab_size, 8)
        step, times = weft_step(engine), []
        for row in rows:
            began = run.device.now()
            step(row)
            times.append(run.device.now() - began)
    seconds = statistics.median(times[3:])
    operations = sum(layer.forward.operations + layer.backward.operations for layer in passes)
    operations += LAUNCHES_OF_UPDATE * sum(1 for _ in engine.module.parameters())
    rates = {"ms a step": seconds * 1e3, "tokens/s": tokens / seconds}
    return rates | {"operations": operations, "us of an operation": seconds / operations * 1e6}


def _profile(run: PartRun, shape: str, recompute: str, tokens: int) -> Row:
    """Two steps by kind of work, and a third with the host's frames, whose recording makes the host slower."""
    with TemporaryDirectory() as folder:
        model = write_model(Path(folder) / shape, config_of(shape, run.tiny))
        engine = open_engine(model, run.device, tokens, recompute=recompute, compile=False)
        rows = rows_of(tokens, engine.built.config.vocab_size, 6)
        step = weft_step(engine)
        for row in rows[:3]:
            step(row)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.device.cuda else [])]
        run.device.now()
        with profile(activities=activities) as profiled:
            began = run.device.now()
            for row in rows[3:5]:
                step(row)
            wall = run.device.now() - began
        with profile(activities=activities, with_stack=True) as framed:
            step(rows[5])
            run.device.now()
    seconds = summarise(run, shape, work_of(profiled.events(), run.device.cuda), wall)
    fused, repeated = fuses_norms(engine.config, engine.ranks.device), recompute != "none"
    layers = layer_passes(engine.built.config, torch.bfloat16, fused_norms=fused)
    passed = sum((1 + repeated) * layer.forward.bytes + layer.backward.bytes for layer in layers) * tokens
    profiled.export_chrome_trace(str(run.out / f"profile-{shape}.json.gz"))
    trace = run.out / f"profile-{shape}-frames.json"
    framed.export_chrome_trace(str(trace))
    gaps = gaps_of(json.loads(trace.read_text())["traceEvents"], run.device.cuda)
    trace.unlink()
    for frame, durations in sorted(gaps.items(), key=lambda pair: -sum(pair[1]))[:_GAPS]:
        run.add(
            gap=shape,
            ms=sum(durations) / 1e3,
            times=len(durations),
            **{"longest ms": max(durations) / 1e3},
            frame=frame,
        )
    return {
        "ms a step": wall / 2 * 1e3,
        "tokens/s": 2 * tokens / wall,
        "idle": 1.0 - _busy(profiled, run) / wall,
        # As the planner counts their bytes; kernels of the head are among them.
        "operations GB/s": 2 * passed / max(1e-9, seconds["other"] + seconds["copies, casts"]) / 1e9,
    }


def _busy(profiled: Any, run: PartRun) -> float:
    return busy_seconds(work_of(profiled.events(), run.device.cuda))


def gaps_of(events: Sequence[dict[str, Any]], cuda: bool) -> dict[str, list[float]]:
    """The microseconds of each gap above _GAP in the device's work, by the innermost frame of the host in the middle
    of it, and weft's innermost. events: of a chrome trace with stacks."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if cuda else ("cpu_op",)
    busy = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds and "dur" in e)
    frames = sorted(
        (e["ts"], e["ts"] + e["dur"], str(e["name"]))
        for e in events
        if e.get("cat") == "python_function" and "dur" in e
    )
    gaps, end = [], busy[0][1] if busy else 0.0
    for start, stop in busy:
        if start - end > _GAP:
            gaps.append((end, start))
        end = max(end, stop)
    gaps_by_frame: dict[str, list[float]] = {}
    stack: list[tuple[float, float, str]] = []
    position = 0
    for begin, stop in gaps:
        when = (begin + stop) / 2
        while position < len(frames) and frames[position][0] <= when:
            while stack and stack[-1][1] <= frames[position][0]:
                stack.pop()
            stack.append(frames[position])
            position += 1
        active = [name for _, until, name in stack if until > when]
        weft_frame = next((name for name in reversed(active) if "weft/" in name and "site-packages" not in name), "")
        inner = active[-1] if active else "no frame"
        name = inner if weft_frame in ("", inner) else f"{inner} in {weft_frame}"
        gaps_by_frame.setdefault(name, []).append(stop - begin)
    return gaps_by_frame


def work_of(events: Sequence[FunctionEvent], cuda: bool) -> list[FunctionEvent]:
    """Kernels of the device, or operations of the CPU."""
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    return [event for event in events if event.device_type == kind and not event.is_user_annotation]


def kind_of(name: str) -> str:
    """The kind of work that a kernel does, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def busy_seconds(events: Sequence[FunctionEvent]) -> float:
    """In which at least one of them ran."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def summarise(run: PartRun, shape: str, events: Sequence[FunctionEvent], wall: float) -> Counter[str]:
    """Rows by kind of work, and a file of the kernels that take longest. Returns the seconds of each kind."""
    seconds, calls = Counter[str](), Counter[str]()
    for event in events:
        duration = event.time_range.elapsed_us() if run.device.cuda else event.self_cpu_time_total
        seconds[event.name] += duration / 1e6
        calls[event.name] += 1
    kinds = Counter[str]()
    for name, duration in seconds.items():
        kinds[kind_of(name)] += duration
    for kind, duration in kinds.most_common():
        run.add(work=kind, of=shape, **{"ms of 2 steps": duration * 1e3, "share": duration / wall})
    idle = wall - busy_seconds(events)
    run.add(work="idle", of=shape, **{"ms of 2 steps": idle * 1e3, "share": idle / wall})
    head = f"{wall * 1e3:.1f} ms of wall-clock, two steps; {len(events)} kernels"
    lines = [head, "", "      ms  share  calls  kernel"]
    for name, duration in seconds.most_common(_TOP):
        lines.append(f"{duration * 1e3:8.2f} {duration / wall:6.1%} {calls[name]:6}  [{kind_of(name)}] {name[:150]}")
    (run.out / f"profile-{shape}.txt").write_text("\n".join(lines) + "\n")
    return kinds


# ---------------------------------------------------------------- the machine


def machine(run: PartRun) -> None:
    """A row of what this runs on, its versions and its allocator's settings."""
    device = run.device
    if device.cuda and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees none")
        return
    facts: Row = {
        "device": device.name,
        "memory GiB": round(device.memory / 2**30, 1),
        "devices": torch.cuda.device_count() if device.cuda else 2,  # two ranks of a CPU are as good as any
        "cores": cpu_cores(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "triton": _version("triton"),
    }
    if device.cuda:
        settings = torch.cuda.memory._snapshot()["allocator_settings"]  # what the allocator made of its variables
        facts["expandable segments"] = settings.get("expandable_segments")
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        facts["accelerator"] = accelerator_of(device.name, device.memory) or "unknown to weft plan"
    run.add(**facts)


def accelerator_of(name: str, memory: int) -> str | None:
    """The accelerator of launch/machine.py with this name and memory; None if weft plan does not know it."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).replace("rtx ", "rtx").split()
    for accelerator in ACCELERATORS.values():
        if accelerator.name.split("-")[0] in words and abs(accelerator.memory - memory) < 0.1 * memory:
            return accelerator.name
    return None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


FUNCTIONS: dict[str, Callable[[PartRun], None]] = {
    "machine": machine,
    "run": gpu_run.run,
    "two": gpu_run.two,
    "rates": rates,
    "profile": profiled,
    "sft-4b": partial(sft, shape="4b"),
    "sft-30b": partial(sft, shape="30b-a3b"),
    "sft-0.6b": partial(sft, shape="0.6b"),
    "tests": tests,
    "head": head,
    "kernels": kernels,
    "moe": moe,
    "rl": rl,
    "files": files,
}
