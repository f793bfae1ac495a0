"""Tensor parallelism: each rank of mesh.tp computes with its part of heads, intermediate widths and vocabulary.

Read in this order: plan.py determines how each parameter is sharded, by rules on the module tree. divide.py replaces
parameters by this rank's shards and hooks the modules. sequence.py shards tokens between blocks. models/segments.py has
the arithmetic of ranges. models/mixer_shards.py shards layers with state, for mesh.tp and mesh.cp.
"""
