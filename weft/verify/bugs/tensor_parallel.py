"""Bugs of tensor parallelism: a sum over its ranks that is missing or computed twice, and parts of the wrong rank.

The checks of a small copy before the start would catch most of them. In these checks they are inactive (`rehearsing`),
so that figures show them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.engine.batch.document import Document
from weft.models.segments import DimSegment, TPSpec
from weft.ops.communicator import GroupCommunicator
from weft.parallel.mesh import TPAxis, local_shard
from weft.parallel.shards.cuts import ShardSpec, split
from weft.parallel.tp.divide import TensorParallel, sum_partial_gradients
from weft.verify.bugs import ACCURACY, AGREE, GRADIENTS, LOGPROB, NORM, Original, Plant, bug, rehearsing

WALKED = "tests/parallel/test_tensor_parallel_weights.py: the walker gives what the files have"
REPLICA_CHECK = "weft.engine.replicas.ReplicaCheck.check"
MEGATRON = "NVIDIA/Megatron-LM#7452"
NEEDS = "mesh.tp above 1"


# ---------------------------------------------------------------- gradients of weights that several ranks have


def _left_out(
    plant: Plant, original: Original, args: tuple[dict[str, ShardSpec], TPAxis, Any], wrong: Callable[[str], bool]
) -> Any:
    result = original(*args)
    if rehearsing() or not isinstance(args[1].ranks, GroupCommunicator):
        return result
    values = {name: ranks for name, ranks in result.items() if not wrong(name)}
    plant.hits += len(result) - len(values)
    return values


@bug(
    "B35", "weft.parallel.tp.divide:find_partial_parameters",
    "gradients of norms of heads, which include only a rank's heads, are not summed over tp",
    caught_by=GRADIENTS, issue="NVIDIA-NeMo/RL#3716", ranks=2, needs=f"{NEEDS} and norms of heads, as in qwen3",
)  # fmt: skip
def head_norms_apart(plant: Plant, original: Original, *args: Any) -> Any:
    return _left_out(plant, original, args, lambda name: name.endswith(("q_norm.weight", "k_norm.weight")))


@bug(
    "B14", "weft.parallel.tp.divide:find_partial_parameters",
    "gradients of routers, whose experts are split over tp, are not summed over tp",
    caught_by=GRADIENTS, issue="huggingface/transformers#48205", ranks=2, needs=f"{NEEDS} and experts",
)  # fmt: skip
def routers_apart(plant: Plant, original: Original, *args: Any) -> Any:
    return _left_out(plant, original, args, lambda name: not {"gate", "router"}.isdisjoint(name.split(".")))


@bug(
    "B35", "weft.parallel.tp.divide:find_partial_parameters",
    "with sequence parallelism, gradients of norms between blocks include only a rank's tokens",
    caught_by=GRADIENTS, issue="NVIDIA-NeMo/Automodel#3822", ranks=2, needs=NEEDS,
)  # fmt: skip
def block_norms_apart(plant: Plant, original: Original, *args: Any) -> Any:
    return _left_out(plant, original, args, lambda name: "layernorm" in name)


@bug(
    "B35", "weft.parallel.tp.divide:find_partial_parameters",
    "gradients of key and value heads that are on several ranks are not summed",
    caught_by=GRADIENTS, issue="huggingface/transformers#48307", ranks=4,
    needs="mesh.tp above the number of key and value heads",
)  # fmt: skip
def repeated_heads_apart(plant: Plant, original: Original, *args: Any) -> Any:
    return _left_out(plant, original, args, lambda name: args[0][name].divides)


@bug(
    "B35", "weft.engine.engine:sum_partial_gradients",
    "gradients of key and value heads that are on several ranks are summed twice",
    caught_by=GRADIENTS, issue=MEGATRON, ranks=4, needs="mesh.tp above the number of key and value heads",
)  # fmt: skip
def repeated_heads_twice(plant: Plant, original: Original, module: nn.Module, divided: TensorParallel) -> None:
    original(module, divided)
    for name, parameter in module.named_parameters():
        cut = divided.cuts[name]
        for copies, part in [] if parameter.grad is None else split(parameter, local_shard(parameter.grad), cut):
            if 1 < copies < cut.size:
                plant.hit()
                part.mul_(2)


@bug(
    "B35", "weft.engine.engine:Engine.complete_gradients",
    "gradients that are sums over tp are summed again each time they are read",
    caught_by=NORM, issue="NVIDIA-NeMo/Automodel#3857", ranks=2, needs=NEEDS,
)  # fmt: skip
def sums_made_again(plant: Plant, original: Original, engine: Any) -> None:
    original(engine)
    plant.hits += bool(engine.divided.partial)
    engine._complete = False


@bug(
    "B35", "weft.engine.engine:Engine.accumulate",
    "accumulated gradients are summed over tp with every micro-batch, including the part that was already summed",
    caught_by="gradients, many micro-batches", issue="huggingface/transformers#48307", ranks=2, needs=NEEDS,
)  # fmt: skip
def sums_of_every_micro_batch(plant: Plant, original: Original, self: Any, plan: Any, *args: Any) -> Any:
    executor = self._executor
    run = executor.forward_backward

    def forward_backward(*arguments: Any, last: bool, **options: Any) -> Any:
        loss = run(*arguments, last=last, **options)
        if not last and self.divided.partial:
            plant.hit()
            sum_partial_gradients(self.module, self.divided)
        return loss

    executor.forward_backward = forward_backward
    try:
        return original(self, plan, *args)
    finally:
        del executor.forward_backward


@bug(
    "B35", "weft.engine.engine:sum_partial_gradients",
    "the gradient of a tied head is added once for each of its names",
    caught_by=GRADIENTS, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and a model with a tied head",
)  # fmt: skip
def tied_head_twice(plant: Plant, original: Original, module: nn.Module, divided: TensorParallel) -> None:
    original(module, divided)
    items: set[int] = set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in items and parameter.grad is not None:
            plant.hit()
            local_shard(parameter.grad).mul_(2)
        items.add(id(parameter))


@bug(
    "B17", "weft.engine.optim.early_norms:split",
    "the gradient norm counts replicated parameters once for each rank of tp",
    caught_by=NORM, issue="NVIDIA-NeMo/RL#3788", ranks=2, needs=NEEDS,
)  # fmt: skip
def copies_in_the_norm(plant: Plant, original: Original, parameter: Tensor, values: Tensor, cut: ShardSpec) -> Any:
    plant.hits += max(cut.copies) > 1
    return [(1, values)]


@bug(
    "B15", "weft.engine.executor:Executor.forward_backward",
    "the experts' auxiliary loss counts once for each rank of tp",
    caught_by=GRADIENTS, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and model.router_aux_loss=document",
)  # fmt: skip
def balance_per_tp_rank(
    plant: Plant, original: Original, self: Any, row: Any, objective: Any, factors: Any, *args: Any, **options: Any
) -> Any:
    plant.hits += bool(self.balance) and self.mesh.tp_size > 1
    factors = replace(factors, balance=factors.balance * self.mesh.tp_size)
    return original(self, row, objective, factors, *args, **options)


# ---------------------------------------------------------------- inputs and outputs of blocks


def _own_tokens(x: Tensor, ranks: GroupCommunicator) -> Tensor:
    """[B, T, H] -> [B, T / ranks, H]."""
    tokens = x.shape[1] // dist.get_world_size(ranks.group)
    return x.narrow(1, dist.get_rank(ranks.group) * tokens, tokens).contiguous()


@bug(
    "B35", "weft.parallel.tp.sequence:GatherTokens.backward",
    "the gradient of a block's input includes only a rank's heads and columns",
    caught_by=GRADIENTS, issue=MEGATRON, ranks=2, needs=NEEDS,
)  # fmt: skip
def block_inputs_apart(plant: Plant, original: Original, ctx: Any, grad: Tensor) -> Any:
    if not isinstance(ctx.ranks, GroupCommunicator):
        return original(ctx, grad)
    plant.hit()
    return _own_tokens(grad, ctx.ranks), None


@bug(
    "B35", "weft.parallel.tp.sequence:ReduceScatterTokens.forward",
    "the output of a block is not summed over tp",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs=NEEDS,
)  # fmt: skip
def block_outputs_apart(plant: Plant, original: Original, ctx: Any, x: Tensor, ranks: Any) -> Any:
    if not isinstance(ranks, GroupCommunicator):
        return original(ctx, x, ranks)
    plant.hit()
    ctx.ranks = ranks
    return _own_tokens(x, ranks)


@bug(
    "B35", "weft.parallel.tp.sequence:_JoinTokens.backward",
    "the gradient of the last hidden states, which is complete on every rank, is summed over tp",
    caught_by=GRADIENTS, issue="huggingface/transformers#48687", ranks=2, needs=NEEDS,
)  # fmt: skip
def last_states_summed(plant: Plant, original: Original, ctx: Any, grad: Tensor) -> Any:
    local, *args = original(ctx, grad)
    if rehearsing():
        return local, *args
    plant.hit()
    return local * 2, *args


@bug(
    "B35", "weft.ops.head:_Running.joined",
    "the loss treats a rank's part of the vocabulary as the complete vocabulary",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs=NEEDS,
)  # fmt: skip
def vocabulary_of_a_part(plant: Plant, original: Original, self: Any, ranks: Any) -> Any:
    if not isinstance(ranks, GroupCommunicator):
        return original(self, ranks)
    plant.hit()
    return self


@bug(
    "B35", "weft.ops.head:_Running.joined",
    "held-out targets count as most likely if they are the most likely of a rank's part of the vocabulary",
    caught_by=ACCURACY, issue=MEGATRON, ranks=2, needs=NEEDS,
)  # fmt: skip
def likeliest_of_a_part(plant: Plant, original: Original, self: Any, ranks: Any) -> Any:
    if self.largest is None or not isinstance(ranks, GroupCommunicator):
        return original(self, ranks)
    of_a_part = self.largest.clone()
    result = original(self, ranks)
    plant.hits += not torch.equal(result.largest, of_a_part)
    return result._replace(largest=of_a_part)


@bug(
    "B35", "weft.parallel.tp.divide:divide_vocabulary",
    "a rank also embeds the first token after its part of the vocabulary",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs=NEEDS,
)  # fmt: skip
def border_embedded_twice(
    plant: Plant, original: Original, module: Any, cuts: dict[str, ShardSpec], axis: TPAxis, total: Any
) -> None:
    if rehearsing() or not isinstance(axis.ranks, GroupCommunicator):
        original(module, cuts, axis, total)
        return
    embedding = module.get_submodule(module.facts.embedding)
    cut, items = cuts[f"{module.facts.embedding}.weight"], list[Tensor]()
    ((first, count),) = cut.ranges[cut.rank]

    class VocabularySum:
        @staticmethod
        def apply(output: Tensor, ranks: Any) -> Tensor:
            tokens = items.pop()
            border = (tokens == first + count)[..., None]
            plant.hits += bool(border.any())
            last = type(embedding).forward(embedding, tokens.new_tensor([count - 1]))
            result: Tensor = total.apply(output + border * last, ranks)
            return result

    embedding.register_forward_pre_hook(lambda _, args: items.append(args[0]))
    original(module, cuts, axis, VocabularySum)


@bug(
    "B35", "weft.parallel.tp.divide:divide_vocabulary",
    "each rank's part of the vocabulary has a padding row, which has no gradient",
    caught_by=GRADIENTS, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and an embedding with a padding row",
)  # fmt: skip
def padding_in_every_part(
    plant: Plant, original: Original, module: Any, cuts: dict[str, ShardSpec], axis: TPAxis, total: Any
) -> None:
    embedding = module.get_submodule(module.facts.embedding)
    padding = embedding.padding_idx
    original(module, cuts, axis, total)
    if not rehearsing() and padding is not None and padding < len(embedding.weight):
        plant.hits += embedding.padding_idx != padding
        embedding.padding_idx = padding


def _of_every_rank(plant: Plant, original: Original, module: Any, ranks: int, experts: bool) -> None:
    if rehearsing() or experts == hasattr(module, "bias"):
        original(module, ranks)
    else:
        plant.hit()


@bug(
    "B35", "weft.parallel.tp.divide:share_bias",
    "every rank of tp adds the bias of a layer whose outputs are summed",
    caught_by=GRADIENTS, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and such a bias, as in gpt2",
)  # fmt: skip
def bias_of_every_rank(plant: Plant, original: Original, module: Any, ranks: int) -> None:
    _of_every_rank(plant, original, module, ranks, experts=False)


@bug(
    "B35", "weft.parallel.tp.divide:share_bias",
    "every rank of tp adds the biases of experts",
    caught_by=GRADIENTS, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and experts with biases, as in gpt_oss",
)  # fmt: skip
def expert_bias_of_every_rank(plant: Plant, original: Original, module: Any, ranks: int) -> None:
    _of_every_rank(plant, original, module, ranks, experts=True)


@bug(
    "B35", "weft.models.mixer_shards:mean_square",
    "the output norm of a state mixer includes only a rank's heads instead of all heads",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and such a norm, as in bamba",
)  # fmt: skip
def mixer_norm_of_own_heads(plant: Plant, original: Original, parts: Tensor, sums: Any) -> Tensor:
    if not rehearsing():
        plant.hits += len(sums)
        sums = ()
    result: Tensor = original(parts, sums)
    return result


# ---------------------------------------------------------------- the part of a rank


@bug(
    "B35", "weft.parallel.tp.divide:tp_shard_spec",
    "a fused projection is split into equal sizes, not segment by segment",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and fused projections, as in phi3",
)  # fmt: skip
def fused_cut_as_one(
    plant: Plant, original: Original, name: str, shape: tuple[int, ...], style: TPSpec, axis: TPAxis
) -> ShardSpec:
    if not rehearsing() and len(style.segments) > 1:
        plant.hit()
        style = replace(style, segments=(DimSegment(sum(part.size for part in style.segments), 1),))
    result: ShardSpec = original(name, shape, style, axis)
    return result


@bug(
    "B35", "weft.parallel.tp.divide:tp_shard_spec",
    "ranks of tp have the sinks of another rank's heads",
    caught_by=LOGPROB, issue=MEGATRON, ranks=2, needs=f"{NEEDS} and sinks, as in gpt_oss",
)  # fmt: skip
def sinks_of_another_rank(plant: Plant, original: Original, name: str, *args: Any) -> ShardSpec:
    result: ShardSpec = original(name, *args)
    if rehearsing() or not name.endswith("sinks"):
        return result
    plant.hit()
    return replace(result, ranges=result.ranges[::-1])


@bug(
    "B22", "weft.parallel.shards.cuts:ShardSpec.boxes",
    "in engines, exports and checkpoints, the parts of two ranks of tp are exchanged",
    caught_by=WALKED, issue="THUDM/slime#1673", ranks=2, needs=NEEDS,
)  # fmt: skip
def parts_exchanged(plant: Plant, original: Original, self: ShardSpec, shards: Any) -> Any:
    plant.hits += self.divides
    return original(replace(self, rank=self.size - 1 - self.rank), shards)


@bug(
    "B22", "weft.parallel.shards.cuts:ShardSpec.boxes",
    "engines, exports and checkpoints get heads that are on several ranks once from each rank",
    caught_by=WALKED, issue="THUDM/slime#1673", ranks=4, needs="mesh.tp above the number of key and value heads",
)  # fmt: skip
def repeated_heads_sent_twice(plant: Plant, original: Original, self: ShardSpec, shards: Any) -> Any:
    result = original(self, shards)
    plant.hits += any(1 < copies < self.size for _, _, copies in result)
    return [(box, part, 1) for box, part, _ in result]


# ---------------------------------------------------------------- copies on several ranks


@bug(
    "B36", "weft.engine.executor:Executor.forward_backward",
    "ranks of tp draw different dropout masks for replicated activations",
    caught_by="weft.parallel.tp.divide.random_difference", issue=MEGATRON, ranks=2, needs=f"{NEEDS} and lora.dropout",
)  # fmt: skip
def dropout_apart(plant: Plant, original: Original, self: Any, *args: Any, **options: Any) -> Any:
    if self.mesh.tp is not None and self.mesh.tp.rank > 0 and self.config.lora.dropout:
        plant.hit()
        torch.rand(1, device=self.device)
    return original(self, *args, **options)


@bug(
    "B36", "weft.engine.engine:Engine.apply",
    "a replicated norm is updated differently on the last rank of tp",
    caught_by=AGREE, issue="NVIDIA-NeMo/Automodel#3822", ranks=2, needs=NEEDS,
)  # fmt: skip
def copy_drifts(plant: Plant, original: Original, self: Any, lr: float) -> Any:
    result = original(self, lr)
    cuts, tp = self.divided.cuts, self.mesh.tp
    if tp is not None and tp.rank == tp.size - 1:
        plant.hit()
        norm = next(p for name, p in self.module.named_parameters() if not cuts[name].divides)
        local_shard(norm.detach()).mul_(1 + 1e-6)
    return result


@bug(
    "B36", "weft.engine.batch.rows:build_row",
    "the last rank of tp has one different token",
    caught_by=REPLICA_CHECK, issue="verl-project/verl#2857", ranks=2, needs=NEEDS,
)  # fmt: skip
def other_token(
    plant: Plant, original: Original, indices: Any, documents: Mapping[int, Document], **options: Any
) -> Any:
    if indices and dist.get_rank() == dist.get_world_size() - 1:
        plant.hit()
        first = documents[indices[0]]
        documents = {**documents, indices[0]: replace(first, tokens=first.tokens.flip(0))}
    return original(indices, documents, **options)
