"""Step plans of random steps: how even the ranks' work is, how full the rows, how long planning takes. Then a step of
4096 documents on 8 simulated ranks: what one rank does between two steps, or beside one.

    python benchmarks/plan.py                  # a minute

Lengths are log-normal (mean 400, sigma 1, at most 4096), 1 to 16 ranks, budgets from 4096 to 16384, costs those of a
0.6B model. bound / time: the bound is the larger of total / ranks and the dearest document, and knows no budgets.

The step is laid out in two ways, each in processes of its own that take turns: `all documents` builds each document to
measure it, as weft did before; `own documents` plans from the table's lengths and weights and builds what the rank
needs. Both end with the rank's rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from weft.data.documents import Documents
from weft.data.limits import Limits
from weft.data.order import SourceShare
from weft.data.table import Chunk, in_memory
from weft.engine.batch.document import Costs, Document, DocumentMeta, choose, document_metadata, omitted_tokens, take
from weft.engine.batch.rows import build_row
from weft.engine.step_plan.plan import StepPlan, plan_step
from weft.models.flops import AttentionFacts, FlopFacts, document_flops
from weft.observe.profiling import own_peak_memory_gib

LINEAR, QUADRATIC = 3.6e9, 344e3
BUDGETS = (4096, 6000, 8192, 12288, 16384)
STEP, RANKS, ROW = 4096, 8, 16384
FACTS = FlopFacts(dense=600_000_000, attention=(AttentionFacts(16, 128),) * 28)  # of a 0.6B model
WAYS = ("all documents", "own documents")


def random_plan(seed: int, per_rank: tuple[int, int], layout: Literal["packed", "padded"]) -> tuple[StepPlan, float]:
    """(plan, milliseconds of processor time per 1000 documents)."""
    random = np.random.default_rng(seed)
    ranks = int(random.integers(1, 17))
    count = ranks * int(random.integers(*per_rank))
    lengths = np.clip(random.lognormal(np.log(400) - 0.5, 1.0, count), 1, 4096).astype(int).tolist()
    documents = [DocumentMeta(n, float(n), n, cost=LINEAR * n + QUADRATIC * n * n) for n in lengths]
    start = time.process_time()
    plan = plan_step(documents, ranks=ranks, budget=int(random.choice(BUDGETS)), layout=layout)
    return plan, (time.process_time() - start) * 1e3 / count * 1e3


def bound_over_time(plan: StepPlan) -> float:
    return max(plan.totals.cost / plan.ranks, max(d.cost for d in plan.documents)) / plan.time


def extra_micro_batches(plan: StepPlan) -> int:
    return plan.micro_batches + (-plan.totals.tokens // (plan.budget * plan.ranks))


# ---------------------------------------------------------------- a step of many documents


def table(count: int) -> Documents:
    """Documents of random tokens, half of them trained."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(400) - 0.5, 1.0, count), 2, 4096).astype(np.int32)
    starts = np.cumsum(lengths) - lengths
    ids = random.integers(0, 100_000, int(lengths.sum()), np.int32)
    trained = random.integers(0, 2, len(ids)).astype(np.uint8)
    losses = (np.add.reduceat(trained, starts, dtype=np.int64) - trained[starts]).astype(np.int32)
    none = np.zeros(count, np.int64)
    chunk = Chunk(
        ids, trained, lengths, losses, numbers=np.arange(count), formats=none.astype(np.uint8), patches=none,
        pairs=none, reaches=none, images=none, videos=none, roles=none.astype(np.uint8),
        margins=none.astype(np.float32), commons=none, teachers=none, widths=none, top_ids=none[:0],
        top_logprobs=none[:0], places=np.zeros(0, np.uint8), sizes=none[:0],
    )  # fmt: skip
    piece = Limits(4096).select(in_memory("data.jsonl", True, [chunk]), "")
    return Documents([piece], [SourceShare(count)])


def lay_out(documents: Documents, count: int, rank: int, way: str) -> tuple[int, int, float, float]:
    """Of the first `count`: (documents built, tokens in this rank's rows, CPU seconds to the plan, in all)."""

    def omitted(length: int) -> int:
        return omitted_tokens(length, read_all=False)

    def no_images(patches: int, pairs: int) -> tuple[float, int]:
        return 0.0, 0

    began, indices = time.process_time(), range(count)
    if way == "own documents":
        cost = cache(lambda length: document_flops(FACTS, length))
        chosen = choose(documents, indices)
        metadata = document_metadata(chosen, Costs(omitted, cost, no_images))
    else:
        built = [documents[index] for index in indices]
        metadata = document_metadata(built, Costs(omitted, lambda length: document_flops(FACTS, length), no_images))
    plan = plan_step(metadata, ranks=RANKS, budget=ROW)
    planned = time.process_time() - began
    needed = sorted(index for row in plan.rows_of_rank(rank) for index in row)
    documents_needed: dict[int, Document] = take(chosen if way == "own documents" else built, needed)
    rows = [
        build_row(
            row, documents_needed, read=[plan.documents[index].read for index in row],
            length=plan.row_length(micro, rank),
            layout="packed", every_token=False,
        )
        for micro, row in enumerate(plan.rows_of_rank(rank))
    ]  # fmt: skip
    built_count = len(needed) if way == "own documents" else len(built)
    return built_count, sum(row.real_tokens for row in rows), planned, time.process_time() - began


def measure(rank: int, way: str, answers: multiprocessing.SimpleQueue[tuple[int, int, float, float, float]]) -> None:
    """In a process of its own: what lay_out says, and by how many MiB memory rose at most."""
    torch.set_num_threads(1)
    documents = table(4 * STEP)
    lay_out(documents, RANKS, rank, way)  # warms up
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    counted = lay_out(documents, STEP, rank, way)
    answers.put((*counted, own_peak_memory_gib(torch.device("cpu")) * 1024 - before / 2**20))


def large_step(repeats: int) -> None:
    """A line for each way."""
    context = multiprocessing.get_context("spawn")
    results: dict[str, list[tuple[int, int, float, float, float]]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        for way in WAYS:
            answers: multiprocessing.SimpleQueue[tuple[int, int, float, float, float]] = context.SimpleQueue()
            process = context.Process(target=measure, args=(repeat % RANKS, way, answers))
            process.start()
            results[way].append(answers.get())
            process.join()
    columns = (
        "a rank lays out",
        "documents built",
        "tokens in its rows",
        "plan, ms",
        "plan and rows, ms",
        "memory, MiB",
    )
    print(f"\nA step of {STEP} documents on {RANKS} simulated ranks; medians of {repeats} ranks\n")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for way, lines in results.items():
        built, tokens, planned, seconds, memory = (float(np.median(column)) for column in zip(*lines, strict=True))
        print(
            f"| {way} | {built:.0f} | {tokens:,.0f} | {1e3 * planned:.0f} | {1e3 * seconds:.0f} | {memory:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=RANKS, help="ranks that lay out the large step")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, numpy {np.__version__}, {options.plans} plans a line\n")
    columns = (
        "layout",
        "documents / rank",
        "bound / time: median, worst",
        "utilisation",
        "fill",
        "most micro-batches over tokens / budget / ranks",
        "ms / 1000 documents: median, worst",
    )
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for layout in ("packed", "padded"):
        for per_rank in ((1, 8), (8, 32), (32, 128)):
            results = [random_plan(seed, per_rank, layout) for seed in range(options.plans)]
            plans = [plan for plan, _ in results]
            times = [duration for _, duration in results]
            bounds = [bound_over_time(plan) for plan in plans]
            print(
                f"| {layout} | {per_rank[0]}-{per_rank[1] - 1} | {np.median(bounds):.3f}, {min(bounds):.3f} "
                f"| {np.median([plan.utilisation for plan in plans]):.3f} "
                f"| {np.median([plan.fill for plan in plans]):.3f} "
                f"| {max(extra_micro_batches(plan) for plan in plans)} "
                f"| {np.median(times):.1f}, {max(times):.1f} |",
                flush=True,
            )
    large_step(options.repeats)


if __name__ == "__main__":
    main()
