"""falcon and bloom: attention of their own, outside transformers' interface.

A name registered there is refused by falcon, and bloom runs under it without any causal mask, silently. Their eager
code is causal, and right padding is exact, so documents are padded.
"""

from weft.models.families.family import Family

FAMILIES = dict.fromkeys(("falcon", "bloom"), Family(layout="padded", attention="eager"))
