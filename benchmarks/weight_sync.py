"""The rate of weight sync to an engine in another process, beside that of a plain copy of the same bytes.

    python benchmarks/weight_sync.py                     # 1 GB of fp32 weights; about 6 GB of memory, a few minutes
    python benchmarks/weight_sync.py --gigabytes 0.1 --syncs 4
    python benchmarks/weight_sync.py --ranks 1 --transport shared --bucket-mb 24 48 96 128

One and two trainer ranks and one standalone engine on CPU, one thread each, by each transport. The first sync also
makes what stays; the first and the last compare checksums at both ends. A plain copy is one thread's, between two
buffers that were touched before, and is measured between the syncs by the first rank. `bare`: as many bare processes
that copy into shared memory, in buckets of that size, as there are ranks, and one that copies out of it: what memory
and cores carry.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig

from weft.config.schema import MeshConfig, ModelConfig, StepConfig
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.inference.standalone import Standalone
from weft.inference.weight_sync.protocol import Ticket
from weft.inference.weight_sync.sender import EngineTarget, Sender, SyncOptions
from weft.inference.weight_sync.transports import SLOTS
from weft.launch.machine import free_port
from weft.launch.process import join

GB, KEY = 1e9, "benchmark"
BARE_ROUNDS = 8


def make_config(folder: Path, gigabytes: float) -> None:
    layers = max(1, round((gigabytes * GB / 4 - 32.8e6) / 12.6e6))
    LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=8,
        vocab_size=16_000, tie_word_embeddings=False, architectures=["LlamaForCausalLM"], dtype="float32",
    ).save_pretrained(folder)  # fmt: skip


def train(rank: int, world: int, folder: str, options: SyncOptions, port: int, syncs: int, results: Any) -> None:
    """A trainer rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store-{port}", world), rank=rank, world_size=world)
    config = EngineConfig(
        model=ModelConfig(path=folder, init="random"), mesh=MeshConfig(), step=StepConfig(max_tokens_per_device=64),
        purpose="inference",
    )  # fmt: skip
    with join("cpu") as ranks:
        engine = Engine(config, ranks)
        sender = Sender(engine, [EngineTarget("engine-0")], options, port=port, key=KEY)
        source = torch.ones(1 << 27) if rank == 0 else torch.ones(1)
        target = torch.ones_like(source)
        seconds, copies = [], []
        for version in range(1, syncs + 1):
            synced = sender.send(version)
            seconds.append(synced.seconds)
            began = time.perf_counter()
            target.copy_(source)
            copies.append(source.nbytes / (time.perf_counter() - began))
            dist.barrier()
        if rank == 0:
            results.put((synced.bytes, seconds, copies))
        sender.close()
    dist.destroy_process_group()


def receive(folder: str, port: int, syncs: int) -> None:
    """The engine."""
    torch.set_num_threads(1)
    engine = Standalone(folder, dtype=torch.float32)
    for version in range(1, syncs + 1):
        engine.receive(Ticket("127.0.0.1", port, KEY, "engine-0", 0, 300.0), version)


def measure(folder: str, world: int, options: SyncOptions, syncs: int) -> tuple[int, list[float], list[float]]:
    """(bytes, seconds of each sync, bytes per second of plain copies)."""
    port = free_port()
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=train, args=(rank, world, folder, options, port, syncs, results))
        for rank in range(world)
    ]
    engine = context.Process(target=receive, args=(folder, port, syncs))
    for process in (*ranks, engine):
        process.start()
    measured: tuple[int, list[float], list[float]] = results.get(timeout=1200)
    for process in (*ranks, engine):
        process.join()
    return measured


def copy_in(sock: socket.socket, path: str, rank: int, world: int, piece: int, count: int, results: Any) -> None:
    """A bare process in place of a trainer rank: its share of every bucket, as soon as the slot is taken."""
    torch.set_num_threads(1)
    slots = torch.from_file(path, shared=True, size=SLOTS * piece, dtype=torch.uint8).view(SLOTS, world, -1)
    source, seconds = torch.ones(count, slots.shape[2], dtype=torch.uint8), []
    for _ in range(BARE_ROUNDS):
        sock.recv(1)
        began = time.perf_counter()
        for number in range(count):
            if number >= SLOTS:
                sock.recv(1)
            slots[number % SLOTS, rank].copy_(source[number])
            sock.send(b"w")
        for _ in range(min(SLOTS, count)):
            sock.recv(1)
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        results.put(median(seconds))


def copy_out(socks: list[socket.socket], path: str, piece: int, count: int) -> None:
    """A bare process in place of the engine."""
    torch.set_num_threads(1)
    slots = torch.from_file(path, shared=True, size=SLOTS * piece, dtype=torch.uint8).view(SLOTS, -1)
    target = torch.ones(count, piece, dtype=torch.uint8)
    for _ in range(BARE_ROUNDS):
        for sock in socks:
            sock.send(b"r")
        for number in range(count):
            for sock in socks:
                sock.recv(1)
            target[number].copy_(slots[number % SLOTS])
            for sock in socks:
                sock.send(b"t")


def bare(world: int, total: int, bucket_bytes: int) -> float:
    """Bytes per second of the bare processes."""
    piece = bucket_bytes // SLOTS // 4096 * 4096
    context, count = mp.get_context("fork"), max(1, total // piece)
    results, pairs = context.Queue(), [socket.socketpair() for _ in range(world)]
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="weft-bench-") as file:
        os.truncate(file.name, SLOTS * piece)
        processes = [
            context.Process(target=copy_in, args=(pairs[rank][0], file.name, rank, world, piece, count, results))
            for rank in range(world)
        ]
        processes.append(context.Process(target=copy_out, args=([end for _, end in pairs], file.name, piece, count)))
        for process in processes:
            process.start()
        seconds: float = results.get(timeout=300)
        for process in processes:
            process.join()
    return count * piece / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--syncs", type=int, default=10, help="of each, at least 3")
    parser.add_argument("--bucket-mb", type=int, nargs="+", default=[192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--transport", nargs="+", default=["shared", "group", "files"])
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; load {os.getloadavg()[0]:.1f}\n")
    print(
        "| ranks | transport | bucket_mb | GB | first, s | with checksums, s | median, s | GB/s | copy | bare "
        "| of copy | of bare |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="weft-sync-bench-") as folder:
        make_config(Path(folder), options.gigabytes)
        for world, transport, bucket in product(options.ranks, options.transport, options.bucket_mb):
            sync_options = SyncOptions(transport, bucket * 10**6, options.syncs, 300.0, Path(folder) / "sync")
            total, seconds, copies = measure(folder, world, sync_options, options.syncs)
            rate, copy = total / median(seconds[1:-1]), median(copies)
            floor = bare(world, total, bucket * 10**6)
            print(
                f"| {world} | {transport} | {bucket} | {total / GB:.2f} | {seconds[0]:.2f} | {seconds[-1]:.3f} "
                f"| {median(seconds[1:-1]):.3f} | {rate / GB:.2f} | {copy / GB:.2f} | {floor / GB:.2f} "
                f"| {rate / copy:.2f} | {rate / floor:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
