"""benchmarks/gpu.py, all of it, on sizes of a test and without a GPU; and how it goes on where a part does not."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from functools import cache, partial
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from benchmarks import gpu, gpu_counts, gpu_parts, gpu_rows, gpu_run, gpu_sft, gpu_tests
from benchmarks.device import Device
from benchmarks.gpu_parts import FUNCTIONS, PROFILES, accelerator_of, gaps_of, kind_of
from tests.support import forked
from weft.config.schema import LoraConfig, ModelConfig, StepConfig
from weft.engine.config import EngineConfig
from weft.engine.losses.base import CrossEntropy
from weft.launch.machine import accelerator
from weft.launch.process import leave
from weft.recipes.plan.simulate import Step, simulate

SCRIPT = Path(gpu.__file__)
ROOT = SCRIPT.parent.parent
FAKED = [gpu.Part(name, 1, name, "") for name in ("one", "two", "three")]


def run_in_forks(words: list[str]) -> int:
    """The command, whose process and runs of weft are forks instead of programs."""
    gpu.Popen = gpu_run.Popen = gpu_parts.Popen = forked._Fork  # type: ignore[misc]
    sys.argv = words
    return gpu.main()


@pytest.mark.slow
def test_every_part_has_its_rows(tmp_path: Path) -> None:
    words = [str(SCRIPT), "--tiny", "--device", "cpu", "--minutes", "10", "--out", str(tmp_path / "out")]
    done = forked.run(partial(run_in_forks, words), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out/gpu.json").read_text())
    parts = report["parts"]
    assert ["machine", *parts] == list(FUNCTIONS) and list(parts) == [part.name for part in gpu.PARTS]
    for name, part in parts.items():
        assert part["rows"] and part["state"] == "", name
        notes = [row["note"] for row in part["rows"] if "note" in row]
        assert all(note.startswith("not run: ") for note in notes), notes
        if name.startswith("sft"):
            bare = name != "sft-30b"  # a plain loop has no adapters
            assert all(row["weft tokens/s"] > 0 < row["weft first step s"] for row in part["rows"])
            assert all((row.get("bare tokens/s", 0) > 0) == ("weft / bare" in row) == bare for row in part["rows"])
            assert [(row["recompute"], row["compile"]) for row in part["rows"]] == [("full", "no"), ("none", "yes")]
    first, repeated = parts["run"]["rows"]
    assert first["last loss"] < 0.6 * first["first loss"] and repeated["loss difference"] == 0
    pairs = {row["mesh"]: row for row in parts["two"]["rows"]}
    assert set(pairs) == {"fsdp 2", "hsdp 2", "tp 2", "pp 2", "cp 2", "ep 2"}
    assert all(max(row["fp32 loss"], row["fp32 norm"]) < 1e-5 and row["tokens/s"] > 0 for row in pairs.values())
    assert {row["phase"] for row in parts["rl"]["rows"] if "tokens/s" in row} == {"generate", "read", "update"}
    assert {row["kernel"] for row in parts["kernels"]["rows"] if "ms" in row} == {"per_document"}
    works = {(row["of"], row["work"]) for row in parts["profile"]["rows"] if "work" in row}
    assert works >= {(shape, work) for shape in ("0.6b", "4b") for work in ("matmul", "attention", "optimizer", "idle")}
    assert {row["gap"] for row in parts["profile"]["rows"] if "gap" in row} == {"0.6b", "4b"}
    assert {(row["what"], row["empty"]) for row in parts["moe"]["rows"] if row.get("empty")} == {
        (kind, 2) for kind in ("grouped products alone", "transformers' experts", "weft's experts")
    }
    assert len({row.get("tile MiB") for row in parts["head"]["rows"]}) == 4
    tests = parts["tests"]["rows"]
    assert tests[0]["skipped"] > 100 > tests[1]["skipped"] > 10 and tests[0]["failed"] == 0
    assert {"torch", "cuda", "triton", "cores"} <= set(report["machine"])
    page = (tmp_path / "out/gpu.md").read_text()
    assert all(f"## {part.title}\n" in page for part in gpu.PARTS) and "aiting" not in page


def fake_parts(
    monkeypatch: pytest.MonkeyPatch, folder: Path, minutes: float, **programs: str
) -> tuple[gpu.Report, dict[str, str], int]:
    """What becomes of parts that are these programs, and the number of processes that were started for them."""
    started = []
    program = (
        "import json, os, pathlib, sys, time; folder, n, programs = pathlib.Path(sys.argv[1]), int(sys.argv[2]), "
        "json.loads(sys.argv[3])\n"
        "def rows(*r): (folder / f'{n}.rows').write_text(json.dumps(r))\n"
        "def done(sound=True): (folder / f'{n}.done').write_text(json.dumps({'sound': sound, 'facts': {'GiB': 2.5}}))\n"
        "while True:\n"
        "    order = folder / f'{n}.order'\n"
        "    if not order.exists(): time.sleep(0.01); continue\n"
        "    exec(programs[json.loads(order.read_text())['part']]); n += 1\n"
    )

    def start(words: list[str], options: Any, log: Any) -> Popen[bytes]:
        started.append(words)
        return Popen(
            [sys.executable, "-c", program, words[1], words[3], json.dumps(programs)], stderr=log, process_group=0
        )

    monkeypatch.setattr(gpu, "start", start)
    monkeypatch.setattr(gpu, "_GRACE", 0.5)
    monkeypatch.setattr(gpu, "_POLL", 0.05)
    results = [gpu.Result(part) for part in FAKED if part.name in programs]
    report = gpu.Report(folder, "command", {"device": "machine"}, results)
    options = argparse.Namespace(tiny=True, device="cpu", out=str(folder))
    with (folder / "gpu.log").open("w") as log:
        worker = gpu.Worker(options, log)
        try:
            gpu.run_parts(report, options, time.monotonic() + 60 * minutes, worker)
        finally:
            worker.end()
    return report, {result.part.name: result.state for result in report.results}, len(started)


def test_what_a_part_has_measured_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs, one that is killed and one that ends: nothing is lost, and the next one has a new process."""
    report, states, started = fake_parts(
        monkeypatch, tmp_path, 0.1, one="rows({'a': 1.25}); time.sleep(600)",
        two="rows({'b': 2}); os.kill(os.getpid(), 9)", three="rows({'c': 3}); done()",
    )  # fmt: skip
    assert states["one"].startswith("stopped after") and states["two"].startswith("failed: it ended with -9")
    assert states["three"] == "" and started == 3
    assert [result.rows for result in report.results] == [[{"a": 1.25}], [{"b": 2}], [{"c": 3}]]
    assert [result.failed for result in report.results] == [False, True, False]
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"| {name} |" in page for name in "abc") and "| 1.25 |" in page and "GiB 2.5" in page


def test_parts_share_a_process_until_the_device_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing takes 10 s; after an illegal access nothing of a process computes."""
    _, states, started = fake_parts(
        monkeypatch, tmp_path, 0.2, one="rows({}); done()", two="rows({}); done(sound=False)", three="rows({}); done()"
    )
    assert states == {
        "one": "", "two": "failed: the device answers no more; the next part has a new process", "three": "",
    }  # fmt: skip
    assert started == 2


class Timed:
    """A worker whose parts take their planned time at once, on a clock of its own, or less."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        self.share, self.clock, self.limits = share, 1000.0, dict[str, float]()
        monkeypatch.setattr(gpu.time, "monotonic", lambda: self.clock)

    def run(self, report: gpu.Report, result: gpu.Result, limit: float, longest: float) -> None:
        self.limits[result.part.name], result.state = limit, ""
        self.clock += min(result.part.seconds * self.share, longest)


def run_timed(monkeypatch: pytest.MonkeyPatch, folder: Path, minutes: float, share: float) -> tuple[Timed, list[str]]:
    worker = Timed(monkeypatch, share)
    parts = gpu.parts_of(argparse.Namespace(parts=None), {"devices": 1})
    report = gpu.Report(folder, "command", {}, [gpu.Result(part) for part in parts])
    gpu.run_parts(report, argparse.Namespace(tiny=False), worker.clock + 60 * minutes - gpu.START, worker)  # type: ignore[arg-type]
    return worker, [result.part.name for result in report.results if result.state.startswith("not run: no time left")]


def test_all_parts_fit_into_nine_minutes_and_the_first_ones_into_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = {part.name: part.seconds for part in gpu.PARTS}
    worker, missing = run_timed(monkeypatch, tmp_path, 9, 1.0)
    assert missing == [] and all(worker.limits[name] >= planned[name] for name in worker.limits)
    worker, missing = run_timed(monkeypatch, tmp_path, 4, 1.0)
    assert list(worker.limits) == ["run", "rates", "profile", "sft-4b", "sft-30b"]  # the last is cut short
    assert all(worker.limits[name] == planned[name] for name in list(worker.limits)[:-1])
    assert missing == ["sft-0.6b", "tests", "head", "kernels", "moe", "rl", "files"]
    worker, missing = run_timed(monkeypatch, tmp_path, 4, 0.5)  # a faster machine
    assert "tests" in worker.limits and missing != []


def test_the_page_of_the_docs_adds_up_the_same_times() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| (\d+) \|", (ROOT / "docs/benchmarks/gpu.md").read_text(), re.MULTILINE)
    if rows:  # until a GPU's page takes its place
        assert rows == [("start", str(gpu.START)), *((p.name, f"{p.seconds:.0f}") for p in gpu.PARTS)]
    assert gpu.START + sum(part.seconds for part in gpu.PARTS if part.accelerators == 1) <= 9 * 60 - 15


def test_there_is_no_part_for_which_there_is_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    _, states, _ = fake_parts(monkeypatch, tmp_path, 0.03, one="time.sleep(600)", two="time.sleep(600)", three="done()")
    assert time.monotonic() - began < 1.8 + 2.0
    assert states["one"].startswith("stopped") and states["three"].startswith("not run: no time left")
    assert states["three"].capitalize() in (tmp_path / "gpu.md").read_text()


def test_warnings_are_listed_and_end_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", lambda *_, **__: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpu_rows.keep_warnings(tmp_path / "1.warnings")
        for number in range(2):
            warnings.warn_explicit(f"slow path | {number}\nmore", UserWarning, "/a/b/torch/x.py", 7)
    worker = gpu.Worker(argparse.Namespace(), sys.stderr)
    worker.folder, report = tmp_path, gpu.Report(tmp_path, "command", {}, [])
    (tmp_path / "gpu.log").write_text("step 1\n[rank0]:[W126 10:00:00.123 ProcessGroupNCCL.cpp:4] Warning: barrier\n")
    worker.collect(report)
    report.write()
    assert report.warnings == {
        "UserWarning (b/torch/x.py:7): slow path | 0": 1, "UserWarning (b/torch/x.py:7): slow path | 1": 1,
        "ProcessGroupNCCL.cpp:4] Warning: barrier": 1,
    }  # fmt: skip
    assert "| 1 | UserWarning (b/torch/x.py:7): slow path \\| 1 |" in (tmp_path / "gpu.md").read_text()


def test_the_outcomes_of_a_killed_pytest_are_read(tmp_path: Path) -> None:
    lines = [
        {"test": "tests/cuda/test_a.py::test_1", "outcome": "passed", "seconds": 1.0},
        {"test": "tests/cuda/test_a.py::test_1", "outcome": "failed", "seconds": 0.1},  # its teardown
        {"test": "tests/cuda/test_k.py::test_2[flex]", "outcome": "skipped", "seconds": 0.0},
        {"warning": "UserWarning (torch/x.py:7): slow", "test": ""},
    ]
    path = tmp_path / "tests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"test": "tests/cu')
    read = gpu_tests.read_report(path)
    assert read.counts(flex=False) == {"passed": 0, "failed": 1, "skipped": 1}
    assert read.counts(flex=True) == {"passed": 0, "failed": 0, "skipped": 1}
    assert read.failed == ["test_a.py::test_1"] and sum(read.warnings.values()) == 1
    items = [argparse.Namespace(nodeid=name) for name in ("b[flex]", "c", "gpt_oss", "a")]
    gpu_tests.pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == ["c", "a", "b[flex]", "gpt_oss"]


def test_gaps_of_the_device_have_the_frame_that_the_host_was_in() -> None:
    """Two gaps, one within another frame's call; one of 150 us is none. Kernels may overlap."""
    events = [
        *(
            {"cat": "kernel", "ts": ts, "dur": dur}
            for ts, dur in ((0, 100), (50, 100), (300, 100), (1000, 10), (1500, 5))
        ),
        {"cat": "python_function", "name": "weft/engine/metrics.py(67): read", "ts": 380.0, "dur": 800.0},
        {"cat": "python_function", "name": "torch/_tensor.py(9): tolist", "ts": 390.0, "dur": 600.0},
        {"cat": "python_function", "name": "weft/engine/optim/optimizer.py(1): step", "ts": 1290.0, "dur": 600.0},
    ]
    assert gaps_of(events, cuda=True) == {
        "torch/_tensor.py(9): tolist in weft/engine/metrics.py(67): read": [600],
        "no frame": [490],
    }
    assert gaps_of(events[:-1], cuda=True)["no frame"] == [490]
    assert gaps_of([], cuda=True) == {}


def test_constants_for_the_planner_are_those_of_the_rows() -> None:
    parts = {
        "rates": [
            {"what": "matmul 8192^3", "rate": 800.0}, {"what": "matmul 8192^3, after two seconds of it", "rate": 650.0},
            {"what": "matmuls of a 4b layer, forward and backward, 8192 tokens", "rate": 700.0},
            {"what": "device to device, read + written", "rate": 2800.0},
            {"what": "host to device, pinned", "note": "failed: x"},
        ],
        "profile": [
            {"model": "0.6b", "ms a step": 90.0, "operations GB/s": 1000.0},
            {"model": "0.6b, 256 tokens", "us of an operation": 4.0}, {"model": "4b", "operations GB/s": 1500.0},
        ],
        "kernels": [
            {"kernel": "varlen", "documents": 47, "TFLOP/s": 100.0}, {"kernel": "flex"},
            {"kernel": "varlen", "documents": 1, "TFLOP/s": 350.0},
        ],
    }  # fmt: skip
    assert gpu.measured(parts) == pytest.approx(
        {
            "matmul_rate": 700e12,
            "copy_rate": 2.8e12,
            "launch": 4e-6,
            "attention_rate": 350e12,
            "operation_rate": 1.5e12,
        }
    )
    assert gpu.measured({}) == {}


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80gb"),
        ("NVIDIA H200", 139.8, "h200-141gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090-24gb"),
        ("NVIDIA H100 NVL", 93.0, None),
        ("AMD EPYC", 23.5, None),
    ],
)
def test_a_card_is_known_by_its_name_and_memory(name: str, gib: float, expected: str | None) -> None:
    assert accelerator_of(name, int(gib * 2**30)) == expected


def test_the_rival_has_the_plain_loss_in_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (37, 50))
    labels = torch.randint(50, (37,), generator=generator)
    labels[::5] = -100
    plain = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    expected = torch.autograd.grad(plain, (hidden, weight))
    loss = gpu_sft.chunked_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), expected)


# ---------------------------------------------------------------- memory

CARD = 80e9  # bytes; of an H100's 85 GB, contexts take some 1.5, and a twentieth is for fragments
FREE = 79.1 * 2**30 - 0.6e9  # bytes of an H100 that a process with a context sees


@cache
def peaks_of(shape: str, tokens: int, recompute: str) -> tuple[int, int]:
    """Bytes of a step of the Engine on fake CUDA tensors, with two and with four layers."""
    peaks = []
    for layers in (2, 4):
        with TemporaryDirectory() as folder:
            path = gpu_sft.write_model(Path(folder) / "model", gpu_sft.config_of(shape, False, layers))
            model, step = ModelConfig(path=path, recompute=recompute), StepConfig(max_tokens_per_device=tokens)
            config = EngineConfig(model=model, step=step, lora=gpu_sft.ADAPTERS.get(shape, LoraConfig()))
            lengths = gpu_sft.document_lengths(tokens, 0)
            peaks.append(simulate(config, 1, accelerator("h100-80gb"), Step(lengths, CrossEntropy())).peak.total)
    return peaks[0], peaks[1]


def peak_of(shape: str, tokens: int, recompute: str, layers: int) -> float:
    """With so many layers, which are all alike."""
    two, four = peaks_of(shape, tokens, recompute)
    return two + (layers - 2) * (four - two) / 2


def layers_of(shape: str) -> int:
    return int(gpu_sft.config_of(shape, False)["num_hidden_layers"])


@pytest.mark.slow
def test_profiles_fit_into_80_gb() -> None:
    for shape, recompute, tokens in PROFILES:
        assert peak_of(shape, tokens, recompute, layers_of(shape)) < CARD, shape


@pytest.mark.slow
def test_cases_of_sft_have_layers_that_fit_into_80_gb(tmp_path: Path) -> None:
    """The compiled ones keep less than the others. The main case of 4B has all of its layers, so that a ratio of weft
    and the plain loop comes out."""
    for shape, cases in gpu_sft.CASES.items():
        path = gpu_sft.write_model(tmp_path / shape, gpu_sft.config_of(shape, False))
        sizes = gpu_sft.Sizes.of(path, Device("cpu"), gpu_sft.ADAPTERS.get(shape, LoraConfig()))
        leave()
        for case in cases:
            layers = sizes.fitting(case.tokens, 0.97 * FREE, case.recompute)
            if case.recompute == "full" or shape == "0.6b":
                assert layers == sizes.layers
            if not case.compile:
                peak = peak_of(shape, case.tokens, case.recompute, layers)
                assert peak < CARD, case
                needed = sizes.needed("weft", layers, case.tokens, case.recompute)
                assert 0.97 * peak < needed < 1.5 * peak, case  # the plain loop's norms store more than fused ones


@pytest.mark.slow
def test_a_step_of_rl_fits_into_80_gb() -> None:
    """Besides the engine's weights, which are dropped before the update."""
    assert peak_of("0.6b", 16_384, "none", layers_of("0.6b")) + 2 * 0.6e9 < CARD


class Attention(torch.autograd.Function):
    """Keeps what a flash kernel keeps, and computes nothing."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.zeros_like(query)
        context.save_for_backward(query, key, value, out)
        return out


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, None]:
    return Attention.apply(query, key, value).transpose(1, 2), None


@pytest.mark.parametrize("shape", ["0.6b", "30b-a3b"])
def test_activations_are_what_a_layer_keeps(shape: str, tmp_path: Path) -> None:
    """The estimate by which parts choose what fits, against the bytes of all tensors saved for backward."""
    AttentionInterface.register("keeps", attend)
    tokens, saved_bytes = 64, {}
    for layers in (1, 2):
        config = gpu_sft.config_of(shape, True, layers)
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16, attn_implementation="keeps"
        ).train()
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=torch.arange(tokens)[None], use_cache=False)
        saved_bytes[layers] = sum(
            t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in weights
        )
    sizes = gpu_sft.Sizes(config, None, 2, 0, 0, 0)  # type: ignore[arg-type]
    estimate = sizes.activations(2, tokens, "none") - sizes.activations(1, tokens, "none")
    assert estimate == pytest.approx(saved_bytes[2] - saved_bytes[1], rel=0.05)


def test_as_many_layers_as_both_have_memory_for(tmp_path: Path) -> None:
    path = gpu_sft.write_model(tmp_path, gpu_sft.config_of("30b-a3b", True, 8))
    sizes = gpu_sft.Sizes.of(path, Device("cpu"), LoraConfig())
    leave()  # the part's process would end with its group
    assert sizes.layers == 8 and 8 * sizes.layer < sizes.resident < 10 * sizes.layer
    for recompute in ("full", "none"):
        needed = {
            trainer: partial(sizes.needed, trainer, tokens=48, recompute=recompute) for trainer in ("weft", "bare")
        }
        room = max(needed[trainer](5) for trainer in needed)
        assert sizes.fitting(48, room, recompute) == 5
        assert sizes.fitting(48, room - 1, recompute) == 4
        assert sizes.fitting(48, max(needed[trainer](8) for trainer in needed), recompute) == 8
        assert sizes.fitting(48, 0.0, recompute) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmul"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies, casts"),
        ("void at::native::elementwise_kernel<MulFunctor<float>>", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_counts_of_a_step_on_a_card() -> None:
    """The host reads once; the head and norms are kernels; parameters are copied once a step where they are kept."""
    retained, freed = (gpu_counts.count("0.6b", 1024, "full", keeps, 3, tiny=True) for keeps in (True, False))
    assert retained.reads == freed.reads == 1
    assert retained.kinds["head kernels"].count == 3 and retained.kinds["norm kernels"].count > 50
    assert retained.kinds["products"].flops == freed.kinds["products"].flops > 0
    assert retained.kinds["copies"].bytes < 0.8 * freed.kinds["copies"].bytes
    assert "Reads by the host: 1" in gpu_counts.report(retained)
