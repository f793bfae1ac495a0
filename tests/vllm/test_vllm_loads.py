"""vLLM loads what `weft sft` saved, as it is, and chooses the tokens that transformers would choose.

Every token that vLLM generates greedily is compared with transformers' own choice after the same prefix. They may
differ only where transformers' two best logits are within TIE of each other; such places are counted.
"""

from __future__ import annotations

import gc
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from tests.support.toy_tokenizers import byte_tokenizer, write_jsonl
from tests.vllm.conftest import SETTINGS

ROOT = Path(__file__).parents[2]
TIE = 1e-4
LOGPROB = 1e-4
PROMPTS, NEW_TOKENS = 16, 40
SHAPE = dict(
    vocab_size=288, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.1, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, object], torch.dtype]] = {
    "dense": ("Qwen3", dict(tie_word_embeddings=True), torch.bfloat16),
    "moe": (
        "Qwen3Moe",
        dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True),
        torch.float32,
    ),
}
TEXTS = [
    f"{n}. The {adjective} {animal} {verb} over {n + 3} {objects} and then {verb} back again, {end}\n"
    for n, (adjective, animal, verb, objects, end) in enumerate(
        (adjective, animal, verb, objects, end)
        for adjective, end in (("quick", "at once."), ("lazy", "much later!"), ("brown", "or so it seems?"))
        for animal in ("fox", "owl", "hedgehog", "newt")
        for verb, objects in (("jumps", "fences"), ("flies", "rivers of ink"))
    )
]


@dataclass
class Comparison:
    """tokens: compared. ties: other choices at a tie. logprob: largest difference of the chosen token's logprob."""

    tokens: int = 0
    ties: int = 0
    distinct: int = 0
    logprob: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.tokens} greedy tokens ({self.distinct} different ones): all are transformers' own choice but for "
            f"{self.ties} top-2 ties within {TIE:g}; logprobs within {self.logprob:.1e}"
        )


def make_source(kind: str, folder: Path) -> Path:
    """A random model of this kind with a byte tokenizer, as a checkpoint directory."""
    family, family_keys, dtype = MODELS[kind]
    config: PretrainedConfig = getattr(transformers, f"{family}Config")(**SHAPE, **family_keys)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def train(model: Path, data: str, run_dir: Path) -> Path:
    """`weft sft` on two ranks, in weft's own environment; the directory it saved."""
    command = [
        str(ROOT / ".venv/bin/python"), "-m", "weft", "sft", f"model.path={model}", f"data.path={data}",
        f"run.dir={run_dir}", "train.steps=30", "train.epochs=null", "step.documents=12",
        "step.max_tokens_per_device=512", "optimizer.lr=3e-3", "--nproc", "2",
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return run_dir / "checkpoints" / "latest"


def prompts() -> list[list[int]]:
    """Beginnings of the training texts and of nothing, from one token to more than two blocks of the KV cache."""
    encode = byte_tokenizer().encode
    lengths = [1, 2, 3, 5, 8, 13, 16, 17, 21, 31, 33, 40, 50, 55, 60, 64]
    texts = [TEXTS[n % len(TEXTS)] + TEXTS[n + 1] if n % 4 else "zq#" * 30 for n in range(PROMPTS)]
    return [encode(text, add_special_tokens=False)[:length] for text, length in zip(texts, lengths, strict=True)]


def generate(model: Path) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, tokens, logprob of each) by vLLM, greedily."""
    llm = LLM(str(model), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=PROMPTS, seed=0)
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], sampling, use_tqdm=False)
    answers = []
    for ids, output in zip(prompts(), outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        logprobs = [
            candidates[token].logprob for candidates, token in zip(output.outputs[0].logprobs, tokens, strict=True)
        ]
        answers.append((ids, tokens, logprobs))
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return answers


@torch.no_grad()
def compare(model: Path, generated: list[tuple[list[int], list[int], list[float]]]) -> Comparison:
    """Every generated token against transformers' choice after the same prefix."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    comparison = Comparison(distinct=len({token for _, tokens, _ in generated for token in tokens}))
    for ids, tokens, logprobs in generated:
        logits = plain(input_ids=torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        best, choice = logits.topk(2)
        for position, token in enumerate(tokens):
            comparison.tokens += 1
            if token != int(choice[position, 0]):
                gap = float(best[position, 0] - best[position, 1])
                assert token == int(choice[position, 1]) and gap <= TIE, (ids, position, token, choice[position], gap)
                comparison.ties += 1
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        comparison.logprob = max(comparison.logprob, float((chosen - torch.tensor(logprobs)).abs().max()))
    return comparison


@pytest.mark.parametrize("kind", MODELS)
def test_vllm_chooses_what_transformers_chooses(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl", *({"text": text} for text in TEXTS))
    saved = train(make_source(kind, tmp_path / "source"), data, tmp_path / "run")
    comparison = compare(saved, generate(saved))
    with capsys.disabled():
        print(f"\n{kind} ({MODELS[kind][0]}): {comparison}")
    assert comparison.tokens == PROMPTS * NEW_TOKENS > 500
    assert comparison.distinct > 20, "a model that repeats itself shows little"
    assert comparison.logprob < LOGPROB
