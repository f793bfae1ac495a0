"""What one trainer rank does in reinforcement learning. Plain Python: Ray calls it, and so do tests.

Every method but `generate` is called on all ranks together, with the same arguments.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.checkpoint import rng
from weft.checkpoint.retention import step_folder
from weft.checkpoint.save import Saver
from weft.checkpoint.state import read_state
from weft.cluster.agree import largest
from weft.cluster.alike import require_agreement, versions
from weft.cluster.options import Device
from weft.cluster.process import join, leave
from weft.config import to_dict
from weft.config.rl_schema import RlConfig
from weft.data.chat_template import chosen_template
from weft.data.tokenizer import load_tokenizer
from weft.engine.contract import check_contract
from weft.engine.document import Document
from weft.engine.engine import Engine
from weft.objectives.policy import PolicyLoss
from weft.observe import flight
from weft.observe.flops import Throughput
from weft.observe.memory import own_peak_memory_gib
from weft.observe.opening import print_model
from weft.recipes.folder import check_shared
from weft.recipes.resume import fill_from
from weft.recipes.step_line import Taken, step_line
from weft.rl.documents import documents_of
from weft.rl.engines import Beside, policy_config, read_samples
from weft.rl.types import Floats, Sample
from weft.rollout.base import Completion, Request, Synced
from weft.rollout.embedded import EmbeddedEngine, end_tokens


class Trainer:
    """The policy on one rank: trained, read and saved, and copied for the embedded engine."""

    def __init__(self, config: RlConfig, device: Device = "auto", *, fill: bool = True) -> None:
        """fill: False where a checkpoint will fill the weights."""
        self.config = config
        self.ranks = join(device, config.train.timeout)
        flight.watch(config.train.timeout)
        keys = {f"{section}.{key}": str(v) for section, values in to_dict(config).items() for key, v in values.items()}
        require_agreement(keys | versions())
        flight.at("load")
        self.engine = Engine(policy_config(config), self.ranks, fill=fill)
        self.beside = Beside(config, self.engine, fill=fill)
        rng.seed_rank(config.train.seed, self.ranks.rank)
        self.tokenizer = load_tokenizer(config.model.path)
        self.embedded = EmbeddedEngine(self.engine, self.tokenizer)
        self.throughput = Throughput.of(self.engine)
        self.saver: Saver | None = None
        self._contract_checked = False

    # ------------------------------------------------------------ at start

    def describe(self) -> str:
        """What the run's opening says of the model and how it is laid out."""
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            print_model(self.config, self.engine)
        return text.getvalue()

    def ends(self) -> list[int]:
        """Tokens that end a completion."""
        return end_tokens(self.engine, self.tokenizer)

    def open_run(self, folder: str, token: str, constants: Mapping[str, Any], last: int = 0) -> list[str]:
        """Enter RUN, whose lock holds this token, and go on from its checkpoint of step `last`, 0 for a fresh start;
        what there is to say of it. constants: what each checkpoint says of the run."""
        run = Path(folder)
        check_shared(run, token, self.ranks)
        flight.in_run(run)
        notes = []
        if last:
            checkpoint = step_folder(run / "checkpoints", last)
            notes = fill_from(self.engine, read_state(checkpoint), self.config.train.seed)
            self.beside.fill_from(checkpoint)
        template = chosen_template(self.config.data)
        texts = {} if template is None else {"chat_template.jinja": template}
        self.saver = Saver(
            self.engine, run, self.config.checkpoint, constants, last=last, texts=texts, others=self.beside.saved
        )
        return notes

    # ------------------------------------------------------------ rollouts

    def sync(self, version: int) -> Synced:
        """Give the embedded engine the weights as they are now."""
        flight.at("sync")
        began = time.perf_counter()
        self.embedded.wake(version=version)
        return Synced(version, len(self.engine.built.pieces), self.embedded.bytes, time.perf_counter() - began)

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Completions by this rank's copy alone."""
        flight.at("generate")
        return self.embedded.generate(requests)

    def sleep_engine(self) -> None:
        """Drop the embedded engine's copy."""
        self.embedded.sleep()

    # ------------------------------------------------------------ reading and training

    def logprobs(self, samples: Sequence[Sample]) -> dict[int, Floats]:
        """The policy's logprob of every sampled token, [T], of the samples that this rank was dealt, by their index."""
        flight.at("logprobs")
        return read_samples(self.engine, samples, "logprob")

    def reference_logprobs(self, samples: Sequence[Sample]) -> dict[int, Floats]:
        """The reference's, likewise."""
        flight.at("reference")
        return self.beside.reference_logprobs(samples)

    def values(self, samples: Sequence[Sample]) -> dict[int, Floats]:
        """The critic's value of every sampled token before it was drawn, likewise."""
        flight.at("values")
        return self.beside.values(samples)

    def update(self, samples: Sequence[Sample], number: int, steps: int, epoch: int, lr: float) -> dict[str, object]:
        """One optimizer step over these samples; its line of metrics.jsonl."""
        began = time.perf_counter()
        documents = documents_of(samples, self.config)
        if not documents:  # on every rank alike
            return {"step": number, "epoch": epoch, "skipped": True, "reason": "no sample is to be trained", **_NOTHING}
        flight.step(number, steps, [document.source for document in documents])
        taken = self._take_step(documents, lr, began)
        critic = {} if self.beside.critic is None else self.beside.update_critic(samples, lr)
        if not self._contract_checked:
            for engine in (self.engine, *self.beside.saved.values()):
                check_contract(engine)
            self._contract_checked = True
        flight.at("record")
        failed = self.saver is not None and self.saver.failed
        memory, any_failed = largest(
            [own_peak_memory_gib(self.engine.device), failed], self.engine.mesh.data_group, self.engine.device
        )
        if any_failed and self.saver is not None:
            self.saver.raise_failure()
        return {**step_line(number, epoch, taken, self.throughput, memory), **critic}

    def _take_step(self, documents: Sequence[Document], lr: float, began: float) -> Taken:
        engine = self.engine
        plan = engine.plan([engine.meta(document) for document in documents])
        metrics = engine.accumulate(plan, {i: documents[i] for i in engine.needs(plan)}, PolicyLoss(self.config.rl))
        result = engine.apply(lr)
        return Taken(plan, metrics, result, lr, time.perf_counter() - began)

    # ------------------------------------------------------------ saving

    def save(self, step: int, progress: Mapping[str, Any]) -> list[str]:
        """Save what stands after this optimizer step, in the background; news of earlier saves."""
        assert self.saver is not None
        flight.at("save")
        self.saver.save(step, progress)
        return self.saver.take_news()

    def finish(self) -> tuple[str, list[str]]:
        """Wait for the last save: its folder, and news."""
        assert self.saver is not None
        flight.at("save")
        return str(self.saver.finish()), self.saver.take_news()

    def close(self) -> None:
        """Leave the process group."""
        leave()


# What a step without documents says beside that.
_NOTHING: dict[str, object] = {
    "loss": None, "grad_norm": None, "lr": None, "documents": 0, "tokens": 0, "loss_tokens": 0, "empty": True,
}  # fmt: skip
