"""benchmarks/gpu.py, all of it, on sizes of a test and without a GPU; and how it goes on where a part does not."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from benchmarks import gpu, gpu_sft
from benchmarks.device import Device
from benchmarks.gpu_parts import FUNCTIONS, kind_of
from tests import forked
from weft.cluster.process import leave

SCRIPT = Path(gpu.__file__)
FAKED = [gpu.Part(name, 1, name, "") for name in ("one", "two", "three")]


def whole(words: list[str]) -> int:
    """The command, whose parts are forks instead of programs."""
    gpu.Popen = forked._Fork  # type: ignore[misc]
    sys.argv = words
    return gpu.main()


@pytest.mark.slow
def test_every_part_has_its_rows(tmp_path: Path) -> None:
    words = [str(SCRIPT), "--tiny", "--device", "cpu", "--minutes", "10", "--out", str(tmp_path / "out")]
    done = forked.run(partial(whole, words), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "out/gpu.json").read_text())["parts"]
    assert list(parts) == list(FUNCTIONS) == [part.name for part in gpu.PARTS]
    for name, part in parts.items():
        assert part["rows"] and part["state"] == "", name
        said = [row["note"] for row in part["rows"] if "note" in row]
        assert all(note.startswith("not run: ") for note in said), said
        if name.startswith("sft"):
            assert all(row["weft tokens/s"] > 0 < row["bare tokens/s"] and row["weft / bare"] for row in part["rows"])
            assert {(row["recompute"], row["compile"]) for row in part["rows"]} == {("none", "yes"), ("full", "no")}
    assert {row["phase"] for row in parts["rl"]["rows"] if "tokens/s" in row} == {"generate", "read", "update"}
    assert {row["kernel"] for row in parts["kernels"]["rows"] if "ms" in row} == {"per_document"}
    assert {"matmul", "attention", "optimizer", "idle"} <= {row["work"] for row in parts["profile"]["rows"]}
    page = (tmp_path / "out/gpu.md").read_text()
    assert all(f"## {part.title}\n" in page for part in gpu.PARTS) and "aiting" not in page


def fake_parts(
    monkeypatch: pytest.MonkeyPatch, folder: Path, minutes: float, **programs: str
) -> tuple[gpu.Report, dict[str, str]]:
    """What becomes of parts that are these programs; the first word of their arguments is where their rows go."""

    def start(words: list[str], options: Any, log: Any) -> Popen[bytes]:
        program = "import json, os, sys, time; rows = lambda *r: open(sys.argv[1], 'w').write(json.dumps(r)); "
        return Popen([sys.executable, "-c", program + programs[words[1]], words[3]], stderr=log, process_group=0)

    monkeypatch.setattr(gpu, "start", start)
    monkeypatch.setattr(gpu, "_GRACE", 0.5)
    monkeypatch.setattr(gpu, "_POLL", 0.05)
    report = gpu.Report(folder, "command", "machine", [gpu.Result(part) for part in FAKED if part.name in programs])
    options = argparse.Namespace(tiny=True, device="cpu", out=str(folder))
    gpu.run_parts(report, options, time.monotonic() + 60 * minutes)
    return report, {result.part.name: result.state for result in report.results}


def test_what_a_part_has_found_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs, one that is killed and one that ends: nothing is lost, and the next one runs."""
    report, states = fake_parts(
        monkeypatch, tmp_path, 0.1,
        one="rows({'a': 1.25}); time.sleep(600)", two="rows({'b': 2}); os.kill(os.getpid(), 9)", three="rows({'c': 3})",
    )  # fmt: skip
    assert states["one"].startswith("stopped after") and states["two"].startswith("failed: it ended with -9")
    assert states["three"] == ""
    assert [result.rows for result in report.results] == [[{"a": 1.25}], [{"b": 2}], [{"c": 3}]]
    assert [result.failed for result in report.results] == [False, True, False]
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"| {name} |" in page for name in "abc") and "| 1.25 |" in page


def test_there_is_no_part_for_which_there_is_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    _, states = fake_parts(monkeypatch, tmp_path, 0.05, one="time.sleep(600)", two="time.sleep(600)", three="rows({})")
    assert time.monotonic() - began < 3.0 + 2.0
    assert states["one"].startswith("stopped") and states["three"].startswith("not run: no time left")
    assert states["three"].capitalize() in (tmp_path / "gpu.md").read_text()


class Attention(torch.autograd.Function):
    """Keeps what a flash kernel keeps, and computes nothing."""

    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.zeros_like(query)
        context.save_for_backward(query, key, value, out)
        return out


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any
) -> tuple[Tensor, None]:
    return Attention.apply(query, key, value).transpose(1, 2), None


@pytest.mark.parametrize("shape", ["0.6b", "30b-a3b"])
def test_activations_are_what_a_layer_keeps(shape: str, tmp_path: Path) -> None:
    """The estimate by which parts choose what fits, against the bytes of all tensors saved for backward."""
    AttentionInterface.register("keeps", attend)
    tokens, kept = 64, {}
    for layers in (1, 2):
        config = gpu_sft.config_of(shape, True, layers)
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16, attn_implementation="keeps"
        ).train()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor, saved: dict[int, Tensor] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(input_ids=torch.arange(tokens)[None], use_cache=False)
        kept[layers] = sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in own)
    sizes = gpu_sft.Sizes(config, None, 2, 0, 0, 0)  # type: ignore[arg-type]
    estimate = sizes.activations(2, tokens, "none") - sizes.activations(1, tokens, "none")
    assert estimate == pytest.approx(kept[2] - kept[1], rel=0.05)


def test_as_many_layers_as_fit(tmp_path: Path) -> None:
    path = gpu_sft.write_model(tmp_path, gpu_sft.config_of("30b-a3b", True, 8))
    sizes = gpu_sft.Sizes.of(path, Device("cpu"))
    leave()  # the part's process would end with its group
    assert sizes.layers == 8 and 8 * sizes.layer < sizes.resident < 10 * sizes.layer
    room = sizes.needed("weft", 5, 48, "full")
    assert sizes.fitting(48, room) == 5
    assert sizes.fitting(48, room - 1) == 4
    assert sizes.fitting(48, sizes.needed("weft", 8, 48, "full")) == 8
    assert sizes.fitting(2**20, sizes.needed("weft", 5, 2**20, "full")) < 5  # the bare loop's logits


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
