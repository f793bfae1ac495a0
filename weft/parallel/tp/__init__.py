"""Tensor parallelism: each rank of mesh.tp computes with its part of heads, intermediate widths and vocabulary.

Read in this order: plan.py says how each parameter is divided, by rules on the module tree; divide.py replaces
parameters by this rank's part and hooks the modules; sequence.py divides tokens between blocks. models/segments.py has
the arithmetic of ranges, and models/mixer_shards.py the division of layers that carry state, which mesh.cp uses, too.
"""
