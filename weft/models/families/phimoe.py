"""PhiMoE's routers (sparsemixer) draw experts at random in training mode, with a gradient that is estimated.

They run as in inference instead: the best expert, then the next, with HuggingFace's gradient of that forward.
router_jitter_noise is no noise there, but the distance within which experts share a weight.
"""

from weft.models.families.family import Family

FAMILIES = {"phimoe": Family(kept_noise=("router_jitter_noise",), in_inference_mode=("PhimoeTopKRouter",))}
