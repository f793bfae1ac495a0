"""Tiny configs of many families. Hidden 64, 2-4 layers, vocabulary 128; some widths do not divide by 3."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PretrainedConfig

VOCABULARY = 128
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    attention_dropout=0.0,
)  # fmt: skip

# name -> (config class, causal LM class, what differs from _COMMON)
_ZOO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", dict(tie_word_embeddings=False)),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(head_dim=16, tie_word_embeddings=True)),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", dict(
        head_dim=16, query_pre_attn_scalar=24, sliding_window=16, attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0)),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", dict(
        num_hidden_layers=3, head_dim=16, query_pre_attn_scalar=24, sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "gemma4_text": ("Gemma4TextConfig", "Gemma4ForCausalLM", dict(
        num_hidden_layers=7, head_dim=16, global_head_dim=32, sliding_window=16, hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCABULARY)),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", dict(
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(
        head_dim=16, moe_intermediate_size=40, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True,
        tie_word_embeddings=False)),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", dict(
        num_hidden_layers=3, num_key_value_heads=4, first_k_dense_replace=1, moe_intermediate_size=40,
        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, q_lora_rank=24,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", dict(tie_word_embeddings=False)),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", dict(
        sliding_window=16, logit_scale=0.25, layer_types=["sliding_attention", "full_attention"])),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", dict(
        num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], block_multiple_of=16)),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", dict(
        head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=40, shared_expert_intermediate_size=40)),
    "falcon": ("FalconConfig", "FalconForCausalLM", dict(alibi=False, new_decoder_architecture=True, num_kv_heads=2)),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", dict(
        num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=16, expand=2)),
    "jamba": ("JambaConfig", "JambaForCausalLM", dict(
        num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=2, expert_layer_period=2, expert_layer_offset=1,
        num_experts=4, mamba_d_state=8, mamba_dt_rank=8)),
    "recurrent_gemma": ("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", dict(
        num_hidden_layers=3, block_types=["recurrent", "recurrent", "attention"], attention_window_size=16,
        lru_width=64, logits_soft_cap=3.0)),
    "zamba2": ("Zamba2Config", "Zamba2ForCausalLM", dict(
        num_hidden_layers=6, num_key_value_heads=4, layers_block_type=["mamba", "hybrid"] * 3,
        hybrid_layer_ids=[1, 3, 5], n_mamba_heads=8, mamba_d_state=16, mamba_ngroups=1, num_mem_blocks=1, chunk_size=16,
        use_mem_rope=True)),
    "llama4_text": ("Llama4TextConfig", "Llama4ForCausalLM", dict(
        num_hidden_layers=4, head_dim=16, intermediate_size_mlp=80, num_local_experts=4, num_experts_per_tok=1,
        attention_chunk_size=16, floor_scale=8, attn_scale=0.1)),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", dict(tie_word_embeddings=False)),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", dict(n_embd=64, n_layer=2, n_head=4, n_positions=256, n_inner=80)),
    "phi": ("PhiConfig", "PhiForCausalLM", dict(tie_word_embeddings=False)),
    "phi3_longrope": ("Phi3Config", "Phi3ForCausalLM", dict(
        tie_word_embeddings=False, original_max_position_embeddings=32, rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
            "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [4.0 + 0.5 * i for i in range(8)]})),
    "granite": ("GraniteConfig", "GraniteForCausalLM", dict(
        logits_scaling=4.0, attention_multiplier=0.2, residual_multiplier=0.5, embedding_multiplier=3.0)),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16)),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", dict(
        num_hidden_layers=3, head_dim=16, moe_intermediate_size=40, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1)),
}  # fmt: skip

# Families whose layers carry state, beside those above: they are checked at start, and some trained.
_HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", dict(
        layers_block_type=["mamba", "attention", "mamba", "moe"], head_dim=16, ssm_state_size=16, mamba_num_heads=8,
        mamba_head_dim=16, n_groups=2, chunk_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=40, moe_shared_expert_intermediate_size=40)),
    "bamba": ("BambaConfig", "BambaForCausalLM", dict(
        num_hidden_layers=2, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1,
        mamba_d_state=16, mamba_chunk_size=16)),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", dict(
        layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16,
        mamba_chunk_size=16, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=40,
        logits_scaling=4.0, attention_multiplier=0.2, residual_multiplier=0.5, embedding_multiplier=3.0)),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", dict(
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=4, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16)),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", dict(
        layer_types=["linear_attention", "full_attention"], num_key_value_heads=4, first_k_dense_replace=1,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, linear_head_dim=16,
        linear_num_heads=4, num_experts=4, num_experts_per_token=2, moe_intermediate_size=40)),
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM", dict(
        layer_types=["linear_attention", "full_attention"], head_dim=16, block_size=16, num_local_experts=4,
        num_experts_per_tok=2)),
    "mamba": ("MambaConfig", "MambaForCausalLM", dict(state_size=8, time_step_rank=8, expand=2)),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", dict(
        head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", dict(
        head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=40, shared_expert_intermediate_size=40)),
}  # fmt: skip

# Families that are loaded and saved in tests, because of how their checkpoints are laid out; some are trained.
_FURTHER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=16)),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", dict(tie_word_embeddings=True)),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", dict(sliding_window=16)),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", dict(head_dim=16)),
    "cohere": ("CohereConfig", "CohereForCausalLM", {}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "opt": ("OPTConfig", "OPTForCausalLM", dict(ffn_dim=80, word_embed_proj_dim=64)),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", dict(num_experts=4, num_experts_per_tok=2)),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, shared_expert_intermediate_size=40)),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", dict(num_local_experts=4, num_experts_per_tok=2)),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", dict(num_local_experts=4, num_experts_per_tok=2)),
    "jetmoe": ("JetMoeConfig", "JetMoeForCausalLM", dict(
        kv_channels=16, num_local_experts=4, num_experts_per_tok=2)),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", dict(
        head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", dict(
        num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=40, num_dense_layers=1)),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", dict(
        head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16,
        mamba_chunk_size=16)),
    "cohere2_moe": ("Cohere2MoeConfig", "Cohere2MoeForCausalLM", dict(
        num_hidden_layers=3, head_dim=16, num_experts=4, num_experts_per_tok=2, sliding_window=16, logit_scale=0.25)),
    "hyperclovax": ("HyperCLOVAXConfig", "HyperCLOVAXForCausalLM", dict(head_dim=16, logits_scaling=0.125)),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM", dict(final_logit_softcapping=3.0)),
}  # fmt: skip

# Attention reads the 8 keys that its index chooses. With few heads many keys would have the same score, 0.
_INDEXED: dict[str, Any] = dict(
    num_key_value_heads=4, moe_intermediate_size=40, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
    n_shared_experts=1, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    index_topk=8, index_head_dim=16, index_n_heads=16,
)  # fmt: skip
# Whose attention is code of their own, or whose small copies amplify rounding: they are checked at start, and trained.
_OWN_ATTENTION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mpt": ("MptConfig", "MptForCausalLM", dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=256)),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", dict(
        n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=256, n_ctx=256)),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", dict(n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=256)),
    "gpt_neo": ("GPTNeoConfig", "GPTNeoForCausalLM", dict(
        num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=16)),
    "gpt_neox_japanese": ("GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM", {}),
    "xglm": ("XGLMConfig", "XGLMForCausalLM", dict(d_model=64, ffn_dim=80, num_layers=2, attention_heads=4)),
    "doge": ("DogeConfig", "DogeForCausalLM", dict(keep_window_size=64)),
    "mimo_v2_flash": ("MiMoV2FlashConfig", "MiMoV2FlashForCausalLM", dict(
        num_hidden_layers=3, layer_types=["full_attention", *["sliding_attention"] * 2], sliding_window=16, head_dim=16,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=40)),
    "gemma3n_text": ("Gemma3nTextConfig", "Gemma3nForCausalLM", dict(
        num_hidden_layers=4, head_dim=16, sliding_window=16, num_kv_shared_layers=2, hidden_size_per_layer_input=16,
        laurel_rank=8, vocab_size_per_layer_input=VOCABULARY, intermediate_size=[80] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0])),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", dict(_INDEXED, first_k_dense_replace=1)),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", dict(
        _INDEXED, num_hidden_layers=3, indexer_types=["full", "shared", "full"],
        mlp_layer_types=["dense", "sparse", "sparse"])),
    # Of the documents of `weft verify`, some are too short for the compressor of 32 tokens.
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4ForCausalLM", dict(
        initializer_range=0.05, num_hidden_layers=3, num_key_value_heads=1, head_dim=32, partial_rotary_factor=0.5,
        q_lora_rank=24, o_groups=2, o_lora_rank=16, moe_intermediate_size=40, n_routed_experts=8, num_experts_per_tok=2,
        index_topk=4, index_head_dim=16, index_n_heads=16, sliding_window=16, hc_mult=2, hc_sinkhorn_iters=4,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
        mlp_layer_types=["hash_moe", "moe", "moe"])),
}  # fmt: skip

LAYOUT_FAMILIES = (*_ZOO, *_HYBRIDS, *_FURTHER)

PARITY_FAMILIES = (
    "llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "stablelm", "cohere2",
    "granite",
)  # fmt: skip


OWN_ATTENTION_FAMILIES = tuple(_OWN_ATTENTION)


def names() -> list[str]:
    return list(_ZOO)


def tiny_config(name: str, **changes: Any) -> PretrainedConfig:
    """The tiny config of a family, with its `architectures` set as in a real checkpoint."""
    config_class, model_class, family_keys = (_ZOO | _HYBRIDS | _FURTHER | _OWN_ATTENTION)[name]
    config: PretrainedConfig = getattr(transformers, config_class)(**{**_COMMON, **family_keys, **changes})
    config.architectures = [model_class]
    return config
