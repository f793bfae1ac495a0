"""Families whose attention does not go through transformers' attention interface, or only in part.

falcon refuses an implementation registered there, bloom silently runs it without a causal mask, doge masks by its own
values, and moshi drops the bounds of documents. Their eager code is causal, and right padding is exact, so their
documents are padded. The checks at start find others by `_supports_attention_backend = False`.
"""

from weft.models.families.family import Family

OWN_ATTENTION = Family(layout="padded", attention="eager")
FAMILIES = dict.fromkeys(("falcon", "bloom", "doge", "moshi"), OWN_ATTENTION)
