"""Families whose layers carry state along the sequence (recurrent, convolutional, linear attention).

On the torch path, the state of a document in a packed row leaks into the next, even if seq_idx or cu_seqlens are
passed. So these modules run document by document, or with kernels that use these arguments (models/state_mixers.py).
weft recognises them by class name. A family with unrecognised modules leaks, fails the start-up check for packed rows
and gets the padded layout.
"""

import re

from torch import nn

from weft.models.families.family import Family

# without KimiLinearAttention, which is Kimi Linear's full attention
_MIXERS = re.compile(
    r"(Mixer|MambaLayer|GatedDeltaNet|DeltaAttention|LightningAttention|ShortConv|ShortConvolution|RecurrentBlock)$"
)


def carries_state(module: nn.Module) -> bool:
    """Whether the module mixes tokens by a recurrent state, a convolution or linear attention."""
    return _MIXERS.search(type(module).__name__) is not None


# Layers of these families accept only a mask and a cache.
FAMILIES = dict.fromkeys(("mamba", "falcon_mamba"), Family(bounds_argument="attention_mask"))
