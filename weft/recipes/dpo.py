"""Preference tuning: `weft dpo`, with DPO and other losses of pairs, or with KTO, a loss of single answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.config.dpo_schema import DpoConfig
from weft.config.frozen_ranks import frozen_ranks
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.preference.objective import PreferenceLoss
from weft.engine.step_plan.plan import StepPlan
from weft.errors import UserError
from weft.launch.options import TrainOptions
from weft.observe.hooks import NO_HOOKS, Hooks
from weft.parallel.shards.load import Progress
from weft.recipes.answers import read_answers, require_compared
from weft.recipes.recipe import PreparedStep, Recipe
from weft.recipes.reference_ranks import ReferenceRanks
from weft.recipes.reference_sums import ReferenceSums, check_reference, open_reference, reference_line
from weft.recipes.run_data import TRAINED, RunData
from weft.recipes.training import run as train


class Dpo(Recipe[DpoConfig]):
    """Documents are the answers of preferences. A step counts pairs or single answers."""

    objective: PreferenceLoss
    readings: ReferenceSums
    frozen_ranks: ReferenceRanks | None = None

    def __init__(self, config: DpoConfig, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(config, hooks)
        if hooks.objective is not None:
            raise UserError(
                "objective: preference losses are functions of pairs: set preference={'loss': ...} instead."
            )
        check_reference(config)
        self.objective = PreferenceLoss(config.preference)
        if frozen_ranks(config):
            self.frozen_ranks = ReferenceRanks(config)

    def prepared(self, documents: Sequence[Document]) -> Sequence[Document]:
        return require_compared(documents, self.config.preference)

    def open_models(self, engine: Engine, data: RunData, progress: Progress | None = None) -> list[str]:
        super().open_models(engine, data, progress)
        if self.frozen_ranks is not None:
            self.readings, lines = self.frozen_ranks.open(data)
        else:
            self.readings, lines = open_reference(self.config, engine, data.data_sets, progress)
        return lines

    def dry_run_lines(self) -> list[str]:
        preference = self.config.preference
        loss = f"loss     {' + '.join(preference.losses)}, beta {preference.beta:g}"
        return [loss, *([] if self.frozen_ranks else [reference_line(self.config)])]

    def before_step(self, step: PreparedStep) -> PreparedStep:
        self._begin(TRAINED, step.indices, step.plan)
        return step

    def before_evaluation(
        self, name: str, indices: Sequence[int], plan: StepPlan, local: Mapping[int, Document]
    ) -> Mapping[int, Document]:
        self._begin(name, indices, plan)
        return local

    def _begin(self, name: str, indices: Sequence[int], plan: StepPlan) -> None:
        """Passes the next step to the loss: the compared answers, and the numbers that were computed before."""
        self.objective.begin(read_answers(self.config, self.engine, self.readings, name, indices, plan))


def run(config: DpoConfig, options: TrainOptions, hooks: Hooks = NO_HOOKS) -> None:
    """Entry point of one rank. Raises StoppedError if a signal ended the run early."""
    train(Dpo, config, options, hooks)
