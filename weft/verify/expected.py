"""The reference's side of the parity harness: the results of one plain process, and its rounding noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from weft.config.schema import OptimizerConfig
from weft.models import hf
from weft.models.flops import FlopFacts
from weft.verify import reference
from weft.verify.image_reference import ImageReference, Images, PeftImageReference
from weft.verify.observed import Step, Tensors
from weft.verify.peft_reference import PeftReference
from weft.verify.reference_fp8 import round_layers
from weft.verify.reference_muon import Part
from weft.verify.reference_optimizer import Optimizer
from weft.verify.routing import Recorder, Routes

_HELD_OUT = 7  # trained tokens of a document to evaluate
_TIE = 1e-4  # of logits, relative: rounding may exchange closer ones


@dataclass(frozen=True)
class ExpectedGradient:
    """The gradient of one step at the initial weights. noise_samples: the gradients with other orders of summation, and
    in fp64 if rounding matters, to measure noise; empty if noise was not measured."""

    loss: float
    norm: float
    gradients: Tensors
    noise_samples: Sequence[Tensors] = ()


@dataclass
class Expected:
    """The reference's results. readouts: (logprob, entropy) of each document of the first step. curve: (loss, gradient
    norm) of each step. start, weights: the weights before and after training. noise_samples: the weights after training
    with other orders of summation, or in fp64; empty if noise was not measured. routes: chosen experts, if there are
    any. held_out: documents to evaluate, with their accuracy and the share of exact documents. image_step: logprobs and
    the gradient of documents_behind."""

    readouts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    steps: list[ExpectedGradient] = field(default_factory=list)
    curve: list[tuple[float, float]] = field(default_factory=list)
    start: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    noise_samples: Sequence[Tensors] = ()
    routes: Routes = field(default_factory=dict)
    held_out: Sequence[reference.Document] = ()
    accuracy: float = 0.0
    exact: float = 0.0
    image_step: tuple[Sequence[Tensor], ExpectedGradient] | None = None


@dataclass(frozen=True)
class ReferenceTrainer:
    """Trains fresh references from the weights at `path`. lrs: the learning rate of each step. layers: name of the list
    of decoder layers.

    freeze: patterns of frozen parameters. balance: factor of the experts' auxiliary loss. whole_step: whether that loss
    is computed over all documents together. adapter: a peft folder; the adapter is then trained. pads: whether padding
    changes only rounding, which is false if rotary tables depend on the longest document. images: by the token ids of
    their documents. seed: of the run. aliases: name of a parameter -> the engine's name for it. matrices: parts of
    parameters that Muon orthogonalises. quantised, frozen: as in PeftReference. fp8: whether the linear layers of the
    decoder round (reference_fp8.py).
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
    seed: int = 0
    aliases: Mapping[str, str] = field(default_factory=dict)
    matrices: Mapping[str, Sequence[Part]] = field(default_factory=dict)
    quantised: Mapping[str, tuple[str, tuple[int, int]]] = field(default_factory=dict)
    frozen: int = 0
    fp8: bool = False

    def reference(self, dtype: torch.dtype = torch.float32) -> reference.Reference:
        """A fresh reference. dtype: of its weights, or with an adapter, of the base's weights."""
        plain: reference.Reference
        if self.adapter is not None:
            adapted = (
                self.path, self.adapter, self.device, self.balance, self.whole_step, dtype, self.quantised, self.frozen
            )  # fmt: skip
            plain = PeftImageReference(self.images, *adapted) if self.images else PeftReference(*adapted)
        else:
            options = (self.path, self.device, self.freeze, self.balance, self.whole_step, dtype)
            plain = ImageReference(self.images, *options) if self.images else reference.Reference(*options)
        if self.fp8:
            round_layers(plain.plain.get_submodule(self.layers))
        return plain

    def train(
        self, steps: Sequence[Step], *, padded: bool = False, double: bool = False, recorder: Recorder | None = None
    ) -> tuple[Tensors, Tensors, list[tuple[float, float]]]:
        """(Weights before, weights after, (loss, gradient norm) of each step). padded: as in Reference.step. double:
        train in fp64, with the recorded routes. recorder: records the routes of experts."""
        plain, c = self.reference(), self.config
        if double:
            widen(plain.model)
        start = on_cpu(plain.weights())
        state = torch.bfloat16 if c.state_dtype == "bf16" else torch.float32
        optimizer = plain_optimizer(c, self.seed, self.aliases, self.matrices).over(plain.named())
        plain.start(optimizer, c.max_grad_norm, state)
        curve = []
        with recording(recorder, plain, self.layers, follow=double), hf.in_double() if double else nullcontext():
            for number, (step, lr) in enumerate(zip(steps, self.lrs, strict=True)):
                if recorder is not None:
                    recorder.stage = number
                curve.append(plain.step(step, lr, padded))
        return start, on_cpu(plain.weights()), curve


def expect(trainer: ReferenceTrainer, steps: Sequence[Step], facts: FlopFacts, image_step: Step = ()) -> Expected:
    """Compute all values with which an engine will be compared, without their noise. image_step: documents whose
    logprobs and gradient are compared separately."""
    out = Expected()
    recorder = Recorder(facts.experts, facts.experts_per_token) if facts.expert else None
    plain = trainer.reference()
    documents = [_likeliest(plain, steps[0][0][0][0], second) for second in (False, True)]
    with recording(recorder, plain, trainer.layers):
        out.held_out, out.accuracy, out.exact = _evaluated(plain, documents)
        out.readouts = [plain.logprobs(ids) for ids, _ in steps[0]]
        logprobs = [plain.logprobs(ids)[0] for ids, _ in image_step]
        results = [
            (loss, on_cpu(gradients))
            for loss, gradients in map(plain.gradients, [*steps, *[image_step] * bool(image_step)])
        ]
    out.steps = [ExpectedGradient(loss, norm_of(gradients), gradients) for loss, gradients in results]
    if image_step:
        out.image_step = logprobs, out.steps.pop()
    del plain  # frees its memory for the reference that is trained
    out.start, out.weights, out.curve = trainer.train(steps, recorder=recorder)
    out.routes = recorder.routes if recorder is not None else {}
    return out


@torch.no_grad()
def _likeliest(plain: reference.Reference, first: int, second: bool) -> list[int]:
    """A short document: each token is the most likely one after the tokens before it. second: every other token is
    instead chosen from the half of the vocabulary that does not contain the most likely token. It is the most likely
    token of that half, and so of most shards of a split vocabulary."""
    ids = [first]
    for index in range(_HELD_OUT):
        logits = plain.logits(ids)[-1]
        for name in ("image_token_id", "video_token_id"):  # the document has no image
            if isinstance(placeholder := getattr(plain.plain.config, name, None), int):
                logits[placeholder] = float("-inf")
        half = len(logits) // 2
        if second and index % 2:
            (logits[:half] if int(logits.argmax()) < half else logits[half:]).fill_(float("-inf"))
        ids.append(int(logits.argmax()))
    return ids


@torch.no_grad()
def _evaluated(
    plain: reference.Reference, documents: Sequence[list[int]]
) -> tuple[list[reference.Document], float, float]:
    """(Documents to evaluate, their accuracy, the share of exact ones). Tokens are trained if rounding cannot change
    the most likely token at their position. Accuracy: the share of these tokens that are the most likely ones. A
    document is exact if all its trained tokens are."""
    results, hits = list[reference.Document](), list[list[bool]]()
    for ids in documents:
        logits = plain.logits(ids)[:-1]
        best = logits.topk(2, dim=-1)[0]
        chosen = logits.gather(1, torch.tensor(ids[1:], device=logits.device)[:, None])[:, 0]
        second = torch.where(chosen == best[:, 0], best[:, 1], chosen)
        clear = (best[:, 0] - second) > _TIE * best[:, 0].abs().clamp_min(1.0)
        results.append((ids, [0.0, *clear.float().tolist()]))
        hits.append((chosen == best[:, 0])[clear].tolist())
    counted = [hits_of_document for hits_of_document in hits if hits_of_document]
    all_hits = [hit for hits_of_document in counted for hit in hits_of_document]
    return results, sum(all_hits) / max(1, len(all_hits)), sum(map(all, counted)) / max(1, len(counted))


def with_noise(expected: Expected, trainer: ReferenceTrainer, steps: Sequence[Step]) -> Expected:
    """The same values, with the reference's noise from other orders of summation."""
    plain = trainer.reference()
    gradients = [_noise_gradients(trainer, plain, step) for step in steps]
    del plain
    weights = [trainer.train([list(step)[::-1] for step in steps])[1]]
    if trainer.pads:
        weights.append(trainer.train(steps, padded=True)[1])
    return _with_noise(expected, gradients, weights)


def with_rounding(expected: Expected, trainer: ReferenceTrainer, steps: Sequence[Step], facts: FlopFacts) -> Expected:
    """The same values, with the reference's difference to fp64 in its noise, which takes as long as the values did."""
    recorder = Recorder(facts.experts, facts.experts_per_token, expected.routes) if facts.expert else None
    plain = trainer.reference()
    with recording(recorder, plain, trainer.layers, follow=True):
        gradients = [[_in_double(plain, step)] for step in steps]
    del plain
    return _with_noise(expected, gradients, [trainer.train(steps, double=True, recorder=recorder)[1]])


def _noise_gradients(trainer: ReferenceTrainer, plain: reference.Reference, step: Step) -> list[Tensors]:
    noise_samples = [on_cpu(plain.gradients(list(step)[::-1])[1])]
    if trainer.pads:
        noise_samples.append(on_cpu(plain.padded_gradients(step)))
    return noise_samples


def _with_noise(expected: Expected, gradients: Sequence[Sequence[Tensors]], weights: Sequence[Tensors]) -> Expected:
    pairs = zip(expected.steps, gradients, strict=True)
    steps = [replace(step, noise_samples=[*step.noise_samples, *noise_samples]) for step, noise_samples in pairs]
    return replace(expected, steps=steps, noise_samples=[*expected.noise_samples, *weights])


def plain_optimizer(
    config: OptimizerConfig,
    seed: int = 0,
    aliases: Mapping[str, str] | None = None,
    matrices: Mapping[str, Sequence[Part]] | None = None,
) -> Optimizer:
    """The optimizer of a plain process. config: with the plain model's names. seed, aliases, matrices: as in
    ReferenceTrainer."""
    c = config
    coded = c.name == "adamw" and c.state_dtype == "int8"
    groups = [(g.match, g.lr / c.lr if g.lr else g.lr_scale or 1.0, g.weight_decay) for g in c.groups]
    return Optimizer(
        c.name,
        c.betas,
        c.eps,
        c.weight_decay,
        c.momentum,
        c.options,
        groups,
        coded,
        seed,
        aliases or {},
        matrices or {},
        (c.muon_lr or c.lr) / c.lr,
        c.muon_momentum,
        c.muon_scale,
    )


def _in_double(plain: reference.Reference, step: Step) -> Tensors:
    """Gradients computed in fp64."""
    widen(plain.model)
    with hf.in_double():
        results = plain.gradients(step)[1]
    gradients = {name: g.float().cpu() for name, g in results.items()}
    plain.model.float()  # exact, because the weights came from fp32
    return gradients


def widen(model: nn.Module) -> None:
    """Give the model weights in fp64. Compute its results within `hf.in_double`."""
    hf.run_experts_one_by_one(model)  # torch's grouped matmuls do not support fp64
    model.double()


@contextmanager
def recording(
    recorder: Recorder | None, plain: reference.Reference, layers: str, follow: bool = False
) -> Iterator[None]:
    """Inside, a recorder records the routes of `plain`. follow: it makes `plain` follow the recorded routes instead."""
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
