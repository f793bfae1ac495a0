"""Every example says how it is tried without hardware, and that command passes offline."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig

from examples.make_style_demo import main as make_style_demo
from tests.support.toy_tokenizers import byte_tokenizer, chat
from tests.support.vision_zoo import vision_folder
from tests.support.zoo import tiny_config
from weft import cli

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
# Parameters that the model cards state, to see that the configs are those of the models.
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-4B-128k": 4_022_468_096,
    "Qwen3-4B-256k": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
}


def commands(path: Path) -> list[str]:
    """The commands that a file's comments name."""
    comments = "\n".join(line[1:].strip() for line in path.read_text().splitlines() if line.startswith("#"))
    return re.findall(r"weft (?:sft|dpo|reward|rl|distill) examples/\S+\.yaml.*", comments)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In place of what `make demo` writes, something of its shape."""
    folder = tmp_path_factory.mktemp("demo")
    for model in ("model", "adder", "student", "warm/checkpoints/latest"):
        byte_tokenizer().save_pretrained(folder / model)
        tiny_config("qwen3", vocab_size=264).save_pretrained(folder / model)
    row = chat(("user", "How far?"), ("assistant", "Far."))
    (folder / "chat.jsonl").write_text(json.dumps(row) + "\n")
    for data in ("additions", "held-out"):
        (folder / f"{data}.jsonl").write_text('{"prompt": "12+34=", "completion": "64"}\n')
    make_style_demo(folder / "style")
    for model in ("taught", "rm"):
        shutil.copytree(folder / "style/writer", folder / "style" / model / "checkpoints/latest")
    config = AutoConfig.from_pretrained(folder / "style/rm/checkpoints/latest")
    config.architectures, config.num_labels = ["Qwen3ForSequenceClassification"], 1
    config.save_pretrained(folder / "style/rm/checkpoints/latest")
    vision_folder(folder / "shapes/model", "qwen2_5_vl")
    for data in ("train", "held-out", "shown"):
        (folder / f"shapes/{data}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.fixture
def checkout(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples, and a copy of the demo."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(demo, tmp_path / ".demo")
    return tmp_path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_dry_run_passes_offline(path: Path, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [text for text in commands(path) if "--dry-run" in text]
    words = shlex.split(command)[1:]
    assert words[1] == f"examples/{path.name}"
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    name = Path(yaml.safe_load(path.read_text())["model"]["path"]).name
    if name in PARAMETERS:
        parameters = PARAMETERS[name] + 1024 * (words[0] == "reward")  # a head of one number
        assert f"{parameters:,} parameters" in out or _frozen(out) == parameters
        assert f"weights  examples/models/{name} contains no weights yet" in out
        assert not list((ROOT / "examples/models" / name).glob("*.safetensors")), "the test is of a config alone"
    if words[0] == "rl":
        assert ("reward   " in out or "teacher" in out) and "memory of a rank" in out and "None x" not in out
        prompts = "200 prompts of 5 to 8 tokens" if "style" in path.stem else "1 prompt of 6 tokens"
        assert "prompts  " in out if name in PARAMETERS else prompts in out


@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "share"), [("sft_qwen3_8b_one_gpu", 0.75), ("sft_llama_70b_qlora", 0.65), ("sft_qwen3_4b_256k", 0.45)]
)
def test_the_plan_that_an_example_names_fits(
    name: str, share: float, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = re.findall(r"weft (plan examples/\S+\.yaml.*)", (ROOT / f"examples/{name}.yaml").read_text())
    assert cli.main(shlex.split(command)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "does not fit" not in out
    (percent,) = re.findall(r"peak \S+ GiB (\d+)% of", out)
    assert share - 0.1 <= int(percent) / 100 <= share


def test_a_dry_run_assumes_the_machine_that_an_example_is_for(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sft", "examples/sft_qwen3_4b.yaml", "fsdp.param_dtype=auto", "--dry-run"]
    assert cli.main([*words, "--assume", "h100-80gb"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "ranks 8, the product of mesh (--nproc N sets another number)" in out
    assert "attention kernel varlen" in out and "compute bfloat16" in out
    assert "h100-80gb (--assume) has 79.1 GiB" in out
    assert "rows of 16,384 tokens need 5.778 GiB for backward (model.recompute=full)" in out
    assert cli.main([*words, "--assume", "a100-40gb", "--nproc", "1", "mesh.dp_shard=1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "weights 14.98 GiB" in out and "a100-40gb (--assume) has 39.4 GiB" in out
    assert cli.main([*words, "--assume", "h1"]) == 2
    assert "--assume h1: unknown accelerator; use one of t4-16gb, " in capsys.readouterr().err
    assert cli.main([*words[:-1], "--assume", "h100-80gb"]) == 2
    assert "--assume needs --dry-run" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert cli.main([*words, "--device", "cuda"]) == 2
        assert "For a dry run use --assume h100-80gb" in capsys.readouterr().err


def test_a_dry_run_of_64_gpus_counts_what_each_has(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers are divided by tp, shards are over dp_shard x cp, and rows are a rank's."""
    words = ["sft", "examples/sft_qwen3_32b.yaml", "--dry-run", "--assume", "h100-80gb"]
    assert cli.main([*words, "mesh.tp=8", "mesh.cp=4", "mesh.dp_shard=2", "data.max_length=65536"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "tp layers split over 8 ranks" in out
    assert "cp documents longer than 16,384 tokens are split over up to 4 ranks (ring 4)" in out
    assert "FSDP units, the part of one of 8 ranks of tp" in out and "32.8B embed_tokens.weight" in out
    assert "weights 1.907 GiB + gradients 1.907 GiB + optimizer 3.815 GiB" in out  # 16 bytes x 32.8e9 / 64
    assert "rows of 16,384 tokens, a rank's part of 65,536, need 2.372 GiB for backward (model.recompute=full)" in out


def test_a_dry_run_of_long_documents(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sft", "examples/sft_qwen3_4b_128k.yaml", "--dry-run", "--assume", "h100-80gb"]
    assert cli.main([*words, "mesh.ulysses=4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "split over up to 4 ranks (ulysses 4); shorter ones send nothing" in out
    assert "rows of 32,768 tokens, a rank's part of 131,072, need 11.56 GiB for backward" in out
    assert cli.main([*words, "mesh.cp=2", "mesh.dp_shard=4"]) == 2
    assert "set step.max_tokens_per_device=65536, or data.max_length=65536, or mesh.cp=4" in capsys.readouterr().err


def test_a_dry_run_of_experts(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts are gathered from those that hold the same ones, and a rank keeps what it would keep without ep."""
    words = ["sft", "examples/sft_qwen3_30b_a3b.yaml", "--dry-run", "--assume", "h100-80gb"]
    for ep, gathered in ((8, "75.5M 144 MiB over the ranks of the same experts"), (1, None)):
        assert cli.main([*words, f"mesh.ep={ep}"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "weights 7.109 GiB + gradients 7.109 GiB + optimizer 14.22 GiB = 28.44 GiB a rank" in out
        assert (gathered is None) == ("ep 8 0-7 | 8-15 ranks of dp_shard x cp" not in out)
        assert gathered is None or f"48 model.layers.*.mlp.experts {gathered}" in out


def test_a_dry_run_of_stages_with_experts_and_long_documents(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sft", "examples/sft_qwen3_235b_a22b.yaml", "--dry-run", "--assume", "h100-80gb"]
    assert cli.main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "8 stages of layers: 0 to 11 (30,475,389,952 parameters), 12 to 23" in out
    assert "split over up to 4 ranks (ring 4)" in out and "ep 8 0-7 | 8-15" in out
    assert "weights 14.19 GiB + gradients 14.19 GiB + optimizer 14.19 GiB = 42.57 GiB a rank" in out
    assert cli.main([*words, "fsdp.cast_forward_inputs=['*.norm']"]) == 2
    assert "fsdp.cast_forward_inputs cannot be combined with mesh.pp = 8" in capsys.readouterr().err


def test_a_dry_run_of_a_vision_model(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is frozen, what an image takes, and that only text is cut."""
    words = ["sft", "examples/sft_qwen2.5_vl_7b.yaml", "--dry-run", "--assume", "h100-80gb"]
    assert cli.main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "dp_shard 2 0,2 | 1,3 | 4,6 | 5,7" in out and "cp 2 0-1 | 2-3 | 4-5 | 6-7" in out
    assert "cp documents of text longer than 16,384 tokens are split over up to 2 ranks (ulysses 2)" in out
    assert "eager forward, documents, with images and without, do not see each other" in out
    assert "parts vision 632M frozen, projector 44.6M frozen, language 7.62B trained (model.freeze)" in out
    assert "images an image takes up to 3,520 tokens of a row: 1,337, and 2,183 for its patches; a document" in out
    assert "weights 7.723 GiB + gradients 7.093 GiB + optimizer 14.19 GiB = 29 GiB a rank" in out
    assert re.search(r"frozen 0 390 677M model.visual rows", out)
    overrides = ["mesh.cp=1", "mesh.ulysses=null", "mesh.dp_shard=4", "data.max_length=16384"]
    assert cli.main([*words, "model.freeze=[vision]", *overrides]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "projector 44.6M trained" in out and "632M model.visual.patch_embed, model.visual.blocks" in out
    assert cli.main([*words, "lora.rank=8", "model.freeze=null"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"parts vision [\d.]+M with [\d.]+M trained, projector", out)


def test_the_images_of_the_examples_are_read(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "preview", "model.path=.demo/shapes/model", "model.init=random", "data.path=examples/seen.jsonl"]
    assert cli.main([*words, "step.documents=5"]) == 0
    assert "5 documents" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rl.reward=[tests.support.reward_functions:needs_more]",
            "additions.jsonl:1: rl.reward: needs_more has a parameter `difficulty`",
        ),
        (
            "rl.reward=[tests.support.reward_functions:absent]",
            "rl.reward: tests.support.reward_functions has no absent",
        ),
        ("rl.environment=nowhere:Calculator", "there is no module nowhere for nowhere:Calculator"),
        ("rl.advantage=nowhere:advantage", "there is no module nowhere for nowhere:advantage"),
        ("rollout.max_new_tokens=251", "= 257 tokens, but the model has 256 positions"),
        (
            "rollout.max_prompt_tokens=5",
            "additions.jsonl:1: 1 of 1 prompts are longer than rollout.max_prompt_tokens = 5",
        ),
        (
            "data.columns={prompt: question}",
            "data.columns reads prompt from `question`, but there is no `question` among `prompt`",
        ),
    ],
)
def test_a_dry_run_tells_what_a_run_would_be_refused_for(
    override: str, message: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["rl", "examples/rl_arithmetic_cpu.yaml", "--dry-run", override]) == 2
    assert message in capsys.readouterr().err


def _frozen(out: str) -> int:
    """Parameters beside the adapters, which are counted with them."""
    trained, total = re.findall(r"([\d,]+) of ([\d,]+) parameters are trained", out)[0]
    return int(total.replace(",", "")) - int(trained.replace(",", ""))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_where_it_has_run(path: Path) -> None:
    text = path.read_text()
    assert ("NOT RUN on" in text) == ("cpu" not in path.stem)
    if "cpu" not in path.stem:
        assert re.search(r"^#   hf download \S+ --local-dir examples/models/\S+", text, re.MULTILINE)


def test_the_data_of_the_examples_is_chats() -> None:
    rows = [json.loads(line) for line in (ROOT / "examples/chat.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and all(row["messages"][-1]["role"] == "assistant" for row in rows)
