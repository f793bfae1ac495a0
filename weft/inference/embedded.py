"""The embedded engine: a plain HuggingFace model that generates in the trainer's ranks.

The tensor walker fills it, so that it works on every mesh. On sleep its memory is freed. With lora.sampling=separate
and a mesh that shards nothing, the engine does not copy frozen tensors: it shares their memory with the trainer, and
that memory stays on the device while the trainer sleeps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weft.checkpoint.export import manifest_of
from weft.data.image_opener import ImageOpener
from weft.engine.builder import fuses_norms
from weft.engine.engine import Engine
from weft.engine.selfcheck.architecture import implementation
from weft.engine.sleep import OffloadedTensors
from weft.inference.base import Completion, Request
from weft.inference.generate import MAX_TOKENS, Generator, Numbered
from weft.inference.unmerged import destinations, keep_norms, separate, stored_layout
from weft.launch import flight
from weft.models import hf
from weft.models.lora import add_delta, samples_separate
from weft.models.quantised import SHARED, QuantisedWeight
from weft.parallel.parallelize import materialize, move_buffers
from weft.parallel.shards.boxes import Box, local_values
from weft.parallel.shards.cuts import full_shape
from weft.parallel.shards.layout import TensorMapping
from weft.parallel.shards.walker import GatherGroup, TensorPlacement


class EmbeddedEngine:
    """A full copy of a trainer's model, on each rank that generates. By lora.sampling, the copy is in the compute dtype
    with merged adapters, or has the trainer's storage format and separate adapters."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens: int = MAX_TOKENS,
        routes: bool = False,
        opener: ImageOpener | None = None,
    ) -> None:
        """tokenizer, max_tokens, routes, opener: as in Generator."""
        self.engine, self.tokenizer, self.max_tokens, self.routes = engine, tokenizer, max_tokens, routes
        self.opener = opener
        self.separate = samples_separate(engine.config.lora)
        self.model: PreTrainedModel | None = None
        self.generator: Generator | None = None
        self._emptied: OffloadedTensors | None = None
        self._weights: dict[str, QuantisedWeight] = {}
        self._has_base = False  # whether the copies of all ranks that generate have the frozen tensors

    @property
    def bytes(self) -> int:
        """Size in bytes of the tensors that the copy does not share with the trainer."""
        _, manifest = self._layout(base=True)
        return sum(tensor.nbytes for tensor in manifest.values())

    @property
    def copies_base(self) -> bool:
        """Whether the copy has a separate base."""
        return len(self._layout(base=True)[1]) > len(self._layout(base=False)[1]) or not self.separate

    def smaller(self) -> str:
        """Advice for a message about memory: the setting for a smaller copy; "" if there is none."""
        return "" if self.separate or self.engine.lora is None else "Set lora.sampling=separate for a smaller one. "

    def wake(self, generates: bool = True, version: int = 0) -> tuple[int, int]:
        """Fill the copy with the trainer's current weights; collective. generates: whether this rank will generate.
        version: the version of these weights, for completions. Returns the number of copied tensors, and their
        bytes."""
        model = (self.model or self._build()) if generates else None
        if self._emptied is not None:
            self._emptied.restore()
            self._emptied = None
        state = {} if model is None else destinations(model, self._weights)
        mappings, manifest = self._layout(base=not (self.separate and self._has_base))
        by_name = {mapping.disk: mapping for mapping in mappings}
        for name, tensor in self.engine.walk(mappings, manifest, stored=self.separate):
            flight.beat()
            if model is not None:
                mapping = by_name[name]
                target = state[mapping.runtime]
                target[mapping.box.within(Box.from_shape(tuple(target.shape)))] = mapping.to_runtime(
                    tensor, mapping.box
                )
        if not self.separate:
            self._add_adapters(state)
        elif model is not None:
            keep_norms(model)
        self._has_base = True
        if model is None:
            self.generator = None
        elif self.generator is None:
            hf.rebuild_buffers(model)
            move_buffers(model, self.engine.device)
            exact = self.engine.config.exact
            self.generator = Generator(
                model, version, self.tokenizer, self.max_tokens, exact, self.routes, self.opener,
                fused_norms=fuses_norms(self.engine.config, self.engine.device),
            )  # fmt: skip
        else:
            assert not self.generator.busy
            self.generator.version = version
        self.model = model
        return len(manifest), sum(tensor.nbytes for tensor in manifest.values())

    def sleep(self) -> int:
        """Free the copy and its cache; returns the bytes of the copy. The model's modules stay, for the next wake().
        Called on every rank."""
        self._has_base = False
        if self.model is None or self.generator is None or self._emptied is not None:
            return 0
        self.generator.drop_cache()
        lent = self.engine.lent_storages
        freed = [tensor for tensor in self.model.parameters() if tensor.untyped_storage().data_ptr() not in lent]
        self._emptied = OffloadedTensors.free(freed, self.engine.device)
        return self._emptied.bytes

    def generate(
        self, requests: Sequence[Request], proceed: Callable[[], bool] | None = None
    ) -> list[list[Completion]]:
        """See Generator.generate. Not collective."""
        assert self.generator is not None and self._emptied is None, "asleep"
        return self.generator.generate(requests, proceed)

    def advance(self, requests: Mapping[int, Request], seconds: float) -> tuple[Numbered, int]:
        """See Generator.advance. Not collective."""
        assert self.generator is not None and self._emptied is None, "asleep"
        return self.generator.advance(requests, seconds)

    def end(self) -> Numbered:
        """See Generator.end. Not collective."""
        return {} if self.generator is None else self.generator.end()

    def _layout(self, base: bool) -> tuple[list[TensorMapping], dict[str, Tensor]]:
        """The mappings and the manifest of the copied tensors. base: include frozen tensors."""
        built, lora, compute = self.engine.built, self.engine.lora, self.engine.precision.compute
        if not self.separate or lora is None:
            return built.mappings, manifest_of(self.engine, compute)
        mappings, manifest = list[TensorMapping](), dict[str, Tensor]()
        if base:
            stored, of_stored = stored_layout(self.engine, compute)
            kept = self._lent.keys() | self._shared
            mappings = [m for m in stored if m.runtime not in kept and not lora.trains(m.runtime)]
            manifest = {mapping.disk: of_stored[mapping.disk] for mapping in mappings}
        for name, parameter in self.engine.whole_parameters().items():
            if lora.trains(name):
                shape = full_shape(name, parameter, self.engine.divided.cuts)
                mappings.append(TensorMapping.identity(name, name, shape))
                manifest[name] = torch.empty(shape, dtype=compute, device="meta")
        return mappings, manifest

    @property
    def _shared(self) -> set[str]:
        """Names of the scales of quantised weights that every rank holds; none with pipeline stages."""
        weights = self.engine.module.quantised if self.engine.pipeline is None else {}
        return {name + SHARED.format(number) for name in weights for number in range(2)}

    @cached_property
    def _lent(self) -> dict[str, Tensor]:
        """The trainer's frozen tensors that the copy reads in place: tensors that every rank holds completely, on the
        device and in the copy's dtype. None with pipeline stages, because a rank lacks the tensors of other stages."""
        engine, lora, lent = self.engine, self.engine.lora, dict[str, Tensor]()
        if not self.separate or lora is None or engine.pipeline is not None:
            return lent
        tensors, specs = engine.stored_tensors()
        for name, tensor in tensors.items():
            if lora.trains(name) or not isinstance(tensor, nn.Parameter):
                continue
            values = local_values(tensor)
            is_whole = TensorPlacement.from_tensor(name, tensor, specs).group == GatherGroup()
            has_dtype = values.dtype in (torch.uint8, engine.precision.compute)
            if is_whole and has_dtype and values.device.type in (engine.device.type, "meta"):  # meta: in a dry run
                lent[name] = values
        return lent

    def _build(self) -> PreTrainedModel:
        """The model with uninitialised storage. Weights are tied as in the trainer, unless adapters are merged into one
        of them."""
        built, lora, module = self.engine.built, self.engine.lora, self.engine.module
        attention = implementation(built.config, "auto")
        model = hf.build_meta(copy.deepcopy(built.config), dtype=self.engine.precision.compute, attention=attention)
        for name in hf.tied_parameters(model).keys() - self._tied().keys():
            hf.untie(model, name)
        if self.separate and lora is not None:
            self._weights = separate(model, lora, module.quantised_shapes, module.quantised_form)
            if self.engine.pipeline is None:
                for name, weight in self._weights.items():
                    weight.shared = module.quantised[name].shared
        lent = {
            parameter: nn.Parameter(self._lent[name], requires_grad=False)
            for name, parameter in model.named_parameters()
            if name in self._lent
        }
        # Remove them while materialize() allocates memory for the other tensors.
        places = [(owner, leaf, p) for owner in model.modules() for leaf, p in owner._parameters.items() if p in lent]
        for owner, leaf, _ in places:
            del owner._parameters[leaf]
        materialize(model, self.engine.device)
        for owner, leaf, parameter in places:
            owner.register_parameter(leaf, lent[parameter])
        self.engine.lent_storages = frozenset(p.untyped_storage().data_ptr() for p in lent.values())
        return model.eval().requires_grad_(False)

    def _tied(self) -> dict[str, str]:
        tied, lora = hf.tied_parameters(self.engine.built.module.hf_model), self.engine.lora
        untied = set() if lora is None or self.separate else {target.weight for target in lora.targets}
        return {name: owner for name, owner in tied.items() if not {name, owner} & untied}

    def _add_adapters(self, state: Mapping[str, Tensor]) -> None:
        """Set adapted weights to W + s B A, rounded once to the copy's dtype; collective. state: the copy's tensors;
        empty on a rank without a copy."""
        lora = self.engine.lora
        if lora is None:
            return
        for name, owner in hf.tied_parameters(self.engine.built.module.hf_model).items():
            if name in state and name not in self._tied():
                state[name].detach().copy_(state[owner].detach())  # the iterator yields a tied tensor once
        matrices = self._matrices([name for target in lora.targets for name in lora.tensors(target)])
        for target in lora.targets:
            values = {name: next(matrices) for name in lora.tensors(target)}
            if state:
                weight = state[target.weight].detach()
                weight.copy_(add_delta(weight.float(), target, lora, values))

    def _matrices(self, names: Sequence[str]) -> Iterator[Tensor]:
        """The full tensors of these adapter parameters, in fp32 and in order; collective."""
        parameters, cuts = self.engine.whole_parameters(), self.engine.divided.cuts
        shapes = {name: full_shape(name, parameters[name], cuts) for name in names}
        manifest = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        mappings = [TensorMapping.identity(name, name, shape) for name, shape in shapes.items()]
        return (tensor.clone() for _, tensor in self.engine.walk(mappings, manifest))
