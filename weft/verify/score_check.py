"""`weft verify` for reward models in `weft rl`: compares scores of conversations with transformers' classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers

from weft.config.rl_schema import RewardModelConfig
from weft.config.schema import StepConfig
from weft.data.encode import has_template
from weft.launch import flight
from weft.launch.process import Ranks
from weft.rl.reward_models import Conversation, ConversationScorer
from weft.verify.harness import SCALAR, Figure

_ROOM = 256  # tokens, enough for the conversations below
# (prompt, answer), of uneven lengths.
_TEXTS = (
    ("What is 14 + 56?", "14 + 56 = 70."), ("Yes or no?", "No"), ("Write a line of verse about the sea.", "-"),
    ("a b c " * 9, "d e f " * 3), ("x", "Tides fold the moon into the sand. " * 2),
)  # fmt: skip


def with_room_to_verify(section: RewardModelConfig, step: StepConfig) -> RewardModelConfig:
    """The section with room for the conversations of score_figures."""
    return replace(
        section, max_tokens_per_device=max(_ROOM, section.max_tokens_per_device or step.max_tokens_per_device)
    )


def score_figures(scorers: Mapping[str, ConversationScorer], ranks: Ranks) -> list[Figure]:
    """A figure for each reward model, by its role; empty except on the first rank. Each scores the same conversations
    as transformers, which scores them one by one. Collective."""
    figures = list[Figure]()
    for role, scorer in scorers.items():
        chat = has_template(scorer.encoder.tokenizer, None)
        conversations = [_conversation(f"{role}:{n}", *texts, chat) for n, texts in enumerate(_TEXTS)]
        outcomes = scorer.score(conversations)
        flight.enter(flight.ENDLESS)
        if ranks.is_first:
            worst, note = 0.0, ""
            plain = transformers.AutoModelForSequenceClassification.from_pretrained(
                scorer.path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
            ).eval().to(scorer.engine.device)  # fmt: skip
            tokenizer = transformers.AutoTokenizer.from_pretrained(scorer.path)
            for (prompt, answer), outcome in zip(_TEXTS, outcomes, strict=True):
                expected = _plain_score(plain, tokenizer, prompt, answer, chat)
                value = float("inf") if outcome.value is None else abs(outcome.value - expected) / max(1, abs(expected))
                if not value <= worst:
                    worst, note = value, outcome.error or repr(prompt[:20])
            figures.append(Figure(f"{role}: scores", worst, SCALAR, note=note))
    return figures


def _conversation(source: str, prompt: str, answer: str, chat: bool) -> Conversation:
    if not chat:
        return Conversation(source, prompt, answer, {})
    messages = [{"role": "user", "content": prompt}], [{"role": "assistant", "content": answer}]
    return Conversation(source, *messages, {})


@torch.no_grad()
def _plain_score(model: transformers.PreTrainedModel, tokenizer: Any, prompt: str, answer: str, chat: bool) -> float:
    if chat:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
    else:
        ids = [*tokenizer(prompt)["input_ids"], *tokenizer(answer, add_special_tokens=False)["input_ids"]]
        ids.append(tokenizer.eos_token_id)
    return float(model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, 0])
