"""`weft dpo` against plain transformers, pair by pair (tests/support/plain_dpo.py), on meshes and cuts."""

from __future__ import annotations

import base64
import inspect
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support import plain_dpo
from tests.support.cases import MESHES, byte_tokenizer, pairs, saved_model, world_of
from tests.support.plain_dpo import PlainAnswer
from tests.support.pool import run
from tests.support.vision_zoo import encoded, picture, question, saved_vision_model, vision_folder
from weft.checkpoint.export import save_adapter
from weft.config.dpo_schema import DpoConfig
from weft.config.load import load_config
from weft.config.preference_losses import LOSSES
from weft.data.mismatched import mismatched
from weft.data.order import SampledStep
from weft.data.records import ROLES
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.launch.process import join
from weft.recipes.dpo import Dpo
from weft.recipes.run_data import RunData
from weft.recipes.training import prepare_step
from weft.verify.adapter import as_in_files, randomize_adapters
from weft.verify.harness import GRADIENT, SCALAR, compare_gradients
from weft.verify.observed import Tensors
from weft.verify.peft_reference import PeftReference

KEYS = {"preference.beta": plain_dpo.BETA, "preference.gamma": 0.5}
PAIRED = [name for name, facts in LOSSES.items() if facts.paired]


@cache
def folder() -> Path:
    """pairs.jsonl and kto.jsonl: uneven lengths, with margins."""
    path, source = Path(tempfile.mkdtemp(prefix="weft-dpo-")), random.Random(3)

    def words(longest: int) -> str:
        return "".join(source.choice("abcdefgh ") for _ in range(source.randint(1, longest)))

    rows = []
    for number in range(7):  # of equal length: two models rank the log ratios of such pairs differently
        chosen = "x" + words(30)
        rejected = "".join(source.choice("abcdefgh ") for _ in chosen) if number % 3 else "y" + words(9)
        rows.append({"prompt": words(20), "chosen": chosen, "rejected": rejected, "margin": source.random()})
    answers = [{"prompt": words(20), "completion": words(30), "label": n % 3 > 0} for n in range(9)]
    for name, lines in (("pairs", rows), ("kto", answers)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@cache
def models(family: str) -> tuple[str, str]:
    """The model that is trained, and another one as the reference, with tokenizers."""
    paths = [saved_model(family, vocab_size=264), saved_model(family, vocab_size=272)]
    for path in paths:
        byte_tokenizer().save_pretrained(path)
    return paths[0], paths[1]


def config_of(family: str, mesh: str, budget: int, data: str, **keys: Any) -> DpoConfig:
    path, reference = models(family)
    overrides = {
        "model.path": path, "data.path": str(folder() / f"{data}.jsonl"), "step.max_tokens_per_device": budget,
        **{f"mesh.{axis}": size for axis, size in MESHES[mesh].items()}, **KEYS, **keys,
    }  # fmt: skip
    losses = overrides.get("preference.loss", "sigmoid")
    names = losses if isinstance(losses, list) else [losses]
    if any(LOSSES[name].reference for name in names):
        overrides = {"reference.path": reference, **overrides}
    if any(LOSSES[name].smoothing for name in names):
        overrides["preference.label_smoothing"] = plain_dpo.SMOOTHING
    if "simpo" not in names:
        del overrides["preference.gamma"]
    return load_config([], [f"{key}={json.dumps(value)}" for key, value in overrides.items()], DpoConfig)


def ours(configs: Sequence[DpoConfig]) -> list[tuple[dict[str, float | None], Tensors]]:
    """(metrics, gradients) of one step of all data, for each of these configs, which have the same model and mesh."""
    engine = Engine(EngineConfig.from_config(configs[0]), join("cpu"))
    out = []
    for config in configs:
        recipe = Dpo(config)
        data = recipe.read_data()
        recipe.open_models(engine, data)
        out.append(accumulated(engine, recipe, data, list(range(len(data.documents)))))
        engine.drop_gradients()
    return out


def accumulated(engine: Engine, recipe: Dpo, data: RunData, indices: list[int]) -> tuple[dict[str, Any], Tensors]:
    """(Metrics, gradients) of a step of these documents."""
    step = prepare_step(engine, data.documents, recipe.objective, SampledStep(1, 1, indices))
    step = recipe.before_step(step)
    metrics = engine.accumulate(step.plan, step.rows, recipe.objective)
    gradients = {name: grad.clone() for name, grad in engine.gradients() if grad is not None}
    return dict(metrics) | {"rows": step.plan.micro_batches, "cut": bool(step.plan.pieces)}, gradients


def plain_model(path: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@cache
def answers_of(family: str, data: str, tail: float | None = None) -> tuple[list[PlainAnswer], list[PlainAnswer]]:
    """The answers of a data set with the reference's sums, and those of other prompts for KTO. Tokens are weft's: the
    tests of data compare them with hand-written ones."""
    documents: Any = (
        Dpo(config_of(family, "1", 128, data, **({} if data == "pairs" else {"preference.loss": "kto"})))
        .read_data()
        .documents
    )
    reference = plain_model(models(family)[1])
    out = []
    for index in range(len(documents)):
        document, role = documents[index], ROLES[int(documents.roles[index])]
        trained = (document.weights != 0).int().tolist()
        out.append(PlainAnswer(document.tokens.tolist(), trained, role, float(documents.margins[index])))
    for chosen, rejected in zip(out[::2], out[1::2], strict=False):
        if tail is not None:
            chosen.shorter = rejected.shorter = min(chosen.tokens, rejected.tokens)
            chosen.tail = rejected.tail = tail
    partners = []
    for index in range(len(documents)):
        document = mismatched(documents, index, 128)
        partners.append(PlainAnswer(document.tokens.tolist(), document.weights.int().tolist(), ""))
    with torch.no_grad():
        for answer in (*out, *partners):
            answer.reference = float(plain_dpo.logprob_sum(reference, answer))
    return out, partners


def plain(
    family: str, names: Sequence[str], weights: Sequence[float], tail: float | None = None
) -> tuple[float, Tensors]:
    model, (answers, _) = plain_model(models(family)[0]), answers_of(family, "pairs", tail)
    sums = [plain_dpo.logprob_sum(model, answer) for answer in answers]
    loss = plain_dpo.step_loss(names, weights, sums, answers)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain_kto(family: str, desirable: float, undesirable: float) -> tuple[float, float, Tensors]:
    """(loss, z, gradients)."""
    model, (answers, partners) = plain_model(models(family)[0]), answers_of(family, "kto")
    with torch.no_grad():
        ratios = [float(plain_dpo.logprob_sum(model, answer)) - answer.reference for answer in partners]
    kl = max(0.0, sum(ratios) / len(ratios))
    sums = [plain_dpo.logprob_sum(model, answer) for answer in answers]
    loss = plain_dpo.kto_loss(sums, answers, kl, desirable, undesirable)
    loss.backward()
    return loss.item(), kl, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(actual: tuple[dict[str, float | None], Tensors], loss: float, gradients: Tensors, case: object) -> None:
    assert actual[0]["loss"] == pytest.approx(loss, rel=SCALAR, abs=SCALAR), case
    worst = max(compare_gradients(actual[1], gradients, {}), key=lambda figure: figure.value)
    assert worst.value <= GRADIENT, (case, worst)


MIXES = [(["sigmoid", "sft"], [1.0, 0.3]), (["aot", "bco_pair", "sft"], [0.5, 0.2, 1.0])]


@pytest.mark.covers("preference.loss", "preference.weights", "preference.beta", "preference.label_smoothing",
                    "preference.gamma", "reference.path")  # fmt: skip
@pytest.mark.parametrize(
    ("family", "mesh", "budget"),
    pairs([("llama", "1", 128), ("qwen3", "2", 64)], [("llama", "2", 512), ("gemma3_text", "4", 64)]),
)
def test_every_loss_of_pairs(family: str, mesh: str, budget: int) -> None:
    """Every loss and two mixes, with pairs in one row and pairs in two."""
    cases: list[tuple[list[str], list[float]]] = [*(([name], [1.0]) for name in PAIRED), *MIXES]
    configs = [
        config_of(
            family, mesh, budget, "pairs", **{"preference.loss": names},
            **({"preference.weights": weights} if len(names) > 1 else {}),
        )
        for names, weights in cases
    ]  # fmt: skip
    results = run(world_of(mesh), ours, configs)[0]
    for (names, weights), result in zip(cases, results, strict=True):
        check(result, *plain(family, names, weights), names)


@pytest.mark.parametrize(
    ("family", "mesh"),
    pairs([("llama", "cp2"), ("qwen3_moe", "ep2"), ("llama", "pp2"), ("qwen3", "tp2")],
          [("llama", "2x2"), ("gemma3_text", "tp2"), ("qwen3_next", "2"), ("qwen3_moe", "2x2")]),
)  # fmt: skip
def test_on_meshes(family: str, mesh: str) -> None:
    """A loss of pairs and a mix that needs the whole step, where axes cut documents, experts, layers and stages."""
    configs = [config_of(family, mesh, 40 if mesh == "cp2" else 64, "pairs", **{"preference.loss": "sigmoid"})]
    names, weights = MIXES[1]
    configs.append(
        config_of(
            family, mesh, 40 if mesh == "cp2" else 64, "pairs",
            **{"preference.loss": names, "preference.weights": weights},
        )
    )  # fmt: skip
    results = run(world_of(mesh), ours, configs)[0]
    check(results[0], *plain(family, ["sigmoid"], [1.0]), "sigmoid")
    check(results[1], *plain(family, names, weights), names)


CUTS = [("1", 512), ("1", 160), ("1", 64), ("2", 64), ("4", 64)]


@pytest.mark.covers("preference.desirable_weight", "preference.undesirable_weight")
def test_kto_is_of_the_whole_step_on_every_cut() -> None:
    loss, kl, gradients = plain_kto("llama", 1.3, 0.7)
    assert kl > 0
    for mesh, budget in CUTS:
        (result,) = run(world_of(mesh), ours, [config_of("llama", mesh, budget, "kto", **KTO)])[0]
        check(result, loss, gradients, (mesh, budget))
        assert result[0]["kl"] == pytest.approx(kl, rel=1e-5, abs=1e-4)  # of sums near 100


def test_mixes_are_of_the_whole_step_on_every_cut() -> None:
    names, weights = MIXES[1]
    loss, gradients = plain("llama", names, weights)
    for mesh, budget in CUTS:
        keys = {"preference.loss": names, "preference.weights": weights}
        (result,) = run(world_of(mesh), ours, [config_of("llama", mesh, budget, "pairs", **keys)])[0]
        check(result, loss, gradients, (mesh, budget))


@pytest.mark.covers("preference.ld_alpha")
def test_tokens_beyond_the_shorter_answer_weigh_less_on_both_sides() -> None:
    for name in ("sigmoid", "ipo"):
        (result,) = run(
            1, ours, [config_of("llama", "1", 64, "pairs", **{"preference.loss": name, "preference.ld_alpha": 0.4})]
        )[0]
        check(result, *plain("llama", [name], [1.0], 0.4), name)


KTO = {"preference.loss": "kto", "preference.desirable_weight": 1.3, "preference.undesirable_weight": 0.7}


# ---------------------------------------------------------------- several steps

# Pairs of uneven lengths, one pair, so that ranks have no rows, and pairs again.
STEPS = [list(range(10)), [4, 5], list(range(6, 14))]
KTO_STEPS = [list(range(6)), [2], list(range(3, 9))]  # of answers one by one
LR = 0.05
SEVERAL = [("qwen3", "2xtp2"), ("qwen3_moe", "ep2"), ("llama", "cp2")]
TABLE = [
    ("llama", "1"),
    ("gemma3_text", "2"), ("llama", "2x2"), ("llama", "tp2"), ("llama", "pp2"), ("llama", "pp2xcp2"), ("qwen3", "1"),
    ("qwen3", "2"), ("qwen3", "cp2"), ("qwen3", "pp2"), ("gemma3_text", "2x2"), ("gemma3_text", "tp2"),
    ("gemma3_text", "cp2"), ("gemma3_text", "pp2"), ("qwen3_moe", "2"), ("qwen3_moe", "tp2"), ("qwen3_moe", "pp2xep2"),
    ("qwen3_moe", "ep2xcp2"), ("lfm2", "2"), ("qwen3_5_text", "2"), ("qwen3_5_text", "tp2"), ("qwen3_5_text", "pp2"),
]  # fmt: skip


def ours_of_steps(
    config: DpoConfig, adapter: str = "", steps: Sequence[list[int]] = STEPS
) -> list[tuple[dict[str, Any], Tensors]]:
    """(Metrics, gradients) of each of the steps, with an update after each. adapter: the folder for first
    adapters."""
    engine, recipe, results = Engine(EngineConfig.from_config(config), join("cpu")), Dpo(config), []
    if adapter:
        randomize_adapters(engine)
        save_adapter(engine, adapter)
    data = recipe.read_data()
    recipe.open_models(engine, data)
    for indices in steps:
        metrics, gradients = accumulated(engine, recipe, data, indices)
        results.append((metrics, as_in_files(engine, gradients)))
        engine.apply(LR)
    return results


def ours_of_losses(configs: Sequence[DpoConfig]) -> list[list[tuple[dict[str, Any], Tensors]]]:
    return [ours_of_steps(config, steps=KTO_STEPS if is_kto(config) else STEPS) for config in configs]


def is_kto(config: DpoConfig) -> bool:
    return config.preference.loss == "kto"


StepLoss = Callable[[Any, list[int]], torch.Tensor]  # (model, places of the step's answers) -> loss


def loss_of_pairs(
    answers: list[PlainAnswer], names: Sequence[str] = ("sigmoid",), weights: Sequence[float] = (1.0,)
) -> StepLoss:
    def compute(model: Any, indices: list[int]) -> torch.Tensor:
        of_step = [answers[index] for index in indices]
        return plain_dpo.step_loss(names, weights, [plain_dpo.logprob_sum(model, a) for a in of_step], of_step)

    return compute


def loss_of_kto(answers: list[PlainAnswer], partners: list[PlainAnswer]) -> StepLoss:
    def compute(model: Any, indices: list[int]) -> torch.Tensor:
        with torch.no_grad():
            ratios = [float(plain_dpo.logprob_sum(model, partners[i])) - partners[i].reference for i in indices]
        of_step = [answers[index] for index in indices]
        sums = [plain_dpo.logprob_sum(model, answer) for answer in of_step]
        return plain_dpo.kto_loss(sums, of_step, max(0.0, sum(ratios) / len(ratios)), 1.3, 0.7)

    return compute


def plain_steps(
    model: Any,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    compute: StepLoss,
    steps: Sequence[list[int]] = STEPS,
) -> list[tuple[float, Tensors]]:
    """(Loss, gradients) of each of the steps; SGD with clipping."""
    trained = [parameter for _, parameter in named]
    results, optimizer = [], torch.optim.SGD(trained, lr=LR)
    for indices in steps:
        optimizer.zero_grad(set_to_none=True)
        loss = compute(model, indices)
        loss.backward()
        results.append((loss.item(), {name: p.grad.clone() for name, p in named if p.grad is not None}))
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return results


def check_steps(
    results: list[tuple[dict[str, Any], Tensors]],
    expected: list[tuple[float, Tensors]],
    in_fp64: Callable[[], list[tuple[float, Tensors]]],
) -> None:
    """in_fp64: `expected` in fp64, from which the noise of fp32 is known; called where fp32 alone fails."""
    exact = list[tuple[float, Tensors]]()
    for number, ((metrics, actual), (loss, gradients)) in enumerate(zip(results, expected, strict=True)):
        assert metrics["loss"] == pytest.approx(loss, rel=SCALAR, abs=SCALAR), number
        if all(figure.passed for figure in compare_gradients(actual, gradients, {})):
            continue
        exact = exact or in_fp64()
        noise = {figure.name: figure.value for figure in compare_gradients(gradients, exact[number][1], {})}
        bad = [figure for figure in compare_gradients(actual, gradients, noise) if not figure.passed]
        assert not bad, (number, bad)


SGD = {"optimizer.name": "sgd", "optimizer.weight_decay": 0.0}


@pytest.mark.parametrize(("family", "mesh"), pairs(SEVERAL, TABLE))
def test_several_steps(family: str, mesh: str) -> None:
    """In micro-batches, with updates between; with cp, rows are so short that answers are cut."""
    config = config_of(family, mesh, 24 if "cp" in mesh else 64, "pairs", **SGD)
    results = run(world_of(mesh), ours_of_steps, config)[0]
    assert results[0][0]["rows"] * world_of(mesh) > 1 and results[0][0]["cut"] == ("cp" in mesh)
    answers, _ = answers_of(family, "pairs")

    def expected(dtype: torch.dtype) -> list[tuple[float, Tensors]]:
        model = plain_model(models(family)[0]).to(dtype)
        return plain_steps(model, list(model.named_parameters()), loss_of_pairs(answers))

    check_steps(results, expected(torch.float32), partial(expected, torch.float64))


LOSSES_OF_STEPS = [(["orpo"], [1.0]), (["aot"], [1.0]), *MIXES]


@pytest.mark.parametrize(
    ("family", "mesh"),
    pairs([("llama", "2")], [("llama", "1"), ("llama", "cp2"), ("qwen3", "tp2"), ("qwen3", "2x2"), ("llama", "pp2x2"),
                             ("gemma3_text", "2xtp2"), ("qwen3_moe", "ep2"), ("lfm2", "2")]),
)  # fmt: skip
def test_several_steps_of_other_losses(family: str, mesh: str) -> None:
    """Of a loss without a reference, of losses of the whole step, and of answers one by one."""
    budget = 24 if "cp" in mesh else 64
    configs = [
        config_of(
            family, mesh, budget, "pairs", **SGD, **{"preference.loss": names},
            **({"preference.weights": weights} if len(names) > 1 else {}),
        )
        for names, weights in LOSSES_OF_STEPS
    ]  # fmt: skip
    configs.append(config_of(family, mesh, budget, "kto", **SGD, **KTO))
    results = run(world_of(mesh), ours_of_losses, configs)[0]

    def expected(config: DpoConfig, dtype: torch.dtype) -> list[tuple[float, Tensors]]:
        model, preference = plain_model(models(family)[0]).to(dtype), config.preference
        if is_kto(config):
            return plain_steps(
                model, list(model.named_parameters()), loss_of_kto(*answers_of(family, "kto")), KTO_STEPS
            )
        answers, _ = answers_of(family, "pairs")
        compute = loss_of_pairs(answers, preference.losses, preference.weights or (1.0,))
        return plain_steps(model, list(model.named_parameters()), compute)

    for config, result in zip(configs, results, strict=True):
        assert result[0][0]["rows"] * world_of(mesh) > 1
        check_steps(result, expected(config, torch.float32), partial(expected, config, torch.float64))


@pytest.mark.parametrize(
    ("family", "mesh"), pairs([("llama", "2")], [("qwen3", "tp2"), ("llama", "pp2"), ("llama", "1")])
)
def test_adapters_whose_base_is_the_reference(family: str, mesh: str, tmp_path: Path) -> None:
    adapter, path = str(tmp_path / "adapter"), models(family)[0]
    config = config_of(family, mesh, 64, "pairs", **SGD, **{"lora.rank": 4, "reference.path": None})
    results = run(world_of(mesh), ours_of_steps, config, adapter)[0]
    answers = deepcopy(answers_of(family, "pairs")[0])

    def expected(dtype: torch.dtype) -> list[tuple[float, Tensors]]:
        plain = PeftReference(path, adapter)
        plain.model.to(dtype)
        with torch.no_grad(), plain.model.disable_adapter():
            for answer in answers:
                answer.reference = float(plain_dpo.logprob_sum(plain.model, answer))
        named = [(name, parameter) for name, parameter in plain.named() if parameter.requires_grad]
        return plain_steps(plain.model, named, loss_of_pairs(answers))

    check_steps(results, expected(torch.float32), partial(expected, torch.float64))


# ---------------------------------------------------------------- images


@cache
def picture_models(family: str) -> tuple[str, str]:
    """The model that is trained and the reference, with processors; and pictures.jsonl beside the first."""
    home = Path(tempfile.mkdtemp(prefix="weft-dpo-images-"))
    for name in ("trained", "reference"):
        vision_folder(home / name, family)
        model = transformers.AutoModelForImageTextToText.from_pretrained(saved_vision_model(family))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters() if name == "reference" else ():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        model.save_pretrained(home / name)
    rows = []
    for number in range(7):
        images = ["data:image/png;base64," + base64.b64encode(encoded(picture(16, 24, seed))).decode()
                  for seed in range(number % 3)]  # fmt: skip
        row = question("what is it" + "?" * number, "x" * (3 + 5 * number), images)
        rejected = [{"role": "assistant", "content": "y" * (20 - 2 * number)}]
        rows.append({"prompt": row["messages"][:1], "chosen": row["messages"][1:], "rejected": rejected})
    (home / "pictures.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(home / "trained"), str(home / "reference")


def picture_answers(model: Any, documents: Any) -> list[PlainAnswer]:
    """Each with the arguments of its images, as the family's processor gives them."""
    named, out = inspect.signature(model.forward).parameters, []
    for index in range(len(documents)):
        document = documents[index]
        inputs = {} if document.media is None else dict(document.media.inputs)
        if inputs:
            types = (document.tokens == model.config.image_token_id).int()[None]
            inputs |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in named}
        trained = (document.weights != 0).int().tolist()
        out.append(PlainAnswer(document.tokens.tolist(), trained, ROLES[int(documents.roles[index])], inputs=inputs))
    return out


@pytest.mark.parametrize(("family", "mesh"), pairs(
    [("qwen2_5_vl", "2")],
    [("gemma3", "1"), ("gemma3", "tp2"), ("qwen2_5_vl", "2x2"), ("gemma3", "cp2"), ("qwen2_5_vl", "pp2")],
))  # fmt: skip
def test_several_steps_with_images(family: str, mesh: str) -> None:
    path, reference = picture_models(family)
    data = str(Path(path).parent / "pictures.jsonl")
    config = config_of("llama", mesh, 256, "pairs", **SGD, **{
        "model.path": path, "reference.path": reference, "data.path": data,
    })  # fmt: skip
    results = run(world_of(mesh), ours_of_steps, config)[0]
    documents = Dpo(config).read_data().documents

    def expected(dtype: torch.dtype) -> list[tuple[float, Tensors]]:
        model, frozen = (
            transformers.AutoModelForImageTextToText.from_pretrained(p, dtype=dtype, attn_implementation="eager").eval()
            for p in (path, reference)
        )
        answers = picture_answers(model, documents)
        assert sum(bool(answer.inputs) for answer in answers) == 8
        with torch.no_grad():
            for answer in answers:
                answer.reference = float(plain_dpo.logprob_sum(frozen, answer))
        return plain_steps(model, list(model.named_parameters()), loss_of_pairs(answers))

    check_steps(results, expected(torch.float32), partial(expected, torch.float64))
