"""Families whose layers carry state along the sequence (recurrent, convolutional, linear attention).

In a packed row the state of one document leaks into the next on the torch path, also where seq_idx or cu_seqlens are
passed; right padding is exact. So their documents are padded.
"""

from weft.models.families.family import Family

_NAMES = (
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "minimax",
    "falcon_h1", "bamba", "jamba", "granitemoehybrid", "zamba2", "mamba", "mamba2", "nemotron_h", "lfm2", "lfm2_moe",
    "recurrent_gemma",
)  # fmt: skip
FAMILIES = dict.fromkeys(_NAMES, Family(layout="padded"))
