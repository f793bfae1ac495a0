"""Families whose attention does not use transformers' attention interface, or only partly.

falcon refuses an implementation registered there, bloom silently runs it without a causal mask, doge uses its own mask
values, and moshi drops the sequence boundaries. Their eager code is causal, and right padding is exact, so their
documents are padded. The checks at start detect other families by `_supports_attention_backend = False`.
"""

from weft.models.families.family import Family

OWN_ATTENTION = Family(layout="padded", attention="eager")
FAMILIES = dict.fromkeys(("falcon", "bloom", "doge", "moshi"), OWN_ATTENTION)
