"""`weft dpo` as a whole: data, cache, adapters, evaluation, refusals."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.parity.test_dpo_parity import folder, models, plain_model
from tests.recipes.test_distill import keep_gradients
from tests.support import forked, plain_dpo
from tests.support.cases import byte_tokenizer
from tests.support.plain_dpo import PlainAnswer
from tests.support.pool import run
from tests.support.toy_tokenizers import metaspace_tokenizer
from weft import cli
from weft.config.dpo_schema import DpoConfig
from weft.config.load import load_config
from weft.data.documents import Documents
from weft.data.preferences import parse_answers
from weft.data.records import ROLES, ParseOptions
from weft.engine.losses.preference.answers import Pairs, divergence_score
from weft.engine.losses.preference.formulas import cpo, discopop
from weft.errors import UserError
from weft.launch.options import MeasureOptions, TrainOptions
from weft.observe.measured import measured_config
from weft.recipes import dpo, reference_sums
from weft.recipes.measure import _losses
from weft.recipes.run_data import make_steps
from weft.verify.harness import compare_gradients

QUIET = {"track.timing": False, "track.system": False}


def config_of(path: Path, **keys: Any) -> DpoConfig:
    overrides = {
        "model.path": models("llama")[0], "data.path": str(folder() / "pairs.jsonl"), "run.dir": str(path),
        "step.documents": 3, "step.max_tokens_per_device": 64, "optimizer.lr": 1e-3, "train.epochs": 2, **QUIET, **keys,
    }  # fmt: skip
    return load_config([], [f"{key}={json.dumps(value)}" for key, value in overrides.items()], DpoConfig)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def start(world: int, path: Path, keys: dict[str, Any]) -> list[int]:
    """Runs `weft dpo`; how many documents each reading of a reference had."""
    reads: list[int] = run(world, trained, config_of(path, **keys))[0]
    return reads


def trained(config: DpoConfig) -> list[int]:
    reads, read = list[int](), reference_sums.read_sums

    def counting(engine: Any, documents: Any) -> Any:
        reads.append(len(documents))
        return read(engine, documents)

    with mock.patch.object(reference_sums, "read_sums", counting):
        dpo.run(config, TrainOptions(device="cpu", quiet=True))
    return reads


def line_of(output: str, name: str) -> str:
    """The line of an opening that begins with this word, unfolded."""
    (line,) = re.findall(rf"^{name} .*", re.sub(r" *\n {9}", " ", output), re.MULTILINE)
    return str(line)


def losses(path: Path) -> list[list[float]]:
    names = ("loss", "grad_norm", "rewards/margin", "logps/chosen", "logps/rejected")
    return [[line[name] for name in names] for line in lines(path) if line["step"]]


OTHER = {"lora.rank": 4, "reference.path": models("llama")[1]}  # adapters, of which the plain side has none


@pytest.mark.covers("reference.ranks")
@pytest.mark.parametrize(
    ("mesh", "frozen", "more"),
    [
        ({"dp_shard": 1}, 1, {"preference.cache": "off"}),
        pytest.param({"dp_shard": 2}, 1, {"preference.cache": "memory"}, marks=pytest.mark.table),
        pytest.param({"tp": 2}, 2, {"preference.cache": "off", "reference.tp": 2}, marks=pytest.mark.table),
        pytest.param({"dp_shard": 2}, 2, OTHER, marks=pytest.mark.table),
    ],
)
def test_a_reference_on_ranks_of_its_own_is_that_of_plain_transformers(
    mesh: dict[str, int], frozen: int, more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gradients of every step and parameter; losses, gradient norms, rewards and evaluations are those of turns. A dry
    run says the same of the reference."""
    given = {
        "model.path": models("llama")[0], "data.path": str(folder() / "pairs.jsonl"), "eval.share": 0.3,
        "eval.at_start": True, "step.documents": 2, "step.max_tokens_per_device": 64, "train.epochs": 2,
        "optimizer.name": "sgd", "optimizer.lr": 0.05, "optimizer.weight_decay": 0, "optimizer.max_grad_norm": None,
        "schedule.name": "constant", "schedule.warmup_steps": 0, "schedule.warmup_ratio": None,
        "preference.beta": plain_dpo.BETA, "preference.label_smoothing": plain_dpo.SMOOTHING, **QUIET, **more,
    }  # fmt: skip
    in_turns = {key: value for key, value in given.items() if key != "reference.tp"}
    config = config_of(tmp_path / "turns", **in_turns)
    run(1, trained, config)
    given |= {f"mesh.{axis}": size for axis, size in mesh.items()}
    given |= {"run.dir": str(tmp_path / "apart"), "reference.ranks": frozen, "model.recompute": "auto"}
    words = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    world = frozen + max(mesh.values())
    command = ["dpo", *words, "--nproc", str(world), "--device", "cpu"]
    assert cli.main([*command, "--dry-run"]) == 0
    foreseen = line_of(capsys.readouterr().out, "against")
    done = forked.run(command, tmp_path, partial(keep_gradients, tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"a reference on {frozen} separate rank" in foreseen
    assert line_of(done.stdout, "against") == foreseen
    # With more ranks sums have another order, and updates carry that on.
    tolerance = {"rel": 1e-6, "abs": 1e-6} if world == 2 else {"rel": 3e-5, "abs": 1e-5}
    assert len(losses(tmp_path / "apart")) >= 4
    for ours, theirs in zip(losses(tmp_path / "apart"), losses(tmp_path / "turns"), strict=True):
        assert ours == pytest.approx(theirs, **tolerance)
    held_out = [
        [line["eval/loss"] for line in lines(tmp_path / run) if "eval/loss" in line] for run in ("apart", "turns")
    ]
    assert len(held_out[1]) >= 2 and held_out[0] == pytest.approx(held_out[1], **tolerance)
    if more is OTHER:
        return
    both = zip(plain_gradients(config, torch.float32), plain_gradients(config, torch.float64), strict=True)
    for number, (expected, exact) in enumerate(both, 1):
        actual = torch.load(tmp_path / f"gradients-{number}.pt")
        assert actual.keys() == expected.keys()
        # After an update there is the noise of fp32 in the weights too.
        noise = {figure.name: figure.value for figure in compare_gradients(expected, exact, {})} if number > 1 else {}
        assert not [figure for figure in compare_gradients(actual, expected, noise) if not figure.passed], number


def plain_gradients(config: DpoConfig, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Of each step of a run with SGD, of transformers in one process, answer by answer."""
    model, reference = (plain_model(config.model.path).to(dtype) for _ in range(2))
    documents = dpo.Dpo(config).read_data().documents
    assert isinstance(documents, Documents)
    for step in make_steps(config, documents):
        answers = []
        for index in step.documents:
            document, role = documents[index], ROLES[int(documents.roles[index])]
            trained, margin = (document.weights != 0).int().tolist(), float(documents.margins[index])
            answers.append(PlainAnswer(document.tokens.tolist(), trained, role, margin))
            with torch.no_grad():
                answers[-1].reference = float(plain_dpo.logprob_sum(reference, answers[-1]))
        sums = [plain_dpo.logprob_sum(model, answer) for answer in answers]
        model.zero_grad(set_to_none=True)
        plain_dpo.step_loss(["sigmoid"], [1.0], sums, answers).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        yield gradients
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in gradients:
                    parameter -= config.optimizer.lr * gradients[name]


def test_a_dry_run_counts_the_trained_model_without_the_references_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 6 ranks, 2 are the reference's: it refuses what the run would."""
    paths = [f"model.path={models('llama')[0]}", f"data.path={folder() / 'pairs.jsonl'}"]
    command = ["dpo", *paths, "reference.ranks=2", "--nproc", "6", "--device", "cpu", "--dry-run"]
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"]["ranks"] == 4
    for words, message in (
        (["reference.ranks=6"], "reference.ranks=6 of 6 leaves no rank for the trained model: start with --nproc 7"),
        (["reference.tp=3"], "the reference (its mesh has the keys reference.*, not mesh.*)"),
        (["mesh.tp=3"], "4 ranks are not a multiple of"),
        (
            ["reference.ranks=3", "reference.tp=3"],
            "the reference (keys reference.*, others as the policy's): mesh.tp=3",
        ),
    ):
        assert cli.main([*command, *words]) == 2, words
        assert message in re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.mark.covers("preference.cache", "reference.dp_shard", "reference.max_tokens_per_device")
def test_a_cached_reference_is_the_live_one_on_any_mesh(tmp_path: Path) -> None:
    """All caches give the same run; what one mesh wrote, another reads; other documents are read anew."""
    base = {"data.cache": str(tmp_path / "cache"), "eval.share": 0.3, "eval.at_start": True}
    runs = {}
    for cache in ("off", "memory", "disk"):
        path = tmp_path / cache
        runs[cache] = sum(start(1, path, {**base, "preference.cache": cache}))
        for actual, reference in zip(
            losses(path), losses(tmp_path / "off"), strict=True
        ):  # in other rows: other rounding
            assert actual == pytest.approx(reference, rel=1e-6, abs=1e-6), cache
    assert runs["off"] > runs["memory"] == runs["disk"] == 14
    on_two_ranks = {
        "preference.cache": "disk",
        "mesh.dp_shard": 2,
        "reference.dp_shard": 1,
        "reference.dp_replicate": 2,
    }
    assert start(2, tmp_path / "two", {**base, **on_two_ranks, "reference.max_tokens_per_device": 200}) == []
    for actual, reference in zip(losses(tmp_path / "two"), losses(tmp_path / "off"), strict=True):
        assert actual == pytest.approx(reference, rel=2e-4, abs=1e-5)
    changed = tmp_path / "pairs.jsonl"
    rows = [json.loads(line) for line in (folder() / "pairs.jsonl").read_text().splitlines()]
    rows[0]["chosen"] += "!"
    changed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed_data = {**base, "preference.cache": "disk", "data.path": str(changed)}
    assert start(1, tmp_path / "other", changed_data) == [1]
    file = next((tmp_path / "cache").glob("reference/*/sums.npz"))
    file.write_bytes(file.read_bytes()[:-40])  # damage: all is read again
    assert sum(start(1, tmp_path / "again", changed_data)) == 14


def trained_on_own_disks(config: DpoConfig) -> list[int]:
    """`trained`, where data.cache is a disk of each rank, and only the first rank's has rows."""
    read = reference_sums._read
    with mock.patch.object(
        reference_sums, "_read", lambda folder: read(folder) if dist.get_rank() == 0 else ({}, False)
    ):
        return trained(config)


def test_ranks_with_disks_of_their_own_share_what_the_first_has(tmp_path: Path) -> None:
    keys = {"data.cache": str(tmp_path / "cache"), "preference.cache": "disk", "mesh.dp_shard": 2}
    assert start(2, tmp_path / "one", keys) == [14]
    assert run(2, trained_on_own_disks, config_of(tmp_path / "two", **keys)) == [[], []]
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


def test_adapters_that_are_off_are_the_reference(tmp_path: Path) -> None:
    """The same run as with a second copy of the base; the first step's rewards are zero."""
    keys = {"lora.rank": 4, "optimizer.lr": 1e-2}
    start(1, tmp_path / "off", keys)
    start(1, tmp_path / "own", {**keys, "reference.path": models("llama")[0]})
    assert losses(tmp_path / "off") == losses(tmp_path / "own")
    assert lines(tmp_path / "off")[0]["rewards/margin"] == 0 and lines(tmp_path / "off")[-1]["rewards/margin"] > 0


def test_an_adapter_that_goes_on_is_its_own_reference(tmp_path: Path) -> None:
    start(1, tmp_path / "first", {"lora.rank": 4, "optimizer.lr": 1e-2})
    adapter = str((tmp_path / "first" / "checkpoints" / "latest").resolve())
    start(1, tmp_path / "second", {"lora.path": adapter})
    first = lines(tmp_path / "second")[0]
    assert abs(first["rewards/margin"]) <= 1e-6 and first["rewards/accuracy"] == 0


def test_another_adapter_is_another_cached_reference(tmp_path: Path) -> None:
    """Runs that go on from two adapters of one base share a folder of data.cache, and none of its rows."""
    for name, lr in (("one", 1e-2), ("two", 3e-2)):
        start(1, tmp_path / name, {"lora.rank": 4, "optimizer.lr": lr})
        adapter = str((tmp_path / name / "checkpoints" / "latest").resolve())
        keys = {"lora.path": adapter, "data.cache": str(tmp_path / "cache"), "preference.cache": "disk"}
        assert start(1, tmp_path / f"{name} on", keys) == [14]
        assert abs(lines(tmp_path / f"{name} on")[0]["rewards/margin"]) <= 1e-6


def measured(words: list[str], path: str) -> dict[str, Any] | None:
    config: Any = measured_config(path, words)
    return _losses(config, MeasureOptions(path=path, device="cpu", json=True))


def test_held_out_pairs_are_measured_alike_by_run_and_command(tmp_path: Path) -> None:
    """eval/ of the last step, `weft eval` of the checkpoint, and the step's own metrics of the same pairs."""
    data = str(folder() / "pairs.jsonl")
    start(1, tmp_path / "run", {"eval.path": data, "eval.every": 3, "step.documents": 7, "train.epochs": 2})
    first, last = lines(tmp_path / "run")[0], lines(tmp_path / "run")[-1]
    assert first["rewards/margin"] == 0 and last["eval/rewards/margin"] != 0
    figures = run(1, measured, [data], str(tmp_path / "run"))[0]
    for name in ("loss", "rewards/accuracy", "rewards/margin", "logps/chosen"):
        assert figures[f"eval/{name}"] == pytest.approx(last[f"eval/{name}"], rel=1e-5, abs=1e-6), name


def pair_rows(path: Path, *rows: dict[str, Any], **keys: Any) -> Documents:
    """The documents of these rows, with the byte tokenizer."""
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(path / "run", **{"data.path": str(path / "rows.jsonl"), **keys})
    documents = dpo.Dpo(config).read_data().documents
    assert isinstance(documents, Documents)
    return documents


def said(documents: Documents) -> list[tuple[str, str, str]]:
    """(role, context, trained text) of each document."""
    tokenizer: Any = byte_tokenizer()
    out = []
    for index in range(len(documents)):
        document = documents[index]
        mask = document.weights != 0
        out.append(
            (
                ROLES[int(documents.roles[index])],
                tokenizer.decode(document.tokens[~mask]),
                tokenizer.decode(document.tokens[mask], skip_special_tokens=True),
            )
        )
    return out


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_formats_of_pairs(tmp_path: Path) -> None:
    """Every format gives the same two answers behind the same question."""
    chats: list[dict[str, Any]] = [
        {"prompt": [user("q")], "chosen": [assistant("good")], "rejected": [assistant("bad")]},
        {"chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]},
        {"prompt": "q", "chosen": [user("q"), assistant("good")], "rejected": [user("q"), assistant("bad")]},
        {
            "conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        {"messages": [user("q")], "chosen": assistant("good"), "rejected": assistant("bad")},
        {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
        {"question": "q", "chosen": "good", "rejected": "bad"},
        {
            "prompt": json.dumps([user("q")]), "chosen": json.dumps([assistant("good")]),
            "rejected": json.dumps([assistant("bad")]),
        },
    ]  # fmt: skip
    answers = said(pair_rows(tmp_path, *chats))
    assert [role for role, _, _ in answers] == ["chosen", "rejected"] * len(chats)
    assert {context for _, context, _ in answers} == {answers[0][1]} and "q" in answers[0][1]
    assert {text for role, _, text in answers if role == "chosen"} == {answers[0][2]} and answers[0][2].startswith(
        "good"
    )
    assert {text for role, _, text in answers if role == "rejected"} == {answers[1][2]} and answers[1][2].startswith(
        "bad"
    )
    plain = said(pair_rows(tmp_path, {"prompt": "q: ", "chosen": "good", "rejected": "bad"}))
    assert [text for _, _, text in plain] == ["good", "bad"] and plain[0][1].endswith("q: ")
    conversations = said(
        pair_rows(tmp_path, {"chosen": "Human: q Assistant: good", "rejected": "Human: q Assistant: bad"})
    )
    assert [text for _, _, text in conversations] == ["good", "bad"] and conversations[0][1].endswith("Assistant: ")


def test_answers_with_labels(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [user("q")], "completion": [assistant("good")], "label": True},
        {"messages": [user("q"), assistant("bad")], "kto_tag": False},
    ]
    answers = said(pair_rows(tmp_path, *rows, **{"preference.loss": "kto"}))
    assert [role for role, _, _ in answers] == ["desired", "undesired"]
    assert [text[:3] for _, _, text in answers] == ["goo", "bad"]
    with pytest.raises(UserError, match=r"rows.jsonl:1: is an answer with a label.*preference.loss=kto"):
        pair_rows(tmp_path, *rows)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are equal"),
    ({"prompt": "q", "chosen": "", "rejected": "a"}, "`chosen` is empty"),
    ({"prompt": "q", "chosen": "a", "rejected": 3}, "must be text or messages"),
    ({"prompt": "q", "chosen": "a", "rejected": [assistant("b")]}, "Write both as text"),
    ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "no common beginning"),
    ({"chosen": [user("q")], "rejected": [user("q"), assistant("b")]}, "no answer after"),
    ({"prompt": "q", "completion": "a"}, "preferences need"),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "much"}, "`margin` must be a number"),
    ({"chosen": "the same", "rejected": "the same and more"}, None),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_are_named_by_line(row: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    good = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    if message is None:  # the end of the text is the answer
        assert said(pair_rows(tmp_path, row))[1][2] == " and more"
        return
    with pytest.raises(UserError, match=f"rows.jsonl:2: .*{message}"):
        pair_rows(tmp_path, good, row)
    assert len(pair_rows(tmp_path, good, row, **{"data.bad_rows": "drop"})) == 2


def test_a_missing_number_of_a_table_is_no_margin() -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b", "margin": float("nan")}
    with pytest.raises(UserError, match="`margin` must be a finite number, not nan"):
        parse_answers("rows:2", row, ParseOptions(preferences=True))


def test_answers_that_are_equal_after_truncation_are_named(tmp_path: Path) -> None:
    row = {"prompt": "q", "chosen": "a" * 60 + "x", "rejected": "a" * 60 + "y"}
    rows, cut = [{"prompt": "q", "chosen": "a", "rejected": "b"}, row], {"data.max_length": 30}
    keys = {**cut, "data.long_documents": "truncate"}
    with pytest.raises(UserError, match=r"rows.jsonl:2: both answers are equal after truncation to 30 tokens"):
        pair_rows(tmp_path, *rows, **keys)
    assert len(pair_rows(tmp_path, *rows, **keys, **{"data.bad_rows": "drop"})) == 2
    assert len(pair_rows(tmp_path, *rows)) == 4


def test_a_pair_that_is_too_long_goes_as_a_whole(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": "a" * 60, "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "b"}]
    dropped = pair_rows(tmp_path, *rows, **{"data.max_length": 30, "data.long_documents": "drop"})
    assert [text for _, _, text in said(dropped)] == ["a", "b"]
    cut = pair_rows(tmp_path, *rows, **{"data.max_length": 30, "data.long_documents": "truncate"})
    assert [len(document) <= 30 for document in cut] == [True] * 4


REFUSED: list[tuple[list[str], str]] = [
    (["preference.loss=dpo"], "preference.loss: dpo is not one of"),
    (["preference.loss=dpo"], "The loss of DPO is sigmoid"),
    (["preference.loss=[sigmoid,kto]"], "kto reads single answers"),
    (["preference.loss=[sigmoid,sft]", "preference.weights=[1.0]"], "1 numbers for 2 losses"),
    (["preference.loss=exo_pair"], "label_smoothing is 0"),
    (["preference.loss=simpo", "preference.ld_alpha=0.5"], "no effect on simpo"),
    (["preference.loss=simpo", "reference.path=m"], "no loss in preference.loss reads it"),
    (["lora.rank=4", "reference.tp=2"], "the reference is the model without its adapters"),
    (["lora.rank=4", "lora.dropout=0.1"], "lora.dropout=0"),
    (["reference.ranks=1", "preference.cache=disk"], "its ranks would then be idle"),
    (["reference.ranks=1", "preference.loss=kto"], "the mismatched pairs"),
    (["lora.rank=4", "reference.ranks=1"], "the reference is the model without its adapters"),
    (["train.neftune_noise_alpha=5"], "different noise"),
    (["data.train_on=all"], "after the prompt"),
    (["train.loss=a:b"], "preference.loss defines the loss"),
    (["preference.label_smoothing=0.1", "preference.loss=hinge"], "no loss in preference.loss reads it"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        load_config([], ["model.path=org/m", "data.path=org/d", *words], DpoConfig)


@pytest.mark.covers("preference.f_divergence", "preference.f_alpha", "preference.discopop_tau", "preference.cpo_alpha")
def test_formulas_with_further_keys() -> None:
    """f' of each divergence at t = policy / reference; the keys of two losses."""

    def preference(*words: str) -> Any:
        return load_config([], ["model.path=org/m", "data.path=org/d", *words], DpoConfig).preference

    log_t = torch.tensor([-1.3, 0.0, 0.7], dtype=torch.float64)
    t = log_t.exp()
    words = "preference.f_divergence"
    assert torch.equal(divergence_score(log_t, preference()), log_t)
    forward = divergence_score(log_t, preference(f"{words}=forward_kl"))
    assert torch.allclose(forward, 1 - 1 / t)
    js = divergence_score(log_t, preference(f"{words}=js_divergence"))
    assert torch.allclose(js, (2 * t / (t + 1)).log())
    alpha = divergence_score(log_t, preference(f"{words}=alpha_divergence", "preference.f_alpha=0.3"))
    assert torch.allclose(alpha, (t ** (0.3 - 1) - 1) / (0.3 - 1))

    def pairs(*words: str) -> Pairs:
        zeros, ones = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        return Pairs(log_t, log_t - 1, zeros, zeros, ones, ones, zeros, 2.0, preference(*words))

    logit = 0.1 * torch.ones(3, dtype=torch.float64)
    share = (logit / 0.2).sigmoid()
    expected = -logit.sigmoid().log() * (1 - share) + (-logit).exp() * share
    assert torch.allclose(discopop(pairs("preference.loss=discopop", "preference.discopop_tau=0.2")), expected)
    assert torch.allclose(
        cpo(pairs("preference.loss=cpo", "preference.cpo_alpha=3")), -logit.sigmoid().log() - 1.5 * log_t
    )


def squared(pairs: Pairs) -> torch.Tensor:
    return (1 - pairs.logit - pairs.margin).square()


def test_a_loss_of_the_users(tmp_path: Path) -> None:
    start(1, tmp_path, {"preference.loss": "tests.recipes.test_dpo:squared", "train.epochs": 1})
    assert lines(tmp_path)[0]["loss"] == 1.0


def test_the_page_of_losses_lists_all() -> None:
    from weft.config.preference_losses import LOSSES

    page = (Path(__file__).parents[2] / "docs" / "reference" / "preference-losses.md").read_text()
    for name, facts in LOSSES.items():
        (row,) = [
            line for line in page.splitlines() if line.startswith((f"| `{name}` | pairs", f"| `{name}` | answers"))
        ]
        assert row.endswith(f"{facts.source} |")


def test_the_example_is_a_config_of_weft_dpo() -> None:
    root = Path(__file__).parents[2]
    words = ["model.path=org/m", "data.path=org/d", "eval.path=org/e"]
    config = load_config([str(root / "examples" / "dpo_style_cpu.yaml")], words, DpoConfig)
    assert config.preference.losses == ("sigmoid",) and config.eval.prompts is not None


def test_a_reference_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    other_model = tmp_path / "other"
    shutil.copytree(models("llama")[1], other_model)
    metaspace_tokenizer().save_pretrained(other_model)
    with pytest.raises(UserError, match="reference.path: the tokenizers of .* differ.*the same family"):
        dpo.Dpo(config_of(tmp_path, **{"reference.path": str(other_model)}))


def of_nan(config: DpoConfig) -> None:
    spoilt = mock.patch.object(
        reference_sums, "read_sums", lambda engine, documents: torch.full((len(documents),), torch.nan)
    )
    with spoilt:
        trained(config)


def test_a_reference_of_nan_is_named(tmp_path: Path) -> None:
    """And not taken for a row that the cache lacks."""
    with pytest.raises(
        Exception,
        match=r"the reference \(.*\) computes log probabilities that are not finite, for documents .*pairs.jsonl:\d",
    ):
        run(1, of_nan, config_of(tmp_path / "run"))
