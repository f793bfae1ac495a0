"""Expert parallelism: each rank of mesh.ep holds some experts of every layer.

experts.py shards the experts, and makes layers exchange tokens with ops/dispatch.py. models/experts.py has the forward
of a layer's experts.
"""
