"""Supervised fine-tuning: `weft sft`. The loop is `train`; what it prints and writes is in weft/observe."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.export import plan_export, save_step
from weft.cluster.alike import require_agreement, versions
from weft.cluster.options import SftOptions
from weft.cluster.process import join, pretend
from weft.config.render import to_dict
from weft.config.schema import SftConfig
from weft.data.documents import DataReport, fingerprint, load_documents
from weft.data.order import Step, Steps
from weft.data.tokenizer import load_tokenizer
from weft.engine.contract import check_contract
from weft.engine.document import Document
from weft.engine.engine import Engine, EngineConfig, StepResult
from weft.engine.plan import StepPlan
from weft.engine.schedule import learning_rate
from weft.models import hf
from weft.objectives.cross_entropy import CrossEntropy
from weft.observe import flight
from weft.observe.flops import Throughput
from weft.observe.memory import peak_memory_gib
from weft.observe.metrics import MetricsFile
from weft.observe.opening import print_dry_run, print_opening
from weft.observe.progress import Progress, loading
from weft.observe.summary import Phases, RunSummary
from weft.observe.summary import versions as package_versions
from weft.recipes.folder import open_folder


def run(config: SftConfig, options: SftOptions) -> None:
    """Entry point of one rank."""
    if options.dry_run:
        with pretend(options.world, options.device) as ranks:
            engine = Engine(engine_config(config), ranks, weights=False)
            print_dry_run(config, engine, parameters=options.parameters)
        return
    with join(options.device, config.train.timeout) as ranks:
        phases = Phases()
        flight.at("data")
        with phases("data"):
            documents, report = read_data(config)
        require_agreement(identity(config, documents))
        folder = open_folder(config, ranks)
        flight.in_run(folder)
        flight.at("load")
        with phases("load"):
            with loading(ranks.is_first) as progress:
                engine = Engine(engine_config(config), ranks, progress=progress)
            plan_export(engine)  # a model that could not be saved whole is refused before it is trained
        print_opening(config, engine, report, folder)
        train(config, engine, documents, report, folder, phases)


def engine_config(config: SftConfig) -> EngineConfig:
    """The sections that an Engine reads."""
    return EngineConfig(
        model=config.model,
        mesh=config.mesh,
        fsdp=config.fsdp,
        step=config.step,
        optimizer=config.optimizer,
        seed=config.train.seed,
        deterministic=config.train.deterministic,
    )


def read_data(config: SftConfig) -> tuple[list[Document], DataReport]:
    """Every document of the file, tokenised; every rank reads all of it."""
    budget = config.step.max_tokens_per_device
    key = "step.max_tokens_per_device" if config.data.max_length is None else "data.max_length"
    return load_documents(
        config.data.path,
        load_tokenizer(config.model.path),
        max_length=min(config.data.max_length or budget, budget),
        max_length_key=key,
        long_documents=config.data.long_documents,
        vocab_size=hf.read_config(config.model.path).get_text_config().vocab_size,
    )


def identity(config: SftConfig, documents: list[Document]) -> dict[str, str]:
    """What has to be the same on every rank. Only the first rank's run.dir counts, and data may lie elsewhere."""
    keys = {f"{section}.{key}": str(v) for section, values in to_dict(config).items() for key, v in values.items()}
    keys = {name: value for name, value in keys.items() if name not in ("run.dir", "data.path")}
    packages = {name: str(version) for name, version in package_versions().items()}
    model = hf.read_config(config.model.path).to_json_string()
    return {
        **keys, **packages, **versions(),
        "config.json of the model": hashlib.blake2b(model.encode(), digest_size=8).hexdigest(),
        "documents of data.path": f"{len(documents)} ({fingerprint(documents)})",
    }  # fmt: skip


def deal(config: SftConfig, documents: list[Document]) -> Steps:
    """Which documents each optimizer step takes."""
    return Steps(
        [len(document) for document in documents],
        documents=config.step.documents,
        tokens=config.step.tokens,
        epochs=config.train.epochs,
        steps=config.train.steps,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
    )


def train(
    config: SftConfig, engine: Engine, documents: list[Document], report: DataReport, folder: Path, phases: Phases
) -> None:
    """One optimizer step per set of documents, each with its own normaliser; the last weights are always saved."""
    steps, objective = deal(config, documents), CrossEntropy()
    recorder = Recorder(config, engine, folder, RunSummary(model=config.model.path, data=report.path))
    updates = 0
    with Progress(len(steps), show=engine.ranks.is_first) as progress:
        for step in steps:
            with phases("train"):
                began = time.perf_counter()
                chosen = [documents[index] for index in step.documents]
                flight.step(step.number, len(steps), [document.source for document in chosen])
                plan = engine.plan([engine.meta(document) for document in chosen])
                metrics = engine.accumulate(plan, {i: chosen[i] for i in engine.needs(plan)}, objective)
                lr = learning_rate(updates + 1, len(steps), config.optimizer.lr, config.schedule)
                result = engine.apply(lr)
                updates += not result.skipped
                seconds = time.perf_counter() - began
            flight.at("record")
            if step.number == 1:
                check_contract(engine)
            line = recorder.record(step, plan, metrics, result, lr, seconds)
            progress.step(line)
            recorder.stop_if_hopeless(result, [document.source for document in chosen])
    flight.at("save")
    with phases("save"):
        saved = save_step(engine, folder / "checkpoints", len(steps))
    recorder.finish(phases, saved)


@dataclass
class Recorder:
    """Turns what a step returned into its line of metrics.jsonl, and the run into summary.json."""

    config: SftConfig
    engine: Engine
    folder: Path
    summary: RunSummary
    bad_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.file = MetricsFile(self.folder / "metrics.jsonl") if self.engine.ranks.is_first else None
        self.throughput = Throughput.of(self.engine)

    def record(
        self,
        step: Step,
        plan: StepPlan,
        metrics: dict[str, float | None],
        result: StepResult,
        lr: float,
        seconds: float,
    ) -> dict[str, object]:
        """The step's line, written by the first rank; memory is the largest rank's."""
        totals = plan.totals
        line: dict[str, object] = {
            "step": step.number,
            "epoch": step.epoch,
            "loss": None if result.skipped else metrics.pop("loss"),
            "grad_norm": None if result.skipped else result.grad_norm,
            "lr": None if result.skipped else lr,
            "documents": totals.documents,
            "tokens": totals.tokens,
            "loss_tokens": totals.loss_tokens,
            "micro_batches": plan.micro_batches,
            "fill": plan.fill,
            "utilisation": plan.utilisation,
            "seconds": seconds,
            "tokens_per_second": totals.tokens / seconds,
            "mfu": self.throughput.mfu(plan, seconds),
            "memory_gib": peak_memory_gib(self.engine.mesh.data_group, self.engine.device),
        }
        if result.loss_scale is not None:
            line["loss_scale"] = result.loss_scale
        if result.skipped:
            line |= {"skipped": True, "reason": result.reason}
        else:
            line |= metrics
        if self.file is not None:
            self.file.write(line)
        self.summary.add(line)
        return line

    def stop_if_hopeless(self, result: StepResult, sources: list[str]) -> None:
        """End the run after train.max_nonfinite steps in a row that were not finite; nothing is saved of them. A step
        that was skipped because its loss scale was too large is none of them."""
        if not result.overflow:
            self.bad_in_a_row = self.bad_in_a_row + 1 if result.skipped else 0
        if self.bad_in_a_row >= self.config.train.max_nonfinite:
            raise FloatingPointError(
                f"{self.bad_in_a_row} steps in a row were not finite (train.max_nonfinite). Last: {result.reason}. "
                f"The step's first documents: {', '.join(sources[:3])}. Lower optimizer.lr, or look at the data."
            )

    def finish(self, phases: Phases, saved: Path) -> None:
        """Write summary.json beside the resolved config."""
        if self.engine.ranks.is_first:
            self.summary.write(self.folder / "summary.json", phases, saved)
