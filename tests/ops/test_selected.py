"""Single logits, log-sum-exp and hidden states that an objective asks for: as in all logits, and plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.test_head import TILES, TRANSFORMS, close, problem
from tests.support.cases import open_engine, saved_model, world_of
from tests.support.pool import run
from weft.engine.losses.base import Batch, LossOutput
from weft.engine.losses.load import check_objective
from weft.errors import UserError
from weft.models.readouts import ReadoutSpec, capture_outputs
from weft.ops.communicator import ThreadCommunicator, ThreadGroup
from weft.ops.head import LogitTransform, VocabularyShard
from weft.ops.selected import selected_logits
from weft.verify.observed import to_documents

K = 5
IDS = (7, 11, 30)
HIDDEN = {"qwen3": "model.layers.1.mlp", "gemma2": "model.layers.1.mlp", "lfm2": "model.layers.0.conv"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_values_and_gradients_equal_full_logits(
    transform: LogitTransform, with_bias: bool, tile: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    hidden, weight, bias, targets = problem(11, dtype)
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    ids = torch.stack([targets, (targets * 3 + 1) % 37, targets], 1)  # one of them twice
    got = selected_logits(
        hidden, weight, bias if with_bias else None, ids, transform, top=K, temperature=0.6, tile=tile
    )
    logits = transform(hidden @ weight.T + (bias if with_bias else 0)) / 0.6
    top, top_ids = logits.topk(K, 1)
    expected = [logits.gather(1, ids), top, logits.logsumexp(1)]
    assert torch.equal(got.top_ids, top_ids)
    actual, tolerance = [got.chosen, got.top, got.logsumexp], 1e-12 if dtype == torch.float64 else 1e-5
    upstream = [torch.randn(value.shape, dtype=dtype) for value in expected]
    for actual_value, reference in zip(actual, expected, strict=True):
        close(actual_value, reference, tolerance)
    for chosen in ([0], [1], [2], [0, 1, 2]):  # each alone may have a gradient
        gradients, reference_gradients = (
            torch.autograd.grad([results[i] for i in chosen], inputs, [upstream[i] for i in chosen], retain_graph=True)
            for results in (actual, expected)
        )
        for actual_value, reference in zip(gradients, reference_gradients, strict=True):
            close(actual_value, reference, tolerance)


@pytest.mark.parametrize("top_count", [0, 3, 20])
def test_parts_of_a_vocabulary_are_joined(top_count: int) -> None:
    """Over threads that stand for ranks; 20 of the largest logits are more than one part has."""
    hidden, weight, bias, targets = problem(11, torch.float64)
    ids = torch.stack([targets, (targets * 3 + 1) % 37], 1)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    expected = selected_logits(*leaves, ids, LogitTransform(softcap=3.0), top=top_count, temperature=0.6)
    upstream = [torch.randn_like(x) for x in (expected.chosen, expected.top, expected.logsumexp)]
    expected_gradients = torch.autograd.grad([expected.chosen, expected.top, expected.logsumexp], leaves, upstream)
    group, borders = ThreadGroup(3), [0, 12, 24, 37]

    def part(rank: int) -> tuple[Any, Any]:
        rows = slice(borders[rank], borders[rank + 1])
        inputs = [x.clone().requires_grad_() for x in (hidden, weight[rows].detach(), bias[rows].detach())]
        shard = VocabularyShard(rows.start, ThreadCommunicator(group, rank))
        got = selected_logits(*inputs, ids, LogitTransform(softcap=3.0), top=top_count, temperature=0.6, shard=shard)
        return got, torch.autograd.grad([got.chosen, got.top, got.logsumexp], inputs, upstream)

    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(part, range(3)))
    for got, _ in parts:
        assert torch.equal(got.top_ids, expected.top_ids)
        for value, reference in zip(got, expected, strict=True):
            close(value.detach().double(), reference.detach().double(), 1e-12)
    of_hidden, of_weight, of_bias = zip(*(gradients for _, gradients in parts), strict=True)
    for value, reference in zip(
        (sum(of_hidden), torch.cat(of_weight), torch.cat(of_bias)), expected_gradients, strict=True
    ):
        close(value, reference, 1e-12)


def test_no_predictions_give_zero_gradients() -> None:
    hidden, weight, bias, targets = problem(0, torch.float32)
    got = selected_logits(hidden, weight, bias, targets[:, None], LogitTransform(), top=2)
    assert got.chosen.shape == (0, 1) and got.top.shape == got.top_ids.shape == (0, 2)
    (got.chosen.sum() + got.top.sum() + got.logsumexp.sum()).backward()
    for x in (hidden, weight, bias):
        assert x.grad is not None and x.grad.shape == x.shape and not x.grad.any()


class LargestResult(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, Tensor):
                self.most = max(self.most, value.numel())
        return out


def test_all_logits_are_never_there() -> None:
    """600 x 4096 of them: the largest tensor of forward and backward is the weight's gradient."""
    hidden, weight, _, targets = problem(600, torch.float32, vocabulary=4096, width=8)
    with LargestResult() as largest:
        got = selected_logits(hidden, weight, None, targets[:, None], LogitTransform(), top=K, tile=(100, 256))
        (got.chosen.sum() + got.top.square().sum() + got.logsumexp.sum()).backward()
    assert largest.most <= weight.numel() < 600 * 4096 / 50


# ---------------------------------------------------------------- an objective, beside plain transformers


class EveryReadout:
    """Distillation from a distribution over chosen tokens, entropy of the largest logits, and a penalty of states."""

    readouts = frozenset({"logprob", "entropy", "logsumexp", "chosen_logits", f"top_logits/{K}", "top_logits/2"})
    every_token = False

    def __init__(self, family: str) -> None:
        self.hidden = ("model.layers.0", HIDDEN[family])
        self.readouts = self.readouts | {f"hidden/{name}" for name in self.hidden}

    def normaliser(self, plan: Any) -> float:
        return float(plan.totals.weight)

    def logprob_grad(self, weights_N: Tensor) -> None:
        return None

    def token_ids(self, targets_N: Tensor, arrays: dict[str, Tensor]) -> Tensor:
        return torch.cat([targets_N[:, None], targets_N.new_tensor(IDS).expand(len(targets_N), -1)], 1)

    def __call__(self, batch: Batch) -> LossOutput:
        readouts = batch.readouts
        assert torch.equal(readouts["top_ids/2"], readouts[f"top_ids/{K}"][:, :2])
        hidden = [readouts[f"hidden/{name}"] for name in self.hidden]
        losses = loss_of(
            readouts["logprob"], readouts["entropy"], readouts["logsumexp"], readouts["chosen_logits"],
            readouts[f"top_logits/{K}"],
            readouts["top_logits/2"], hidden,
        )  # fmt: skip
        loss = (batch.weights_N * losses).sum()
        return LossOutput(loss, {"loss": (loss.detach(), batch.weights_N.sum())})


def loss_of(
    logprob: Tensor,
    entropy: Tensor,
    lse: Tensor,
    chosen: Tensor,
    top: Tensor,
    top_two: Tensor,
    hidden: Sequence[Tensor],
) -> Tensor:
    """[N]"""
    teacher = torch.tensor([0.4, 0.3, 0.2, 0.1])
    distilled = -((chosen - lse[:, None]) * teacher).sum(1)
    spread = (top - lse[:, None]).exp().sum(1) + 0.01 * top_two.square().sum(1)
    return distilled + spread - 0.1 * logprob - 0.1 * entropy + sum(h.square().mean(1) for h in hidden)


DOCUMENTS = [(list(range(3, 3 + n)), [0, *[1] * (n - 2), 0]) for n in (9, 4, 17, 6, 12, 3)]


def of_weft(
    path: str, family: str, mesh: str, layout: str, sections: dict[str, Any]
) -> tuple[float, dict[str, Tensor]]:
    objective = EveryReadout(family)
    readouts_asked = sorted(objective.readouts)
    engine = open_engine(path, mesh, step={"max_tokens_per_device": 32}, readouts=readouts_asked, **sections)
    assert engine.built.layout == layout
    documents, metas = to_documents(engine, DOCUMENTS)
    metrics = engine.accumulate(engine.plan(metas), documents, objective)
    return float(metrics["loss"] or 0.0), {n: g for n, g in engine.gradients() if g is not None}


def keep(outputs: dict[str, Tensor], name: str, _: Any, __: Any, output: Any) -> None:
    outputs[name] = (output[0] if isinstance(output, tuple) else output)[0]


def of_transformers(path: str, family: str) -> tuple[float, dict[str, Tensor]]:
    """Each document alone, with all its logits, and autograd."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    total, count, hidden = torch.zeros(()), 0, ("model.layers.0", HIDDEN[family])
    for tokens, mask in DOCUMENTS:
        outputs: dict[str, Tensor] = {}
        hooks = [model.get_submodule(name).register_forward_hook(partial(keep, outputs, name)) for name in hidden]
        ids = torch.tensor([tokens])
        logits = model(ids, use_cache=False).logits[0, :-1]
        for hook in hooks:
            hook.remove()
        trained = torch.tensor(mask[1:]).bool()
        z, targets = logits[trained], ids[0, 1:][trained]
        logprobs = z.log_softmax(1)
        chosen = torch.cat([z.gather(1, targets[:, None]), z[:, list(IDS)]], 1)
        losses = loss_of(
            logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1), z.logsumexp(1), chosen,
            z.topk(K, 1).values, z.topk(2, 1).values, [outputs[name][:-1][trained] for name in hidden],
        )  # fmt: skip
        total, count = total + losses.sum(), count + len(targets)
    (total / count).backward()
    return float(total.detach() / count), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


CASES = [
    ("qwen3", "1", "packed", {}),
    ("qwen3", "2", "packed", {}),
    ("qwen3", "2", "packed", {"model": {"recompute": "full"}}),
    ("gemma2", "1", "packed", {}),  # soft-capped, tied
    ("lfm2", "1", "packed", {}),
    ("lfm2", "2", "packed", {}),
    ("qwen3", "tp4", "packed", {}),
    ("gemma2", "2xtp2", "packed", {}),
    ("lfm2", "tp2", "packed", {"model": {"recompute": "full"}}),
]


@pytest.mark.parametrize(("family", "mesh", "layout", "sections"), CASES)
def test_parity_with_plain_transformers(family: str, mesh: str, layout: str, sections: dict[str, Any]) -> None:
    path = saved_model(family)
    loss, expected = of_transformers(path, family)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for actual, gradients in run(world_of(mesh), of_weft, path, family, mesh, layout, sections):
        assert actual == pytest.approx(loss, rel=1e-5)
        assert gradients.keys() == expected.keys()
        for name, reference in expected.items():
            allowed = 1e-5 * max(float(reference.abs().max()), 1e-3 * largest)
            assert float((gradients[name] - reference).abs().max()) <= allowed, name


# ---------------------------------------------------------------- what is refused


class Asking(EveryReadout):
    def __init__(self, *readouts: str) -> None:
        self.readouts = frozenset(readouts)


@pytest.mark.parametrize("name", ["value", "top_logits/0", "top_logits/many", "top_logits", "hidden"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(
        UserError, match=f"names {name} in `readouts`; the names are logprob, entropy, logsumexp, chosen"
    ):
        check_objective(Asking("logprob", name), "mine")


def test_chosen_logits_need_to_be_chosen() -> None:
    objective = Asking("chosen_logits")
    objective.token_ids = None  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"has no method token_ids\(targets_N, arrays\)"):
        check_objective(objective, "mine")


def opened(path: str, readouts: Sequence[str], compiled: bool = False, mesh: str = "1") -> str:
    try:
        open_engine(path, mesh, readouts=readouts, model={"compile": compiled})
    except UserError as error:
        return str(error)
    return ""


def test_what_a_model_does_not_have_is_said_before_it_loads() -> None:
    path = saved_model("qwen3")
    (message,) = run(1, opened, path, ["hidden/model.layers.9"])
    assert message.startswith(
        "train.loss: `hidden/model.layers.9` in `readouts`: the model has no module model.layers.9."
    )
    assert "Did you mean model.layers.1 or model.layers.0" in message
    assert run(1, opened, path, ["hidden/model.layers.1", "top_logits/5"]) == [""]
    assert "logits. Lower the number." in run(1, opened, path, ["top_logits/999"])[0]
    assert "Set model.compile=false." in run(1, opened, path, ["hidden/model.norm"], True)[0]


def test_parts_of_states_are_refused() -> None:
    inside = ["hidden/model.layers.1.mlp", "hidden/model.layers.1.mlp.down_proj"]
    for message in run(2, opened, saved_model("qwen3"), inside, False, "tp2"):
        assert "is inside model.layers.1.mlp, which mesh.tp shards" in message
    assert run(2, opened, saved_model("qwen3"), inside[:1], False, "tp2") == ["", ""]


def test_what_is_inside_of_a_module_that_carries_state_is_refused() -> None:
    """It runs documents in groups, padded; what the module itself gives is of the row."""
    (message,) = run(1, opened, saved_model("lfm2"), ["hidden/model.layers.0.conv.in_proj"])
    assert "model.layers.0.conv carries state" in message and "Read model.layers.0.conv or its layer." in message
    assert run(1, opened, saved_model("lfm2"), ["hidden/model.layers.0.conv"]) == [""]


def test_a_module_that_gives_no_vector_for_each_token() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Flatten(0))
    message = r"hidden/1` in `readouts`: the module returns \[12\], not a vector for each of 3 tokens"
    with pytest.raises(UserError, match=message), capture_outputs(module, ["0", "1"], 3):
        module(torch.zeros(3, 4))


def wrong_ids(path: str, kind: str) -> str:
    engine = open_engine(path, "1")
    documents, metas = to_documents(engine, DOCUMENTS)
    objective = Asking("chosen_logits")
    wrong = {"flat": lambda t, a: t, "float": lambda t, a: t[:, None].float(), "list": lambda t, a: [1, 2]}
    objective.token_ids = wrong[kind]  # type: ignore[assignment]
    try:
        engine.accumulate(engine.plan(metas), documents, objective)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["flat", "float", "list"])
def test_tokens_that_are_none(kind: str) -> None:
    (message,) = run(1, wrong_ids, saved_model("qwen3"), kind)
    assert "token_ids() of Asking returns " in message and "must return int64 of shape [39, tokens]" in message


def test_what_is_wanted() -> None:
    assert ReadoutSpec.parse({"top_logits/3", "top_logits/20", "hidden/b", "hidden/a", "logprob"}) == ReadoutSpec(
        20, ("a", "b"), ()
    )
