"""Tiny models on disk, and the functions that pooled ranks run on them."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.shared_results import FOLDER, result_of_file
from tests.support.toy_tokenizers import byte_tokenizer, chat, write_jsonl
from tests.support.zoo import tiny_config
from weft.config.mesh import AXES
from weft.config.schema import FsdpConfig, LoraConfig, MeshConfig, ModelConfig, OptimizerConfig, StepConfig
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.engine.score_head import ScoreSpec
from weft.launch.options import Device
from weft.launch.process import join
from weft.models import hf
from weft.parallel.mesh import local_shard
from weft.recipes.verify import EPSILON
from weft.verify import harness
from weft.verify.documents import awkward_steps, forest_steps, special_ids
from weft.verify.expected import Expected, ReferenceTrainer, expect, with_noise, with_rounding
from weft.verify.harness import Verdict
from weft.verify.observed import to_documents

MESHES: dict[str, dict[str, Any]] = {
    "1": {}, "2": {"dp_shard": 2}, "3": {"dp_shard": 3}, "4": {"dp_shard": 4},
    "2x2": {"dp_replicate": 2, "dp_shard": 2}, "2x1": {"dp_replicate": 2, "dp_shard": 1},
    "tp2": {"dp_shard": 1, "tp": 2}, "tp4": {"dp_shard": 1, "tp": 4}, "2xtp2": {"dp_shard": 2, "tp": 2},
    "cp2": {"dp_shard": 1, "cp": 2, "ulysses": 1}, "cp2u2": {"dp_shard": 1, "cp": 2, "ulysses": 2},
    "cp3": {"dp_shard": 1, "cp": 3, "ulysses": 1}, "cp4u2": {"dp_shard": 1, "cp": 4, "ulysses": 2},
    "2xcp2": {"dp_shard": 2, "cp": 2}, "cp2xtp2": {"dp_shard": 1, "cp": 2, "tp": 2},
    "cp2u2xtp2": {"dp_shard": 1, "cp": 2, "ulysses": 2, "tp": 2}, "cp4u4": {"dp_shard": 1, "cp": 4, "ulysses": 4},
    "2x1xcp2": {"dp_replicate": 2, "dp_shard": 1, "cp": 2},
    "2x1xtp2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
    "pp2": {"dp_shard": 1, "pp": 2}, "pp3": {"dp_shard": 1, "pp": 3}, "pp4": {"dp_shard": 1, "pp": 4},
    "pp2g": {"dp_shard": 1, "pp": 2, "pp_schedule": "GPipe"}, "pp2x2": {"dp_shard": 2, "pp": 2},
    "pp2x2x1": {"dp_replicate": 2, "dp_shard": 1, "pp": 2}, "pp2xtp2": {"dp_shard": 1, "pp": 2, "tp": 2},
    "pp2xcp2": {"dp_shard": 1, "pp": 2, "cp": 2},
    "pp2i": {"dp_shard": 1, "pp": 2, "pp_schedule": "Interleaved1F1B"},
    "pp2i3": {"dp_shard": 1, "pp": 2, "pp_schedule": "Interleaved1F1B", "pp_stages_per_rank": 3},
    "pp3i": {"dp_shard": 1, "pp": 3, "pp_schedule": "Interleaved1F1B"},
    "pp4i": {"dp_shard": 1, "pp": 4, "pp_schedule": "Interleaved1F1B"},
    "pp2ix2": {"dp_shard": 2, "pp": 2, "pp_schedule": "Interleaved1F1B"},
    "pp2ixtp2": {"dp_shard": 1, "pp": 2, "tp": 2, "pp_schedule": "Interleaved1F1B"},
    "pp2z": {"dp_shard": 1, "pp": 2, "pp_schedule": "InterleavedZeroBubble", "pp_stages_per_rank": 1},
    "pp2zi": {"dp_shard": 1, "pp": 2, "pp_schedule": "InterleavedZeroBubble"},
    "pp4z": {"dp_shard": 1, "pp": 4, "pp_schedule": "InterleavedZeroBubble", "pp_stages_per_rank": 1},
    "pp2zx2": {"dp_shard": 2, "pp": 2, "pp_schedule": "InterleavedZeroBubble", "pp_stages_per_rank": 1},
    "pp2zxtp2": {"dp_shard": 1, "pp": 2, "tp": 2, "pp_schedule": "InterleavedZeroBubble", "pp_stages_per_rank": 1},
    "pp2v": {"dp_shard": 1, "pp": 2, "pp_schedule": "ZBVZeroBubble"},
    "pp2vxtp2": {"dp_shard": 1, "pp": 2, "tp": 2, "pp_schedule": "ZBVZeroBubble"},
    "pp2vxcp2": {"dp_shard": 1, "pp": 2, "cp": 2, "pp_schedule": "ZBVZeroBubble"},
    "pp3v": {"dp_shard": 1, "pp": 3, "pp_schedule": "ZBVZeroBubble"},
    "pp2vx2": {"dp_shard": 2, "pp": 2, "pp_schedule": "ZBVZeroBubble"},
    "pp2vx2x1": {"dp_replicate": 2, "dp_shard": 1, "pp": 2, "pp_schedule": "ZBVZeroBubble"},
    "2x2xcp2": {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    "pp2xep2": {"pp": 2, "dp_shard": 2, "ep": 2}, "pp2xep2xcp2": {"pp": 2, "dp_shard": 1, "cp": 2, "ep": 2},
    "pp2x2xtp2": {"pp": 2, "dp_shard": 2, "tp": 2}, "pp2xep2xtp2": {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2},
    "ep2xcp2xtp2": {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 2},
    "ep2": {"dp_shard": 2, "ep": 2}, "ep4": {"dp_shard": 4, "ep": 4}, "4ep2": {"dp_shard": 4, "ep": 2},
    "2xep2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, "ep2xtp2": {"dp_shard": 2, "tp": 2, "ep": 2},
    "ep2xcp2": {"dp_shard": 2, "cp": 2, "ep": 2}, "ep4xcp2": {"dp_shard": 2, "cp": 2, "ep": 4},
    "cp2ep2": {"dp_shard": 1, "cp": 2, "ep": 2}, "3ep3": {"dp_shard": 3, "ep": 3},
}  # fmt: skip
# As weft/versions.py calls them in torch.distributed, for those who watch them.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_folder = tempfile.TemporaryDirectory(prefix="weft-tests-")
_expected: dict[str, Expected] = {}


def world_of(mesh: str) -> int:
    """Ranks of a mesh named as in MESHES."""
    axes = MESHES[mesh]
    return math.prod(axes.get(axis, 1) for axis in AXES)


@cache
def saved_model(family: str, **changes: Any) -> str:
    """A directory with a tiny random model of this family, as save_pretrained writes it.

    Weights are ten times larger than usual, because at 0.02 a tiny model is so nearly linear that it hardly shows a
    wrong rotary table. zamba2 is chaotic then, and deepseek_v4, qwen3_5 and qwen3_next amplify rounding beyond the
    tolerance.
    """
    if family not in ("zamba2", "deepseek_v4", "qwen3_5_text", "qwen3_next"):
        changes = {"initializer_range": 0.2, **changes}
    name = "-".join([family, *(f"{k}={v}" for k, v in sorted(changes.items()))])
    path = Path(_folder.name) / name
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}
    model = hf.build_random(tiny_config(family, **lists), dtype=torch.float32, attention="eager", seed=0)
    model.save_pretrained(path)
    return str(path)


def write_small_job(folder: Path) -> Path:
    """A model with its tokenizer, and chat.jsonl, in this folder: what `weft sft` needs."""
    shutil.copytree(saved_model("llama", vocab_size=264), folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    write_jsonl(folder / "chat.jsonl", *[chat(("user", "1 2"), ("assistant", "2 1"))] * 4)
    return folder


def open_engine(
    path: str,
    mesh: str,
    *,
    purpose: Literal["train", "inference"] = "train",
    seed: int = 0,
    deterministic: bool = False,
    temperature: float = 1.0,
    exact: bool = False,
    score: ScoreSpec | None = None,
    replay: bool = True,
    shares_with: Engine | None = None,
    device: Device = "cpu",
    readouts: Sequence[str] = (),
    **sections: dict[str, Any],
) -> Engine:
    """An engine on this process group; sections: as in `engine_config`."""
    config = replace(
        engine_config(path, mesh, **sections),
        purpose=purpose,
        seed=seed,
        deterministic=deterministic,
        temperature=temperature,
        exact=exact,
        score=score,
        replay=replay,
    )
    return Engine(config, join(device), shares_with=shares_with, readouts=readouts)


def engine_config(path: str, mesh: str, **sections: dict[str, Any]) -> EngineConfig:
    """sections: model, lora, fsdp, step, optimizer keys that differ from the tests' own."""
    return EngineConfig(
        model=ModelConfig(path=path, **sections.get("model", {})),
        lora=LoraConfig(**sections.get("lora", {})),
        mesh=MeshConfig(**MESHES[mesh]),
        fsdp=FsdpConfig(**sections.get("fsdp", {})),
        step=StepConfig(**{"max_tokens_per_device": 128, **sections.get("step", {})}),
        optimizer=OptimizerConfig(**{"eps": EPSILON, **sections.get("optimizer", {})}),
    )


def bytes_held(engine: Engine) -> tuple[int, int, int]:
    """(weights, gradients, optimizer state) on this rank after a step and the next one's backward."""
    documents, metas = to_documents(engine, awkward_steps(128)[0])
    for last in (False, True):
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        if not last:
            engine.apply(1e-3)
    assert engine.optimizer is not None
    parameters = list(engine.module.parameters())
    states = [local_shard(v) for s in engine.optimizer.state.values() for k, v in s.items() if k != "step"]
    gradients = [p.grad.to_local() for p in parameters if p.grad is not None]
    weights = sum(p.to_local().nbytes for p in parameters)
    return weights, sum(g.nbytes for g in gradients), sum(v.nbytes for v in states)


def parity(
    path: str, mesh: str, sections: dict[str, dict[str, Any]], device: Device = "cpu", steps: int = 3,
    special: bool = False, trees: bool = False,
) -> Verdict | None:  # fmt: skip
    """The verdict of `weft verify`'s own function on this mesh; on rank 0. The reference is on the CPU. special: with
    special_ids among the documents. trees: of forest_steps."""
    with references_once():
        engine = open_engine(path, mesh, device=device, **sections)
        ids = special_ids(engine, path)[0] if special else []
        shown = forest_steps(128) if trees else awkward_steps(128, special=ids)
        return harness.verify(engine, path, shown[:steps], [1e-3] * steps)


def parity_of_two_steps(path: str, mesh: str, sections: dict[str, dict[str, Any]]) -> Verdict | None:
    """Of many documents, then of a single one, so that a rank has none: an update, and a loss after it. A third step
    would not be another for the code of a model or of an axis."""
    return parity(path, mesh, sections, steps=2)


def pairs(suite: Sequence[tuple[Any, ...]], table: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: the cases of the suite, and those that `make verify-all` runs as well."""
    marked = [*((case, ()) for case in suite), *((case, pytest.mark.table) for case in table)]
    return [pytest.param(*case, id=" ".join(p for p in case if isinstance(p, str)), marks=m) for case, m in marked]


@contextmanager
def graphs_as_traced() -> Iterator[None]:
    """Inside: model.compile runs graphs, forward and backward, as they were traced. Their C++ takes a minute, and is
    the same on every mesh."""
    compile_module = torch.nn.Module.compile

    def traced(module: torch.nn.Module, **options: Any) -> None:
        compile_module(module, backend="aot_eager", **options)

    with mock.patch.object(torch.nn.Module, "compile", traced):
        yield


def traced_parity(path: str, mesh: str, sections: dict[str, dict[str, Any]]) -> Verdict | None:
    """The same with model.compile."""
    with graphs_as_traced():
        return parity(path, mesh, sections | {"model": {"compile": True}})


@contextmanager
def references_once() -> Iterator[None]:
    """Inside: what one plain process computes is kept for all tests, as it is the same for every mesh; but not of an
    adapter, whose folder is another one each time."""

    def cached(compute: Callable[..., Expected]) -> Callable[..., Expected]:
        def computed_once(*args: Any) -> Expected:
            args = tuple(replace(arg, device="cpu") if isinstance(arg, ReferenceTrainer) else arg for arg in args)
            (trainer,) = (arg for arg in args if isinstance(arg, ReferenceTrainer))
            before = [len(arg.noise_samples) for arg in args if isinstance(arg, Expected)]
            content = replace(trainer, path=digest_of(trainer.path))
            described = (content if arg is trainer else arg for arg in args if not isinstance(arg, Expected))
            key, folder = repr((compute.__name__, before, *described)), os.environ.get(FOLDER)
            if trainer.adapter is not None:
                return compute(*args)
            if key not in _expected:
                run = partial(compute, *args)
                _expected[key] = run() if folder is None else result_of_file(Path(folder), key, run)
            return _expected[key]

        return computed_once

    computed = {function.__name__: cached(function) for function in (expect, with_noise, with_rounding)}
    with mock.patch.multiple(harness, **computed):
        yield


@cache
def digest_of(path: str) -> str:
    """A digest of the files of a model."""
    files = [file for file in sorted(Path(path).iterdir()) if file.is_file()]
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


def describe(verdict: Verdict) -> str:
    """What failed, for an assertion message."""
    return "; ".join(f"{f.name}: {f.value:.1e} > {f.tolerance:.1e} {f.note}" for f in verdict.figures if not f.passed)
