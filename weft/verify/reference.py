"""The reference: the results of one plain process. It imports nothing of weft, on purpose, and is short enough to
check.

It uses transformers' from_pretrained in fp32, eager, without dropout, on one document at a time, and shifts labels and
sums losses itself. A document is (ids, mask): token ids and the loss weight of each token as a target, as lists.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import transformers
from torch import Tensor, nn

Document = tuple[list[int], list[float]]
Batch = tuple[list[list[int]], list[list[float]], Tensor | None]  # ids, loss masks, attention mask


class Reference:
    """A plain model in one process; tensors are keyed by transformers' parameter names. freeze: patterns of names.

    balance: factor of transformers' auxiliary loss. whole_step: compute that loss over all documents of a step
    together; otherwise per document, weighted by its tokens. dtype: of weights and computation. scale: factor on
    gradients.
    """

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        freeze: Sequence[str] = (),
        balance: float = 0.0,
        whole_step: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        plain = self.load(path, dtype=dtype, attn_implementation="eager")
        if getattr(plain, "is_quantized", False):  # bitsandbytes' layers cannot be trained or compared
            plain = plain.dequantize(dtype=dtype)
        self.plain = plain.eval().to(device)
        self.model: nn.Module = self.plain
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in freeze))
        self.device, self.balance, self.whole_step = device, balance, whole_step and balance > 0
        self.optimizer: torch.optim.Optimizer | None = None
        self.scale = 1.0

    def load(self, path: str, **options: Any) -> Any:
        """The model. options: of from_pretrained."""
        named = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False).architectures[0]
        cls = getattr(transformers, named, transformers.AutoModelForCausalLM)  # finds classes that a user registered
        return cls.from_pretrained(path, **options)

    def logits(self, ids: list[int]) -> Tensor:
        """[T, V] of a single document."""
        tensor = torch.tensor([ids], device=self.device)
        return self.model(input_ids=tensor, use_cache=False, **self.images([ids])).logits[0].float()

    def images(self, ids: list[list[int]]) -> dict[str, Any]:
        """Forward arguments for the images of a batch (image_reference.py)."""
        return {}

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """(Log p of each token given the tokens before it, entropy of that distribution), [T] each; entry 0 is 0."""
        logprob = self.logits(ids).log_softmax(-1)[:-1]
        targets = torch.tensor(ids[1:], device=self.device)
        chosen = logprob.gather(1, targets[:, None])[:, 0]
        entropy = -(logprob.exp() * logprob).sum(-1)
        zero = torch.zeros(1, device=self.device)
        return torch.cat([zero, chosen]).cpu(), torch.cat([zero, entropy]).cpu()

    def gradients(self, documents: Sequence[Document]) -> tuple[float, dict[str, Tensor]]:
        """(Loss = sum(w ce) / sum(w) over all documents, gradient of every used parameter)."""
        return self._backward([([ids], [mask], None) for ids, mask in documents], documents), self.current_gradients()

    def padded_gradients(self, documents: Sequence[Document], size: int = 4) -> dict[str, Tensor]:
        """Gradients from right-padded batches of `size` with a mask, which show the reference's rounding noise."""
        batches: list[Batch] = []
        for start in range(0, len(documents), size):
            batch = documents[start : start + size]
            longest = max(2, *(len(ids) for ids, _ in batch))
            ids = [i + [0] * (longest - len(i)) for i, _ in batch]
            masks = [m + [0.0] * (longest - len(m)) for _, m in batch]
            mask_BT = torch.tensor([[1] * len(i) + [0] * (longest - len(i)) for i, _ in batch], device=self.device)
            batches.append((ids, masks, mask_BT))
        self._backward(batches, documents)
        return self.current_gradients()

    def _backward(self, batches: Sequence[Batch], documents: Sequence[Document]) -> float:
        """Run forward and backward batch by batch; returns the loss without the auxiliary loss. With whole_step, the
        auxiliary loss follows at the end, through the stored graphs."""
        self.model.zero_grad(set_to_none=True)
        total = sum(sum(mask[1:]) for _, mask in documents) or 1.0
        tokens = sum(len(ids) for ids, _ in documents)
        loss, routed_documents = 0.0, list[list[Tensor]]()
        for batch in batches:
            ce_sum, routed = self._forward(*batch)
            auxiliary = 0.0 if self.whole_step else sum(len(x[0]) * self._balance(x) for x in routed) / tokens
            part = ce_sum / total + self.balance * auxiliary
            if part.requires_grad:  # false for text if only a vision tower is trained
                (part * self.scale).backward(retain_graph=self.whole_step)
            loss, routed_documents = (
                loss + float(ce_sum.detach() / total),
                routed_documents + routed if self.whole_step else [],
            )
        if self.whole_step:
            balance = self._balance([torch.cat(layer) for layer in zip(*routed_documents, strict=True)])
            (self.balance * balance * self.scale).backward()
        return loss

    def _forward(
        self, ids: list[list[int]], masks: list[list[float]], mask_BT: Tensor | None
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """(Sum of w ce, for each document the routers' logits of each layer, [T, experts]; [] without `balance`)."""
        tensor = torch.tensor(ids, device=self.device)
        extra = self.images(ids) | ({"output_router_logits": True} if self.balance else {})
        out = self.model(input_ids=tensor, attention_mask=mask_BT, use_cache=False, **extra)
        weights = torch.tensor(masks, device=self.device)[:, 1:]
        ce = -out.logits.float()[:, :-1].log_softmax(-1).gather(2, tensor[:, 1:, None])[:, :, 0]
        if not self.balance:
            return (ce * weights).sum(), []
        lengths = [len(i) for i in ids] if mask_BT is None else mask_BT.sum(1).tolist()
        layers = [layer.reshape(len(lengths), -1, layer.shape[-1]) for layer in out.router_logits]
        return (ce * weights).sum(), [[layer[i, :n] for layer in layers] for i, n in enumerate(lengths)]

    def _balance(self, layers: list[Tensor]) -> Any:
        function = sys.modules[type(self.plain).__module__].load_balancing_loss_func
        return function(tuple(layers), layers[0].shape[-1], self.plain.config.num_experts_per_tok)

    def current_gradients(self) -> dict[str, Tensor]:
        """A copy of every existing gradient."""
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Every parameter, under each of its names."""
        return list(self.model.named_parameters(remove_duplicate=False))

    def weights(self) -> dict[str, Tensor]:
        """A copy of every parameter."""
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def start(
        self, optimizer: torch.optim.Optimizer, clip: float | None = 1.0, state: torch.dtype = torch.float32
    ) -> None:
        """Begin training. optimizer: over the model, with a `factor` on the rate per group (reference_optimizer.py).

        clip: the maximum gradient norm. state: dtype to which the optimizer's state is rounded after each step.
        """
        self.optimizer, self.clip, self.state = optimizer, clip, state

    def step(self, documents: Sequence[Document], lr: float, padded: bool = False) -> tuple[float, float]:
        """Run one optimizer step; returns (loss, gradient norm before clipping). padded: use padded_gradients; the loss
        is then 0."""
        loss = 0.0
        if padded:
            self.padded_gradients(documents)
        else:
            loss, _ = self.gradients(documents)
        return loss, self.update(lr)

    def update(self, lr: float) -> float:
        """One optimizer step with the current gradients; returns their norm before clipping."""
        assert self.optimizer is not None
        norm = torch.stack([g.double().norm() for g in self.current_gradients().values()]).norm()
        if self.clip is not None:  # torch's own clipping sums squares in fp32: 1% off on a CPU at 1e8 elements
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(min(1.0, self.clip / (float(norm) + 1e-6)))
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        self.optimizer.step()
        for value in (value for state in self.optimizer.state.values() for value in state.values()):
            if isinstance(value, Tensor) and value.ndim:
                value.copy_(value.to(self.state))
        return float(norm)
