"""Families whose attention does not use transformers' attention interface, or only partly.

falcon refuses an implementation registered there, bloom silently runs it without a causal mask, doge uses its own mask
values, and moshi drops the sequence boundaries. Families with an index that chooses keys (DeepSeek's sparse attention)
pass the choice as a mask, which weft's attention does not read. The eager code of all of them is causal, and right
padding is exact, so their documents are padded. The checks at start detect other families by
`_supports_attention_backend = False`.
"""

from weft.models.families.family import Family

OWN_ATTENTION = Family(layout="padded", attention="eager")
INDEXED = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "axk2", "hy_v4")
FAMILIES = dict.fromkeys(("falcon", "bloom", "doge", "moshi", *INDEXED), OWN_ATTENTION)
