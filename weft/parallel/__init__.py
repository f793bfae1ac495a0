"""How a model is sharded over ranks.

mesh.py builds the device mesh. parallelize.py shards a model in numbered steps. Each axis has a folder: tp/, ep/, pp/
and cp/. units.py and fsdp.py implement the data axes. shards/ maps tensors of a checkpoint to the shards of a rank.
memory.py and activations.py estimate the memory of a rank.
"""
