"""One contestant of benchmarks/sft.py, in this process or in the ranks that torchrun started: weft or a bare loop.

    python benchmarks/sft_run.py weft SPEC.json

Prints one line of JSON on rank 0: tokens, seconds and loss of each step, warm-up included; the FLOPs of the steps, and
the rate of torch's matrix products of the model's shapes, measured after them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Spec = dict[str, Any]
Step = Callable[[], tuple[int, float, float]]  # takes one step: its tokens over all ranks, its loss, its FLOPs

IGNORED = -100


def weft_steps(spec: Spec) -> Iterator[Step]:
    """weft's Engine, called as its recipe calls it."""
    from weft.config.schema import ModelConfig, OptimizerConfig, StepConfig
    from weft.engine.batch.document import Document
    from weft.engine.batch.rows import StepRows
    from weft.engine.config import EngineConfig
    from weft.engine.engine import Engine
    from weft.engine.losses.base import CrossEntropy
    from weft.engine.prefetch import prefetch
    from weft.engine.step_plan.plan import StepPlan
    from weft.launch.process import join

    rule = spec["optimizer"]
    optimizer = OptimizerConfig(
        lr=rule["lr"], weight_decay=rule["weight_decay"], betas=tuple(rule["betas"]), max_grad_norm=rule["clip"]
    )
    config = EngineConfig(model=ModelConfig(path=spec["model"]), step=StepConfig(**spec["weft"]), optimizer=optimizer)
    engine = Engine(config, join("cpu"))
    objective = CrossEntropy()
    documents = [Document(torch.tensor(d["ids"]), torch.tensor(d["trained"]).float()) for d in spec["documents"]]

    def lay_out(indices: list[int]) -> tuple[StepPlan, StepRows]:
        plan, local = engine.plan_step([documents[i] for i in indices])
        return plan, engine.rows(plan, local, objective).ahead()

    def step(laid_out: Future[tuple[StepPlan, StepRows]]) -> tuple[int, float, float]:
        plan, rows = laid_out.result()
        metrics = engine.accumulate(plan, rows, objective)
        engine.apply(rule["lr"])
        assert metrics["loss"] is not None
        return plan.totals.tokens, metrics["loss"], plan.totals.cost

    for _, laid_out in prefetch(spec["steps"], lay_out):
        yield lambda laid_out=laid_out: step(laid_out)  # type: ignore[misc]


def bare_steps(spec: Spec) -> Iterator[Step]:
    """What one writes without a library: documents end to end, cut into full rows, which see one another.

    Under torchrun each rank takes its share of the rows and the model is cut by FSDP2, layer by layer.
    """
    rank, world = _join()
    model, optimizer = bare_model(spec, sharded=world > 1)
    ids, labels = full_rows(spec)
    per_step, per_forward = spec["bare"]["rows_per_step"], spec["bare"]["rows_per_forward"]

    def step(start: int) -> tuple[int, float, float]:
        rows = slice(start, start + per_step)
        count = (labels[rows] != IGNORED).sum()
        total = torch.zeros(())
        forwards = range(start + rank, start + per_step, world * per_forward)
        for first in forwards:
            own_rows = slice(first, min(first + world * per_forward, start + per_step), world)
            logits = model(input_ids=ids[own_rows], use_cache=False).logits
            loss = F.cross_entropy(
                logits.flatten(0, 1), labels[own_rows].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            # FSDP2 averages over the ranks.
            (loss * (world / count)).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), spec["optimizer"]["clip"])
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.all_reduce(total)
        return per_step * ids.shape[1], (total / count).item(), 0.0

    for number in range(len(ids) // per_step):
        yield lambda start=number * per_step: step(start)  # type: ignore[misc]


def _join() -> tuple[int, int]:
    if not dist.is_torchelastic_launched():
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def bare_model(spec: Spec, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    rule = spec["optimizer"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rule["lr"], betas=rule["betas"], weight_decay=rule["weight_decay"], fused=True
    )
    return model, optimizer


def full_rows(spec: Spec) -> tuple[Tensor, Tensor]:
    """(ids, labels), [rows, row]; labels are shifted, and those that are not trained are left out of the loss."""
    documents = [spec["documents"][i] for step in spec["steps"] for i in step]
    ids = torch.tensor([token for d in documents for token in d["ids"]])
    # The first token of a document has no prediction, as in the other contestants.
    trained = torch.tensor(
        [bool(flag) and position > 0 for d in documents for position, flag in enumerate(d["trained"])]
    )
    labels = torch.where(trained, ids, IGNORED)
    row = spec["bare"]["row"]
    count = len(ids) // row
    ids, labels = ids[: count * row].view(count, row), labels[: count * row].view(count, row)
    return ids, F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def matmul_rate(spec: Spec, tokens: int = 4096) -> float:
    """FLOPs/s of the products of the model's forward and backward, each at its best of five."""
    config = json.loads((Path(spec["model"]) / "config.json").read_text())
    hidden, inner, vocabulary = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, keys = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    layer = [(hidden, heads), (hidden, keys), (hidden, keys), (heads, hidden)]
    layer += [(hidden, inner), (hidden, inner), (inner, hidden)]
    seconds = flops = 0.0
    for inputs, outputs in [*layer * config["num_hidden_layers"], (hidden, vocabulary)]:
        x, weight, gradient = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
        for a, b in ((x, weight.T), (gradient, weight), (gradient.T, x)):
            seconds += min(_seconds(a, b) for _ in range(5))
            flops += 2.0 * tokens * inputs * outputs
    return flops / seconds


def _seconds(a: Tensor, b: Tensor) -> float:
    began = time.perf_counter()
    a @ b
    return time.perf_counter() - began


def main() -> None:
    name, path = sys.argv[1:]
    spec = json.loads(Path(path).read_text())
    answer: dict[str, Any] = {"tokens": [], "seconds": [], "losses": [], "flops": []}
    for step in {"weft": weft_steps, "bare": bare_steps}[name](spec):
        began = time.perf_counter()
        tokens, loss, flops = step()
        answer["seconds"].append(time.perf_counter() - began)
        answer["tokens"].append(tokens)
        answer["losses"].append(loss)
        answer["flops"].append(flops)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        answer["matmul"] = matmul_rate(spec)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(answer))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
