"""Documents that share their beginnings are forwarded as trees; everything equals plain transformers, which sees each
document alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.cases import MESHES, describe, open_engine, pairs, parity, saved_model, world_of
from tests.support.pool import run
from weft.engine.batch.document import Document
from weft.engine.batch.rows import Row, RowBuilder
from weft.engine.losses.base import CrossEntropy
from weft.engine.step_plan.trees import tree_tokens
from weft.verify.harness import Verdict

SUITE = [
    ("gemma3_text", "2"), ("gemma2", "cp2"), ("qwen3", "2xtp2"), ("llama", "pp2"), ("qwen3_next", "1"),
    ("deepseek_v3", "1"),
]  # fmt: skip
TABLE = [
    ("gpt_oss", "2"),
    ("llama", "1"),  # beside planted bugs of trees it runs in the suite: tests/verify/test_plants.py
    ("llama", "2x2"), ("llama", "cp2u2"), ("phi3_longrope", "2"), ("llama", "pp2x2xtp2"), ("gemma3_text", "cp2xtp2"),
    ("qwen3", "2x2xcp2"), ("falcon", "2"), ("llama4_text", "1"), ("lfm2", "cp2u2"), ("mamba2", "2"), ("jamba", "2"),
    ("qwen3_next", "tp2"), ("deepseek_v3", "ep2"), ("gpt_oss", "ep2xcp2"), ("gpt_oss", "ep2xcp2xtp2"),
]  # fmt: skip
BALANCED = [("qwen3_moe", "ep2", "step"), ("qwen3_moe", "cp2", "document")]
BALANCED_TABLE = [
    ("qwen3_moe", "pp2xep2", "document"), ("qwen3_moe", "2xep2", "step"), ("qwen3_moe", "pp2xep2xcp2", "step"),
    ("qwen3_moe", "pp2xep2xtp2", "document"),
]  # fmt: skip
WITHOUT_TREES = ("llama4_text", "falcon")  # chunks that begin with the document; padded


def of_trees(path: str, mesh: str, sections: dict[str, dict[str, Any]]) -> tuple[Verdict | None, int]:
    """(Verdict of parity on trees, number of rows that had segments)."""
    rows, build = list[Row](), RowBuilder._build

    def noted(self: RowBuilder, *args: Any) -> Row:
        row = build(self, *args)
        rows.append(row)
        return row

    with mock.patch.object(RowBuilder, "_build", noted):
        verdict = parity(path, mesh, sections, trees=True)
    return verdict, sum(row.bounds.segments is not None for row in rows)


@pytest.mark.covers("step.share_prefixes")
@pytest.mark.parametrize(("family", "mesh"), pairs(SUITE, TABLE))
def test_trees_equal_documents_apart(family: str, mesh: str) -> None:
    ((verdict, rows), *_) = run(world_of(mesh), of_trees, saved_model(family), mesh, {})
    assert verdict is not None and verdict.passed, describe(verdict)
    assert (rows > 0) == (family not in WITHOUT_TREES)


@pytest.mark.parametrize(("family", "mesh", "balance"), pairs(BALANCED, BALANCED_TABLE))
def test_experts_count_a_shared_token_for_each_of_its_documents(family: str, mesh: str, balance: str) -> None:
    section = {"model": {"router_aux_loss": balance, "router_aux_loss_coef": 0.1}}
    ((verdict, rows), *_) = run(world_of(mesh), of_trees, saved_model(family), mesh, section)
    assert verdict is not None and verdict.passed, describe(verdict)
    assert rows > 0


@pytest.mark.parametrize(
    "section", [{"lora": {"rank": 4}}, {"model": {"recompute": "full"}}], ids=["lora", "recompute"]
)
def test_trees_with_adapters_and_recomputed_layers(section: dict[str, dict[str, Any]]) -> None:
    ((verdict, rows),) = run(1, of_trees, saved_model("llama"), "1", section)
    assert verdict is not None and verdict.passed, describe(verdict)
    assert rows > 0


# ---------------------------------------------------------------- random forests, with and without sharing


Forest = Sequence[tuple[list[int], list[float], int]]


def random_forest(seed: int) -> Forest:
    """(token ids, weights, group) of documents whose groups have branches of any depth."""
    draw = random.Random(seed)
    documents: list[tuple[list[int], list[float], int]] = []
    for group in range(draw.randint(1, 4)):
        beginnings = [[draw.randrange(3, 6) for _ in range(draw.randint(1, 25))]]
        for _ in range(draw.randint(1, 7)):
            ids = [*draw.choice(beginnings), *(draw.randrange(3, 9) for _ in range(draw.randint(0, 15)))]
            ids = ids if len(ids) > 1 else [*ids, 7]
            beginnings.append(ids[: draw.randint(1, len(ids))])
            documents.append((ids, [draw.choice([0.0, 0.25, 1.0]) for _ in ids], group))
    return documents


def nodes_of(forest: Forest) -> int:
    """Nodes of the tries of all groups; each document without its last token, which predicts nothing."""
    return len({(group, *ids[:end]) for ids, _, group in forest for end in range(1, len(ids))})


@dataclass(frozen=True)
class Difference:
    """Of a forest in trees and its documents apart. loss, norm: relative differences. tokens: forwarded in one row.
    nodes: of the tries. cut: whether some documents are cut and others share tokens. beside: whether they do so in one
    row."""

    loss: float
    norm: float
    tokens: int
    nodes: int
    cut: bool
    beside: bool


def differences(path: str, mesh: str, seeds: Sequence[int]) -> list[Difference]:
    """Of each forest. With mesh.cp, a rank has room for most of the longest document only, so that long documents are
    cut beside trees of others."""
    cp = MESHES[mesh].get("cp", 1)
    results = []
    engines = [open_engine(path, mesh, step={"share_prefixes": share}) for share in ("auto", "off")]
    for seed in seeds:
        forest = random_forest(seed)
        documents = {
            index: Document(torch.tensor(ids), torch.tensor(weights), group=group)
            for index, (ids, weights, group) in enumerate(forest)
        }
        budget = 128 if cp == 1 else max(len(ids) for ids, _, _ in forest) * 7 // 8
        values, plans = [], []
        for engine in engines:
            plans.append(engine.plan(engine.planner.metadata(documents.values()), budget=budget))
            loss = engine.accumulate(plans[-1], documents, CrossEntropy())["loss"] or 0.0
            values.append((loss, engine.gradient_norm()))
            engine.drop_gradients()
        (loss, norm), (loss_apart, norm_apart) = values
        trees = plans[0]
        cells = [(k, r) for k in range(trees.micro_batches) for r in range(trees.ranks)]
        metadata = engines[0].planner.metadata(documents.values())
        results.append(
            Difference(
                abs(loss - loss_apart) / max(1e-9, loss_apart),
                abs(norm - norm_apart) / max(1e-9, norm_apart),
                tree_tokens(metadata, range(len(metadata))),
                nodes_of(forest),
                bool(trees.pieces) and any(trees.segments(*cell) for cell in cells),
                any(trees.segments(*cell) and trees.shared_documents(*cell) for cell in cells),
            )
        )
    return results


CHOSEN = (195, 35, 24, 64, 75)  # siblings behind another tree; with mesh.cp, a cut document beside a tree
FORESTS = [("4", 6), ("2xcp2", 2)]
MORE_FORESTS = [
    ("4", 300), ("2xcp2", 300), ("2x1xcp2", 100), ("2x2", 100), ("cp2u2xtp2", 100), ("pp2xcp2", 100), ("cp4u2", 100),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "count"), pairs(FORESTS, MORE_FORESTS))
def test_random_forests_equal_documents_apart(mesh: str, count: int) -> None:
    seeds = [*range(count), *CHOSEN]
    results: list[Difference] = run(4, differences, saved_model("llama"), mesh, seeds, timeout=900.0)[0]
    print(
        f"{mesh}: loss {max(r.loss for r in results):.1e}, norm {max(r.norm for r in results):.1e}; documents are cut "
        f"in {sum(r.cut for r in results)} forests with trees, in {sum(r.beside for r in results)} beside a tree"
    )
    for result in results:
        assert result.loss < 1e-6 and result.norm < 1e-6
        assert result.tokens == result.nodes
    assert any(result.beside for result in results) == ("cp" in mesh)
