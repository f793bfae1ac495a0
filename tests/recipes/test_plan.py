"""`weft plan`: what it says of memory and of what travels, beside what real ranks hold and send."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.parity.test_dpo_parity import folder, models
from tests.recipes.test_distill import home
from tests.support.cases import MESHES, bytes_held, engine_config, open_engine, saved_model, world_of
from tests.support.pool import run
from tests.support.vision_zoo import vision_folder
from weft import cli
from weft.config import SftConfig, load_config
from weft.config.distill_schema import DistillConfig
from weft.config.dpo_schema import DpoConfig
from weft.config.mesh import MeshSizes, fewest_ranks, resolve_mesh
from weft.config.recompute import AUTO_TILE, FULL, Activations, policy_of
from weft.config.rl_schema import RlConfig
from weft.config.schema import MeshConfig
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.launch.machine import Accelerator, accelerator
from weft.launch.process import fake_ranks, join
from weft.models.flops import model_flops
from weft.parallel.activations import RowSharing
from weft.recipes.dpo import Dpo
from weft.recipes.plan import machines
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.choices import Choice
from weft.recipes.plan.holdings import Holdings, RankCoordinates, RankShare
from weft.recipes.plan.machines import Machine, machine_of
from weft.recipes.plan.memory import _lingering, _unreduced, memory_by_stage
from weft.recipes.plan.other_models import OtherModels, Reading, with_readings, with_waits
from weft.recipes.plan.passes import layer_passes
from weft.recipes.plan.recipe import longer
from weft.recipes.plan.rows import RowFacts, StepLengths, plan_rows, planner_of
from weft.recipes.plan.search import BEST, Search, _rows, meshes, search
from weft.recipes.plan.simulate import Step, plan_of, rows_of, simulated_documents, watched_step
from weft.recipes.plan.timing import time_of
from weft.recipes.plan.traffic import transfers
from weft.recipes.teachers import open_teachers

ROOT = Path(__file__).parents[2]


def sft_config(path: str) -> SftConfig:
    rows = ["step.max_tokens_per_device=256", f"data.path={ROOT}/examples/chat.jsonl", "model.init=random"]
    return load_config([], [f"model.path={path}", *rows], SftConfig, weights=False)


def dpo_words() -> tuple[type, list[str]]:
    """The schema, and overrides for a small job on pairs."""
    rows = ["step.documents=3", "step.max_tokens_per_device=128", "preference.loss=sigmoid"]
    return DpoConfig, [f"model.path={models('llama')[0]}", f"data.path={folder()}/pairs.jsonl", *rows]


def distill_words() -> tuple[type, list[str]]:
    """The same for a student and a wider teacher of another family."""
    paths = [f"model.path={home()}/student", f"distill.teacher={home()}/wide", f"data.path={home()}/a.jsonl"]
    return DistillConfig, [*paths, "step.documents=3", "step.max_tokens_per_device=128"]


def sizes_of(mesh: str) -> MeshSizes:
    return resolve_mesh(MeshConfig(**MESHES[mesh]), world_of(mesh))


def blueprint(family: str, mesh: str, sections: dict[str, Any], **changes: Any) -> Blueprint:
    return Blueprint(engine_config(saved_model(family, **changes), mesh, **sections), "cpu", None)


# ---------------------------------------------------------------- what ranks hold


def counted(path: str, mesh: str, sections: dict[str, Any]) -> tuple[int, int, int]:
    return bytes_held(open_engine(path, mesh, **sections))


def bytes_of(share: RankShare) -> tuple[int, int, int]:
    return share.weights, share.gradients, share.optimizer


@pytest.mark.parametrize(
    ("family", "mesh", "sections", "changes"),
    [
        pytest.param("llama", "1", {}, {}, marks=pytest.mark.table),
        ("llama", "3", {"model": {"freeze": ("*.mlp",)}, "optimizer": {"state_dtype": "bf16"}}, {}),
        ("llama", "3", {"optimizer": {"state_dtype": "int8"}}, {}),
        ("qwen3_moe", "ep2xtp2", {"optimizer": {"name": "muon"}}, {}),
        ("qwen3_moe", "2x2", {"fsdp": {"overrides": {"*.self_attn": "replicate", "*.mlp.gate": 2}}}, {}),
        ("llama_tied", "tp4", {"optimizer": {"name": "sgd", "momentum": 0.9}}, {"vocab_size": 130}),
        ("qwen3", "2xtp2", {"lora": {"rank": 4}}, {"vocab_size": 131}),
        ("qwen3_moe", "3ep3", {}, {"num_experts": 5}),
        ("qwen3_moe", "4ep2", {"lora": {"rank": 3, "targets": ("*.experts.*", "*.q_proj")}}, {}),
        pytest.param("gpt_oss", "ep2xtp2", {"fsdp": {"param_dtype": "bf16"}}, {}, marks=pytest.mark.table),
        ("llama_tied", "pp2x2", {}, {"num_hidden_layers": 3}),
        ("deepseek_v3", "pp2xcp2", {}, {}),
        pytest.param("qwen3_moe", "pp2xep2xtp2", {}, {}, marks=pytest.mark.table),
    ],
)
def test_what_each_rank_holds_is_counted_to_the_byte(
    family: str, mesh: str, sections: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = blueprint(family, mesh, sections, **changes)
    sizes = sizes_of(mesh)
    holdings = Holdings(model, sizes)
    model.check(sizes)
    measured = run(world_of(mesh), counted, saved_model(family, **changes), mesh, sections)
    foreseen = [bytes_of(holdings.share_of(RankCoordinates.from_rank(sizes, rank))) for rank in range(sizes.world)]
    assert foreseen == measured
    assert max(share.resident for share in holdings.by_stage()) == max(map(sum, measured))


@pytest.mark.parametrize(("reduce", "micro_batches", "roots"), [
    ("scatter", 4, 1), ("scatter", 1, 0), ("every", None, 1), ("last", 4, 0), ("last", None, 0),
])  # fmt: skip
def test_gradients_of_the_root_linger_where_another_micro_batch_follows(
    reduce: str, micro_batches: int | None, roots: int
) -> None:
    """As they were sent, in fp32. With `last` they are among those of all units, which are counted as unreduced."""
    model, sizes = blueprint("llama", "2", {"fsdp": {"reduce": reduce}}), sizes_of("2")
    share = Holdings(model, sizes).share_of(RankCoordinates.from_rank(sizes, 0))
    embedding = 128 * 64  # of a vocabulary of 128 tokens, a hidden width of 64; head and norm are a unit of their own
    assert _lingering(model, share, micro_batches) == roots * embedding * 4
    all_units = sum(unit.trained * unit.count for unit in share.units) * 4
    assert (_unreduced(model, sizes, share, micro_batches) > all_units) == (reduce == "last")


# ---------------------------------------------------------------- what travels

SMALL = 4096  # bytes of metrics, norms, counts of rows and log-sum-exps, which are not foreseen
Totals = dict[tuple[int, str], int]


def sent(path: str, mesh: str, sections: dict[str, Any], lengths: list[int]) -> Totals:
    """(ranks, operation) -> bytes, of the collectives of a real rank's step."""
    engine = open_engine(path, mesh, **sections)
    step = Step(lengths, CrossEntropy())
    plan = plan_of(engine, step)
    _, watch = watched_step(engine, plan, rows_of(engine, plan, step), step)
    totals: Totals = defaultdict(int)
    for kind, total in watch.collectives.totals.items():
        totals[kind.ranks, kind.operation] += total.bytes
    return dict(totals)


def foreseen(model: Blueprint, sizes: MeshSizes, rank: int, lengths: list[int]) -> Totals:
    share = Holdings(model, sizes).share_of(RankCoordinates.from_rank(sizes, rank))
    load = RowFacts.from_plan(model, plan_rows(model, sizes, lengths)).load
    sent_bytes: dict[tuple[int, str], float] = defaultdict(float)
    for transfer in transfers(model, sizes, share, load, recompute=policy_of(model.config.model.recompute)):
        # Keys and values are sent to those who want them, and heads to all.
        volume = transfer.received if transfer.axis == "cp (ring)" else transfer.payload * transfer.calls
        sent_bytes[2 if transfer.kind == "send" else transfer.size, transfer.kind] += volume
    return {key: round(value) for key, value in sent_bytes.items()}


RECOMPUTE = {"model": {"recompute": "full"}}


@pytest.mark.parametrize(
    ("family", "mesh", "sections", "lengths", "changes"),
    [
        ("llama", "3", {"fsdp": {"reduce": "last"}}, [65] * 9, {}),
        ("llama_tied", "2x2", {"lora": {"rank": 4}}, [65] * 8, {}),
        ("llama", "2xtp2", RECOMPUTE, [65] * 8, {}),
        ("gemma3_text", "tp2", RECOMPUTE, [65] * 4, {}),
        ("falcon", "tp2", {}, [65] * 4, {}),
        pytest.param("llama", "cp2", {}, [201] * 2, {}, marks=pytest.mark.table),
        ("llama", "cp2u2", RECOMPUTE, [201] * 2, {}),
        ("qwen3_moe", "4ep2", RECOMPUTE, [65] * 8, {"num_experts": 4}),
        ("llama_tied", "pp2x2", {}, [65] * 8, {}),
    ],
)
def test_bytes_that_travel_are_those_of_real_ranks(
    family: str, mesh: str, sections: dict[str, Any], lengths: list[int], changes: dict[str, Any]
) -> None:
    """Each kind of collective to the byte, but for what is small; rows of experts on all ranks together, as routers do
    not choose evenly."""
    model, sizes = blueprint(family, mesh, sections, **changes), sizes_of(mesh)
    path, exchanged = saved_model(family, **changes), [0.0, 0.0]
    for rank, measured in enumerate(run(world_of(mesh), sent, path, mesh, sections, lengths)):
        expected = foreseen(model, sizes, rank, lengths)
        for key in {*expected, *measured} - {(2, "receive")}:
            pair = expected.get(key, 0), measured.get(key, 0)
            if key[1] == "all-to-all":
                exchanged = [exchanged[0] + pair[0], exchanged[1] + pair[1]]
            else:
                assert pair[0] == pytest.approx(pair[1], abs=SMALL), (rank, key, expected, measured)
    assert exchanged[0] == pytest.approx(exchanged[1], rel=0.01)


# ---------------------------------------------------------------- beside a dry run


@pytest.mark.parametrize(
    ("family", "mesh", "sections"),
    [
        ("qwen3_moe", {"dp_replicate": 2, "dp_shard": 10, "tp": 2, "ep": 5}, {}),
        ("llama", {"dp_shard": 128}, {"fsdp": {"reshard_after_forward": False}}),
        ("deepseek_v3", {"pp": 2, "dp_shard": 4, "cp": 2}, {"model": {"recompute": "full"}}),
        ("qwen2_5_vl", {"dp_shard": 4}, {"model": {"freeze": ("vision",)}}),
        ("qwen3_next", {"dp_shard": 4, "cp": 2}, {}),
    ],
)
def test_a_dry_run_says_the_same(family: str, mesh: dict[str, int], sections: dict[str, Any], tmp_path: Path) -> None:
    """Of the first rank; in a process without ranks, for as many as are wanted."""
    even = {"num_experts": 10, "moe_intermediate_size": 32}  # for ranks of ep, and of tp
    changes = even if family == "qwen3_moe" else {}
    path = str(vision_folder(tmp_path, family)) if family == "qwen2_5_vl" else saved_model(family, **changes)
    config = replace(engine_config(path, "1", **sections), mesh=MeshConfig(**mesh))
    sizes = resolve_mesh(config.mesh, fewest_ranks(config.mesh))
    with fake_ranks(sizes.world) as ranks:
        memory = Engine(config, ranks, weights=False).memory
    model = Blueprint(config, "cpu", None)
    model.check(sizes)
    first = memory_by_stage(model, sizes, None)[0]
    assert first.needs == replace(memory, unsharded=0)
    assert first.rows and not first.unknown


# ---------------------------------------------------------------- models beside the trained one


def beside_of(config: Any, world: int) -> tuple[OtherModels, Blueprint]:
    model = Blueprint(EngineConfig.from_config(config), "cpu", None)
    return OtherModels(config, model, world, "cpu", None), model


def held_beside(config: Any) -> list[tuple[int, int]]:
    """(weights, bytes of the head that the trained model's rank keeps) of a rank's reference or teachers, as a run
    opens them."""
    with join("cpu", 60.0) as ranks:
        engine = Engine(EngineConfig.from_config(config), ranks)
        if isinstance(config, DistillConfig):
            teachers = open_teachers(config, engine)
            heads = [teacher.head(engine) for teacher in teachers]
            models = [teacher.engine for teacher in teachers]
        else:
            recipe = Dpo(config)
            recipe.open_models(engine, recipe.read_data())
            assert recipe.readings.engine is not None
            models, heads = [recipe.readings.engine], [None]
        weights = [sum(p.to_local().nbytes for p in model.module.parameters()) for model in models]
        return [(size, 0 if head is None else head.weight.nbytes) for size, head in zip(weights, heads, strict=True)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (dpo_words, ["mesh.dp_shard=2", "reference.param_dtype=bf16", "reference.dp_shard=1", "reference.tp=2"]),
        (distill_words, ["mesh.tp=2", "teacher.dp_shard=2", "teacher.tp=1", "teacher.param_dtype=bf16"]),
    ],
)
def test_reference_and_teacher_hold_what_is_foreseen(
    make: Callable[[], tuple[type, list[str]]], words: list[str]
) -> None:
    """To the byte, on meshes and in dtypes of their own."""
    schema, required = make()
    config: Any = load_config([], [*required, *words], schema)
    measured = run(2, held_beside, config)
    further_models, model = beside_of(config, 2)
    rows = further_models.rows(resolve_mesh(model.config.mesh, 2))
    assert not any(row.gradients or row.optimizer for row in rows)
    foreseen = [row.weights for row in rows]
    assert (
        foreseen == [max(sizes) for sizes in zip(*(sizes_held[0] for sizes_held in measured), strict=True)][: len(rows)]
    )


def test_a_reference_is_counted_only_where_a_second_copy_is_held(tmp_path: Path) -> None:
    schema, required = dpo_words()
    cases: dict[str, tuple[bool, float]] = {  # override -> (whether it has weights, forwards of a step)
        "preference.cache=off": (True, 1.0),
        "lora.rank=2": (False, 1.0),
        f"data.cache={tmp_path} preference.cache=disk": (False, 0.0),
        "reference.cpu_offload=true": (False, 1.0),
        "reference.ranks=2 reference.tp=2": (False, 1.0),
    }
    for override, (has_weights, reads) in cases.items():
        further_models, _ = beside_of(load_config([], [*required, *override.split()], schema), 1)
        (row,) = further_models.rows(MeshSizes(1, 1, 1, 1, 1, 1))
        assert (bool(row.weights), further_models.models[0].reads) == (has_weights, reads), override
        assert bool(row.note) == (override != "preference.cache=off")
    assert re.fullmatch(r"on 2 separate ranks, [\d.]+ KiB on each; computed in the first epoch .*", row.note), row.note
    further_models, _ = beside_of(load_config([], [*required, "preference.loss=simpo"], schema), 1)
    assert not further_models.rows(MeshSizes(1, 1, 1, 1, 1, 1))


@pytest.mark.parametrize(("make", "key"), [(dpo_words, "reference.ranks=2"), (distill_words, "teacher.ranks=2")])
def test_a_model_on_ranks_of_its_own_adds_what_it_takes_longer_than_a_step(
    make: Callable[[], tuple[type, list[str]]], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trained model has the other ranks of --ranks, and its time alone."""
    seconds = {}
    for words in (["--ranks", "2"], [key, "--ranks", "4"]):
        assert cli.main(["plan", *make()[1], "--length", "60", "mesh.dp_shard=2", *words]) == 0
        out = capsys.readouterr().out
        parts = re.findall(r"^ *(reference|teacher)(?: t)?: forward +([\d.e-]+) +([\d.e-]+)", out, re.MULTILINE)
        (step,) = re.findall(r"^ *step +([\d.e-]+) +[\d,]+ tokens/s", out, re.MULTILINE)
        reading, adds = (sum(float(part[n]) for part in parts) for n in (1, 2))
        assert reading > 0 and adds == pytest.approx(0.0 if key in words else reading)
        seconds[len(words)] = float(step) - adds
        assert ("on 2 separate ranks" in out) == (key in words)
    assert seconds[2] == pytest.approx(seconds[3], rel=0.02)
    slow = [Reading("slow", 3.0, 3.0, ahead=True), Reading("slower", 6.0, 6.0, ahead=True), Reading("turns", 1.0, 1.0)]
    assert [part.waits for part in with_waits(slow, 4.0)] == pytest.approx([4 / 3, 8 / 3, 1.0])
    assert cli.main(["plan", *make()[1], key, "--ranks", "2"]) == 2
    assert "leaves no rank for the trained model: start with --ranks 3" in capsys.readouterr().err


def test_a_step_is_longer_by_what_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    """A reference, and the policy's own answers where a loss compares those of the whole step; the parts add up."""
    _, required = dpo_words()
    parts: dict[str, dict[str, float]] = {}
    for loss in ("sigmoid", "aot", "simpo"):
        assert cli.main(["plan", *required, "--length", "60", f"preference.loss={loss}"]) == 0
        out = capsys.readouterr().out
        assert "job      weft dpo: the config has the section preference" in out
        assert "6 documents per step, two for each of 3 pairs" in out
        rows = re.findall(r"^ *(reference: forward|trained model: forward|step) +([\d.e-]+)", out, re.MULTILINE)
        parts[loss] = {name: float(seconds) for name, seconds in rows if name != "step" or "." in seconds}
    assert parts["sigmoid"].keys() == {"reference: forward", "step"}
    assert parts["aot"].keys() == {"reference: forward", "trained model: forward", "step"}
    assert parts["simpo"].keys() == {"step"}
    reading = parts["aot"]["step"] - parts["simpo"]["step"]
    assert reading == pytest.approx(sum(parts["aot"].values()) - parts["aot"]["step"], rel=0.02)


def test_dry_runs_tell_the_loss_and_what_it_is_measured_against(capsys: pytest.CaptureFixture[str]) -> None:
    teacher = str(home() / "wide")
    for command, (_, required), words in (
        ("dpo", dpo_words(), ("loss     sigmoid", "a separate reference", "of 3 pairs", "reference")),
        ("reward", dpo_words(), ("loss     bradley_terry; a head of 1 number", "of 3 pairs")),
        (
            "distill",
            (distill_words()[0], [*distill_words()[1], "distill.on_policy=0.5"]),
            (f"teacher  {teacher}", "loss     forward_kl", "head of teacher", "samples  50%", "copy that samples"),
        ),
    ):
        required = [word for word in required if not word.startswith("preference.") or command == "dpo"]
        assert cli.main([command, *required, "--device", "cpu", "--nproc", "1", "--dry-run"]) == 0
        out = re.sub(r" *\n {9}", " ", capsys.readouterr().out)
        assert all(text in out for text in words), (command, out)


# ---------------------------------------------------------------- time


def machine(**changes: float) -> Machine:
    assumed = accelerator("h100-80gb")
    assert assumed is not None
    return machine_of(assumed, **changes)


def test_collectives_take_what_their_slowest_links_allow() -> None:
    """100 GB over groups of a machine, of several, and of one rank on each; rates as they are."""
    slow = replace(machine(link=100.0, network=4.0), moved=1.0, hop=0.0, far_hop=0.0)
    size = 100e9
    assert slow.gathering(size, 8, 1) == pytest.approx(7 / 8)
    assert slow.gathering(size, 16, 1) == pytest.approx(100 / 2 / (8 * 4))  # half of it comes over eight networks
    assert slow.gathering(size, 2, 8) == pytest.approx(100 / 2 / 4)
    assert slow.exchanging(size, 16, 1) == pytest.approx(100 / 2 / 4)
    assert (slow.sending(size, 1), slow.sending(size, 8)) == (1.0, 25.0)
    assert slow.gathering(size, 1, 1) == slow.exchanging(size, 1, 1) == 0.0


@pytest.mark.parametrize("mesh", [{"dp_shard": 8}, {"pp": 2, "dp_shard": 2, "tp": 2}, {"dp_shard": 4, "cp": 2}])
def test_the_parts_of_a_step_add_up(mesh: dict[str, int]) -> None:
    config = replace(engine_config(saved_model("llama"), "1"), mesh=MeshConfig(**mesh))
    sizes, model = resolve_mesh(config.mesh, 8), Blueprint(config, "cpu", accelerator("h100-80gb"))
    rows = RowFacts.from_plan(model, plan_rows(model, sizes, [200 if sizes.cp > 1 else 100, 60, 30] * 16))
    time = time_of(model, sizes, rows, machine())
    assert sum(part.waits for part in time.parts) == pytest.approx(time.seconds)
    assert 0 < time.mfu < 0.6
    # No faster than the dearest rows of all micro-batches on ranks that wait for nothing.
    computing = sum(part.waits for part in time.parts if part.name in ("linear layers", "attention", "uneven rows"))
    peak = machine().peak * machine().matmul
    assert rows.flops / sizes.world / peak <= computing + 1e-12
    assert time_of(model, sizes, rows, machine(), Activations(FULL)).seconds >= time.seconds


# ---------------------------------------------------------------- what a step costs beside products

PLAIN = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 320,
    "hidden_size": 256,
}


def test_the_passes_of_a_layer_by_hand() -> None:
    """A llama layer in bf16. RMSNorm: 6 bytes an element to fp32, 8 for the square, 4 for the mean, 8 times the root, 6
    back, 4 times the weight. Rotation: 4 times cosines, 2 + 4 to turn half, 4 times sines, 6 for the sum. Sums with the
    residual: 6. SiLU 4, the product 6. What is as wide as a head or narrower is a few percent."""
    config = blueprint("llama", "1", {}, **PLAIN).built.config
    passes = layer_passes(config, torch.bfloat16)
    norms, rotated, sums, activations = 2 * 36 * 256, 20 * (4 + 2) * 32, 2 * 6 * 256, 10 * 320
    assert passes[0].forward.bytes == pytest.approx(norms + rotated + sums + activations, rel=0.08)
    assert 1.8 < passes[0].backward.bytes / passes[0].forward.bytes < 2.6
    assert passes[0] == passes[1] and 30 < passes[0].forward.operations < 60
    compute = layer_passes(config, torch.float32)  # as wide before the casts as behind them
    assert compute[0].forward.bytes > passes[0].forward.bytes
    divided = layer_passes(config, torch.bfloat16, RowSharing(tp=2, sequence=True))
    assert 0.5 < divided[0].forward.bytes / passes[0].forward.bytes < 0.6  # and what is gathered


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma3_text", "deepseek_v3", "nemotron_h", "qwen3_5_text"])
def test_the_passes_of_families_are_counted(family: str) -> None:
    """Not taken from another family, as of those that cannot run on meta."""
    model = blueprint(family, "1", {"model": {"fused_norms": True}, "fsdp": {"param_dtype": "bf16"}})
    stock = layer_passes(model.built.config, torch.bfloat16)
    fused = model.passes(RowSharing())
    assert fused == layer_passes(model.built.config, torch.bfloat16, fused_norms=True) and len(fused) == len(stock)
    assert all(
        fused_layer.forward.bytes <= stock_layer.forward.bytes
        for fused_layer, stock_layer in zip(fused, stock, strict=True)
    )


def described(
    sections: dict[str, Any],
    mesh: dict[str, int],
    lengths: list[int],
    machine_used: Machine | None = None,
    family: str = "llama",
    **changes: Any,
) -> tuple[Blueprint, dict[str, float], Any]:
    """(A small model in bf16 on H100s, part -> seconds, the whole time)."""
    fsdp = {"param_dtype": "bf16", **sections.get("fsdp", {})}
    path = saved_model(family, **(PLAIN if family == "llama" else {}), **changes)
    config = replace(engine_config(path, "1", **{**sections, "fsdp": fsdp}), mesh=MeshConfig(**mesh))
    model = Blueprint(config, "cpu", accelerator("h100-80gb"))
    sizes = resolve_mesh(config.mesh, fewest_ranks(config.mesh))
    time = time_of(model, sizes, RowFacts.from_plan(model, plan_rows(model, sizes, lengths)), machine_used or machine())
    assert sum(part.waits for part in time.parts) == pytest.approx(time.seconds)
    return model, {part.name: part.seconds for part in time.parts}, time


def test_what_a_single_rank_spends_on_copies_and_the_update_by_hand() -> None:
    """One micro-batch, 60 tokens, of which the last is not read. A parameter is cast (4 + 2 bytes) and copied (2 + 2)
    once, as memory suffices for all copies; its gradient is laid out (2 + 4) and copied (4 + 4). AdamW reads and writes
    master and two states, reads the gradient and writes it clipped; the norm reads it: 36 bytes."""
    model, parts, _ = described({}, {"dp_shard": 1}, [60])
    rate = 3350e9 * 0.8
    assert parts["copies of weights"] == pytest.approx(24 * model.trained / rate)
    assert parts["optimizer"] == pytest.approx(36 * model.trained / rate)
    assert parts["end of the step"] == pytest.approx(15e-6 * len(model.weights))
    layers = model.passes(RowSharing())
    of_layers = 59 * sum(layer.forward.bytes + layer.backward.bytes for layer in layers) / (3350e9 * 0.46)
    assert parts["elementwise"] == pytest.approx(of_layers + 59 * model.head_passes(1) / rate, rel=1e-3)
    operations = sum(layer.forward.operations + layer.backward.operations for layer in layers)
    assert parts["kernel launches"] == pytest.approx(15e-6 * operations)


def test_a_step_with_little_to_compute_takes_what_the_host_needs() -> None:
    _, parts, time = described({}, {"dp_shard": 1}, [60])
    assert time.limit == "kernel launches" and time.seconds > parts["kernel launches"] > 10 * parts["linear layers"]
    faster = described({}, {"dp_shard": 1}, [60], replace(machine(), launch=1e-6))[2]
    assert faster.seconds < 0.2 * time.seconds


def test_recomputed_layers_pass_once_more_and_compiled_ones_less() -> None:
    model, plain, _ = described({}, {"dp_shard": 1}, [60])
    recomputed = described({"model": {"recompute": "full"}}, {"dp_shard": 1}, [60])[1]
    fused = described({"model": {"compile": True}}, {"dp_shard": 1}, [60])[1]
    rate, layers = 3350e9 * 0.46, model.passes(RowSharing())
    forward = 59 * sum(layer.forward.bytes for layer in layers) / rate
    both_passes = forward + 59 * sum(layer.backward.bytes for layer in layers) / rate
    assert recomputed["elementwise"] - plain["elementwise"] == pytest.approx(forward)
    assert plain["elementwise"] - fused["elementwise"] == pytest.approx(0.6 * both_passes)


def test_blocks_of_experts_pass_as_in_plain_layers() -> None:
    """They stay outside of the graphs."""
    model, plain, _ = described({}, {"dp_shard": 1}, [60], family="qwen3_moe")
    fused = described({"model": {"compile": True}}, {"dp_shard": 1}, [60], family="qwen3_moe")[1]
    directions = [work for layer in model.passes(RowSharing()) for work in (layer.forward, layer.backward)]
    experts, everything = sum(work.experts for work in directions), sum(work.bytes for work in directions)
    assert 0.2 * everything < experts < 0.9 * everything
    saved = 59 * 0.6 * (everything - experts) / (3350e9 * 0.46)
    assert plain["elementwise"] - fused["elementwise"] == pytest.approx(saved)


def test_attention_of_short_documents_is_slower() -> None:
    """Of a document of 640 tokens it reaches half of the rate: the same FLOPs again."""
    model, parts, _ = described({"step": {"max_tokens_per_device": 704}}, {"dp_shard": 1}, [640])
    flops = model_flops(model.built.flops)[1] * 640**2
    assert parts["attention"] == pytest.approx(2 * flops / (machine().peak * machine().attention), rel=0.01)


def test_shards_are_cast_and_what_arrived_is_copied() -> None:
    """On 4 ranks: a quarter is cast, all is copied out; gradients are laid out; a second micro-batch adds."""
    model, parts, _ = described({"step": {"max_tokens_per_device": 64}}, {"dp_shard": 4}, [60] * 8)
    share = Holdings(model, MeshSizes(1, 4, 1, 1, 1, 1)).share_of(RankCoordinates())
    freed = sum(unit.elements * unit.count for unit in share.units if not unit.keep)
    of_gather, of_gradient = 6 / 4 + 4, 6 + 12 / 4
    bytes_of_row = of_gather * (model.trained + freed) + of_gradient * model.trained
    assert parts["copies of weights"] == pytest.approx(2 * bytes_of_row / (3350e9 * 0.8))


def test_copies_that_do_not_fit_are_made_for_forward_and_for_backward() -> None:
    """And for every micro-batch, where an eighth of the memory does not stay free beside them."""
    steps = {"step": {"max_tokens_per_device": 64}}
    model, parts, _ = described(steps, {"dp_shard": 1}, [60] * 2)
    (memory,) = memory_by_stage(model, MeshSizes(1, 1, 1, 1, 1, 1), None)
    rate = 3350e9 * 0.8
    assert memory.keeps and parts["copies of weights"] == pytest.approx((10 + 2 * (14 + 12)) * model.trained / rate)
    model.assumed = Accelerator("h100-80gb", int(memory.fullest / 0.875) - 2)
    facts = RowFacts.from_plan(model, plan_rows(model, MeshSizes(1, 1, 1, 1, 1, 1), [60] * 2))
    freed = sum(unit.elements * unit.count for unit in memory.share.units if not unit.keep)
    time = time_of(model, MeshSizes(1, 1, 1, 1, 1, 1), facts, machine())
    (copies,) = (part.seconds for part in time.parts if part.name == "copies of weights")
    assert copies == pytest.approx(2 * (10 * model.trained + 10 * freed + 26 * model.trained) / rate)


def test_frozen_weights_are_copied_where_there_are_several_data_ranks() -> None:
    """In the compute dtype: copied out when they have come, in forward and in backward. One rank leaves them alone."""
    rate = 3350e9 * 0.8
    model, parts, _ = described({"lora": {"rank": 4}}, {"dp_shard": 1}, [60])
    assert parts["copies of weights"] == pytest.approx(24 * model.trained / rate)
    assert parts["optimizer"] == pytest.approx(36 * model.trained / rate)
    model, parts, _ = described({"lora": {"rank": 4}}, {"dp_shard": 2}, [60] * 2)
    frozen = sum(math.prod(weight.shape) for weight in model.weights if not weight.trained)
    assert parts["copies of weights"] >= 2 * 4 * 0.8 * frozen / rate


def test_fused_norms_pass_over_less() -> None:
    """A stock RMSNorm moves 36 bytes of an element in forward and 92 in backward, torch's kernel 4 and 10."""
    stock, fused = (
        described({"model": {"fused_norms": setting}}, {"dp_shard": 1}, [60])[0].passes(RowSharing())[0]
        for setting in (False, "auto")
    )
    assert stock.forward.bytes - fused.forward.bytes == pytest.approx(2 * 256 * 32, rel=0.02)
    assert stock.backward.bytes - fused.backward.bytes == pytest.approx(2 * 256 * 82, rel=0.03)


def test_4b_on_an_h100_takes_what_a_step_really_costs(checkout: Path) -> None:
    """8,192 tokens without recomputation. Products alone would take 0.29 s."""
    seconds = {}
    stock = ["model.fused_norms=false"]
    changes = {"stock": stock, "eager": [], "compiled": ["model.compile=true"], "full": ["model.recompute=full"]}
    for name, words in changes.items():
        rows = ["step.documents=20", "step.max_tokens_per_device=8192", "mesh.dp_shard=1", "model.recompute=none"]
        config = load_config(["examples/sft_qwen3_4b.yaml"], [*rows, *words], SftConfig, weights=False)
        model, sizes = (
            Blueprint(EngineConfig.from_config(config), "cpu", accelerator("h100-80gb")),
            MeshSizes(1, 1, 1, 1, 1, 1),
        )
        facts = RowFacts.from_plan(model, plan_rows(model, sizes, [409] * 20))
        seconds[name] = time_of(model, sizes, facts, machine()).seconds
    assert 0.6 < seconds["stock"] < 0.85
    assert 0.45 < seconds["eager"] < seconds["stock"] - 0.1
    assert 0.4 < seconds["compiled"] < seconds["eager"] - 0.03
    assert seconds["full"] > seconds["eager"] + 0.08


def test_what_was_measured_takes_the_place_of_assumptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MEASURED", tmp_path)
    assumed = machine()
    (tmp_path / "a100-80gb.json").write_text('{"source": "another card"}')
    assert machine() == assumed and "None of this was measured" in assumed.lines()[-1]
    constants = {
        "source": "make gpu on a card", "matmul_rate": 494.5e12, "copy_rate": 2.01e12, "host_rate": 20e9,
        "attention_rate": 98.9e12, "operation_rate": 1.005e12, "launch": 9e-6,
    }  # fmt: skip
    (tmp_path / "h100-80gb.json").write_text(json.dumps(constants))
    measured = machine()
    shares = measured.matmul, measured.attention, measured.copied, measured.operated
    assert shares == pytest.approx((0.5, 0.1, 0.6, 0.3))
    assert (measured.launch, measured.host * measured.moved) == pytest.approx((9e-6, 20e9))
    assert "were measured: make gpu on a card" in measured.lines()[-1] and measured.peak == assumed.peak
    assert machine(matmul=0.9).matmul == 0.9  # what is stated counts more


# ---------------------------------------------------------------- on the host


def test_what_is_offloaded_is_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = {"dp_shard": 2}
    on, off = (described({"fsdp": {"cpu_offload": offload}}, mesh, [60] * 2) for offload in (True, False))
    sizes, facts = MeshSizes(1, 2, 1, 1, 1, 1), None
    (resident_memory,), (offloaded,) = (memory_by_stage(model, sizes, facts) for model, *_ in (on, off))
    assert (
        resident_memory.share == offloaded.share
        and offloaded.resident == resident_memory.share.resident > 0 == resident_memory.resident
    )
    assert (
        resident_memory.on_host - resident_memory.host == resident_memory.share.resident
        and offloaded.on_host == offloaded.host
    )
    two = sorted((unit.elements for unit in resident_memory.share.units for _ in range(unit.count)), reverse=True)[:2]
    assert resident_memory.staged == sum(two) * 4 // 2
    assert offloaded.fullest - resident_memory.fullest == resident_memory.share.resident - resident_memory.staged
    # Each rank's half comes in fp32 for forward and, where it was freed, for backward; gradients go back in fp32.
    model, parts, _ = on
    freed = sum(unit.elements * unit.count for unit in resident_memory.share.units if not unit.keep)
    moved = 4 * (model.trained + freed + model.trained) / 2
    assert parts["copies from and to the host"] == pytest.approx(moved / (50e9 * 0.8))
    assert parts["optimizer"] == pytest.approx(36 * model.trained / 2 / 25e9)
    assert "copies from and to the host" not in off[1]


def test_an_optimizer_on_the_host_leaves_weights_in_the_compute_dtype() -> None:
    sizes = MeshSizes(1, 2, 1, 1, 1, 1)
    model, parts, _ = described({"fsdp": {"cpu_offload": "optimizer"}}, {"dp_shard": 2}, [60] * 2)
    (memory,) = memory_by_stage(model, sizes, None)
    assert memory.staged == 0 and memory.on_host - memory.host == memory.share.resident
    assert memory.resident == memory.on_device == sum(u.elements * u.count for u in memory.share.units) * 2 // 2
    moved = 4 * model.trained / 2  # gradients go in fp32
    assert parts["copies from and to the host"] == pytest.approx(moved / (50e9 * 0.8))
    assert parts["optimizer"] == pytest.approx(36 * model.trained / 2 / 25e9)


def test_a_single_rank_waits_for_what_comes_from_the_host() -> None:
    model, parts, _ = described({"fsdp": {"cpu_offload": True}}, {"dp_shard": 1}, [60])
    units = Holdings(model, MeshSizes(1, 1, 1, 1, 1, 1)).share_of(RankCoordinates()).units
    freed = sum(unit.elements * unit.count for unit in units if not unit.keep)
    copied = (24 * model.trained + 10 * freed) / (3350e9 * 0.8)
    assert parts["copies of weights"] == pytest.approx(copied + 4 * (model.trained + freed) / (50e9 * 0.8))
    assert parts["copies from and to the host"] == pytest.approx(4 * model.trained / (50e9 * 0.8))


def test_a_model_that_fits_by_offloading_is_said_to_fit(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "examples/sft_qwen3_4b.yaml", "--ranks", "1", "mesh.dp_shard=1", "--length", "4096"]
    words += ["--assume", "rtx4090-24gb"]
    assert cli.main(words) == 0
    assert "warning it does not fit" in printed(capsys)
    assert cli.main([*words, "fsdp.cpu_offload=true"]) == 0
    out = printed(capsys)
    assert "does not fit" not in out
    assert "by fsdp.cpu_offload: weights 14.98 GiB, gradients 14.98 GiB, optimizer 29.97 GiB" in out
    assert "average 0" not in out
    assert cli.main([*words, "fsdp.cpu_offload=true", "--search"]) == 0
    assert "use mesh." in printed(capsys)


def test_a_reference_on_the_host_takes_no_memory_of_the_accelerator(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "examples/rl_dapo_qwen3_4b.yaml", "rl.kl_coef=0.01"]
    rows = []
    for offload in ("false", "true"):
        assert cli.main([*words, f"reference.cpu_offload={offload}"]) == 0
        (row,) = re.findall(r"^ *reference +(.*)$", capsys.readouterr().out, re.MULTILINE)
        rows.append(row)
    assert "on the host (cpu_offload)" in rows[1] and "host" not in rows[0]
    weights = rows[0].split("GiB")[0].strip()
    assert f"{weights} GiB on the host" in rows[1]


@pytest.mark.parametrize(
    ("fsdp", "copies"),
    [
        ({}, 0),
        ({"reduce": "every"}, 4),
        ({"master_dtype": "bf16"}, 4),
        ({"master_dtype": "bf16", "reduce_dtype": "bf16"}, 0),
    ],
)
def test_reduced_gradients_of_replicas_that_torch_keeps_are_counted(fsdp: dict[str, str], copies: int) -> None:
    """Besides the gradients, in the dtype of the reduction: where they are cast to the masters' or added to others."""
    config = engine_config(saved_model("llama"), "1", fsdp={"param_dtype": "bf16", **fsdp})
    for mesh, sizes in (({"dp_replicate": 2, "dp_shard": 2}, (2, 2)), ({"dp_shard": 4}, (1, 4))):
        model = Blueprint(replace(config, mesh=MeshConfig(**mesh)), "cpu", None)
        mesh_sizes = MeshSizes(*sizes, 1, 1, 1, 1)
        (memory,) = memory_by_stage(model, mesh_sizes, None)
        replicas = sum(u.trained_padded // u.shards * u.count for u in memory.share.units) * copies
        assert memory.reduced == (replicas if sizes[0] > 1 else 0)


# ---------------------------------------------------------------- search


def searched(family: str, ranks: int, lengths: list[int], **changes: Any) -> Search:
    config = sft_config(saved_model(family, **changes))
    model = Blueprint(EngineConfig.from_config(config), "cpu", accelerator("h100-80gb"))
    return Search(config, model, machine(), ranks, lengths, stated=True)


def test_the_best_meshes_are_those_of_all() -> None:
    """Meshes that are left out are slower; those that a family refuses are named."""
    problem = searched("qwen3_moe", 16, [120] * 24 + [500] * 2)
    result = search(problem)
    candidates = [candidate for mesh in meshes(problem) if (candidate := tried(problem, mesh)) is not None]
    candidates.sort(key=lambda candidate: (candidate.time.seconds, candidate.fullest))
    assert [candidate.time.seconds for candidate in result.best] == [
        candidate.time.seconds for candidate in candidates[:BEST]
    ]
    assert result.tried <= result.meshes == len(list(meshes(problem)))
    assert all(candidate.mesh.world == 16 for candidate in result.best)


def tried(problem: Search, mesh: MeshSizes) -> Any:
    """The proposal of one mesh; None where it is refused."""
    single = replace(problem)
    with mock.patch("weft.recipes.plan.search.meshes", return_value=[mesh]):
        return next(iter(search(single).best), None)


def test_a_family_that_cannot_be_cut_is_proposed_without_that_axis() -> None:
    result = search(searched("gemma4_text", 8, [100] * 16))
    assert result.best and all(candidate.mesh.pp == 1 for candidate in result.best)


def test_a_search_counts_the_models_beside() -> None:
    """A reference takes memory and time on every mesh, as `weft plan` counts on that mesh; room for the trained model
    alone is not enough."""
    schema, required = dpo_words()
    config: Any = load_config([], required, schema)
    model = Blueprint(EngineConfig.from_config(config), "cpu", accelerator("h100-80gb"))
    lengths = StepLengths([60] * 12, "stated", 2, 30)
    problem = Search(config, model, machine(), 4, lengths.tokens, True, lengths.group, lengths.prefix)
    result = search(problem)
    best = result.best[0]
    on_mesh = replace(config, mesh=replace(config.mesh, **best.mesh.named, ulysses=None))
    further_models = OtherModels(on_mesh, model, 4, "cpu", accelerator("h100-80gb"))
    (reference,) = further_models.rows(best.mesh)
    assert reference.weights and best.fullest == best.memory.fullest + reference.weights
    plan, rows = lengths.plan(model, best.mesh, best.budget)
    readings = further_models.readings(best.mesh, plan, rows, problem.machine, lengths.plan)
    step = time_of(model, best.mesh, rows, problem.machine, best.choice.activations)
    assert readings and best.time.seconds == pytest.approx(with_readings(step, readings).seconds)
    tight = Accelerator("h100-80gb", int(best.memory.fullest / problem.machine.usable) + 1)
    tight_result = search(replace(problem, machine=replace(problem.machine, accelerator=tight)))
    assert (best.mesh, best.choice) not in [(candidate.mesh, candidate.choice) for candidate in tight_result.best]


def test_a_model_that_needs_another_setting_than_the_configs_is_found() -> None:
    """Weights, gradients and optimizer state of 0.6B parameters take 9.5 GB: 8 GiB do not hold them with the config's
    settings; with the optimizer on the host they do. A single mesh has several proposals, exact ones first, of these
    those that take less time."""
    words = [f"model.path={ROOT}/examples/models/Qwen3-0.6B", f"data.path={ROOT}/examples/chat.jsonl"]
    config = load_config([], [*words, "step.max_tokens_per_device=1024"], SftConfig, weights=False)
    small = Accelerator("h100-80gb", 8 << 30)
    model = Blueprint(EngineConfig.from_config(config), "cpu", small)
    problem = Search(config, model, replace(machine(), accelerator=small), 1, [512] * 4, stated=True)
    assert not list(meshes(problem))
    best = search(problem).best
    assert best[0].choice.cpu_offload and not best[0].lossy
    exact = [proposal.time.seconds for proposal in best if not proposal.lossy]
    assert len(exact) > 1 and exact == sorted(exact)


def test_overrides_of_settings_lead_to_them() -> None:
    """model.tiled_mlp=auto takes tiles with recomputation, where rows are long: what it takes needs no override, and
    whole MLPs do."""
    config = sft_config(saved_model("llama"))
    config = replace(config, step=replace(config.step, max_tokens_per_device=65_536))
    stated = Choice.from_config(config)
    assert stated.tile is None and AUTO_TILE < 65_536
    tiled = replace(stated, recompute="full", tile=AUTO_TILE)
    assert tiled.overrides(config) == ["model.recompute=full"]
    whole = replace(stated, recompute="full")
    assert whole.overrides(config) == ["model.recompute=full", "model.tiled_mlp=off"]


def test_a_model_that_fits_nowhere_says_what_is_nearest() -> None:
    problem = searched("llama", 2, [100] * 4)
    small = Accelerator("h100-80gb", 1 << 18)
    result = search(replace(problem, machine=replace(problem.machine, accelerator=small)))
    assert not result.best


# ---------------------------------------------------------------- the command


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_mesh_of_thousands_of_ranks_is_described(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "examples/sft_qwen3_235b_a22b.yaml", "--length", "32768", "step.documents=4096"]
    assert cli.main([*words, "--ranks", "4096", "mesh.dp_replicate=64"]) == 0
    out = printed(capsys)
    assert "235,093,634,560 parameters; 4,096 ranks" in out and "None of this was measured" in out
    assert "mesh.pp=8 mesh.dp_replicate=64 mesh.dp_shard=2 mesh.cp=4 mesh.ep=8 mesh.ulysses=1" in out
    assert "weights 14.19 GiB" in out and "optimizer 14.19 GiB" in out  # as the dry run has it
    assert "rows to experts all-to-all ep 8" in out and "rows from experts all-to-all ep 8" in out
    assert "dp_replicate 64" in out
    assert "bubble" in out and "peak" in out


def test_the_best_meshes_are_proposed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "examples/sft_qwen3_4b.yaml", "--search", "--ranks", "16", "--length", "8192"]
    assert cli.main([*words, "--assume", "a100-40gb"]) == 0
    out = printed(capsys)
    proposal = re.search(r"use (mesh\.\S+(?: (?:'[^']*'|\S+=\S+))*)", out)
    assert proposal is not None and "39.4 GiB" not in out
    assert cli.main([*words[:2], "--ranks", "16", "--length", "8192", *shlex.split(proposal[1])]) == 0


def test_what_is_proposed_for_a_length_lets_a_run_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    required = ["model.path=m", "data.path=d.jsonl"]
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "d.jsonl").write_text("{}")
    sft = load_config([], [*required, "data.max_length=64"], weights=False)
    assert longer(sft, 128) == "data.max_length=128" and longer(sft, 64) == longer(sft, None) == ""
    assert longer(load_config([], required, weights=False), 128) == ""  # a document may fill a row
    rl = load_config([], [*required, "rl.reward=[length]"], RlConfig, weights=False)  # 1024 + 1024 tokens
    assert longer(rl, 3000) == "rollout.max_new_tokens=1976" and longer(rl, 2048) == ""


def test_a_run_of_reinforcement_learning_is_described(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "examples/rl_dapo_qwen3_4b.yaml"]) == 0
    assert "prompts and answers of maximum length" in printed(capsys)


def test_answers_to_one_prompt_are_planned_as_the_engine_lays_them_out() -> None:
    """Two groups of four documents of 60 tokens that begin with 40, in rows of 128; what they share is not counted for
    each of them."""
    sections = {"step": {"max_tokens_per_device": 128}}
    model, sizes = blueprint("llama", "1", sections), sizes_of("1")
    plan = plan_rows(model, sizes, [60] * 8, None, 4, 40)
    documents = [
        Document(torch.tensor([1] * 40 + [2 + n] * 20), torch.ones(60), group=group)
        for group in range(2)
        for n in range(4)
    ]
    planner = planner_of(model, sizes)
    real = planner.plan(planner.metadata(documents), 128)
    assert (plan.rows, plan.lengths, plan.costs) == (real.rows, real.lengths, real.costs)
    separate_plan = plan_rows(model, sizes, [60] * 8)
    assert plan.tokens_forwarded == 2 * (40 + 4 * 19) < separate_plan.tokens_forwarded == 8 * 59
    trees, separate = (RowFacts.from_plan(model, layout) for layout in (plan, separate_plan))
    assert trees.flops < 0.55 * separate.flops and trees.tokens == separate.tokens == 480
    simulated = planner.metadata(simulated_documents(Step([60] * 8, CrossEntropy(), (), 4, 40)))
    assert planner.plan(simulated, 128).tokens_forwarded == plan.tokens_forwarded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--assume", "h1"], "--assume h1: unknown accelerator"),
        (["--matmul", "2"], "--matmul 2: must be above 0, and at most 1"),
        (["--ranks", "1000000000"], "weft plans for up to 1,000,000 ranks"),
        (["--ranks", "7", "mesh.tp=2"], "a multiple of 2 ranks (--ranks)"),
        (["mesh.tp=3", "mesh.dp_shard=1"], "mesh.tp=3 does not divide"),
        (["--simulated"], "unrecognized arguments: --simulated"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    words: list[str], message: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "examples/sft_qwen3_4b.yaml", "mesh.dp_shard=-1", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_rank_has_units_only_of_the_layers_of_its_stage() -> None:
    """The first layer of this model alone has no experts."""
    model, sizes = blueprint("deepseek_v3", "pp2x2", {}), sizes_of("pp2x2")
    shares = [Holdings(model, sizes).share_of(RankCoordinates(pp=stage)) for stage in range(2)]
    assert all(unit.count > 0 for stage in shares for unit in stage.units)
    assert {unit.name for unit in shares[0].units} != {unit.name for unit in shares[1].units}


def test_matrices_have_a_smaller_share_in_longer_documents() -> None:
    model, sizes = blueprint("llama", "2", {"step": {"max_tokens_per_device": 4096}}), sizes_of("2")
    short, long = (RowFacts.from_plan(model, plan_rows(model, sizes, [length] * 4)).linear for length in (8, 2048))
    assert 0.9 < short <= 1.0 and 0.1 < long < 0.9


def test_rows_of_equal_documents_are_planned_for_some_of_the_ranks_and_counted_for_all() -> None:
    problem = searched("llama", 4, [64] * 8)
    sizes = resolve_mesh(MeshConfig(dp_shard=4), 4)
    complete = RowFacts.from_plan(problem.model, plan_rows(problem.model, sizes, problem.lengths, 128))
    assert _rows(problem, {}, problem.model, sizes, 128)[1] == complete and complete.tokens == 512
