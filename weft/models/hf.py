"""Wraps transformers' internals. Only this file, hf_processor.py, hf_video.py and hf_template.py use them;
tests/models/test_hf_contract.py checks their signatures.

Internal symbols used, all checked on transformers 5.17 to 5.19:
- modeling_utils.AttentionInterface.register (masking_utils makes no mask for a name without a mask function)
- PreTrainedModel._from_config, .all_tied_weights_keys, .base_model_prefix, .gradient_checkpointing_enable,
  ._can_record_outputs with output_router_logits= (and load_balancing_loss_func in the family's module),
  .initialize_weights with ._is_hf_initialized, ._keys_to_ignore_on_load_unexpected,
  ._weight_conversions (read by revert_weight_conversion)
- conversion_mapping.{get_model_conversion_mapping, _MODEL_TO_CONVERSION_PATTERN}; core_model_loading.{
  rename_source_key, revert_weight_conversion, WeightConverter, WeightRenaming}
- models.auto.modeling_auto.MODEL_FOR_{CAUSAL_LM, IMAGE_TEXT_TO_TEXT, SEQUENCE_CLASSIFICATION,
  TOKEN_CLASSIFICATION}_MAPPING_NAMES; PreTrainedModel._init_weights(a linear layer)
- AutoModelFor...._model_mapping._extra_content (config class -> class that a user registered)
- integrations.moe.{ALL_EXPERTS_FUNCTIONS.register, _grouped_linear, _default_apply_gate}; activations.SiLUActivation;
  of modules under use_experts_implementation .config, .num_experts, .has_gate, .has_bias, .is_transposed, ._apply_gate
- modeling_layers.GradientCheckpointingLayer; of vision models' bases .get_image_features (with .pooler_output, a tensor
  or a sequence of them), .get_video_features(pixel_values_videos, video_grid_thw) and .get_rope_index(input_ids,
  mm_token_type_ids, ...), called in vision.py
- PreTrainedModel.set_attn_implementation by sub-config; utils.generic.is_flash_attention_requested in a module of a
  family, whose vision tower then calls with cu_seq_lens_q and max_length_q
- utils.output_capturing.install_all_output_capturing_hooks (marks the model, which its forward reads)
- PretrainedConfig._experts_implementation; pytorch_utils.Conv1D
- DynamicCache(config=).layers, .update(key_states, value_states, layer_idx); of its layers that keep states
  .conv_states, .recurrent_states (number -> tensor [rows, ...] or None);
  GenerationMixin._supports_default_dynamic_cache
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.activations import SiLUActivation
from transformers.conversion_mapping import _MODEL_TO_CONVERSION_PATTERN, get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate, _grouped_linear
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils.output_capturing import install_all_output_capturing_hooks

from weft.errors import UserError, first_line, runs_own_code
from weft.files import check_counts, check_folder
from weft.hub import check_model_is_there
from weft.importing import import_module, module_file
from weft.models.families import family_of
from weft.ops import attention
from weft.ops.tower_attention import attend_in_tower
from weft.terminal import counted

# transformers' progress bars and advice would hide weft's report.
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# Regularisers, which would make the loss depend on how a step is split.
_NOISE_KEY = re.compile(r"(dropout|_pdrop|drop_rate|layerdrop|jitter)")


# transformers passes image boundaries only to implementations with "flash" in their name; it calls others per image.
_TOWER = "weft_tower_flash"


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make `attn_implementation=name` call `function`, without a mask: bounds separate documents.

    No mask function is registered, not even one that returns None: with one, transformers would first look for
    documents in the positions, which synchronises the device in every forward.
    """
    AttentionInterface.register(name, function)


_hidden = False  # whether attention is hidden from torch.compile


def register_kernels(*, traced: bool = True) -> None:
    """Register weft's attention as `weft_auto`, `weft_per_document`, ... May be called again.

    traced: False hides attention from torch.compile, because document lengths differ in every row; kernels that are
    compiled separately (flex) stay compiled. Attention stays hidden in this process, for the layers already compiled.
    """
    global _hidden
    _hidden = _hidden or not traced
    traced = not _hidden
    for preference in ("auto", attention.EXACT, *attention.KERNELS):
        function = partial(attention.attend, preference)
        register_attention(f"weft_{preference}", function if traced else torch.compiler.disable(function))
    register_attention(_TOWER, attend_in_tower if traced else torch.compiler.disable(attend_in_tower))


def import_architectures(modules: Iterable[str], path: str, key: str = "model.imports") -> None:
    """Import the user's modules that register architectures with transformers' Auto classes, before the config of the
    model at `path` is read. key: the config key that names the modules, for messages. Raises UserError if a module
    cannot be imported, or is in the model's folder, whose code weft never runs."""
    for name in modules:
        folder = Path(path).resolve()
        origin = module_file(name) if Path(path).is_dir() else None
        if origin is not None and origin.resolve().is_relative_to(folder):
            raise UserError(
                f"{key}: {name} is {origin}, in the model's folder, but weft runs no code that comes with a model. If "
                "you trust the code, move it to another folder, and add that folder to PYTHONPATH."
            )
        import_module(name, key)


def registered_classes(config: PretrainedConfig) -> list[type[PreTrainedModel]]:
    """The user's classes for this config, by AutoModelFor...register: for causal language modelling first."""
    auto_classes = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification)
    classes = [kind._model_mapping._extra_content.get(type(config)) for kind in auto_classes]
    return [kind for kind in classes if kind is not None]


def read_config(path: str) -> PretrainedConfig:
    """The config of the model at `path`. Raises UserError if it cannot be read."""
    check_folder(path)
    check_model_is_there(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # of any type: a family's config class got values that it does not expect
        if refusal := runs_own_code(path, error):
            raise refusal from error
        if missing := re.search("module 'torch' has no attribute '(.*?)'", str(error)):
            raise UserError(
                f"model.path: {path}: config.json: dtype is {missing[1]!r}, but torch has no such dtype. Write "
                "float32, bfloat16 or float16, or remove it."
            ) from error
        advice = " If it is your own, set model.imports to the module that registers it (weft chat, export, merge: "
        hint = f"{advice}--import)." if "does not recognize this architecture" in str(error) else ""
        raise UserError(f"model.path: cannot read a model config from {path!r}: {first_line(error)}.{hint}") from error
    named = config.architectures
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise UserError(f"model.path: {path}: config.json: architectures is {named!r:.80}, not a list of class names.")
    if not isinstance(text := config.get_text_config(), PretrainedConfig):
        raise UserError(f"model.path: {path}: config.json: the config of its text is {text!r:.80}, not an object.")
    check_counts(config.to_dict(), path)
    return config


def vocabulary_size(path: str) -> int:
    """The vocabulary size of the model at `path`. Raises UserError if its config has none."""
    size = getattr(read_config(path).get_text_config(), "vocab_size", None)
    if type(size) is not int or size < 1:
        raise UserError(
            f"model.path: {path}: config.json: vocab_size is {size!r:.80}, not a number of tokens. Is it a language "
            "model?"
        )
    return size


Noise = tuple[tuple[int, str, float], ...]  # (number of the sub-config, key, value), for keys of dropout and jitter


def noise_of(config: PretrainedConfig) -> Noise:
    """The keys of dropout and router jitter that are not 0, also of sub-configs."""
    noise = []
    for number, owner in enumerate(_with_sub_configs(config)):
        exempt_keys = family_of(owner.model_type).kept_noise
        for name, value in vars(owner).items():
            if _NOISE_KEY.search(name) and name not in exempt_keys and isinstance(value, int | float) and value:
                noise += [] if isinstance(value, bool) else [(number, name, value)]
    return tuple(noise)


def without_noise(config: PretrainedConfig) -> PretrainedConfig:
    """Set dropout and router jitter to 0, also in sub-configs. Changes `config` and returns it."""
    return with_noise(config, tuple((number, name, type(value)(0)) for number, name, value in noise_of(config)))


def with_noise(config: PretrainedConfig, noise: Noise) -> PretrainedConfig:
    """Set these keys. Changes `config` and returns it."""
    owners = list(_with_sub_configs(config))
    for number, name, value in noise:
        setattr(owners[number], name, value)
    return config


def _with_sub_configs(config: PretrainedConfig) -> Iterable[PretrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _with_sub_configs(value)


def uses_attention_interface(config: PretrainedConfig) -> bool:
    """Whether the family selects attention by name, so that weft's can replace it."""
    return bool(model_class(config)._supports_attention_backend)


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class in config.architectures, or the family's causal LM. Raises UserError if transformers has neither.

    AutoModelForCausalLM would drop the vision tower of some families.
    """
    names = list(config.architectures or [])
    registered = registered_classes(config)
    for registered_class in registered:
        if not names or registered_class.__name__ == names[0]:
            return registered_class
    if not names:
        mapped = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if mapped is None:
            raise UserError(
                f"model.path: config.json has no `architectures`, and transformers {transformers.__version__} has no "
                f"causal LM for model_type {config.model_type!r}. Add the class name to `architectures`."
            )
        names = [mapped] if isinstance(mapped, str) else [mapped[0]]
    model_type = getattr(transformers, names[0], None)
    if not (isinstance(model_type, type) and issubclass(model_type, PreTrainedModel)):
        raise UserError(
            f"model.path: transformers {transformers.__version__} has no model {names[0]!r} (config.architectures). "
            "weft trains transformers' classes and the classes that a module of model.imports registers "
            "(AutoModelForCausalLM.register). It never runs code that comes with a model."
        )
    return model_type


ScoreTask = Literal["sequence", "token", "either"]
# Ends of names of classes with a linear output on every hidden state in place of a causal LM's head.
_CLASSIFIES = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}


def classifies(config: PretrainedConfig) -> bool:
    """Whether config.architectures names a classifier."""
    return (config.architectures or [""])[0].endswith(tuple(_CLASSIFIES.values()))


def peft_task(config: PretrainedConfig) -> str:
    """peft's name for the task of a model with this config."""
    named = (config.architectures or [""])[0]
    tasks = {"sequence": "SEQ_CLS", "token": "TOKEN_CLS"}
    return next((tasks[task] for task, end in _CLASSIFIES.items() if named.endswith(end)), "CAUSAL_LM")


def with_logits(config: PretrainedConfig) -> PretrainedConfig:
    """The config itself; for a classifier, a copy that names its family's causal LM."""
    if not classifies(config):
        return config
    logits = copy.deepcopy(config)
    # model_class uses it; in some families a causal LM has no vision tower.
    class_name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    logits.architectures = [class_name] if class_name is not None else None
    return logits


def with_scores(
    config: PretrainedConfig, labels: int = 1, task: ScoreTask = "either", pad: int | None = None
) -> PretrainedConfig:
    """A copy whose architecture has `labels` outputs per token: the classifier of the config, or of its family.

    pad: pad_token_id for a config without it. task: of the class; `either` keeps a classifier of either kind, and
    otherwise selects a classifier of sequences. Raises UserError if transformers has none, or if the config's
    classifier has another task or number of labels.
    """
    scores, named = copy.deepcopy(config), (config.architectures or [""])[0]
    text = scores.get_text_config()
    text.pad_token_id = pad if text.pad_token_id is None else text.pad_token_id
    if classifies(config):
        if task != "either" and not named.endswith(_CLASSIFIES[task]):
            raise UserError(f"model.path: it is a {named}, but this run needs a model {_CLASSIFIES[task]}.")
        if config.num_labels != labels:
            raise UserError(
                f"model.path: {named} has {counted(config.num_labels, 'label')}, but this run needs {labels}. Set "
                f"model.path to its base model, or to a model with {labels}."
            )
        return scores
    auto_class, names = (
        (AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES)
        if task == "token"
        else (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    )
    registered = auto_class._model_mapping._extra_content.get(type(config))
    class_name = names.get(config.model_type) if registered is None else registered.__name__
    if class_name is None:
        kind = "token" if task == "token" else "sequence"
        raise UserError(
            f"model.path: transformers {transformers.__version__} has no {kind} classification for model_type "
            f"{config.model_type!r}, so weft cannot build a critic or reward model from it. Use a model of another "
            f"family (qwen3, llama and gemma3 have one), or register a class with {auto_class.__name__} in a module of "
            "model.imports."
        )
    scores.architectures, scores.num_labels = [class_name], labels
    return scores


def padding_id(path: str) -> int | None:
    """The padding token that transformers uses when it pools a classifier's scores: config.pad_token_id of the model at
    `path`, or, without it, the tokenizer's."""
    pad = read_config(path).get_text_config().pad_token_id
    if pad is None:
        with suppress(Exception):  # of any type: there is no tokenizer, or it cannot be read, which others report
            pad = AutoTokenizer.from_pretrained(path, trust_remote_code=False).pad_token_id
    return pad


def label_names(config: PretrainedConfig) -> dict[str, Any]:
    """The entries of config.json for a classifier's labels."""
    return {"id2label": {str(n): name for n, name in config.id2label.items()}, "label2id": dict(config.label2id)}


@torch.no_grad()
def first_linear(model: PreTrainedModel, outputs: int, inputs: int, seed: int) -> dict[str, Tensor]:
    """`weight` and `bias` of a linear layer of this family as transformers initialises it, drawn from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        linear = nn.Linear(inputs, outputs)
        model._init_weights(linear)
    return {"weight": linear.weight.detach(), "bias": linear.bias.detach()}


def build_random(config: PretrainedConfig, *, dtype: torch.dtype, attention: str, seed: int) -> PreTrainedModel:
    """A model with transformers' initial weights, drawn from `seed`, equal on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _from_config(config, dtype, attention)


def build_meta(config: PretrainedConfig, *, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    """A model on the meta device. attention: None for transformers' default."""
    with torch.device("meta"):
        return _from_config(config, dtype, attention)


def _from_config(config: PretrainedConfig, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    """Build in fp32, then cast the weights: building in `dtype` would also cast buffers that must stay fp32."""
    chosen = None if attention is None else _by_part(config, attention, "sdpa")
    model = model_class(config)._from_config(config, dtype=torch.float32, attn_implementation=chosen)
    if attention is not None and chosen != attention:
        set_attention(model, attention)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    keep_in_inference_mode(model, config.get_text_config().model_type)
    return model


def keep_in_inference_mode(model: nn.Module, model_type: str) -> None:
    """Keep the modules in inference mode that a family never has in training mode."""
    settled = family_of(model_type).in_inference_mode
    for module in model.modules() if settled else ():
        if type(module).__name__ in settled:
            module.eval()


def set_attention(model: PreTrainedModel, chosen: str) -> None:
    """Switch a built model to an attention implementation. weft's implementations apply only to the text part, because
    images have no sequence boundaries. A vision tower with concatenated images gets `weft_tower_flash`, others sdpa.

    The model must already be built: before that, transformers would search a package with the name of the tower's
    implementation.
    """
    has_bounds = chosen != f"weft_{attention.EXACT}" and any(_has_bounds(module) for module in _tower(model))
    model.set_attn_implementation(_by_part(model.config, chosen, _TOWER if has_bounds else "sdpa"))


def _by_part(config: PretrainedConfig, chosen: str, tower: str) -> str | dict[str, str]:
    """The attn_implementation argument; by sub-config if the model has a vision tower."""
    if not chosen.startswith("weft_") or getattr(config, "vision_config", None) is None:
        return chosen
    return {"": chosen, "text_config": chosen, "vision_config": tower}


def _tower(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Modules of the vision tower that have its config."""
    config = getattr(model.config, "vision_config", None)
    return (module for module in model.modules() if config is not None and getattr(module, "config", None) is config)


def _has_bounds(module: nn.Module) -> bool:
    """Whether a tower's attention passes the boundaries of images to flash kernels."""
    family = sys.modules[type(module).__module__]
    return hasattr(family, "is_flash_attention_requested") and accepts_by_name(module, "cu_seqlens")


def enable_recompute(model: PreTrainedModel, run: Callable[..., Any]) -> None:
    """Make each decoder layer, and each layer of a vision tower, run as run(layer, *args), with the same forward
    arguments (the bounds) in backward as in forward."""
    if hasattr(model, "activation_checkpointing_enable"):  # its name in newer versions
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = run


def run_by(layer: nn.Module, run: Callable[..., Any]) -> None:
    """After `enable_recompute`, make a layer, but not the layers in it, run as run(layer, *args)."""
    layer._gradient_checkpointing_func = run


def store_everything(layer: nn.Module) -> None:
    """After `enable_recompute`, make a layer, and the layers in it, store all activations for backward."""
    for module in layer.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = False


def has_auxiliary_loss(model: PreTrainedModel) -> bool:
    """Whether the base returns router logits and the family's code has the load balancing loss."""
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    return "router_logits" in recorded and hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")


def record_outputs(base: nn.Module) -> None:
    """Hook all modules whose outputs transformers can record, such as router logits. Without this, transformers would
    add the hooks in the first forward, and only to modules that the model has then."""
    install_all_output_capturing_hooks(base)


def tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Tied name -> name of the parameter that owns the tensor, for ties of this model (its class may allow more)."""
    return dict(model.all_tied_weights_keys)


def choose_rules(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Keep only the family's conversion rules that a checkpoint with these tensor names needs.

    run_rules_backwards then gives the names of that checkpoint, not of the newest format.
    """
    rules = get_model_conversion_mapping(model)
    renamings, converters = _by_kind(rules)
    shapes = model.state_dict()
    for name in names:
        rename_source_key(name, renamings, converters, model.base_model_prefix, shapes)
    model._weight_conversions = [rule for rule in rules if rule.was_used()]


def runtime_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Checkpoint name -> name in the model, for tensors that are at most renamed."""
    renamings, converters = _by_kind(get_model_conversion_mapping(model))
    shapes, names_by_checkpoint_name = model.state_dict(), {}
    for name in names:
        target, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, shapes)
        if converter is None:
            names_by_checkpoint_name[name] = target
    return names_by_checkpoint_name


def _by_kind(rules: Iterable[Any]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    rules = list(rules)
    return (
        [rule for rule in rules if isinstance(rule, WeightRenaming)],
        [rule for rule in rules if isinstance(rule, WeightConverter)],
    )


def run_rules_backwards(model: PreTrainedModel, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by runtime name -> by checkpoint name, in the checkpoint's layout (single experts, old prefixes). Without
    tied names."""
    return dict(revert_weight_conversion(model, dict(tensors)))


def unused_patterns(model: PreTrainedModel) -> list[str]:
    """Patterns of tensor names that are in the family's checkpoints but not in its class (old tables, other towers)."""
    return [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]


_MTP = re.compile(r"(^|\.)mtp(_layers)?(\.|$)")
_LAYER = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")


def draft_layers(config: PretrainedConfig) -> int:
    """The number of layers for multi-token prediction in the config; 0 for none."""
    text = config.get_text_config()
    counts = [getattr(text, key, None) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers")]
    return max(count if isinstance(count, int) else 0 for count in counts)


def draft_names(unused: Sequence[str], config: PretrainedConfig) -> list[str]:
    """Names of tensors of layers for multi-token prediction, with which engines draft.

    unused: tensors in the files that the model's class lacks. Qwen, Nemotron and MiMo name these layers `mtp`. DeepSeek
    and GLM continue the numbers after the last layer; eh_proj distinguishes them from layers that the config omits.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    numbers = {name: int(match[1]) for name in unused if (match := _LAYER.match(name))}
    drafts = {number for name, number in numbers.items() if number >= layers and ".eh_proj." in name}
    return [name for name in unused if numbers.get(name) in drafts or _MTP.search(name)]


def untie(model: PreTrainedModel, name: str) -> None:
    """Give a tied parameter, still on meta, a separate tensor."""
    owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    setattr(owner, leaf, nn.Parameter(getattr(owner, leaf).detach().clone()))
    model.all_tied_weights_keys.pop(name)


def rebuild_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint contains (rotary tables, embedding scales); the state dict does not
    change."""
    for module in model.modules():
        # transformers skips modules that need nothing: without such a buffer (hy_v4 assigns to slices of weights, which
        # DTensor cannot do), or with weights in bytes, of quantised layers.
        rebuilt = any(child._non_persistent_buffers_set for child in module.modules())
        module._is_hf_initialized = not rebuilt or any(
            not parameter.is_floating_point() for parameter in module.parameters(recurse=False)
        )
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    with warnings.catch_warnings():  # recurrent_gemma also draws values for DTensors, and discards them
        warnings.filterwarnings("ignore", message="DTensor random operators")
        model.initialize_weights()


def source_folder(path: str) -> Path | None:
    """The folder of model.path: the directory itself, or the snapshot in the hub cache; None if there is neither."""
    if Path(path).is_dir():
        return Path(path)
    config = try_to_load_from_cache(path, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """The text config of each decoder layer: one object for all, except in families with per-layer values (Gemma 4's
    head_dim), which the common config refuses to return."""
    text = config.get_text_config()
    shared_config = [text] * int(text.num_hidden_layers)
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else shared_config


def accepts_by_name(module: nn.Module, argument: str) -> bool:
    """Whether the module's forward names this argument."""
    return argument in inspect.signature(module.forward).parameters


def recomputes(module: nn.Module) -> bool:
    """Whether the module is a layer that transformers can recompute in backward."""
    return isinstance(module, GradientCheckpointingLayer)


def takes_one_argument(module: nn.Module) -> bool:
    """Whether the module's forward accepts one argument without a default, and no others by position."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.kind for p in parameters if p.default is p.empty] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def accepts(module: nn.Module, argument: str) -> bool:
    """Whether the module's forward accepts this argument, by name or as **kwargs."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.name == argument or p.kind is p.VAR_KEYWORD for p in parameters)


# ---------------------------------------------------------------- for adapters

EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")  # of fused experts, as the experts interface names them
_EXPERTS_FUNCTION = "weft_experts"


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the module computes only W x + b. Subclasses with another forward (routers) do not count, except
    Falcon's, whose code is the same."""
    return type(module).forward in (nn.Linear.forward, Conv1D.forward) or type(module).__name__ == "FalconLinear"


def is_transposed(module: nn.Module) -> bool:
    """Whether a plain linear layer stores its weight as [in, out]."""
    return isinstance(module, Conv1D)


def linear_widths(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a plain linear layer."""
    first, second = module.weight.shape
    return (first, second) if is_transposed(module) else (second, first)


def is_fused_experts(module: nn.Module) -> bool:
    """Whether the module's forward uses transformers' experts interface, on parameters [experts, ., .]."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def is_swiglu(experts: Any) -> bool:
    """Whether fused experts compute silu(gate) up, with gate and up one after the other in `gate_up_proj`."""
    default = experts.has_gate and type(experts)._apply_gate is _default_apply_gate
    return default and isinstance(experts.act_fn, nn.SiLU | SiLUActivation)


def checkpoint_layout(model: PreTrainedModel) -> str | None:
    """The family whose checkpoint layout transformers uses for this model; None if it converts nothing."""
    family = model.config.model_type
    layout: str | None = _MODEL_TO_CONVERSION_PATTERN.get(family, family if family == "mixtral" else None)
    return layout


def set_experts_function(experts: nn.Module, function: Callable[..., Any]) -> None:
    """Make all experts that share this module's config call `function(experts, hidden, chosen, weights)`."""
    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS_FUNCTION, function)
    experts.config._experts_implementation = _EXPERTS_FUNCTION


def run_experts_one_by_one(model: nn.Module) -> None:
    """Make fused experts run transformers' eager code: one expert after the other, as linear layers."""
    for module in model.modules():
        if is_fused_experts(module):
            module.config._experts_implementation = "eager"


class _AsDouble(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        named = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **named)


@contextmanager
def in_double() -> Iterator[None]:
    """A context in which casts to fp32 in a family's code become casts to fp64, for a model in fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _AsDouble():
            yield
    finally:
        torch.set_default_dtype(before)


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """[S, out]: rows up to ends[0] times weight[0], the next rows up to ends[1] times weight[1], ...; plus bias."""
    return _grouped_linear(rows, weight, ends, bias, transposed)


# ---------------------------------------------------------------- for generation


def cache_argument(base: nn.Module) -> str:
    """The name of the cache argument of the base model's forward."""
    return "cache_params" if "cache_params" in inspect.signature(base.forward).parameters else "past_key_values"


def takes_dynamic_cache(model: PreTrainedModel) -> bool:
    """Whether a DynamicCache, with the kinds of layers that RowCache handles, contains all state of generation."""
    if not model._supports_default_dynamic_cache():
        return False
    config = model.config.get_text_config()
    return not getattr(config, "num_kv_shared_layers", None)  # such layers read another layer's keys from its cache


class RowCache(DynamicCache):
    """A cache that stores recurrent and convolutional states, and passes keys and values to a callback.

    hold(layer, keys, values): receives the keys and values that a layer computed, [B, K, T, D]; returns the keys and
    values for attention.
    """

    def __init__(self, config: PretrainedConfig, hold: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(config=config)
        self.hold = hold

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.hold(layer_idx, key_states, value_states)

    @property
    def has_states(self) -> bool:
        """Whether any layer carries a state along the sequence, which padding would change."""
        return any(hasattr(layer, "conv_states") for layer in self.layers)

    def keep(self, rows: Sequence[int]) -> None:
        """Reduce the states to these rows, in this order; a row may be repeated."""
        for states, number in self._states():
            states[number] = states[number][list(rows)]

    def append(self, cache: RowCache) -> None:
        """Append the rows of another cache's states."""
        for (states, number), (other_states, _) in zip(self._states(), cache._states(), strict=True):
            states[number] = torch.cat([states[number], other_states[number]])

    def _states(self) -> list[tuple[dict[int, Tensor], int]]:
        """(dict with a layer's states, key in it) for every state."""
        pairs = [(layer.conv_states, layer.recurrent_states) for layer in self.layers if hasattr(layer, "conv_states")]
        return [(states, n) for pair in pairs for states in pair for n, state in states.items() if state is not None]
