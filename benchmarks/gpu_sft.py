"""Steps of supervised fine-tuning for benchmarks/gpu.py: weft's Engine beside a bare PyTorch loop, on random Qwen3.

The bare loop is what one would write by hand for one device: transformers' model in the compute dtype, called with the
same attention kernel on the same packed rows; F.cross_entropy on the logits of an eighth of a row at a time, computed
again in backward; fp32 masters that fused AdamW steps, a few hundred million elements at a time, after clipping the
(bf16) gradients; the new weights are copied back.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.device import Device, matmul_rate
from benchmarks.gpu_rows import PartRun, Row
from weft.config.recompute import RecomputePolicy, RecomputeSetting, policy_of
from weft.config.schema import FsdpConfig, LoraConfig, ModelConfig, StepConfig
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.launch.process import join
from weft.models import hf
from weft.models.flops import FlopFacts, document_flops
from weft.ops.attention_call import BOUNDS_ARGUMENT, Bounds
from weft.parallel.mesh import local_shard
from weft.parallel.shards.layout import map_tensors

EXAMPLES = Path(__file__).resolve().parent.parent / "examples/models"
# Name -> a config of the examples, and what differs from it.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.6b": ("Qwen3-0.6B", {}),
    "4b": ("Qwen3-4B", {}),
    "30b-a3b": ("Qwen3-30B-A3B", {}),
}
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 512, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WARM_UP, STEPS = 3, 4
LR = 1e-5
GIB = 2**30
_USABLE = 0.97  # of a device's memory: the rest is fragments
_LOSS_CHUNKS = 8  # of a row, in the bare loop
_CHUNK = 2**28  # elements that the bare loop's optimizer steps at once

Step = Callable[[list[Tensor]], float | Tensor]  # takes the documents of a row; the loss


# ---------------------------------------------------------------- models


def config_of(shape: str, tiny: bool, layers: int | None = None) -> dict[str, Any]:
    """A config.json."""
    name, changes = SHAPES[shape]
    config = json.loads((EXAMPLES / name / "config.json").read_text()) | changes
    if tiny:
        config |= TINY | (TINY_EXPERTS if "num_experts" in config else {})
    return config | ({} if layers is None else {"num_hidden_layers": layers})


def write_model(folder: Path, config: dict[str, Any]) -> str:
    """A directory with this config and a file of weights that says what is in it and holds nothing: random ones drawn
    on the CPU, or read from a disk, would take longer than all the rest."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = hf.build_meta(hf.read_config(str(folder)), dtype=torch.bfloat16, attention="eager")
    header, end = {}, 0
    for piece in map_tensors(model, None):
        begin, end = end, end + 2 * math.prod(piece.shape)
        header[piece.disk] = {"dtype": "BF16", "shape": list(piece.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return str(folder)


@torch.no_grad()
def draw_weights(module: nn.Module) -> None:
    """Fill this rank's shards where they are."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        shard = local_shard(parameter)
        shard.fill_(1.0) if parameter.ndim < 2 else shard.normal_(0.0, 0.02)


def open_engine(path: str, device: Device, tokens: int, lora: LoraConfig | None = None, **model: Any) -> Engine:
    """An Engine with random weights. model: further keys of the config's section."""
    ranks = join(device.kind)  # type: ignore[arg-type]
    config = EngineConfig(
        model=ModelConfig(path=path, **model), step=StepConfig(max_tokens_per_device=tokens), lora=lora or LoraConfig()
    )
    engine = Engine(config, ranks, fill=False)
    draw_weights(engine.module)
    return engine


# ---------------------------------------------------------------- documents


def document_lengths(tokens: int, seed: int) -> list[int]:
    """Log-normal, mean 400, at most 4096, until they fill `tokens` exactly."""
    source, remaining, lengths = np.random.default_rng(seed), tokens, []
    while remaining:
        lengths.append(min(remaining, int(np.clip(source.lognormal(5.5, 1.0), 16, 4096))))
        remaining -= lengths[-1]
    return lengths


def rows_of(tokens: int, vocabulary: int, count: int) -> list[list[Tensor]]:
    """For each step, documents that fill one row."""
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randint(vocabulary, (n,), generator=generator) for n in document_lengths(tokens, seed)]
        for seed in range(count)
    ]


# ---------------------------------------------------------------- the contestants


def weft_step(engine: Engine) -> Step:
    """An optimizer step, planning included."""
    step = step_with_norm(engine)
    return lambda row: step(row)[0]


def step_with_norm(engine: Engine) -> Callable[[list[Tensor]], tuple[float, float]]:
    """An optimizer step, planning included, on documents that all ranks have; its loss, and the gradient's norm."""

    def step(row: list[Tensor]) -> tuple[float, float]:
        documents = {i: Document(ids, torch.ones(len(ids))) for i, ids in enumerate(row)}
        plan = engine.plan(engine.planner.metadata(documents.values()))
        metrics = engine.accumulate(plan, documents, CrossEntropy())
        result = engine.apply(LR)
        assert not result.skipped and metrics["loss"] is not None, result.reason
        return metrics["loss"], result.grad_norm

    return step


class Masters:
    """fp32 copies of a model's parameters, which AdamW steps."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.parts: list[tuple[list[nn.Parameter], list[Tensor], torch.optim.AdamW]] = []
        chunk: list[nn.Parameter] = []
        for parameter in parameters:
            chunk.append(parameter)
            if sum(p.numel() for p in chunk) >= _CHUNK or parameter is parameters[-1]:
                masters = [p.detach().to(torch.float32, copy=True) for p in chunk]
                rule = torch.optim.AdamW(masters, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
                self.parts.append((chunk, masters, rule))
                chunk = []

    @torch.no_grad()
    def step(self) -> None:
        """Clip, step, and copy back; the gradients are gone afterwards."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for parameters, masters, rule in self.parts:
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
            rule.step()
            rule.zero_grad()
            torch._foreach_copy_(list(parameters), masters)


def bare_step(path: str, device: Device, recompute: RecomputeSetting, compile: bool) -> Step:
    """What one would write by hand."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf.register_kernels()
    dtype = torch.bfloat16 if device.cuda else torch.float32
    with torch.device(device.kind):
        config = AutoConfig.from_pretrained(path)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="weft_auto").train()
    if (policy := policy_of(recompute)) is not None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for number, layer in enumerate(model.model.layers):
            layer.gradient_checkpointing = policy.covers(number)
    if compile:
        hf.register_kernels(traced=False)
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    masters = Masters(list(model.parameters()))

    def step(row: list[Tensor]) -> Tensor:
        lengths = tuple(len(ids) for ids in row)
        ids = torch.cat(row)[None].to(device.kind)
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device.kind)
        labels = torch.cat([F.pad(document_ids[1:], (0, 1), value=-100) for document_ids in row]).to(device.kind)
        bounds = Bounds.packed(lengths, ids.device)
        base = model.model(input_ids=ids, position_ids=positions, use_cache=False, **{BOUNDS_ARGUMENT: bounds})
        loss = chunked_cross_entropy(base.last_hidden_state[0], model.lm_head.weight, labels)
        del base
        loss.backward()
        masters.step()
        return loss.detach()

    return step


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The mean over labels that are not -100; logits of one of _LOSS_CHUNKS parts at a time, computed again in
    backward. hidden: [T, H]. weight: [V, H]. labels: [T]."""

    def part(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")

    total: Tensor = hidden.new_zeros((), dtype=torch.float32)
    for states, targets in zip(hidden.chunk(_LOSS_CHUNKS), labels.chunk(_LOSS_CHUNKS), strict=True):
        total = total + checkpoint(part, states, weight, targets, use_reentrant=False)
    return total / (labels != -100).sum()


# ---------------------------------------------------------------- what fits


@dataclass(frozen=True)
class Sizes:
    """Bytes of a shape with all of its layers, by weft's planner; activations and the head's room are rough: tensors
    that transformers' Qwen3 keeps for backward, counted by reading it."""

    config: dict[str, Any]
    flops: FlopFacts
    layers: int
    resident: int
    layer: int  # of it, each layer's
    gathered: int

    @staticmethod
    def of(path: str, device: Device, lora: LoraConfig) -> Sizes:
        """By an engine without weights."""
        ranks = join(device.kind)  # type: ignore[arg-type]
        precision = FsdpConfig(param_dtype="bf16")  # as on a card
        engine = Engine(EngineConfig(model=ModelConfig(path=path), lora=lora, fsdp=precision), ranks, weights=False)
        elements = sum(p.numel() for p in engine.module.parameters())
        count = len(engine.module.layers)
        layer_parameters = sum(p.numel() for p in engine.module.layers[0][1].parameters())
        resident = engine.memory.resident
        config = json.loads((Path(path) / "config.json").read_text())
        return Sizes(
            config, engine.built.flops, count, resident, resident * layer_parameters // elements, engine.memory.gathered
        )

    def activations(self, layers: int, tokens: int, recompute: RecomputeSetting) -> int:
        """In bf16, of decoder layers."""
        config = self.config
        hidden, width = config["hidden_size"], config["head_dim"]
        heads = (config["num_attention_heads"] + config["num_key_value_heads"]) * width
        experts = config.get("num_experts_per_tok", 0)
        inner = experts * config["moe_intermediate_size"] if experts else config["intermediate_size"]
        layer = tokens * (16 * hidden + 10 * heads + 8 * inner + 4 * experts * hidden)
        policy = policy_of(recompute)
        repeated = 0 if policy is None else sum(map(policy.covers, range(layers)))
        return (layers - repeated) * layer + (2 * layer + repeated * tokens * 2 * hidden if repeated else 0)

    def planned(self, layers: int) -> int:
        """What weft's planner says of so many layers."""
        return self.resident - (self.layers - layers) * self.layer + self.gathered

    def needed(self, trainer: str, layers: int, tokens: int, recompute: RecomputeSetting) -> int:
        """Of the whole step."""
        vocabulary = self.config["vocab_size"]
        # bare: logits of a part in bf16 and fp32, and both gradients; beside the fp32 copies of a part's gradients.
        bare = max(12 * -(-tokens // _LOSS_CHUNKS) * vocabulary, 4 * _CHUNK)
        head = bare if trainer == "bare" else 3 * GIB + 4 * vocabulary * self.config["hidden_size"]
        unsharded = self.gathered if trainer == "bare" else 0
        return self.planned(layers) - unsharded + head + self.activations(layers, tokens, recompute)

    def fitting(self, tokens: int, room: float, recompute: RecomputeSetting = "full") -> int:
        """As many layers as both weft and the bare loop have room for; at least 1."""

        def fits(layers: int) -> bool:
            return max(self.needed(trainer, layers, tokens, recompute) for trainer in ("weft", "bare")) <= room

        return next((n for n in range(self.layers, 1, -1) if fits(n)), 1)


# ---------------------------------------------------------------- the part


@dataclass(frozen=True)
class SftCase:
    """tokens: of the row."""

    tokens: int
    recompute: RecomputeSetting
    compile: bool
    transforms: tuple[Literal["fp8"], ...] = ()


# Those that tell most first. Of 4B, 80 GB have no room for a long row without recomputation.
CASES = {
    "4b": (
        SftCase(16_384, "full", False),
        SftCase(16_384, RecomputePolicy(every=2), True),
        SftCase(16_384, RecomputePolicy(every=2), True, ("fp8",)),
    ),
    "30b-a3b": (SftCase(16_384, "full", False), SftCase(16_384, "full", True)),
    "0.6b": (SftCase(8192, "none", False), SftCase(8192, "none", True)),
}
TINY_CASES = (SftCase(96, "full", False), SftCase(48, "none", True))
ADAPTERS = {"30b-a3b": LoraConfig(rank=16)}  # of shapes whose base is frozen, in bf16


def sft(run: PartRun, shape: str) -> None:
    """A row for each case, weft first, the bare loop then, where there is one."""
    lora = ADAPTERS.get(shape, LoraConfig())
    with TemporaryDirectory() as folder:
        path = write_model(Path(folder) / "whole", config_of(shape, run.tiny))
        full_sizes, room = Sizes.of(path, run.device, lora), run.device.free * _USABLE
        models: dict[int, tuple[str, FlopFacts]] = {full_sizes.layers: (path, full_sizes.flops)}
        for case in run.pick(CASES[shape], TINY_CASES):
            layers = full_sizes.fitting(case.tokens, room, case.recompute)
            if layers not in models:
                part = write_model(Path(folder) / str(layers), config_of(shape, run.tiny, layers))
                models[layers] = part, Sizes.of(part, run.device, lora).flops
            Contest(run, models[layers][0], full_sizes, models[layers][1], layers, room, lora).add_row(case)


@dataclass(frozen=True)
class Contest:
    """weft and the bare loop on one model, of the config in `path`. whole: with all layers. room: bytes of memory."""

    run: PartRun
    path: str
    whole: Sizes
    flops: FlopFacts
    layers: int
    room: float
    lora: LoraConfig

    def add_row(self, case: SftCase) -> None:
        """What both make of a case; the bare loop knows neither adapters nor transforms."""
        tokens = case.tokens
        layer_count = f"{self.layers} of {self.whole.layers}" if self.layers < self.whole.layers else str(self.layers)
        row = self.run.add(
            row=tokens, recompute=str(case.recompute), compile="yes" if case.compile else "no", layers=layer_count
        )
        model = {"recompute": case.recompute, "compile": case.compile, "transforms": case.transforms}
        makes: dict[str, Callable[[], Step]] = {
            "weft": lambda: weft_step(open_engine(self.path, self.run.device, tokens, self.lora, **model))
        }
        if case.transforms:
            row["transforms"] = ", ".join(case.transforms)
        elif self.lora.rank is None:
            makes["bare"] = lambda: bare_step(self.path, self.run.device, case.recompute, case.compile)
        for trainer, make in makes.items():
            kind = "compiled" if case.compile else "not compiled"
            self.run.attempt(row, partial(self._measured, trainer, make, case), like=kind)
        if "weft tokens/s" in row and "bare tokens/s" in row:
            row["weft / bare"] = row["weft tokens/s"] / row["bare tokens/s"]
            self.run.save()

    def _measured(self, trainer: str, make: Callable[[], Step], case: SftCase) -> Row:
        tokens = case.tokens
        needed = self.whole.needed(trainer, self.layers, tokens, case.recompute)
        if needed > self.room:
            return {"note": f"{trainer} not run: it would take about {needed / GIB:.0f} of {self.room / GIB:.0f} GiB"}
        torch._dynamo.reset()
        rows = rows_of(tokens, self.whole.config["vocab_size"], self.run.pick(WARM_UP + STEPS, 2))
        seconds, first, peak = time_steps(make, self.run, rows)
        flops = sum(document_flops(self.flops, len(ids)) for row in rows for ids in row) / len(rows)
        figures = {
            f"{trainer} tokens/s": tokens / seconds,
            f"{trainer} MFU": flops / seconds / matmul_rate(self.run.device),
            f"{trainer} first step s": first,
        }
        if self.run.device.cuda:
            figures |= {f"{trainer} {name}": value for name, value in self.run.device.allocator().items()}
        if trainer == "weft":
            planned = self.whole.planned(self.layers)
            return figures | {"weft GiB": peak / GIB, "planner GiB": planned / GIB, "estimate GiB": needed / GIB}
        return figures | {"bare GiB": peak / GIB}


def time_steps(make: Callable[[], Step], run: PartRun, rows: list[list[Tensor]]) -> tuple[float, float, int]:
    """(median seconds of a step, those of the first one, the most bytes at once). The first few warm up."""
    matmul_rate(run.device)  # its matrices are no part of the peak
    run.device.reset_peak()
    step, seconds, loss = make(), [], math.nan
    warm = min(WARM_UP, len(rows) - 1)
    for row in rows:
        began = run.device.now()
        loss = step(row)
        seconds.append(run.device.now() - began)
        if run.left < 0 and len(seconds) > warm:
            break
    assert math.isfinite(loss), "the loss is not finite"
    return statistics.median(seconds[warm:]), seconds[0], run.device.peak()
