"""Loading, walking and exporting a made checkpoint: memory, bytes and speed, at 1, 2 and 4 ranks.

    python benchmarks/load.py                # 2 GB dense and 1 GB of experts; about 10 GB of disk and of memory
    python benchmarks/load.py --gigabytes 0.2
    python benchmarks/load.py --dcp          # from directories of torch.distributed.checkpoint (model.dcp_weights)

For every rank: anonymous memory (RssAnon, sampled) above what it was before loading, against 1.3 x its fp32 shard plus
the largest tensor; bytes asked of the disk, against 1.2 x size / ranks; that every box is bitwise the file's. Then the
rate of the export, beside that of a plain copy of the same files in the same minute, and of the walk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

ARCHITECTURES = {"dense": "Qwen3ForCausalLM", "experts": "Qwen3MoeForCausalLM"}


# ---------------------------------------------------------------- the checkpoint


def make_source(folder: Path, kind: str, gigabytes: float) -> None:
    """A Qwen3 or Qwen3-MoE of about this size in bf16 with random bytes for weights, in files of 500 MB."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3MoeConfig

    from weft.models import hf
    from weft.parallel.shards.layout import map_tensors

    common: dict[str, Any] = dict(
        vocab_size=50_000, hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=4,
        head_dim=128, tie_word_embeddings=False, architectures=[ARCHITECTURES[kind]],
    )  # fmt: skip
    layers = max(2, round((gigabytes * 1e9 / 2 - 102e6) / (15.7e6 if kind == "dense" else 16 * 3 * 1024 * 512 + 3.2e6)))
    if kind == "dense":
        config: Any = Qwen3Config(**common, num_hidden_layers=layers)
    else:
        config = Qwen3MoeConfig(
            **common, num_hidden_layers=layers, num_experts=16, moe_intermediate_size=512, num_experts_per_tok=2
        )
    config.save_pretrained(folder)
    meta = hf.build_meta(config, dtype=torch.bfloat16, attention="eager")
    shapes = {p.disk: torch.empty(p.shape, dtype=torch.bfloat16, device="meta") for p in map_tensors(meta, None)}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=5 * 10**8)
    generator = torch.Generator().manual_seed(0)
    for file, names in split.filename_to_tensors.items():
        save_file({n: torch.randn(shapes[n].shape, generator=generator).bfloat16() for n in names}, folder / file)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def save_as_dcp(folder: Path) -> None:
    """The same tensors as torch.distributed.checkpoint saves them, in FOLDER/dcp."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)


# ---------------------------------------------------------------- one rank


class LoadPeak(threading.Thread):
    """The largest anonymous memory of this process while it runs, above what it was at the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base, self.most, self.over = anonymous(), 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.002):
            self.most = max(self.most, anonymous() - self.base)

    def __enter__(self) -> LoadPeak:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.most = max(self.most, anonymous() - self.base)
        self.over.set()
        self.join()


def anonymous() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def rank(path: str, out: str, dp_replicate: int) -> None:
    from weft.checkpoint import export
    from weft.config.schema import FsdpConfig, MeshConfig, ModelConfig
    from weft.engine import builder
    from weft.engine.config import EngineConfig
    from weft.engine.engine import Engine
    from weft.launch.process import join
    from weft.parallel.shards.boxes import local_box
    from weft.parallel.shards.walker import check_stream, walk

    original, peaks = builder.fill_weights, []

    def measured(*arguments: Any, **options: Any) -> Any:
        with LoadPeak() as peak:
            report = original(*arguments, **options)
        peaks.append(peak.most)
        return report

    builder.fill_weights = measured
    config = EngineConfig(
        model=ModelConfig(path=path, dcp_weights=f"{path}/dcp" if Path(path, "dcp").exists() else None),
        mesh=MeshConfig(dp_replicate=dp_replicate), fsdp=FsdpConfig(param_dtype="fp32"),
        purpose="inference",
    )  # fmt: skip
    ranks = join("cpu")
    engine = Engine(config, ranks)
    assert engine.loaded is not None
    tensors = engine.module.state_dict(keep_vars=True)
    shard = sum(local_box(t)[1].nbytes for t in tensors.values())
    answer: dict[str, Any] = {
        "shard": shard, "largest": max(t.numel() * t.element_size() for t in tensors.values()), "memory": peaks[0],
        "read": engine.loaded.bytes_read, "seconds": engine.loaded.seconds,
    }  # fmt: skip
    manifest = export.manifest_of(engine)
    for bucket in (1 << 26,):
        dist.barrier()
        began = time.perf_counter()
        with LoadPeak() as peak:
            for _ in check_stream(
                walk(engine.local_tensors(), engine.built.mappings, manifest, engine.divided.cuts, bucket_bytes=bucket),
                manifest,
            ):
                pass
        answer |= {"walk_seconds": time.perf_counter() - began, "walk_memory": peak.most, "bucket": bucket}
    answer["exports"], answer["copies"] = [], []
    target = Path(out)
    for _ in range(3):
        if ranks.is_first:
            answer["copies"].append(copy_seconds(Path(path), target.with_name("copy")))
            shutil.rmtree(target, ignore_errors=True)  # replacing an older one would be timed too
        dist.barrier()
        began = time.perf_counter()
        with LoadPeak() as peak:
            export.save_huggingface(engine, target, shard_bytes=5 * 10**8)
        answer["exports"].append(time.perf_counter() - began)
        answer["export_memory"] = peak.most
    gathered: list[Any] = [None] * ranks.world
    dist.all_gather_object(gathered, answer)
    if ranks.is_first:
        print(json.dumps(gathered))
    ranks.__exit__(None, None, None)


def copy_seconds(source: Path, target: Path) -> float:
    """A plain copy of the weight files, on the disk when it ends, as the export is."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    began = time.perf_counter()
    for file in source.glob("*.safetensors"):
        with file.open("rb") as a, (target / file.name).open("wb") as b:
            shutil.copyfileobj(a, b, 1 << 24)
            b.flush()
            os.fsync(b.fileno())
    return time.perf_counter() - began


# ---------------------------------------------------------------- all of it


def same_files(a: Path, b: Path) -> bool:
    """Every tensor bitwise: what was loaded and exported unchanged is what was there."""
    from weft.parallel.shards.safetensors_files import TensorFile

    def entries(folder: Path) -> dict[str, TensorFile]:
        files = [TensorFile.open(file) for file in sorted(folder.glob("*.safetensors"))]
        return {name: file for file in files for name in file.entries}

    first, second = entries(a), entries(b)
    return first.keys() == second.keys() and all(torch.equal(first[n].read(n), second[n].read(n)) for n in first)


def measure(path: Path, work: Path, kind: str, ranks: int, dp_replicate: int) -> None:
    command = [sys.executable, __file__, "--rank", str(path), str(work / "saved"), str(dp_replicate)]
    if ranks > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *launch, *command[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    if not lines:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    answers = json.loads(lines[-1])
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    memory = max(a["memory"] / (1.3 * a["shard"] + a["largest"]) for a in answers)
    read = max(a["read"] * ranks / size for a in answers)
    ratios = [
        copy / max(times) for copy, *times in zip(answers[0]["copies"], *(a["exports"] for a in answers), strict=True)
    ]
    mesh = f"{dp_replicate} x {ranks // dp_replicate}" if dp_replicate > 1 else str(ranks)
    first = answers[0]
    print(
        f"| {kind}, {size / 1e9:.2f} GB | {mesh} | {memory:.2f} | {read:.2f} | "
        f"{first['read'] * ranks / max(a['seconds'] for a in answers) / 1e9:.2f} | "
        f"{size / max(a['walk_seconds'] for a in answers) / 1e9:.2f} | "
        f"{max(a['walk_memory'] for a in answers) / 2**20:.0f} | {statistics.median(ratios):.2f} | "
        f"{max(a['export_memory'] for a in answers) / 2**20:.0f} | "
        f"{'yes' if same_files(path, work / 'saved') else 'NO'} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the dense checkpoint; that of experts is half")
    parser.add_argument("--folder", help="where to work (default: a temporary folder)")
    parser.add_argument("--dcp", action="store_true", help="load from directories of torch.distributed.checkpoint")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return rank(arguments.rank[0], arguments.rank[1], int(arguments.rank[2]))
    print(f"- torch {torch.__version__}, {os.cpu_count()} cores\n")
    print("| checkpoint | ranks | memory / (1.3 shard + largest) | read x ranks / size | load GB/s | walk GB/s "
          "| walk extra MiB (bucket 64) | export rate / plain copy | export extra MiB | bitwise |")  # fmt: skip
    print("|" + "---|" * 10)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        for kind, share in (("dense", 1.0), ("experts", 0.5)):
            path = Path(work, kind)
            path.mkdir()
            make_source(path, kind, arguments.gigabytes * share)
            if arguments.dcp:
                save_as_dcp(path)
            for ranks, dp_replicate in ((1, 1), (2, 1), (4, 1), (4, 2)):
                measure(path, Path(work), kind, ranks, dp_replicate)
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
