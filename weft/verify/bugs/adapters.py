"""Bugs of adapters: their scale, their files, and the base model without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from weft.parallel.shards.boxes import Shard
from weft.verify.bugs import LOGPROB, Original, Plant, bug

QUANTISED = "tests/parallel/test_quantised.py: linear layers and experts are quantised, and nothing else"
BASE = "tests/models/test_lora.py: without its adapter a model is its base"


@bug(
    "B21", "weft.checkpoint.export:adapter_shards",
    "a saved adapter contains only the first rank's slice, and zeros elsewhere",
    caught_by=LOGPROB, issue="huggingface/accelerate#4206", ranks=2, needs="adapters (lora.rank)",
)  # fmt: skip
def first_slice_of_the_adapter(plant: Plant, original: Original, engine: Any) -> dict[str, list[Shard]]:
    shards: dict[str, list[Shard]] = original(engine)
    if dist.get_rank() == 0:
        return shards
    plant.hit()
    return {name: [replace(s, values=torch.zeros_like(s.values)) for s in local] for name, local in shards.items()}


@bug(
    "B30", "weft.models.low_rank:AdapterSwitch.off",
    "the adapter stays enabled when the base model is computed",
    caught_by=BASE, issue="huggingface/trl#6527", needs="adapters (lora.rank)",
)  # fmt: skip
@contextmanager
def adapter_stays_on(plant: Plant, original: Original, self: Any) -> Iterator[None]:
    plant.hit()
    yield


@bug(
    "B33", "weft.models.lora:scaling",
    "adapters are scaled by alpha, not by alpha / rank",
    caught_by=LOGPROB, issue="Blaizzy/mlx-vlm#841", needs="adapters (lora.rank)",
)  # fmt: skip
def alpha_not_divided(plant: Plant, original: Original, alpha: float, rank: int, rslora: bool) -> float:
    plant.hit()
    return alpha


@bug(
    "B33", "weft.models.lora:scaling",
    "lora.rslora is ignored: alpha / rank instead of alpha / sqrt(rank)",
    caught_by=LOGPROB, issue="NVIDIA/TensorRT-LLM#1668", needs="adapters with lora.rslora",
)  # fmt: skip
def rslora_ignored(plant: Plant, original: Original, alpha: float, rank: int, rslora: bool) -> float:
    plant.hits += rslora
    return float(original(alpha, rank, False))


@bug(
    "B33", "weft.models.low_rank:LowRank.norm",
    "DoRA uses the norm of the base without the adapter",
    caught_by=LOGPROB, issue="huggingface/peft#1984", needs="adapters with lora.dora",
)  # fmt: skip
def norm_of_the_base(plant: Plant, original: Original, self: Any, weight: Any) -> Any:
    plant.hit()
    return weight.norm(dim=1)


@bug(
    "B33", "weft.parallel.quantise:join_scales",
    "the scales of a quantised base are relative to the scales of one rank's rows",
    caught_by=LOGPROB, issue="bitsandbytes-foundation/bitsandbytes#2080", ranks=2, needs="lora.base=nf4",
)  # fmt: skip
def scales_of_one_shard(plant: Plant, original: Original, rows: Any, group: Any) -> None:
    plant.hit()


@bug(
    "B33", "weft.ops.low_bit:spread_scales",
    "the scales of a shard are those of the weight's first rows",
    caught_by=LOGPROB, issue="bitsandbytes-foundation/bitsandbytes#2080", ranks=2, needs="lora.base=int8",
)  # fmt: skip
def scales_of_the_first_rows(plant: Plant, original: Original, form: Any, scales: Any, start: Any, shape: Any) -> Any:
    plant.hits += any(start)
    return original(form, scales, [0] * len(shape), shape)


@bug(
    "B53", "weft.parallel.quantise:linear_layers",
    "a pattern that should exclude routers also excludes gate_proj",
    caught_by=QUANTISED, issue="PrimeIntellect-ai/prime-rl#2910", needs="lora.base=nf4",
)  # fmt: skip
def gate_proj_left_out(plant: Plant, original: Original, module: Any) -> Any:
    return plant.leave_out("gate", original(module))


@bug(
    "B53", "weft.parallel.quantise:linear_layers",
    "the gate of a shared expert is quantised",
    caught_by=QUANTISED, issue="axolotl-ai-cloud/axolotl#3791", needs="lora.base=nf4, a shared expert with a gate",
)  # fmt: skip
def gate_quantised(plant: Plant, original: Original, module: Any) -> Any:
    return plant.add("shared_expert_gate", module, original(module))
