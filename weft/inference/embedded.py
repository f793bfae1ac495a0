"""The embedded engine: a plain HuggingFace model in the trainer's own ranks, which generates.

The tensor walker fills it, so that it works on every mesh. On sleep its memory is freed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weft.checkpoint.export import manifest_of
from weft.data.image_opener import ImageOpener
from weft.engine.engine import Engine
from weft.engine.selfcheck.architecture import implementation
from weft.engine.sleep import OffloadedTensors
from weft.inference.base import Completion, Request
from weft.inference.generate import MAX_TOKENS, Generator, Numbered
from weft.launch import flight
from weft.models import hf
from weft.models.lora import add_delta
from weft.parallel.parallelize import materialize, move_buffers
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.cuts import full_shape
from weft.parallel.shards.layout import TensorMapping


class EmbeddedEngine:
    """A full copy of a trainer's model in its compute dtype, on each rank that generates."""

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
        self.model: PreTrainedModel | None = None
        self.generator: Generator | None = None
        self._emptied: OffloadedTensors | None = None

    @property
    def bytes(self) -> int:
        """Size of the copy in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._manifest().values())

    def wake(self, generates: bool = True, version: int = 0) -> None:
        """Fill the copy with the trainer's current weights; collective. generates: whether this rank will generate.
        version: the version of these weights, for completions."""
        model = (self.model or self._build()) if generates else None
        if self._emptied is not None:
            self._emptied.restore()
            self._emptied = None
        state = {} if model is None else model.state_dict(keep_vars=True)
        mappings = {mapping.disk: mapping for mapping in self.engine.built.mappings}
        for name, tensor in self.engine.walk(list(mappings.values()), self._manifest()):
            flight.beat()
            if model is not None:
                mapping = mappings[name]
                target = state[mapping.runtime].detach()
                target[mapping.box.within(Box.from_shape(tuple(target.shape)))] = mapping.to_runtime(
                    tensor, mapping.box
                )
        self._add_adapters(state)
        if model is None:
            self.generator = None
        elif self.generator is None:
            hf.rebuild_buffers(model)
            move_buffers(model, self.engine.device)
            exact = self.engine.config.exact
            self.generator = Generator(model, version, self.tokenizer, self.max_tokens, exact, self.routes, self.opener)
        else:
            assert not self.generator.busy
            self.generator.version = version
        self.model = model

    def sleep(self) -> int:
        """Free the copy and its cache; returns the bytes of the copy. The model's modules stay, for the next wake()."""
        if self.model is None or self.generator is None or self._emptied is not None:
            return 0
        self.generator.drop_cache()
        self._emptied = OffloadedTensors.free(self.model.parameters(), self.engine.device)
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

    def _manifest(self) -> dict[str, Tensor]:
        return manifest_of(self.engine, self.engine.precision.compute)

    def _build(self) -> PreTrainedModel:
        """The model with uninitialised storage. Weights are tied as in the trainer, unless an adapter changes one of
        them."""
        built = self.engine.built
        attention = implementation(built.config, "auto")
        model = hf.build_meta(copy.deepcopy(built.config), dtype=self.engine.precision.compute, attention=attention)
        for name in hf.tied_parameters(model).keys() - self._tied().keys():
            hf.untie(model, name)
        materialize(model, self.engine.device)
        return model.eval().requires_grad_(False)

    def _tied(self) -> dict[str, str]:
        tied, lora = hf.tied_parameters(self.engine.built.module.hf_model), self.engine.lora
        untied = set() if lora is None else {target.weight for target in lora.targets}
        return {name: owner for name, owner in tied.items() if not {name, owner} & untied}

    def _add_adapters(self, state: Mapping[str, Tensor]) -> None:
        """Set adapted weights to W + s B A, rounded once to the copy's dtype; collective. state: the copy's tensors;
        empty on a rank without a copy."""
        lora = self.engine.lora
        if lora is None:
            return
        for name, owner in hf.tied_parameters(self.engine.built.module.hf_model).items():
            if name in state and name not in self._tied():
                state[name].detach().copy_(state[owner].detach())  # the walker yields only the owner
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
