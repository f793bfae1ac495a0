"""Context parallelism: the ranks of mesh.cp share documents that are too long for one rank.

split.py assigns tokens to ranks, as part of the step plan. engine/batch/rows.py selects a rank's tokens of a row, after
labels were shifted. ops/context.py exchanges keys and values in attention (ring), or heads for tokens (Ulysses). Layers
with state shard their heads (models/mixer_shards.py). ops/shared_documents.py sums over documents that ranks share.
"""
