"""Preference tuning: `weft dpo`, by DPO and other losses of pairs, or by KTO of answers one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weft.config.dpo_schema import DpoConfig, own_reference
from weft.data.documents import Documents, require_pairs
from weft.data.limits import length_limit
from weft.data.mismatched import mismatched
from weft.data.records import ROLES
from weft.engine.batch.document import Document, choose
from weft.engine.document_sums import read_sums
from weft.engine.engine import Engine
from weft.engine.frozen import open_frozen
from weft.engine.losses.preference.objective import PreferenceLoss, StepAnswers, split_examples
from weft.engine.step_plan.plan import StepPlan
from weft.errors import UserError
from weft.launch.options import TrainOptions
from weft.observe.hooks import NO_HOOKS, Hooks
from weft.parallel.shards.load import Progress
from weft.recipes.frozen_models import closes_reference, preference_reference
from weft.recipes.recipe import PreparedStep, Recipe
from weft.recipes.reference_sums import ReferenceSums
from weft.recipes.run_data import OnProgress, RunData
from weft.recipes.training import run as train

_TRAINED = "training data"
_NO_REFERENCE = "against  no reference: preference.loss reads none"
_UNDER_ADAPTERS = "against  the base under the adapters"


def run(config: DpoConfig, options: TrainOptions, hooks: Hooks = NO_HOOKS) -> None:
    """Entry point of one rank. Raises StoppedError if a signal ended the run early."""
    train(Dpo, config, options, hooks)


class Dpo(Recipe[DpoConfig]):
    """Documents are the answers of preferences. A step counts pairs, or answers one by one."""

    objective: PreferenceLoss

    def __init__(self, config: DpoConfig, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(config, hooks)
        if hooks.objective is not None:
            raise UserError("objective: a loss of preferences is a function of pairs, preference={'loss': ...}.")
        self.objective = PreferenceLoss(config.preference)
        self.reference: ReferenceSums | None = None

    def read_data(self, progress: OnProgress | None = None) -> RunData:
        data = super().read_data(progress)
        for documents in (data.documents, *data.held_out.documents.values()):
            check_roles(documents, self.config)
        return data

    def open_models(self, engine: Engine, data: RunData, progress: Progress | None = None) -> list[str]:
        super().open_models(engine, data, progress)
        config, lines = self.config, list[str]()
        self.documents = {_TRAINED: data.documents, **data.held_out.documents}
        if not config.preference.has_reference:
            return [_NO_REFERENCE]
        model, frozen = engine, preference_reference(config, engine.config)
        if frozen is not None:
            model = open_frozen("reference", frozen, engine.ranks, shares_with=engine, progress=progress)
            lines = [f"against  {frozen.model.path}, a reference of its own: {model.memory}"]
        else:
            lines = [_UNDER_ADAPTERS]
        self.reference = reference = ReferenceSums(config, model, self.documents, adapters_off=frozen is None)
        if config.preference.cache == "disk":
            lines += reference.fill()
            if frozen is not None and closes_reference(config):
                reference.engine = None
        return lines

    def dry_run_lines(self) -> list[str]:
        config, preference = self.config, self.config.preference
        lines = [f"loss     {' + '.join(preference.losses)}, beta {preference.beta:g}"]
        if not preference.has_reference:
            return [*lines, _NO_REFERENCE]
        if not own_reference(config):
            return [*lines, _UNDER_ADAPTERS]
        return [*lines, f"against  {config.reference.path or config.model.path}, a reference of its own"]

    def before_step(self, step: PreparedStep) -> PreparedStep:
        self._begin(_TRAINED, step.indices, step.documents, step.plan)
        return step

    def before_evaluation(
        self, name: str, indices: Sequence[int], plan: StepPlan, local: Mapping[int, Document]
    ) -> Mapping[int, Document]:
        self._begin(name, indices, choose(self.documents[name], indices), plan)
        return local

    def _begin(self, name: str, indices: Sequence[int], documents: Sequence[Document], plan: StepPlan) -> None:
        """Tells the objective of a step: who is compared with whom, the reference, and what has to be read first."""
        data, preference, rows = self.documents[name], self.config.preference, np.array(indices, np.int64)
        assert isinstance(data, Documents)
        roles = np.array(ROLES)[data.roles[rows]]
        paired = preference.is_paired
        chosen = np.flatnonzero(roles == "chosen") if paired else np.arange(len(rows))
        rejected = np.flatnonzero(roles == "rejected") if paired else np.zeros(0, np.int64)
        reference = torch.zeros(len(rows), dtype=torch.float64)
        if self.reference is not None:
            reference = self.reference.of(name, indices)
        policy = torch.full_like(reference, torch.nan)
        columns = [chosen.tolist(), rejected.tolist()] if paired else [chosen.tolist()]
        examples = range(len(chosen)) if self.objective.whole_step else split_examples(columns, plan)
        positions = sorted(column[example] for column in columns for example in examples)
        if positions:
            policy[positions] = read_sums(self.engine, choose(documents, positions))
        self.objective.begin(
            StepAnswers(
                torch.from_numpy(chosen),
                torch.from_numpy(rejected),
                reference,
                torch.from_numpy(data.trained[rows].astype(np.float64)),
                torch.from_numpy(data.margins[rows[chosen]].astype(np.float64)),
                torch.from_numpy(np.isin(roles, ("chosen", "desired")).astype(np.float64)),
                self.mismatched_kl(data, indices) if "kto" in preference.losses else 0.0,
                policy,
            )
        )

    def mismatched_kl(self, data: Documents, indices: Sequence[int]) -> float:
        """z of KTO, over the whole step: the mean log ratio of prompts with other prompts' answers, at least 0."""
        assert self.reference is not None
        limit, _ = length_limit(self.config.data, self.config.step.max_tokens_per_device, self.config.mesh.cp)
        documents = [mismatched(data, index, limit) for index in indices]
        ratios = read_sums(self.engine, documents) - self.reference.read(documents)
        return max(0.0, float(ratios.mean()))


def check_roles(documents: Sequence[Document], config: DpoConfig) -> None:
    """Raises UserError if rows are not of the kind that the losses compare."""
    assert isinstance(documents, Documents)
    if config.preference.is_paired:
        require_pairs(
            documents,
            f"preference.loss={config.preference.losses[0]} compares the two answers of a pair: set "
            "preference.loss=kto, or give rows `chosen` and `rejected`.",
        )
