"""Reinforcement learning. The function weft.rl is in weft/api.py."""
