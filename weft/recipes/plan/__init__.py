"""Memory and time of a run on a mesh of any size, in one process and without its ranks."""
