"""These tests run in an environment of their own (`make test-trl`); the suite, which has no TRL, skips the folder."""

import importlib.util

if importlib.util.find_spec("trl") is None:
    collect_ignore_glob = ["test_*.py"]
