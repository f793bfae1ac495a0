"""`weft plan`: memory and time of a run that is not started, for a mesh of any size."""

from __future__ import annotations

from weft.cluster.machine import accelerator
from weft.cluster.options import PlanOptions
from weft.config.rl_schema import RlConfig
from weft.config.schema import SftConfig


def run(config: SftConfig | RlConfig, options: PlanOptions) -> None:
    """Entry point of the one process."""
    assumed = accelerator(options.assume)
    if options.simulate:
        # from weft.rehearsal.simulate import simulate
        # show(simulate(config, options.ranks, assumed, ...))
        raise NotImplementedError(assumed)
    raise NotImplementedError("the closed form")
