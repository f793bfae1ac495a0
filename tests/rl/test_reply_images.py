"""Images that an environment replies with: generated from, trained, recorded; and replies that cannot be taken."""

from __future__ import annotations

import asyncio
import io
import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.inference.test_generate_images import PICTURES, question_row, read
from tests.rl.test_rl_images import FAMILY, config_of, lines_of
from tests.support.environments import Gallery
from tests.support.local_rl import run_config
from tests.support.toy_tokenizers import family_tokenizer
from tests.support.vision_zoo import encoded, vision_tokenizer
from weft.data.image_opener import ImageOpener
from weft.data.images import Images
from weft.engine.batch.media import ImageRoom
from weft.errors import UserError
from weft.inference.base import Completion, Request, SamplingParams
from weft.inference.types import Prompt, Sample
from weft.rl.chat import ChatRenderer
from weft.rl.environments.base import Reply
from weft.rl.environments.episodes import EnvironmentFailure, Episodes
from weft.rl.environments.pool import EnvironmentPool
from weft.rl.rollouts import episode

END = vision_tokenizer(FAMILY).convert_tokens_to_ids("<|im_end|>")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt with an image, and one without."""
    root = tmp_path_factory.mktemp("gallery")
    for name, shown in PICTURES.items():
        (root / f"{name}.png").write_bytes(encoded(shown))
    rows = [{"prompt": "<image>who?", "images": ["b.png"]}, {"prompt": "say"}]
    lines = [json.dumps({**row, "folder": str(root), "ask": "and now?"}) for row in rows]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return root


def keys(*overrides: str) -> list[str]:
    """Answers end with the first letter or figure, so that conversations have several turns."""
    stops = json.dumps(list(string.ascii_letters + string.digits))
    return [
        "rl.environment=tests.support.environments:Gallery", "rl.reward=[]", "rl.reward_workers=null", "rl.max_turns=5",
        f"rollout.stop={stops}",
        "rollout.max_new_tokens=200", "rollout.max_prompt_tokens=60", "rl.prompts_per_step=2",
        "step.max_tokens_per_device=512",
        *overrides,
    ]  # fmt: skip


def test_images_of_replies_are_sampled_from_and_trained(data: Path, tmp_path: Path) -> None:
    """The trainer has the logprobs that the engine sampled with; a replay from the recording trains the same."""
    run, replayed = tmp_path / "run", tmp_path / "again"
    run_config(config_of(data, run, *keys()))
    lines = lines_of(run)
    assert 0 < max(line["sampling/sampling_logp_difference/max"] for line in lines) < 1e-5
    rows = pq.read_table(run / "rollouts/step-000001.parquet").to_pylist()
    longest = max(rows, key=lambda row: row["turns"])
    assert longest["turns"] == 4 and not any("error" in json.loads(row["notes"]) for row in rows)
    path, reply_image, memory = longest["reply_images"]
    assert path["path"] == str(data / "a.png") and path["data"] is None
    assert reply_image["data"] == (data / "b.png").read_bytes()
    assert Image.open(io.BytesIO(memory["data"])).tobytes() == PICTURES["c"].tobytes()
    user_messages = [
        message["content"] for message in json.loads(longest["notes"])["messages"] if message["role"] == "user"
    ]
    assert user_messages == [[{"type": "image"}, {"type": "text", "text": "and now?"}]] * 3
    run_config(config_of(data, replayed, *keys()), replay=str(run / "rollouts"))
    for first, second in zip(lines, lines_of(replayed), strict=True):
        assert {key: first[key] for key in ("loss", "grad_norm")} == {key: second[key] for key in ("loss", "grad_norm")}
        assert first["grad_norm"] > 0


class RepeatingEngine:
    """An engine that says the same at every turn, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        return [Completion((5, END), (-0.5, -0.5), "end", ((0, 2),))]


def episodes(images: Images | None, max_tokens: int = 400, room: ImageRoom | None = None) -> Episodes:
    chats = ChatRenderer(vision_tokenizer(FAMILY) if images else family_tokenizer("qwen", "qwen3"), None, images)
    return Episodes(
        Gallery, EnvironmentPool("tests.support.environments:Gallery"), chats, 5, 999, max_tokens, 20.0, room
    )


def play(prompt: Prompt, env: Episodes, folder: Path, ask: str = "so?") -> tuple[Sample, list[Request]]:
    engine: Any = RepeatingEngine()

    async def run() -> Sample:
        try:
            shown = replace(prompt, columns={**prompt.columns, "folder": str(folder), "ask": ask})
            return await episode(shown, 0, engine, SamplingParams(400, ends=(END,)), env, 11)
        finally:
            await env.pool.close()

    return asyncio.run(run()), engine.requests


def test_a_transcript_with_images_is_what_the_processor_makes_of_the_chat(data: Path) -> None:
    """At every turn: tokens and pixels of transformers' own processor."""
    (prompt,), images = read(FAMILY, [question_row("who?", "b")])
    sample, requests = play(prompt, episodes(images), data)
    assert sample.turns == 4 and sample.images is not None and len(sample.images.images) == 4
    assert prompt.messages is not None
    chat = [dict(message) for message in prompt.messages]
    names, tokenizer, processor = ["b"], vision_tokenizer(FAMILY), images.processor()._processor
    for request, name in zip(requests[1:], "abc", strict=True):
        names.append(name)
        parts = [{"type": "image"}, {"type": "text", "text": "so?"}]
        chat += [{"role": "assistant", "content": tokenizer.decode([5])}, {"role": "user", "content": parts}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[text], images=[PICTURES[name] for name in names], return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == list(request.tokens)
        assert request.images is not None
        opened = ImageOpener(lambda: images)(request.images)
        assert torch.equal(opened.inputs["pixel_values"], inputs["pixel_values"])


def test_a_conversation_ends_where_its_images_leave_no_room(data: Path) -> None:
    """Images take room in a row beside the tokens that stand for them."""
    (prompt,), images = read(FAMILY, [question_row("who?", "b")])
    complete, _ = play(prompt, episodes(images), data)
    assert complete.finish == "end" and complete.images is not None
    tower = ImageRoom(len(complete) + 100, 0.5)
    fits = replace(tower, tokens=len(complete) + tower.in_tokens(complete.images.patches))
    assert play(prompt, episodes(images, room=fits), data)[0].turns == 4
    short, asked_for = play(prompt, episodes(images, room=replace(fits, tokens=fits.tokens - 3)), data)
    assert short.turns == 3 and short.finish == "length" and short.trained
    assert short.images is not None and len(short.images.images) == 3
    room = fits.tokens - 3 - tower.in_tokens(short.images.patches)
    assert asked_for[-1].sampling.max_new_tokens == room - len(asked_for[-1].tokens)


def test_a_reply_that_cannot_be_taken_costs_its_sample(data: Path, tmp_path: Path) -> None:
    (prompt,), images = read(FAMILY, [question_row("who?", "b")])
    sample, _ = play(prompt, episodes(images), tmp_path)
    assert not sample.trained and "a.png): there is no such file" in sample.notes["error"]
    sample, _ = play(prompt, episodes(images), data, ask="<|image_pad|>")
    assert not sample.trained and "a text contains <|image_pad|>" in sample.notes["error"]
    for reply in (Reply(text="<|image_pad|>"), Reply(tokens=[prompt.placeholders[0]])):
        with pytest.raises(EnvironmentFailure, match="replied with a placeholder token of an image"):
            episodes(images).reply_tokens(prompt, reply, True, None)
    with pytest.raises(EnvironmentFailure, match=r"part 1 of `content` is of type \"sound\""):
        episodes(images).reply_tokens(
            prompt, Reply(messages=[{"role": "user", "content": [{"type": "sound"}]}]), True, None
        )


def test_models_that_take_no_images_are_named(data: Path) -> None:
    (prompt,), images = read(FAMILY, [question_row("who?", "b")])
    with pytest.raises(UserError, match="Gallery replied with an image, but this model cannot be trained on images: x"):
        play(prompt, episodes(images, room=ImageRoom(900, 0.5, "x")), data)
    with pytest.raises(UserError, match=r"a reply to .* has images, and model.path is a text-only model"):
        play(replace(prompt, images=None, placeholders=()), episodes(None), data)
