"""What a command adds to the loop of training.py: `weft sft` nothing, others a subclass of Recipe.

A Recipe says how rows become documents, what is trained, which models are only read before each step, and what an
evaluation reports. All else is in the loop and the same for all: sources, cache, mesh, adapters, best checkpoint,
resume, trackers, report, dry run, faults. To add a command:

1. config: a dataclass that extends SftConfig, with sections of its own; an entry each in weft/config/commands.py,
   presets.py:ADAPTER_DEFAULTS, validate.py and reference.py:_FIRST;
2. weft/recipes/NAME.py: a subclass of Recipe, and run(config, options, hooks) as in sft.py;
3. weft/cli.py:RECIPES, and for Python a function in weft/api.py.

Order of a step: a thread plans it and lays out its rows, which uses no device (training.py:prepare_step). Then
`before_step` reads frozen models (engine/frozen.py) and may replace the rows, and the engine takes the step. A reading
that is one number per document goes into the objective, which finds it by `batch.documents`, the documents' places in
the step: rows then stay as they are. A reading per token goes into arrays of the documents of this rank, from which
the rows are laid out again (lays_out_again).
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
    """A step before its forward. documents: the step's, not built, in its order. indices: theirs in the data. local:
    those of this rank, built, by their place in the step."""

    number: int
    indices: Sequence[int]
    documents: Sequence[Document]
    plan: StepPlan
    local: Mapping[int, Document]
    rows: StepRows


class FrozenReadings:
    """What is read of frozen models before steps and kept for later ones; this one reads nothing."""

    def announce(self, step: PreparedStep) -> None:
        """Tells models on other ranks of a step that comes after the present one. Called in a thread; no
        collectives."""

    def state(self) -> dict[str, str]:
        """What is kept, for a checkpoint; `restore` takes it. The first rank's is saved."""
        return {}

    def restore(self, state: Mapping[str, str]) -> None:
        """Takes the `state` of the checkpoint that is resumed, {} of a new run. Called after open_models."""


class SeparateRanks(Protocol):
    """The last `count` ranks of a run, which have a frozen model alone."""

    count: int

    def alongside(self, ranks: Ranks) -> AbstractContextManager[None]:
        """A context around all that a rank does, of either side."""
        ...

    def serve(self, ranks: Ranks, data: RunData) -> None:
        """What these ranks do. Collective on them."""
        ...

    def dry_run(self, ranks: Ranks, data: RunData | None) -> list[str]:
        """What a dry run says of the model, on ranks that do not exist, all of which have it. data: None if they were
        not read. Raises UserError for what `serve` would refuse."""
        ...


class Recipe(Generic[Config]):
    """What a command adds to the loop; this one is `weft sft`. objective: what is trained. engine: set by
    `open_models`. lays_out_again: whether before_step replaces the rows, so that none are built before it.
    frozen_ranks: which have a frozen model alone, if there are such. readings: set by `open_models`."""

    engine: Engine
    lays_out_again = False
    frozen_ranks: SeparateRanks | None = None
    readings = FrozenReadings()

    def __init__(self, config: Config, hooks: Hooks = NO_HOOKS) -> None:
        self.config, self.hooks = config, hooks
        self.objective: Loss = choose_objective(config.train.loss, hooks.objective)

    @property
    def held_out_objective(self) -> Loss:
        """What an evaluation measures; in place of CrossEntropy a HeldOutLoss."""
        return self.objective

    @property
    def is_users_objective(self) -> bool:
        """Whether the objective is the user's, so that it is checked to be a sum."""
        return self.config.train.loss is not None or self.hooks.objective is not None

    def read_data(self, progress: OnProgress | None = None) -> RunData:
        """Reads the data of the run. progress: called with (bytes done, total bytes)."""
        data = read_run_data(self.config, progress)
        held_out = {name: self.prepared(documents) for name, documents in data.held_out.documents.items()}
        return replace(
            data, documents=self.prepared(data.documents), held_out=replace(data.held_out, documents=held_out)
        )

    def prepared(self, documents: Sequence[Document]) -> Sequence[Document]:
        """The documents of a data set as steps and evaluations read them. Raises UserError if they are not of the kind
        that this command trains on."""
        return documents

    def open_models(self, engine: Engine, data: RunData, progress: Progress | None = None) -> list[str]:
        """Opens the models that are only read, beside the trained one, before the first step and after a resumed run's
        weights were restored. Returns lines for the opening. Collective."""
        self.engine = engine
        return []

    def dry_run_lines(self) -> list[str]:
        """What a dry run says of the loss, and of what it is measured against. The table of engines has the memory."""
        return []

    def before_step(self, step: PreparedStep) -> PreparedStep:
        """What has to be read before this step. Collective."""
        return step

    def before_evaluation(
        self, name: str, indices: Sequence[int], plan: StepPlan, local: Mapping[int, Document]
    ) -> Mapping[int, Document]:
        """As before_step, for documents `indices` of the held-out source `name`. Returns the documents of this rank."""
        return local
