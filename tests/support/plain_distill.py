"""Distillation in plain PyTorch: one process, transformers' own models, full logits, one document at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

Documents = Sequence[tuple[list[int], list[float]]]  # token ids, the loss weight of each token
Inputs = Callable[[list[int]], dict[str, Any]]  # token ids -> further arguments of the models, of images


def plain_model(path: str, dtype: torch.dtype = torch.float32) -> Any:
    config = transformers.AutoConfig.from_pretrained(path)
    kind = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
    auto_class = getattr(transformers, f"AutoModelFor{kind}")
    return auto_class.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


def no_images(ids: list[int]) -> dict[str, Any]:
    return {}


Lists = Callable[[list[int]], tuple[Tensor, Tensor]]  # of token ids: ids and log-probabilities, [T, K]; id -1: none


def in_bins(student: Tensor, ids: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """(log p, log q) of a teacher's lists, row by row: [N, K + 1], the tail last, from the student's logits [N, V]."""
    if not len(student):
        return student, student
    p, rows = student.softmax(-1), []
    for of_token, listed, q in zip(p, ids, logprobs.to(p.dtype).exp(), strict=True):
        used = listed >= 0
        pair = [torch.cat([x, 1 - x.sum(0, keepdim=True)]) for x in (of_token[listed[used]], q[used])]
        rows.append([torch.nn.functional.pad(x.log(), (int((~used).sum()), 0), value=-50.0) for x in pair])
    log_p, log_q = (torch.stack(column) for column in zip(*rows, strict=True))
    return log_p, log_q


def divergence(name: str, log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """[N] from log-probabilities [N, V] each."""
    if name == "forward_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if name == "reverse_kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    of_teacher, of_student = log_q.exp() * (log_q - log_m), log_p.exp() * (log_p - log_m)
    return (beta * of_teacher + (1 - beta) * of_student).sum(-1)


def step_loss(
    student: Any,
    teachers: Sequence[Any],
    documents: Documents,
    chosen: Sequence[int],
    settings: dict[str, Any],
    inputs: Inputs,
) -> tuple[float, dict[str, Tensor]]:
    """(Loss of a step, its gradients): sum w (alpha ce + (1 - alpha) T^2 divergence) / sum w. settings: loss, beta,
    temperature, squared, alpha."""
    student.zero_grad(set_to_none=True)
    total, loss_sum = sum(sum(mask[1:]) for _, mask in documents), 0.0
    for (ids, mask), teacher in zip(documents, chosen, strict=True):
        tensor, weights = torch.tensor([ids]), torch.tensor(mask[1:])
        z = student(input_ids=tensor, use_cache=False, **inputs(ids)).logits[0, :-1]
        model, temperature = teachers[teacher], settings["temperature"]
        if isinstance(model, torch.nn.Module):
            with torch.no_grad():
                z_q = model(input_ids=tensor, use_cache=False, **inputs(ids)).logits[0, :-1]
            common = min(z.shape[1], z_q.shape[1])
            log_p, log_q = ((x[:, :common] / temperature).log_softmax(-1) for x in (z, z_q))
        else:
            log_p, log_q = in_bins(z / temperature, *(x[1:] for x in model(ids)))
        values = divergence(settings["loss"], log_p, log_q, settings["beta"])
        ce = -z.log_softmax(-1).gather(1, tensor[0, 1:, None])[:, 0]
        scale = temperature**2 if settings["squared"] else 1.0
        loss = (weights * (settings["alpha"] * ce + (1 - settings["alpha"]) * scale * values)).sum() / total
        loss.backward()
        loss_sum += float(loss.detach())
    return loss_sum, {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}


def train(
    path: str, teachers: Sequence[str | Lists], steps: Sequence[Documents], chosen: Sequence[Sequence[int]],
    settings: dict[str, Any], lr: float, inputs: Inputs = no_images, dtype: torch.dtype = torch.float32,
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:  # fmt: skip
    """SGD without clipping from the model at `path`, by models at other paths or by lists: (loss and gradients of each
    step, weights at the end)."""
    student = plain_model(path, dtype)
    models = [plain_model(teacher, dtype) if isinstance(teacher, str) else teacher for teacher in teachers]
    losses, gradients = [], []
    for documents, of_step in zip(steps, chosen, strict=True):
        loss, of_parameters = step_loss(student, models, documents, of_step, settings, inputs)
        losses.append(loss)
        gradients.append(of_parameters)
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                if name in of_parameters:
                    parameter -= lr * of_parameters[name]
    return losses, gradients, {n: p.detach().clone() for n, p in student.named_parameters()}
