"""Reinforcement learning on images: prompts, rewards, training, recordings."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.inference.test_generate_images import PICTURES, folder, question_row, read
from tests.support.local_rl import run_config
from tests.support.vision_zoo import encoded, picture, vision_tokenizer
from weft.config.load import load_config
from weft.config.rl_schema import RlConfig
from weft.config.schema import DataConfig
from weft.data import image_files
from weft.data.image_files import ImageChecks
from weft.data.image_opener import ImageOpener, image_opener
from weft.data.images import Images
from weft.errors import UserError
from weft.inference.base import Completion, Request, SamplingParams
from weft.rl.chat import ChatRenderer
from weft.rl.prompts import Prompts
from weft.rl.rollouts import rollout_group

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of one image, of two, and of none; paths beside the file."""
    root = tmp_path_factory.mktemp("prompts")
    for name, shown in PICTURES.items():
        (root / f"{name}.png").write_bytes(encoded(shown))
    rows = [
        ({"prompt": "<image>who is it?", "images": ["a.png"]}, "a"),
        ({"prompt": "<image> or <image>?", "images": ["b.png", "c.png"]}, "bc"),
        ({"prompt": "of what?"}, ""),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "c.png"}]}]}, "c"),
    ]
    lines = [{**row, "size": [PICTURES[name].size for name in names]} for row, names in rows]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def config_of(data: Path, run: Path, *keys: str, family: str = FAMILY) -> RlConfig:
    words = [
        f"model.path={folder(family)}", f"data.path={data}/prompts.jsonl", f"run.dir={run}", "rl.chat=true",
        "rl.prompts_per_step=4", "rl.group_size=3", "rl.reward=[tests.support.reward_functions:wide]",
        "rl.reward_workers=1", "rollout.max_prompt_tokens=120", "rollout.max_new_tokens=5",
        "step.max_tokens_per_device=256", "optimizer.lr=1e-2", "schedule.name=constant", "schedule.warmup_steps=0",
        "checkpoint.async=false", "train.steps=2", "rl.on_policy=measured",
    ]  # fmt: skip
    return load_config([], [*words, *keys], RlConfig)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        (FAMILY, ("rl.kl_coef=0.1", "rl.epochs=2")),
        (FAMILY, ("rollout.engine=hf", "model.freeze=[vision]")),
        ("gemma3", ()),
    ],
)
def test_the_trainer_reads_what_was_sampled(family: str, keys: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    """Logprobs of the engine and of the trainer are the same, before and after the weights, and the tower's, change."""
    run = tmp_path / "run"
    run_config(config_of(data, run, *keys, family=family))
    lines = lines_of(run)
    deviations = [line[key] for line in lines if (key := "sampling/sampling_logp_difference/max") in line]
    assert 0 < max(deviations) < 2e-5
    assert any(line["grad_norm"] > 0 for line in lines)
    rows = pq.read_table(run / "rollouts/step-000001.parquet").to_pylist()
    shown = {row["source"].rpartition(":")[2]: json.loads(row["columns"]).get("images") for row in rows}
    a, b, c = (str(data / f"{name}.png") for name in PICTURES)
    assert shown == {"1": [a], "2": [b, c], "3": [], "4": [c]}
    assert {row["prompt"] for row in rows} == {"<image>who is it?", "<image> or <image>?", "of what?", "<image>"}


def test_recordings_are_trained_from_with_the_images_of_the_data(data: Path, tmp_path: Path) -> None:
    run, replayed = tmp_path / "run", tmp_path / "again"
    run_config(config_of(data, run))
    run_config(config_of(data, replayed), replay=str(run / "rollouts"))
    for first, second in zip(lines_of(run), lines_of(replayed), strict=True):
        assert {key: first[key] for key in ("loss", "grad_norm")} == {key: second[key] for key in ("loss", "grad_norm")}
    (data / "others.jsonl").write_text((data / "prompts.jsonl").read_text().replace("who is it", "who is that"))
    with pytest.raises(UserError, match=r"the recorded prompt differs from .*others.jsonl:1 of data.path"):
        run_config(config_of(data, tmp_path / "third", f"data.path={data}/others.jsonl"), replay=str(run / "rollouts"))


def test_a_prompt_that_no_row_takes_is_named_before_training(data: Path, tmp_path: Path) -> None:
    """Its images take room beside its tokens and its answer's; rows of the reference count, too."""
    (data / "large.png").write_bytes(encoded(picture(80, 96)))
    rows = [{"prompt": "<image>", "images": ["a.png"]}, {"prompt": "<image><image>", "images": ["large.png"] * 2}]
    (data / "large.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"data.path={data}/large.jsonl", "rollout.max_prompt_tokens=60", "rl.reward=[length]"]
    message = (
        r"large.jsonl:2, with rollout.max_new_tokens = 5: has \d+ tokens, and its images \(96 patches\) need as much"
    )
    with pytest.raises(UserError, match=rf"^\S*{message}"):
        run_config(config_of(data, tmp_path / "run", *keys, "step.max_tokens_per_device=66"))
    with pytest.raises(UserError, match=f"^the reference .*{message}"):
        run_config(config_of(data, tmp_path / "kl", *keys, "rl.kl_coef=0.1", "reference.max_tokens_per_device=66"))
    assert not (tmp_path / "kl/rollouts").exists()


def test_an_image_that_is_alone_in_its_row_is_trained(data: Path, tmp_path: Path) -> None:
    """It was opened to generate, where nothing is saved for a backward pass."""
    (data / "one.jsonl").write_text(json.dumps({"prompt": "<image>", "images": ["a.png"]}) + "\n")
    keys = [
        f"data.path={data}/one.jsonl",
        "rl.reward=[length]",
        "rl.prompts_per_step=1",
        "step.max_tokens_per_device=66",
        "step.share_prefixes=off",
    ]
    run_config(config_of(data, tmp_path / "run", *keys, "rollout.max_prompt_tokens=40", "train.steps=1"))
    assert lines_of(tmp_path / "run")[0]["micro_batches"] == 3


def test_pictures_have_the_limit_that_the_data_had(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,), _ = read(FAMILY, [question_row("which?", "a", "b")])
    monkeypatch.setattr(image_files, "ImageChecks", partial(ImageChecks, max_pixels=100))  # less than either has
    assert prompt.images is not None
    assert [image.size for image in prompt.images.pictures()] == [PICTURES["a"].size, PICTURES["b"].size]


def test_who_sees_no_image_loads_no_tokenizer(tmp_path: Path) -> None:
    (prompt,), images = read(FAMILY, [question_row("who?", "a")])
    assert prompt.images is not None
    calls: list[Images] = []
    opener = ImageOpener(lambda: calls.append(images) or images)
    assert not calls
    assert opener(prompt.images) is opener(prompt.images) and len(calls) == 1
    unread = image_opener(str(tmp_path), DataConfig(path="unused"))  # where there is neither config nor tokenizer
    with pytest.raises(UserError, match=r"model.path"):
        unread(prompt.images)


def test_an_answer_that_draws_an_image_is_not_trained() -> None:
    """No model reads a placeholder without an image: it ends the answer, which goes without it."""
    (prompt,), _ = read(FAMILY, [question_row("who?", "a")])
    placeholder = vision_tokenizer(FAMILY).convert_tokens_to_ids("<|image_pad|>")
    assert placeholder in prompt.placeholders and placeholder in prompt.tokens

    class Engine:
        async def generate(self, request: Request) -> list[Completion]:
            assert {7, placeholder} <= set(request.sampling.ends)
            drawn = ((5, 6, placeholder), (5, 6, 7))
            return [Completion(tokens, (-0.5,) * 3, "end", ((1, 3),), (-0.1,) * 3) for tokens in drawn]

    group = asyncio.run(rollout_group(prompt, 2, Engine(), SamplingParams(9, ends=(7,)), None, 0))  # type: ignore[arg-type]
    first, second = group.samples
    assert first.completion() == [5, 6] and first.length == 2 and first.finish == "length" and not first.trained
    assert first.notes == {"untrained": "it sampled a placeholder token of an image"}
    assert second.completion() == [5, 6, 7] and second.trained and len(second.versions) == len(second)


def test_a_bad_image_is_named_or_left_out(tmp_path: Path) -> None:
    rows = [question_row("a", "a"), question_row("b")]
    rows[1]["prompt"][0]["content"].insert(0, {"type": "image", "image": str(tmp_path / "none.png")})
    with pytest.raises(UserError, match=r"data\[1\]: image \(.*none.png\): there is no such file"):
        read(FAMILY, rows)
    remaining, _ = read(FAMILY, rows, drop_bad=True)
    assert [prompt.source for prompt in remaining] == ["data[0]"]


def test_prompts_with_other_images_are_other_prompts() -> None:
    """A run is not resumed with them. Images count as tokens of a prompt."""
    digests = {Prompts("", read(FAMILY, [question_row("a", name)])[0], ()).digest for name in PICTURES}
    assert len(digests) == 3
    with pytest.raises(UserError, match="rollout.max_prompt_tokens = 30"):
        read(FAMILY, [question_row("a", "a", "b", "c")], longest=30)


def test_what_marks_an_image_is_no_text() -> None:
    with pytest.raises(UserError, match=r"data\[0\]: a text contains <\|image_pad\|>"):
        read(FAMILY, [question_row("what is <|image_pad|>?")])
    with pytest.raises(UserError, match=r"has 1 image in `images` and 2 places"):
        read(FAMILY, [{"prompt": [{"role": "user", "content": "<image> or <image>?"}], "images": ["x"]}])


def test_a_conversation_goes_on_behind_an_image() -> None:
    """What an environment replies follows the answer, and the image is not asked for again."""
    (prompt,), images = read(FAMILY, [question_row("who?", "a")])
    tokenizer = vision_tokenizer(FAMILY)
    continuation = ChatRenderer(tokenizer, None, images).continuation(prompt, [{"role": "user", "content": "sure?"}])
    assert tokenizer.decode(continuation.tokens) == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
