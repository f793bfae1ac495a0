"""A recipe's steps of synthetic documents, which `weft verify` compares. They are planned, passed through frozen models
and laid out as in the loop of training.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from weft.data.documents import DataReport, lengths_of
from weft.engine.batch.document import Document, choose
from weft.engine.engine import Engine
from weft.engine.losses.base import Loss
from weft.engine.step_plan.plan import StepPlan
from weft.launch import flight
from weft.recipes.recipe import PreparedStep, Recipe
from weft.recipes.run_data import RunData
from weft.verify.harness import cut_documents


class RecipeSteps:
    """The mesh's side of a recipe's training (verify/training.py:PreparedSteps).

    documents: the data set. counts: the number of documents of each step. paired: whether the documents of a step are
    pairs. A pair fits into the rows of the first entry of `short`; only one document fits into those of the last entry.
    """

    def __init__(
        self, engine: Engine, recipe: Recipe[Any], documents: Sequence[Document], counts: Sequence[int], paired: bool
    ) -> None:
        self.engine, self.recipe, self.documents, self.counts = engine, recipe, documents, counts
        self.objective: Loss = recipe.objective
        report = DataReport("verify", len(documents), 0, 0, 0, "")
        recipe.open_models(engine, RunData(documents, report))
        flight.enter(flight.ENDLESS)
        metadata = engine.planner.metadata(documents)
        cut_documents(engine, max(lengths_of(documents)), metadata)
        rooms = [meta.room for meta in metadata[: counts[0]]]
        self.short = [max(rooms) + 1]
        if paired and engine.context is None:  # rows over which a document is split have no room for a pair
            self.short.insert(0, max(map(sum, zip(rooms[::2], rooms[1::2], strict=True))) + 1)

    def indices(self, number: int) -> list[int]:
        """The documents of a step."""
        first, last = list(pairwise(np.cumsum([0, *self.counts]).tolist()))[number]
        return list(range(first, last))

    def prepare(self, number: int, budget: int | None) -> tuple[StepPlan, Mapping[int, Document]]:
        """See PreparedSteps."""
        engine, indices = self.engine, self.indices(number)
        documents = choose(self.documents, indices)
        plan = engine.plan(engine.planner.metadata(documents), budget=budget)
        local = {index: documents[index] for index in engine.planner.local_documents(plan)}
        rows = engine.rows(plan, local, self.objective, number + 1)
        step = self.recipe.before_step(PreparedStep(number + 1, indices, documents, plan, local, rows))
        flight.enter(flight.ENDLESS)
        return plan, step.local
