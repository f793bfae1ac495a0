"""Families whose layers carry state along the sequence (recurrent, convolutional, linear attention).

In a packed row the state of one document leaks into the next on the torch path, also where seq_idx or cu_seqlens are
passed, so these modules run document by document (models/state_mixers.py). They are known by the names of their
classes; a family whose modules are not found leaks, fails the start-up check and is laid out padded.
"""

import re

from torch import nn

from weft.models.families.family import Family

# KimiLinearAttention is not among them: it is the attention of all tokens in Kimi Linear.
_MIXERS = re.compile(
    r"(Mixer|MambaLayer|GatedDeltaNet|DeltaAttention|LightningAttention|ShortConv|ShortConvolution|RecurrentBlock)$"
)


def carries_state(module: nn.Module) -> bool:
    """Whether this module mixes tokens by a state, a convolution or linear attention."""
    return _MIXERS.search(type(module).__name__) is not None


# Their layers receive a mask and a cache and nothing else.
FAMILIES = dict.fromkeys(("mamba", "falcon_mamba"), Family(bounds_argument="attention_mask"))
