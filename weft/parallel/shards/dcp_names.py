"""HuggingFace's names for the tensors of a torch.distributed.checkpoint directory.

Trainers save `model.state_dict()`, unchanged or under prefixes (model., app.model.), together with optimizer state and
more. torchtitan's own models have other names; TITAN maps them, from torchtitan's state_dict_adapter.py of llama3 and
qwen3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from weft.errors import UserError
from weft.parallel.shards.layout import map_tensors

# Prefixes under which trainers save a model; parts that wrappers insert into names.
_OWNERS = ("app", "model", "module", "state_dict", "model_state_dict", "actor", "policy")
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Names of other states saved with the model.
STATES = (
    "optimizer", "optimizers", "optim", "lr_scheduler", "lr_schedulers", "scheduler", "sched", "dataloader",
    "train_state", "trainer_state", "rng", "rng_state", "extra_state",
)  # fmt: skip

# torchtitan's name -> HuggingFace's. {}: number of a layer; {e}: of an expert, which torchtitan stacks in one tensor.
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
# model_type -> whether torchtitan's RoPE rotates pairs of neighbouring elements of q and k, HuggingFace's halves.
TITAN_TURNS_PAIRS = {"llama": True, "qwen3": False, "qwen3_moe": False}


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor in HuggingFace's layout, taken from a stored one. stored: the stored tensor's name. expert: index in the
    stored tensor's first dimension, which this one lacks; None for the whole tensor. heads: number of heads of q or k
    whose rows are stored in another order; None if the order is the same."""

    stored: str
    shape: tuple[int, ...]
    expert: int | None = None
    heads: int | None = None


@dataclass(frozen=True)
class TensorNaming:
    """weights: HuggingFace's name -> view. own: stored name -> the trainer's own name, without prefix and wrappers."""

    weights: Mapping[str, TensorView]
    own: Mapping[str, str]


def name_tensors(shapes: Mapping[str, tuple[int, ...]], model: PreTrainedModel, key: str, folder: str) -> TensorNaming:
    """Find a model's tensors among stored ones. Tensors of unknown names keep them; the caller refuses them. Raises
    UserError if the names are neither HuggingFace's nor torchtitan's.

    shapes: of the stored tensors. key, folder: for messages.
    """
    plain = {name: unwrapped(name) for name in shapes}
    prefix, titan = _best(set(plain.values()), _expected(model))
    if prefix is None:
        few = ", ".join(sorted(plain)[:3])
        raise UserError(
            f"{key}: {folder} holds no tensors under names of {type(model).__name__}, but {few}, ...: weft reads "
            "HuggingFace's names, and torchtitan's of llama and qwen3. Convert it with its own trainer (Megatron's: "
            "python -m verl.model_merger merge --backend megatron), and set model.path to what comes of it."
        )
    own = {name: text.removeprefix(prefix) for name, text in plain.items() if not _is_state(text)}
    if not titan:
        return TensorNaming({text: TensorView(name, shapes[name]) for name, text in own.items()}, own)
    weights: dict[str, TensorView] = {}
    for name, text in own.items():
        weights |= dict(_views(name, text, shapes[name], model))
    return TensorNaming(weights, own)


def unwrapped(name: str) -> str:
    """A name without the parts that torch.compile, FSDP and activation checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _expected(model: PreTrainedModel) -> set[str]:
    """The model's names, in memory and in files, with and without the prefix of its base model."""
    names = {*model.state_dict(), *(mapping.disk for mapping in map_tensors(model, None))}
    return names | {name.removeprefix(f"{model.base_model_prefix}.") for name in names}


def _best(names: set[str], expected: set[str]) -> tuple[str | None, bool]:
    """(prefix of the model's names, whether the rest is torchtitan's): the choice that makes the most names known."""
    found: tuple[int, str | None, bool] = (0, None, False)
    for prefix in sorted({prefix for name in names for prefix in _prefixes(name)}, key=len):
        inner = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        for titan in (False, True):
            count = sum((_abstract(name)[0] in TITAN) if titan else (name in expected) for name in inner)
            if count > found[0]:
                found = (count, prefix, titan)
    return found[1], found[2]


def _prefixes(name: str) -> Iterator[str]:
    prefix = ""
    yield prefix
    for part in name.split("."):
        if part not in _OWNERS:
            return
        prefix += f"{part}."
        yield prefix


def _is_state(name: str) -> bool:
    """Whether a name belongs to the optimizer or another state saved with the model."""
    return next((part for part in name.split(".") if part not in _OWNERS), "") in STATES


def _abstract(name: str) -> tuple[str, str]:
    """(name with {} for the layer's number, that number)."""
    found = re.match(r"layers\.(\d+)\.", name)
    return (f"layers.{{}}.{name[found.end() :]}", found[1]) if found else (name, "")


def _views(name: str, own: str, shape: tuple[int, ...], model: PreTrainedModel) -> Iterable[tuple[str, TensorView]]:
    """(HuggingFace's name, view) of each tensor that one of torchtitan's holds."""
    config = model.config.get_text_config()
    if config.model_type not in TITAN_TURNS_PAIRS:
        raise UserError(
            f"model.weights: these are torchtitan's names, and weft knows how its {', '.join(TITAN_TURNS_PAIRS)} lie, "
            f"not its {config.model_type}. Write it with torchtitan's checkpoint.last_save_in_hf, and set model.path."
        )
    abstract, layer = _abstract(own)
    theirs = TITAN.get(abstract)
    if theirs is None:
        yield own, TensorView(name, shape)
    elif "{e}" in theirs:
        experts = getattr(config, "num_experts", 0)
        if not shape or shape[0] != experts:
            raise UserError(f"model.weights: {name} is {list(shape)}, and the model has {experts} experts.")
        for expert in range(experts):
            yield theirs.format(layer, e=expert), TensorView(name, shape[1:], expert=expert)
    else:
        heads = {"wq": config.num_attention_heads, "wk": config.num_key_value_heads}.get(abstract.split(".")[-2])
        turned = TITAN_TURNS_PAIRS[config.model_type] and heads is not None
        yield theirs.format(layer), TensorView(name, shape, heads=heads if turned else None)
