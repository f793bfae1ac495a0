"""Steps that are laid out ahead: planned from a table's lengths and weights, and only this rank's documents built."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.cases import open_engine, saved_model
from tests.support.pool import run
from weft.config import schema
from weft.data.documents import DataReport, Documents
from weft.data.limits import Limits, LongDocuments
from weft.data.order import SampledStep, SourceShare
from weft.data.table import Chunk, in_memory
from weft.engine.batch.document import Document, choose, first_sources
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.engine.prefetch import prefetch
from weft.launch.process import fake_ranks, join
from weft.launch.summary import Phases
from weft.parallel.mesh import Mesh
from weft.recipes import training
from weft.recipes.evaluate import HeldOut
from weft.recipes.recipe import Recipe
from weft.recipes.run_data import RunData


def table_of(lengths: Sequence[int], long: LongDocuments = "error", longest: int = 10**6) -> Documents:
    """Documents of random tokens, half of them trained, in two files."""
    random, pieces = np.random.default_rng(len(lengths)), []
    for origin, file_lengths in (("a.jsonl", lengths[: len(lengths) // 3]), ("b.jsonl", lengths[len(lengths) // 3 :])):
        total = sum(file_lengths)
        trained = random.integers(0, 2, total).astype(np.uint8)
        starts = np.cumsum([0, *file_lengths])[:-1]
        losses = np.array([trained[s + 1 : s + n].sum() for s, n in zip(starts, file_lengths, strict=True)], np.int32)
        ids = random.integers(3, 100, total).astype(np.int32)
        numbers = np.arange(1, len(file_lengths) + 1, dtype=np.int64)
        none = np.zeros(len(file_lengths), np.int64)
        zeros = none.astype(np.int32)
        formats, margins = np.zeros(len(file_lengths), np.uint8), np.zeros(len(file_lengths), np.float32)
        chunk = Chunk(
            ids, trained, np.array(file_lengths, np.int32), losses, numbers, formats, patches=none, pairs=none,
            reaches=zeros,
            images=zeros, videos=zeros, roles=formats, margins=margins, commons=zeros, teachers=zeros.astype(np.uint16),
            widths=zeros, top_ids=zeros[:0], top_logprobs=margins[:0], places=formats[:0], sizes=none[:0],
        )  # fmt: skip
        pieces.append(Limits(longest, long=long).select(in_memory(origin, True, [chunk]), ""))
    return Documents(pieces, [SourceShare(sum(len(piece.indices) for piece in pieces))])


@pytest.mark.parametrize("long", ["error", "truncate", "drop"])
def test_what_is_measured_is_what_documents_say_of_themselves(long: LongDocuments) -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 90).tolist()
    documents = table_of(lengths, long, longest=10**6 if long == "error" else 40)
    indices = np.random.default_rng(1).permutation(len(documents)).tolist()
    chosen = choose(documents, indices)
    measured, built = documents_meta(chosen), documents_meta(list(chosen))
    assert measured == built and len(built) > 50
    assert all(type(value) is type(expected) for actual, two in zip(measured, built, strict=True)
               for value, expected in zip(actual, two, strict=True))  # fmt: skip
    assert first_sources(chosen, range(9), 9) == [document.source for document in chosen][:9]
    assert first_sources(documents, indices, 9) == [document.source for document in chosen][:9]
    assert {source.partition(":")[0] for source in first_sources(documents, indices, 99)} == {"a.jsonl", "b.jsonl"}


def documents_meta(documents: Sequence[Document]) -> list[tuple[Any, ...]]:
    """As a plan has them, with a cost and what is left out."""
    from weft.engine.batch.document import Costs, document_metadata

    costs = Costs(lambda length: int(length > 7), lambda length: 0.1 * length, lambda patches, pairs: (0.0, 0))
    metas = document_metadata(documents, costs)
    return [(m.length, m.weight, m.loss_tokens, m.group, m.cost, m.routed, m.omitted) for m in metas]


# ---------------------------------------------------------------- what a rank builds

RANKS, COUNT = 8, 4096


def built_by_rank(lengths: Sequence[int]) -> list[list[int]]:
    """Of a step of these documents, those that each of 8 simulated ranks builds."""
    documents, built = table_of(lengths), list[list[int]]()
    original = Documents.build

    def build(self: Documents, index: int) -> Document:
        built[-1].append(index)
        return original(self, index)

    with fake_ranks(RANKS):
        try:
            model, step = schema.ModelConfig(path=saved_model("llama")), schema.StepConfig(max_tokens_per_device=256)
            engine = Engine(EngineConfig(model=model, step=step), sft_ranks(), weights=False)
            for rank in range(RANKS):
                built.append([])
                engine._rows = replace(engine._rows, rank=rank)
                with (
                    mock.patch.object(Documents, "build", build),
                    mock.patch.object(Mesh, "loss_rank", mock.PropertyMock(return_value=rank)),
                    mock.patch.object(engine.planner, "_rank", rank),
                ):
                    prepared = training.prepare_step(
                        engine, documents, CrossEntropy(), SampledStep(1, 1, list(range(COUNT)))
                    )
                micro_batches = range(prepared.plan.micro_batches)
                in_rows = [index for micro in micro_batches for index in prepared.rows[micro].documents]
                assert sorted(in_rows) == sorted(built[-1])
        finally:
            dist.destroy_process_group()
    return built


def sft_ranks() -> Any:
    return replace(join("cpu"), owner=False)


@pytest.mark.parametrize("equal_lengths", [True, False])
def test_a_rank_builds_its_own_documents_only(equal_lengths: bool) -> None:
    """An eighth: of documents that are alike, and of the tokens of others, whose FLOPs are balanced."""
    lengths = [20] * COUNT if equal_lengths else np.random.default_rng(2).integers(2, 60, COUNT).tolist()
    built = built_by_rank(lengths)
    assert sorted(index for indices in built for index in indices) == list(range(COUNT))
    if equal_lengths:
        assert [len(indices) for indices in built] == [COUNT // RANKS] * RANKS
    assert max(sum(lengths[index] for index in indices) for indices in built) <= 1.01 * sum(lengths) / RANKS


# ---------------------------------------------------------------- the thread


def test_the_next_is_made_while_this_one_is_used() -> None:
    begun = {n: threading.Event() for n in range(5)}

    def make(n: int) -> str:
        begun[n].set()
        return f"{n} in {threading.current_thread().name}"

    with closing(prefetch(range(4), make)) as items:
        for n, future in items:
            assert n == 3 or begun[n + 1].wait(30)
            time.sleep(0.01)
            assert n > 1 or not begun[n + 2].is_set()  # no further
            assert future.result() == f"{n} in ahead_0"
    assert n == 3


def test_an_error_is_its_own_items() -> None:
    def make(n: int) -> int:
        return 1 // (n - 2)

    results = []
    with closing(prefetch(range(4), make)) as items:
        for n, future in items:
            if n == 2:
                with pytest.raises(ZeroDivisionError):
                    future.result()
            else:
                results.append(future.result())
    assert results == [-1, -1, 1]


def test_an_error_of_the_items_is_raised_where_the_next_was_to_come() -> None:
    def items() -> Iterator[int]:
        yield 0
        raise OSError("no paper")

    with closing(prefetch(items(), abs)) as fetched:
        assert next(fetched)[0] == 0
        with pytest.raises(OSError, match="no paper"):
            next(fetched)


def test_who_stops_early_leaves_no_thread() -> None:
    fetched: list[int] = []
    with closing(prefetch(range(100), fetched.append)) as items:
        for n, _ in items:
            if n == 2:
                break
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
    assert fetched in ([0, 1, 2], [0, 1, 2, 3])


# ---------------------------------------------------------------- in a run


def config_of(path: str, **sections: Any) -> schema.SftConfig:
    return schema.SftConfig(
        model=schema.ModelConfig(path=path),
        data=schema.DataConfig(path="two files"),
        step=schema.StepConfig(documents=7, max_tokens_per_device=64),
        optimizer=schema.OptimizerConfig(lr=1e-2),
        train=schema.TrainConfig(epochs=2),
        **sections,
    )


class Listed(Sequence[Document]):
    """Documents given in Python: nothing is known of one that is not built. bad: this one cannot be."""

    def __init__(self, documents: Sequence[Document], bad: int | None = None) -> None:
        self.documents, self.bad = documents, bad

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: Any) -> Any:
        if index == self.bad and threading.current_thread() is not threading.main_thread():
            raise OSError(f"no document {index}")
        return self.documents[index]


def trained(path: str, folder: str, listed: bool) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """(lines of metrics.jsonl but for times, weights) of a run with an evaluation."""
    documents: Sequence[Document] = table_of(np.random.default_rng(4).integers(2, 40, 40).tolist())
    held_out: Sequence[Document] = table_of([9, 30, 4, 17, 5])
    if listed:
        documents, held_out = Listed(documents), Listed(held_out)
    config = config_of(path, eval=schema.EvalConfig(path="held out", every=2))
    report = DataReport("two files", len(documents), 0, 0, 40, "")
    engine = Engine(EngineConfig.from_config(config), join("cpu"))
    data = RunData(documents, report, HeldOut({"": held_out}, {"": report}))
    training.train(Recipe(config), engine, data, Path(folder), Phases())
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time/", "second", "mfu", "memory")
    compared = [{k: v for k, v in line.items() if not any(word in k for word in clocks)} for line in lines]
    return compared, dict(engine.tensors())


@pytest.mark.parametrize("world", [1, 2])
def test_documents_of_a_table_and_documents_given_in_python_train_alike(world: int, tmp_path: Path) -> None:
    results = []
    for listed in (False, True):
        folder = tmp_path / str(listed)
        folder.mkdir()
        results.append(run(world, trained, saved_model("llama"), str(folder), listed)[0])
    (lines, weights), (other_lines, other_weights) = results
    assert lines == other_lines and len(lines) == 12
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def overlapping(path: str, folder: str) -> tuple[list[bool], list[int]]:
    """(of each step but the last: whether the next was laid out before its update; after how many updates dtypes were
    checked)."""
    events = {number: threading.Event() for number in range(1, 13)}
    prepare_step, apply, waited, checked = training.prepare_step, Engine.apply, list[bool](), list[int]()

    def laying_out(engine: Engine, documents: Any, objective: Any, step: SampledStep, **options: Any) -> Any:
        prepared = prepare_step(engine, documents, objective, step, **options)
        events[step.number].set()
        return prepared

    def applying(engine: Engine, lr: float) -> Any:
        if len(waited) < 11:
            waited.append(events[len(waited) + 2].wait(30))
        return apply(engine, lr)

    def checking(engine: Engine) -> None:
        checked.append(len(waited))

    with (
        mock.patch.object(training, "prepare_step", laying_out),
        mock.patch.object(Engine, "apply", applying),
        mock.patch.object(training, "check_contract", checking),
    ):
        trained(path, folder, False)
    return waited, checked


def test_rows_are_built_while_the_step_before_computes(tmp_path: Path) -> None:
    """The contract of dtypes is checked once, after the first step."""
    assert run(1, overlapping, saved_model("llama"), str(tmp_path)) == [([True] * 11, [1])]


def spoilt(path: str, folder: str) -> tuple[str, int, str]:
    """(what was raised, lines written before, where the rank was)."""
    from weft.launch import flight

    config = config_of(path)
    config = replace(config, data=replace(config.data, shuffle=False))
    documents = Listed(list(table_of([9] * 40)), bad=16)  # the third step's
    engine = Engine(EngineConfig.from_config(config), join("cpu"))
    data = RunData(documents, DataReport("two files", 40, 0, 0, 9, ""))
    with pytest.raises(OSError) as caught:
        training.train(Recipe(config), engine, data, Path(folder), Phases())
    activity = flight.recorder.record().activity()
    flight.recorder.close()
    return str(caught.value), len((Path(folder) / "metrics.jsonl").read_text().splitlines()), activity


def test_a_document_that_cannot_be_built_ends_the_run_at_its_own_step(tmp_path: Path) -> None:
    ((error, lines, activity),) = run(1, spoilt, saved_model("llama"), str(tmp_path))
    assert (error, lines) == ("no document 16", 2)
    assert activity.startswith("in step 3 of 12, planning the step, documents b.jsonl:2, b.jsonl:3,"), activity
    assert activity.endswith("b.jsonl:8"), activity


def test_a_step_of_rows_is_the_step_of_its_documents() -> None:
    """Built one by one, ahead, or given as documents: the same gradients."""
    ((first, *further),) = run(1, gradients, saved_model("qwen3_moe"))
    for compared in further:
        assert first[0] == compared[0] and all(torch.equal(first[1][name], compared[1][name]) for name in first[1])


def gradients(path: str) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    engine = open_engine(path, "1", model={"router_aux_loss": "step"}, step={"max_tokens_per_device": 64})
    plan, documents = engine.plan_step(table_of([40, 30, 20, 10, 33]))
    assert plan.micro_batches > 1
    results, rows = [], engine.rows(plan, documents, CrossEntropy())
    for source in (documents, rows, rows.ahead()):
        metrics = engine.accumulate(plan, source, CrossEntropy())
        results.append((metrics, {name: g.clone() for name, g in engine.gradients() if g is not None}))
        engine.drop_gradients()
    return results


def test_a_row_that_cannot_be_laid_out_is_raised_where_it_is_asked_for() -> None:
    assert run(1, spoilt_rows, saved_model("qwen3_moe")) == [True]


def spoilt_rows(path: str) -> bool:
    """Routes that are of another model, in the second row."""
    engine = open_engine(path, "1", step={"max_tokens_per_device": 40})
    plan, documents = engine.plan_step(table_of([40, 30, 20, 10, 33]))
    index = plan.rows[1][0][0]
    documents[index] = replace(documents[index], routes=torch.zeros(1, 1, 1))
    rows = engine.rows(plan, documents, CrossEntropy()).ahead()
    with pytest.raises(ValueError, match="routes of"):
        rows[1]
    return rows[0].documents == plan.rows[0][0]


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_a_step_takes_what_is_laid_out() -> None:
    assert run(1, one_step, saved_model("llama")) == [True]


def one_step(path: str) -> bool:
    engine = open_engine(path, "1")
    laid_out = training.prepare_step(engine, table_of([9, 8, 7]), CrossEntropy(), SampledStep(1, 1, [2, 0]))
    step = training.take_step(engine, _done(laid_out), CrossEntropy(), 1e-3)
    return [meta.length for meta in step.plan.documents] == [7, 9] and not step.result.skipped
