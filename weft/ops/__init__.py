"""Kernels and collectives that know no model.

attention.py chooses the attention kernel of a call; head.py computes log-probabilities without holding all logits;
context.py and dispatch.py are the exchanges of context and expert parallelism; communicator.py has the collectives.
"""
