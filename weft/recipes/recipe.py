"""The additions of a command to the loop of training.py: none for `weft sft`, a subclass of Recipe for others.

A Recipe defines how rows become documents, the loss, the frozen models whose outputs each step needs, and the metrics
of an evaluation. The loop does everything else, equally for all commands: sources, cache, mesh, adapters, best
checkpoint, resume, trackers, report, dry run, faults. To add a command, add:

1. config: a dataclass that extends SftConfig, with the command's sections; an entry in each of
   weft/config/commands.py, presets.py:ADAPTER_DEFAULTS, validate.py and reference.py:_FIRST;
2. weft/recipes/NAME.py: a subclass of Recipe, and run(config, options, hooks) as in sft.py;
3. weft/cli.py:RECIPES, and for Python a function in weft/api.py.

Order of a step: a thread plans it and lays out its rows, without a device (training.py:prepare_step). Then
`before_step` runs frozen models (engine/frozen.py) and may replace the rows, and the engine runs the step. An output
with one number per document is passed to the loss, which finds it by `batch.documents`, the documents' indices in the
step; the rows do not change. An output per token is added to arrays of this rank's documents, from which the rows are
laid out again (lays_out_again).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from weft.config.schema import SftConfig
from weft.engine.batch.document import Document
from weft.engine.batch.rows import StepRows
from weft.engine.engine import Engine
from weft.engine.losses.base import Loss
from weft.engine.losses.load import choose_objective
from weft.engine.step_plan.plan import StepPlan
from weft.launch.process import Ranks
from weft.observe.hooks import NO_HOOKS, Hooks
from weft.parallel.shards.load import Progress
from weft.recipes.run_data import OnProgress, RunData, read_run_data

Config = TypeVar("Config", bound=SftConfig)


@dataclass(frozen=True)
class PreparedStep:
    """A step before its forward. documents: the step's documents in order, not built. indices: their indices in the
    data. local: this rank's documents, built, by their index in the step."""

    number: int
    indices: Sequence[int]
    documents: Sequence[Document]
    plan: StepPlan
    local: Mapping[int, Document]
    rows: StepRows


class FrozenReadings:
    """The outputs of frozen models that are computed before steps and stored for later ones. This class has none."""

    def announce(self, step: PreparedStep) -> None:
        """Announces a later step to models on other ranks. Called in a thread; no collectives."""

    def state(self) -> dict[str, str]:
        """The stored outputs, for a checkpoint; `restore` reads them. The first rank's are saved."""
        return {}

    def restore(self, state: Mapping[str, str]) -> None:
        """Restores the `state` of the resumed checkpoint, or {} of a new run. Called after open_models."""


class SeparateRanks(Protocol):
    """The last `count` ranks of a run, which have only a frozen model."""

    count: int

    def alongside(self, ranks: Ranks) -> AbstractContextManager[None]:
        """A context around all work of a rank, on either side."""
        ...

    def serve(self, ranks: Ranks, data: RunData) -> None:
        """The work of these ranks. Collective on them."""
        ...

    def dry_run(self, ranks: Ranks, data: RunData | None) -> list[str]:
        """The dry run's lines about the model, on assumed ranks that all have it. data: None if they were not read.
        Raises UserError for a config that `serve` would refuse."""
        ...


class Recipe(Generic[Config]):
    """The additions of a command to the loop; this class is `weft sft`. objective: the training loss. engine: set by
    `open_models`. lays_out_again: whether before_step replaces the rows, so that none are built before it.
    frozen_ranks: ranks that have only a frozen model, if there are any. readings: set by `open_models`."""

    engine: Engine
    lays_out_again = False
    frozen_ranks: SeparateRanks | None = None
    readings = FrozenReadings()

    def __init__(self, config: Config, hooks: Hooks = NO_HOOKS) -> None:
        self.config, self.hooks = config, hooks
        self.objective: Loss = choose_objective(config.train.loss, hooks.objective)

    @property
    def held_out_objective(self) -> Loss:
        """The loss that an evaluation measures: CrossEntropy, or a HeldOutLoss that replaces it."""
        return self.objective

    @property
    def is_users_objective(self) -> bool:
        """Whether the loss is the user's, so that weft checks that it is a sum."""
        return self.config.train.loss is not None or self.hooks.objective is not None

    def read_data(self, progress: OnProgress | None = None) -> RunData:
        """Reads the data of the run. progress: called with (bytes done, total bytes)."""
        data = read_run_data(self.config, progress)
        held_out = {name: self.prepared(documents) for name, documents in data.held_out.documents.items()}
        return replace(
            data, documents=self.prepared(data.documents), held_out=replace(data.held_out, documents=held_out)
        )

    def prepared(self, documents: Sequence[Document]) -> Sequence[Document]:
        """The documents of a data set in the form that steps and evaluations use. Raises UserError if this command does
        not train on documents of this kind."""
        return documents

    def open_models(self, engine: Engine, data: RunData, progress: Progress | None = None) -> list[str]:
        """Opens the frozen models, in addition to the trained one, before the first step and after a resumed run's
        weights were restored. Returns lines for the opening. Collective."""
        self.engine = engine
        return []

    def dry_run_lines(self) -> list[str]:
        """The dry run's lines about the loss, and about the reference of its metrics. The table of engines has the
        memory."""
        return []

    def before_step(self, step: PreparedStep) -> PreparedStep:
        """Computes the outputs that this step needs, and returns the step with them. Collective."""
        return step

    def before_evaluation(
        self, name: str, indices: Sequence[int], plan: StepPlan, local: Mapping[int, Document]
    ) -> Mapping[int, Document]:
        """Like before_step, for documents `indices` of the held-out source `name`. Returns this rank's documents."""
        return local
