"""A layer of experts for benchmarks/gpu.py: weft's and transformers' forward, grouped products alone, and dense ones of
as many FLOPs; with experts that get no tokens, whose gradients have to be zero."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_rows import PartRun, Row
from benchmarks.gpu_sft import config_of
from weft.models import hf
from weft.models.experts import find_experts, use_experts_forward
from weft.ops.dispatch import sort_by_expert

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def moe(run: PartRun) -> None:
    """Rows for each way to compute it, with all experts in use and with a third of them empty."""
    experts = _experts(run)
    count, chosen = experts.num_experts, experts.config.num_experts_per_tok
    tokens, width = run.pick(8192, 64), experts.gate_up_proj.shape[2]
    hidden = torch.randn(tokens, width, device=run.device.kind, dtype=torch.bfloat16).requires_grad_()
    # The first, some in the middle, and the last: 40 of 128.
    part = max(1, count * 13 // 128)
    empty = [*range(part), *range(count - part - count // 128, count), *range(count // 2, count // 2 + part)]
    empty = empty[: count - chosen]
    inner = experts.down_proj.shape[2]
    flops = 18.0 * tokens * chosen * width * inner
    dense = run.add(what="dense products")
    run.attempt(dense, lambda: _rates(run, _dense(run, tokens * chosen, width, inner), flops))
    for without in ([], empty):
        routes = _routes(run, tokens, count, chosen, without)
        run.attempt(
            run.add(what="grouped products alone", empty=len(without)),
            lambda: _against(_rates(run, _grouped(run, experts, routes, width, inner), flops), dense),  # noqa: B023
        )
    for name in ("transformers' experts", "weft's experts"):
        if name.startswith("weft"):
            use_experts_forward(experts)
        for without in ([], empty):
            routes = _routes(run, tokens, count, chosen, without)
            row = run.add(what=name, empty=len(without))
            run.attempt(row, lambda: _against(_layer(run, experts, hidden, routes, without, flops), dense))  # noqa: B023


def _experts(run: PartRun) -> Any:
    """The experts of one layer of 30B-A3B, with random weights in bf16."""
    with TemporaryDirectory() as folder:
        config = config_of("30b-a3b", run.tiny, 1) | {"vocab_size": 512, "bos_token_id": None, "eos_token_id": 1}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = hf.build_meta(hf.read_config(folder), dtype=torch.bfloat16, attention="eager")
    (experts,) = find_experts(model).values()
    experts.to_empty(device=run.device.kind)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0.0, 0.02)
    return experts


def _routes(run: PartRun, tokens: int, count: int, chosen: int, empty: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(Chosen experts [T, K], none of them in `empty`, and their weights [T, K])."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(tokens, count, generator=generator)
    scores[:, list(empty)] = -1.0
    weights, indices = scores.topk(chosen)
    return indices.to(run.device.kind), weights.softmax(1).to(run.device.kind, torch.bfloat16)


def _layer(
    run: PartRun, experts: Any, hidden: Tensor, routes: tuple[Tensor, Tensor], empty: Sequence[int], flops: float
) -> Row:
    chosen, weights = routes

    def step() -> None:
        experts.zero_grad(set_to_none=True)
        hidden.grad = None
        out = experts(hidden, chosen, weights)
        out.sum().backward()

    step()
    waits = _waits(run, step)
    row = _rates(run, step, flops) | {"waits": waits}
    for name, parameter in experts.named_parameters():
        of_expert = parameter.grad.flatten(1).abs().amax(1)
        used = [n for n in range(len(of_expert)) if n not in empty]
        assert bool(of_expert.isfinite().all()), f"the gradient of {name} is not finite"
        assert not bool(of_expert[list(empty)].any()), f"the gradient of {name} of experts without tokens is not 0"
        assert bool(of_expert[used].all()), f"the gradient of {name} is 0 for an expert with tokens"
    return row


def _waits(run: PartRun, step: Callable[[], None]) -> int | None:
    """How often the host waits for the device in a step; None on a CPU."""
    if not run.device.cuda:
        return None
    run.device.now()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def _grouped(run: PartRun, experts: Any, routes: tuple[Tensor, Tensor], width: int, inner: int) -> Callable[[], None]:
    """Both projections over rows that are sorted already, forward and backward."""
    order, ends = sort_by_expert(routes[0], experts.num_experts)
    rows = torch.randn(len(order), width, device=run.device.kind, dtype=torch.bfloat16).requires_grad_()
    between = torch.randn(len(order), inner, device=run.device.kind, dtype=torch.bfloat16).requires_grad_()
    up, down = experts.gate_up_proj.transpose(1, 2), experts.down_proj.transpose(1, 2)

    def step() -> None:
        for x, weight in ((rows, up), (between, down)):
            out = F.grouped_mm(x, weight, offs=ends)
            torch.autograd.grad(out, (x, weight), out.detach())

    return step


def _dense(run: PartRun, rows: int, width: int, inner: int) -> Callable[[], None]:
    shapes = ((rows, width, 2 * inner), (rows, inner, width))
    factory: dict[str, Any] = {"device": run.device.kind, "dtype": torch.bfloat16}
    pairs = [(torch.randn(m, k, **factory), torch.randn(k, n, **factory)) for m, k, n in shapes]

    def step() -> None:
        for a, b in pairs:
            out = a @ b
            _ = out @ b.T
            _ = a.T @ out

    return step


def _rates(run: PartRun, step: Callable[[], None], flops: float) -> Row:
    seconds = run.device.seconds(step, runs=5, warm=2)
    return {"ms": seconds * 1e3, "TFLOP/s": flops / seconds / 1e12}


def _against(row: Row, dense: Row) -> Row:
    return row | ({"/ dense": row["ms"] / dense["ms"]} if "ms" in dense else {})
