"""What transformers computes with its own FSDP, tensor and expert parallelism. Imports nothing of weft: another's word.

`python -m tests.support.oracle JOB`, a JSON file: model (a folder), fsdp, tp, ep (ranks of each), documents ([ids,
weights]), out. Gloo processes load the model by `from_pretrained(distributed_config=...)`, run one forward and one
backward of the documents that are theirs, and write all gradients of sum(w ce) / sum(w), whole, to `out`, a
safetensors file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor


def rank_of(rank: int, job: dict[str, Any]) -> None:
    """One rank, from its group to the file that rank 0 writes."""
    torch.set_num_threads(1)
    world = job["fsdp"] * job["tp"]
    dist.init_process_group("gloo", init_method=f"file://{job['out']}.store", rank=rank, world_size=world)
    model = load(job)
    total = sum(sum(weights[1:]) for _, weights in job["documents"])
    local = job["documents"][rank // job["tp"] :: job["fsdp"]] or [([0, 0], [0.0, 0.0])]
    (ce_sum(model, local) * job["fsdp"] / total).backward()  # FSDP averages over its ranks
    gradients = {name: full_gradient(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    if rank == 0:
        notes = {"transformers": transformers.__version__, "parts": str(parts(model))}
        save_file(gradients, job["out"], notes)
    dist.destroy_process_group()


def load(job: dict[str, Any]) -> Any:
    """The model, divided by transformers."""
    config = transformers.AutoConfig.from_pretrained(job["model"])
    return getattr(transformers, config.architectures[0]).from_pretrained(
        job["model"],
        dtype=torch.float32,
        attn_implementation="eager",
        distributed_config={"fsdp_size": job["fsdp"], "tp_size": job["tp"], **experts(job["ep"])},
    )


def experts(ep: int) -> dict[str, Any]:
    """Keys of the configuration with which tokens travel to their experts."""
    return {"ep_size": ep, "ep_implementation": "all_to_all"} if ep > 1 else {}


def parts(model: Any) -> float:
    """Of how many equal parts of a matrix, the first that attention ends with, this rank has one."""
    weight = model.get_parameter("model.layers.0.self_attn.o_proj.weight")
    return float(weight.numel() / weight.to_local().numel())


def ce_sum(model: Any, documents: list[tuple[list[int], list[float]]]) -> Tensor:
    """Sum of w ce over these documents, as one batch that is padded on the right."""
    longest = max(len(ids) for ids, _ in documents)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in documents])
    weights = torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in documents])
    attention_mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in documents])
    logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
    ce = -logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    return (ce * weights[:, 1:]).sum()


def full_gradient(gradient: Tensor) -> Tensor:
    """All of it, on every rank."""
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).contiguous()


if __name__ == "__main__":
    described = json.loads(Path(sys.argv[1]).read_text())
    ranks = described["fsdp"] * described["tp"]
    torch.multiprocessing.start_processes(rank_of, (described,), nprocs=ranks, start_method="fork")
