"""Kernels and collectives that do not depend on a model.

attention.py chooses the attention kernel of a call. head.py computes log-probabilities without materialising all
logits. context.py and dispatch.py contain the exchanges of context and expert parallelism, communicator.py the
collectives."""
