"""`weft distill`: its run on meshes, teachers that are the student itself, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import compress, count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.support import forked, plain_distill
from tests.support.cases import saved_model
from tests.support.pool import run
from tests.support.toy_tokenizers import byte_tokenizer, chat, metaspace_tokenizer, write_jsonl
from weft import cli
from weft.config.distill_schema import DistillConfig
from weft.config.dpo_schema import DpoConfig
from weft.config.frozen_ranks import in_turns
from weft.config.load import load_config
from weft.data.documents import Documents
from weft.engine.batch.document import Document
from weft.engine.batch.rows import StepRows
from weft.engine.engine import Engine
from weft.engine.teacher_cache import HiddenCache
from weft.engine.teachers import check_hidden
from weft.errors import UserError
from weft.launch.options import TrainOptions, VerifyOptions
from weft.ops.divergence import differentiated, terms_of
from weft.recipes import distill, teachers, verify
from weft.recipes.run_data import read_run_data
from weft.recipes.student_samples import StudentSampler, chosen_of_step
from weft.verify.distill_harness import DrawnLists
from weft.verify.harness import compare_gradients

_home = TemporaryDirectory(prefix="weft-distill-")
WORDS = [
    "step.documents=6", "step.max_tokens_per_device=96", "train.epochs=null", "train.steps=3", "optimizer.name=sgd",
    "optimizer.lr=0.2", "optimizer.weight_decay=0", "optimizer.max_grad_norm=null", "schedule.name=constant",
    "schedule.warmup_steps=0", "schedule.warmup_ratio=null", "checkpoint.every=1", "checkpoint.keep=null",
]  # fmt: skip


@cache
def home() -> Path:
    """A student, two teachers of other families and widths, and two files of chats."""
    path = Path(_home.name)
    models = {
        "student": ("llama", {"vocab_size": 264}),
        "wide": ("llama", {"vocab_size": 272, "hidden_size": 48, "num_hidden_layers": 3}),
        "other": ("qwen3", {"vocab_size": 264}),
    }
    for name, (family, changes) in models.items():
        shutil.copytree(saved_model(family, **changes), path / name)
        byte_tokenizer().save_pretrained(path / name)
    for name in ("a", "b"):
        chats = [chat(("user", name * (i % 5 + 1)), ("assistant", "bcd" * (i % 7 + 1))) for i in range(12)]
        write_jsonl(path / f"{name}.jsonl", *chats)
    return path


def config_of(folder: Path, *words: str) -> DistillConfig:
    paths = [f"model.path={home()}/student", f"data.path={home()}/a.jsonl", f"run.dir={folder}"]
    return load_config([], [*paths, *WORDS, *words], DistillConfig)


def attempt(config: DistillConfig) -> None:
    """A run on one rank."""
    distill.run(config, TrainOptions(device="cpu"))


def attempt_without_rows_ahead(config: DistillConfig) -> None:
    """A run on one rank that fails if rows are built before their teacher has read."""
    with mock.patch.object(StepRows, "ahead", side_effect=AssertionError("rows without hidden states")):
        attempt(config)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path, step: int = 3) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def documents(config: DistillConfig) -> list[list[tuple[list[int], list[float]]]]:
    """Those of each step, as lists, in the run's order."""
    from weft.recipes.run_data import make_steps

    data = read_run_data(config)
    assert isinstance(data.documents, Documents)
    steps = [[data.documents[i] for i in step.documents] for step in make_steps(config, data.documents)]
    return [[(d.tokens.tolist(), d.weights.tolist()) for d in step] for step in steps]


def test_rows_are_built_once(tmp_path: Path) -> None:
    run(1, attempt_without_rows_ahead, config_of(tmp_path, f"distill.teacher={home()}/other", "train.steps=1"))
    assert len(lines(tmp_path)) == 1


@pytest.mark.covers(
    "distill.teacher", "distill.loss", "distill.beta", "distill.temperature", "distill.temperature_squared",
    "distill.alpha",
)  # fmt: skip
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_is_that_of_plain_transformers(tmp_path: Path, world: int) -> None:
    words = ["distill.loss=jsd", "distill.beta=0.3", "distill.temperature=2", "distill.temperature_squared=true",
             "distill.alpha=0.25", f"distill.teacher={home()}/wide", "teacher.max_tokens_per_device=64"]  # fmt: skip
    config = config_of(tmp_path / "run", *words)
    run(world, attempt, config)
    steps = documents(config)
    settings = {"loss": "jsd", "beta": 0.3, "temperature": 2.0, "squared": True, "alpha": 0.25}
    expected = plain_distill.train(
        f"{home()}/student", [f"{home()}/wide"], steps, [[0] * len(step) for step in steps], settings, 0.2
    )
    assert [line["loss"] for line in lines(tmp_path / "run")] == pytest.approx(expected[0], rel=1e-5)
    for name, weight in weights(tmp_path / "run").items():
        torch.testing.assert_close(weight, expected[2][name], rtol=1e-4, atol=1e-6)


@pytest.mark.covers("distill.teachers")
def test_each_source_has_its_teacher(tmp_path: Path) -> None:
    sources = f"data.sources=[{{path: {home()}/a.jsonl}}, {{path: {home()}/b.jsonl}}]"
    held_out = f"eval.sources=[{{path: {home()}/b.jsonl}}]"
    named = f"distill.teachers={{a: {home()}/wide, b: {home()}/other}}"
    config = config_of(tmp_path / "run", "data.path=null", sources, held_out, named)
    run(2, attempt, config)
    data = read_run_data(config).documents
    names = {tuple(d.tokens.tolist()): d.dataset for d in (data[i] for i in range(len(data)))}
    steps = documents(config)
    chosen = [[("a", "b").index(names[tuple(ids)]) for ids, _ in step] for step in steps]
    assert {teacher_index for step in chosen for teacher_index in step} == {0, 1}
    settings = {"loss": "forward_kl", "beta": 0.5, "temperature": 1.0, "squared": False, "alpha": 0.0}
    expected = plain_distill.train(
        f"{home()}/student", [f"{home()}/wide", f"{home()}/other"], steps, chosen, settings, 0.2
    )
    assert [line["loss"] for line in lines(tmp_path / "run")] == pytest.approx(expected[0], rel=1e-5)
    assert "eval/b/divergence" in lines(tmp_path / "run")[-1]


def keep_gradients(folder: Path) -> None:
    """In ranks that begin after it, the student's first one writes the gradients of each step."""
    apply, steps = Engine.apply, count(1)

    def keeping(self: Engine, *args: Any, **options: Any) -> Any:
        gradients = {name: g.cpu().clone() for name, g in self.gradients() if g is not None}
        if self.ranks.is_first:
            torch.save(gradients, folder / f"gradients-{next(steps)}.pt")
        return apply(self, *args, **options)

    mock.patch.object(Engine, "apply", keeping).start()


@pytest.mark.covers("teacher.ranks")
@pytest.mark.parametrize(
    ("student", "ranks", "more"),
    [
        ("mesh.dp_shard=2", 1, []),
        pytest.param("mesh.tp=2", 2, ["teacher.tp=2"], marks=pytest.mark.table),
        pytest.param("mesh.cp=2", 2, [], marks=pytest.mark.table),
        pytest.param("mesh.pp=2", 2, ["teacher.pp=2"], marks=pytest.mark.table),
        pytest.param("mesh.dp_replicate=2", 3, ["lora.rank=4"], marks=pytest.mark.table),
    ],
)
def test_teachers_on_ranks_of_their_own_are_those_of_plain_transformers(
    student: str, ranks: int, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gradients of every step and parameter, of two teachers of other widths; evaluations are those of turns. A dry run
    says the same of the teachers."""
    sources = f"data.sources=[{{path: {home()}/a.jsonl}}, {{path: {home()}/b.jsonl}}]"
    words = [f"model.path={home()}/student", "data.path=null", sources, f"eval.sources=[{{path: {home()}/b.jsonl}}]",
             f"distill.teachers={{a: {home()}/wide, b: {home()}/other}}", "distill.loss=jsd", "distill.alpha=0.25",
             "distill.temperature=2", *WORDS, "step.documents=10", "eval.every=1", student, *more]  # fmt: skip
    apart = [*words, f"teacher.ranks={ranks}", f"run.dir={tmp_path}/apart"]
    command = ["distill", *apart, "--nproc", str(2 + ranks), "--device", "cpu"]
    assert cli.main([*command, "--dry-run"]) == 0
    foreseen = unfolded(capsys.readouterr().out)
    done = forked.run(command, tmp_path, partial(keep_gradients, tmp_path))
    assert done.returncode == 0, done.stderr
    assert foreseen == unfolded(done.stdout) and f"on {ranks} separate rank" in foreseen[1] and len(foreseen) == 2
    in_turns = [word for word in words if not word.startswith("teacher.")]
    run(2, attempt, load_config([], [*in_turns, f"run.dir={tmp_path}/turns"], DistillConfig))
    for name in ("loss", "grad_norm", "eval/b/divergence"):
        figures = [[line[name] for line in lines(tmp_path / folder) if name in line] for folder in ("apart", "turns")]
        assert len(figures[0]) == 3 and figures[0] == pytest.approx(figures[1], rel=1e-6), name
    if more == ["lora.rank=4"]:  # the plain side trains all weights
        return
    config = load_config([], apart, DistillConfig)
    data, steps = read_run_data(config).documents, documents(config)
    names = {tuple(d.tokens.tolist()): d.dataset for d in (data[i] for i in range(len(data)))}
    chosen = [[("a", "b").index(names[tuple(ids)]) for ids, _ in step] for step in steps]
    assert {teacher for step in chosen for teacher in step} == {0, 1}
    settings = {"loss": "jsd", "beta": 0.5, "temperature": 2.0, "squared": False, "alpha": 0.25}
    losses, gradients, _ = plain_distill.train(
        f"{home()}/student", [f"{home()}/wide", f"{home()}/other"], steps, chosen, settings, 0.2
    )
    assert [line["loss"] for line in lines(tmp_path / "apart")] == pytest.approx(losses, rel=1e-5)
    for number, expected in enumerate(gradients, 1):
        actual = torch.load(tmp_path / f"gradients-{number}.pt")
        assert actual.keys() == expected.keys()
        assert not [figure for figure in compare_gradients(actual, expected, {}) if not figure.passed], number


def test_verify_and_eval_compute_frozen_models_in_turns() -> None:
    """On the trained model's mesh, with what else the section says, and in one line of the output."""
    base = ["model.path=org/m", "data.path=org/d"]
    for schema, name, words in (
        (DistillConfig, "teacher", [*base, "distill.teacher=org/t", "teacher.param_dtype=bf16"]),
        (DpoConfig, "reference", [*base, "reference.param_dtype=bf16"]),
    ):
        expected: Any = load_config([], words, schema)
        config: Any = load_config([], [*words, f"{name}.ranks=4", f"{name}.tp=2", f"{name}.pp=1"], schema)
        assert in_turns(config) == (
            expected,
            [f"ranks    the {name} alternates with the trained model here; {name}.ranks=4 is not applied"],
        )
        assert in_turns(expected) == (expected, [])


def unfolded(output: str) -> list[str]:
    """The lines of an opening about teachers."""
    return re.findall(r"^teacher .*", re.sub(r" *\n {9}", " ", output), re.MULTILINE)


def test_a_teacher_under_adapters_and_an_average_begin_at_the_student(tmp_path: Path) -> None:
    """The divergence from the model itself is zero at first, and then not: the teacher stays, or lags behind."""
    cases = {
        "base": ["distill.teacher=base", "lora.rank=4", "distill.alpha=0.5"],
        "average": ["distill.teacher=average", "optimizer.ema_decay=0.9", "distill.alpha=0.5"],
    }
    for name, words in cases.items():
        run(2, attempt, config_of(tmp_path / name, *words))
        values = [line["divergence"] for line in lines(tmp_path / name)]
        assert abs(values[0]) < 1e-6 and values[1] > 1e-6 and values[2] > 1e-6, (name, values)


def test_a_base_under_adapters_equals_a_copy_of_it(tmp_path: Path) -> None:
    losses = []
    for teacher in ("base", f"{home()}/student"):
        folder = tmp_path / str(len(losses))
        run(1, attempt, config_of(folder, f"distill.teacher={teacher}", "lora.rank=4", "distill.alpha=0.5"))
        losses.append([line["loss"] for line in lines(folder)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.covers("distill.cache", "distill.cache_dir")
def test_kept_hidden_states_are_the_teachers_on_any_mesh(tmp_path: Path) -> None:
    """The second run, on another mesh, opens no teacher; the third has one more file, and reads only that anew."""
    words = [f"distill.teacher={home()}/other", "distill.loss=reverse_kl", "eval.share=0.2"]
    cached_words = [*words, "distill.cache=disk", f"distill.cache_dir={tmp_path}/cache"]
    run(2, attempt, config_of(tmp_path / "live", *words))
    run(2, attempt, config_of(tmp_path / "first", *cached_words))
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "cache").rglob("*.bin")}
    assert sizes
    run(1, attempt_without_teacher, config_of(tmp_path / "second", *cached_words))
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "cache").rglob("*.bin")}
    figures = [
        [[line[k] for k in ("loss", "grad_norm")] for line in lines(tmp_path / name)] for name in ("live", "first")
    ]
    assert figures[0] == figures[1]
    second = [[line[k] for k in ("loss", "grad_norm")] for line in lines(tmp_path / "second")]
    for expected, actual in zip(figures[0], second, strict=True):
        assert expected == pytest.approx(actual, rel=1e-5)
    run(1, attempt, config_of(tmp_path / "third", *cached_words, f"data.path={home()}/b.jsonl", "eval.share=null"))
    assert len(list((tmp_path / "cache").rglob("*.bin"))) == len(sizes) + 1


def attempt_without_teacher(config: DistillConfig) -> None:
    with mock.patch.object(teachers, "open_teacher", side_effect=AssertionError("the teacher was opened")):
        attempt(config)


def test_damaged_hidden_states_are_an_error(tmp_path: Path) -> None:
    """A byte that changed, and a file that was cut; an entry that was cut while it was written is none."""
    document = Document(torch.tensor([1, 2, 3]), torch.tensor([0.0, 1.0, 1.0]))
    second_document = Document(torch.tensor([1, 2, 4]), torch.tensor([0.0, 1.0, 1.0]))
    hidden = torch.arange(12.0).view(3, 4).to(torch.bfloat16)
    HiddenCache(tmp_path, 4, torch.bfloat16, {"weights": "w"}).put(
        {0: document, 1: second_document}, {0: hidden, 1: -hidden}
    )

    def cache() -> HiddenCache:
        return HiddenCache(tmp_path, 4, torch.bfloat16, {"weights": "w"})

    cached = cache().get(document)
    assert cached is not None and torch.equal(cached[1:], hidden[1:]) and not cached[0].any()
    (path,), (entries,) = tmp_path.glob("*.bin"), tmp_path.glob("*.idx")
    content = path.read_bytes()
    for damaged in (content[:3] + b"\x01" + content[4:], content[:5]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged. Remove .* and weft writes it again"):
            cache().get(document)
    with pytest.raises(UserError, match="is damaged. Remove .* and weft writes it again"):
        cache()  # before any work, a file that is too short
    path.write_bytes(content)
    opened = cache()
    path.unlink()
    for attempt in (cache, lambda: opened.get(document)):
        with pytest.raises(UserError, match="is missing. Remove .* and weft writes it again"):
            attempt()
    path.write_bytes(content)
    entries.write_bytes(entries.read_bytes()[:-1])
    assert cache().get(second_document) is None and cache().get(document) is not None
    with pytest.raises(UserError, match="belongs to another teacher"):
        HiddenCache(tmp_path, 4, torch.float32, {"weights": "w"})


class Server:
    """A server on this machine that answers as vLLM's completions API does, with a plain model's distributions."""

    def __init__(self, path: str) -> None:
        self.model, self.requests = plain_distill.plain_model(path), list[dict[str, Any]]()
        server, outer = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler), self

        class TeacherHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({"data": [{"id": "first"}, {"id": "second"}]} if self.path == "/v1/models" else {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                if body["prompt_logprobs"] > 20:
                    self.answer({"error": {"message": "Requested prompt logprobs of 21, max allowed: 20"}}, 400)
                else:
                    self.answer({"choices": [{"text": "x", "prompt_logprobs": outer.entries(**body)}]})

            def answer(self, value: Any, status: int = 200) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server.RequestHandlerClass = TeacherHandler
        self.url = f"http://127.0.0.1:{server.server_port}/v1"
        Thread(target=server.serve_forever, daemon=True).start()

    def lists(self, ids: list[int], count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens in the place of each token; the first has none."""
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        logprobs, tokens = logits.log_softmax(-1).topk(count, -1)
        return torch.nn.functional.pad(tokens, (0, 0, 1, 0)), torch.nn.functional.pad(logprobs, (0, 0, 1, 0))

    def entries(self, prompt: list[int], prompt_logprobs: int, **_: Any) -> list[dict[str, Any] | None]:
        """As vLLM writes them: token id as text -> logprob and rank, with the prompt's token, whatever its rank."""
        tokens, logprobs = self.lists(prompt, prompt_logprobs)
        out: list[dict[str, Any] | None] = [None]
        for token_id, of_token, values in zip(prompt[1:], tokens[1:].tolist(), logprobs[1:].tolist(), strict=True):
            listed = enumerate(zip(of_token, values, strict=True), 1)
            entry = {str(token): {"logprob": value, "rank": rank} for rank, (token, value) in listed}
            out.append({str(token_id): {"logprob": -9.0, "rank": 99}} | entry)
        return out


@pytest.mark.covers("distill.top_k", "distill.served_model")
def test_a_served_teacher_is_its_likeliest_tokens_and_a_tail(tmp_path: Path) -> None:
    """Two ranks, which share the requests; then from the lists on disk, without a server."""
    server = Server(f"{home()}/other")
    words = [f"distill.teacher={server.url}", "distill.top_k=5", "distill.loss=reverse_kl", "distill.cache=disk",
             f"distill.cache_dir={tmp_path}/cache", "distill.served_model=second"]  # fmt: skip
    config = config_of(tmp_path / "run", *words)
    run(2, attempt, config)
    steps = documents(config)
    assert {request["model"] for request in server.requests} == {"second"}
    sent = [request["prompt"] for request in server.requests if request["prompt"] != [0, 1]]
    assert sorted(sent) == sorted({str(ids): ids for step in steps for ids, _ in step}.values())
    settings = {"loss": "reverse_kl", "beta": 0.5, "temperature": 1.0, "squared": False, "alpha": 0.0}
    chosen = [[0] * len(step) for step in steps]
    expected = plain_distill.train(f"{home()}/student", [server.lists], steps, chosen, settings, 0.2)
    assert [line["loss"] for line in lines(tmp_path / "run")] == pytest.approx(expected[0], rel=1e-5)
    server.requests.clear()
    run(1, attempt, config_of(tmp_path / "again", *words))
    assert not server.requests
    assert [line["loss"] for line in lines(tmp_path / "again")] == pytest.approx(expected[0], rel=1e-5)
    wide = [f"distill.teacher={server.url}", "distill.top_k=21"]
    with pytest.raises(Exception, match="completions did not answer like vLLM's server: status 400: .*allowed: 20"):
        run(1, attempt, config_of(tmp_path / "wide", *wide))


@pytest.mark.covers("distill.teachers", "distill.teacher_column")
def test_rows_name_their_teacher_and_have_its_lists(tmp_path: Path) -> None:
    """A model for some rows, lists in the row for others: of all tokens, or of the trained ones."""
    drawn, rows = DrawnLists(264), list[dict[str, Any]]()
    for i in range(12):
        ids = [(7 * i + 3 * t) % 250 for t in range(5 + i)]
        tops, logprobs = drawn.lists(ids)
        used = [[int(token >= 0) for token in entry] for entry in tops.tolist()]
        first = 0 if i % 4 == 1 else 3
        columns = {
            name: [list(compress(entry, use)) for entry, use in zip(values.tolist(), used, strict=True)][first:]
            for name, values in (("top_ids", tops), ("teacher_top_logprobs", logprobs))
        }
        labels = [-100] * 3 + ids[3:]
        rows.append({"input_ids": ids, "labels": labels, "subject": "math"} | (columns if i % 2 else {}))
        rows[-1]["subject"] = "listed" if i % 2 else "math"
    write_jsonl(tmp_path / "rows.jsonl", *rows)
    words = [f"data.path={tmp_path}/rows.jsonl", f"distill.teachers={{math: {home()}/wide, listed: data}}",
             "distill.teacher_column=subject", "distill.loss=jsd", "data.columns={teacher_top_ids: top_ids}",
             "distill.alpha=0.25"]  # fmt: skip
    config = config_of(tmp_path / "run", *words)
    run(2, attempt, config)
    steps = documents(config)
    settings = {"loss": "jsd", "beta": 0.5, "temperature": 1.0, "squared": False, "alpha": 0.25}
    by_length = [[(len(ids) - 5) % 2 for ids, _ in step] for step in steps]
    plain = [f"{home()}/wide", drawn.lists]
    expected = plain_distill.train(f"{home()}/student", plain, steps, by_length, settings, 0.2)
    assert [line["loss"] for line in lines(tmp_path / "run")] == pytest.approx(expected[0], rel=1e-5)


class Killed(Exception):
    pass


def attempt_recording(config: DistillConfig, resume: str | None = None, steps: int | None = None) -> None:
    """As attempt; the documents of each step, with the sampled ones, go to a file next to the run's folder. steps: it
    ends in the step after these, before the update."""
    original, apply, applied = StudentSampler.__call__, Engine.apply, [0]

    def limited(engine: Engine, lr: float) -> Any:
        if applied[0] == steps:
            raise Killed
        applied[0] += 1
        return apply(engine, lr)

    def recording(sampler: StudentSampler, step: int, documents: Any) -> Any:
        out = original(sampler, step, documents)
        if sampler.engine.ranks.is_first:
            entries = [(d.tokens.tolist(), d.weights.tolist(), "(sampled)" in d.source) for d in out]
            with Path(f"{config.run.dir}.jsonl").open("a") as file:
                file.write(json.dumps(entries) + "\n")
        return out

    with (
        mock.patch.object(StudentSampler, "__call__", recording),
        mock.patch.object(Engine, "apply", limited),
        suppress(Killed),
    ):
        distill.run(config, TrainOptions(device="cpu", resume=resume))


@pytest.mark.covers("distill.on_policy", "distill.max_new_tokens", "distill.sampling_temperature")
@pytest.mark.parametrize(
    "mesh", ["", *(pytest.param(m, marks=pytest.mark.table) for m in ("mesh.tp=2", "mesh.cp=2", "mesh.pp=2"))]
)
def test_a_share_of_the_answers_is_the_students(tmp_path: Path, mesh: str) -> None:
    """The losses are those of plain transformers on the same documents. At a temperature near 0 a sampled answer is
    the likeliest continuation by the weights before its step. A resumed run samples the same."""
    words = [f"distill.teacher={home()}/other", "distill.on_policy=0.5", "distill.max_new_tokens=6",
             "distill.sampling_temperature=0.0001", *([mesh] if mesh else [])]  # fmt: skip
    world = 2 if mesh else 1
    run(world, attempt_recording, config_of(tmp_path / "whole", *words))
    steps = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    settings = {"loss": "forward_kl", "beta": 0.5, "temperature": 1.0, "squared": False, "alpha": 0.0}
    plain = [[(ids, mask) for ids, mask, _ in step] for step in steps]
    chosen = [[0] * len(step) for step in steps]
    expected = plain_distill.train(f"{home()}/student", [f"{home()}/other"], plain, chosen, settings, 0.2)
    assert [line["loss"] for line in lines(tmp_path / "whole")] == pytest.approx(expected[0], rel=1e-5)
    assert [sum(sampled for *_, sampled in step) for step in steps] == [3, 3, 3]
    model = plain_distill.plain_model(str(tmp_path / "whole" / "checkpoints" / "step-000002"))
    for ids, mask, sampled in steps[2]:
        if sampled:
            start = mask.index(1.0)
            assert len(ids) - start == 6 or ids[-1] in {0, *byte_tokenizer().all_special_ids}
            with torch.no_grad():
                likeliest = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
            assert ids[start:] == likeliest[start - 1 : -1]
    broken = config_of(tmp_path / "broken", *words)
    run(world, attempt_recording, broken, None, 1)
    run(world, attempt_recording, broken, str(tmp_path / "broken"))
    repeated = [json.loads(line) for line in (tmp_path / "broken.jsonl").read_text().splitlines()]
    assert [*repeated[:1], *repeated[2:]] == steps  # step 2 was begun twice
    for name, weight in weights(tmp_path / "whole").items():
        assert torch.equal(weight, weights(tmp_path / "broken")[name]), name


def test_which_answers_are_sampled_is_a_function_of_seed_and_step() -> None:
    counts = [len(chosen_of_step(0, step, 7, 0.3)) for step in range(200)]
    assert set(counts) == {2, 3}
    assert sum(counts) / len(counts) == pytest.approx(2.1, abs=0.1)
    assert chosen_of_step(0, 5, 7, 0.3) == chosen_of_step(0, 5, 7, 0.3)
    assert chosen_of_step(0, 5, 7, 1.0) == list(range(7))


def half_skewed(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Terms of a user: KL(q || p), half of it."""
    return 0.5 * log_q.exp() * (log_q - log_p)


def summed(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    return half_skewed(log_p, log_q).sum(1)


def test_a_divergence_of_ones_own(tmp_path: Path) -> None:
    teacher, path = f"distill.teacher={home()}/other", "tests.recipes.test_distill"
    run(1, attempt, config_of(tmp_path / "own", teacher, f"distill.loss={path}:half_skewed"))
    run(1, attempt, config_of(tmp_path / "ours", teacher))
    first, second = lines(tmp_path / "own")[0], lines(tmp_path / "ours")[0]
    assert 2 * first["loss"] == pytest.approx(second["loss"], rel=1e-6)
    assert 2 * first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-5)
    with pytest.raises(Exception, match="returns .*; it must return a term for each token of the vocabulary"):
        run(1, attempt, config_of(tmp_path / "summed", teacher, f"distill.loss={path}:summed"))
    assert differentiated(half_skewed, "")(torch.zeros(1, 2), torch.zeros(1, 2))[0].shape == (1, 2)
    assert terms_of("forward_kl", 0.5) is not None


def verified(config: DistillConfig, plant: str | None) -> bool:
    return verify.run(config, VerifyOptions(device="cpu", world=2, plant=plant))


def test_verify_compares_distillation_and_finds_a_planted_bug(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", f"distill.teacher={home()}/other", "distill.alpha=0.3")
    for plant, passes in ((None, True), ("gradient-into-the-teacher", False)):
        assert run(2, verified, config, plant) == [passes, passes]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "distill.teacher and distill.teachers are both null"),
        (["distill.teacher=t", "distill.teachers={a: t}"], "distill.teacher and distill.teachers are both set"),
        (["distill.teacher=base"], "set lora.rank, or set distill.teacher to a model"),
        (["distill.teacher=average"], "set optimizer.ema_decay=0.99"),
        (["distill.teacher=m"], "gradients are 0 in every step: set distill.alpha above 0"),
        (["distill.teacher=base", "lora.rank=4"], "gradients are 0 in every step: set distill.alpha above 0"),
        (["distill.teacher=t", "distill.loss=kl"], "not one of forward_kl, reverse_kl, jsd, nor an import path"),
        (["distill.teacher=t", "distill.beta=0.1"], "distill.beta would have no effect: only distill.loss=jsd"),
        (["distill.teacher=t", "distill.loss=jsd", "distill.beta=1"], "distill.beta is 1.0; it must be above 0"),
        (["distill.teacher=t", "distill.temperature_squared=true"], "distill.temperature is 1"),
        (["distill.teacher=t", "distill.alpha=1"], "weft sft trains on cross entropy alone"),
        (["distill.teacher=t", "train.loss=a:b"], "train.loss would have no effect: distill.loss defines"),
        (["distill.teachers={a: t}"], "data.sources is not set: set data.sources; or set distill.teacher_column"),
        (["distill.teacher=http://h/v1", "distill.temperature=2"], "a server returns log-probabilities at temp"),
        (["distill.teacher=data", "distill.cache=disk"], "distill.teacher=data runs no model"),
        (["distill.teacher=data", "distill.on_policy=1"], "the teacher's tokens only for its own answers"),
        (["distill.teacher=t", "distill.on_policy=1", "distill.cache=disk"], "samples other answers in every epoch"),
        (
            ["distill.teacher=t", "distill.on_policy=1", "distill.alpha=0.5"],
            "on the student's samples teaches noth",
        ),
        (["distill.teacher=t", "distill.max_new_tokens=5"], "distill.on_policy is 0"),
        (["distill.teacher=t", "teacher.ranks=1", "distill.cache=disk"], "its ranks would then be idle"),
        (["distill.teacher=t", "teacher.ranks=1", "distill.on_policy=0.5"], "cannot process the next step in advance"),
        (["distill.teacher=data", "teacher.ranks=1"], "weft does not open data as a model"),
        (["distill.teacher=base", "lora.rank=4", "distill.alpha=0.5", "teacher.ranks=1"], "the student itself"),
        (["distill.teacher=t", "distill.top_k=5"], "no teacher is the URL of a server"),
        (["distill.teacher=t", "distill.teacher_column=a"], "distill.teachers is not set"),
        (["distill.teacher=base", "lora.rank=4", "teacher.tp=2"], "the teacher is the student itself"),
    ],
)
def test_configs_that_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        load_config([], ["model.path=m", "data.path=d.jsonl", *words], DistillConfig)


def test_another_tokenizer_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    other_model = home() / "tokens"
    if not other_model.exists():
        shutil.copytree(home() / "other", other_model)
        metaspace_tokenizer().save_pretrained(other_model)
    paths = [f"model.path={home()}/student", f"data.path={home()}/a.jsonl", f"distill.teacher={other_model}"]
    assert cli.main(["distill", *paths, "--dry-run"]) != 0
    assert "the tokenizers of" in capsys.readouterr().err


def test_hidden_states_that_make_no_sense_are_an_error() -> None:
    document = Document(torch.tensor([1, 2, 3]), torch.ones(3), source="a.jsonl:3")
    check_hidden(torch.ones(3, 4), document, "the teacher t")
    with pytest.raises(
        FloatingPointError, match="the teacher t returns hidden states that are not finite, for a.jsonl:3"
    ):
        check_hidden(torch.tensor([[1.0], [float("nan")], [2.0]]), document, "the teacher t")
    with pytest.raises(RuntimeError, match=r"hidden states of shape \(2, 4\) for a.jsonl:3 of 3 tokens"):
        check_hidden(torch.ones(2, 4), document, "the teacher t")
