"""`weft compare-step` on a batch of each trainer, in the layout of its files, with its own loss in plain PyTorch.

The losses were written from the trainers' sources: TRL f2cd5771 (grpo_trainer.py), OpenRLHF 3c3be623 (models/loss.py),
NeMo-RL 7ea279ab (loss_functions.py), slime 624b824a (loss.py, ppo_utils.py; Miles has the same), ROLL 8eb27cc2
(rlvr/actor_worker.py, functionals.py) and prime-rl 559b4477 (rl/loss.py). B sequences in groups of G, prompts of P
columns padded on the left, answers of R columns padded on the right; all arrays are [B, P + R], entry t about token t.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.cases import write_small_job
from weft import cli

G, P, R = 3, 5, 8
PROMPTS, LENGTHS = (5, 5, 5, 3, 3, 3), (8, 2, 5, 7, 1, 4)
B = len(PROMPTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_job(tmp_path_factory.mktemp("trainers"))


class Batch(SimpleNamespace):
    """logp: logprobs of the current weights, with a gradient. advantages: of the file. a: those that the trainer uses.
    mask: of the file. trained: the mask that the trainer uses."""

    def __init__(self, folder: Path, *, moved: int = 0, temperature: float = 1.0, ddof: int = 1, used: int = 1) -> None:
        """moved: how much later than the mask of the file the trainer's is. temperature: of the trainer's logits. ddof,
        used: of the deviation of a group in the file's advantages, and in the trainer's."""
        draw = torch.Generator().manual_seed(3)
        prompts = torch.randint(5, 250, (2, P), generator=draw).repeat_interleave(G, 0)
        ids = torch.cat([prompts, torch.randint(5, 250, (B, R), generator=draw)], 1)
        attention = torch.zeros(B, P + R)
        mask = torch.zeros(B, P + R)
        for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
            attention[row, P - prompt : P + length] = 1
            mask[row, P : P + length] = 1
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        positions = (attention.cumsum(1) - 1).clamp(min=0).long()
        logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits / temperature
        logp = torch.cat([torch.zeros(B, 1), logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]], 1)
        old, reference = (logp.detach() + by * torch.randn(B, P + R, generator=draw) for by in (0.4, 0.5))
        rewards = torch.rand(B, generator=draw)

        def scaled(by: int) -> Tensor:
            groups = rewards.view(-1, G)
            deviation = groups.std(1, correction=by, keepdim=True) + 1e-6
            return ((groups - groups.mean(1, keepdim=True)) / deviation).view(B, 1).expand(B, P + R)

        super().__init__(
            model=model, ids=ids, attention=attention, mask=mask, logp=logp, old=old, ref=reference,
            engine=old + 0.9 * torch.randn(B, P + R, generator=draw), advantages=scaled(ddof), a=scaled(used),
            trained=mask.roll(moved, 1) * attention * (torch.arange(P + R) > 0),
        )  # fmt: skip

    def norm(self, loss: Tensor) -> float:
        loss.backward()
        return float(torch.stack([p.grad.norm() for p in self.model.parameters() if p.grad is not None]).norm())


# ---------------------------------------------------------------- losses


def surrogate(b: Batch, ratio: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    loss = -torch.min(ratio * b.a, ratio.clamp(1 - low, 1 + high) * b.a)
    return loss if dual is None else torch.where(b.a < 0, torch.min(loss, -dual * b.a), loss)


def means(loss: Tensor, mask: Tensor) -> Tensor:
    return (loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def sequence_ratio(b: Batch) -> Tensor:
    return means(b.logp - b.old, b.mask).exp()[:, None]


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    return (ref - logp).exp() - (ref - logp) - 1


def trl(b: Batch, kind: str = "grpo", high: float = 0.2, beta: float = 0.0, level: str = "token") -> Tensor:
    ratio = (b.logp - b.old).exp() if level == "token" else sequence_ratio(b)
    if kind == "cispo":
        loss = -ratio.clamp(max=high).detach() * b.a * b.logp
    elif kind == "sapo":
        temperature = torch.where(b.a > 0, 1.0, 1.05)
        loss = -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * b.a
    else:
        loss = surrogate(b, ratio, 0.2 if level == "token" else 3e-4, high)
    if beta:
        loss = loss + beta * k3(b.logp, b.ref)
    if kind in ("grpo", "sapo"):
        return means(loss, b.trained).mean()
    total = (loss * b.trained).sum()
    return total / {"dr_grpo": B * R, "bnpo": b.trained.sum(), "dapo": b.mask.sum(), "cispo": b.mask.sum()}[kind]


def openrlhf(b: Batch, dual: float | None = None, tis: bool = False, kl: str = "", parts: int = 1) -> Tensor:
    loss = surrogate(b, (b.logp - b.old).clamp(-20, 20).exp(), 0.2, 0.2, dual)
    if tis:
        loss = (b.old - b.engine).exp().clamp(0.5, 5.0) * loss
    d = b.logp - b.ref
    if kl:
        loss = loss + 0.01 * {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[kl].clamp(-10, 10)
    sums, tokens = ((x * b.trained).view(parts, -1).sum(1) for x in (loss, torch.ones_like(loss)))
    return (sums / tokens).mean()


def nemo(b: Batch, token: bool = True, penalty: float = 0.0, c: float | None = None, high: float = 0.2) -> Tensor:
    def reduced(x: Tensor) -> Tensor:
        return (x * b.trained).sum() / b.trained.sum() if token else means(x, b.trained).mean()

    loss = reduced(surrogate(b, (b.logp - b.old).exp() if token else sequence_ratio(b), 0.2, high, c))
    if penalty:
        loss = loss + penalty * reduced((b.logp - b.logp.detach()).exp() * k3(b.logp, b.ref).clamp(-10, 10))
    return loss


def slime(b: Batch, kl: str = "", high: float = 0.28, tis: float | None = None, per_token: bool = False) -> Tensor:
    loss = surrogate(b, (b.logp - b.old).exp(), 0.2, high)
    if tis is not None:
        loss = loss * (b.old - b.engine).exp().clamp(0, tis)
    d = b.logp - b.ref
    if kl:
        loss = loss + 0.02 * {"k1": d, "k2": d**2 / 2, "low_var_kl": ((-d).exp() - 1 + d).clamp(-10, 10)}[kl]
    return (loss * b.trained).sum() / b.trained.sum() if per_token else means(loss, b.trained).sum() / B


def roll(b: Batch, mode: str = "seq-mean-token-mean", dual: bool = True, kl: float = 0.0, high: float = 0.2) -> Tensor:
    loss = surrogate(b, (b.logp - b.old).exp(), 0.2, high)
    if dual:
        loss = torch.where(b.a < 0, -torch.max(-loss, 1.4 * b.a), loss)
    loss = loss + kl * k3(b.logp, b.ref).clamp(-10, 10)
    sums = (loss * b.trained).sum(-1)
    return {
        "token-mean": sums.sum() / b.trained.sum(),
        "seq-mean-token-sum": sums.sum() / B,
        "seq-mean-token-mean": means(loss, b.trained).mean(),
    }[mode]


def prime(b: Batch, kl_tau: float = 1e-3, mask: float = 0.2, mean: bool = True) -> Tensor:
    log_ratio = b.logp - b.engine
    difference = b.logp.exp() - b.engine.exp()
    invalid = torch.where(b.a > 0, difference > mask, difference < -mask)
    loss = -(~invalid).float() * b.a * log_ratio.exp() + kl_tau * log_ratio**2
    return (loss * b.trained).sum() / (b.trained.sum() if mean else 1)


# ---------------------------------------------------------------- files


def write_trl(b: Batch, numbers: dict[str, float], path: Path) -> Path:
    fields = {
        "prompt_ids": b.ids[:, :P], "prompt_mask": b.attention[:, :P].long(), "completion_ids": b.ids[:, P:],
        "completion_mask": b.mask[:, P:].long(), "advantages": b.advantages[:, 0], "num_items_in_batch": b.mask.sum(),
        "old_per_token_logps": b.old[:, P:], "ref_per_token_logps": b.ref[:, P:],
    }  # fmt: skip
    torch.save(fields | numbers, path / "trl.pt")
    return path / "trl.pt"


def write_openrlhf(b: Batch, numbers: dict[str, float], path: Path) -> Path:
    arrays = {
        "action_mask": b.mask, "action_log_probs": b.old, "base_action_log_probs": b.ref,
        "rollout_log_probs": b.engine, "advantages": b.advantages,
    }  # fmt: skip
    experience = {name: values[:, 1:] for name, values in arrays.items()}
    torch.save({**experience, "sequences": b.ids, "attention_mask": b.attention.long(), **numbers}, path / "o.pt")
    return path / "o.pt"


def rows_of(b: Batch) -> list[dict[str, Any]]:
    """The sequences without padding."""
    rows = []
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        span = slice(P - prompt, P + length)
        arrays = {"mask": b.mask, "old": b.old, "ref": b.ref, "engine": b.engine, "advantages": b.advantages}
        rows.append({"ids": b.ids[row, span], **{name: v[row, span] for name, v in arrays.items()}})
    return rows


def write_nemo(b: Batch, numbers: dict[str, float], path: Path) -> Path:
    lines: list[dict[str, Any]] = [dict(numbers)]
    for row in rows_of(b):
        names = {
            "token_ids": "ids", "token_loss_mask": "mask", "prev_logprobs": "old", "generation_logprobs": "engine",
            "reference_policy_logprobs": "ref", "advantages": "advantages",
        }  # fmt: skip
        line = {name: [row[field].tolist() + [0] * (P + R - len(row["ids"]))] for name, field in names.items()}
        lines.append(line | {"sample_loss_mask": [1.0], "input_lengths": [len(row["ids"])]})
    (path / "train_data_step1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return path / "train_data_step1.jsonl"


def write_slime(b: Batch, numbers: dict[str, float], path: Path) -> Path:
    names = {
        "loss_masks": "mask", "log_probs": "old", "ref_log_probs": "ref", "rollout_log_probs": "engine",
        "advantages": "advantages",
    }  # fmt: skip
    rows = rows_of(b)
    data: dict[str, Any] = {
        name: [row[field][-length:] for row, length in zip(rows, LENGTHS, strict=True)] for name, field in names.items()
    }
    data |= {"tokens": [row["ids"] for row in rows], "response_lengths": list(LENGTHS)}
    data |= {"total_lengths": [len(row["ids"]) for row in rows], "sample_indices": list(range(B))}
    torch.save({"rollout_id": 0, "rank": 0, "rollout_data": data, "cp_rank": 0, "cp_size": 1, **numbers}, path / "0.pt")
    return path / "0.pt"


def write_roll(b: Batch, numbers: dict[str, float], path: Path) -> Path:
    arrays = {"old_log_probs": b.old, "ref_log_probs": b.ref, "infer_logprobs": b.engine, "advantages": b.advantages}
    batch = {name: values[:, 1:] for name, values in arrays.items()}
    batch |= {"input_ids": b.ids, "attention_mask": b.attention.long(), "response_mask": b.mask.long()}
    torch.save(batch | numbers, path / "roll.pt")
    return path / "roll.pt"


def write_prime(b: Batch, numbers: dict[str, float], path: Path) -> Path:
    lines: list[dict[str, Any]] = [dict(numbers)]
    for row in rows_of(b):
        line = {"token_ids": row["ids"].tolist(), "loss_mask": row["mask"].bool().tolist()}
        line |= {"advantages": row["advantages"].tolist(), "inference_logprobs": row["engine"].tolist()}
        lines.append(line)
    (path / "rank_0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return path / "rank_0.jsonl"


Loss = Callable[..., Tensor]
TRAINERS: dict[str, tuple[Loss, Callable[[Batch, dict[str, float], Path], Path], tuple[str, ...]]] = {
    "TRL": (trl, write_trl, ("rl.preset=trl", "rl.correction=none", f"rollout.max_new_tokens={R}")),
    "OpenRLHF": (openrlhf, write_openrlhf, ("rl.preset=openrlhf", "rl.algorithm=reinforce++")),
    "NeMo-RL": (nemo, write_nemo, ("rl.preset=nemo-rl", "rl.kl_coef=0")),
    "slime": (slime, write_slime, ("rl.preset=slime", "rl.clip=[0.2, 0.28]")),
    "Miles": (slime, write_slime, ("rl.preset=miles", "rl.clip=[0.2, 0.28]")),
    "ROLL": (roll, write_roll, ("rl.preset=roll", "rl.dual_clip=1.4")),
    "prime-rl": (prime, write_prime, ("rl.old_logprobs=rollout", "rl.loss_aggregation=token_mean")),
}


def compare(
    folder: Path, trainer: str, settings: dict[str, Any], words: tuple[str, ...], capsys: Any, **plants: Any
) -> tuple[int, str]:
    """(Exit status, output) of the command on a batch of the trainer. plants: of Batch; `factor`: of loss and
    gradient; `stale`: the trainer's old logprobs are the current ones."""
    loss, write, preset = TRAINERS[trainer]
    factor, stale = plants.pop("factor", 1.0), plants.pop("stale", False)
    batch = Batch(folder, **plants)
    old = batch.old
    if stale:
        batch.old = batch.logp.detach()
    value = loss(batch, **settings) * factor
    numbers = {"loss": float(value), "grad_norm": batch.norm(value)}
    batch.old = old
    path = write(batch, numbers, folder)
    capsys.readouterr()
    status = cli.main(
        [
            "compare-step",
            str(path),
            f"model.path={folder / 'model'}",
            *preset,
            *words,
            "--device",
            "cpu",
            "--tolerance",
            "1e-5",
        ]
    )
    done = capsys.readouterr()
    return status, done.out + done.err


AGREES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "TRL grpo": ("TRL", {"beta": 0.04}, ("rl.loss_aggregation=sequence_mean", "rl.kl_coef=0.04")),
    "TRL bnpo": ("TRL", {"kind": "bnpo"}, ()),
    "TRL dr_grpo": ("TRL", {"kind": "dr_grpo"}, ("rl.algorithm=dr_grpo",)),
    "TRL dapo": ("TRL", {"kind": "dapo", "high": 0.28}, ("rl.algorithm=dapo", "rl.clip=[0.2, 0.28]")),
    "TRL cispo": ("TRL", {"kind": "cispo", "high": 1.3}, ("rl.algorithm=cispo", "rl.clip=[1.0, 0.3]")),
    "TRL sapo": (
        "TRL",
        {"kind": "sapo"},
        ("rl.algorithm=grpo", "rl.policy_loss=sapo", "rl.loss_aggregation=sequence_mean"),
    ),
    "TRL gspo": ("TRL", {"level": "sequence", "high": 4e-4}, ("rl.algorithm=gspo", "rl.clip=[3e-4, 4e-4]")),
    "OpenRLHF": ("OpenRLHF", {"dual": 3.0}, ("rl.dual_clip=3.0",)),
    "OpenRLHF's TIS": ("OpenRLHF", {"tis": True}, ("rl.correction=tis", "rl.correction_limits=[0.5, 5.0]")),
    "OpenRLHF's KL": (
        "OpenRLHF",
        {"kl": "k2"},
        ("rl.kl_in=loss", "rl.kl_coef=0.01", "rl.kl_estimator=k2", "rl.kl_clamp=10.0"),
    ),
    "NeMo-RL": ("NeMo-RL", {"c": 3.0}, ("rl.dual_clip=3.0",)),
    "NeMo-RL gspo": ("NeMo-RL", {"token": False}, ("rl.algorithm=gspo", "rl.clip=[0.2, 0.2]")),
    "slime": ("slime", {}, ()),
    "slime's low_var_kl": (
        "slime",
        {"kl": "low_var_kl"},
        ("rl.kl_coef=0.02", "rl.kl_estimator=k3", "rl.kl_clamp=10.0"),
    ),
    "Miles' TIS": ("Miles", {"tis": 2.0}, ("rl.correction=tis",)),
    "Miles per token": ("Miles", {"per_token": True}, ("rl.loss_aggregation=token_mean",)),
    "prime-rl": ("prime-rl", {}, ("rl.policy_loss=dppo", "rl.clip=[0.2, 0.2]")),
    "ROLL": ("ROLL", {"kl": 0.1}, ("rl.kl_coef=0.1",)),
    "ROLL token-mean": (
        "ROLL",
        {"mode": "token-mean", "dual": False},
        ("rl.loss_aggregation=token_mean", "rl.dual_clip=null"),
    ),
}


QUICK = ("TRL grpo", "OpenRLHF's TIS", "NeMo-RL", "slime's low_var_kl", "ROLL", "prime-rl")
QUICK_PLANTS = ("mask one earlier", "deviation by n", "NeMo-RL's KL")


def cases(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """The cases; those that are not quick are marked `table`."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.table) for name in names]


@pytest.mark.parametrize("name", cases(AGREES, QUICK))
def test_weft_computes_the_loss_of_each_trainer(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, settings, words = AGREES[name]
    status, output = compare(folder, trainer, settings, words, capsys)
    assert status == 0 and "agrees   within 1e-05" in output and "fits" not in output, output


TRAINED, PADDED = sum(LENGTHS), B * (P + R - 1)  # trained tokens, and columns of OpenRLHF's arrays
# What the trainer does otherwise -> (trainer, its settings, words of the config, plants, the convention that is named)
PLANTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any], str]] = {
    "mean of samples": ("TRL", {"kind": "grpo"}, (), {}, "rl.loss_aggregation=sequence_mean"),
    "mean of micro-batches": (
        "OpenRLHF", {"parts": 2}, (), {}, "the mean of the token means of 2 micro-batches of 3 sequences"),
    "mean of tokens": ("slime", {"per_token": True}, (), {}, "rl.loss_aggregation=token_mean"),
    "mask one later": ("TRL", {"kind": "bnpo"}, (), {"moved": 1}, "response_mask one token later than in the file"),
    "mask one earlier": ("OpenRLHF", {}, (), {"moved": -1}, "response_mask one token earlier than in the file"),
    "stale": ("ROLL", {}, (), {"stale": True}, "old_log_probs of the current weights"),
    "temperature": ("NeMo-RL", {}, ("rollout.temperature=0.8",), {}, "rollout.temperature=1"),
    "another temperature": ("slime", {}, (), {"temperature": 0.85}, "rollout.temperature=0.85"),
    "deviation by n": ("TRL", {}, ("rl.loss_aggregation=sequence_mean",), {"used": 0},
                       "advantages divided by the deviation over n, not n - 1, of the n = 3 samples of a group"),
    "deviation by n - 1": ("OpenRLHF", {}, (), {"ddof": 0},
                           "advantages divided by the deviation over n - 1, not n, of the n = 3 samples of a group"),
    "KL": ("ROLL", {"kl": 0.1}, ("rl.kl_coef=0.1", "rl.kl_estimator=k2"), {}, "rl.kl_estimator=k3"),
    "slime's KL": ("slime", {"kl": "k1"}, ("rl.kl_coef=0.02", "rl.kl_estimator=k2"), {}, "rl.kl_estimator=k1"),
    "clip-high dropped": ("slime", {"high": 0.2}, (), {}, "rl.clip=[0.2, 0.2]"),
    "unusual clip-high dropped": ("TRL", {"kind": "bnpo"}, ("rl.clip=[0.2, 0.35]",), {}, "rl.clip=[0.2, 0.2]"),
    "padding counted": ("OpenRLHF", {}, (), {"factor": TRAINED / PADDED}, "new_tokens=12 (padding counts in the mean)"),
    "prompts counted": ("ROLL", {"mode": "token-mean", "dual": False},
                        ("rl.loss_aggregation=token_mean", "rl.dual_clip=null"),
                        {"factor": TRAINED / (TRAINED + sum(PROMPTS))}, "tokens of prompts count in the mean"),
    "TIS": ("Miles", {"tis": 3.0}, ("rl.correction=tis",), {}, "rl.correction_limits=[0.0, 3.0]"),
    "NeMo-RL's KL": ("NeMo-RL", {"penalty": 0.01}, ("rl.kl_coef=0.01",), {},
                     "the KL's gradient includes that of the probability of the sample"),
    "prime-rl's loss": ("prime-rl", {}, (), {}, "rl.policy_loss=dppo"),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(PLANTS, QUICK_PLANTS))
def test_the_convention_that_differs_is_named(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, settings, words, plants, expected = PLANTS[name]
    status, output = compare(folder, trainer, settings, words, capsys, **plants)
    lines = [line for line in output.splitlines() if line.startswith("fits")]
    assert status == 1 and [expected in line for line in lines] == [True], output
