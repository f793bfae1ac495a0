"""falcon and bloom: their attention does not go through transformers' attention interface.

falcon refuses an implementation registered there, and bloom silently runs it without a causal mask. Their eager code is
causal, and right padding is exact, so their documents are padded.
"""

from weft.models.families.family import Family

FAMILIES = dict.fromkeys(("falcon", "bloom"), Family(layout="padded", attention="eager"))
