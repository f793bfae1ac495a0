"""Checks before anything large is loaded: a family is exact in some layout, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DeepseekV2Config, LlamaConfig, LlamaForCausalLM, LlamaModel, PretrainedConfig, RwkvConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from tests.support.cases import open_engine, saved_model
from tests.support.pool import run
from tests.support.zoo import tiny_config
from weft.config.schema import DataConfig, LoraConfig, ModelConfig, OptimizerConfig, SftConfig
from weft.engine.selfcheck import architecture
from weft.engine.selfcheck.architecture import LENGTHS, check_kernel, examine
from weft.engine.selfcheck.kinds import kinds_of
from weft.engine.selfcheck.shrink import fewer_layers, narrow
from weft.errors import UserError
from weft.launch.options import VerifyOptions
from weft.launch.process import Ranks
from weft.models import hf, state_mixers
from weft.models.facts import logit_transform, position_limit
from weft.models.families import Family
from weft.models.train_module import TrainModule
from weft.ops import attention
from weft.ops.attention_call import Bounds, Call
from weft.recipes import verify as verify_recipe
from weft.recipes.verify import verified_config
from weft.verify import reference
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

CPU = torch.device("cpu")

# ---------------------------------------------------------------- layouts


LAYOUTS = {
    "llama": "packed", "gemma2": "packed", "gpt_oss": "packed", "deepseek_v3": "packed", "stablelm": "packed",
    "llama4_text": "packed", "falcon": "padded",
}  # fmt: skip
STATEFUL = {
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "zamba2": "Zamba2MambaMixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "kimi_linear": "KimiLinearDeltaAttention",
    "mamba": "MambaMixer",
    "minimax": "MiniMaxLightningAttention",
    "mamba2": "Mamba2Mixer",
    "jamba": "JambaMambaMixer",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "falcon_h1": "FalconH1Mixer",
    "bamba": "BambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "nemotron_h": "NemotronHMamba2Mixer",
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_layout(family: str) -> None:
    findings = examine(tiny_config(family))
    assert findings.layout == LAYOUTS[family]
    assert findings.error < 1e-5
    assert findings.uses_bounds == (family != "falcon")
    assert not findings.mixers


def test_an_index_of_keys_chooses_among_those_of_a_small_copy() -> None:
    """An index as long as the documents of the check would choose all keys, and hide what ignores it."""
    config = tiny_config("deepseek_v32", index_topk=2048)
    assert narrow(config).index_topk < min(length for length in LENGTHS if length > 1)
    assert examine(config).layout == "padded"


def test_a_class_around_a_text_model_may_leave_out_the_factor_of_its_logits() -> None:
    text = {"model_type": "cohere2", "hidden_size": 64, "num_hidden_layers": 2, "logit_scale": 0.0625}
    config = transformers.Cohere2VisionConfig(text_config=text)
    assert logit_transform(config.get_text_config()).scale == 0.0625
    assert logit_transform(config, transformers.Cohere2VisionForConditionalGeneration).scale == 1.0


@pytest.mark.parametrize("family", STATEFUL)
def test_modules_that_carry_state_are_found_and_kept_apart(family: str) -> None:
    findings = examine(tiny_config(family))
    assert (findings.layout, findings.uses_bounds, findings.mixers) == ("packed", True, (STATEFUL[family],))
    assert findings.error < 1e-5


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
def test_a_family_whose_modules_are_not_found_is_laid_out_padded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_mixers, "carries_state", lambda module: False)
    findings = examine(tiny_config(family))
    assert findings.layout == "padded" and not findings.mixers


def test_a_module_that_bounds_do_not_reach_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not silently one document of the whole row. The check at start takes the other layout."""
    monkeypatch.setattr(state_mixers, "_pass_bounds", lambda mixers, layer, args, kwargs: None)
    module = TrainModule(architecture.small_copy(tiny_config("lfm2")))
    ids = torch.arange(3, 20)[None]
    with pytest.raises(RuntimeError, match="bounds reached 0 of . modules that carry state"):
        module.hidden(ids, ids, Bounds((9, 8)))
    assert examine(tiny_config("lfm2")).layout == "padded"


def test_check_rows_are_longer_than_every_window_and_chunk() -> None:
    config = tiny_config("gemma2", sliding_window=4096, num_hidden_layers=26)
    small = narrow(fewer_layers(config, 2, kinds_of(config)))
    assert max(LENGTHS) > small.sliding_window == 16
    chunks = narrow(tiny_config("llama4_text", attention_chunk_size=8192))
    assert max(LENGTHS) > chunks.attention_chunk_size == 16
    long = tiny_config("phi", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    long.original_max_position_embeddings = 4096
    assert sum(LENGTHS) > narrow(long).original_max_position_embeddings


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "cohere2"])
def test_a_kernel_that_ignores_windows_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = attention.KERNELS["per_document"]
    wrong = replace(kernel, run=lambda call: kernel.run(replace(call, window=None)))
    monkeypatch.setitem(attention.KERNELS, "per_document", wrong)
    with pytest.raises(UserError, match=rf"model_type '{family}'.*logits differ"):
        examine(tiny_config(family))


def test_logits_that_are_no_number_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one document, and not the first: a maximum that drops NaN would pass it."""
    kernel = attention.KERNELS["per_document"]

    def spoilt(call: Any) -> Tensor:
        out = kernel.run(call)
        out[:, :, -1] = float("nan")
        return out

    monkeypatch.setitem(attention.KERNELS, "per_document", replace(kernel, run=spoilt))
    with pytest.raises(UserError, match="logits differ from HuggingFace's eager forward by nan"):
        examine(tiny_config("llama"))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_length_that_chooses_a_rotary_table(kind: str, nested: bool) -> None:
    """Of the table itself, or else of the config; other tables are the same for every length."""

    def limit(rope: dict[str, Any], **values: Any) -> int | None:
        parameters = {"full_attention": rope} if nested else rope
        return position_limit(Mock(rope_parameters=parameters, max_position_embeddings=64, **values))

    rope_parameters = {"rope_type": kind, "original_max_position_embeddings": 16}
    assert limit(rope_parameters, original_max_position_embeddings=32) == 16
    assert limit({"rope_type": kind}, original_max_position_embeddings=32) == 32
    assert limit({"rope_type": kind}, original_max_position_embeddings=None) == 64
    assert limit({"rope_type": "llama3", "original_max_position_embeddings": 16}) is None


def test_a_dynamic_table_of_few_positions_is_checked_below_them() -> None:
    """Documents of the checks are longer than its 32 positions; those of a run are refused above them."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert examine(tiny_config("llama", max_position_embeddings=32, rope_parameters=rope)).layout == "packed"


# ---------------------------------------------------------------- refusals


def test_unknown_layer_types_are_refused_by_name() -> None:
    config = tiny_config("llama")
    config.layer_types = ["full_attention", "telepathy"]
    with pytest.raises(UserError, match=r"model_type 'llama' \(LlamaForCausalLM\).*layers of type telepathy isolate"):
        examine(config)


class StrangeConfig(LlamaConfig):
    model_type = "strange"


class _Strange(LlamaModel):
    """A Llama whose last hidden states are spoilt after the fact."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        out.last_hidden_state = self.spoil(out.last_hidden_state)
        return out


class _LeaksAlongTheRow(_Strange):
    def spoil(self, hidden_BTH: Tensor) -> Tensor:
        return hidden_BTH + 0.1 * hidden_BTH.cumsum(1)


class _LeaksOverTheBatch(_Strange):
    def spoil(self, hidden_BTH: Tensor) -> Tensor:
        return hidden_BTH + 0.1 * hidden_BTH.cumsum(1).sum(0, keepdim=True)


class _DropsBounds(LlamaModel):
    def forward(self, *args: Any, **options: Any) -> Any:
        options.pop("doc_bounds", None)
        return super().forward(*args, **options)


class _NeedsAMask(LlamaModel):
    def forward(self, *args: Any, attention_mask: Any = None, **options: Any) -> Any:
        if self.config._attn_implementation != "eager":
            attention_mask.to(torch.bool)
        return super().forward(*args, attention_mask=attention_mask, **options)


def strange(monkeypatch: pytest.MonkeyPatch, base: type[LlamaModel], factor: float = 1.0) -> PretrainedConfig:
    """The config of a family that transformers, as it seems, has: this base model, and logits times `factor`."""

    class StrangeForCausalLM(LlamaForCausalLM):
        config_class = StrangeConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.model = base(config)
            self.post_init()

        def forward(self, *args: Any, **options: Any) -> Any:
            out = super().forward(*args, **options)
            out.logits = out.logits * factor
            return out

    monkeypatch.setattr(hf.transformers, "StrangeForCausalLM", StrangeForCausalLM, raising=False)
    values = {name: value for name, value in tiny_config("llama").to_dict().items() if name != "model_type"}
    config = StrangeConfig(**values)
    config.architectures = ["StrangeForCausalLM"]
    return config


def test_a_new_family_without_a_leak_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine(strange(monkeypatch, LlamaModel)).layout == "packed"


def test_a_family_that_leaks_along_the_row_is_laid_out_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine(strange(monkeypatch, _LeaksAlongTheRow)).layout == "padded"


def _leaks_what_is_changed(source: int, victim: int) -> type[LlamaModel]:
    """A Llama that tells a document of a packed row of another, if that is not the one that the checks begin with."""

    class Leaks(LlamaModel):
        def forward(self, *args: Any, **options: Any) -> Any:
            out, ids = super().forward(*args, **options), options["input_ids"]
            if ids.shape == (1, sum(LENGTHS)):
                usual = architecture.documents_of(self.config.vocab_size)[source]
                changed = ids[0].split(LENGTHS)[source] != usual
                out.last_hidden_state[0].split(LENGTHS)[victim].add_(changed.any().float())
            return out

    return Leaks


@pytest.mark.parametrize(("source", "victim"), [(0, 1), (0, 3), (2, 1), (2, 3), (2, 0)])
def test_a_leak_that_shows_only_where_a_neighbour_is_another_is_seen(
    source: int, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert examine(strange(monkeypatch, _leaks_what_is_changed(source, victim))).layout == "padded"


REFUSED = [
    (_LeaksOverTheBatch, 1.0, "logits differ from HuggingFace's eager forward"),
    (_DropsBounds, 1.0, "the bounds of documents did not reach attention"),
    (_NeedsAMask, 1.0, "'NoneType' object has no attribute 'to'"),
    (LlamaModel, 2.0, "logits differ from HuggingFace's eager forward"),
]


@pytest.mark.parametrize(("base", "factor", "reason"), REFUSED)
def test_a_family_that_no_layout_makes_exact_is_refused_by_name(
    base: type[LlamaModel], factor: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = strange(monkeypatch, base, factor)
    with pytest.raises(UserError, match=rf"model_type 'strange' \(StrangeForCausalLM\).*{reason}"):
        examine(config)


def test_routes_that_are_drawn_in_training_and_keys_that_are_no_noise_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """phimoe as one that nobody had looked at: its jitter widens ties in inference, too, and training draws among
    them."""
    config = tiny_config("phimoe")
    noise = hf.noise_of(config)
    assert noise == () and hf.without_noise(config).router_jitter_noise == 0.01
    examine(config, noise)
    monkeypatch.setattr(hf, "family_of", lambda model_type: Family())
    architecture.forget_checks()
    noise = hf.noise_of(config)
    assert noise == ((0, "router_jitter_noise", 0.01),)
    with pytest.raises(UserError, match="'phimoe'.*its inference depends on router_jitter_noise"):
        examine(hf.without_noise(tiny_config("phimoe")), noise)
    with pytest.raises(UserError, match="'phimoe'.*its logits in training mode differ by .* from its logits in inf"):
        examine(config)
    assert hf.noise_of(tiny_config("gpt2")) and examine(
        hf.without_noise(tiny_config("gpt2")), ((0, "resid_pdrop", 0.1),)
    )


def test_verify_raises_the_epsilon_of_any_optimizer() -> None:
    def eps_of(name: str, **options: object) -> object:
        config = SftConfig(
            model=ModelConfig(path="m"),
            data=DataConfig(path="d"),
            optimizer=OptimizerConfig(name=name, options=options),
        )
        return verified_config(config, "m").optimizer.options.get("eps")

    assert eps_of("torch.optim.NAdam") == 1e-5 and eps_of("torch.optim.NAdam", eps=1e-3) == 1e-3
    assert eps_of("torch.optim.ASGD") is None and eps_of("sgd") is None
    assert eps_of("torch.optim.Adafactor") is None  # a pair


def test_a_head_with_a_name_that_weft_uses_itself_is_refused_by_name() -> None:
    config = RwkvConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2)
    config.architectures = ["RwkvForCausalLM"]
    with pytest.raises(UserError, match=r"RwkvForCausalLM \(model_type 'rwkv'\): its head is named `head`"):
        examine(config)


# ---------------------------------------------------------------- attention


def test_attention_raises_where_bounds_do_not_arrive() -> None:
    hf.register_kernels()
    model = hf.build_random(tiny_config("llama"), dtype=torch.float32, attention="weft_auto", seed=0)
    ids = torch.arange(3, 20)[None]
    with pytest.raises(RuntimeError, match="LlamaAttention: the bounds of documents did not reach attention"):
        model(input_ids=ids, use_cache=False)
    calls: list[Call] = []
    with attention.watched(calls.append):
        model(input_ids=ids, use_cache=False, doc_bounds=Bounds((9, 8)))
    assert [call.bounds.lengths for call in calls] == [(9, 8)] * 2


def kernels_used(path: str, preference: str) -> tuple[str, list[str]]:
    """The name registered with transformers, and the kernels that ran."""
    ran, kernels = [], dict(attention.KERNELS)
    for name, kernel in kernels.items():

        def watched(call: Any, name: str = name, kernel: Any = kernel) -> Tensor:
            ran.append(name)
            return kernel.run(call)

        attention.KERNELS[name] = replace(kernel, run=watched)
    try:
        engine = open_engine(path, "1", model={"attention": preference})
        ran.clear()
        documents, metas = to_documents(engine, awkward_steps(128)[0])
        engine.readout(engine.plan(metas, budget=256), documents)
    finally:
        attention.KERNELS.update(kernels)
    return engine.built.module.hf_model.config._attn_implementation, ran


@pytest.mark.covers("model.attention")
@pytest.mark.parametrize("preference", ["auto", "per_document"])
def test_model_attention_names_the_kernel(preference: str) -> None:
    name, ran = run(1, kernels_used, saved_model("gemma2"), preference)[0]
    assert name == f"weft_{preference}"
    assert ran == ["per_document"] * 2  # all that a CPU has


@pytest.mark.parametrize("kernel", ["varlen", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_cannot_run_here_is_refused(kernel: str, dtype: torch.dtype) -> None:
    config = tiny_config("llama")
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UserError, match=f"model.attention={kernel} cannot serve this run: {name} on cpu.*per_document"):
        check_kernel(config, kernel, examine(config), CPU, dtype)


def refused(path: str, mesh: str, kernel: str) -> str:
    with pytest.raises(UserError) as refusal:
        open_engine(path, mesh, model={"attention": kernel})
    return str(refusal.value)


def test_the_engine_refuses_it_on_every_rank() -> None:
    for text in run(2, refused, saved_model("gpt_oss"), "2", "flex"):
        assert "model.attention=flex" in text and "window, sinks" in text and "model.attention to auto" in text
    (text,) = run(1, refused, saved_model("falcon"), "1", "per_document")
    assert "no effect: falcon computes attention in its own code" in text
    (text,) = run(1, refused, saved_model("mamba2"), "1", "per_document")
    assert "no effect: mamba2 has no attention" in text
    (text,) = run(1, refused, saved_model("mamba2"), "1", "per_document")


def test_verify_compares_in_fp32_whatever_the_kernel_asked_for() -> None:
    """varlen knows 16 bits only; the verdict is in fp32."""
    lora = LoraConfig(rank=2, dropout=0.1)
    config = SftConfig(model=ModelConfig(path="m", attention="varlen"), data=DataConfig(path="d.jsonl"), lora=lora)
    exact = verified_config(config, "elsewhere")
    assert (exact.model.attention, exact.model.path, exact.fsdp.param_dtype) == ("auto", "elsewhere", "fp32")
    assert (exact.lora.rank, exact.lora.dropout) == (2, 0.0)  # the reference has none


def switches_of_verify(path: str) -> tuple[str, bool, bool]:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    config = SftConfig(model=ModelConfig(path=path), data=DataConfig(path="d.jsonl"))
    passed = verify_recipe.run(config, VerifyOptions(device="cpu"))
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, passed


def test_verify_has_no_tf32_in_products_or_convolutions() -> None:
    assert run(1, switches_of_verify, saved_model("llama"))[0] == ("highest", False, True)


@pytest.mark.parametrize(
    ("device", "host_copies", "device_copies", "fits"),
    [
        ("cpu", 40, 0, True),
        ("cpu", 20, 0, False),
        ("cuda", 40, 10, True),
        ("cuda", 40, 6, False),
        ("cuda", 20, 10, False),
    ],
)
def test_the_reference_needs_room_where_it_runs(
    device: str, host_copies: int, device_copies: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved_model("llama")
    shape = hf.build_meta(hf.read_config(path), dtype=torch.float32, attention="eager")
    weights = sum(p.numel() for p in shape.parameters()) * 4
    monkeypatch.setattr(verify_recipe.psutil, "virtual_memory", lambda: Mock(available=host_copies * weights))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (device_copies * weights, 0))
    config = SftConfig(model=ModelConfig(path=path), data=DataConfig(path="d.jsonl"))
    assert verify_recipe._fits(config, Ranks(0, 1, 0, torch.device(device))) == fits


def cut_short(path: str) -> None:
    config = SftConfig(model=ModelConfig(path=path, freeze=("model.layers.1.*",)), data=DataConfig(path="d.jsonl"))
    verify_recipe.run(config, VerifyOptions(device="cpu", layers=1))


def test_what_a_copy_with_fewer_layers_lacks_is_said_to_be_lacking_there() -> None:
    with pytest.raises(AssertionError, match=r"model\.freeze(.|\n)*cut to 1 layer \(--layers\)(.|\n)*raise --layers"):
        run(1, cut_short, saved_model("llama"))


def logprobs_without_sdpa(path: str) -> dict[int, dict[str, Tensor]]:
    """Readouts of gemma2 where every attention function of HuggingFace and torch raises."""
    from transformers.models.gemma2 import modeling_gemma2

    def forbidden(*args: Any, **options: Any) -> Any:
        raise AssertionError("not weft's attention")

    engine = open_engine(path, "1")
    documents, metas = to_documents(engine, awkward_steps(128)[0])
    forbidden_kernels = {name: forbidden for name in ALL_ATTENTION_FUNCTIONS if not name.startswith("weft")}
    assert "sdpa" in forbidden_kernels
    with (
        mock.patch.object(modeling_gemma2, "eager_attention_forward", forbidden),
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", forbidden),
        mock.patch.dict(AttentionInterface._global_mapping, forbidden_kernels),
    ):
        return engine.readout(engine.plan(metas, budget=256), documents)


def test_gemma2_keeps_its_softcap() -> None:
    """HuggingFace's sdpa drops it without a word. The rows are longer than the window of 16."""
    path = saved_model("gemma2")
    values = run(1, logprobs_without_sdpa, path)[0]
    plain = reference.Reference(path)
    for index, (ids, _) in enumerate(awkward_steps(128)[0]):
        torch.testing.assert_close(values[index]["logprob"], plain.logprobs(ids)[0], rtol=1e-5, atol=1e-5)


def test_the_tolerance_is_far_below_a_wrong_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = attention.KERNELS["per_document"]
    wrong = replace(kernel, run=lambda call: kernel.run(replace(call, softcap=None)))
    monkeypatch.setitem(attention.KERNELS, "per_document", wrong)
    with pytest.raises(UserError, match="model_type 'gemma2'"):
        examine(tiny_config("gemma2"))
    assert architecture.WIDEST_TOLERANCE <= 1e-4


def test_a_copy_that_would_fill_the_memory_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V2's bare config lacks what its code needs: narrow copies fail, and one of full width has 13 GiB."""
    config = DeepseekV2Config(num_experts_per_tok=None)
    config.architectures = ["DeepseekV2ForCausalLM"]
    built = list[int]()
    original = hf.build_random

    def build(config: PretrainedConfig, **options: Any) -> Any:
        model = original(config, **options)
        built.append(sum(p.numel() for p in model.parameters()))
        return model

    monkeypatch.setattr(hf, "build_random", build)
    monkeypatch.setattr(architecture.psutil, "virtual_memory", lambda: SimpleNamespace(available=8 << 30))
    with pytest.raises(UserError, match="could not build a small copy of it"):
        examine(config)
    assert not built or 8 * max(built) < 4 << 30
