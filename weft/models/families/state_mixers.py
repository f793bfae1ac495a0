"""Families whose layers carry state along the sequence (recurrent, convolutional, linear attention).

In a packed row the state of one document leaks into the next on the torch path, even if seq_idx or cu_seqlens are
passed, so these modules run document by document, or by kernels that heed these arguments (models/state_mixers.py).
They are recognised by class name. A family whose modules are not recognised leaks, fails the start-up check for packed
rows and is laid out padded.
"""

import re

from torch import nn

from weft.models.families.family import Family

# KimiLinearAttention is not among them: it is Kimi Linear's full attention.
_MIXERS = re.compile(
    r"(Mixer|MambaLayer|GatedDeltaNet|DeltaAttention|LightningAttention|ShortConv|ShortConvolution|RecurrentBlock)$"
)


def carries_state(module: nn.Module) -> bool:
    """Whether the module mixes tokens by a recurrent state, a convolution or linear attention."""
    return _MIXERS.search(type(module).__name__) is not None


# Layers of these families take only a mask and a cache.
FAMILIES = dict.fromkeys(("mamba", "falcon_mamba"), Family(bounds_argument="attention_mask"))
