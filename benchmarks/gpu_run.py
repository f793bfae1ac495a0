"""Whole runs for benchmarks/gpu.py, in processes of their own: `weft sft` with a checkpoint and a resumed run, and
steps of two ranks beside those of one."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import STDOUT, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu_rows import PartRun, Row
from benchmarks.gpu_sft import config_of, rows_of, step_with_norm
from weft.config.schema import FsdpConfig, MeshConfig, ModelConfig, StepConfig
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.launch.machine import free_port
from weft.launch.process import join, leave
from weft.models import hf

ROOT = Path(__file__).resolve().parent.parent
SAVED, STEPS = 20, 25  # the step after which the run is saved, and the last one

# ---------------------------------------------------------------- weft sft


def run(run: PartRun) -> None:
    """`weft sft` from a config, and its last steps again from a checkpoint."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        first, resumed = run.add(what=f"steps 1 to {STEPS}"), run.add(what=f"steps {SAVED + 1} to {STEPS}, resumed")
        config = _write_config(run, folder)
        done: list[dict[str, Any]] = []
        if not run.attempt(first, lambda: _first(run, folder, config, done)):
            return
        run.attempt(resumed, lambda: _resumed(run, folder, done))


def _write_config(run: PartRun, folder: Path) -> Path:
    """A config of a run on sums that are written out, which can be learned; with a model and a tokenizer."""
    words = [*"0123456789", "plus", "is", ";", "<end>"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=";"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "model")
    config = config_of("0.6b", run.tiny, run.pick(8, 2)) | {"vocab_size": run.pick(32_768, 512)}
    config |= {"eos_token_id": words.index("<end>"), "bos_token_id": None}
    (folder / "model/config.json").write_text(json.dumps(config))
    source, documents = np.random.default_rng(0), run.pick(16, 2)
    with (folder / "data.jsonl").open("w") as stream:
        for _ in range(documents * STEPS):
            terms = source.integers(0, 1000, source.integers(2, run.pick(120, 4)))
            sums = np.cumsum(terms)
            text = " ".join(f"plus {term} is {total} ;" for term, total in zip(terms, sums, strict=True))
            stream.write(json.dumps({"text": text}) + "\n")
    (folder / "config.yaml").write_text(
        f"model: {{path: '{folder}/model', init: random}}\n"
        f"data: {{path: '{folder}/data.jsonl'}}\n"
        f"step: {{documents: {documents}, max_tokens_per_device: {run.pick(16_384, 512)}}}\n"
        f"optimizer: {{lr: {run.pick('3.0e-4', '1.0e-2')}}}\n"
        "schedule: {warmup_steps: 3}\n"
        f"train: {{epochs: null, steps: {STEPS}}}\n"
        f"checkpoint: {{every: {SAVED}, keep: null}}\n"
        f"run: {{dir: '{folder}/run'}}\n"
    )
    return folder / "config.yaml"


def _first(run: PartRun, folder: Path, config: Path, done: list[dict[str, Any]]) -> Row:
    seconds = _weft(run, ["sft", str(config), "--device", run.device.kind, "--nproc", "1"])
    done += _lines(folder)
    steps = [line["step"] for line in done]
    assert steps == list(range(1, STEPS + 1)), f"steps {steps}"
    assert all(math.isfinite(line["loss"]) and not line.get("skipped") for line in done), "a loss is not finite"
    assert done[-1]["loss"] < done[0]["loss"], f"the loss went from {done[0]['loss']} to {done[-1]['loss']}"
    size = sum(file.stat().st_size for file in (folder / "run/checkpoints").rglob("*") if not file.is_symlink())
    return {"seconds": seconds, **_figures(done), "checkpoints GB": size / 1e9}


def _resumed(run: PartRun, folder: Path, done: Sequence[dict[str, Any]]) -> Row:
    (folder / f"run/checkpoints/step-{STEPS:06}").rename(folder / "aside")
    seconds = _weft(run, ["sft", "--resume", str(folder / "run"), "--device", run.device.kind, "--nproc", "1"])
    lines = _lines(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "its steps are others"
    pairs = zip(lines[SAVED:], done[SAVED:], strict=True)
    deviation = max(abs(new["loss"] - old["loss"]) / old["loss"] for new, old in pairs)
    assert deviation < 0.05, f"its losses differ by {deviation:.1%} from the run's that went on"
    return {"seconds": seconds, **_figures(lines[SAVED:]), "loss difference": deviation}


def _figures(lines: Sequence[dict[str, Any]]) -> Row:
    figures: Row = {"first loss": lines[0]["loss"], "last loss": lines[-1]["loss"]}
    for column, key in (("tokens/s", "tokens_per_second"), ("MFU", "mfu"), ("GiB", "memory_gib")):
        values = [line[key] for line in lines[-3:] if line.get(key) is not None]
        if values:
            figures[column] = statistics.median(values)
    return figures


def _lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "run/metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if "loss" in line]


def _weft(run: PartRun, words: Sequence[str]) -> float:
    """Seconds of the command, whose output goes into run.txt."""
    began = run.device.now()
    with (run.out / "run.txt").open("a") as log:
        log.write(f"\n==== weft {' '.join(words)}\n")
        log.flush()
        process = Popen(
            [sys.executable, "-m", "weft", *words], stdout=log, stderr=STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        _end(process, run.left, "run.txt")
    return run.device.now() - began


def _end(process: Popen[bytes], limit: float, log: str) -> None:
    try:
        status = process.wait(max(1.0, limit))
    except TimeoutExpired:
        process.terminate()
        try:
            process.wait(10.0)
        except TimeoutExpired:
            process.kill()
            process.wait()
        raise RuntimeError(f"stopped after {limit:.0f} s; see {log}") from None
    assert status == 0, f"it ended with {status}; see {log}"


# ---------------------------------------------------------------- two ranks


@dataclass(frozen=True)
class Pair:
    """A mesh of two ranks, and the shape of its model."""

    name: str
    mesh: MeshConfig
    shape: str


PAIRS = (
    Pair("fsdp 2", MeshConfig(dp_shard=2), "0.6b"),
    Pair("tp 2", MeshConfig(dp_shard=1, tp=2), "0.6b"),
    Pair("pp 2", MeshConfig(dp_shard=1, pp=2), "0.6b"),
    Pair("cp 2", MeshConfig(dp_shard=1, cp=2), "0.6b"),
    Pair("ep 2", MeshConfig(dp_shard=2, ep=2), "30b-a3b"),
    Pair("hsdp 2", MeshConfig(dp_replicate=2, dp_shard=1), "0.6b"),
)
_LIMIT = 0.01  # relative difference that is a failure, in fp32


def two(run: PartRun) -> None:
    """Each mesh of PAIRS: first one rank, here, then two in processes of their own."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        single: dict[str, Row] = {}
        for shape in dict.fromkeys(pair.shape for pair in PAIRS):
            _write_weights(folder / shape, run, shape)
            single[shape] = measure_mesh(run.device.kind, folder / shape, MeshConfig(), run.tiny)
        rows = {pair.name: run.add(mesh=pair.name, model=pair.shape) for pair in PAIRS}
        leave()  # the ranks below have a group of their own
        failed = ""
        try:
            _launch(run, folder)
        except (AssertionError, RuntimeError) as error:
            failed = str(error)
        for pair in PAIRS:
            run.attempt(rows[pair.name], lambda: _compared(folder, pair, single[pair.shape], failed))  # noqa: B023


def _write_weights(folder: Path, run: PartRun, shape: str) -> None:
    """A checkpoint with values, of few layers and words: it is read by every rank."""
    changes: dict[str, Any] = {"vocab_size": run.pick(8192, 512), "num_hidden_layers": 4}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(shape, run.tiny) | changes))
    config = hf.read_config(str(folder))
    model = hf.build_random(config, dtype=torch.float32, attention="eager", seed=0)
    model.save_pretrained(folder)


def measure_mesh(device: Any, path: Path, mesh: MeshConfig, tiny: bool) -> Row:
    """Loss and gradient norm of a step in fp32, and tokens/s of steps in bf16. Collective over the ranks of `mesh`."""
    figures: Row = {}
    tokens, steps = (96, 2) if tiny else (8192, 4)
    ranks = join(device)
    for dtype in ("fp32", "bf16"):
        config = EngineConfig(
            model=ModelConfig(path=str(path)), mesh=mesh, step=StepConfig(max_tokens_per_device=tokens),
            fsdp=FsdpConfig(param_dtype=dtype),
        )  # fmt: skip
        engine = Engine(config, ranks)
        rows = rows_of(tokens, engine.built.config.vocab_size, 8)
        step, seconds = step_with_norm(engine), list[float]()
        for number in range(1 if dtype == "fp32" else steps):
            began = _clock(ranks.device)
            loss, norm = step([*rows[2 * number], *rows[2 * number + 1]])
            seconds.append(_clock(ranks.device) - began)
            if number == 0:
                figures |= {f"{dtype} loss": loss, f"{dtype} norm": norm}
        if dtype == "bf16":
            figures["tokens/s"] = 2 * tokens / statistics.median(seconds[1:])
        del engine, step
    return figures


def _clock(device: torch.device) -> float:
    from benchmarks.device import Device

    return Device(device.type).now()


def _launch(run: PartRun, folder: Path) -> None:
    port = free_port()
    with (run.out / "two.txt").open("w") as log:
        ranks = [
            Popen(
                [sys.executable, str(Path(__file__).resolve()), str(folder), run.device.kind, str(int(run.tiny))],
                stdout=log, stderr=STDOUT, env={**os.environ, **_rank_variables(rank, port), "PYTHONPATH": str(ROOT)},
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            for rank in ranks:
                _end(rank, run.left, "two.txt")
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()


def _rank_variables(rank: int, port: int) -> dict[str, str]:
    """torchrun's variables."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def _compared(folder: Path, pair: Pair, single: Row, failed: str) -> Row:
    path = folder / f"{pair.name}.json"
    assert path.exists(), f"nothing was measured: {failed}"
    measured = json.loads(path.read_text())
    if "note" in measured:
        return {"note": measured["note"]}
    deviations = {
        f"{dtype} {quantity}": abs(measured[f"{dtype} {quantity}"] - single[f"{dtype} {quantity}"])
        / single[f"{dtype} {quantity}"]
        for dtype in ("fp32", "bf16")
        for quantity in ("loss", "norm")
    }
    worst = max(deviations["fp32 loss"], deviations["fp32 norm"])
    note = {"note": f"failed: it differs by {worst:.1%} from one rank"} if worst > _LIMIT else {}
    return {
        **deviations,
        "tokens/s": measured["tokens/s"],
        "/ one rank": measured["tokens/s"] / single["tokens/s"],
        **note,
    }


def be_rank(folder: Path, device: str, tiny: bool) -> None:
    """Each mesh in turn; the first rank writes what it finds. A mesh that fails on both ranks is noted."""
    from benchmarks.gpu_rows import failure

    for pair in PAIRS:
        try:
            figures = measure_mesh(device, folder / pair.shape, pair.mesh, tiny)
        except Exception as error:
            figures = {"note": failure(error)}
        if os.environ["RANK"] == "0":
            (folder / f"{pair.name}.json").write_text(json.dumps(figures))
    leave()


if __name__ == "__main__":
    be_rank(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1")
