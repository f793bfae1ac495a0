"""vLLM's pooling models give the scores of what `weft reward` saved, as it is."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from vllm import LLM, PoolingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from tests.support.reward_job import FAMILIES, answers, train_reward_model, weft_scores
from tests.vllm.conftest import SETTINGS


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_a_reward_model(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of weft, of vLLM, and of transformers."""
    checkpoint = train_reward_model(family, tmp_path, without=list(SETTINGS))
    texts = answers(tmp_path)
    expected = weft_scores(checkpoint, texts, without=list(SETTINGS))
    ids = [AutoTokenizer.from_pretrained(checkpoint)(text, add_special_tokens=False)["input_ids"] for text in texts]
    llm = LLM(str(checkpoint), runner="pooling", dtype="float32", enforce_eager=True, max_model_len=256, seed=0)
    outputs = llm.classify(
        [{"prompt_token_ids": tokens} for tokens in ids], pooling_params=PoolingParams(use_activation=False),
        use_tqdm=False,
    )  # fmt: skip
    scores = [output.outputs.probs[0] for output in outputs]
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        plain = [float(model(input_ids=torch.tensor([tokens])).logits[0, 0]) for tokens in ids]
    with capsys.disabled():
        worst = max(abs(score - of_weft) for score, of_weft in zip(scores, expected, strict=True))
        print(f"\n{family}: {len(scores)} scores from {min(scores):.2f} to {max(scores):.2f}, {worst:.1e} from weft's")
    assert max(scores) - min(scores) > 0.1, "scores that are all alike show little"
    assert plain == pytest.approx(expected, abs=1e-5)
    assert scores == pytest.approx(expected, abs=1e-4)
