"""A torch.distributed.checkpoint directory as a TensorSource: weights and optimizer state under HuggingFace's names.

Trainers save `model.state_dict()`, unchanged or under prefixes (model., app.model.), together with optimizer state and
more. torchtitan's models have different names. The table TITAN maps them to HuggingFace's, as torchtitan's
state_dict_adapter.py does for llama3 and qwen3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weft.errors import UserError
from weft.parallel.shards.boxes import Box
from weft.parallel.shards.dcp import METADATA, DcpDirectory, open_dcp
from weft.parallel.shards.layout import map_tensors
from weft.parallel.shards.rank_files import holds_rank_files, open_rank_files
from weft.parallel.shards.safetensors_files import TensorEntry
from weft.parallel.shards.source import TensorSource

# Prefixes under which trainers save a model, and parts of names that wrappers insert.
_OWNERS = ("app", "model", "module", "state_dict", "model_state_dict", "actor", "policy")
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Names of other states saved with the model.
STATES = (
    "optimizer", "optimizers", "optim", "lr_scheduler", "lr_schedulers", "scheduler", "sched", "dataloader",
    "train_state", "trainer_state", "rng", "rng_state", "extra_state",
)  # fmt: skip

# torchtitan's name -> HuggingFace's name. {}: index of a layer. {e}: index of an expert; torchtitan stacks experts in
# one tensor.
TITAN = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.attention.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.qkv_linear.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.qkv_linear.wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.qkv_linear.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "layers.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.moe.router.gate.weight": "model.layers.{}.mlp.gate.weight",
    "layers.{}.moe.experts.w1": "model.layers.{}.mlp.experts.{e}.gate_proj.weight",
    "layers.{}.moe.experts.w2": "model.layers.{}.mlp.experts.{e}.down_proj.weight",
    "layers.{}.moe.experts.w3": "model.layers.{}.mlp.experts.{e}.up_proj.weight",
}
# model_type -> whether torchtitan's RoPE rotates pairs of neighbouring elements of q and k. HuggingFace's RoPE rotates
# element i with element i + width / 2.
TITAN_TURNS_PAIRS = {"llama": True, "qwen3": False, "qwen3_moe": False}


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor in HuggingFace's layout, as a view of a stored tensor. stored: name of the stored tensor. expert: index
    in the stored tensor's first dimension, which the view does not have; None for the full tensor. heads: number of
    heads, for q or k with rows in torchtitan's order; None for HuggingFace's order."""

    stored: str
    shape: tuple[int, ...]
    expert: int | None = None
    heads: int | None = None


@dataclass(frozen=True)
class TensorNaming:
    """The names of a directory's tensors. weights: HuggingFace's name -> view. trainer_names: stored name -> the same
    name without prefix and wrappers."""

    weights: Mapping[str, TensorView]
    trainer_names: Mapping[str, str]


def name_tensors(shapes: Mapping[str, tuple[int, ...]], model: PreTrainedModel, key: str, folder: str) -> TensorNaming:
    """Find a model's tensors among the stored tensors. Tensors with unknown names keep their names, and the caller
    refuses them. Raises UserError if the names are neither HuggingFace's nor torchtitan's.

    shapes: of the stored tensors. key, folder: for messages.
    """
    plain = {name: unwrapped(name) for name in shapes}
    prefix, titan = _best(set(plain.values()), _expected(model))
    if prefix is None:
        examples = ", ".join(sorted(plain)[:3])
        raise UserError(
            f"{key}: {folder} has no tensors with names of {type(model).__name__}, but {examples}, ... weft supports "
            "HuggingFace's names, and torchtitan's names of llama and qwen3. Convert it with its trainer (Megatron's: "
            "python -m verl.model_merger merge --backend megatron), and set model.path to the result."
        )
    trainer_names = {name: text.removeprefix(prefix) for name, text in plain.items() if not _is_state(text)}
    if not titan:
        return TensorNaming(
            {text: TensorView(name, shapes[name]) for name, text in trainer_names.items()}, trainer_names
        )
    weights: dict[str, TensorView] = {}
    for name, text in trainer_names.items():
        weights |= dict(_views(name, text, shapes[name], model))
    return TensorNaming(weights, trainer_names)


def unwrapped(name: str) -> str:
    """A name without the parts that torch.compile, FSDP and activation checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _expected(model: PreTrainedModel) -> set[str]:
    """All names of the model's tensors, in memory and in files, with and without the prefix of its base model."""
    names = {*model.state_dict(), *(mapping.disk for mapping in map_tensors(model, None))}
    return names | {name.removeprefix(f"{model.base_model_prefix}.") for name in names}


def _best(names: set[str], expected: set[str]) -> tuple[str | None, bool]:
    """(prefix of the model's names, whether they are torchtitan's names without it). This is the choice with the most
    known names."""
    best: tuple[int, str | None, bool] = (0, None, False)
    for prefix in sorted({prefix for name in names for prefix in _prefixes(name)}, key=len):
        inner = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        for titan in (False, True):
            count = sum((_abstract(name)[0] in TITAN) if titan else (name in expected) for name in inner)
            if count > best[0]:
                best = (count, prefix, titan)
    return best[1], best[2]


def _prefixes(name: str) -> Iterator[str]:
    prefix = ""
    yield prefix
    for part in name.split("."):
        if part not in _OWNERS:
            return
        prefix += f"{part}."
        yield prefix


def _is_state(name: str) -> bool:
    """Whether a name belongs to a state in STATES, such as the optimizer's."""
    return next((part for part in name.split(".") if part not in _OWNERS), "") in STATES


def _abstract(name: str) -> tuple[str, str]:
    """(name with {} in place of the layer's index, the index). The index is "" outside layers."""
    match = re.match(r"layers\.(\d+)\.", name)
    return (f"layers.{{}}.{name[match.end() :]}", match[1]) if match else (name, "")


def _views(
    name: str, trainer_name: str, shape: tuple[int, ...], model: PreTrainedModel
) -> Iterable[tuple[str, TensorView]]:
    """(HuggingFace's name, view) of each tensor that a tensor of torchtitan contains."""
    config = model.config.get_text_config()
    if config.model_type not in TITAN_TURNS_PAIRS:
        raise UserError(
            f"model.dcp_weights: these are torchtitan's names, which weft supports for "
            f"{', '.join(TITAN_TURNS_PAIRS)}, but not for {config.model_type}. Write it with torchtitan's "
            "checkpoint.last_save_in_hf, and set "
            "model.path."
        )
    abstract, layer = _abstract(trainer_name)
    hf_name = TITAN.get(abstract)
    if hf_name is None:
        yield trainer_name, TensorView(name, shape)
    elif "{e}" in hf_name:
        experts = getattr(config, "num_experts", 0)
        if not shape or shape[0] != experts:
            raise UserError(f"model.dcp_weights: {name} is {list(shape)}, and the model has {experts} experts.")
        for expert in range(experts):
            yield hf_name.format(layer, e=expert), TensorView(name, shape[1:], expert=expert)
    else:
        heads = {"wq": config.num_attention_heads, "wk": config.num_key_value_heads}.get(abstract.split(".")[-2])
        is_rotated = TITAN_TURNS_PAIRS[config.model_type] and heads is not None
        yield hf_name.format(layer), TensorView(name, shape, heads=heads if is_rotated else None)


# ---------------------------------------------------------------- the tensors

KEY = "model.dcp_weights"


class DcpTensors:
    """The tensors of a directory under HuggingFace's names, as `views` defines them."""

    def __init__(self, directory: DcpDirectory, views: Mapping[str, TensorView]) -> None:
        self._directory, self._views = directory, views
        self.path: Path = directory.folder / METADATA
        tensors = directory.tensors
        places = {name: tensors[view.stored].chunks for name, view in views.items()}
        begins = {name: chunks[0][1].begin if chunks else 0 for name, chunks in places.items()}
        self.entries = {
            n: TensorEntry(tensors[v.stored].dtype, v.shape, begins[n], begins[n]) for n, v in views.items()
        }

    @property
    def bytes_read(self) -> int:
        """Bytes of elements read from the directory so far."""
        return self._directory.bytes_read

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, on the CPU in the directory's dtype."""
        view = self._views[name]
        box = box or Box.from_shape(view.shape)
        if view.expert is not None:
            return self._directory.read(view.stored, Box((view.expert, *box.start), (1, *box.size)))[0]
        if view.heads is not None:
            return self._reordered(view.stored, view.shape[0] // view.heads, box)
        return self._directory.read(view.stored, box)

    def close(self) -> None:
        """Close the files."""
        self._directory.close()

    def _reordered(self, stored: str, width: int, box: Box) -> Tensor:
        """A box of q or k in HuggingFace's order of rows. width: rows of a head. In each head, the stored row 2 i + j
        is HuggingFace's row j width / 2 + i."""
        out = torch.empty(box.size, dtype=self._directory.tensors[stored].dtype)
        first, end = box.start[0], box.start[0] + box.size[0]
        for head in range(first // width, -(-end // width) if end > first else 0):
            rows = torch.arange(max(first, head * width), min(end, (head + 1) * width))
            inside = rows - head * width
            stored_rows = head * width + 2 * (inside % (width // 2)) + inside // (width // 2)
            low, high = int(stored_rows.min()), int(stored_rows.max()) + 1
            values = self._directory.read(stored, Box((low, *box.start[1:]), (high - low, *box.size[1:])))
            out[int(rows[0]) - first : int(rows[-1]) + 1 - first] = values[stored_rows - low]
        return out


@dataclass
class DcpSource(TensorSource):
    """A TensorSource over a DCP directory, with optimizer state. states: stored name of a weight -> key of its
    optimizer state (exp_avg) -> stored name of the state. numbered: whether the state is keyed by indices of parameters
    instead of names; an index does not identify the parameter."""

    directory: DcpDirectory = field(kw_only=True)
    views: Mapping[str, TensorView] = field(kw_only=True)
    states: Mapping[str, Mapping[str, str]] = field(kw_only=True)
    numbered: bool = field(kw_only=True)

    def has_state(self, name: str, key: str) -> bool:
        """Whether the optimizer has this state for a weight."""
        return name in self.views and key in self.states.get(self.views[name].stored, {})

    def moments(self, key: str) -> TensorSource:
        """A source of the optimizer's tensors with this key, under the names of their weights."""
        moment_views = {}
        for name, view in self.views.items():
            stored = self.states.get(view.stored, {}).get(key)
            if stored is not None and stored in self.directory.tensors:
                moment_views[name] = replace(view, stored=stored)
        return _source(self.directory, moment_views)

    def number(self, name: str, key: str) -> float | None:
        """A number in the optimizer's state of a weight. None if there is none."""
        stored = self.states.get(self.views[name].stored, {}).get(key)
        value = None if stored is None else self.directory.value(stored)
        return float(value) if isinstance(value, int | float) else None

    @property
    def keys(self) -> set[str]:
        """The keys of the optimizer's state: exp_avg, step, ..."""
        return {key for keys in self.states.values() for key in keys}


def open_weights(path: str, model: PreTrainedModel) -> DcpSource:
    """Open the directory of model.dcp_weights. Raises UserError if weft cannot read it, or it does not fit the
    model."""
    directory = (open_rank_files if holds_rank_files(Path(path).expanduser()) else open_dcp)(path, KEY)
    shapes = {name: stored.shape for name, stored in directory.tensors.items()}
    naming = name_tensors(shapes, model, KEY, str(directory.folder))
    for name, view in naming.weights.items():
        if view.heads is not None and (not view.shape or view.shape[0] % (2 * view.heads)):
            raise UserError(
                f"{KEY}: {view.stored} has the shape {list(view.shape)}, which does not fit {name} of this model."
            )
    states, numbered = _states(directory, naming)
    base = _source(directory, naming.weights)
    return DcpSource(
        base.folder, base.files, key=KEY, directory=directory, views=naming.weights, states=states, numbered=numbered
    )


def _source(directory: DcpDirectory, views: Mapping[str, TensorView]) -> TensorSource:
    return TensorSource(directory.folder, dict.fromkeys(views, DcpTensors(directory, views)), key=KEY)


def _states(directory: DcpDirectory, naming: TensorNaming) -> tuple[dict[str, dict[str, str]], bool]:
    """(states, numbered), as in DcpSource. A state's stored name is like optimizer.state.NAME.exp_avg, where NAME is a
    weight's name or the index of a parameter."""
    stored_as = {tensor: stored for stored, tensor in naming.trainer_names.items()}
    stored_as |= {unwrapped(stored): stored for stored in naming.trainer_names}
    states: dict[str, dict[str, str]] = {}
    numbered = False
    for name in (*directory.tensors, *directory.values):
        parts = unwrapped(name).split(".")
        if "state" not in parts or not any(part in STATES for part in parts[: parts.index("state")]):
            continue
        inner = parts[parts.index("state") + 1 :]
        numbered |= len(inner) == 2 and inner[0].isdecimal()
        weight = stored_as.get(".".join(inner[:-1]))
        if weight is None:
            continue
        shape, tensor = directory.tensors[weight].shape, directory.tensors.get(name)
        if tensor is not None and tensor.shape not in ((), shape):
            raise UserError(f"{KEY}: {name} is {list(tensor.shape)}, and its weight is {list(shape)}.")
        states.setdefault(weight, {})[inner[-1]] = name
    return states, numbered
