"""Every planted bug is reached, and the check that its entry names fails; the product without it passes that check."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from tests.checkpoint import test_resume
from tests.data import test_documents, test_order
from tests.engine import test_schedule
from tests.models import test_lora
from tests.parallel import test_quantised
from tests.parity import test_distill_parity, test_policy_parity, test_reward_parity
from tests.recipes import test_eval
from tests.support.cases import describe, open_engine, parity, saved_model, world_of
from tests.support.pool import run
from tests.support.verified import cached_verdict
from tests.verify import test_16_bits, test_fp8, test_masters
from weft.config import schema
from weft.data.documents import DataReport
from weft.engine.batch.document import Document
from weft.engine.config import EngineConfig
from weft.engine.contract import check_contract
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.errors import RanksDisagreeError, UserError
from weft.launch.process import join
from weft.launch.summary import Phases
from weft.verify import reference, reference_optimizer
from weft.verify.bugs import BALANCE_SCALE, FP8_INPUTS, FP8_OUTPUTS, MASTERS, RUN_LOSSES, RUN_RATES, TOKEN_ROWS
from weft.verify.bugs.adapters import BASE, QUANTISED
from weft.verify.bugs.commands import LISTED, PREFERRED, UPDATE
from weft.verify.bugs.training import HELD_OUT, RESUMED
from weft.verify.documents import awkward_steps
from weft.verify.harness import Verdict
from weft.verify.observed import to_documents
from weft.verify.plants import PLANTS, owner_of, planted, table

Sections = dict[str, dict[str, Any]]
Check = Callable[[str | None], bool]


# ---------------------------------------------------------------- figures of `weft verify`


@dataclass(frozen=True)
class PlantCase:
    """Where a bug shows. changes: of the family's tiny config. steps: that it takes. special, trees: as in `parity`."""

    family: str = "llama"
    mesh: str = ""
    sections: tuple[tuple[str, str, Any], ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()
    steps: int = 1
    special: bool = False
    trees: bool = False


BALANCED = PlantCase(
    "qwen3_moe", "2", (("model", "router_aux_loss", "document"), ("model", "router_aux_loss_coef", 0.1))
)
BALANCED_STEP = replace(BALANCED, sections=(("model", "router_aux_loss", "step"), BALANCED.sections[1]))
ADAPTED = PlantCase(sections=(("lora", "rank", 4), ("lora", "rslora", True)))
CASES = {
    "short-step-full-count": PlantCase(steps=2),
    "replicas-apart": PlantCase(mesh="2x1"),
    "replicas-counted": PlantCase(mesh="2x1"),
    "scales-of-shards": PlantCase(mesh="tp2", sections=(("optimizer", "state_dtype", "int8"),)),
    "bits-by-local-place": PlantCase(mesh="2", sections=(("optimizer", "state_dtype", "int8"),)),
    "rows-of-shards": PlantCase(mesh="2", sections=(("optimizer", "name", "adafactor"),)),
    "muon-of-shards": PlantCase(mesh="2", sections=(("optimizer", "name", "muon"),)),
    "codes-by-shard": PlantCase(mesh="2", sections=(("optimizer", "state_dtype", "int8"),)),
    "balance-detached": BALANCED,
    "balance-over-the-row": BALANCED,
    "balance-of-the-micro-batch": BALANCED_STEP,
    "state-runs-on": PlantCase("lfm2"),
    "recompute-in-low-precision": PlantCase(sections=(("model", "recompute", "full"),)),
    "results-out-of-order": PlantCase(sections=(("model", "recompute", "selective"),)),
    "gradient-of-a-tile": PlantCase(sections=(("model", "tiled_mlp", 16),)),
    "positions-not-reset": PlantCase("gpt2"),
    "padding-trained": PlantCase("falcon"),
    "head-untied": PlantCase("llama_tied"),
    "first-slice-of-the-adapter": ADAPTED,
    "scales-of-one-shard": PlantCase(sections=(("lora", "rank", 4), ("lora", "base", "nf4"))),
    "scales-of-the-first-rows": PlantCase(sections=(("lora", "rank", 4), ("lora", "base", "int8"))),
    "norm-of-the-base": PlantCase(sections=(("lora", "rank", 4), ("lora", "dora", True))),
    "alpha-not-divided": ADAPTED,
    "rslora-ignored": ADAPTED,
    "shared-token-counts-once": replace(BALANCED_STEP, mesh="", trees=True),
    "window-along-the-row": PlantCase("gemma3_text", trees=True),
    **dict.fromkeys(
        (
            "suffix-after-its-sibling", "suffix-positions-restart", "suffix-positions-run-on",
            "shared-token-trained-once", "gradient-of-one-sibling", "siblings-are-visible",
        ),
        PlantCase(trees=True),
    ),
}  # fmt: skip


# Bugs of losses besides cross entropy: the command and the keys with which `weft verify` shows each.
PREFERENCES, TAUGHT = {"reference.path": "{other}", "preference.beta": 0.05}, {"distill.teacher": "{teacher}"}
SAMPLED = {"rl.reward": ["length"], "rl.epochs": 2, "rollout.max_new_tokens": 20, "rollout.max_prompt_tokens": 30}
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "kl-of-a-micro-batch": ("dpo", PREFERENCES | {"preference.loss": "kto"}),
    "nll-of-a-micro-batch": ("dpo", PREFERENCES | {"preference.loss": ["sigmoid", "sft"]}),
    "aot-by-micro-batch": ("dpo", PREFERENCES | {"preference.loss": "aot"}),
    "reference-without-tail-weights": ("dpo", PREFERENCES | {"preference.ld_alpha": 0.4}),
    "missing-rows-are-zero": ("dpo", PREFERENCES | {"preference.ld_alpha": 0.4}),
    **dict.fromkeys(("distilled-by-micro-batch", "prompts-in-the-count", "gradient-into-the-teacher"),
                    ("distill", TAUGHT)),
    **dict.fromkeys(("margin-added", "pairs-by-micro-batch"), ("reward", {})),
    "divergence-as-advantage": ("rl", SAMPLED | {"rl.teacher": "{teacher}", "rl.teacher_in": "advantage"}),
    "truncation-ignored": ("rl", SAMPLED | {"rollout.top_p": 0.8}),
}  # fmt: skip
AFTER_STEPS = ("loss, documents 2", "weights after 3 steps", "copies on several ranks are equal")


def planted_parity(
    plant: str | None, path: str, mesh: str, sections: Sections, steps: int, special: bool, trees: bool
) -> Verdict | None:
    with planted(plant):
        return parity(path, mesh, sections, steps=steps, special=special, trees=trees)


@cache
def verdict_of(plant: str | None, case: PlantCase) -> Verdict:
    sections: Sections = {}
    for section, key, value in case.sections:
        sections.setdefault(section, {})[key] = value
    path, steps_of_case = saved_model(case.family, **dict(case.changes)), (case.steps, case.special, case.trees)
    verdict: Verdict = run(world_of(case.mesh), planted_parity, plant, path, case.mesh, sections, *steps_of_case)[0]
    return verdict


def figure_passes(case: PlantCase, figure: str, plant: str | None) -> bool:
    verdict = verdict_of(plant, replace(case, steps=3) if figure in AFTER_STEPS else case)
    assert figure in {f.name for f in verdict.figures}, f"no figure named {figure}"
    assert plant is not None or verdict.passed, describe(verdict)
    return figure not in verdict.failed


def loss_figure_passes(name: str, figure: str, plant: str | None) -> bool:
    command, keys = LOSSES[name]
    verdict = cached_verdict(command, json.dumps(keys), "1", plant)
    assert figure in {f.name for f in verdict.figures}, f"no figure named {figure}"
    assert plant is not None or verdict.passed, describe(verdict)
    return figure not in verdict.failed


# ---------------------------------------------------------------- a whole run of the recipe, against the reference


def run_config(path: str) -> schema.SftConfig:
    return schema.SftConfig(
        model=schema.ModelConfig(path=path),
        data=schema.DataConfig(path="documents.jsonl"),
        step=schema.StepConfig(documents=3, max_tokens_per_device=64),
        optimizer=schema.OptimizerConfig(name="sgd", lr=0.5),
        schedule=schema.ScheduleConfig(name="linear", warmup_steps=2, min_lr_ratio=0.0),
        train=schema.TrainConfig(epochs=2, max_nonfinite=2),
    )


def run_documents(poisoned: tuple[int, ...]) -> list[reference.Document]:
    """Seven, so that the last step of three is short. The loss of a poisoned one overflows."""
    documents = awkward_steps(128)[0][2:]
    return [(ids, [w * 3e38 for w in mask] if i in poisoned else mask) for i, (ids, mask) in enumerate(documents)]


def recipe(plant: str | None, path: str, folder: str, poisoned: tuple[int, ...]) -> None:
    """`weft sft` behind its data, to its last step or until it gives up."""
    from weft.recipes import run_data, training
    from weft.recipes.recipe import Recipe

    config = run_config(path)
    documents = [
        Document(torch.tensor(ids), torch.tensor(mask), source=f"documents.jsonl:{number}")
        for number, (ids, mask) in enumerate(run_documents(poisoned), start=1)
    ]
    report = DataReport(config.data.path, len(documents), tokens=0, loss_tokens=0, longest=61, digest="")
    with planted(plant):
        engine = Engine(EngineConfig.from_config(config), join("cpu"))
        with suppress(FloatingPointError, RanksDisagreeError):
            training.train(Recipe(config), engine, run_data.RunData(documents, report), Path(folder), Phases())


@cache
def lines(plant: str | None) -> list[dict[str, Any]]:
    """metrics.jsonl of a run in which one document of each epoch makes the loss infinite."""
    with tempfile.TemporaryDirectory() as folder:
        run(2, recipe, plant, saved_model("llama"), folder, (2,))
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@cache
def expected_lines() -> list[tuple[float | None, float | None]]:
    """(loss, lr) of each step by the reference, None where the step is skipped; the rates by hand."""
    from weft.recipes import run_data

    path, rates = saved_model("llama"), [0.25, 0.5, 0.375, 0.25, 0.125, 0.0]  # W = 2, T = 6: p = (s - 2) / 4
    documents, plain, out = run_documents((2,)), reference.Reference(path), []
    plain.start(reference_optimizer.Optimizer("sgd", weight_decay=0.1).over(plain.named()))
    lengths = [Document(torch.tensor(ids), torch.tensor(mask)) for ids, mask in documents]
    for step in run_data.make_steps(run_config(path), lengths):
        if 2 in step.documents:
            out.append((None, None))
        else:
            rate = rates.pop(0)
            out.append((plain.step([documents[i] for i in step.documents], rate)[0], rate))
    return out


def losses_of_a_run(plant: str | None) -> bool:
    return [line["loss"] for line in lines(plant)] == [
        None if loss is None else pytest.approx(loss, rel=1e-4) for loss, _ in expected_lines()
    ]


def rates_of_a_run(plant: str | None) -> bool:
    return [line["lr"] for line in lines(plant)] == [
        None if lr is None else pytest.approx(lr) for _, lr in expected_lines()
    ]


def diverged_run_ends(plant: str | None) -> bool:
    """A run of nothing but poisoned documents stops, and saves nothing."""
    with tempfile.TemporaryDirectory() as folder:
        run(1, recipe, plant, saved_model("llama"), folder, tuple(range(7)))
        return not (Path(folder) / "checkpoints").exists()


# ---------------------------------------------------------------- checks of their own


def contract_holds(plant: str | None) -> bool:
    return run(1, contract, plant, saved_model("llama"))[0]


def contract(plant: str | None, path: str) -> bool:
    with planted(plant):
        engine = open_engine(path, "1")
        one_step(engine)
        try:
            check_contract(engine)
        except RuntimeError:
            return False
    return True


def one_step(engine: Engine, objective: CrossEntropy | None = None) -> None:
    documents, metas = to_documents(engine, awkward_steps(128)[1])
    engine.accumulate(engine.plan(metas), documents, objective or CrossEntropy())
    engine.apply(1e-3)


def laid_out_packed(family: str, plant: str | None) -> bool:
    return run(1, layout, plant, saved_model(family))[0] == "packed"


def layout(plant: str | None, path: str) -> str:
    with planted(plant):
        return open_engine(path, "1").built.layout


def initial_weights(plant: str | None) -> bool:
    """On every rank of two replicas; each reads its own replica."""
    path = saved_model("llama")
    torch.manual_seed(0)
    expected = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path)).state_dict()
    by_rank = run(2, fresh_weights, plant, path)
    return all(torch.equal(weights[name], expected[name]) for weights in by_rank for name in expected)


def fresh_weights(plant: str | None, path: str) -> dict[str, torch.Tensor]:
    with planted(plant):
        return dict(open_engine(path, "2x1", model={"init": "random"}).tensors())


def layer_inputs(plant: str | None) -> bool:
    """mamba2 carries its residual from layer to layer in fp32, whatever the weights' dtype."""
    return run(1, dtypes_of_layer_inputs, plant, saved_model("mamba2"))[0]


def dtypes_of_layer_inputs(plant: str | None, path: str) -> bool:
    actual: list[torch.dtype] = []
    plain_dtypes: list[torch.dtype] = []
    with planted(plant):
        engine = open_engine(path, "1", fsdp={"param_dtype": "bf16"})
        for _, layer in engine.module.layers:
            layer.register_forward_pre_hook(lambda _, inputs: actual.append(inputs[0].dtype))
        one_step(engine)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    for layer in plain.base_model.layers:
        layer.register_forward_pre_hook(lambda _, inputs: plain_dtypes.append(inputs[0].dtype))
    plain(input_ids=torch.tensor([[3, 4, 5]]))
    assert torch.float32 in plain_dtypes, "this family has no input that a cast would round"
    return actual == plain_dtypes


def stays_gathered(plant: str | None) -> bool:
    return run(2, gathered_between, plant, saved_model("llama"))[0]


class _Looking(CrossEntropy):
    """Notes, between forward and backward, which layers have their weights gathered."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.gathered = engine, []

    def __call__(self, batch: Any) -> Any:
        for _, layer in self.engine.module.layers:
            self.gathered.append(not any(isinstance(p, DTensor) for p in layer.parameters()))
        return super().__call__(batch)


def gathered_between(plant: str | None, path: str) -> bool:
    with planted(plant):
        engine = open_engine(path, "2", fsdp={"reshard_after_forward": False})
        looking = _Looking(engine)
        one_step(engine, looking)
    return len(looking.gathered) == 2 and all(looking.gathered)


def layers_run_twice(plant: str | None) -> bool:
    return run(1, runs_of_layers, plant, saved_model("llama"))[0] == [2, 2]


def runs_of_layers(plant: str | None, path: str) -> list[int]:
    counts = [0, 0]

    def count(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[number] += 1

        return hook

    with planted(plant):
        engine = open_engine(path, "1", model={"recompute": "full"})
        for number, (_, layer) in enumerate(engine.module.layers):
            layer.self_attn.register_forward_pre_hook(count(number))
        one_step(engine)
    return counts


# ---------------------------------------------------------------- tests of the suite, in this process


def holds(test: Callable[[], None]) -> Check:
    """A test of the suite as a check."""

    def check(plant: str | None) -> bool:
        with planted(plant):
            try:
                test()
            except AssertionError:
                return False
        return True

    return check


def prompt_and_completion() -> None:
    with tempfile.TemporaryDirectory() as folder:
        test_documents.test_prompt_and_completion(Path(folder), bos=True, front="<s>")


TESTS: dict[str, Check] = {
    RUN_LOSSES: losses_of_a_run,
    RUN_RATES: rates_of_a_run,
    BASE: test_lora.base_is_read,
    QUANTISED: test_quantised.layers_are_chosen,
    RESUMED: test_resume.resumed_run_is_the_unbroken_one,
    UPDATE: test_policy_parity.update_is_the_plain_one,
    LISTED: test_distill_parity.step_with_lists_is_the_plain_one,
    HELD_OUT: test_eval.held_out_loss_is_the_references,
    BALANCE_SCALE: test_16_bits.balance_is_scaled,
    MASTERS: test_masters.steps_are_those_of_one_process,
    **{figure: partial(test_fp8.figure_passes, figure) for figure in (FP8_OUTPUTS, FP8_INPUTS)},
    TOKEN_ROWS: test_16_bits.rows_of_unlikely_tokens_are_near,
    "weft.engine.contract.check_contract": contract_holds,
    "tests/verify/test_plants.py: a diverged run ends": diverged_run_ends,
    "tests/verify/test_plants.py: llama passes the start-up check packed": partial(laid_out_packed, "llama"),
    "tests/verify/test_plants.py: lfm2 passes the start-up check packed": partial(laid_out_packed, "lfm2"),
    "tests/verify/test_plants.py: initial weights are those of one process": initial_weights,
    "tests/verify/test_plants.py: layer inputs have the dtypes of transformers' own forward": layer_inputs,
    "tests/verify/test_plants.py: weights stay gathered between forward and backward": stays_gathered,
    "tests/verify/test_plants.py: recomputation runs each layer twice": layers_run_twice,
    PREFERRED: test_reward_parity.holds_with,
    "tests/data/test_documents.py: test_prompt_and_completion": holds(prompt_and_completion),
    "tests/engine/test_schedule.py: test_cosine_with_warmup": holds(test_schedule.test_cosine_with_warmup),
    "tests/data/test_order.py: test_every_document_once_in_each_epoch": holds(
        lambda: test_order.test_every_document_once_in_each_epoch(test_order.RUNS[0])
    ),
    "tests/data/test_order.py: test_starting_at_a_step_equals_the_unbroken_run": holds(
        lambda: test_order.test_starting_at_a_step_equals_the_unbroken_run(test_order.RUNS[0])
    ),
}


def of_the_mesh(name: str) -> bool:
    """Those are planted by tests/verify/test_plants_on_meshes.py."""
    kinds = ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_parallel")
    return PLANTS[name].replacement.__module__.endswith(kinds)


@cache
def passes_without(caught_by: str) -> bool:
    """Once for all bugs that this check catches."""
    return TESTS[caught_by](None)


@pytest.mark.parametrize("name", [name for name in PLANTS if not of_the_mesh(name)])
def test_planted_bug_is_caught(name: str) -> None:
    caught_by = PLANTS[name].caught_by

    if name in LOSSES:
        without, with_it = (loss_figure_passes(name, caught_by, plant) for plant in (None, name))
    elif caught_by in TESTS:
        without, with_it = passes_without(caught_by), TESTS[caught_by](name)
    else:
        case = replace(CASES.get(name, PlantCase()), mesh=CASES.get(name, PlantCase()).mesh or str(PLANTS[name].ranks))
        without, with_it = (figure_passes(case, caught_by, plant) for plant in (None, name))
    assert without, f"{caught_by} fails without the bug"
    assert not with_it, f"{caught_by} does not catch it"


def test_a_bug_that_is_not_reached_is_an_error() -> None:
    with pytest.raises(AssertionError, match="never reached. It needs a model with a tied"), planted("head-untied"):
        pass


@pytest.mark.parametrize("target", sorted({bug.target for bug in PLANTS.values()}))
def test_plants_replace_public_functions(target: str) -> None:
    """A private function may be inlined at any time."""
    owner, attribute = owner_of(target)
    assert callable(getattr(owner, attribute)) and not re.match("_[a-z]", attribute)


def test_unknown_names_and_too_few_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="no bug named 'gremlin'.*bounds-lost"), planted("gremlin"):
        pass
    with pytest.raises(UserError, match="needs 2 ranks"), planted("rank-local-count"):
        pass


def test_a_plant_is_taken_out_again() -> None:
    from weft.engine.optim import schedule

    def fails() -> None:
        with planted("warmup-doubled"):
            assert schedule.warmup_steps is not before
            raise KeyError

    before = schedule.warmup_steps
    with pytest.raises(KeyError):
        fails()
    assert schedule.warmup_steps is before


def test_the_table_in_the_docs_is_current() -> None:
    path = Path(__file__).parents[2] / "docs" / "explanation" / "planted-bugs.md"
    assert path.read_text() == table(), "run: python -m weft.verify.plants > docs/explanation/planted-bugs.md"
