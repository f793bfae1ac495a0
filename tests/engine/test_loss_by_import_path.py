"""train.loss: a loss of one's own by import path, in the recipe and beside a plain loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.cases import describe, open_engine, saved_model
from tests.support.pool import run
from tests.support.toy_tokenizers import byte_tokenizer, write_jsonl
from tests.support.zoo import tiny_config
from weft import cli
from weft.engine.losses.base import Batch, CrossEntropy, HeldOutLoss
from weft.engine.losses.load import choose_objective
from weft.errors import UserError
from weft.models import hf
from weft.verify import harness
from weft.verify.documents import awkward_steps
from weft.verify.harness import Verdict

FOCAL = """
import torch
from weft.engine.losses.base import Batch, Terms

class Focal:
    readouts = frozenset({"logprob"})
    every_token = False

    def __init__(self, gamma=2.0):
        self.gamma = gamma

    def normaliser(self, plan):
        return plan.totals.weight or 1.0

    def logprob_grad(self, weights_N):
        return None

    def __call__(self, batch):
        logprob = batch.readouts["logprob"]
        loss = -(batch.weights_N * (1 - logprob.exp()) ** self.gamma * logprob).sum()
        plain = -(batch.weights_N * logprob).sum().detach()
        weight = batch.weights_N.sum()
        return Terms(loss, {"loss": (loss.detach(), weight), "nll": (plain, weight)})

class Mute(Focal):
    def __call__(self, batch):
        terms = super().__call__(batch)
        return Terms(terms.loss_sum, {})

class Hasty(Focal):
    def logprob_grad(self, weights_N):
        return -weights_N

class Mean(Focal):
    def __call__(self, batch):
        terms = super().__call__(batch)
        return Terms(terms.loss_sum / batch.weights_N.sum(), terms.metrics)

class Detached(Focal):
    def __call__(self, batch):
        terms = super().__call__(batch)
        return Terms(terms.loss_sum.detach(), terms.metrics)

class ScalarMetric(Focal):
    def __call__(self, batch):
        terms = super().__call__(batch)
        return Terms(terms.loss_sum, {"loss": terms.loss_sum.detach()})

class WideMetric(Focal):
    def __call__(self, batch):
        terms = super().__call__(batch)
        return Terms(terms.loss_sum, {**terms.metrics, "each": (batch.readouts["logprob"], batch.weights_N)})

class Undivided(Focal):
    def normaliser(self, plan):
        return None

class ByNothing(Focal):
    def normaliser(self, plan):
        return 0

class ByRows(Focal):
    def normaliser(self, plan):
        return len(plan.rows)

class Smooth(Focal):
    readouts = frozenset({"logprob", "chosen_logits", "logsumexp"})
    first = 0

    def token_ids(self, targets_N, arrays):
        return targets_N.new_tensor(range(self.first, self.first + 264)).expand(len(targets_N), -1)

    def __call__(self, batch):
        terms = super().__call__(batch)
        all_NC = batch.readouts["chosen_logits"] - batch.readouts["logsumexp"][:, None]
        return Terms(terms.loss_sum - (batch.weights_N * all_NC.mean(1)).sum() / 10, terms.metrics)

class Beyond(Smooth):
    first = 1

class Wide(Focal):
    readouts = frozenset({"logprob", "entropy", "top_logits/3", "hidden/model.layers.0"})
    every_token = True

    def __call__(self, batch):
        terms, found = super().__call__(batch), batch.readouts
        each = found["entropy"] + 1e-2 * found["top_logits/3"].sum(1) + found["hidden/model.layers.0"].square().mean(1)
        whole = batch.document_sum(each).square().sum()
        return Terms(terms.loss_sum + 1e-3 * whole, terms.metrics)

class Lettered(Focal):
    readouts = "logprob"

class Needy(Focal):
    def __init__(self, gamma):
        super().__init__(gamma)

class Greedy(Focal):
    readouts = frozenset({"logprob", "value"})

sharp = Focal(5.0)
half = object()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("objectives")
    byte_tokenizer().save_pretrained(path / "model")
    config = tiny_config("llama", vocab_size=264)
    hf.build_random(config, dtype=torch.float32, attention="eager", seed=0).save_pretrained(path / "model")
    write_jsonl(path / "d.jsonl", *({"prompt": "ab", "completion": "c" * (n + 1)} for n in range(6)))
    (path / "own_losses.py").write_text(FOCAL)
    return path


@pytest.fixture
def workdir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


WORDS = ["sft", "model.path=model", "data.path=d.jsonl", "step.documents=6", "step.max_tokens_per_device=16"]
WORDS += ["train.epochs=1", "train.loss=own_losses:Focal"]


@pytest.mark.covers("train.loss")
@pytest.mark.slow
def test_an_objective_of_ones_own_is_trained(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of the first step is what transformers and five lines of torch say."""
    assert cli.main([*WORDS, "run.dir=focal"]) == 0
    assert "loss     own_losses:Focal" in capsys.readouterr().out
    line = json.loads((workdir / "focal" / "metrics.jsonl").read_text().splitlines()[0])
    model = transformers.AutoModelForCausalLM.from_pretrained("model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    focal = nll = count = 0.0
    for n in range(6):
        prompt, completion = (tokenizer(text, add_special_tokens=False).input_ids for text in ("ab", "c" * (n + 1)))
        begin = [tokenizer.bos_token_id] if tokenizer("a").input_ids[0] == tokenizer.bos_token_id else []
        ids = torch.tensor([[*begin, *prompt, *completion, tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        trained = logprobs[len(begin) + len(prompt) - 1 :].double()
        focal -= float(((1 - trained.exp()) ** 2 * trained).sum())
        nll -= float(trained.sum())
        count += len(trained)
    assert line["loss"] == pytest.approx(focal / count, rel=1e-5)
    assert line["nll"] == pytest.approx(nll / count, rel=1e-5)
    assert line["loss"] < line["nll"]


@pytest.mark.slow
def test_an_objective_without_a_loss_to_show_is_named(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WORDS, "train.loss=own_losses:Mute", "run.dir=mute"]) == 2
    assert "train.loss: own_losses:Mute returns no metric `loss`" in capsys.readouterr().err


@pytest.mark.slow
def test_an_objective_whose_gradient_is_not_what_it_says_is_refused(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*WORDS, "train.loss=own_losses:Hasty", "run.dir=hasty"]) == 2
    assert (
        "train.loss: logprob_grad() of Hasty is not proportional to the gradient of its loss" in capsys.readouterr().err
    )
    assert not (workdir / "hasty" / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Mean", "Mean is not a sum over documents: if a row holds its documents twice, the gradient with"),
        ("Detached", "the loss_sum of Detached has no gradient"),
        ("ScalarMetric", "metric `loss` of ScalarMetric is a tensor of shape []; it must be a pair (sum, weight)"),
        ("WideMetric", "metric `each` of WideMetric is (a tensor of shape ["),
        ("Undivided", "normaliser(plan) of Undivided returns a NoneType; it must be a number other than zero"),
        ("ByNothing", "normaliser(plan) of ByNothing returns 0.0; it must be a number other than zero"),
        ("Beyond", "token_ids() of Beyond returns token 264; the model has logits for tokens 0 to 263"),
    ],
)
def test_what_an_objective_returns_is_looked_at_before_the_first_step(
    name: str, words: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*WORDS, f"train.loss=own_losses:{name}", f"run.dir={name}"]) == 2
    assert words in capsys.readouterr().err
    assert not (workdir / name / "metrics.jsonl").read_text()


def verdict_of(path: str, name: str, mesh: str) -> Verdict | None:
    objective = choose_objective(f"own_losses:{name}")
    engine = open_engine(path, mesh, readouts=tuple(objective.readouts))
    return harness.verify(engine, path, awkward_steps(264), [1e-3] * 3, objective=objective)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family", "mesh"),
    [
        ("Smooth", "llama", "tp2"),
        ("Wide", "llama", "cp2"),
        ("Wide", "qwen3_moe", "ep2"),
        ("Smooth", "qwen3_moe", "pp2"),
    ],
)
def test_verify_compares_it_with_plain_readouts(name: str, family: str, mesh: str, folder: Path) -> None:
    verdict = run(2, importing, str(folder), saved_model(family, vocab_size=264), name, mesh)[0]
    assert verdict.passed, describe(verdict)
    assert len([figure for figure in verdict.figures if figure.name.startswith("train.loss: ")]) == 4


@pytest.mark.slow
def test_verify_sees_one_that_depends_on_how_a_step_is_cut(folder: Path) -> None:
    verdict = run(2, importing, str(folder), saved_model("llama", vocab_size=264), "ByRows", "2")[0]
    assert verdict.failed == ["train.loss: gradients, many micro-batches"]


def importing(folder: str, *args: str) -> Verdict | None:
    """verdict_of on a rank, where modules of this folder can be imported."""
    sys.path.append(folder)
    try:
        return verdict_of(*args)
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("own_losses:Lettered", "own_losses:Lettered has a string as `readouts`"),
        ("my_loss:Focal", "there is no module my_loss for my_loss:Focal"),
        ("own_losses:Focus", "own_losses has no Focus"),
        ("own_losses:Needy", "own_losses:Needy cannot be created without arguments"),
        ("own_losses:half", "it has no normaliser, logprob_grad, __call__, readouts, every_token"),
        ("own_losses:Greedy", "names value in `readouts`; the names are logprob, entropy, logsumexp, chosen_logits"),
        ("json:dumps", "is not a loss: it has no normaliser, logprob_grad, readouts, every_token"),
    ],
)
def test_what_is_no_objective_is_refused(path: str, words: str, workdir: Path) -> None:
    with pytest.raises(UserError, match="train.loss") as caught:
        choose_objective(path)
    assert words in str(caught.value)


def test_it_is_refused_before_anything_is_read(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir / "empty.jsonl").write_text("")
    assert cli.main([*WORDS, "data.path=empty.jsonl", "train.loss=my_loss:Focal"]) == 2
    assert "there is no module my_loss" in capsys.readouterr().err
    assert cli.main([*WORDS, "train.loss=own_losses.py:Focal"]) == 2
    assert "in own_losses, which is no package: write own_losses:Focal." in capsys.readouterr().err
    assert cli.main([*WORDS, "train.loss=Focal"]) == 2
    assert "which is not an import path: write package.module:Name" in capsys.readouterr().err


def test_ways_to_name_one(workdir: Path) -> None:
    assert isinstance(choose_objective(None), CrossEntropy)
    assert choose_objective("own_losses.Focal").gamma == 2.0  # type: ignore[attr-defined]
    assert choose_objective("own_losses:sharp").gamma == 5.0  # type: ignore[attr-defined]


def test_a_document_is_exact_where_every_token_with_a_weight_is_the_likeliest() -> None:
    """Of any weight but 0: tokens of a negative one count as well, and those of none do not."""
    weights, top1 = torch.tensor([1.0, -1.0, 1.0, 0.0, -1.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    readouts = {"logprob": torch.zeros(6), "top1": top1}
    batch = Batch(readouts, weights, torch.tensor([0, 0, 1, 1, 2, 3]), (0, 1, 2, 3), {})
    exact, count = HeldOutLoss()(batch).metrics["exact"]
    assert (float(exact), float(count)) == (2, 3)  # the second and the third, of all but the last
