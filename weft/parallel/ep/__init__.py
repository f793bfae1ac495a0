"""Expert parallelism: each rank of mesh.ep holds some of every layer's experts.

experts.py divides them, and makes layers send tokens to the ranks of their experts and back by ops/dispatch.py.
models/experts.py has the forward of a layer's experts.
"""
