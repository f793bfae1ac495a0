"""trainer_state/: the files that resuming needs in addition to the HuggingFace directory.

Each rank writes its shards into a file such as rank-00000.safetensors. state.json lists the boxes of tensors in each
file, so that any mesh can read them. No pickle: reading a checkpoint runs no code from it.

    weights/NAME              fp32 master weights and persistent buffers, each in its dtype in memory
    optimizer/KEY/NAME        moments; scalars such as AdamW's `step` are in state.json
    ema/NAME                  the average of the weights (optimizer.ema_decay)
    rng/...                   states of this rank's random number generators

If a rank has several boxes of a tensor (a fused projection that tp divides), it saves the second as NAME#1, and so on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.retention import STATE_FILE, TRAINER_STATE
from weft.config.coerce import MismatchError, coerce, describe
from weft.config.schema import ScheduleConfig
from weft.config.yaml12 import Node
from weft.engine.engine import Engine
from weft.engine.host import HostTensor
from weft.engine.optim.custom_optimizer import is_number
from weft.engine.optim.optimizer import counters, empty_state, parts_of_state, stepped_by, stepped_on_device
from weft.errors import UserError
from weft.files import read_object, regular_file, sha256
from weft.launch.summary import RunSummary, versions
from weft.parallel.shards.boxes import Box, Shard, overlap, shard_of
from weft.parallel.shards.cuts import AnyShardSpec, full_shape, shards_of, split
from weft.parallel.shards.safetensors_files import TensorFile, bytes_of, lay_out
from weft.strict_json import plain

# ---------------------------------------------------------------- the schema of state.json


@dataclass(frozen=True)
class _TensorSchema:
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _NumberSchema:
    value: bool | int | float
    dtype: str | None
    host: bool


@dataclass(frozen=True)
class _LossScaleSchema:
    scale: float
    good: int
    overflows: int


@dataclass(frozen=True)
class _DataSchema:
    documents: int
    digest: str


@dataclass(frozen=True)
class _ModelSchema:
    sha256: str


@dataclass(frozen=True)
class _BestSchema:
    kept: bool
    metric: str
    of: str
    value: float | None
    step: int
    mark: float | None
    waited: int
    exact: float


def _summary() -> dict[str, Any]:
    """The types of RunSummary.counts, whose lists and deques are lists in JSON."""
    hints = {name: hint for name, hint in get_type_hints(RunSummary).items() if name not in ("model", "data")}
    numbers = tuple[float | None, ...]
    return {f"summary.{n}": numbers if get_origin(hint) in (list, deque) else hint for n, hint in hints.items()}


# An engine's part: its tensors and scalars, and the boxes in each rank's file.
ENGINE: dict[str, Any] = {
    "id": str, "step": int, "mesh": dict[str, int], "mesh.world": int, "versions": dict[str, str | None],
    "tensors": dict[str, _TensorSchema], "scalars": dict[str, _NumberSchema], "loss_scale": _LossScaleSchema | None,
    "files": tuple[dict[str, Any], ...],
}  # fmt: skip
# The run's part, in the state.json of its first engine. A name with a question mark may be missing or empty.
RUN: dict[str, Any] = {
    "steps": int, "updates": int, "bad_in_a_row": int, "config": dict[str, dict[str, Any]],
    "config.schedule": ScheduleConfig, "config.optimizer.lr": float, "data": _DataSchema, "model": _ModelSchema,
    "seconds": dict[str, float], **_summary(), "evaluation?": _BestSchema, "read?": dict[str, str],
}  # fmt: skip
RL_RUN: dict[str, Any] = {**RUN, "rollout": int, "taken": int, "empty_in_a_row": int, "replayed": bool}

_FROM_ONE = ("steps", "mesh.world")


def find_problem(content: Mapping[str, Any], parts: Mapping[str, Any]) -> str | None:
    """A description of the first missing or mistyped part; None if there is none. parts: dotted name -> type."""
    for name, hint in parts.items():
        value: Any = content
        for key in name.removesuffix("?").split("."):
            value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
        if name.endswith("?") and value in (_MISSING, {}):
            continue
        if value is _MISSING:
            return f"it lacks {name}"
        if hint is int and type(value) is int and value < (name in _FROM_ONE):
            return f"{name} is {value}"
        try:
            coerce(Node(value, name), hint)
        except MismatchError as error:
            return f"{name.removesuffix('?')} must be {describe(hint)}{': ' * bool(str(error))}{error}"
    return None


_MISSING = object()


# ---------------------------------------------------------------- what is saved

T = TypeVar("T")
FORMAT = 2
WEIGHTS, OPTIMIZER, EMA, RNG, GROUPS = "weights/", "optimizer/", "ema/", "rng/", "groups/"


@dataclass(frozen=True, slots=True)
class StateShard:
    """This rank's part of a tensor. shape: of the full tensor. local: the rank's elements, not copied. writes: whether
    this rank saves it; one of the replicas does."""

    shape: tuple[int, ...]
    box: Box
    local: Tensor
    writes: bool


@dataclass(frozen=True, slots=True)
class RankFile:
    """The entry of a rank's file in state.json. boxes: tensor -> (start, size)."""

    name: str
    bytes: int
    sha256: str
    boxes: Mapping[str, tuple[Sequence[int], Sequence[int]]]


def find_state_shards(engine: Engine) -> dict[str, StateShard]:
    """Every tensor of the trainer state, box by box; tied weights only once. If a rank has several boxes of a tensor,
    the name of the second ends in #1.

    Every rank has a box, which may be empty, of each tensor of its stage. With adapters, only trained tensors are
    saved; the base is read from model.path again.
    """
    assert engine.optimizer is not None, "this engine was opened for inference"
    engine.require_awake("parameters", "optimizer")
    result, states = dict[str, StateShard](), engine.optimizer.state
    averages, cuts = {} if engine.ema is None else engine.ema.shards, engine.divided.cuts
    tied_copies, among = engine.tied_copies, engine.mesh.stage_rank
    for number, (name, parameter) in enumerate(engine.module.named_parameters()):
        if engine.lora is not None and not parameter.requires_grad:
            continue
        spec = _SaveSpec(cuts.get(name), number, among, writes=name not in tied_copies)
        result |= _numbered(WEIGHTS + name, _parts(parameter, spec))
        if parameter in averages:
            result |= _numbered(EMA + name, _parts_like(parameter, averages[parameter], spec))
        for key, value in states.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.ndim:
                parts = _placed_parts(engine, parameter, key, spec) or _parts_like(parameter, value, spec)
                result |= _numbered(f"{OPTIMIZER}{key}/{name}", parts)
    persistent = engine.module.state_dict().keys() if engine.lora is None else ()
    for number, (name, buffer) in enumerate(engine.module.named_buffers()):
        if name in persistent:
            spec = _SaveSpec(None, number, among, writes=name not in tied_copies)
            result |= _numbered(WEIGHTS + name, _parts(buffer, spec))
    return result


def tensor_of(entry: str) -> str:
    """The tensor's name, without the #1 of a further box."""
    return entry.partition("#")[0]


def parameter_of(entry: str) -> str:
    """The model's name of the parameter or buffer of an entry of WEIGHTS, EMA or OPTIMIZER."""
    prefix, _, suffix = tensor_of(entry).partition("/")
    return suffix.partition("/")[2] if prefix + "/" == OPTIMIZER else suffix


def _numbered(name: str, parts: Sequence[StateShard]) -> dict[str, StateShard]:
    return {f"{name}#{number}" if number else name: part for number, part in enumerate(parts)}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Alias of a tied weight -> the name under which it is saved."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    state = module.state_dict(keep_vars=True)
    return {name: first[id(t)] for name, t in state.items() if id(t) in first and first[id(t)] != name}


@dataclass(frozen=True, slots=True)
class _SaveSpec:
    """How a tensor is divided and saved. cut: how tp divides it. number: its index; of the ranks with the same box, the
    index selects the writer. among: see shard_of. writes: whether this pipeline stage saves it."""

    cut: AnyShardSpec | None
    number: int
    among: tuple[int, int]
    writes: bool


def _parts(tensor: Tensor, spec: _SaveSpec) -> list[StateShard]:
    shape = tuple(tensor.shape) if spec.cut is None else spec.cut.shape
    shards = shards_of(tensor, spec.cut, spec.among)
    return [
        StateShard(shape, shard.box, shard.values, spec.writes and is_writer(shard, spec.number)) for shard in shards
    ]


def _parts_like(parameter: Tensor, value: Tensor, spec: _SaveSpec) -> list[StateShard]:
    """Parts of a state tensor of a parameter. `value` is a DTensor, a plain tensor of the shard's shape, or a tensor of
    another shape, which is equal on every rank."""
    if isinstance(value, DTensor):
        return _parts(value, spec if value.shape == parameter.shape else replace(spec, cut=None))
    if value.shape != shard_of(parameter).values.shape:
        return _parts(value, replace(spec, cut=None))
    values_by_box = [value] if spec.cut is None else [values for _, values in split(parameter, value, spec.cut)]
    return [replace(part, local=values) for part, values in zip(_parts(parameter, spec), values_by_box, strict=True)]


def _placed_parts(engine: Engine, parameter: nn.Parameter, key: str, spec: _SaveSpec) -> list[StateShard]:
    """Parts of a state tensor whose layout the optimizer defines; [] for other state tensors."""
    assert engine.optimizer is not None
    shape, parts = parts_of_state(engine.optimizer, parameter, key) or ((), [])
    return [StateShard(shape, p.box, p.values, spec.writes and p.writes and p.box.numel > 0) for p in parts]


def is_writer(shard: Shard, number: int) -> bool:
    """Whether this rank writes its box. Ranks with the same box take turns: `number` is the tensor's index."""
    return shard.box.numel > 0 and shard.is_writer(number)


def find_scalars(engine: Engine) -> dict[str, dict[str, Any]]:
    """The optimizer's scalars by name, with their kinds: AdamW's `step` of each parameter."""
    assert engine.optimizer is not None
    scalars, states = {}, engine.optimizer.state
    for name, parameter in engine.module.named_parameters():
        for key, value in states.get(parameter, {}).items():
            if is_number(value):
                scalars[f"{OPTIMIZER}{key}/{name}"] = _described(value)
    for number, (group, keys) in counters(engine.optimizer).items():
        for key in keys:
            if key in group:
                scalars[f"{GROUPS}{number}/{key}"] = _described(group[key])
    return scalars


def _described(number: Any) -> dict[str, Any]:
    """A scalar and its kind: a Python number (dtype None), or a tensor on the host or the device."""
    if not isinstance(number, Tensor):
        return {"value": number, "dtype": None, "host": True}
    dtype, host = str(number.dtype).removeprefix("torch."), number.device.type == "cpu"
    return {"value": number.item(), "dtype": dtype, "host": host}


# ---------------------------------------------------------------- writing


def rank_file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_rank_file(
    folder: Path, rank: int, save_id: str, tensors: Mapping[str, HostTensor], boxes: Mapping[str, Box]
) -> RankFile:
    """Write one rank's file to disk. boxes: the box of each tensor that is part of a full tensor.

    The checksum is computed from the bytes in memory, so that it detects corruption on the way to disk.
    """
    path, digest = folder / rank_file_name(rank), hashlib.sha256()
    layout = lay_out({name: tensor.meta() for name, tensor in tensors.items()}, {"save": save_id, "rank": str(rank)})
    with path.open("wb") as stream:
        stream.write(layout.header)
        digest.update(layout.header)
        for piece in (piece for name in layout.entries for piece in tensors[name].pieces):
            stream.write(bytes_of(piece).data)
            digest.update(bytes_of(piece).data)
        stream.flush()
        os.fsync(stream.fileno())
    listed = {name: (list(box.start), list(box.size)) for name, box in boxes.items()}
    return RankFile(path.name, layout.size, digest.hexdigest(), listed)


def check_file(folder: Path, file: RankFile, *, contents: bool = True) -> None:
    """Compare the size of a rank's file and, with `contents`, its checksum with state.json. Raises DamagedError if they
    differ."""
    path = folder / file.name
    if not os.path.lexists(path):
        raise DamagedError(f"{file.name} is missing")
    raise_as_damage(lambda: regular_file(path, "a rank's file"))
    if path.stat().st_size != file.bytes:
        raise DamagedError(f"{file.name} has {path.stat().st_size:,} bytes instead of {file.bytes:,}")
    if contents and sha256(path) != file.sha256:
        raise DamagedError(f"{file.name} was changed after it was written: its checksum differs")


def write_state(folder: Path, content: Mapping[str, Any], files: Sequence[RankFile]) -> None:
    """Write state.json, as the last file. content: everything but format, versions, files and checksum."""
    state = {"format": FORMAT, "versions": versions(), **content, "files": [asdict(file) for file in files]}
    state = json.loads(json.dumps(plain(state)))  # as it will be read: tuples become lists
    with (folder / STATE_FILE).open("w", encoding="utf-8") as stream:
        json.dump({**state, "checksum": _checksum(state)}, stream, indent=1, allow_nan=False)
        stream.flush()
        os.fsync(stream.fileno())


def _checksum(state: Mapping[str, Any]) -> str:
    text = json.dumps(state, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


# ---------------------------------------------------------------- reading


class DamagedError(Exception):
    """weft cannot resume from this checkpoint. The message is the reason, without the checkpoint's name."""


@dataclass(frozen=True)
class TrainerState:
    """A trainer_state/ folder whose state.json was read and validated."""

    folder: Path
    content: dict[str, Any]
    files: tuple[RankFile, ...]

    @property
    def checkpoint(self) -> Path:
        return self.folder.parent

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.content["step"])

    @property
    def world(self) -> int:
        """Number of ranks of the run that wrote it."""
        return int(self.content["mesh"]["world"])


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer state of a checkpoint, after validating state.json and the size and header of every rank's file.
    Raises DamagedError."""
    folder = checkpoint / TRAINER_STATE
    if not folder.is_dir():
        raise DamagedError("it has weights, but no trainer state (checkpoint.trainer_state)")
    content = _read_json(folder / STATE_FILE)
    check_schema(content, ENGINE)
    for name, described in (content["tensors"] | content["scalars"]).items():
        if described["dtype"] is not None and not isinstance(getattr(torch, described["dtype"], None), torch.dtype):
            raise DamagedError(f"{STATE_FILE}: {name} has the dtype {described['dtype']!r}, which torch lacks")
    if len(content["files"]) != content["mesh"]["world"]:
        raise DamagedError(f"{STATE_FILE} lists {len(content['files'])} files for {content['mesh']['world']} ranks")
    files = tuple(_rank_file(rank, fields, content["tensors"]) for rank, fields in enumerate(content["files"]))
    state = TrainerState(folder, content, files)
    for rank, file in enumerate(files):
        _check_file(state, rank, file)
    return state


def check_schema(content: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Raise DamagedError if a part of state.json is missing or mistyped. parts: dotted name -> type."""
    problem = find_problem(content, parts)
    if problem is not None:
        raise DamagedError(f"{STATE_FILE} does not fit this command: {problem}")


def raise_as_damage(function: Callable[[], T]) -> T:
    """The result of a function that reads a checkpoint. Its UserErrors become DamagedErrors."""
    try:
        return function()
    except UserError as error:
        raise DamagedError(str(error).rstrip(".")) from error


def _read_json(path: Path) -> dict[str, Any]:
    content = raise_as_damage(lambda: read_object(path, "the state of a trainer"))
    if "format" not in content:
        raise DamagedError(f"{path.name} is not a trainer state")
    if content["format"] != FORMAT:
        raise DamagedError(f"{path.name} has format {content['format']!r}; this version of weft reads {FORMAT}")
    checksum = content.pop("checksum", None)
    try:
        matches = checksum == _checksum(content)
    except ValueError:  # NaN, which weft never writes
        matches = False
    if not matches:
        raise DamagedError(f"{path.name} was changed after it was written: its checksum differs")
    return content


def _rank_file(rank: int, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> RankFile:
    types = {"name": str, "bytes": int, "sha256": str, "boxes": dict}
    if {name: type(value) for name, value in fields.items()} != types or fields["name"] != rank_file_name(rank):
        raise DamagedError(f"{STATE_FILE} has no valid entry for the file of rank {rank}")
    for name, box in fields["boxes"].items():
        if tensor_of(name) not in tensors or not _is_box(box, tensors[tensor_of(name)]["shape"]):
            raise DamagedError(f"{STATE_FILE}: {box!r:.80} in the file of rank {rank} is not a valid box of {name}")
    return RankFile(**fields)


def _is_box(box: Any, shape: Sequence[int]) -> bool:
    """Whether `box` is a valid [start, size] within a tensor of this shape."""
    if not isinstance(box, list) or len(box) != 2:
        return False
    if not all(isinstance(ns, list) and len(ns) == len(shape) and all(type(n) is int for n in ns) for ns in box):
        return False
    return all(0 <= start <= start + size <= n for start, size, n in zip(*box, shape, strict=True))


def _check_file(state: TrainerState, rank: int, file: RankFile) -> None:
    """Check size and header. The header has the IDs of save and rank, so missing, truncated and swapped files are
    detected."""
    check_file(state.folder, file, contents=False)
    with raise_as_damage(lambda: TensorFile.open(state.folder / file.name)) as opened:
        stamp = (opened.metadata.get("save"), opened.metadata.get("rank"))
        if stamp != (state.content["id"], str(rank)):
            raise DamagedError(f"{file.name} is the file of another rank or another save")
        for name, (_, size) in file.boxes.items():
            described = state.content["tensors"][tensor_of(name)]
            entry, dtype = opened.entries.get(name), getattr(torch, described["dtype"])
            if entry is None or entry.shape != tuple(size) or entry.dtype != dtype:
                raise DamagedError(f"{file.name}: its box of {name} differs from the entry in {STATE_FILE}")


def check_contents(state: TrainerState, rank: int, world: int) -> None:
    """Compare this rank's share of the files with their checksums. The ranks together read each file once."""
    for file in state.files[rank::world]:
        check_file(state.folder, file)


def load_state(engine: Engine, state: TrainerState) -> int:
    """Load master weights, buffers and optimizer from files of any mesh. Each rank reads only its own boxes.

    Returns the number of bytes read. Raises DamagedError if the state is of another model, or lacks elements.
    """
    _make_optimizer_state(engine, state)
    parts, missing = find_state_shards(engine), engine.missing_params
    saved = {
        entry: described for entry, described in state.content["tensors"].items() if parameter_of(entry) not in missing
    }
    shapes = {tensor_of(name): list(part.shape) for name, part in parts.items()}
    unlike = sorted(shapes.keys() ^ saved.keys())
    unlike += [name for name in shapes.keys() & saved.keys() if shapes[name] != saved[name]["shape"]]
    if unlike:
        raise DamagedError(f"it is of another model: {len(unlike)} tensors differ, for example {', '.join(unlike[:3])}")
    filled = dict.fromkeys(parts, 0)
    read = sum(_fill(parts, filled, state.folder / file.name, file) for file in state.files)
    for name, part in parts.items():
        if filled[name] != part.box.numel:
            raise DamagedError(f"{name}: its files have {filled[name]:,} of {part.box.numel:,} elements")
    engine.weights_changed()
    if engine.loss_scale is not None and state.content["loss_scale"] is not None:
        engine.loss_scale.load_state_dict(state.content["loss_scale"])
    return read


@torch.no_grad()
def _fill(parts: Mapping[str, StateShard], filled: dict[str, int], path: Path, file: RankFile) -> int:
    local_names: dict[str, list[str]] = {}
    for name in parts:
        local_names.setdefault(tensor_of(name), []).append(name)
    reads = []
    for entry, (start, size) in file.boxes.items():
        box = Box(tuple(start), tuple(size))
        for name in local_names.get(tensor_of(entry), ()):  # empty for tensors of another stage
            shared = overlap(box, parts[name].box)
            if shared is not None:
                reads.append((entry, name, box, shared))
    if not reads:
        return 0
    with TensorFile.open(path) as opened:
        for entry, name, box, shared in reads:
            file_box = Box(tuple(a - b for a, b in zip(shared.start, box.start, strict=True)), shared.size)
            part = parts[name]
            part.local[shared.within(part.box)].copy_(opened.read(entry, file_box))
            filled[name] += shared.numel
        return opened.bytes_read


@torch.no_grad()
def _make_optimizer_state(engine: Engine, state: TrainerState) -> None:
    """Create zero moments for every parameter with saved moments, and restore scalars. torch creates moments only at
    the first step, which is too late to load them."""
    assert engine.optimizer is not None
    owner, content = dict(engine.module.named_parameters()), state.content
    on_device = stepped_on_device(engine.optimizer)
    missing = engine.missing_params
    for entry, described in content["tensors"].items():
        if entry.startswith(OPTIMIZER) and parameter_of(entry) not in missing:
            key, parameter = _split(entry, owner)
            optimizer, stepped = stepped_by(engine.optimizer, parameter)
            dtype, shape = getattr(torch, described["dtype"]), described["shape"]
            empty = empty_state(engine.optimizer, parameter, key)
            if empty is not None:
                optimizer.state[stepped][key] = empty
                continue
            empty = torch.zeros_like(stepped, dtype=dtype)
            if shape != list(full_shape(entry.rpartition("/")[2], parameter, engine.divided.cuts)):
                empty = torch.zeros(shape, dtype=dtype, device=stepped.device)
            optimizer.state[stepped][key] = empty
    groups = counters(engine.optimizer)
    for entry, number in content["scalars"].items():
        if entry.startswith(GROUPS):
            group_index, _, key = entry.removeprefix(GROUPS).partition("/")
            if group_index.isdecimal() and int(group_index) in groups:
                groups[int(group_index)][0][key] = _number(number, engine.storage, False)
            elif engine.pipeline is None:  # another pipeline stage may have it
                raise DamagedError(f"it is of another optimizer: there is no group {group_index}")
            continue
        if parameter_of(entry) in missing:
            continue
        key, parameter = _split(entry, owner)
        optimizer, stepped = stepped_by(engine.optimizer, parameter)
        optimizer.state[stepped][key] = _number(number, stepped.device, stepped in on_device)


def _number(described: Mapping[str, Any], device: torch.device, on_device: bool) -> Any:
    """A scalar of an optimizer's state, from its description by find_scalars."""
    if described["dtype"] is None:
        return described["value"]
    target = device if on_device or not described["host"] else torch.device("cpu")
    return torch.tensor(described["value"], dtype=getattr(torch, described["dtype"]), device=target)


def _split(entry: str, owner: Mapping[str, torch.nn.Parameter]) -> tuple[str, torch.nn.Parameter]:
    key, _, name = entry.removeprefix(OPTIMIZER).partition("/")
    if name not in owner:
        raise DamagedError(f"it is of another model: there is no parameter {name}")
    return key, owner[name]


def read_rng(state: TrainerState, rank: int) -> dict[str, Tensor]:
    """The saved states of the random number generators of `rank`."""
    with TensorFile.open(state.folder / state.files[rank].name) as file:
        return {name.removeprefix(RNG): file.read(name) for name in file.entries if name.startswith(RNG)}
