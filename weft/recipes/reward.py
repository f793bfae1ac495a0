"""Reward models: `weft reward`, the loop of training.py with a head of scores instead of logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.config.reward_schema import RewardConfig, RewardLossConfig
from weft.data.documents import Documents, require_pairs
from weft.data.scored_documents import ScoredDocuments, StepDocuments
from weft.engine.batch.document import Document
from weft.engine.engine import Engine
from weft.engine.losses.reward import BradleyTerryLoss, ScoreClassificationLoss, ScoreRegressionLoss
from weft.engine.scores import parts_pairs, step_scores
from weft.engine.step_plan.plan import StepPlan
from weft.launch.options import TrainOptions
from weft.models import hf
from weft.observe.hooks import NO_HOOKS, Hooks
from weft.parallel.shards.load import Progress
from weft.recipes.recipe import PreparedStep, Recipe
from weft.recipes.run_data import RunData
from weft.recipes.training import run as train
from weft.terminal import counted


class RewardRecipe(Recipe[RewardConfig]):
    """A model that returns scores. pad: the token at which no score is read (scored_length)."""

    def __init__(self, config: RewardConfig, hooks: Hooks = NO_HOOKS) -> None:
        super().__init__(config, hooks)
        self.pad = hf.padding_id(config.model.path)
        self.objective = make_loss(config.reward)
        self.pairs = self.objective if isinstance(self.objective, BradleyTerryLoss) else None

    def prepared(self, documents: Sequence[Document]) -> Sequence[Document]:
        assert isinstance(documents, Documents)
        if self.pairs is not None:
            require_pairs(
                documents,
                "reward.loss=bradley_terry compares the two answers of a pair: set reward.loss=classification, or "
                "write rows with `chosen` and `rejected`.",
            )
        if self.config.reward.loss == "process":
            return StepDocuments(documents)
        return ScoredDocuments(documents, self.pad, "label" if self.pairs is None else "margin")

    def open_models(self, engine: Engine, data: RunData, progress: Progress | None = None) -> list[str]:
        super().open_models(engine, data, progress)
        module, load = engine.built.module.hf_model, engine.built.load
        fresh = load is None or bool(load.fresh)
        head = f"a new head ({self.config.reward.head})" if fresh else "its existing head"
        lines = [f"score    {type(module).__name__} with {head}: {self.config.reward.loss}"]
        if isinstance(data.documents, ScoredDocuments) and data.documents.ends_cut:
            lines.append(
                f"         token {self.pad} is the model's padding and ends {data.documents.ends_cut:,} answers: weft "
                "reads their scores one token earlier, like transformers"
            )
        return lines

    def dry_run_lines(self) -> list[str]:
        labels = counted(self.config.reward.labels, "number")
        return [f"loss     {self.config.reward.loss}; a head of {labels} replaces the vocabulary head"]

    def before_step(self, step: PreparedStep) -> PreparedStep:
        self._read_scores(step.plan, step.local)
        return step

    def before_evaluation(
        self, name: str, indices: Sequence[int], plan: StepPlan, local: Mapping[int, Document]
    ) -> Mapping[int, Document]:
        self._read_scores(plan, local)
        return local

    def _read_scores(self, plan: StepPlan, local: Mapping[int, Document]) -> None:
        """Computes the scores of a step in which the answers of a pair are on several ranks. Other steps need no scores
        before the loss."""
        if self.pairs is not None:
            self.pairs.scores = step_scores(self.engine, plan, local) if parts_pairs(plan) else {}


def make_loss(reward: RewardLossConfig) -> BradleyTerryLoss | ScoreRegressionLoss | ScoreClassificationLoss:
    """The loss of scores that reward.loss names."""
    if reward.loss == "bradley_terry":
        return BradleyTerryLoss(reward.center_rewards_coefficient)
    return ScoreRegressionLoss() if reward.loss == "regression" else ScoreClassificationLoss()


def run(config: RewardConfig, options: TrainOptions, hooks: Hooks = NO_HOOKS) -> None:
    """Entry point of one rank. Raises StoppedError if a signal ended the run early."""
    train(RewardRecipe, config, options, hooks)
