"""The one file that touches transformers' internals. tests/test_hf_contract.py holds their signatures.

Internal symbols used, all checked on transformers 5.17 to 5.19:
- modeling_utils.AttentionInterface.register, masking_utils.AttentionMaskInterface.register
- PreTrainedModel._from_config, .from_pretrained(dtype=, attn_implementation=), .all_tied_weights_keys,
  .gradient_checkpointing_enable, ._weight_conversions (read by revert_weight_conversion)
- core_model_loading.revert_weight_conversion, modeling_utils.remove_tied_weights_from_state_dict
- models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
- integrations.moe.ALL_EXPERTS_FUNCTIONS (not replaced here; routers are found by models/routing.py)
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, remove_tied_weights_from_state_dict
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.errors import UserError

# weft says itself what it loads and checks; transformers' bars and advice would drown it.
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# Regularisers that would make the loss depend on the cut: 0 unless asked for.
_NOISE_KEY = re.compile(r"(dropout|_pdrop|drop_rate|layerdrop|jitter)")


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make `attn_implementation=name` call `function`, and give it no mask: documents are kept apart by bounds."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def read_config(path: str) -> PretrainedConfig:
    """The model's config; a message instead of a traceback where it cannot be read."""
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().split("\n")[0]
        raise UserError(f"model.path: cannot read a model config from {path!r}: {first}") from error


def without_noise(config: PretrainedConfig) -> PretrainedConfig:
    """Set dropout and router jitter to 0, also in sub-configs. Changes `config` and returns it."""
    for owner in _with_sub_configs(config):
        for name, value in list(vars(owner).items()):
            if _NOISE_KEY.search(name) and isinstance(value, int | float) and not isinstance(value, bool) and value:
                setattr(owner, name, type(value)(0))
    return config


def _with_sub_configs(config: PretrainedConfig) -> Iterable[PretrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _with_sub_configs(value)


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class named by config.architectures; the auto class would drop the vision tower of some families."""
    names = list(config.architectures or [])
    if not names:
        mapped = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if mapped is None:
            raise UserError(
                f"model.path: config.json names no `architectures` and transformers {transformers.__version__} has no "
                f"causal LM for model_type {config.model_type!r}. Add the class name to `architectures`."
            )
        names = [mapped] if isinstance(mapped, str) else [mapped[0]]
    found = getattr(transformers, names[0], None)
    if found is None:
        raise UserError(
            f"model.path: transformers {transformers.__version__} has no class {names[0]!r} (config.architectures). "
            "weft trains classes that transformers ships; models with code of their own are not supported."
        )
    return found


def build_random(config: PretrainedConfig, *, dtype: torch.dtype, attention: str, seed: int) -> PreTrainedModel:
    """A model with transformers' own initial weights, drawn from `seed`: the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _from_config(config, dtype, attention)


def build_meta(config: PretrainedConfig, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Shapes and names without storage."""
    with torch.device("meta"):
        return _from_config(config, dtype, attention)


def _from_config(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Built in fp32, then its weights cast: built in another dtype, buffers that must stay fp32 would have it too."""
    model = model_class(config)._from_config(config, dtype=torch.float32, attn_implementation=attention)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def load_pretrained(path: str, config: PretrainedConfig, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model with its saved weights; a tensor that the files do not fill, or do not want, is an error."""
    quantised = getattr(config, "quantization_config", None) is not None
    try:
        model, info = model_class(config).from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=attention, output_loading_info=True
        )
    except OSError as error:
        first = str(error).strip().split("\n")[0]
        raise UserError(
            f"model.path: cannot load weights from {path!r}: {first}\n"
            "Set model.init=random to train from fresh weights, or point model.path at a directory with safetensors."
        ) from error
    except ImportError as error:  # quantised formats need packages of their own
        first = str(error).strip().split("\n")[0]
        raise UserError(f"model.path: cannot load weights from {path!r}: {first}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            names = ", ".join(str(name) for name in sorted(info[kind], key=str)[:5])
            raise UserError(f"model.path: {path!r}: {kind.replace('_', ' ')}: {names} ({len(info[kind])} in all).")
    if quantised:
        # Dequantised on the way in. The rules that did so cannot be reversed (save_pretrained would write no experts
        # of a gpt_oss): forget them, and the model is laid out on disk as its class is by default.
        model._weight_conversions = None
    return model


def enable_recompute(model: PreTrainedModel) -> None:
    """Recompute each decoder layer in backward; forward arguments (the bounds) are replayed with it."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    """Tied name -> the name that owns the tensor; a fact of this model, not a possibility of its class."""
    return dict(model.all_tied_weights_keys)


def to_disk_layout(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Runtime names and layouts -> those of a saved checkpoint (experts apart, old prefixes), ties written once.

    tensors: every entry of the state dict, whole, under the model's own names; tied names share storage.
    """
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(dict(tensors), model))


def source_folder(path: str) -> Path | None:
    """Where the files of model.path are: the directory itself, or the hub cache's snapshot of that repository."""
    if Path(path).is_dir():
        return Path(path)
    config = try_to_load_from_cache(path, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def source_dtypes(folder: Path | None) -> dict[str, str]:
    """Dtype of each tensor in the source's safetensors files ("BF16"), empty where there are none."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")) if folder is not None else []:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        found.update({name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"})
    return found


def accepts(module: nn.Module, argument: str) -> bool:
    """Whether the module's forward takes this argument, by name or among its keywords."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.name == argument or p.kind is p.VAR_KEYWORD for p in parameters)
