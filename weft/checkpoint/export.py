"""Writes a sharded model as a HuggingFace model directory, which transformers, peft and vLLM load.

Names, shapes, dtypes and files are planned from the layout alone. Then every rank writes its boxes into the shared
files (ranges.py): nothing is gathered, and no rank allocates more than a slice of its shards.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PretrainedConfig

from weft.checkpoint.retention import commit
from weft.engine.build import BuiltModel
from weft.engine.engine import Engine
from weft.errors import StorageError
from weft.models import hf
from weft.models.train_module import ScoreHead
from weft.parallel.shards.adapter_files import CONFIG, WEIGHTS, file_names, to_json
from weft.parallel.shards.boxes import Box, ReadableShard, Shard, overlap, slabs
from weft.parallel.shards.cuts import full_shape, module_shards, shards_of
from weft.parallel.shards.digests import BoxDigest, write_digests
from weft.parallel.shards.layout import TensorMapping
from weft.parallel.shards.ranges import RangeWriter, join_seams
from weft.parallel.shards.safetensors_files import FileLayout, create, lay_out
from weft.parallel.shards.source import INDEX, TensorSource

# Files of the source that describe the tokenizer and how to generate; weights and config come from the model.
_COMPANIONS = (
    "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*", "*.model", "*.tiktoken", "tekken.json", "normalizer.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_SHARD_BYTES = 5 * 10**9
_SLICE_ELEMENTS = 1 << 23  # elements that are cast and written at once


class HasModel(Protocol):
    """An Engine, or a model on meta: only names and shapes are read."""

    @property
    def built(self) -> BuiltModel: ...


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor that is in the source's files but not in the model; a ReadableShard. writes: whether this rank writes
    it."""

    source: TensorSource
    name: str
    writes: bool

    @property
    def box(self) -> Box:
        return Box.from_shape(self.source.shape(self.name))

    def read(self, box: Box) -> Tensor:
        return self.source.read(self.name, box)

    def is_writer(self, number: int) -> bool:
        return self.writes


@dataclass(frozen=True)
class ExportPlan:
    """The files and tensors of a save. mappings: how parameters map to tensors in files. manifest: every tensor on
    meta. files: file name -> names of its tensors. source: folder with the tokenizer. config_name: file name of
    `config`. texts: further files, which replace the source's. drafts: tensors that are copied from the source's files,
    by name."""

    mappings: list[TensorMapping]
    manifest: dict[str, Tensor]
    files: dict[str, list[str]]
    index: dict[str, Any] | None
    config: dict[str, Any]
    source: Path | None
    config_name: str = "config.json"
    texts: Mapping[str, str] = field(default_factory=dict)
    drafts: Mapping[str, CopiedTensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.manifest.values())

    @cached_property
    def layouts(self) -> dict[str, FileLayout]:
        """The layout of each file. With it, no rank reads a header that another rank wrote."""
        return {file: lay_out({name: self.manifest[name] for name in names}) for file, names in self.files.items()}


@dataclass(frozen=True)
class ExportResult:
    """Result of write_export on one rank. bytes: bytes of tensors written. handed: the part of them in its seam file.
    digests: one per box, if requested."""

    bytes: int = 0
    handed: int = 0
    digests: Sequence[BoxDigest] = ()


def plan_export(engine: HasModel, dtype: torch.dtype | None = None, *, shard_bytes: int = _SHARD_BYTES) -> ExportPlan:
    """Names, shapes, dtypes and files of a save. Tied tensors are in it once, under the owner's name.

    dtype: of every floating-point parameter; None for the dtypes of the source's files. Persistent buffers (router
    biases) and draft layers, which are copied from the source, keep their dtypes. shard_bytes: size of the largest
    weight file; a larger tensor gets a separate file.
    """
    drafts, manifest = _drafts(engine), manifest_of(engine, dtype)
    usual = _most_common_dtype(manifest)
    for name, tensor in drafts.items():
        target_dtype = engine.built.source_dtypes.get(name, usual)  # quantised tensors are written as others are
        manifest[name] = torch.empty(tensor.box.size, dtype=target_dtype, device="meta")
    split = split_torch_state_dict_into_shards(manifest, max_shard_size=shard_bytes)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None
    files = {file: list(names) for file, names in split.filename_to_tensors.items()}
    built = engine.built
    mappings = [*built.mappings, *(TensorMapping.identity(name, name, t.box.size) for name, t in drafts.items())]
    return ExportPlan(mappings, manifest, files, index, _config(engine, manifest), built.source, drafts=drafts)


def _drafts(engine: HasModel) -> dict[str, CopiedTensor]:
    """The source's draft layers, if any, distributed over the engine's ranks."""
    load = engine.built.load
    if load is None:
        return {}
    rank, world = (engine.ranks.rank, engine.ranks.world) if isinstance(engine, Engine) else (0, 1)
    return {name: CopiedTensor(load.source, name, i % world == rank) for i, name in enumerate(load.drafts)}


def manifest_of(engine: HasModel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Checkpoint name -> meta tensor with the shape and dtype in the saved files. If the source's files lack a name
    (another prefix, the alias of a tied weight) or store it quantised, it gets the dtype of most of their tensors.
    Without files, every tensor keeps its dtype.
    """
    state = engine.built.tensors
    floats = {name: d for name, d in engine.built.source_dtypes.items() if d.is_floating_point}
    usual = Counter(floats.values()).most_common(1)
    out = {}
    for mapping in engine.built.mappings:
        tensor = state[mapping.runtime]
        target_dtype = tensor.dtype
        if tensor.is_floating_point():
            target_dtype = floats.get(mapping.disk, usual[0][0] if usual else tensor.dtype)
            if dtype is not None and isinstance(tensor, torch.nn.Parameter):
                target_dtype = dtype
        out[mapping.disk] = torch.empty(mapping.shape, dtype=target_dtype, device="meta")
    return out


def prepare_export(plan: ExportPlan, folder: Path) -> None:
    """Create weight files of the right size, their index, the config and the tokenizer; called by one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, layout in plan.layouts.items():
        create(folder / file, layout)
    if plan.index is not None:
        _write_json(folder / INDEX, plan.index)
    write_companion_files(plan, folder)


def write_companion_files(plan: ExportPlan, folder: Path) -> None:
    """Write the files other than weights: the config, the tokenizer and the generation config."""
    _write_json(folder / plan.config_name, plan.config)
    for name, text in plan.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    if plan.source is not None:
        copy_companions(plan.source, folder)


def write_export(
    plan: ExportPlan,
    shards: Mapping[str, Sequence[ReadableShard]],
    folder: Path,
    *,
    seams: Path | None = None,
    digests: bool = False,
) -> ExportResult:
    """Write this rank's boxes into the prepared files and fsync the files.

    shards: by the model's names, on any device; tensors without shards are not written. seams: the rank's seam file;
    None for a single rank. digests: whether to compute digests. No collectives, so a thread can write a copy during
    training.
    """
    by_file = {name: file for file, names in plan.files.items() for name in names}
    written, box_digests = 0, list[BoxDigest]()
    with RangeWriter(folder, seams) as writer, ThreadPoolExecutor(1) as thread:

        def write(mapping: TensorMapping, part: Box, box: Box, values: Tensor) -> None:
            file, name, disk_box = by_file[mapping.disk], mapping.disk, mapping.disk_box(box)
            writer.write(file, plan.layouts[file].entries[name], mapping.disk_box(part), disk_box, values)
            if digests:
                box_digests.append(BoxDigest.compute(file, name, disk_box, values))

        pending: Future[None] | None = None  # a slice is written while the next is cast
        for mapping, part, box, values in _own_slices(plan, shards):
            if pending is not None:
                pending.result()
            pending = thread.submit(write, mapping, part, box, values)
            written += values.nbytes
        if pending is not None:
            pending.result()
    return ExportResult(written, writer.handed, box_digests)


def join_export(plan: ExportPlan, folder: Path, seams: Sequence[Path], rank: int) -> int:
    """Join the seams in this rank's share of the files. Returns the number of bytes joined. seams: the seam file of
    each rank."""
    files = [file for number, file in enumerate(plan.files) if seams and number % len(seams) == rank]
    return sum(join_seams(folder, file, seams) for file in files)


def check_sizes(plan: ExportPlan, folder: Path) -> None:
    """Raise StorageError if the size of a weight file is not the planned one."""
    for file, layout in plan.layouts.items():
        size = (folder / file).stat().st_size
        if size != layout.size:
            raise StorageError(f"{folder / file} has {size:,} bytes on disk, but {layout.size:,} were written")


def export_alone(plan: ExportPlan, shards: Mapping[str, Sequence[Shard]], folder: Path) -> None:
    """Write the whole export, with digests, from one process that holds all tensors."""
    prepare_export(plan, folder)
    exported = write_export(plan, shards, folder, digests=True)
    assert exported.bytes == plan.bytes, f"{exported.bytes} of {plan.bytes} bytes written"
    check_sizes(plan, folder)
    write_digests(folder, exported.digests)


class FullTensors(Mapping[str, Sequence[Shard]]):
    """Tensors for write_export, computed on access. The last tensor is cached, because consecutive mappings read the
    same tensor."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Tensor]) -> None:
        self._names, self._make = names, make
        self._last: tuple[str, list[Shard]] | None = None

    def __getitem__(self, name: str) -> list[Shard]:
        if self._last is None or self._last[0] != name:
            self._last = None  # free it first: memory holds one tensor
            values = self._make(name)
            self._last = name, [Shard(Box.from_shape(tuple(values.shape)), values)]
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _own_slices(
    plan: ExportPlan, shards: Mapping[str, Sequence[ReadableShard]]
) -> Iterator[tuple[TensorMapping, Box, Box, Tensor]]:
    """The boxes that this rank writes: (mapping, the rank's part of the mapping, a box of that part, its values in the
    file's dtype)."""
    numbers = {name: number for number, name in enumerate(shards)}
    for mapping in plan.mappings:
        draft = plan.drafts.get(mapping.runtime)
        for shard in shards.get(mapping.runtime, ()) if draft is None else (draft,):
            part = overlap(mapping.box, shard.box)
            if part is None or not shard.is_writer(numbers.get(mapping.runtime, 0)):
                continue
            for box in slabs(part, _SLICE_ELEMENTS):
                values = mapping.to_disk(shard.read(box))
                yield mapping, part, box, values.to(plan.manifest[mapping.disk].dtype).cpu()


def save_huggingface(engine: Engine, target: Path, *, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write the model as a HuggingFace directory, atomically; collective."""
    save_planned(engine, plan_export(engine, shard_bytes=shard_bytes), written_shards(engine), target)


def written_shards(engine: Engine) -> dict[str, list[Shard]]:
    """This rank's shards of the tensors that its pipeline stage writes, by the model's names."""
    shards, tied_copies = module_shards(engine.module, engine.divided.cuts, engine.mesh.stage_rank), engine.tied_copies
    return {name: tensor_shards for name, tensor_shards in shards.items() if name not in tied_copies}


def save_planned(engine: Engine, plan: ExportPlan, shards: Mapping[str, Sequence[Shard]], target: Path) -> None:
    """Write a plan atomically; each rank writes its shards. Collective."""
    ranks, partial = engine.ranks, target.with_name(target.name + ".partial")
    handed = target.with_name(target.name + ".ranks")  # files through which ranks exchange seams
    seams = [handed / f"seams-{rank:05d}" for rank in range(ranks.world)] if ranks.world > 1 else []
    if ranks.is_first:
        for leftover in (partial, handed):  # remains of a killed save
            shutil.rmtree(leftover, ignore_errors=True)
        prepare_export(plan, partial)
        if seams:
            handed.mkdir()
    _wait_for_all(engine)
    exported = write_export(plan, shards, partial, seams=seams[ranks.rank] if seams else None)
    _wait_for_all(engine)
    counts = torch.tensor([exported.bytes, exported.handed, join_export(plan, partial, seams, ranks.rank)])
    if ranks.world > 1:
        dist.all_reduce(counts, group=ranks.group)
    require_complete(plan, *counts.tolist())
    if ranks.is_first:
        shutil.rmtree(handed, ignore_errors=True)
        check_sizes(plan, partial)
        commit(partial, target)
    _wait_for_all(engine)


def require_complete(plan: ExportPlan, written: int, handed: int, joined: int) -> None:
    """Assert that all ranks together wrote every byte of the plan and that every seam byte was joined."""
    assert written == plan.bytes, f"{written} of {plan.bytes} bytes of weights written"
    assert joined == handed, f"{joined} of {handed} bytes of seams joined"


def _wait_for_all(engine: Engine) -> None:
    if engine.ranks.world > 1:
        dist.barrier(engine.ranks.group)


def _config(engine: HasModel, manifest: Mapping[str, Tensor]) -> dict[str, Any]:
    """The source's config.json, unchanged except for the keys that describe the written weights.

    config.save_pretrained is not used: it renames keys that older readers need (rope_theta, torch_dtype), and it
    raises, at the end of a training run, if an old config.json holds generation settings.
    """
    raw, _ = PretrainedConfig.get_config_dict(engine.built.path)
    raw.pop("_commit_hash", None)
    model = engine.built.module.hf_model
    raw["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    if isinstance(engine.built.module.head, ScoreHead):
        raw |= hf.label_names(engine.built.config)
        text, pad = raw.get("text_config", raw), engine.built.config.get_text_config().pad_token_id
        if text.get("pad_token_id") is None and pad is not None:
            text["pad_token_id"] = pad
    if engine.built.config.tie_word_embeddings and not hf.tied_parameters(model):
        # The source's head differed from its embedding, so weft loaded and trained them untied.
        raw["tie_word_embeddings"] = False
    if "torch_dtype" not in raw:
        raw["dtype"] = None
    _describe_weights(raw, str(_most_common_dtype(manifest)).removeprefix("torch."))
    return dict(raw)


def _most_common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of most elements."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.numel()
    return sizes.most_common(1)[0][0]


def _describe_weights(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype of the written weights in the config and in each sub-config, under the key that each uses. Remove
    quantisation configs, because the written weights are not quantised."""
    config.pop("quantization_config", None)
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            config[key] = dtype
        elif isinstance(value, dict) and "model_type" in value:
            _describe_weights(value, dtype)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template and generation config unchanged; existing files stay."""
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            copy = target / file.relative_to(source)
            if file.is_file() and not copy.exists():
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


# ---------------------------------------------------------------- adapters, as a folder that peft loads


def plan_adapter(engine: Engine, dtype: torch.dtype | None = None) -> ExportPlan:
    """Names, shapes and dtypes of a saved adapter. dtype: None for the dtype of the master weights."""
    lora, built = engine.lora, engine.built
    assert lora is not None
    cuts = engine.divided.cuts
    trained = {
        name: torch.empty(full_shape(name, p, cuts), dtype=dtype or p.dtype, device="meta")
        for name, p in engine.whole_parameters().items()
        if lora.trains(name)
    }
    config = built.adapter_config or to_json(lora, built.path, built.module)
    return plan_files(trained, config, built.source)


def plan_files(tensors: Mapping[str, Tensor], config: dict[str, Any], source: Path | None) -> ExportPlan:
    """The files of a saved adapter. tensors: on meta, by the model's names, in file order."""
    mappings, manifest = [], {}
    for name, stored in file_names(tensors).items():
        mappings.append(TensorMapping.identity(stored, name, tuple(tensors[name].shape)))
        manifest[stored] = tensors[name]
    return ExportPlan(mappings, manifest, {WEIGHTS: list(manifest)}, None, config, source, CONFIG)


def adapter_shards(engine: Engine) -> dict[str, list[Shard]]:
    """This rank's shards of all trained parameters, by the model's names."""
    lora = engine.lora
    assert lora is not None
    cuts = engine.divided.cuts
    trained = [(name, p) for name, p in engine.module.named_parameters() if lora.trains(name)]
    return {name: shards_of(parameter, cuts.get(name)) for name, parameter in trained}


def save_adapter(engine: Engine, target: str | Path) -> None:
    """Write the adapter's folder, atomically; collective."""
    save_planned(engine, plan_adapter(engine), adapter_shards(engine), Path(target))
