"""Preference tuning: `weft dpo`, by DPO and other losses of pairs, or by KTO of answers one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from weft.config.dpo_schema import DpoConfig, own_reference, reference_ranks
from weft.data.order import SampledStep
from weft.data.same_tokenizer import check_same_tokenizer
from weft.engine.batch.document import Document, choose
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.frozen import open_frozen
from weft.engine.losses.preference.objective import PreferenceLoss
from weft.engine.step_plan.plan import StepPlan
from weft.errors import StoppedError, UserError
from weft.launch import flight
from weft.launch.options import TrainOptions
from weft.launch.process import Ranks
from weft.observe.hooks import NO_HOOKS, Hooks
from weft.parallel.shards.load import Progress
from weft.recipes.answers import read_answers, require_compared
from weft.recipes.frozen_models import preference_reference
from weft.recipes.frozen_ranks import RemoteReference, RemoteSums, serve
from weft.recipes.recipe import PreparedStep, Recipe
from weft.recipes.reference_sums import TRAINED, ReferenceSums, open_reference, reference_line
from weft.recipes.run_data import RunData
from weft.recipes.training import run as train


def run(config: DpoConfig, options: TrainOptions, hooks: Hooks = NO_HOOKS) -> None:
    """Entry point of one rank. Raises StoppedError if a signal ended the run early."""
    train(Dpo, config, options, hooks)


class Dpo(Recipe[DpoConfig]):
    """Documents are the answers of preferences. A step counts pairs, or answers one by one."""

    objective: PreferenceLoss
    reference: ReferenceSums | None = None
    remote: RemoteReference | None = None

    def __init__(self, config: DpoConfig, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(config, hooks)
        if hooks.objective is not None:
            raise UserError("objective: a loss of preferences is a function of pairs, preference={'loss': ...}.")
        if own_reference(config) and config.reference.path is not None:
            remedy = "Log probabilities of other tokens cannot be compared: choose a reference of the same family."
            check_same_tokenizer(config.model.path, config.reference.path, "reference.path", remedy)
        self.objective = PreferenceLoss(config.preference)
        self.frozen_ranks = reference_ranks(config)

    def prepared(self, documents: Sequence[Document]) -> Sequence[Document]:
        require_compared(documents, self.config.preference)
        return documents

    def open_models(self, engine: Engine, data: RunData, progress: Progress | None = None) -> list[str]:
        super().open_models(engine, data, progress)
        self.documents = {TRAINED: data.documents, **data.held_out.documents}
        if self.remote is None:
            self.reference, lines = open_reference(self.config, engine, self.documents, progress)
            return lines
        memory = self.remote.wait_until_ready(_digests(data))
        self.reference = RemoteSums(self.config, self.documents, self.remote)
        return [self._line_of_frozen(memory)]

    @contextmanager
    def alongside(self, ranks: Ranks) -> Iterator[None]:
        if ranks.store is None or ranks.is_frozen:
            yield
            return
        self.remote = RemoteReference(ranks)
        try:
            yield
        except StoppedError:
            self.remote.end(early=True)
            raise
        self.remote.end()

    def serve(self, ranks: Ranks) -> None:
        flight.enter("data")
        data = self.read_data()
        model = self._open_frozen(ranks, data)
        documents = {TRAINED: data.documents, **data.held_out.documents}
        sums = ReferenceSums(self.config, model, documents, adapters_off=False)
        serve(sums, ranks, documents, _digests(data), str(model.memory))

    def dry_run_of_frozen(self, ranks: Ranks, data: RunData | None) -> list[str]:
        return [self._line_of_frozen(str(self._open_frozen(ranks, data, weights=False).memory))]

    def _open_frozen(self, ranks: Ranks, data: RunData | None, *, weights: bool = True) -> Engine:
        """The reference on ranks that have no other model. data: None if they were not read. Collective."""
        frozen = preference_reference(self.config, EngineConfig.from_config(self.config))
        assert frozen is not None
        model = open_frozen("reference", frozen, ranks, weights=weights)
        for documents in () if data is None else (data.documents, *data.held_out.documents.values()):
            model.planner.check_images(documents)
        return model

    def _line_of_frozen(self, memory: str) -> str:
        path, count = self.config.reference.path or self.config.model.path, self.frozen_ranks
        return f"against  {path}, a reference on {count} rank{'s' * (count > 1)} of its own: {memory}"

    def announce(self, step: SampledStep) -> None:
        if isinstance(self.reference, RemoteSums):
            self.reference.announce(TRAINED, step.documents)

    def state(self) -> dict[str, str]:
        return {} if self.reference is None else self.reference.state()

    def restore(self, state: Mapping[str, str]) -> None:
        if self.reference is not None:
            self.reference.restore(state)

    def dry_run_lines(self) -> list[str]:
        preference = self.config.preference
        loss = f"loss     {' + '.join(preference.losses)}, beta {preference.beta:g}"
        return [loss] if self.frozen_ranks else [loss, reference_line(self.config)]

    def before_step(self, step: PreparedStep) -> PreparedStep:
        self._begin(TRAINED, step.indices, step.documents, step.plan)
        return step

    def before_evaluation(
        self, name: str, indices: Sequence[int], plan: StepPlan, local: Mapping[int, Document]
    ) -> Mapping[int, Document]:
        self._begin(name, indices, choose(self.documents[name], indices), plan)
        return local

    def _begin(self, name: str, indices: Sequence[int], documents: Sequence[Document], plan: StepPlan) -> None:
        """Tells the objective of the next step: who is compared with whom, and what was read first."""
        reference, data = self.reference, self.documents[name]
        sums = None if reference is None else reference.of(name, indices)
        self.objective.begin(read_answers(self.config, self.engine, reference, sums, data, indices, documents, plan))


def _digests(data: RunData) -> dict[str, str]:
    """What tells the data of a run from others."""
    return {"training data": data.report.digest, "documents of eval.path": data.held_out.digest}
