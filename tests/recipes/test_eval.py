"""Evaluation: the held-out loss is the reference's token mean on every mesh, and training does not notice it."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.support.cases import open_engine, pairs, saved_model, world_of
from tests.support.pool import run
from tests.support.resuming import STEPS, Sections, attempt, equal, inputs, lines, process, state_of
from tests.support.toy_tokenizers import chat, write_jsonl
from weft import cli
from weft.checkpoint.retention import best_step, complete_steps, point_best, prune, step_folder, sweep
from weft.config import schema
from weft.engine.batch.document import Document
from weft.engine.losses.base import Batch, CrossEntropy, Loss, LossOutput
from weft.launch import flight
from weft.launch.summary import Phases
from weft.observe.resume import reset_best
from weft.recipes import evaluate
from weft.recipes.evaluate import BestEvaluation, Evaluator, HeldOut
from weft.verify import reference
from weft.verify.plants import planted

Figures = dict[str, float | None]

# Lengths of documents: a row holds 128 tokens. A negative one trains nothing.
SETS: dict[str, tuple[int, ...]] = {
    "one": (29,),
    "fewer than ranks": (53, 7),
    "a prime number": (37, 1, 23, -30, 2, 61, 16, 17, 5, 128, 90, 44, 3),
    "several plans": (100, 90, 3, 80, 70, 128, 60, 50, 40, 30, 20, 10, 7, 127, 64, 65, 2, 1, 128),
}


# ---------------------------------------------------------------- against the reference


@cache
def documents_of(name: str) -> list[reference.Document]:
    """Random tokens of which a first part is not trained; weights are not all one."""
    source, out = random.Random(name), []
    for length in SETS[name]:
        ids = [source.randrange(3, 128) for _ in range(abs(length))]
        first = abs(length) if length < 0 else source.randrange(0, max(1, length // 2))
        weight = source.choice([1.0, 1.0, 0.5])
        out.append((ids, [0.0 if index < first else weight for index in range(abs(length))]))
    return out


@cache
def plain_means(family: str, name: str) -> tuple[float, float, float]:
    """(loss, accuracy, exact): over all documents, one at a time, summed in Python."""
    plain = reference.Reference(saved_model(family))
    loss = right = weights = 0.0
    wholly: list[bool] = []
    for ids, mask in documents_of(name):
        with torch.no_grad():
            logprob = plain.logits(ids).log_softmax(-1)
        predicted = [index for index in range(1, len(ids)) if mask[index]]
        if predicted:
            wholly.append(all(int(logprob[index - 1].argmax()) == ids[index] for index in predicted))
        for index in range(1, len(ids)):
            loss -= mask[index] * float(logprob[index - 1, ids[index]])
            right += mask[index] * (int(logprob[index - 1].argmax()) == ids[index])
            weights += mask[index]
    return loss / weights, right / weights, sum(wholly) / len(wholly)


def evaluated(
    plant: str | None,
    path: str,
    mesh: str,
    sections: Sections,
    sets: list[dict[str, Any]],
    objective: Loss | None = None,
) -> list[Figures]:
    """What one engine finds on each set of named documents; two rows of a rank make a plan."""
    with planted(plant), mock.patch.object(evaluate, "_ROWS", 2):
        engine, results = open_engine(path, mesh, **sections), []
        for named in sets:
            held_out = HeldOut({name: [as_document(d) for d in documents] for name, documents in named.items()})
            config = schema.SftConfig(model=schema.ModelConfig(path=path), data=schema.DataConfig(path=""))
            results.append(
                Evaluator(config, engine, held_out, {}, Path(), Phases(), objective or CrossEntropy()).evaluate(1, 1)
            )
        assert all(parameter.grad is None for parameter in engine.module.parameters())
        assert engine.module.training
        return results


def as_document(document: reference.Document) -> Document:
    ids, mask = document
    return Document(torch.tensor(ids), torch.tensor(mask))


def on_mesh(mesh: str, family: str, plant: str | None = None, sections: Sections | None = None) -> dict[str, Figures]:
    """The figures of each set, which all ranks find alike."""
    sets = [{"": documents_of(name)} for name in SETS]
    by_rank = run(world_of(mesh), evaluated, plant, saved_model(family), mesh, sections or {}, sets)
    for figures in by_rank:
        assert [dict(f, **{"eval/seconds": 0}) for f in figures] == [dict(f, **{"eval/seconds": 0}) for f in by_rank[0]]
    return dict(zip(SETS, by_rank[0], strict=True))


@cache
def one_rank(family: str) -> dict[str, Figures]:
    return on_mesh("1", family)


FAMILIES = {"llama": ("1", "3", "2x2", "tp2"), "lfm2": ("1", "3"), "gemma2": ("2",)}


@pytest.mark.parametrize(("family", "mesh"), pairs(
    [(family, mesh) for family, meshes in FAMILIES.items() for mesh in meshes], [("llama", "2"), ("llama", "4")],
))  # fmt: skip
def test_the_held_out_loss_is_the_references_token_mean(family: str, mesh: str) -> None:
    measured = one_rank(family) if mesh == "1" else on_mesh(mesh, family)
    for name, figures in measured.items():
        loss, accuracy, exact = plain_means(family, name)
        assert figures["eval/loss"] == pytest.approx(loss, rel=3e-6), name
        assert figures["eval/accuracy"] == pytest.approx(accuracy, rel=1e-9), name
        assert figures["eval/exact"] == pytest.approx(exact, rel=1e-9), name
        assert figures["eval/perplexity"] == pytest.approx(math.exp(loss), rel=1e-4), name
        assert figures["eval/loss"] == pytest.approx(one_rank(family)[name]["eval/loss"], rel=1e-6), name


def held_out_loss_is_the_references(plant: str | None) -> bool:
    """For docs/explanation/planted-bugs.md."""
    measured = on_mesh("2", "llama", plant)
    return all(measured[name]["eval/loss"] == pytest.approx(plain_means("llama", name)[0], rel=3e-6) for name in SETS)


def test_in_bf16_it_is_the_same_within_its_noise() -> None:
    measured = on_mesh("2", "llama", sections={"fsdp": {"param_dtype": "bf16"}})
    for name, figures in measured.items():
        assert figures["eval/loss"] == pytest.approx(plain_means("llama", name)[0], rel=2e-2), name
        assert figures["eval/loss"] != pytest.approx(plain_means("llama", name)[0], rel=1e-6), name


def test_named_files_are_reported_apart_and_together() -> None:
    """Of two files the whole is the token mean over both; one without trained tokens has no loss."""
    names = {"a": "one", "b.2": "a prime number"}
    named = {key: documents_of(name) for key, name in names.items()} | {"empty": [([3, 4], [0.0, 0.0])]}
    (figures,) = run(2, evaluated, None, saved_model("llama"), "2", {}, [named])[0]
    weights = {key: sum(sum(mask[1:]) for _, mask in documents) for key, documents in named.items()}
    for key, name in names.items():
        assert figures[f"eval/{key}/loss"] == pytest.approx(plain_means("llama", name)[0], rel=3e-6)
    mean = sum(plain_means("llama", name)[0] * weights[key] for key, name in names.items()) / sum(weights.values())
    assert figures["eval/loss"] == pytest.approx(mean, rel=3e-6)
    assert [figures[f"eval/empty/{key}"] for key in ("loss", "perplexity", "accuracy")] == [None] * 3


class Surprise(CrossEntropy):
    """An objective of the user's own, with a metric that no other has."""

    readouts = frozenset({"logprob", "entropy"})

    def __call__(self, batch: Batch) -> LossOutput:
        terms = super().__call__(batch)
        entropy = (batch.weights_N * batch.readouts["entropy"]).sum(), batch.weights_N.sum()
        return LossOutput(terms.loss_sum, {**terms.metrics, "entropy": entropy})


def test_an_objective_of_the_users_own_is_evaluated_by_its_metrics() -> None:
    sets = [{"": documents_of("one")}]
    (figures,) = run(1, evaluated, None, saved_model("llama"), "1", {}, sets, Surprise())[0]
    (ids, mask) = documents_of("one")[0]
    entropies = reference.Reference(saved_model("llama")).logprobs(ids)[1]
    expected = float((entropies * torch.tensor(mask))[1:].sum()) / sum(mask[1:])
    assert figures["eval/entropy"] == pytest.approx(expected, rel=1e-5)
    assert figures["eval/loss"] == pytest.approx(plain_means("llama", "one")[0], rel=3e-6)
    assert "eval/accuracy" not in figures


# ---------------------------------------------------------------- a run with and without


@cache
def held_out_file() -> str:
    return write_jsonl(
        inputs() / "held-out.jsonl", *(chat(("user", "e" * i), ("assistant", "bcd" * i)) for i in range(1, 6))
    )


def evaluating(**options: Any) -> Sections:
    return {
        "eval": {"path": held_out_file(), "every": 2, "at_start": True, "prompts": ("ab", "a", "abc"),
                 "max_new_tokens": 4, "temperature": 1.0, **options},
        "checkpoint": {"every": 5, "keep_best": True},
    }  # fmt: skip


def without_evaluation(run_folder: Path) -> list[dict[str, Any]]:
    training_lines = [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in lines(run_folder)]
    return [line for line in training_lines if line["step"]]


@pytest.mark.covers("eval.path", "eval.at_start", "eval.max_new_tokens")
def test_training_does_not_notice_an_evaluation_and_a_resumed_run_finds_the_same(tmp_path: Path) -> None:
    mesh, plain, complete, killed = "2", tmp_path / "plain", tmp_path / "whole", tmp_path / "killed"
    drawn = process(plain, mesh, sections={"checkpoint": {"every": 0}})
    assert process(complete, mesh, sections=evaluating()) == drawn
    assert without_evaluation(complete) == lines(plain)
    assert equal(state_of(complete, STEPS), state_of(plain, STEPS))
    assert equal(*(load_file(f / "checkpoints" / "latest" / "model.safetensors") for f in (complete, plain)))

    process(killed, mesh, steps=5, sections=evaluating())
    process(killed, mesh, steps=0, resume=True, sections=evaluating())
    process(killed, mesh, resume=True, sections=evaluating())
    assert lines(killed) == lines(complete)
    assert (killed / "samples.jsonl").read_text() == (complete / "samples.jsonl").read_text()
    assert best_step(killed / "checkpoints") == best_step(complete / "checkpoints") is not None

    written = lines(complete)
    assert [line["step"] for line in written if "eval/loss" in line] == [0, 2, 4, 6, 8, 10]
    samples = [json.loads(line) for line in (complete / "samples.jsonl").read_text().splitlines()]
    assert [(s["step"], s["prompt"]) for s in samples] == [(n, p) for n in range(0, 11, 2) for p in ("ab", "a", "abc")]
    assert all(0 <= sample["tokens"] <= 4 and isinstance(sample["answer"], str) for sample in samples)
    summary = json.loads((complete / "summary.json").read_text())
    evaluation = {line["step"]: line["eval/loss"] for line in written if line.get("eval/loss") is not None}
    best = min((step for step in evaluation if step), key=lambda step: evaluation[step])
    assert summary["evaluation"]["first"]["eval/loss"] == evaluation[0]
    assert summary["evaluation"]["last"]["eval/loss"] == evaluation[10]
    assert summary["evaluation"]["best"] == {
        "step": best, "eval/loss": evaluation[best], "checkpoint": str(step_folder(complete / "checkpoints", best)),
    }  # fmt: skip


# ---------------------------------------------------------------- the best step, and when to stop


LOSSES = {1: 3.0, 2: 2.0, 3: 2.5, 4: math.nan, 5: 1.9, 6: 2.0, 7: 1.95, 8: 2.1, 9: 1.0, 10: 1.0}
PATIENT: Sections = {
    "eval": {"every": 1, "patience": 3},
    "checkpoint": {"every": 3, "keep": 1, "keep_best": True},
}


def scripted(*arguments: Any) -> None:
    """A process of a run whose held-out losses are LOSSES."""

    def means(evaluator: Evaluator) -> Figures:
        step = flight.recorder.record().step
        return {"loss": LOSSES[step], "accuracy": 0.5, "exact": 0.5 if step >= 4 else 0.0}

    with mock.patch.object(Evaluator, "_means", means):
        attempt(*arguments)


def scripted_process(folder: Path, *, resume: bool = False, steps: int | None = None, **options: Any) -> None:
    sections: Sections = {**PATIENT, "eval": {**PATIENT["eval"], "path": held_out_file(), **options}}
    run(1, scripted, str(inputs()), str(folder), "1", resume, steps, sections, None)


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patient") / "run"
    scripted_process(folder)
    return folder


@pytest.mark.covers("checkpoint.keep_best", "eval.patience")
def test_a_run_without_improvement_ends_and_keeps_its_best(patient: Path) -> None:
    """2.0 at step 2, 1.9 at step 5; steps 6 to 8 are no better. A loss that is not a number is no improvement."""
    assert [line["eval/loss"] for line in lines(patient)] == [3.0, 2.0, 2.5, None, 1.9, 2.0, 1.95, 2.1]
    assert complete_steps(patient / "checkpoints") == [5, 8]
    assert best_step(patient / "checkpoints") == 5
    summary = json.loads((patient / "summary.json").read_text())
    assert summary["stopped"] == "eval.patience" and summary["steps"] == 8
    best = {"step": 5, "eval/loss": 1.9, "checkpoint": str(patient / "checkpoints" / "step-000005")}
    assert summary["evaluation"]["best"] == best


@pytest.mark.covers("eval.target")
def test_a_run_ends_where_its_target_is_reached(tmp_path: Path) -> None:
    """eval/exact is 0.5 from step 4 on; resumed, the run has nothing to do, unless it is to go on."""
    scripted_process(tmp_path / "run", patience=None, target=0.5)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped"] == "eval.target" and summary["steps"] == 4
    scripted_process(tmp_path / "run", resume=True, patience=None, target=0.5)
    assert len(lines(tmp_path / "run")) == 4
    scripted_process(tmp_path / "run", resume=True, patience=None, target=0.9)
    assert len(lines(tmp_path / "run")) == 10


def test_a_resumed_run_counts_on_and_ends_where_the_unbroken_one_does(patient: Path, tmp_path: Path) -> None:
    """Killed after step 7; the checkpoint of step 6 knows of one evaluation without improvement."""
    scripted_process(tmp_path / "run", steps=7)
    scripted_process(tmp_path / "run", resume=True)
    assert lines(tmp_path / "run") == lines(patient)
    assert (complete_steps(tmp_path / "run" / "checkpoints"), best_step(tmp_path / "run" / "checkpoints")) == (
        [5, 8],
        5,
    )


def test_a_run_that_was_ended_goes_on_only_with_more_patience(patient: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(patient, tmp_path / "run", symlinks=True))
    scripted_process(folder, resume=True)
    assert len(lines(folder)) == 8
    scripted_process(folder, resume=True, patience=4)
    assert [line["eval/loss"] for line in lines(folder)][8:] == [1.0, 1.0]
    assert json.loads((folder / "summary.json").read_text())["stopped"] is None
    assert best_step(folder / "checkpoints") == 9


@pytest.mark.covers("eval.min_delta")
def test_small_improvements_add_up() -> None:
    best = BestEvaluation(schema.EvalConfig(patience=2, min_delta=0.1))
    verdicts = [
        (best.update(step, {"eval/loss": loss}), best.waited) for step, loss in enumerate((1.0, 0.95, 0.89, 0.88), 1)
    ]
    assert verdicts == [(True, 0), (True, 1), (True, 0), (True, 1)]  # 0.89 is lower than 1.0 by more than 0.1
    assert best.ends is None and (best.value, best.step) == (0.88, 4)
    assert not best.update(5, {"eval/loss": 0.88}) and best.ends == "eval.patience"
    assert (
        BestEvaluation(schema.EvalConfig()).update(0, {"eval/loss": 1.0}) is False
    )  # nothing is saved before the first step


def test_the_best_of_other_documents_or_another_figure_is_forgotten() -> None:
    first = BestEvaluation(schema.EvalConfig(), "abc")
    first.update(3, {"eval/loss": 1.0})
    for config, digest in ((schema.EvalConfig(), "abd"), (schema.EvalConfig(metric="eval/a/loss"), "abc")):
        changed = BestEvaluation(config, digest)
        assert "the earlier best is discarded" in changed.restore(first.state(saved=True))[0] and changed.value is None
    same = BestEvaluation(schema.EvalConfig(), "abc")
    assert same.restore(first.state(saved=True)) == [] and same == first


def test_the_best_checkpoint_is_never_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        (step_folder(tmp_path, step) / "trainer_state").mkdir(parents=True)
    point_best(step_folder(tmp_path, 20))
    prune(tmp_path, keep=1, keep_every=None, trainer_state="all")
    assert complete_steps(tmp_path) == [20, 40]
    (tmp_path / "best.new").symlink_to("step-000030")
    sweep(tmp_path)
    assert best_step(tmp_path) == 20 and {p.name for p in tmp_path.iterdir() if p.is_symlink()} == {"best", "latest"}
    point_best(step_folder(tmp_path, 40))
    prune(tmp_path, keep=1, keep_every=None, trainer_state="all")
    assert complete_steps(tmp_path) == [40]


def test_best_names_what_was_the_best_up_to_the_checkpoint_that_is_resumed_from(tmp_path: Path) -> None:
    for step in (2, 4):
        step_folder(tmp_path, step).mkdir()
    point_best(step_folder(tmp_path, 4))  # found after the checkpoint, by steps that are done again
    assert reset_best(tmp_path, {"step": 2, "kept": True}) == [] and best_step(tmp_path) == 2
    (note,) = reset_best(tmp_path, {"step": 1, "kept": True})
    assert "step 1 was the best so far" in note and "no longer exists" in note and not (tmp_path / "best").is_symlink()
    assert reset_best(tmp_path, {"step": 4, "kept": False}) == [] and best_step(tmp_path) is None


# ---------------------------------------------------------------- what a user sees


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("model", "chats.jsonl"):
        (tmp_path / name).symlink_to(inputs() / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


SFT = ["sft", "model.path=model", "data.path=chats.jsonl", "step.documents=8", "run.dir=run"]


@pytest.mark.covers("eval.sources", "eval.every", "eval.metric", "eval.prompts")
def test_what_a_run_says_of_its_evaluations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(folder / "a.jsonl", chat(("user", "a"), ("assistant", "bc")))
    write_jsonl(
        folder / "b.jsonl", chat(("user", "abc"), ("assistant", "bcdbcd")), chat(("user", "a"), ("assistant", "b"))
    )
    write_jsonl(folder / "ask.jsonl", chat(("user", "abc"), ("assistant", "left out")), {"prompt": "bcd"})
    words = ["eval.sources=[{path: a.jsonl}, {name: b, path: b.jsonl}]", "eval.prompts=ask.jsonl",
             "eval.max_new_tokens=3", "eval.every=2",
             "checkpoint.keep_best=true", "eval.patience=9", "eval.metric=eval/b/loss"]  # fmt: skip
    assert cli.main([*SFT, *words]) == 0
    out = capsys.readouterr().out
    assert "held out a (a.jsonl): 1 documents" in out and "held out b (b.jsonl): 2 documents" in out
    assert "prompts  2, answered at every evaluation" in out
    eval_lines = [line for line in out.splitlines() if line.startswith("eval     step ")]
    assert [line.split(":")[0] for line in eval_lines] == ["eval     step 2", "eval     step 3"]
    assert all(re.search(r": loss [\d.]+, perplexity .*%; a \d\.\d{4}, b \d\.\d{4}", line) for line in eval_lines)
    assert "; the best so far (" in eval_lines[0]
    assert re.search(
        r"^held out \d\.\d{4} \(step \d\) -> .*; best eval/b/loss .*, kept as run/checkpoints/step-0", out, re.M
    )
    assert "sample   abc -> " in out and "sample   bcd -> " in out
    assert {p.name for p in (folder / "run").iterdir()} == {
        "config.yaml", "opening.txt", "metrics.jsonl", "samples.jsonl", "checkpoints", "starts.jsonl", "summary.json",
        "system.jsonl",
    }  # fmt: skip
    assert "left out" not in (folder / "run" / "samples.jsonl").read_text()


REFUSED = {
    "a document longer than a row": (["eval.path=long.jsonl"], r"long\.jsonl:1: 1 of 1 documents are longer than 64"),
    "a file that is not there": (["eval.path=hold.jsonl"], r"eval\.path hold\.jsonl does not exist.*mean held\.jsonl"),
    "a source that is not there": (["eval.sources=[{path: no.jsonl}]"], r"eval\.sources no\.jsonl does not exist"),
    "a source with a weight": (["eval.sources=[{path: held.jsonl, weight: 2}]"], r"held\.jsonl: weight: every"),
    "two of one name": (["eval.sources=[{path: held.jsonl}, {path: held.jsonl}]"], r"eval\.sources: two sources have"),
    "a path and sources": (["eval.path=held.jsonl", "eval.sources=[{path: held.jsonl}]"], r"are both set: keep one"),
    "no sources": (["eval.sources=[]"], r"eval\.sources: is empty: write at least one source, or set eval\.path"),
    "a text as a file of prompts": (["eval.prompts=Who"], r"prompts Who is not a file: .*'eval\.prompts=\[Who\]'"),
    "a list that YAML does not read": (["eval.prompts=[Who?]"], r"\[Who\?\] is not a list in YAML: quote each text"),
    "no prompts": (["eval.prompts=[]"], r"eval\.prompts is empty: write a file"),
    "a figure that is not there": (
        ["eval.sources=[{name: a, path: held.jsonl}]", "eval.patience=1", "eval.metric=eval/b/loss"],
        r"eval\.metric is eval/b/loss, which this run does not compute: set it to eval/loss or eval/a/loss",
    ),
    "patience without a loss": (["eval.prompts=[a]", "eval.patience=1"], r"eval\.patience would have no effect"),
    "the best of one": (
        ["eval.path=held.jsonl", "eval.every=0", "checkpoint.keep_best=true"],
        r"checkpoint\.keep_best would have no effect: eval\.every is 0",
    ),
    "an interval of nothing": (["eval.every=5"], r"eval\.every would have no effect: none of eval"),
    "a delta without patience": (["eval.path=held.jsonl", "eval.min_delta=1"], r"eval\.min_delta would have no effect"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(folder / "held.jsonl", chat(("user", "a"), ("assistant", "bc")))
    write_jsonl(folder / "long.jsonl", chat(("user", "a"), ("assistant", "bc" * 100)))
    words, expected = REFUSED[name]
    assert cli.main([*SFT, "step.max_tokens_per_device=64", *words]) == 2
    err = capsys.readouterr().err
    assert re.search(expected, err, re.DOTALL), err
