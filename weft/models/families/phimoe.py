"""PhiMoE's routers (sparsemixer) sample experts in training mode, with an estimated gradient.

weft runs them in inference mode: the best expert, then the next, with HuggingFace's gradient of that forward. In
PhiMoE, router_jitter_noise is not noise, but the distance within which experts share a weight.
"""

from weft.models.families.family import Family

FAMILIES = {"phimoe": Family(kept_noise=("router_jitter_noise",), in_inference_mode=("PhimoeTopKRouter",))}
