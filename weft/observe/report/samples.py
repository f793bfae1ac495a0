"""The prompts and answers that `weft report` shows: samples of rollouts and evaluations, with thumbnails of images.

The records of a run are not trusted. The page escapes texts, and opens images with limits.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.data.image_columns import Image
from weft.data.image_files import ImageChecks, load_pixels
from weft.errors import UserError
from weft.inference.records import EVALUATIONS, FOLDER, Answer, read_answers, rollout_files
from weft.observe.rollouts import ending, reward_text

# Number of the best and of the worst samples that are shown, each of a different prompt.
_MAX_SAMPLES = 3
# For samples over time: number of steps that are read, from the first to the last, and of prompts that are shown.
_MAX_STEPS, _MAX_PROMPTS = 8, 4
_MAX_ANSWERS = 6  # answers to a prompt of eval.prompts that are not folded
# The middle of a long text is omitted: numbers of characters that are shown from its beginning and its end.
_SHOWN_FIRST, _SHOWN_LAST = 3000, 1000
_SIDE = 112  # largest width and height of a thumbnail in pixels
_MAX_THUMBNAILS = 6  # of one prompt
_CACHED = 512


def best_and_worst(folder: Path) -> dict[str, Any] | None:
    """The best and the worst samples of the last rollout step as text; None if no rollouts are recorded."""
    files = rollout_files(folder / FOLDER)
    if not files:
        return None
    step = max(files)
    parts = zip(("best", "worst"), extremes(read_answers(files[step]), _MAX_SAMPLES), strict=True)
    return {
        "step": step,
        "parts": [
            {
                "name": name,
                "samples": [
                    {
                        "prompt": _shortened(answer.prompt),
                        "text": _shortened(answer.text),
                        "about": f"reward {reward_text(answer)}; {answer.length} tokens, {ending(answer)}",
                        "pictures": thumbnails(answer.images),
                    }
                    for answer in answers
                ],
            }
            for name, answers in parts
            if answers
        ],
    }


def extremes(answers: Sequence[Answer], count: int) -> tuple[list[Answer], list[Answer]]:
    """(Best, worst) answers, the most extreme first, each to a different prompt, without overlap."""
    rewarded = [answer for answer in answers if answer.reward is not None]
    ranked = sorted(rewarded, key=lambda answer: answer.reward or 0.0, reverse=True)
    best = _first_by_prompt(ranked, count)
    best_ids = {id(answer) for answer in best}
    return best, _first_by_prompt([answer for answer in reversed(ranked) if id(answer) not in best_ids], count)


def _first_by_prompt(answers: Sequence[Answer], count: int) -> list[Answer]:
    """The first answer to each prompt, at most `count`."""
    firsts: dict[str, Answer] = {}
    for answer in answers:
        firsts.setdefault(answer.prompt_id, answer)
    return list(firsts.values())[:count]


def samples_over_time(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The changes of answers and rewards, for evaluations, whose prompts stay the same, and for rollouts. If no prompt
    of the rollouts was repeated, the first prompt of each step is shown. notes: unreadable files are added."""
    parts = []
    for kind, unit, name in ((EVALUATIONS, "step", "Held-out prompts"), (FOLDER, "rollout step", "Training prompts")):
        files = rollout_files(folder / kind)
        groups: dict[int, dict[tuple[str, str], list[Answer]]] = {}  # step -> prompt -> answers
        for step in evenly(list(files), _MAX_STEPS):
            try:
                answers = read_answers(files[step])
            except UserError as error:
                notes.append(str(error))
                continue
            group = groups.setdefault(step, {})
            for answer in answers:
                group.setdefault((answer.prompt_id.partition(".")[0], answer.prompt), []).append(answer)
        counts = Counter(prompt for group in groups.values() for prompt in group)
        repeated = [prompt for prompt, count in counts.most_common(_MAX_PROMPTS) if count > 1]
        if repeated:
            by_prompt = ({step: g[prompt] for step, g in groups.items() if prompt in g} for prompt in repeated)
            parts.append({"name": name, "prompts": [_timeline(answers, unit) for answers in by_prompt]})
        elif kind == FOLDER and len(groups) > 1:
            firsts = {step: next(iter(group.values())) for step, group in groups.items() if group}
            parts.append({"name": f"{name}: the first of each step", "prompts": [_timeline(firsts, unit)]})
    return parts


def _timeline(answers: Mapping[int, Sequence[Answer]], unit: str) -> dict[str, Any]:
    """The first answer of each step, with its reward and the mean over all answers to the prompt. unit: of steps."""
    firsts = [samples[0] for samples in answers.values()]
    same_prompt = len({answer.prompt for answer in firsts}) == 1
    moments = []
    for step, samples in answers.items():
        rewards = [answer.reward for answer in samples if answer.reward is not None]
        mean = f"; mean of {len(rewards)}: {sum(rewards) / len(rewards):.3g}" if len(rewards) > 1 else ""
        about = f"reward {reward_text(samples[0])}{mean}"
        moment = {"when": f"{unit} {step:,}", "about": about, "text": _shortened(samples[0].text)}
        moments.append(moment if same_prompt else {**moment, "prompt": _shortened(samples[0].prompt)})
    if not same_prompt:
        return {"prompt": "", "pictures": [], "moments": moments}
    return {"prompt": _shortened(firsts[0].prompt), "pictures": thumbnails(firsts[0].images), "moments": moments}


def answers_by_prompt(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of samples.jsonl, grouped by prompt and images, prompts and answers in order. moments: the first, the
    last and some in between; every: all, if there are more."""
    groups: dict[str, dict[str, Any]] = {}
    for sample in samples:
        prompt, images = _as_text(sample.get("prompt", "")), sample.get("images")
        group = groups.setdefault(
            f"{prompt}\n{images}", {"prompt": prompt, "pictures": thumbnails(images), "every": []}
        )
        group["every"].append({"when": f"step {sample.get('step')}", "about": "", "text": _as_text(sample["answer"])})
    for group in groups.values():
        answers = group["every"]
        group["moments"] = [answers[index] for index in evenly(range(len(answers)), _MAX_ANSWERS)]
        group["every"] = answers if len(answers) > _MAX_ANSWERS else []
    return list(groups.values())


def evenly(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, at about equal distances, with the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def _as_text(value: object) -> str:
    """A text unchanged; messages as lines of `role: content`."""
    if isinstance(value, list):
        return "\n".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, dict) else str(m) for m in value)
    return str(value)


def _shortened(text: str) -> str:
    hidden = len(text) - _SHOWN_FIRST - _SHOWN_LAST
    return text if hidden <= 0 else f"{text[:_SHOWN_FIRST]}\n[{hidden:,} characters omitted]\n{text[-_SHOWN_LAST:]}"


def thumbnails(names: object) -> list[dict[str, str]]:
    """The name and the `src` of the first images of a prompt. src: a `data:` URI, so that the page is one file; "" if
    there is no such image file."""
    listed = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return [{"name": name, "src": _thumbnail(name)} for name in listed[:_MAX_THUMBNAILS]]


@lru_cache(_CACHED)
def _thumbnail(path: str) -> str:
    if find_spec("PIL") is None:
        return ""
    try:
        image, _ = load_pixels(Image(path=path), "image", ImageChecks())
    except UserError:
        return ""
    image.thumbnail((_SIDE, _SIDE))
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")
