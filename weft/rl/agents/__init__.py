"""Agents: programs of the user's that ask the policy over HTTP, and the endpoint that answers them."""
