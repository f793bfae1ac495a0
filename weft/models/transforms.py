"""Transforms of a model's modules. parallelize() applies the chosen transforms in the order of the list.

A transform changes how modules compute, never their parameters. It receives the TrainModule on meta, after tp and ep
have divided it and before FSDP2 adds hooks. To add one, write its functions here or in ops/, add it to TRANSFORMS, and,
if users choose it by name, add the name to model.transforms (config/schema.py). Adapters (models/lora.py) are
parameters, which tp, freezing and optimizer groups read: engine/build.py attaches them earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.config.recompute import AUTO_TILE, FULL, Activations, Offload, RecomputePolicy
from weft.config.schema import ModelConfig
from weft.errors import UserError
from weft.models import hf
from weft.models.experts import expert_blocks, hide
from weft.models.fused_norms import fuse_norms
from weft.models.lora import is_read_only
from weft.models.train_module import TrainModule
from weft.ops import fp8
from weft.ops.offload import ActivationOffload
from weft.ops.recompute import run_layer
from weft.ops.tiles import run_in_tiles
from weft.terminal import counted

_ROUTERS = ("gate", "router")  # parts of names; not gate_proj


def linear_layers(module: TrainModule) -> Iterator[tuple[str, nn.Module]]:
    """(name, plain linear layer) of the decoder layers, without routers: layers with such a name, and children of a
    module that has `experts` as a child (qwen2_moe's shared_expert_gate)."""
    family = module.facts.model_type
    for layer, root in module.layers:
        with_experts = {name for name, child in root.named_modules() if hasattr(child, "experts")}
        for name, child in root.named_modules():
            parts = name.split(".")
            if not hf.is_plain_linear(child) or hf.is_transposed(child) or is_read_only(family, name):
                continue
            if any(part in _ROUTERS for part in parts) or ".".join(parts[:-1]) in with_experts:
                continue
            yield f"{layer}.{name}", child


def use_fp8(module: TrainModule) -> None:
    """Make linear layers of the decoder use 8-bit matmuls (ops/fp8.py). Routers, embeddings, heads, fused experts,
    adapters, and layers whose widths are not multiples of 16 stay unchanged."""
    for _, layer in linear_layers(module):
        if not any(width % fp8.MULTIPLE for width in hf.linear_widths(layer)):
            layer.forward = MethodType(_fp8_forward, layer)
    if not any(_computes_in_fp8(layer) for _, layer in linear_layers(module)):
        raise UserError(
            "model.transforms: fp8 finds no nn.Linear in the decoder layers of this model whose widths are multiples "
            f"of {fp8.MULTIPLE}: set 'model.transforms=[]'."
        )


def describe_fp8(module: TrainModule) -> str:
    """For the startup output: the number of changed layers, and an example of unchanged layers."""
    layers = list(linear_layers(module))
    count = sum(_computes_in_fp8(layer) for _, layer in layers)
    unchanged = [name for name, layer in layers if not _computes_in_fp8(layer)]
    remark = (
        f"; {len(unchanged)} have widths that are not multiples of {fp8.MULTIPLE} ({unchanged[0]})" if unchanged else ""
    )
    return f"fp8 (not exact): {counted(count, 'linear layer')} of the decoder{remark}"


def _computes_in_fp8(layer: nn.Module) -> bool:
    return getattr(layer.forward, "__func__", None) is _fp8_forward


def _fp8_forward(layer: Any, x: Tensor) -> Tensor:
    return fp8.linear(x, layer.weight.to(x.dtype), layer.bias)


def recompute_layers(policy: RecomputePolicy, module: TrainModule, offload: Offload = "off") -> None:
    """Make backward recompute decoder layers, and all layers of a vision tower, according to the policy. offload:
    stores on the host what recomputation of decoder layers needs."""
    hf.enable_recompute(module.hf_model, partial(run_layer, policy))
    for number, (_, layer) in enumerate(module.layers):
        if not policy.covers(number):
            hf.store_everything(layer)
    if offload == "off":
        return
    transfers = module.offload = ActivationOffload(kept=offload == "kept")
    module.register_forward_pre_hook(lambda *_: transfers.begin_row())
    for _, layer in module.layers:
        hf.run_by(layer, partial(run_layer, policy, offload=transfers))


_MLPS = ("feed_forward", "ffn", "mlp", "shared_expert", "shared_experts", "shared_mlp")


def dense_mlps(module: TrainModule) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the decoder layers' dense MLPs and shared experts: modules with a usual name whose only input
    are hidden states, with linear layers from this width and to it."""
    width = int(module.get_submodule(module.facts.embedding).weight.shape[1])
    for layer, root in module.layers:
        for name, child in root.named_modules():
            if name.rpartition(".")[2] not in _MLPS or hasattr(child, "experts") or not hf.takes_one_argument(child):
                continue
            widths = [hf.linear_widths(linear) for linear in child.children() if hf.is_plain_linear(linear)]
            if {width} <= {first for first, _ in widths} and {width} <= {last for _, last in widths}:
                yield f"{layer}.{name}", child


def tile_mlps(tile: int, module: TrainModule, *, required: bool = True) -> None:
    """Make dense MLPs and shared experts run over tiles of tokens. required: raise UserError if there are none."""
    mlps = list(dense_mlps(module))
    if required and not mlps:
        raise UserError(
            "model.tiled_mlp: the decoder layers of this model have no dense MLP or shared expert that weft "
            "recognises. Set model.tiled_mlp=off."
        )
    for _, mlp in mlps:
        mlp.forward = partial(run_in_tiles, mlp.forward, mlp, tile)


def describe_tiles(tile: int, module: TrainModule) -> str:
    """For the startup output."""
    forwards = (getattr(child, "forward", None) for child in module.modules())
    count = sum(isinstance(forward, partial) and forward.func is run_in_tiles for forward in forwards)
    return f"{counted(count, 'MLP')} in tiles of {tile:,} tokens" if count else ""


_KEPT = {
    "attention": "of attention kernels",
    "collectives": "of exchanges over tp, cp and ep",
    "matmuls": "of every second matmul with a weight, and of all narrow matmuls",
}


def describe_recompute(policy: RecomputePolicy, module: TrainModule, offload: Offload = "off") -> str:
    """For the startup output: the recomputed layers, and the results of forward that they reuse."""
    layers = "run again in backward" if policy.every == 1 else f"1 in {policy.every} run again in backward"
    results = ", ".join(_KEPT[kind] for kind in policy.keep)
    text = f"{layers} (recompute)" + (f", with forward's results {results}" if results else "")
    hosted = {"off": "", "inputs": "; inputs of layers wait on the host", "kept": "; both wait on the host"}
    return text + hosted[offload]


def compile_layers(module: TrainModule) -> None:
    """Compile every decoder layer, for any number of tokens. Attention over documents, modules that carry state, and
    experts with their routers stay outside the graphs, because lengths of documents and numbers of tokens per expert
    differ in every row."""
    hf.register_kernels(traced=False)
    for mixer in module.mixers.values():
        mixer.hide()
    for _, layer in module.layers:
        for block in expert_blocks(layer):
            hide(block)
        layer.compile(dynamic=True)


def _no_check(device: torch.device, compute: torch.dtype) -> None:
    """For transforms that every device can run."""


class Transform(NamedTuple):
    """A change of modules.

    apply: changes them; may raise UserError. describe: text for the startup output; "" for none. exact: the results
    equal those of the plain modules, up to the rounding of the compute dtype. check: raises UserError if the device
    cannot run it in the compute dtype.
    """

    apply: Callable[[TrainModule], object]
    describe: Callable[[TrainModule], str]
    exact: bool = True
    check: Callable[[torch.device, torch.dtype], None] = _no_check


# In the order of application: recomputation wraps layers from inside, so it comes after transforms that replace a
# module's forward; compilation is last, so that the graphs include all other transforms.
TRANSFORMS = {
    "fp8": Transform(use_fp8, describe_fp8, exact=False, check=fp8.check),
    "fused_norms": Transform(fuse_norms, lambda module: ""),
    "tiled_mlp": Transform(partial(tile_mlps, AUTO_TILE), partial(describe_tiles, AUTO_TILE)),
    "recompute": Transform(partial(recompute_layers, FULL), partial(describe_recompute, FULL)),
    "compile": Transform(compile_layers, lambda module: "compiled"),
}


def chosen_transforms(config: ModelConfig, activations: Activations, *, fused_norms: bool) -> list[Transform]:
    """The transforms of a run, in order. fused_norms: whether model.fused_norms applies on the run's device."""
    policy, tile, available = activations.recompute, activations.tile, dict(TRANSFORMS)
    chosen = {
        *config.transforms,
        *(["fused_norms"] if fused_norms else []),
        *(["compile"] if config.compile is True else []),
    }
    if tile is not None:
        chosen.add("tiled_mlp")
        required = config.tiled_mlp != "auto"
        available["tiled_mlp"] = Transform(partial(tile_mlps, tile, required=required), partial(describe_tiles, tile))
    if policy is not None:
        chosen.add("recompute")
        available["recompute"] = Transform(
            partial(recompute_layers, policy, offload=activations.offload),
            partial(describe_recompute, policy, offload=activations.offload),
        )
    return [transform for name, transform in available.items() if name in chosen]
