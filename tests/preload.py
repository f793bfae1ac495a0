"""Imported once by the fork server, so that ranks start with torch and transformers in memory."""

import contextlib
import importlib
import warnings

warnings.simplefilter("ignore")
for name in ("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers", "weft.engine.engine"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
