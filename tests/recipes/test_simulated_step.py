"""A simulated step: beside the same step on real ranks, what each of them holds, has in memory and sends; beside what
`weft plan` says by arithmetic, on shapes of real models."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cases import MESHES, engine_config, open_engine, saved_model, world_of
from tests.support.pool import run
from weft import cli
from weft.config.commands import SCHEMAS
from weft.config.load import load_config
from weft.config.mesh import MeshSizes, resolve_mesh
from weft.config.recompute import RecomputePolicy, policy_of
from weft.config.schema import MeshConfig, ModelConfig, SftConfig, StepConfig
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.errors import UserError
from weft.launch.machine import accelerator
from weft.launch.process import join
from weft.launch.simulated import Simulation, fills_host, host_memory
from weft.recipes.plan.blueprint import Blueprint
from weft.recipes.plan.memory import Memory, memory_by_stage
from weft.recipes.plan.observed_collectives import Collectives, Kind, Total
from weft.recipes.plan.observed_memory import Peak
from weft.recipes.plan.other_models import answers_of_example
from weft.recipes.plan.recipe import step_of
from weft.recipes.plan.rows import RowFacts, plan_rows
from weft.recipes.plan.show import show_simulated
from weft.recipes.plan.simulate import Simulated, Step, plan_of, rows_of, simulate, simulated_documents, watched_step
from weft.recipes.plan.traffic import Transfer, transfers

ROOT = Path(__file__).parents[2]
_STEPS = 3  # real ones, at most
# What saves memory (docs/how-to/out-of-memory.md): some of it together, and each by itself.
_LEVERS: dict[str, Any] = {
    "model": {"recompute": "full", "offload_activations": "inputs", "tiled_mlp": 32},
    "fsdp": {"master_dtype": "bf16"},
    "optimizer": {"state_dtype": "int8", "rounding": "kahan"},
}
_EACH_LEVER: list[dict[str, Any]] = [
    {"model": {"recompute": RecomputePolicy(("attention",), 2)}},
    {"model": {"recompute": "full", "tiled_mlp": 32}},
    {"model": {"recompute": "full", "offload_activations": "inputs"}},
    {"model": {"recompute": "selective", "offload_activations": "kept"}},
    {"optimizer": {"state_dtype": "int8"}},
    {"fsdp": {"master_dtype": "bf16"}, "optimizer": {"rounding": "stochastic"}},
    {"optimizer": {"name": "adafactor"}},
    {"optimizer": {"name": "lion"}},
    {"lora": {"rank": 4, "base": "nf4"}},
    {"lora": {"rank": 4, "base": "int8"}},
    {"lora": {"rank": 4, "base": "fp8"}},
]
Measurement = tuple[dict[str, int], Peak, dict[Kind, Total]]


def step_on(mesh: str, micro_batches: int) -> Step:
    """Documents of 32 read tokens that fill rows of 128 on all ranks."""
    axes = MESHES[mesh]
    data = axes.get("dp_replicate", 1) * axes.get("dp_shard", 1)
    return Step([33, 33, 33, 33] * data * axes.get("cp", 1) * micro_batches, CrossEntropy())


def really(path: str, mesh: str, sections: dict[str, Any], step: Step) -> Measurement:
    """The second step of a real rank, whose optimizer has its state from the first."""
    return second_step(open_engine(path, mesh, **sections), step)


def second_step(engine: Engine, step: Step) -> Measurement:
    """A step, and another one that is watched."""
    plan = plan_of(engine, step)
    rows = step.readings.read(engine, plan, simulated_documents(step), rows_of(engine, plan, step))
    engine.accumulate(plan, rows, step.objective)
    engine.apply(1e-5)
    del rows
    persistent, watch = watched_step(engine, plan, rows_of(engine, plan, step), step)
    return persistent, watch.peak(), watch.collectives.totals


def simulated(path: str, mesh: str, sections: dict[str, Any], step: Step, rank: int) -> Measurement:
    simulation = simulate(engine_config(path, mesh, **sections), world_of(mesh), None, step, rank=rank)
    return simulation.persistent, simulation.peak, simulation.collectives.totals


def lasting(peak: Peak) -> tuple[dict[str, int], str, int]:
    """(Bytes by class but for temporary tensors, phase, micro-batch) of the fullest moment."""
    return {k: v for k, v in peak.classes.items() if k != "temporary"}, peak.phase, peak.micro_batch


@pytest.mark.parametrize(
    ("family", "mesh", "sections", "micro_batches"),
    [
        ("qwen3", "2x2", {"fsdp": {"reduce": "last"}, "model": {"recompute": "full"}}, 2),
        pytest.param(
            "qwen3", "2xtp2", {"optimizer": {"state_dtype": "bf16", "ema_decay": 0.9}}, 2, marks=pytest.mark.table
        ),
        ("llama", "tp2", {"lora": {"rank": 4}}, 2),
        ("gemma2", "cp2", {"fsdp": {"param_dtype": "bf16"}}, 2),
        pytest.param("gemma2", "2xcp2", {"fsdp": {"param_dtype": "bf16"}}, 2, marks=pytest.mark.table),
        pytest.param("llama_tied", "pp2x2", {}, 2, marks=pytest.mark.table),
        ("qwen3", "pp2v", {"model": {"recompute": "full"}}, 3),
        pytest.param("qwen3", "pp2vx2", {"model": {"recompute": "full"}}, 3, marks=pytest.mark.table),
        pytest.param("qwen3", "tp2", {"model": {"recompute": "selective"}}, 2, marks=pytest.mark.table),
        pytest.param("qwen3", "2xtp2", {"model": {"recompute": "selective"}}, 2, marks=pytest.mark.table),
        ("llama", "1", _LEVERS, 1),
        *(pytest.param("llama", "1", sections, 1, marks=pytest.mark.table) for sections in _EACH_LEVER),
    ],
)
def test_a_simulated_step_is_that_of_real_ranks(
    family: str, mesh: str, sections: dict[str, Any], micro_batches: int
) -> None:
    """To the byte: what is held, what was in memory at the fullest by class but for temporary tensors, and every
    collective. Of two moments that are nearly as full as each other, temporary tensors decide in a real step which is
    the fullest; then another step is taken."""
    path, world, step = saved_model(family, num_hidden_layers=4), world_of(mesh), step_on(mesh, micro_batches)
    simulations = {rank: simulated(path, mesh, sections, step, rank) for rank in {0, world - 1}}
    for _ in range(_STEPS):
        measured = run(world, really, path, mesh, sections, step)
        if "v" in mesh or all(
            lasting(peak) == lasting(measured[rank][1]) for rank, (_, peak, _) in simulations.items()
        ):
            break
    for rank, (persistent, peak, totals) in simulations.items():
        assert persistent == measured[rank][0]
        assert totals == measured[rank][2]
        then: Peak = measured[rank][1]
        if sections.get("lora", {}).get("base") == "nf4":  # 3 KiB more among activations than in a real step
            assert peak.total == pytest.approx(then.total, rel=0.01)
            continue
        if "v" in mesh:  # gradients of weights are computed by parts of graphs, which go when Python collects them
            assert peak.total == pytest.approx(then.total, rel=0.1)
            continue
        assert lasting(peak) == lasting(then)
        assert peak.total == pytest.approx(then.total, rel=0.05)  # temporary ones go when Python collects them
        expected, measured_peak = (
            {k: v for k, v in watched.maxima.items() if k != "temporary"} for watched in (peak, then)
        )
        assert expected == pytest.approx(measured_peak, rel=0.15)  # messages leave a little later


# ---------------------------------------------------------------- commands that read before a step


def config_of(command: str, mesh: str, keys: dict[str, Any]) -> SftConfig:
    """The config of a command for a model of 4 layers; data are not read."""
    axes = {f"mesh.{axis}": size for axis, size in MESHES[mesh].items()}
    fixed = {"data.path": __file__, "step.max_tokens_per_device": 128, "optimizer.max_grad_norm": 1.0}
    words = [f"{name}={json.dumps(value)}" for name, value in {**fixed, **axes, **keys}.items()]
    return load_config([], words, SCHEMAS[command])


def step_of_command(config: SftConfig, micro_batches: int, ranks: int) -> Step:
    """Pairs of 33 tokens, of which 20 are the prompt, or single documents."""
    step = step_of(config, [33, 33, 33, 33] * ranks * micro_batches)
    return replace(step, group=2, prefix=20) if answers_of_example(config) == 2 else step


def really_reading(command: str, mesh: str, keys: dict[str, Any], micro_batches: int) -> Measurement:
    """As `really`, of a command with the models beside."""
    config = config_of(command, mesh, keys)
    engine = Engine(EngineConfig.from_config(config), join("cpu"))
    step = step_of_command(config, micro_batches, engine.mesh.loss_ranks)
    step.readings.open(engine)
    return second_step(engine, step)


@pytest.mark.parametrize(
    ("command", "mesh", "keys"),
    [
        ("dpo", "2", {"reference.path": "gemma2"}),
        ("reward", "tp2", {}),
        ("distill", "2", {"distill.teacher": "gemma2"}),
        pytest.param("dpo", "tp2", {"lora.rank": 4}, marks=pytest.mark.table),
        pytest.param("dpo", "2", {"lora.rank": 4, "preference.loss": "aot"}, marks=pytest.mark.table),
        pytest.param(
            "dpo",
            "2",
            {"reference.path": "gemma2", "reference.dp_shard": 1, "reference.tp": 2},
            marks=pytest.mark.table,
        ),
        pytest.param("dpo", "pp2", {"reference.path": "gemma2"}, marks=pytest.mark.table),
        pytest.param("dpo", "2", {"preference.loss": "kto", "reference.path": "gemma2"}, marks=pytest.mark.table),
        pytest.param(
            "reward", "cp2", {"reward.loss": "classification", "reward.num_labels": 2}, marks=pytest.mark.table
        ),
        pytest.param(
            "distill", "tp2", {"distill.teacher": "base", "lora.rank": 4, "distill.alpha": 0.5}, marks=pytest.mark.table
        ),
        pytest.param("distill", "pp2", {"distill.teacher": "gemma2"}, marks=pytest.mark.table),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_a_simulated_step_has_what_is_read_before_it(command: str, mesh: str, keys: dict[str, Any]) -> None:
    """As on real ranks: models beside the trained one are held, and their forwards have a peak and collectives."""
    paths = {name: saved_model(path) for name, path in keys.items() if path == "gemma2"}
    keys = {"model.path": saved_model("qwen3", num_hidden_layers=4), **keys, **paths}
    world, config = world_of(mesh), config_of(command, mesh, keys)
    engine = EngineConfig.from_config(config)
    ranks = world // MESHES[mesh].get("tp", 1) // MESHES[mesh].get("pp", 1)
    measured = run(world, really_reading, command, mesh, keys, 2)
    for rank in range(world):
        simulation = simulate(engine, world, None, step_of_command(config, 2, ranks), rank=rank)
        persistent, then, totals = measured[rank]
        assert simulation.persistent == persistent
        assert (persistent["frozen"] > 0) == any(name in ("reference.path", "distill.teacher") for name in keys)
        peak = simulation.peak
        assert peak.total == pytest.approx(then.total, rel=0.05)
        expected, seen = ({k: v for k, v in p.maxima.items() if k != "temporary"} for p in (peak, then))
        assert expected == pytest.approx(seen, rel=0.15)
        (classes, *when), (of_real, *then_when) = lasting(peak), lasting(then)
        if command == "reward" and when != then_when:  # its forward and its backward need as much, within 1%
            assert peak.total == pytest.approx(then.total, rel=0.01)
        else:  # Rows with hidden states of teachers are laid out in the step.
            assert when == then_when
            assert classes == (pytest.approx(of_real, rel=0.01) if command == "distill" else of_real)
        # Teachers tell other ranks what they have read, in messages of some hundred bytes; of two ranks that have read
        # the same documents, one sends its hidden states.
        counted = simulation.collectives.totals
        differing = {kind.operation for kind, total in totals.items() if counted.get(kind) != total}
        assert differing <= ({"all-gather", "all-to-all"} if command == "distill" else set()), differing


@pytest.mark.parametrize(
    ("command", "keys", "message"),
    [
        ("distill", {"distill.on_policy": 0.5}, "set distill.on_policy=0, or remove --simulate"),
        ("distill", {"distill.teacher": "data"}, "remove --simulate"),
        ("distill", {"teacher.cpu_offload": True}, "set teacher.cpu_offload=false, or remove --simulate"),
        ("dpo", {"reference.cpu_offload": True}, "set reference.cpu_offload=false, or remove --simulate"),
    ],
)  # fmt: skip
def test_readings_that_cannot_be_simulated_are_refused(command: str, keys: dict[str, Any], message: str) -> None:
    path = {"model.path": saved_model("llama")}
    teacher = {"distill.teacher": saved_model("qwen3")} if command == "distill" else {}
    config = config_of(command, "1", path | teacher | keys)

    def attempt() -> None:
        simulate(EngineConfig.from_config(config), 1, None, step_of(config, [33, 33]))

    with pytest.raises(UserError, match=message):
        attempt()
    assert not torch.distributed.is_initialized()


def test_experts_get_as_many_tokens_together_as_on_real_ranks() -> None:
    """Which rank gets how many is the routers' choice, and a simulation's is even; all else is to the byte."""
    path, mesh, step = saved_model("qwen3_moe"), "pp2xep2", step_on("pp2xep2", 2)
    sections = {"model": {"recompute": "full"}}
    measured = run(4, really, path, mesh, sections, step)
    simulations = [simulated(path, mesh, sections, step, rank) for rank in range(4)]
    assert [persistent for persistent, _, _ in simulations] == [persistent for persistent, _, _ in measured]
    exchange = Kind("ep", 2, "all-to-all")
    for stage in ((0, 1), (2, 3)):
        sent = [[results[rank][2].pop(exchange) for rank in stage] for results in (simulations, measured)]
        assert sum(total.bytes for total in sent[0]) == sum(total.bytes for total in sent[1])
        assert {total.count for stage_totals in sent for total in stage_totals} == {sent[0][0].count}
    assert [totals for _, _, totals in simulations] == [totals for _, _, totals in measured]


def test_trees_of_a_model_with_experts_are_simulated() -> None:
    """With what their losses count for each document that holds a token."""
    step = Step([33] * 16, CrossEntropy(), (), 8, 20)
    sections = {"model": {"router_aux_loss": "document", "router_aux_loss_coef": 0.1}}
    persistent, peak, _ = simulated(saved_model("qwen3_moe"), "2", sections, step, 0)
    measured = run(2, really, saved_model("qwen3_moe"), "2", sections, step)[0]
    assert persistent == measured[0]
    assert peak.maxima["activations"] == pytest.approx(measured[1].maxima["activations"], rel=0.02)


def test_experts_get_equally_many_tokens() -> None:
    """Also where they do not divide by ep: a rank with more of them gets more, and sends more back."""
    step, exchanges = step_on("3ep3", 1), []
    path = saved_model("qwen3_moe", num_experts=5)
    for rank in range(3):
        _, _, totals = simulated(path, "3ep3", {}, step, rank)
        exchanges.append(totals[Kind("ep", 3, "all-to-all")])
    counts = {total.count for total in exchanges}
    assert len(counts) == 1 and exchanges[0].bytes < exchanges[1].bytes < exchanges[2].bytes


def kept_and_seen(path: str, sections: dict[str, Any], step: Step) -> tuple[int, int]:
    """(bytes that autograd stores in a forward, what is seen as activations and of the head) of one real rank."""
    engine = open_engine(path, "1", **sections)
    plan = plan_of(engine, step)
    rows = rows_of(engine, plan, step)
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _, watch = watched_step(engine, plan, rows, step)
    # What FSDP gathers is kept for backward, too, and emptied behind it.
    peaks = watch.peak().maxima
    return sum(storage.nbytes() for storage in storages.values()), peaks["activations"]


@pytest.mark.parametrize(("family", "sections"), [("qwen3", {}), ("qwen3_moe", {"fsdp": {"param_dtype": "bf16"}})])
def test_activations_are_what_autograd_keeps(family: str, sections: dict[str, Any]) -> None:
    """By its own word, of one micro-batch."""
    ((saved, peak),) = run(1, kept_and_seen, saved_model(family), sections, step_on("1", 1))
    assert peak == pytest.approx(saved, rel=0.1)


# ---------------------------------------------------------------- shapes of real models


def shape_of(model: str, layers: int, folder: Path) -> str:
    """A folder with the config of a model, cut to so many layers; its widths are what they were."""
    config = json.loads((ROOT / "examples/models" / model / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "max_window_layers": layers}
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def arithmetic_and_simulation(
    config: EngineConfig, world: int, step: Step
) -> Iterator[tuple[Memory, list[Transfer], Simulated]]:
    """(memory and collectives by arithmetic, simulated) of the fullest rank of the first and of the last stage."""
    assumed = accelerator("h100-80gb")
    model, mesh = Blueprint(config, "cpu", assumed), resolve_mesh(config.mesh, world)
    model.check(mesh)
    rows = RowFacts.from_plan(model, plan_rows(model, mesh, step.lengths, None, step.group, step.prefix))
    stages = memory_by_stage(model, mesh, rows)
    for memory in {memory.share.coordinates.pp: memory for memory in (stages[0], stages[-1])}.values():
        transferred = transfers(model, mesh, memory.share, rows.load, recompute=policy_of(config.model.recompute))
        yield memory, transferred, simulate(config, world, assumed, step, rank=memory.share.coordinates.rank(mesh))


def calls_of(transferred: list[Transfer]) -> dict[tuple[str, int], tuple[float, float]]:
    """(operation, ranks) -> (calls, bytes), as a simulation counts them: what stays in a ring's rank is never dealt."""
    by_kind: dict[tuple[str, int], tuple[float, float]] = {}
    for transfer in transferred:
        if transfer.kind != "all-reduce":
            calls, sent = by_kind.get((transfer.kind, transfer.size), (0, 0))
            volume = transfer.received if transfer.axis == "cp (ring)" else transfer.calls * transfer.payload
            by_kind[transfer.kind, transfer.size] = calls + transfer.calls, sent + volume
    return by_kind


def calls_in(simulation: Simulated) -> dict[tuple[str, int], tuple[int, int]]:
    """The same of a simulation."""
    by_kind: dict[tuple[str, int], tuple[int, int]] = {}
    for kind, total in simulation.collectives.totals.items():
        if kind.operation not in ("all-reduce", "receive"):
            calls, sent = by_kind.get((kind.operation, kind.ranks), (0, 0))
            by_kind[kind.operation, kind.ranks] = calls + total.count, sent + total.bytes
    return by_kind


PROMPT = 3072  # of answers of 128 tokens: keys are gathered 7 times


@pytest.mark.parametrize(
    ("model", "layers", "mesh", "world", "length", "recompute", "group"),
    [
        ("Qwen3-4B", 6, {"dp_shard": 8}, 8, 4096, "none", 1),
        ("Qwen3-4B", 6, {"dp_shard": 8}, 8, 3200, "none", 8),
        pytest.param("Qwen3-32B", 6, {"dp_shard": 512, "tp": 8}, 4096, 4096, "full", 1, marks=pytest.mark.table),
        pytest.param("Qwen3-30B-A3B", 4, {"dp_shard": 16, "ep": 8}, 16, 4096, "full", 1, marks=pytest.mark.table),
        ("Qwen3-30B-A3B", 4, {"dp_shard": 8, "tp": 2, "ep": 8}, 16, 4096, "selective", 1),
        ("Qwen3-235B-A22B", 8, {"pp": 2, "dp_shard": 2, "cp": 4, "ep": 8}, 16, 32768, "full", 1),
    ],
)  # fmt: skip
def test_arithmetic_and_simulation_agree(
    model: str, layers: int, mesh: dict[str, int], world: int, length: int, recompute: str, group: int, tmp_path: Path
) -> None:
    """Within 10% by class, and so many collectives of so many bytes; with experts on other ranks and stages, 20% for
    activations. group: documents that begin with PROMPT tokens."""
    recompute_setting: Any = recompute
    config = EngineConfig(
        model=ModelConfig(path=shape_of(model, layers, tmp_path), recompute=recompute_setting),
        mesh=MeshConfig(**mesh),
        step=StepConfig(documents=1, max_tokens_per_device=8192),
    )
    data = world // (mesh.get("pp", 1) * mesh.get("tp", 1))
    count = data * 8192 * 2 // length if group == 1 else data * 2 * group
    step = Step([length] * count, CrossEntropy(), (), group, PROMPT if group > 1 else 0)
    for memory, transferred, simulation in arithmetic_and_simulation(config, world, step):
        peak, share = simulation.peak, memory.share
        assert (share.gradients, share.weights) == (
            simulation.persistent["gradients"],
            pytest.approx(simulation.persistent["weights"], 1e-3),
        )
        assert peak.classes["optimizer"] == pytest.approx(share.optimizer, rel=1e-3)
        assert memory.rows + memory.in_flight == pytest.approx(
            peak.maxima["activations"], rel=0.2 if "pp" in mesh else 0.1
        )
        assert memory.unreduced == pytest.approx(peak.maxima["unreduced"], rel=0.1)
        # The arithmetic adds what a layer with experts recomputes to all of its gradients (10.3% too much in the last),
        # and gradients of a step's only micro-batch to all of its activations (14.4% too much in the second).
        assert 0.9 * peak.total < memory.fullest < 1.15 * peak.total
        foreseen, counted = calls_of(transferred), calls_in(simulation)
        assert foreseen.keys() == counted.keys()
        for kind, (calls, sent) in foreseen.items():
            if kind[0] == "all-gather" and simulation.stage == 1:
                # FSDP looks ahead to the last unit of the micro-batch before.
                assert calls < counted[kind][0] < calls + simulation.micro_batches
                continue
            if kind[0] != "all-to-all":
                assert counted[kind][0] == calls
            # What a rank of a ring sends depends on its place; the arithmetic is of their mean.
            assert counted[kind][1] == pytest.approx(sent, rel=0.15 if kind[0] == "all-to-all" else 1e-3)


# ---------------------------------------------------------------- the command, and what it refuses


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """data.path: prompts, of which nothing is read here."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "completion": "2"}\n')
    return f"data.path={tmp_path}/rows.jsonl"


def test_the_command_says_what_a_rank_does(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved_model("qwen3_moe")
    words = ["plan", f"model.path={path}", rows, "model.recompute=full", "mesh.pp=2", "mesh.ep=2", "mesh.dp_shard=2"]
    options = ["step.documents=32", "step.max_tokens_per_device=64", "--length", "33", "--simulate"]
    assert cli.main([*words, *options]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for rank, stage, ran in ((1, 0, 3), (3, 1, 2)):
        assert f"rank {rank} ran a step on tensors without values: {ran} of 8 micro-batches" in out
        assert f"memory of rank {rank}, rank {stage} of mesh.pp, simulated" in out
        assert f"collectives of rank {rank} in these micro-batches" in out
    assert "equal numbers of tokens for all experts" in out


def test_rl_is_simulated_with_its_own_loss(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        f"model.path={saved_model('qwen3')}",
        rows,
        "rl.reward=[exact_match]",
        "rl.kl_coef=0.1",
        "rl.prompts_per_step=2",
    ]
    assert cli.main([*words, "mesh.dp_shard=2", "--length", "20", "--simulate"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "memory of rank 0, simulated" in out


@pytest.mark.parametrize(
    ("family", "sections", "message"),
    [
        ("llama", {"fsdp": {"cpu_offload": True}}, "set fsdp.cpu_offload=false, or remove --simulate"),
        ("llama", {"model": {"compile": True}}, "set model.compile=false, or remove --simulate"),
        ("phi3_longrope", {}, "the code of model_type 'phi3' depends on values of tensors"),
    ],
)
def test_what_cannot_be_simulated_is_refused(family: str, sections: dict[str, Any], message: str) -> None:
    config = engine_config(saved_model(family), "2", **sections)
    with pytest.raises(UserError, match=message):
        simulate(config, 2, None, step_on("2", 1))
    assert not torch.distributed.is_initialized()


def test_contexts_and_fragments_are_added_to_a_simulated_peak(capsys: pytest.CaptureFixture[str]) -> None:
    """1 GiB, and 2.5% of what is allocated."""
    kinds = ("weights", "gradients", "optimizer", "activations", "head", "gathered", "unreduced", "temporary")
    classes = dict.fromkeys(kinds, 0) | {"weights": 40 << 30}
    peak = Peak(classes, "forward", 1, classes)
    shown = Simulated(0, None, 1, 1, classes, peak, Collectives({}), 1.0)
    model = Blueprint(engine_config(saved_model("llama"), "1"), "cpu", None)
    (estimated,) = memory_by_stage(model, MeshSizes(1, 1, 1, 1, 1, 1), None)
    for room, fits in ((43, True), (41, False)):
        show_simulated(shown, estimated, room << 30)
        out = " ".join(capsys.readouterr().out.split())
        assert f"with 2 GiB for CUDA and NCCL contexts and fragmentation: 42 GiB of {room} GiB" in out
        assert ("does not fit" not in out) == fits


def test_host_memory_is_a_threads_own() -> None:
    """Threads build rows while the step runs. Two that overlapped once left a process in host memory for good, so that
    its later simulations saw no operation."""
    simulation, entered, done = Simulation("cuda", 2**36, (9, 0)), threading.Event(), threading.Event()

    def build() -> None:
        with host_memory():
            entered.set()
            done.wait(10)

    thread = threading.Thread(target=build)
    with simulation.running():
        with host_memory():
            thread.start()
            assert entered.wait(10)
        assert not fills_host()
        done.set()
        thread.join()
        assert not fills_host()
