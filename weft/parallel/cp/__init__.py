"""Context parallelism: the ranks of mesh.cp share documents that are too long for one rank.

split.py decides which rank holds which tokens, as part of the step plan. engine/batch/rows.py cuts a row accordingly,
after labels were shifted. ops/context.py exchanges keys and values in attention (ring), or heads for tokens (Ulysses).
Layers that carry state divide their heads (models/mixer_shards.py), and ops/shared_documents.py completes sums over
documents.
"""
