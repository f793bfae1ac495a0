"""LoRA (Hu et al. 2021, arXiv:2106.09685): selects the adapted parts of a model, and adds the adapters.

An adapter is a child module `lora` of the layer that it adapts, so names, layout and loading of the base do not change.
Its matrices have peft's shapes, so parallel/shards/adapter_files.py changes only names:

    linear layer          y = W x + s B A x              lora.A [r, in], lora.B [out, r]
    embedding             y = W[i] + s B A[:, i]         lora_embedding.A [r, V], lora_embedding.B [H, r]
    fused experts         y = W_e x + s B_e A_e x        lora_NAME.A [E r, in], lora_NAME.B [out, r E]; NAME: of W

s is alpha / r, or alpha / sqrt(r) with rslora (Kalajdzievski 2023, arXiv:2312.03732). With dora, a linear layer has a
third parameter, lora.magnitude [out] (models/low_rank.py).

PiSSA (Meng et al. 2024, arXiv:2404.02948) and OLoRA (arXiv:2406.01775) compute A0 and B0 from W, and train W - s B0 A0
+ s B A. In weft, W does not change: A0 and -B0 are untrained rows of A and columns of B. So an adapter has rank 2 r and
applies to the original base, as after peft's conversion of such adapters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.config.schema import MOVES_BASE, LoraConfig
from weft.config.yaml12 import override
from weft.errors import UserError
from weft.models import hf
from weft.models.experts import use_experts_forward
from weft.models.facts import find_facts
from weft.models.low_rank import AdapterSwitch, LowRank, embedding_hook, linear_hook
from weft.models.patterns import similar_names
from weft.models.train_module import Head

Kind = Literal["linear", "embedding", "experts"]
ALL_LINEAR = "all-linear"
FROM_WEIGHTS = (*MOVES_BASE, "loftq")
EMBEDDING = "lora_embedding"  # name of an embedding's adapter in its module
# Families whose mixers read out_proj.weight but never call out_proj: an adapter would have no effect. peft refuses it.
_READ_ONLY = (("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"), "out_proj")


@dataclass(frozen=True, slots=True)
class Target:
    """An adapted weight: a layer's, or a parameter of fused experts. inputs, outputs: widths of one matrix. transposed:
    the weight is stored as [inputs, outputs]."""

    module: str
    kind: Kind
    inputs: int
    outputs: int
    parameter: str = "weight"
    experts: int = 1
    transposed: bool = False

    @property
    def name(self) -> str:
        """Name of the layer; for fused experts, of the parameter."""
        return f"{self.module}.{self.parameter}" if self.kind == "experts" else self.module

    @property
    def weight(self) -> str:
        """Name of the base's parameter."""
        return f"{self.module}.{self.parameter}"

    @property
    def child(self) -> str:
        """Name of the adapter in its module."""
        return {"linear": "lora", "embedding": EMBEDDING, "experts": f"lora_{self.parameter}"}[self.kind]

    @property
    def names(self) -> tuple[str, str]:
        """Names of A and B among the parameters of the adapted model."""
        return f"{self.module}.{self.child}.A", f"{self.module}.{self.child}.B"

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of A and B."""
        return (rank * self.experts, self.inputs), (self.outputs, rank * self.experts)


@dataclass(frozen=True)
class LoraPlan:
    """Adapters of a model. trained: fully trained modules. path: adapter with the initial values, if any. init:
    lora.init. frozen: the untrained part of the rank."""

    rank: int
    alpha: float
    rslora: bool
    dropout: float
    targets: tuple[Target, ...]
    trained: tuple[str, ...]
    path: Path | None = None
    dora: bool = False
    init: str = "default"
    frozen: int = 0
    switch: AdapterSwitch = field(default_factory=AdapterSwitch)

    def tensors(self, target: Target) -> dict[str, tuple[int, ...]]:
        """Name of each parameter of a target's adapter, in the adapted model -> its shape: A, B and, with dora, the
        magnitude."""
        named: dict[str, tuple[int, ...]] = dict(zip(target.names, target.shapes(self.rank), strict=True))
        return named | ({f"{target.module}.{target.child}.magnitude": (target.outputs,)} if self.dora else {})

    @property
    def scale(self) -> float:
        return scaling(self.alpha, self.rank, self.rslora)

    @property
    def has_experts(self) -> bool:
        """Whether any target is a parameter of fused experts."""
        return any(target.kind == "experts" for target in self.targets)

    def trains(self, name: str) -> bool:
        """Whether the parameter of this name in the adapted model is trained."""
        return is_adapters(name) or any(name.startswith(f"{module}.") for module in self.trained)


def samples_separate(lora: LoraConfig) -> bool:
    """Whether weft's embedded engines store adapters separately from the base (lora.sampling)."""
    return lora.on and (lora.sampling == "separate" or (lora.sampling == "auto" and lora.base != "compute"))


def scaling(alpha: float, rank: int, rslora: bool) -> float:
    """s: alpha / rank, or alpha / sqrt(rank) with rslora."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def parameter_of(child: str) -> str:
    """Name of the parameter that the adapter `child` adapts; the inverse of Target.child."""
    return "weight" if child in ("lora", EMBEDDING) else child.removeprefix("lora_")


def is_adapters(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter."""
    parent = (["", *name.split(".")])[-2]
    return name.endswith((".A", ".B", ".magnitude")) and (parent == "lora" or parent.startswith("lora_"))


def new_adapters(model: PreTrainedModel, config: LoraConfig) -> LoraPlan:
    """The adapters that lora.rank, lora.targets and lora.modules_to_save describe. A head of scores is fully trained,
    as in peft with task_type SEQ_CLS. Raises UserError if a name matches nothing."""
    assert config.rank is not None
    heads = [find_facts(model).head] if hf.classifies(model.config) else []
    trained = find_trained(model, [*config.modules_to_save, *heads])
    patterns = (config.targets,) if isinstance(config.targets, str) else config.targets
    targets = find_targets(model, patterns, trained)
    unsupported = [target for target in targets if target.kind != "linear" or target.module == find_facts(model).head]
    for key, needs_linear in (("dora", config.dora), (f"init={config.init}", config.init in FROM_WEIGHTS)):
        if needs_linear and unsupported:
            raise UserError(
                f"lora.{key} supports only linear layers of the decoder, but lora.targets matches "
                f"{unsupported[0].name} ({len(unsupported)} such). Exclude these from lora.targets, or set "
                f"lora.{'dora=false' if key == 'dora' else 'init=default'}."
            )
    rank, alpha, frozen = config.rank, 2.0 * config.rank if config.alpha is None else config.alpha, 0
    if config.init in MOVES_BASE:
        widest = min(min(target.inputs, target.outputs) for target in targets)
        if rank > widest:
            raise UserError(
                f"lora.init={config.init}: lora.rank is {rank}, more than the {widest} of a weight's sides."
            )
        # Same as peft's conversion of such adapters, which keeps the scale.
        rank, alpha, frozen = 2 * rank, alpha * (math.sqrt(2.0) if config.rslora else 2.0), rank
    return LoraPlan(
        rank, alpha, config.rslora, config.dropout, targets, trained, dora=config.dora, init=config.init, frozen=frozen
    )


# ---------------------------------------------------------------- targets


def adaptable(model: PreTrainedModel) -> dict[str, Target]:
    """Name -> target, for every weight that can have an adapter, in the model's order."""
    targets = {}
    for name, module in model.named_modules():
        for target in _targets_of(name, module, model):
            targets[target.name] = target
    return targets


def _targets_of(name: str, module: nn.Module, model: PreTrainedModel) -> Iterator[Target]:
    if module is model.get_input_embeddings():
        vocabulary, width = module.weight.shape
        yield Target(name, "embedding", vocabulary, width, transposed=True)
    elif hf.is_plain_linear(module):
        if is_read_only(model.config.get_text_config().model_type, name):
            return
        inputs, outputs = hf.linear_widths(module)
        yield Target(name, "linear", inputs, outputs, transposed=hf.is_transposed(module))
    elif hf.is_fused_experts(module):
        for parameter, weight in module.named_parameters(recurse=False):
            if weight.ndim == 3 and parameter in hf.EXPERT_WEIGHTS:
                experts, outputs, inputs = weight.shape
                if module.is_transposed:
                    inputs, outputs = outputs, inputs
                yield Target(name, "experts", inputs, outputs, parameter, experts, module.is_transposed)


def is_read_only(family: str, name: str) -> bool:
    """Whether a layer of this name is never called, because its mixer reads its weight. family: the model_type."""
    return family in _READ_ONLY[0] and name.endswith(_READ_ONLY[1])


def find_targets(model: PreTrainedModel, patterns: Sequence[str], trained: Sequence[str] = ()) -> tuple[Target, ...]:
    """The targets that match the patterns, in the model's order, except inside `trained`. Raises UserError if a pattern
    matches nothing that can be adapted.
    """
    candidates = adaptable(model)
    chosen: set[str] = set()
    for pattern in patterns:
        if pattern == ALL_LINEAR:
            head = model.get_output_embeddings()
            names = {n for n, t in candidates.items() if t.kind == "linear" and model.get_submodule(n) is not head}
        else:
            names = {name for name in candidates if matches_end(name, pattern)}
        if not names:
            raise UserError(_nothing_named(model, pattern, candidates))
        chosen |= names
    trained_prefixes = tuple(f"{module}." for module in trained)
    return tuple(t for n, t in candidates.items() if n in chosen and not t.weight.startswith(trained_prefixes))


def matches_end(name: str, pattern: str) -> bool:
    """Whether a glob matches the name, or its last parts: `q_proj`, `mlp.*`."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _nothing_named(model: PreTrainedModel, pattern: str, candidates: Mapping[str, Target]) -> str:
    matches = [name for name, _ in (*model.named_modules(), *model.named_parameters()) if matches_end(name, pattern)]
    if not matches:
        near = candidates if "." in pattern else {name.rpartition(".")[2] for name in candidates}
        return f"lora.targets: {pattern!r} matches nothing in this model{similar_names(pattern, near)}"
    inside = [name for name in candidates if name.startswith(f"{matches[0]}.")]
    if inside:
        return f"lora.targets: {matches[0]} is not a layer, but contains layers. Write {pattern}.*, or name the layers."
    return (
        f"lora.targets: {matches[0]} cannot be adapted. Adapters support linear layers, the token embedding, and the "
        "weights of fused experts; lora.modules_to_save trains all parameters of a module."
    )


def find_trained(model: PreTrainedModel, ends: Sequence[str]) -> tuple[str, ...]:
    """Names of the modules with parameters that match `ends` (as in matches_end), in order. Raises UserError if an end
    matches none."""
    trained: dict[str, None] = {}
    for end in ends:
        names = [
            name
            for name, module in model.named_modules()
            if name and matches_end(name, end) and any(True for _ in module.parameters())
        ]
        if not names:
            modules = [name for name, _ in model.named_modules() if name]
            raise UserError(
                f"lora.modules_to_save: {end!r} matches no module with parameters{similar_names(end, modules)}"
            )
        trained |= dict.fromkeys(names)
    return tuple(trained)


def untied_for(model: PreTrainedModel, plan: LoraPlan, *, merged: bool) -> tuple[str, ...]:
    """Names of tied parameters that must be untied, because they or their owners are fully trained.

    merged: also parameters that are adapted, because merging the adapters makes them differ.
    """
    inside = tuple(f"{module}." for module in plan.trained)
    if merged:
        inside += tuple(target.weight for target in plan.targets)
    return tuple(
        name for name, owner in hf.tied_parameters(model).items() if name.startswith(inside) or owner.startswith(inside)
    )


# ---------------------------------------------------------------- in the model


def attach(module: nn.Module, plan: LoraPlan) -> None:
    """Add the adapters, uninitialised, on the device of the weights that they adapt."""
    for target in plan.targets:
        owner = module.get_submodule(target.module)
        weight = module.get_parameter(target.weight)
        adapter = LowRank(
            *target.shapes(plan.rank), plan.scale, plan.dropout, plan.switch, weight, dora=plan.dora, frozen=plan.frozen
        )
        setattr(owner, target.child, adapter)
        if target.kind == "experts":
            use_experts_forward(owner)
        elif not isinstance(owner, Head):  # the head computes its adapter's part itself
            owner.register_forward_hook(linear_hook if target.kind == "linear" else embedding_hook)


def freeze_base(module: nn.Module, plan: LoraPlan) -> None:
    """Set requires_grad: True for adapters and fully trained modules, False for all others."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(plan.trains(name))


def first_values(name: str, shape: tuple[int, ...], seed: int, gaussian: int | None = None) -> Tensor:
    """Initial values of an adapter's parameter, fp32, as in peft; they depend only on the seed and the name.

    A is uniform within 1 / sqrt(in), or normal with the deviation 1 / gaussian, and B is 0; for an embedding A is 0 and
    B is normal. Values computed from the base's weights (parallel/adapter_values.py) are 0 here.
    """
    *_, parent, matrix = name.split(".")
    drawn = "B" if parent == EMBEDDING else "A"
    if matrix != drawn:
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    if drawn == "B":
        return torch.randn(shape, generator=generator)
    if gaussian is not None:
        return torch.randn(shape, generator=generator) / gaussian
    bound = 1.0 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def add_delta(weight: Tensor, target: Target, lora: LoraPlan, values: Mapping[str, Tensor]) -> Tensor:
    """Add s B A to W in place and return it. Fused experts have separate A and B; with dora, each output is scaled to
    its magnitude. values: of the target's adapter, by the names of LoraPlan.tensors. All are fp32."""
    a, b, *magnitude = (values[name] for name in lora.tensors(target))
    if target.kind == "experts":
        a_Eri, b_orE = a.view(target.experts, lora.rank, -1), b.view(len(b), lora.rank, target.experts)
        deltas: Iterable[Tensor] = (b_orE[:, :, expert] @ a_Eri[expert] for expert in range(target.experts))
    else:
        weight, deltas = weight[None], [b @ a]
    for matrix, delta in zip(weight, deltas, strict=True):
        matrix.add_(delta.T if target.transposed else delta, alpha=lora.scale)
        if magnitude:
            by_output = matrix.T if target.transposed else matrix
            by_output.mul_((magnitude[0] / by_output.norm(dim=1))[:, None])
    return weight if target.kind == "experts" else weight[0]


def describe(plan: LoraPlan, module: nn.Module, elements: Mapping[str, int]) -> list[str]:
    """Start-up lines that describe the adapters. elements: number of elements of each parameter."""
    trained = sum(count for name, count in elements.items() if plan.trains(name))
    total = sum(elements.values())
    kinds = list(dict.fromkeys(target.name.rpartition(".")[2] for target in plan.targets))
    formula = "alpha / sqrt(rank)" if plan.rslora else "alpha / rank"
    origin = f", from {plan.path}" if plan.path is not None else ""
    if plan.init != "default":
        origin += f", initialised by {plan.init}"
    if plan.frozen:
        origin += f", of which {plan.frozen} are untrained copies of the others' initial values"
    if plan.dora:
        origin += ", with magnitudes (DoRA)"
    lines = [
        f"rank {plan.rank}, {formula} = {plan.scale:g}, on {len(plan.targets)} weights ({', '.join(kinds) or 'none'})"
        f"{origin}; {trained:,} of {total:,} parameters are trained ({trained / total:.2%})"
    ]
    if plan.trained:
        lines.append(f"fully trained: {', '.join(plan.trained)}")
    if any(hf.is_fused_experts(child) for child in module.modules()) and not plan.has_experts:
        targets = override("lora.targets", ["all-linear", "experts.*_proj"])
        lines.append(f"its experts are not adapted. To adapt them, name them, as in {targets}")
    if plan.dropout:
        lines.append(
            f"dropout {plan.dropout:g}: each data rank draws masks for its rows, so results depend on how a step is "
            "split"
        )
    return lines
