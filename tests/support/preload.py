"""Imported once by the fork server, so that ranks start with torch and transformers in memory."""

import contextlib
import gc
import importlib
import sys
import warnings

warnings.simplefilter("ignore")
gc.disable()  # a quarter of the processor seconds of these imports
MODULES = (
    "torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.launcher.api", "transformers",
    "weft.engine.engine", "weft.recipes.training", "weft.cli", "weft.recipes.rl", "weft.recipes.sft",
    "weft.models.hf_processor", "weft.models.hf_video", "weft.launch.consistency", "weft.launch.summary",
    "tests.support.shared_results", "numpy.ma", "transformers.models.llama.modeling_llama",
)  # fmt: skip
for name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
for name in ("weft.launch.consistency", "weft.launch.summary"):
    sys.modules[name].versions()  # kept, so that forks need not read the code and the packages' descriptions
# transformers compiles 800 regular expressions when it reads the first of its rules.
sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("llama")
sys.modules["tests.support.shared_results"].share_checks()
gc.freeze()  # else the first collection in each fork copies all that it shares with the server
gc.enable()
