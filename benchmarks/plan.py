"""Step plans of random steps: how even the ranks' work is, how full the rows, how long planning takes.

    python benchmarks/plan.py                  # some seconds

Lengths are log-normal (mean 400, sigma 1, at most 4096), 1 to 16 ranks, budgets from 4096 to 16384, costs those of a
0.6B model. bound / time: the bound is the larger of total / ranks and the dearest document, and knows no budgets.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from weft.engine.plan import DocumentMeta, StepPlan, document_cost, plan_step

LINEAR, QUADRATIC = 3.6e9, 344e3
BUDGETS = (4096, 6000, 8192, 12288, 16384)


def random_plan(seed: int, per_rank: tuple[int, int], layout: Literal["packed", "apart"]) -> tuple[StepPlan, float]:
    """(plan, milliseconds of processor time per 1000 documents)."""
    random = np.random.default_rng(seed)
    ranks = int(random.integers(1, 17))
    count = ranks * int(random.integers(*per_rank))
    lengths = np.clip(random.lognormal(np.log(400) - 0.5, 1.0, count), 1, 4096).astype(int).tolist()
    documents = [
        DocumentMeta(n, float(n), n, cost=document_cost(n, linear=LINEAR, quadratic=QUADRATIC)) for n in lengths
    ]
    start = time.process_time()
    plan = plan_step(documents, ranks=ranks, budget=int(random.choice(BUDGETS)), layout=layout)
    return plan, (time.process_time() - start) * 1e3 / count * 1e3


def bound_over_time(plan: StepPlan) -> float:
    return max(plan.totals.cost / plan.ranks, max(d.cost for d in plan.documents)) / plan.time


def extra_micro_batches(plan: StepPlan) -> int:
    return plan.micro_batches + (-plan.totals.tokens // (plan.budget * plan.ranks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=200)
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
    for layout in ("packed", "apart"):
        for per_rank in ((1, 8), (8, 32), (32, 128)):
            results = [random_plan(seed, per_rank, layout) for seed in range(options.plans)]
            plans = [plan for plan, _ in results]
            times = [taken for _, taken in results]
            bounds = [bound_over_time(plan) for plan in plans]
            print(
                f"| {layout} | {per_rank[0]}-{per_rank[1] - 1} | {np.median(bounds):.3f}, {min(bounds):.3f} "
                f"| {np.median([plan.utilisation for plan in plans]):.3f} "
                f"| {np.median([plan.fill for plan in plans]):.3f} "
                f"| {max(extra_micro_batches(plan) for plan in plans)} "
                f"| {np.median(times):.1f}, {max(times):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
