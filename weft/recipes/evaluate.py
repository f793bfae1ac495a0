"""Evaluation during training: the loss on held-out documents, the best step so far, and answers to prompts."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from weft.checkpoint.retention import step_folder
from weft.config.schema import DataConfig, EvalConfig, SftConfig
from weft.config.sources import source_name
from weft.data.documents import DataReport
from weft.data.encode import read_encoding
from weft.data.ends import AnswerEnds
from weft.data.images import Images
from weft.data.prompts import load_prompts
from weft.data.sources import message_rules
from weft.engine.batch.document import Document, DocumentMeta
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy, HeldOutLoss, Loss
from weft.engine.metrics import MetricSums
from weft.engine.step_plan.plan import StepPlan
from weft.launch import flight
from weft.launch.summary import Phases
from weft.observe.progress import number
from weft.recipes.sampling import EvalPrompts, Sampler

PREFIX = "eval/"
_UNNAMED = ""
_ROWS = 16  # rows per rank in one plan: the cost of planning is superlinear, and a plan's documents stay in memory


@dataclass(frozen=True)
class HeldOut:
    """The evaluation data of a run. documents, reports: by source name of eval.sources, or under "" for eval.path and
    eval.share. questions: of eval.prompts. leaks: lines about documents that are also trained on."""

    documents: Mapping[str, Sequence[Document]] = field(default_factory=dict)
    reports: Mapping[str, DataReport] = field(default_factory=dict)
    questions: EvalPrompts | None = None
    leaks: Sequence[str] = ()

    @property
    def digest(self) -> str:
        """Digest of all documents and their names."""
        named = [f"{name} {report.digest}" for name, report in self.reports.items()]
        return hashlib.blake2b("\n".join(named).encode(), digest_size=8).hexdigest()

    @property
    def bad(self) -> list[tuple[str, str]]:
        """(source, error) of the omitted rows, from all reports."""
        return [row for report in self.reports.values() for row in report.bad]

    def lines(self) -> list[str]:
        """Lines that describe the evaluation data, for the opening."""
        lines = [f"held out {report}" for report in self.reports.values()] + [*self.leaks]
        if self.questions is not None:
            lines.append(f"prompts  {len(self.questions.prompts)}, answered at every evaluation")
        return lines


NO_HELD_OUT = HeldOut()


Read = Callable[[DataConfig], tuple[Sequence[Document], DataReport]]


def read_held_out(
    config: SftConfig,
    read: Read,
    tokenizer: PreTrainedTokenizerBase,
    images: Images | None,
    ends: AnswerEnds,
    of_training: tuple[Sequence[Document], DataReport] | None = None,
) -> HeldOut:
    """Reads the documents and prompts of the section `eval`. Raises UserError.

    read: reads the documents of a data section. images: the image reader of a vision model. ends: tokens that end
    sampled answers. of_training: the documents that eval.share held out.
    """
    held_out = {} if of_training is None else {_UNNAMED: of_training}
    if config.eval.path is not None:
        data = replace(config.data, path=config.eval.path, split=None, subset=None, sources=None)
        held_out[_UNNAMED] = read(data)
    for source in config.eval.sources or ():
        documents, report = read(replace(config.data, path=None, sources=(source,)))
        held_out[source_name(source)] = documents, report.sources[0]
    questions = None
    if config.eval.prompts is not None:
        encoding = read_encoding(config.data, tokenizer)
        prompts = load_prompts(config.eval.prompts, tokenizer, encoding, message_rules(config.data), images)
        questions = EvalPrompts(prompts, tokenizer, ends.ids, images)
    return HeldOut(
        {name: documents for name, (documents, _) in held_out.items()},
        {name: report for name, (_, report) in held_out.items()},
        questions,
    )


@dataclass
class BestEvaluation:
    """The lowest value of eval.metric so far.

    digest: of the evaluation data. value, step: of the best evaluation; step is 0 if there is none. mark: the value
    that patience compares with. A value lower by more than min_delta replaces it, so small improvements add up. waited:
    evaluations since the mark was set. exact: eval/exact of the last evaluation.
    """

    config: EvalConfig
    digest: str = ""
    value: float | None = None
    step: int = 0
    mark: float | None = None
    waited: int = 0
    exact: float = 0.0

    def update(self, step: int, figures: Mapping[str, float | None]) -> bool:
        """Records the evaluation of a step. Returns whether it is the best so far. A non-finite value is never an
        improvement. Step 0 is a baseline for later steps but never the best, because weft does not save it."""
        self.exact = figures.get("eval/exact") or 0.0
        value = figures.get(self.config.metric)
        if value is None or not math.isfinite(value):
            self.waited += 1
            return False
        if self.mark is None or value < self.mark - self.config.min_delta:
            self.mark, self.waited = value, 0
        else:
            self.waited += 1
        if not step or (self.value is not None and value >= self.value):
            return False
        self.value, self.step = value, step
        return True

    @property
    def ends(self) -> str | None:
        """The key that ends the run: eval.target if it is reached, eval.patience if it is exhausted; otherwise None."""
        if self.config.target is not None and self.exact >= self.config.target:
            return "eval.target"
        exhausted = self.config.patience is not None and self.waited >= self.config.patience
        return "eval.patience" if exhausted else None

    def state(self, saved: bool) -> dict[str, Any]:
        """The state for a checkpoint; `restore` reads it. saved: whether the best checkpoint is saved."""
        return {
            "kept": saved,
            "metric": self.config.metric,
            "of": self.digest,
            "value": self.value,
            "step": self.step,
            "mark": self.mark,
            "waited": self.waited,
            "exact": self.exact,
        }

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Restores a checkpoint's state, unless its documents or its metric differ. Returns messages for the user."""
        if not state:
            return []
        if (state["metric"], state["of"]) != (self.config.metric, self.digest):
            return ["eval     the held-out documents or eval.metric have changed, so the earlier best is discarded"]
        self.value, self.step, self.mark, self.waited = (state[name] for name in ("value", "step", "mark", "waited"))
        self.exact = state["exact"]
        return []


@dataclass(frozen=True)
class _HeldOutPart:
    """The documents `indices` of one source, their plan, and the local documents, by index in the plan."""

    name: str
    indices: range
    plan: StepPlan
    documents: Mapping[int, Document]


# (name of a source, indices of some of its documents, their plan, this rank's documents by index in the plan) ->
# these documents, with the outputs of frozen models that the evaluation needs.
BeforeEvaluation = Callable[[str, Sequence[int], StepPlan, Mapping[int, Document]], Mapping[int, Document]]


def ended_by(config: SftConfig, held_out: HeldOut, state: Mapping[str, Any]) -> str | None:
    """The eval key that ended the run, and would still end it with this config; None if there is none. state: of the
    checkpoint, from Evaluator.state."""
    best = BestEvaluation(config.eval, held_out.digest)
    best.restore(state)
    return best.ends


class Evaluator:
    """Evaluates when due. All ranks call every method, and each method returns the same on all of them."""

    def __init__(
        self,
        config: SftConfig,
        engine: Engine,
        held_out: HeldOut,
        state: Mapping[str, Any],
        folder: Path,
        phases: Phases,
        objective: Loss,
        before: BeforeEvaluation | None = None,
    ) -> None:
        """state: of the checkpoint from which the run resumes. objective: the training loss of the run. before:
        called with documents before they are measured."""
        self._before = before
        self.config, self.engine, self.held_out, self.phases = config.eval, engine, held_out, phases
        self.objective = HeldOutLoss() if type(objective) is CrossEntropy else objective
        self.best, self.keep_best = BestEvaluation(config.eval, held_out.digest), config.checkpoint.keep_best
        self._news = self.best.restore(state)
        self.sampler = None
        if held_out.questions is not None:
            self.sampler = Sampler(config, engine, held_out.questions, folder)
        self.is_best = False
        self._parts: list[_HeldOutPart] | None = None

    def evaluate(self, step: int, steps: int) -> dict[str, float | None]:
        """The evaluation after a step (0: before the first of `steps`), as keys of its line in metrics.jsonl; empty if
        none is due."""
        self.is_best = False
        interval, at_start = self.config.every, self.config.at_start
        is_due = at_start if step == 0 else step == steps or (interval > 0 and step % interval == 0)
        if not is_due or (not self.held_out.documents and self.sampler is None):
            return {}
        with self.phases("eval"):
            figures = self._measure(step) if self.held_out.documents else {}
            if self.sampler is not None:
                self._news += self.sampler(step)
        flight.enter("record")
        return figures

    @property
    def is_to_keep(self) -> bool:
        """Whether the weights after this step must be saved as the best so far."""
        return self.keep_best and self.is_best

    def state(self) -> dict[str, Any]:
        """The evaluator's part of a checkpoint's state."""
        return {"evaluation": self.best.state(saved=self.keep_best)}

    def summary(self, checkpoints: Path) -> dict[str, Any] | None:
        """The best evaluation, for summary.json; None if there was none. checkpoints: the folder of checkpoints."""
        best = self.best
        if not best.step:
            return None
        saved = str(step_folder(checkpoints, best.step)) if self.keep_best else None
        return {"step": best.step, self.config.metric: best.value, "checkpoint": saved}

    def pop_messages(self) -> list[str]:
        """The messages for the user since the last call."""
        news, self._news = self._news, []
        return news

    def _measure(self, step: int) -> dict[str, float | None]:
        began = time.perf_counter()
        figures: dict[str, float | None] = {}
        for name, mean in sorted(self._means().items(), key=lambda item: "/" in item[0]):
            figures[PREFIX + name] = mean
            if name.endswith("loss") and isinstance(self.objective, CrossEntropy):
                perplexity = None if mean is None else math.exp(mean) if mean <= 700 else math.inf  # exp would overflow
                figures[PREFIX + name.removesuffix("loss") + "perplexity"] = perplexity
        figures[f"{PREFIX}seconds"] = time.perf_counter() - began
        self.is_best = self.best.update(step, figures)
        self._news.append(self._line(step, figures))
        return figures

    def _means(self) -> dict[str, float | None]:
        """The means of the loss's metrics over all documents, and by source name. Each document counts once."""
        if self._parts is None:
            self._parts = list(_plan_documents(self.engine, self.held_out.documents))
        total = MetricSums()
        for part in self._parts:
            local = part.documents
            if self._before is not None:
                local = self._before(part.name, part.indices, part.plan, local)
            sums = self.engine.evaluate(part.plan, local, self.objective)
            total.add_all(sums)
            if part.name:
                total.add_all(sums, f"{part.name}/")
        plans = " ".join(part.plan.fingerprint() for part in self._parts)
        return total.reduce(self.engine.mesh.world_group, equal={"the plans of the evaluation": plans})

    def _line(self, step: int, figures: Mapping[str, float | None]) -> str:
        """`eval     step 20: loss 1.2345, perplexity 3.44, accuracy 61.2%, exact 9.5%; the best so far (0.8 s)`."""
        means = [f"loss {number(figures[f'{PREFIX}loss'], '.4f')}"]
        perplexity, accuracy = (figures.get(f"{PREFIX}{name}") for name in ("perplexity", "accuracy"))
        if perplexity is not None and accuracy is not None:
            exact = number(figures.get(f"{PREFIX}exact"), ".1%")
            means.append(f"perplexity {perplexity:.4g}, accuracy {accuracy:.1%}, exact {exact}")
        elif accuracy is not None:
            means.append(f"accuracy {accuracy:.1%}")
        if (agreement := figures.get(f"{PREFIX}agreement")) is not None:
            means.append(f"agreement with the teacher {agreement:.1%}")
        texts = [", ".join(means)]
        by_source = [
            f"{name} {number(figures[f'{PREFIX}{name}/loss'], '.4f')}" for name in self.held_out.documents if name
        ]
        if by_source:
            texts.append(", ".join(by_source))
        value = figures.get(self.config.metric)
        if value is None or not math.isfinite(value):
            texts.append(f"{self.config.metric} is not finite, so it is not an improvement")
        elif self.is_best and not self.best.waited and (self.keep_best or self.config.patience is not None):
            texts.append("the best so far")
        if self.config.patience is not None and self.best.waited:
            texts.append(f"no improvement for {self.best.waited} of {self.config.patience} evaluations")
        return f"eval     step {step}: {'; '.join(texts)} ({figures[PREFIX + 'seconds']:.1f} s)"


def _plan_documents(engine: Engine, named: Mapping[str, Sequence[Document]]) -> Iterator[_HeldOutPart]:
    """Yields all documents in plans of bounded size. Ranks without documents get empty rows."""
    max_tokens = _ROWS * engine.mesh.loss_ranks * engine.config.step.max_tokens_per_device
    for name, documents in named.items():
        metas = engine.planner.metadata(documents)
        for first, last in split_by_tokens(metas, max_tokens):
            plan = engine.plan(metas[first:last])
            indices = range(first, last)
            yield _HeldOutPart(
                name, indices, plan, {i: documents[first + i] for i in engine.planner.local_documents(plan)}
            )


def split_by_tokens(metas: Sequence[DocumentMeta], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Yields [first, last) of consecutive documents with at most `max_tokens` tokens in total. A longer document or
    group is alone."""
    first, tokens = 0, 0
    for i, meta in enumerate(metas):
        in_group = i > first and meta.group is not None and meta.group == metas[i - 1].group
        if i > first and not in_group and tokens + meta.length > max_tokens:
            yield first, i
            first, tokens = i, 0
        tokens += meta.length
    yield first, len(metas)
