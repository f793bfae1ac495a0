"""`weft compare-step` on batches of plain PyTorch: whether weft agrees, and which convention explains why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from torch import Tensor

from tests.support.cases import write_small_job
from weft import cli

T, R, PROMPTS = 14, 9, (5, 3, 4, 2)  # columns, those of responses, and the tokens of each prompt, padded on the left
LENGTHS = (9, 2, 5, 7)
KL = ("rl.kl_coef=0.3", "rl.kl_in=loss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_job(tmp_path_factory.mktemp("compare"))


def plain_batch(
    folder: Path,
    *,
    aggregation: str = "token_mean",
    dual: float | None = 3.0,
    kl: str | None = None,
    temperature: float = 1.0,
    rescale: str | None = None,
    moved: int = 0,
    divisor: float = 1.0,
    on_policy: bool = False,
    unclipped: bool = False,
    correction: str | None = None,
    flat: bool = False,
    predicting: bool = False,
    high: float = 0.2,
    kl_coef: float = 0.3,
    entropy: float = 0.0,
    tis: float | None = None,
    from_engine: bool = False,
    untrained: int | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """A batch in verl's layout, with the loss and the gradient norm of a trainer in plain PyTorch. moved: how many
    columns later the trainer's mask is than the one of the file. correction: whether factors in the file are `used`.
    flat: whether the file has one advantage for each sequence. predicting: whether entry t of the file's arrays is
    about token t + 1. tis: cap of the ratio of old and engine policy, whose logprobs are in the file. from_engine:
    whether the old logprobs are the engine's. untrained: a sequence whose mask is 0, but which counts in means."""
    draw = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids = torch.randint(5, 250, (4, T), generator=draw)
    attention, mask = torch.zeros(4, T), torch.zeros(4, T)
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        attention[row, T - R - prompt : T - R + length] = 1
        mask[row, T - R : T - R + length] = 1
    positions = (attention.cumsum(1) - 1).clamp(min=0).long()
    logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits / temperature
    logprob = torch.zeros(4, T)
    logprob = torch.cat([logprob[:, :1], logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]], 1)
    old = logprob.detach() + 0.5 * torch.randn(4, T, generator=draw)
    reference = logprob.detach() + 0.7 * torch.randn(4, T, generator=draw)
    advantages = (torch.tensor([1.2, -0.7, 0.4, -1.9])[:, None] + 0.1 * torch.randn(4, T, generator=draw)) + 0.3
    factors = 0.5 + torch.rand(4, T, generator=draw)
    engine = old + 0.8 * torch.randn(4, T, generator=draw)
    if untrained is not None:
        mask[untrained] = 0
    if flat:
        advantages = advantages[:, :1].expand(4, T)
    trained = mask.roll(moved, 1) * attention
    trained[:, 0] = 0
    a = advantages
    if rescale is not None:
        chosen = a[trained > 0]
        a = (a - (chosen.mean() if rescale == "whiten" else 0)) / chosen.std()
    ratio = (logprob - (logprob.detach() if on_policy else engine if from_engine else old)).exp()
    loss = -a * ratio if unclipped else torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1 + high))
    if dual is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -dual * a), loss)
    if correction == "used":
        loss = loss * factors
    if tis is not None:
        loss = loss * (old - engine).exp().clamp(max=tis)
    if entropy:
        every = logits[:, :-1].log_softmax(-1)
        loss = loss - entropy * torch.cat([torch.zeros(4, 1), -(every.exp() * every).sum(-1)], 1)
    if kl is not None:
        d = logprob - reference
        loss = loss + kl_coef * {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[kl]
    total = aggregated(loss, trained, aggregation) / divisor
    total.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    arrays = {"response_mask": mask, "old_log_probs": old, "advantages": advantages, "ref_log_prob": reference}
    arrays |= {} if correction is None else {"rollout_is_weights": factors}
    arrays |= {"rollout_log_probs": engine} if tis is not None or from_engine else {}
    if predicting:
        arrays = {name: values.roll(-1, 1) for name, values in arrays.items()}
    elif not moved:  # else the arrays of the other trainer cover the prompt, too
        arrays = {name: values[:, T - R :] for name, values in arrays.items()}
    if flat:
        arrays["advantages"] = advantages[:, 0]
    batch = {"input_ids": ids, "attention_mask": attention, **arrays}
    return {n: v.detach().numpy() for n, v in (batch | {"loss": total, "grad_norm": norm}).items()}


def aggregated(loss: Tensor, mask: Tensor, how: str) -> Tensor:
    if how == "token_mean":
        return (loss * mask).sum() / mask.sum()
    sums = (loss * mask).sum(1)
    return (
        (sums / mask.sum(1).clamp(min=1)).mean()
        if how == "sequence_mean"
        else sums.mean() / {"sum": 1, "width": R}[how]
    )


def compare(
    folder: Path, batch: Mapping[str, Any], capsys: pytest.CaptureFixture[str], *words: str, name: str = "step.npz"
) -> tuple[int, str]:
    """(Exit status, output) of the command."""
    if name.endswith(".npz"):
        np.savez(folder / name, **batch)
    capsys.readouterr()
    model = f"model.path={folder / 'model'}"
    status = cli.main(["compare-step", str(folder / name), model, "rl.preset=verl", "--device", "cpu", *words])
    done = capsys.readouterr()
    return status, done.out + done.err


# What the other trainer does, keys of weft's config, and what weft must name.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "mean of samples": ({"aggregation": "sequence_mean"}, (), "rl.loss_aggregation=sequence_mean"),
    "sum of samples": ({"aggregation": "sum"}, (), "rl.loss_aggregation=sequence_sum rollout.max_new_tokens=1"),
    "Dr. GRPO": ({"aggregation": "width"}, (), f"rl.loss_aggregation=sequence_sum rollout.max_new_tokens={R}"),
    "no dual clip": ({"dual": None}, ("rl.dual_clip=1.1",), "rl.dual_clip=null"),
    "k2": ({"kl": "k2"}, KL, "rl.kl_estimator=k2"),
    "k1": ({"kl": "k1"}, KL, "rl.kl_estimator=k1"),
    "no KL": ({}, KL, "rl.kl_coef=0.0"),
    "temperature": ({"temperature": 0.7}, (), "rollout.temperature=0.7"),
    "whitened": ({"rescale": "whiten"}, (), "advantages whitened over the trained tokens"),
    "scaled": ({"rescale": "scale"}, (), "advantages divided by their standard deviation over the trained tokens"),
    "clip": ({}, ("rl.clip=[0.1, 0.1]",), "rl.clip=[0.2, 0.2]"),
    "policy loss": ({}, ("rl.policy_loss=reinforce",), "rl.policy_loss=ppo"),
    "plain KL": ({"kl": "k3"}, (*KL, "rl.kl_unbiased=true"), "rl.kl_unbiased=false"),
    "KL cut": ({"kl": "k3"}, (*KL, "rl.kl_clamp=0.1"), "rl.kl_clamp=null"),
    "no entropy": ({}, ("rl.entropy_coef=0.1",), "rl.entropy_coef=0.0"),
    "factors not used": ({"correction": "unused"}, ("rl.correction=tis",), "rl.correction=none"),
    "arrays one later": ({"predicting": True}, (), "response_mask and all arrays one token later than in the file"),
    "mask one later": ({"moved": 1}, (), "response_mask one token later than in the file"),
    "mask one earlier": ({"moved": -1}, (), "response_mask one token earlier than in the file"),
    "part of a batch": ({"divisor": 4.0}, (), "loss and gradient are 0.25 times weft's"),
    "on policy": ({"on_policy": True}, (), "old_log_probs of the current weights"),
    "clip-higher": ({"high": 0.28}, (), "rl.clip=[0.2, 0.28]"),
    "KL that the config lacks": (
        {"kl": "k2", "kl_coef": 0.04},
        (),
        "rl.kl_coef=0.04 rl.kl_in=loss rl.kl_estimator=k2",
    ),
    "entropy": ({"entropy": 0.01}, (), "rl.entropy_coef=0.01"),
    "cap of TIS": (
        {"tis": 3.0},
        ("rl.correction=tis",),
        "rl.correction=tis rl.correction_level=token rl.correction_limits=[0.0, 3.0]",
    ),
    "TIS not applied": (
        {"tis": 2.0},
        ("rl.correction=none",),
        "rl.correction=tis rl.correction_level=token rl.correction_limits=[0.0, 2.0]",
    ),
    "old logprobs of the engine": (
        {"from_engine": True},
        ("rl.correction=tis",),
        "rl.old_logprobs=rollout rl.correction=none",
    ),
    "sequences without tokens": (
        {"aggregation": "sequence_mean", "untrained": 1},
        ("rl.loss_aggregation=sequence_mean",),
        "sequences without trained tokens count in the mean",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_convention_is_named(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, words, expected = CASES[name]
    status, output = compare(folder, plain_batch(folder, **trainer), capsys, *words)
    lines = [line for line in output.splitlines() if line.startswith("fits")]
    assert status == 1 and [expected in line for line in lines] == [True], output


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
def test_a_trainer_like_weft_agrees(how: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In several micro-batches, with KL and a correction, and one advantage for each sequence."""
    batch = plain_batch(folder, aggregation=how, kl="k3", correction="used", flat=True)
    rows = ("step.max_tokens_per_device=16", "rollout.max_prompt_tokens=7", "rollout.max_new_tokens=9")
    words = (*KL, f"rl.loss_aggregation={how}", "rl.correction=tis", *rows)
    status, output = compare(folder, batch, capsys, *words, "--tolerance", "1e-5")
    assert status == 0 and "agrees   within 1e-05" in output and "fits" not in output, output
    assert "rl.kl_clamp=null" in output.splitlines()[-1]  # no token's estimate reaches 10: the batch cannot tell


def test_what_no_convention_explains_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = compare(folder, plain_batch(folder, unclipped=True, kl="k1", rescale="whiten"), capsys)
    assert status == 1 and "No single convention" in output and "fits" not in output, output
    batch = plain_batch(folder)
    status, output = compare(folder, batch | {"grad_norm": batch["grad_norm"] * 1.01}, capsys)
    assert status == 1 and "No single convention" in output, output


def test_other_files_and_names_are_the_same_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = plain_batch(folder)
    ids, attention, mask = batch["input_ids"], batch["attention_mask"], batch["response_mask"]
    trl = {
        "prompt_ids": ids[:, : T - R], "prompt_mask": attention[:, : T - R], "completion_ids": ids[:, T - R :],
        "completion_mask": mask, "old_per_token_logps": batch["old_log_probs"], "advantages": batch["advantages"],
        "loss": batch["loss"], "grad_norm": batch["grad_norm"],
    }  # fmt: skip
    save_file({name: np.ascontiguousarray(v) for name, v in trl.items()}, folder / "trl.safetensors")
    lines: list[dict[str, Any]] = [{"loss": float(batch["loss"]), "grad_norm": float(batch["grad_norm"])}]
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        line = {"tokens": ids[row, T - R - prompt : T - R + length].tolist()}
        arrays = {"loss_masks": mask, "log_probs": batch["old_log_probs"], "advantages": batch["advantages"]}
        lines.append(line | {n: [float(v) for v in values[row, :length]] for n, values in arrays.items()})
    (folder / "miles.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    for name in ("trl.safetensors", "miles.jsonl"):
        status, output = compare(folder, {}, capsys, name=name)
        assert status == 0 and "agrees" in output, output


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"response_mask": None}, "has no response_mask or loss_mask or loss_masks. It has: advantages"),
    "nothing to compare": ({"loss": None, "grad_norm": None}, "has neither loss nor grad_norm"),
    "rows": ({"advantages": np.zeros((3, R))}, "advantages has 3 rows, but input_ids has 4"),
    "columns": ({"old_log_probs": np.zeros((4, T + 1))}, r"row 0: old_log_probs is [15], but input_ids is [14]"),
    "padding": ({"response_mask": np.ones((4, R))}, "row 1: response_mask covers padding"),
    "first token": ({"response_mask": np.ones((4, T)), "attention_mask": None}, "covers the first token"),
    "narrow attention": ({"attention_mask": np.ones((4, R))}, "attention_mask is [9], but input_ids is [14]"),
    "weights": ({"response_mask": np.full((4, R), 0.5)}, "response_mask must have only 0 and 1"),
    "no token": ({"response_mask": np.zeros((4, R))}, "response_mask is 0 everywhere"),
    "not finite": ({"old_log_probs": np.full((4, R), np.nan)}, "row 0: old_log_probs is not finite"),
    "logits": ({"input_ids": np.zeros((4, T))}, "input_ids must be token ids [T], not float64 [14]"),
    "vocabulary": ({"input_ids": np.full((4, T), 999)}, "but the model has 264 tokens"),
    "loss per token": ({"loss": np.zeros(4)}, "loss must be one finite number"),
    "two names": ({"loss_mask": np.ones((4, R))}, "response_mask and loss_mask, which are names of the same field"),
    "objects": ({"advantages": np.array([1, "a"], object)}, "pad them, or write .jsonl"),
    "correction": ({"rollout_is_weights": np.ones((4, R))}, "set rl.correction=tis rl.old_logprobs=recompute"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_errors(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, message = BAD[name]
    batch = {n: v for n, v in (plain_batch(folder) | changes).items() if v is not None}
    status, output = compare(folder, batch, capsys)
    assert status == 2 and message in output, output


def test_a_reference_that_is_not_in_the_file_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = {name: v for name, v in plain_batch(folder).items() if name != "ref_log_prob"}
    status, output = compare(folder, batch, capsys, *KL)
    assert status == 2 and "has no ref_log_prob, which rl.kl_coef=0.3 needs: add it, or set rl.kl_coef=0" in output
    assert compare(folder, batch, capsys, "rl.kl_coef=0")[0] == 0
    rows = ("step.max_tokens_per_device=8", "rollout.max_prompt_tokens=4", "rollout.max_new_tokens=4")
    status, output = compare(folder, batch, capsys, "rl.kl_coef=0", *rows)
    assert status == 2 and "set step.max_tokens_per_device" in output, output
    for name, content, message in (
        ("a.csv", "", "must end in .npz, .safetensors, .jsonl, .pt"), ("none.jsonl", None, "no such file"),
        ("bad.npz", "x", "cannot be read"), ("bad.jsonl", "{", "line 1: is not JSON"),
    ):  # fmt: skip
        if content is not None:
            (folder / name).write_text(content)
        status, output = compare(folder, {}, capsys, name=name) if name != "bad.npz" else _as_is(folder, name, capsys)
        assert status == 2 and message in output, output


def _as_is(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = cli.main(["compare-step", str(folder / name), f"model.path={folder / 'model'}", "--device", "cpu"])
    done = capsys.readouterr()
    return status, done.out + done.err
