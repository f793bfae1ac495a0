"""A rollout engine in its own process (rollout.engine=hf): a plain HuggingFace model that only weight sync fills.

It allows rollouts on other devices than the trainer's without installing another inference engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weft.config.conditions import ENGINES
from weft.config.schema import LoraConfig
from weft.data.image_opener import ImageOpener
from weft.engine.sleep import OffloadedTensors
from weft.errors import UserError
from weft.inference.base import Completion, Request
from weft.inference.generate import MAX_TOKENS, Generator, Numbered
from weft.inference.unmerged import destinations, keep_norms, separate
from weft.inference.weight_sync.checksums import checksum
from weft.inference.weight_sync.protocol import (
    Delivery,
    SyncError,
    SyncPart,
    TensorHeader,
    Ticket,
    as_torch,
    check_manifest,
    device_memory,
)
from weft.launch import flight
from weft.launch.machine import host_address
from weft.models import hf
from weft.models.lora import LoraPlan, Target, add_delta, samples_separate, untied_for
from weft.models.quantised import CODES, parts_on_meta
from weft.ops.low_bit import FORMATS, Format
from weft.parallel.parallelize import materialize, move_buffers
from weft.parallel.shards.adapter_files import file_names, plan_lora
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.layout import TensorMapping, map_tensors
from weft.parallel.shards.safetensors_files import bytes_of
from weft.plugins import load_plugin, plugin


class Standalone:
    """An engine without weights until the first sync, and after a failed one. version: of its weights; None if it has
    none."""

    def __init__(
        self,
        path: str,
        lora: LoraConfig | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens: int = MAX_TOKENS,
        exact: bool = False,
        opener: ImageOpener | None = None,
    ) -> None:
        """path: model.path; only its config is read, not its weights. lora: the run's config of adapters. dtype: of the
        engine's weights. tokenizer, max_tokens, exact, opener: as in Generator."""
        self.path, self.lora, self.dtype, self.device = path, lora, dtype, torch.device(device)
        self.tokenizer, self.max_tokens, self.exact, self.opener = tokenizer, max_tokens, exact, opener
        self.version: int | None = None
        self._had: int | None = None  # the last version that was confirmed; kept while asleep
        self._weights: LoadedWeights | None = None
        self._generator: Generator | None = None

    def host(self) -> str:
        """This host's address."""
        return host_address()

    def devices(self) -> list[str]:
        """UUIDs of the CUDA devices that this process sees, its own first."""
        return device_memory.devices(self.device)

    def torch_version(self) -> str:
        """The version of torch that receives weights."""
        return str(torch.__version__)

    def generate(
        self, requests: Sequence[Request], proceed: Callable[[], bool] | None = None
    ) -> list[list[Completion]]:
        """See Generator.generate. SyncError if there are no weights."""
        flight.enter("generate")
        return self._loaded_generator().generate(requests, proceed)

    def advance(self, requests: Mapping[int, Request], seconds: float) -> tuple[Numbered, int]:
        """See Generator.advance. SyncError if there are no weights."""
        flight.enter("generate")
        return self._loaded_generator().advance(requests, seconds)

    def end(self) -> Numbered:
        """See Generator.end."""
        return {} if self._generator is None else self._generator.end()

    def receive(self, ticket: Ticket, version: int, keep: bool = True) -> None:
        """Receive the weights of a version. SyncError if the sync fails; the engine then has no weights. keep: whether
        unfinished requests continue with the new weights; otherwise they start again."""
        flight.enter("sync")
        filled = self._weights is not None and not self._weights.asleep
        base = self.lora is None or not self.lora.on or filled
        with Delivery(ticket, version, has=self._had, base=base, holds=self._had if filled else None) as delivery:
            for part in delivery.parts():
                self.version = self._had = None
                try:
                    self._take(part)
                except BaseException:  # the weights are partly new, so the base of the next adapter would be wrong
                    self._weights = self._generator = None
                    raise
        assert self._weights is not None, "a sync without a part"
        if self._generator is None:
            self._generator = Generator(
                self._weights.model, version, self.tokenizer, self.max_tokens, self.exact, opener=self.opener
            )
        self._generator.renew(version, keep)
        self.version = self._had = version

    def sleep(self) -> None:
        """Free weights and cache. The next sync brings all weights."""
        if self._weights is not None and self._generator is not None:
            self._generator.drop_cache()
            self._weights.sleep()
            self.version = None

    def _loaded_generator(self) -> Generator:
        if self._generator is None or self.version is None:
            asleep = self._weights is not None and self._weights.asleep
            why = "it sleeps" if asleep else "none were synced yet, or the last sync failed"
            raise SyncError(f"this engine has no weights to sample with: {why}")
        return self._generator

    def _take(self, part: SyncPart) -> None:
        if part.kind != "adapter":
            if self._weights is None:
                self._weights = LoadedWeights(
                    self.path, self.lora, part.manifest, self.dtype, self.device, _format_of(part)
                )
            self._weights.wake()
            self._weights.take_weights(part)
        elif self._weights is None:
            raise SyncError("received an adapter, but this engine has no base model for it")
        else:
            self._weights.take_adapter(part)


def engine_class(name: str) -> type[Standalone]:
    """The class of engines of this name: Standalone for `hf`, else a package's. UserError if it is none."""
    if name == "hf":
        return Standalone
    entry = plugin(name, "rollout.engine", ENGINES)
    if entry is None:
        raise UserError(
            f"rollout.engine: {name} is neither {', '.join(ENGINES)} nor an engine of an installed package. Name one "
            "of these, or install the package."
        )
    loaded = load_plugin(entry, "rollout.engine")
    if not (isinstance(loaded, type) and issubclass(loaded, Standalone)):
        raise UserError(
            f"rollout.engine: {name} is {entry.value}, which is not a subclass of weft.inference.standalone.Standalone."
        )
    return loaded


class LoadedWeights:
    """A model with storage, and the destination of each tensor of a sync. Adapters are merged in place, from a copy of
    the adapted weights (base), or kept separate from the base (lora.sampling)."""

    def __init__(
        self,
        path: str,
        lora: LoraConfig | None,
        manifest: Mapping[str, TensorHeader],
        dtype: torch.dtype,
        device: torch.device,
        form: Format | None = None,
    ) -> None:
        """manifest: of the sync that will fill the model; SyncError if it describes another model. form: of quantised
        weights in the manifest."""
        config = hf.without_noise(hf.read_config(path))
        self.model = hf.build_meta(config, dtype=dtype, attention=None)
        self.plan: LoraPlan | None = None if lora is None else plan_lora(self.model, lora)
        self.separate = lora is not None and samples_separate(lora)
        shapes = self._quantised(manifest, form)
        parts = dict[str, Tensor]()
        for name, shape in shapes.items():
            assert form is not None
            parts |= {name + end: part for end, part in parts_on_meta(form, shape).items()}
        sent = hf.runtime_names(self.model, manifest.keys() - parts.keys())
        for name in set(sent.values()) & hf.tied_parameters(self.model).keys():
            hf.untie(self.model, name)  # a tensor sent under a tied name was trained untied
        mappings = map_tensors(self.model, [name for name in manifest if name not in parts])
        self.mappings: list[TensorMapping] = [mapping for mapping in mappings if mapping.runtime not in shapes]
        self.mappings += [TensorMapping.identity(name, name, tuple(part.shape)) for name, part in parts.items()]
        check_manifest(manifest, {mapping.disk: mapping.shape for mapping in self.mappings})
        self._copied = self._untie_adapted()
        weights = separate(self.model, self.plan, shapes, form) if self.separate and self.plan is not None else {}
        materialize(self.model, device)
        self.device = device
        self.model.eval().requires_grad_(False)
        hf.rebuild_buffers(self.model)
        move_buffers(self.model, device)
        self.state = destinations(self.model, weights)
        self.base: dict[str, Tensor] = {}
        self._emptied: OffloadedTensors | None = None

    @property
    def asleep(self) -> bool:
        """Whether the weights' memory is freed."""
        return self._emptied is not None

    def sleep(self) -> None:
        """Free the weights."""
        if self._emptied is None:
            self._emptied, self.base = OffloadedTensors.free(self.model.parameters(), self.device), {}

    def wake(self) -> None:
        """Allocate the weights again, uninitialised."""
        if self._emptied is not None:
            self._emptied.restore()
            self._emptied = None

    def _quantised(self, manifest: Mapping[str, TensorHeader], form: Format | None) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every weight that is sent in quantised form. SyncError if the engine must merge adapters
        into it."""
        if form is None:
            return {}
        if not self.separate:
            raise SyncError(
                "the sync sends a quantised base, but this engine merges adapters. Set lora.sampling=separate"
            )
        state = self.model.state_dict()
        names = [name.removesuffix(CODES) for name in manifest if name.endswith(CODES)]
        return {name: tuple(state[name].shape) for name in names if name in state}

    def _untie_adapted(self) -> dict[str, str]:
        """Untie tied weights of which an adapter changes only one. Returns untied name -> name that it was tied to,
        from which take_weights() fills it."""
        tied = hf.tied_parameters(self.model)
        untied = () if self.plan is None else untied_for(self.model, self.plan, merged=not self.separate)
        for name in untied:
            hf.untie(self.model, name)
        return {name: tied[name] for name in untied}

    def take_weights(self, part: SyncPart) -> None:
        """Copy every tensor of a part to its destination, and finish the part."""
        mappings = {mapping.disk: mapping for mapping in self.mappings}

        def stored(name: str) -> NDArray[np.uint8]:
            tensor = mappings[name].to_disk(self._local_view(mappings[name]))
            return bytes_of(tensor.contiguous().cpu()).copy()

        for entry, data in part.tensors(stored if self.plan is None else None):
            flight.beat()
            mapping = mappings[entry.name]
            self._local_view(mapping)[...] = mapping.to_runtime(as_torch(entry, data), mapping.box)
        for name, owner in self._copied.items():
            self.state[name].copy_(self.state[owner])
        if self.plan is not None and not self.separate:
            self.base = {target.weight: self.state[target.weight].clone() for target in self.plan.targets}
        placed = (
            {name: _sum(mapping.to_disk(self._local_view(mapping))) for name, mapping in mappings.items()}
            if part.verify
            else None
        )
        part.finish(placed)

    def take_adapter(self, part: SyncPart) -> None:
        """Set adapted weights to W + s B A, with W from the base, or set adapters, and fully trained modules, to the
        received tensors; finish the part."""
        plan, stored, values = self.plan, self._adapter_names(), dict[str, Tensor]()
        assert plan is not None
        shapes = {name: shape for target in plan.targets for name, shape in plan.tensors(target).items()}
        shapes |= {name: tuple(self.state[name].shape) for name in self.state if plan.trains(name)}
        check_manifest(part.manifest, {file: shapes[name] for file, name in stored.items()})
        for entry, data in part.tensors():
            values[stored[entry.name]] = as_torch(entry, data).to(self.device, copy=True)
        for name in values.keys() & self.state.keys():
            self.state[name].copy_(values[name])
        if self.separate:
            keep_norms(self.model)
        else:
            for target in plan.targets:
                self.state[target.weight].copy_(self._merged(plan, target, values))
        part.finish(self._read_adapter(plan, stored, values) if part.verify else None)

    def _adapter_names(self) -> dict[str, str]:
        """Name in a sync -> name in the trainer's model, for all trained tensors."""
        assert self.plan is not None, "received an adapter, but this engine was opened without one"
        matrices = [name for target in self.plan.targets for name in self.plan.tensors(target)]
        trained = [name for name in self.state if self.plan.trains(name)]
        return {file: name for name, file in file_names([*matrices, *trained]).items()}

    def _read_adapter(self, plan: LoraPlan, stored: Mapping[str, str], values: Mapping[str, Tensor]) -> dict[str, int]:
        """Checksums of the adapter's tensors. SyncError if a tensor of the model is not the received one in its dtype,
        or a merged weight is not its base with the adapter."""
        for name in values.keys() & self.state.keys():
            if not torch.equal(self.state[name], values[name].to(self.state[name].dtype)):
                raise SyncError(f"{name} differs from the received tensor")
        for target in () if self.separate else plan.targets:
            if not torch.equal(self.state[target.weight], self._merged(plan, target, values)):
                raise SyncError(f"{target.weight} differs from its base with the merged adapter")
        return {file: _sum(values[name]) for file, name in stored.items()}

    def _merged(self, plan: LoraPlan, target: Target, values: Mapping[str, Tensor]) -> Tensor:
        matrices = {name: values[name].float() for name in plan.tensors(target)}
        weight = self.base[target.weight].to(torch.float32, copy=True)
        return add_delta(weight, target, plan, matrices).to(self.model.dtype)

    def _local_view(self, mapping: TensorMapping) -> Tensor:
        target = self.state[mapping.runtime]
        return target[mapping.box.within(Box.from_shape(tuple(target.shape)))]


def _format_of(part: SyncPart) -> Format | None:
    """The format of the quantised weights of a part. SyncError if this version does not know the name."""
    if part.form is None:
        return None
    name, *block = part.form
    if name not in FORMATS:
        raise SyncError(f"the sync sends a base in format {name!r:.40}, which this engine does not know")
    form, sizes = FORMATS[name], (block[0], block[1])
    return form if form.block == sizes else replace(form, block=sizes)  # fp8 in blocks of the files' size


def _sum(tensor: Tensor) -> int:
    tensor = tensor.contiguous().cpu()
    return checksum(bytes_of(tensor))
