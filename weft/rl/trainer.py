"""What one trainer rank does in reinforcement learning. Plain Python: Ray calls it, and so do tests.

Every method but `generate` is called on all ranks together, with the same arguments.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from weft.checkpoint import rng
from weft.checkpoint.export import save_huggingface
from weft.checkpoint.retention import step_folder
from weft.checkpoint.save import Saver
from weft.checkpoint.state import load_state, read_state
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
from weft.engine.engine import Engine, StepResult
from weft.engine.replay import aligned
from weft.objectives.policy import PolicyLoss
from weft.objectives.value import ValueLoss
from weft.observe import flight
from weft.observe.flops import Throughput
from weft.observe.memory import own_peak_memory_gib
from weft.observe.opening import print_model
from weft.recipes.folder import check_shared
from weft.recipes.resume import fill_from
from weft.recipes.step_line import Taken, step_line
from weft.rl.documents import documents_of
from weft.rl.engines import critic_engine, opening_lines, policy_config, reference_engine
from weft.rl.exact import prove_exact
from weft.rl.types import Floats, Sample
from weft.rollout.base import Completion, Request, Synced
from weft.rollout.embedded import EmbeddedEngine, end_tokens
from weft.rollout.sync.sender import Receiver, Sender, options_of
from weft.rollout.sync.wire import Ticket

CRITIC = "critic"
Who = Literal["policy", "reference", "critic"]
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Trainer:
    """The policy on one rank, with its reference and its critic: trained, read, saved, and given to rollout engines."""

    def __init__(self, config: RlConfig, device: Device = "auto", *, fill: bool = True) -> None:
        """fill: False where a checkpoint will fill the weights of what is trained."""
        self.config = config
        self.ranks = join(device, config.train.timeout)
        flight.watch(config.train.timeout)
        keys = {f"{section}.{key}": str(v) for section, values in to_dict(config).items() for key, v in values.items()}
        require_agreement(keys | versions())
        flight.at("load")
        self.engine = Engine(policy_config(config), self.ranks, fill=fill)
        self.reference = reference_engine(config, self.ranks, beside=self.engine)
        self.critic = critic_engine(config, self.ranks, fill=fill, beside=self.engine)
        rng.seed_rank(config.train.seed, self.ranks.rank)
        self.tokenizer = load_tokenizer(config.model.path)
        tokens = config.rollout.max_tokens_per_device
        self.embedded = EmbeddedEngine(self.engine, self.tokenizer, tokens, routes=True)
        self.throughput = Throughput.of(self.engine)
        self.saver: Saver | None = None
        self.sender: Sender | None = None
        self.folder: Path | None = None
        self._contract_checked = False

    # ------------------------------------------------------------ at start

    def describe(self) -> str:
        """What the run's opening says of the model and how it is laid out."""
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            print_model(self.config, self.engine)
            for line in opening_lines(self.config, self.reference, self.critic):
                print(line)
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
        self.folder = run
        notes: list[str] = []
        if last:
            checkpoint = step_folder(run / "checkpoints", last)
            notes = fill_from(self.engine, read_state(checkpoint), self.config.train.seed)
            if self.critic is not None:
                load_state(self.critic, read_state(checkpoint / CRITIC))
        template = chosen_template(self.config.data)
        texts = {} if template is None else {"chat_template.jinja": template}
        others = {} if self.critic is None else {CRITIC: self.critic}
        self.saver = Saver(self.engine, run, self.config.checkpoint, constants, last=last, texts=texts, others=others)
        return notes

    # ------------------------------------------------------------ rollouts

    def sync(self, version: int) -> Synced:
        """Give the embedded engine the weights as they are now."""
        flight.at("sync")
        began = time.perf_counter()
        self.embedded.wake(version=version)
        return Synced(version, len(self.engine.built.pieces), self.embedded.bytes, time.perf_counter() - began)

    def prove_exact(self) -> str:
        """UserError where this model, on this machine, samples other logprobs than the trainer reads; else a line."""
        flight.at("logprobs")
        rollout = self.config.rollout
        proof = prove_exact(self.engine, self.embedded, rollout.max_prompt_tokens, rollout.max_new_tokens)
        return f"exact    {proof.tokens} tokens sampled to try it: the trainer has the same logprobs, to the last bit"

    def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Completions by this rank's copy alone."""
        flight.at("generate")
        return self.embedded.generate(requests)

    def sleep_engine(self) -> None:
        """Drop the embedded engine's copy."""
        self.embedded.sleep()

    def open_sync(self, hosts: Mapping[str, str], workers: int) -> tuple[str, dict[str, list[Ticket]]]:
        """Get ready to send weights to engines of their own: (compute dtype, each one's tickets). hosts: address of
        each one's machine, by its name. workers: of one."""
        assert self.folder is not None, "open_run comes first"
        adapters = self.engine.lora is not None
        receivers = [Receiver(name, host, workers, adapters) for name, host in hosts.items()]
        self.sender = Sender(self.engine, receivers, options_of(self.config, self.folder))
        return DTYPE_NAMES[self.engine.precision.compute], self.sender.tickets

    def send(self, version: int) -> Synced:
        """Send the weights as they are now, while engines take them."""
        assert self.sender is not None
        return self.sender.send(version)

    def export(self, folder: str, version: int) -> Synced:
        """Write the weights as they are now as a HuggingFace directory."""
        flight.at("sync")
        began = time.perf_counter()
        save_huggingface(self.engine, Path(folder))
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        return Synced(version, len(self.engine.built.pieces), size, time.perf_counter() - began)

    # ------------------------------------------------------------ reading

    def read(self, who: Who, samples: Sequence[Sample]) -> dict[int, Floats]:
        """The policy's or the reference's logprob of every sampled token, or the critic's value before it, [T]; of the
        samples that this rank was dealt, by their index."""
        if who == "critic":
            assert self.critic is not None
            return _readout(self.critic, samples, "value")
        if who == "reference" and self.reference is None:
            with self.engine.without_adapter():
                return _readout(self.engine, samples, "logprob")
        engine = self.engine if who == "policy" else self.reference
        assert engine is not None
        return _readout(engine, samples, "logprob", routes=who == "policy")

    # ------------------------------------------------------------ training

    def update(self, samples: Sequence[Sample], number: int, steps: int, epoch: int, lr: float) -> dict[str, object]:
        """One optimizer step over these samples; its line of metrics.jsonl. lr: the policy's; a critic's is in the same
        proportion to critic.lr as this one to optimizer.lr."""
        began = time.perf_counter()
        documents = documents_of(samples, self.config)
        if not documents:  # on every rank alike
            return {"step": number, "epoch": epoch, "skipped": True, "reason": "no sample is to be trained", **_NOTHING}
        flight.step(number, steps, [document.source for document in documents])
        taken = self._take_step(documents, lr, began)
        if not self._contract_checked:
            check_contract(self.engine)
        values = self._train_critic(documents, lr / self.config.optimizer.lr)
        if not self._contract_checked and self.critic is not None:
            check_contract(self.critic)
        self._contract_checked = True
        flight.at("record")
        failed = self.saver is not None and self.saver.failed
        memory, any_failed = largest(
            [own_peak_memory_gib(self.engine.device), failed], self.engine.mesh.data_group, self.engine.device
        )
        if any_failed and self.saver is not None:
            self.saver.raise_failure()
        return step_line(number, epoch, taken, self.throughput, memory) | values

    def _take_step(self, documents: Sequence[Document], lr: float, began: float) -> Taken:
        engine = self.engine
        plan = engine.plan([engine.meta(document) for document in documents])
        metrics = engine.accumulate(plan, {i: documents[i] for i in engine.needs(plan)}, PolicyLoss(self.config.rl))
        result = engine.apply(lr)
        return Taken(plan, metrics, result, lr, time.perf_counter() - began)

    def _train_critic(self, documents: Sequence[Document], share: float) -> dict[str, object]:
        """A step of the critic over the same samples; what the metrics say of it."""
        critic = self.critic
        if critic is None:
            return {}
        plan = critic.plan([critic.meta(document) for document in documents])
        own = {i: documents[i] for i in critic.needs(plan)}
        metrics = critic.accumulate(plan, own, ValueLoss(self.config.critic.clip))
        result: StepResult = critic.apply(self.config.critic.lr * share)
        return {**metrics, "critic/grad_norm": result.grad_norm, "critic/skipped": result.skipped}

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
        if self.sender is not None:
            self.sender.close()
        leave()


# What a step without documents says beside that.
_NOTHING: dict[str, object] = {
    "loss": None, "grad_norm": None, "lr": None, "documents": 0, "tokens": 0, "loss_tokens": 0, "empty": True,
}  # fmt: skip


def _readout(engine: Engine, samples: Sequence[Sample], what: str, routes: bool = False) -> dict[int, Floats]:
    """[T] of this rank's samples; zero where the policy did not draw."""
    flight.at("logprobs")
    documents = [_as_document(sample, routes) for sample in samples]
    plan = engine.plan([engine.meta(document) for document in documents])
    read = engine.readout(plan, {i: documents[i] for i in engine.needs(plan)}, (what,))
    return {i: np.where(samples[i].sampled, found[what].numpy(), 0).astype(np.float32) for i, found in read.items()}


def _as_document(sample: Sample, routes: bool) -> Document:
    """To be read, not trained."""
    return Document(
        tokens=torch.as_tensor(np.asarray(sample.tokens, np.int64)),
        weights=torch.as_tensor(sample.sampled).float(),
        routes=aligned(sample.routes, len(sample)) if routes and sample.routes is not None else None,
        source=f"sample {sample.id}",
    )
