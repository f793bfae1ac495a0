"""Agents: the user's programs that call the policy over HTTP, and the endpoint that answers their calls."""
