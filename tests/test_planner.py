"""`weft plan`: what it says of memory and of what travels, beside what real ranks hold and send."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.cases import MESHES, bytes_held, engine_config, open_engine, saved_model, world_of
from tests.pool import run
from tests.vision_zoo import vision_folder
from weft import cli
from weft.cluster.machine import Accelerator, accelerator
from weft.cluster.process import pretend
from weft.config import SftConfig, load_config
from weft.config.mesh import MeshSizes, fewest_ranks, resolve_mesh
from weft.config.rl_schema import RlConfig
from weft.config.schema import MeshConfig
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.objectives.cross_entropy import CrossEntropy
from weft.planner.blueprint import Blueprint
from weft.planner.holdings import Held, Holdings, Place
from weft.planner.machines import Machine, machine_of
from weft.planner.memory import _lingering, _unreduced, memory_by_stage
from weft.planner.rows import RowFacts, plan_rows
from weft.planner.search import BEST, Search, meshes, search
from weft.planner.simulate import Step, plan_of, rows_of, watched_step
from weft.planner.timing import time_of
from weft.planner.traffic import transfers
from weft.recipes.plan import longer

ROOT = Path(__file__).parent.parent


def sft_config(path: str) -> SftConfig:
    rows = ["step.max_tokens_per_device=256", f"data.path={ROOT}/examples/chat.jsonl", "model.init=random"]
    return load_config([], [f"model.path={path}", *rows], SftConfig, weights=False)


def sizes_of(mesh: str) -> MeshSizes:
    return resolve_mesh(MeshConfig(**MESHES[mesh]), world_of(mesh))


def blueprint(family: str, mesh: str, sections: dict[str, Any], **changes: Any) -> Blueprint:
    return Blueprint(engine_config(saved_model(family, **changes), mesh, **sections), "cpu", None)


# ---------------------------------------------------------------- what ranks hold


def counted(path: str, mesh: str, sections: dict[str, Any]) -> tuple[int, int, int]:
    return bytes_held(open_engine(path, mesh, **sections))


def bytes_of(held: Held) -> tuple[int, int, int]:
    return held.weights, held.gradients, held.optimizer


@pytest.mark.parametrize(
    ("family", "mesh", "sections", "changes"),
    [
        ("llama", "1", {}, {}),
        ("llama", "3", {"model": {"freeze": ("*.mlp",)}, "optimizer": {"state_dtype": "bf16"}}, {}),
        ("qwen3_moe", "2x2", {"fsdp": {"overrides": {"*.self_attn": "replicate", "*.mlp.gate": 2}}}, {}),
        ("llama_tied", "tp4", {"optimizer": {"name": "sgd", "momentum": 0.9}}, {"vocab_size": 130}),
        ("qwen3", "2xtp2", {"lora": {"rank": 4}}, {"vocab_size": 131}),
        ("qwen3_moe", "3ep3", {}, {"num_experts": 5}),
        ("qwen3_moe", "4ep2", {"lora": {"rank": 3, "targets": ("*.experts.*", "*.q_proj")}}, {}),
        ("gpt_oss", "ep2xtp2", {"fsdp": {"param_dtype": "bf16"}}, {}),
        ("llama_tied", "pp2x2", {}, {"num_hidden_layers": 3}),
        ("deepseek_v3", "pp2xcp2", {}, {}),
        ("qwen3_moe", "pp2xep2xtp2", {}, {}),
    ],
)
def test_what_each_rank_holds_is_counted_to_the_byte(
    family: str, mesh: str, sections: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = blueprint(family, mesh, sections, **changes)
    sizes = sizes_of(mesh)
    holdings = Holdings(model, sizes)
    model.check(sizes)
    there = run(world_of(mesh), counted, saved_model(family, **changes), mesh, sections)
    foreseen = [bytes_of(holdings.of(Place.of(sizes, rank))) for rank in range(sizes.world)]
    assert foreseen == there
    assert max(held.resident for held in holdings.by_stage()) == max(map(sum, there))


@pytest.mark.parametrize(("reduce", "micro_batches", "roots"), [
    ("scatter", 4, 1), ("scatter", 1, 0), ("every", None, 1), ("last", 4, 0), ("last", None, 0),
])  # fmt: skip
def test_gradients_of_the_root_linger_where_another_micro_batch_follows(
    reduce: str, micro_batches: int | None, roots: int
) -> None:
    """As they were sent, in fp32. With `last` they are among those of all units, which are counted as unreduced."""
    model, sizes = blueprint("llama", "2", {"fsdp": {"reduce": reduce}}), sizes_of("2")
    held = Holdings(model, sizes).of(Place.of(sizes, 0))
    embedding = 128 * 64  # of a vocabulary of 128 tokens, a hidden width of 64; head and norm are a unit of their own
    assert _lingering(model, held, micro_batches) == roots * embedding * 4
    all_units = sum(unit.trained * unit.count for unit in held.units) * 4
    assert (_unreduced(model, held, micro_batches) > all_units) == (reduce == "last")


# ---------------------------------------------------------------- what travels

SMALL = 4096  # bytes of metrics, norms, counts of rows and log-sum-exps, which are not foreseen
Totals = dict[tuple[int, str], int]


def sent(path: str, mesh: str, sections: dict[str, Any], lengths: list[int]) -> Totals:
    """(ranks, operation) -> bytes, of the collectives of a real rank's step."""
    engine = open_engine(path, mesh, **sections)
    step = Step(lengths, CrossEntropy())
    plan = plan_of(engine, step)
    _, watch = watched_step(engine, plan, rows_of(engine, plan, step), step.objective)
    found: Totals = defaultdict(int)
    for kind, total in watch.collectives.totals.items():
        found[kind.ranks, kind.operation] += total.bytes
    return dict(found)


def foreseen(model: Blueprint, sizes: MeshSizes, rank: int, lengths: list[int]) -> Totals:
    held = Holdings(model, sizes).of(Place.of(sizes, rank))
    load = RowFacts.of(model, plan_rows(model, sizes, lengths)).load
    found: dict[tuple[int, str], float] = defaultdict(float)
    for one in transfers(model, sizes, held, load, recompute=model.config.model.recompute == "full"):
        # Keys and values are sent to those who want them, and heads to all.
        given = one.received if one.axis == "cp (ring)" else one.payload * one.calls
        found[2 if one.kind == "send" else one.size, one.kind] += given
    return {key: round(value) for key, value in found.items()}


RECOMPUTE = {"model": {"recompute": "full"}}


@pytest.mark.parametrize(
    ("family", "mesh", "sections", "lengths", "changes"),
    [
        ("llama", "3", {"fsdp": {"reduce": "last"}}, [65] * 9, {}),
        ("llama_tied", "2x2", {"lora": {"rank": 4}}, [65] * 8, {}),
        ("llama", "2xtp2", RECOMPUTE, [65] * 8, {}),
        ("gemma3_text", "tp2", RECOMPUTE, [65] * 4, {}),
        ("falcon", "tp2", {}, [65] * 4, {}),
        ("llama", "cp2", {}, [201] * 2, {}),
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
    for rank, there in enumerate(run(world_of(mesh), sent, path, mesh, sections, lengths)):
        expected = foreseen(model, sizes, rank, lengths)
        for key in {*expected, *there} - {(2, "receive")}:
            pair = expected.get(key, 0), there.get(key, 0)
            if key[1] == "all-to-all":
                exchanged = [exchanged[0] + pair[0], exchanged[1] + pair[1]]
            else:
                assert pair[0] == pytest.approx(pair[1], abs=SMALL), (rank, key, expected, there)
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
    with pretend(sizes.world) as ranks:
        said = Engine(config, ranks, weights=False).memory
    model = Blueprint(config, "cpu", None)
    model.check(sizes)
    first = memory_by_stage(model, sizes, None)[0]
    assert first.needs == replace(said, whole=0)
    assert first.rows and not first.unknown


# ---------------------------------------------------------------- time


def machine(**others: float) -> Machine:
    assumed = accelerator("h100-80gb")
    assert assumed is not None
    return machine_of(assumed, **others)


def test_collectives_take_what_their_slowest_links_allow() -> None:
    """100 GB over groups of a machine, of several, and of one rank on each; rates as they are."""
    found = replace(machine(link=100.0, network=4.0), moved=1.0, hop=0.0, far_hop=0.0)
    whole = 100e9
    assert found.gathering(whole, 8, 1) == pytest.approx(7 / 8)
    assert found.gathering(whole, 16, 1) == pytest.approx(100 / 2 / (8 * 4))  # half of it comes over eight networks
    assert found.gathering(whole, 2, 8) == pytest.approx(100 / 2 / 4)
    assert found.exchanging(whole, 16, 1) == pytest.approx(100 / 2 / 4)
    assert (found.sending(whole, 1), found.sending(whole, 8)) == (1.0, 25.0)
    assert found.gathering(whole, 1, 1) == found.exchanging(whole, 1, 1) == 0.0


@pytest.mark.parametrize("mesh", [{"dp_shard": 8}, {"pp": 2, "dp_shard": 2, "tp": 2}, {"dp_shard": 4, "cp": 2}])
def test_the_parts_of_a_step_add_up(mesh: dict[str, int]) -> None:
    config = replace(engine_config(saved_model("llama"), "1"), mesh=MeshConfig(**mesh))
    sizes, model = resolve_mesh(config.mesh, 8), Blueprint(config, "cpu", accelerator("h100-80gb"))
    rows = RowFacts.of(model, plan_rows(model, sizes, [200 if sizes.cp > 1 else 100, 60, 30] * 16))
    time = time_of(model, sizes, rows, machine())
    assert sum(part.waits for part in time.parts) == pytest.approx(time.seconds)
    assert 0 < time.mfu < 0.6
    # No faster than the dearest rows of all micro-batches on ranks that wait for nothing.
    computing = sum(part.waits for part in time.parts if part.name in ("matrices", "attention", "uneven rows"))
    peak = machine().peak * machine().matmul
    assert rows.flops / sizes.world / peak <= computing + 1e-12
    assert time_of(model, sizes, rows, machine(), recompute=True).seconds >= time.seconds


# ---------------------------------------------------------------- search


def searched(family: str, ranks: int, lengths: list[int], **changes: Any) -> Search:
    config = sft_config(saved_model(family, **changes))
    model = Blueprint(EngineConfig.of(config), "cpu", accelerator("h100-80gb"))
    return Search(config, model, machine(), ranks, lengths, stated=True)


def test_the_best_meshes_are_those_of_all() -> None:
    """Meshes that are left out are slower; those that a family refuses are named."""
    wanted = searched("qwen3_moe", 16, [120] * 24 + [500] * 2)
    found = search(wanted)
    every = [one for mesh in meshes(wanted) if (one := tried(wanted, mesh)) is not None]
    every.sort(key=lambda one: (one.time.seconds, one.memory.fullest))
    assert [one.time.seconds for one in found.best] == [one.time.seconds for one in every[:BEST]]
    assert found.tried <= found.meshes == len(list(meshes(wanted)))
    assert all(one.mesh.world == 16 for one in found.best)


def tried(wanted: Search, mesh: MeshSizes) -> Any:
    """The proposal of one mesh; None where it is refused."""
    single = replace(wanted)
    with mock.patch("weft.planner.search.meshes", return_value=[mesh]):
        return next(iter(search(single).best), None)


def test_a_family_that_cannot_be_cut_is_proposed_without_that_axis() -> None:
    found = search(searched("gemma4_text", 8, [100] * 16))
    assert found.best and all(one.mesh.pp == 1 for one in found.best)


def test_a_model_that_fits_nowhere_says_what_is_nearest() -> None:
    wanted = searched("llama", 2, [100] * 4)
    small = Accelerator("h100-80gb", 1 << 18)
    found = search(replace(wanted, machine=replace(wanted.machine, accelerator=small)))
    assert not found.best


# ---------------------------------------------------------------- the command


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_mesh_of_thousands_of_ranks_is_described(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "examples/sft_qwen3_235b_a22b.yaml", "--length", "32768", "step.documents=4096"]
    assert cli.main([*words, "--ranks", "4096", "mesh.dp_replicate=64"]) == 0
    out = said(capsys)
    assert "235,093,634,560 parameters; 4,096 ranks" in out and "Nothing of this was measured" in out
    assert "mesh.pp=8 mesh.dp_replicate=64 mesh.dp_shard=2 mesh.cp=4 mesh.ep=8 mesh.ulysses=1" in out
    assert "weights 14.19 GiB" in out and "optimizer 14.19 GiB" in out  # as the dry run has it
    assert "rows to experts, and back all-to-all ep 8" in out and "dp_replicate 64" in out
    assert "bubble" in out and "at the fullest" in out


def test_the_best_meshes_are_proposed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "examples/sft_qwen3_4b.yaml", "--search", "--ranks", "16", "--length", "8192"]
    assert cli.main([*words, "--assume", "a100-40gb"]) == 0
    out = said(capsys)
    found = re.search(r"take (mesh\.\S+(?: \S+=\S+)*)", out)
    assert found is not None and "39.4 GiB" not in out
    assert cli.main([*words[:2], "--ranks", "16", "--length", "8192", *found[1].split()]) == 0


def test_what_is_proposed_for_a_length_lets_a_run_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["model.path=m", "data.path=d.jsonl"]
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "d.jsonl").write_text("{}")
    sft = load_config([], [*given, "data.max_length=64"], weights=False)
    assert longer(sft, 128) == "data.max_length=128" and longer(sft, 64) == longer(sft, None) == ""
    assert longer(load_config([], given, weights=False), 128) == ""  # a document may fill a row
    rl = load_config([], [*given, "rl.reward=[length]"], RlConfig, weights=False)  # 1024 + 1024 tokens
    assert longer(rl, 3000) == "rollout.max_new_tokens=1976" and longer(rl, 2048) == ""


def test_a_run_of_reinforcement_learning_is_described(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "examples/rl_dapo_qwen3_4b.yaml"]) == 0
    assert "prompts and answers as long as rollout allows" in said(capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--assume", "h1"], "--assume h1: weft knows"),
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
