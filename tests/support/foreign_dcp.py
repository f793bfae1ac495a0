"""Directories of torch.distributed.checkpoint as other trainers write them: plain transformers models under FSDP2, with
torch's own AdamW, on real ranks; and what such a trainer would have done next."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

DOCUMENTS = [[5, 17, 99, 3, 41, 12], [7, 7, 64], [120, 1, 33, 90, 2]]
LR, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-8
_TP = {
    "self_attn.q_proj": ColwiseParallel, "self_attn.k_proj": ColwiseParallel, "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel, "mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}  # fmt: skip


def train_and_save(path: str, folder: str, tp: int, layout: str) -> dict[str, Any] | None:
    """Two steps of AdamW on a HuggingFace model, saved; on rank 0 what was saved and the weights after a third step.

    The ranks are FSDP2's, but for tp of them. layout: what the state dict looks like.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("fsdp", "tp"))
    if tp > 1:
        styles = {f"model.layers.*.{name}": style() for name, style in _TP.items()}
        parallelize_module(model, mesh["tp"], styles)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    for _ in range(2):
        step(model, optimizer)
    dcp.save(laid_out(model, optimizer, layout), checkpoint_id=folder)
    saved, moments = whole(model.state_dict()), moments_of(model, optimizer)
    step(model, optimizer)
    after = whole(model.state_dict())
    return {"saved": saved, "moments": moments, "after": after} if dist.get_rank() == 0 else None


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """One step on all documents, which every rank has: FSDP's average over ranks changes nothing."""
    loss = sum(cross_entropy(model(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="sum")
               for ids in DOCUMENTS)  # fmt: skip
    (loss / sum(len(ids) - 1 for ids in DOCUMENTS)).backward()
    optimizer.step()
    optimizer.zero_grad()


def laid_out(model: Any, optimizer: torch.optim.Optimizer, layout: str) -> dict[str, Any]:
    """A state dict as a trainer gives it to dcp.save."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=flat if layout == "torchtitan" else None)
    step, progress = torch.tensor(2, dtype=torch.int32), {"last_epoch": 2, "name": "cosine"}
    if layout == "torchtitan":
        progress_state = {
            "train_state": {"step": step},
            "lr_scheduler": progress,
            "dataloader": {"dp_rank_0": b"state"},
        }
        return {**weights, "optimizer": state, **progress_state}
    if layout == "app":  # torch's tutorial
        return {"app": {"model": weights, "optim": state}}
    if layout == "roll":  # the state of torch's optimizer itself, by numbers
        return {**model.state_dict(), "optimizer": optimizer, "scheduler": progress, "rng_state": {"cpu": step}}
    assert layout == "torch"
    return {"model": weights, "optimizer": state}


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def moments_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    return {name: whole(optimizer.state[parameter]) for name, parameter in model.named_parameters()}


def save_alone(path: str, folder: Path, names: Mapping[str, str] | None = None, **entries: Any) -> dict[str, Tensor]:
    """The files of a HuggingFace directory, under other names where `names` has them, saved by one process."""
    tensors: dict[str, Tensor] = {}
    for file in Path(path).glob("*.safetensors"):
        tensors |= load_file(file)
    save({**{(names or {}).get(n, n): t for n, t in tensors.items()}, **entries}, folder)
    return tensors


def save(state: Mapping[str, Any], folder: Path) -> None:
    """dcp.save of one process, which warns that it is one."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)


def load(state: dict[str, Any], folder: Path) -> None:
    """dcp.load of one process."""
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)


def save_as_verl(path: str, folder: str, replicas: int = 1) -> dict[str, Tensor] | None:
    """The file of each rank that verl's FSDP2 saves of a model; on rank 0 the whole tensors."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("ddp", "fsdp"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), Path(folder) / f"model_world_size_{world}_rank_{dist.get_rank()}.pt")
    saved = whole(model.state_dict())
    dist.barrier()
    return saved if dist.get_rank() == 0 else None
