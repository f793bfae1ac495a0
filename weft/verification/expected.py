"""The reference's side of the parity harness: the results of one plain process, with its own rounding noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from weft.config.schema import OptimizerConfig
from weft.models import hf
from weft.models.flops import FlopFacts
from weft.verification import reference
from weft.verification.image_reference import ImageReference, Images
from weft.verification.observed import Step, Tensors
from weft.verification.peft_reference import PeftReference
from weft.verification.reference_optimizer import Optimizer
from weft.verification.routing import Recorder, Routes


@dataclass(frozen=True)
class ExpectedGradient:
    """The gradient of one step at the initial weights. others: the gradients by other orders of summation, and in fp64
    if rounding counts, to measure noise; empty if it was not measured."""

    loss: float
    norm: float
    gradients: Tensors
    others: Sequence[Tensors] = ()


@dataclass
class Expected:
    """The reference's results. readouts: (logprob, entropy) of each document of the first step. curve: (loss, gradient
    norm) of each step. start, weights: the weights before and after training. others: the weights after training by
    other orders of summation, or in fp64; empty if noise was not measured. routes: chosen experts, if there are any."""

    readouts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    steps: list[ExpectedGradient] = field(default_factory=list)
    curve: list[tuple[float, float]] = field(default_factory=list)
    start: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    others: Sequence[Tensors] = ()
    routes: Routes = field(default_factory=dict)


@dataclass(frozen=True)
class Trainer:
    """Trains fresh references from the weights at `path`. lrs: the learning rate of each step. layers: name of the list
    of decoder layers.

    freeze: patterns of frozen parameters. balance: factor of the experts' auxiliary loss. whole_step: whether that loss
    is computed over all documents together. adapter: a peft folder, which is then trained. pads: whether padding
    changes only rounding, which is false if rotary tables depend on the longest document. images: by the token ids of
    their documents.
    """

    path: str
    lrs: Sequence[float]
    config: OptimizerConfig
    device: str
    layers: str
    freeze: Sequence[str] = ()
    balance: float = 0.0
    whole_step: bool = False
    adapter: str | None = None
    pads: bool = True
    images: Images = field(default_factory=dict)

    def reference(self) -> reference.Reference:
        """A fresh reference."""
        if self.adapter is not None:
            return PeftReference(self.path, self.adapter, self.device, self.balance, self.whole_step)
        options = (self.path, self.device, self.freeze, self.balance, self.whole_step)
        return ImageReference(self.images, *options) if self.images else reference.Reference(*options)

    def train(
        self, steps: Sequence[Step], *, padded: bool = False, double: bool = False, recorder: Recorder | None = None
    ) -> tuple[Tensors, Tensors, list[tuple[float, float]]]:
        """(Weights before, weights after, (loss, gradient norm) of each step). padded: as in Reference.step. double:
        train in fp64, by the recorded routes. recorder: records the routes of experts."""
        plain, c = self.reference(), self.config
        if double:
            widen(plain.model)
        start = on_cpu(plain.weights())
        state = torch.bfloat16 if c.state_dtype == "bf16" else torch.float32
        plain.start(plain_optimizer(c).over(plain.named()), c.max_grad_norm, state)
        curve = []
        with _recording(recorder, plain, self.layers, follow=double), hf.in_double() if double else nullcontext():
            for number, (step, lr) in enumerate(zip(steps, self.lrs, strict=True)):
                if recorder is not None:
                    recorder.stage = number
                curve.append(plain.step(step, lr, padded))
        return start, on_cpu(plain.weights()), curve


def expect(trainer: Trainer, steps: Sequence[Step], facts: FlopFacts) -> Expected:
    """Compute all values that an engine will be compared with, without their noise."""
    out = Expected()
    recorder = Recorder(facts.experts, facts.experts_per_token) if facts.expert else None
    plain = trainer.reference()
    with _recording(recorder, plain, trainer.layers):
        out.readouts = [plain.logprobs(ids) for ids, _ in steps[0]]
        found = [(loss, on_cpu(gradients)) for loss, gradients in map(plain.gradients, steps)]
    out.steps = [ExpectedGradient(loss, norm_of(gradients), gradients) for loss, gradients in found]
    del plain  # frees its memory for the reference that trains
    out.start, out.weights, out.curve = trainer.train(steps, recorder=recorder)
    out.routes = recorder.routes if recorder is not None else {}
    return out


def with_noise(expected: Expected, trainer: Trainer, steps: Sequence[Step]) -> Expected:
    """The same values with the reference's noise by other orders of summation."""
    plain = trainer.reference()
    gradients = [_other_gradients(trainer, plain, step) for step in steps]
    del plain
    weights = [trainer.train([list(step)[::-1] for step in steps])[1]]
    if trainer.pads:
        weights.append(trainer.train(steps, padded=True)[1])
    return _with_others(expected, gradients, weights)


def with_rounding(expected: Expected, trainer: Trainer, steps: Sequence[Step], facts: FlopFacts) -> Expected:
    """The same values with the reference's difference to fp64 among its noise, which takes as long as they did."""
    recorder = Recorder(facts.experts, facts.experts_per_token, expected.routes) if facts.expert else None
    plain = trainer.reference()
    with _recording(recorder, plain, trainer.layers, follow=True):
        gradients = [[_in_double(plain, step)] for step in steps]
    del plain
    return _with_others(expected, gradients, [trainer.train(steps, double=True, recorder=recorder)[1]])


def _other_gradients(trainer: Trainer, plain: reference.Reference, step: Step) -> list[Tensors]:
    others = [on_cpu(plain.gradients(list(step)[::-1])[1])]
    if trainer.pads:
        others.append(on_cpu(plain.padded_gradients(step)))
    return others


def _with_others(expected: Expected, gradients: Sequence[Sequence[Tensors]], weights: Sequence[Tensors]) -> Expected:
    pairs = zip(expected.steps, gradients, strict=True)
    steps = [replace(step, others=[*step.others, *others]) for step, others in pairs]
    return replace(expected, steps=steps, others=[*expected.others, *weights])


def plain_optimizer(config: OptimizerConfig) -> Optimizer:
    """The optimizer of a plain process. config: with the names that the plain model has."""
    c = config
    groups = [(g.match, g.lr / c.lr if g.lr else g.lr_scale or 1.0, g.weight_decay) for g in c.groups]
    return Optimizer(c.name, c.betas, c.eps, c.weight_decay, c.momentum, c.options, groups)


def _in_double(plain: reference.Reference, step: Step) -> Tensors:
    """Gradients computed in fp64."""
    widen(plain.model)
    with hf.in_double():
        found = plain.gradients(step)[1]
    gradients = {name: g.float().cpu() for name, g in found.items()}
    plain.model.float()  # exact: the weights came from fp32
    return gradients


def widen(model: nn.Module) -> None:
    """Give the model weights in fp64. Its results are to be computed within `hf.in_double`."""
    hf.run_experts_one_by_one(model)  # torch's grouped products take no fp64
    model.double()


@contextmanager
def _recording(
    recorder: Recorder | None, plain: reference.Reference, layers: str, follow: bool = False
) -> Iterator[None]:
    """Inside, the routes of `plain` are recorded; follow: it takes the recorded ones instead."""
    if recorder is None:
        yield
        return
    visit = recorder.following if follow else recorder.watching
    with visit(plain.model, list(plain.plain.get_submodule(layers).children())):
        yield


def norm_of(gradients: Tensors) -> float:
    """The norm of all gradients together, in fp64."""
    return float(torch.stack([g.double().norm() for g in gradients.values()]).norm())


def on_cpu(tensors: Tensors) -> Tensors:
    """The tensors on the CPU."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}
