"""How a model is divided over ranks.

mesh.py makes the device mesh; parallelize.py divides a model in numbered steps. An axis is a folder: tp/, ep/, pp/ and
cp/. units.py and fsdp.py are the data axes. shards/ maps tensors of a checkpoint to the shards of a rank. memory.py and
activations.py estimate what a rank needs.
"""
