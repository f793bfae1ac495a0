"""Ranks of launch/test_launch.py: `python rank_script.py MODE`. Rank 1 does what MODE says, rank 0 waits for it."""

from __future__ import annotations

import os
import signal
import sys
import time

from weft.errors import UserError
from weft.launch.entrypoint import guarded


def body() -> bool | None:
    """Join, reduce once, then end as MODE says."""
    import torch
    import torch.distributed as dist

    from weft.launch.process import join

    mode = sys.argv[1]
    with join("cpu", 60) as ranks:
        total = torch.ones(1)
        dist.all_reduce(total)
        coordinates = f"rank {ranks.rank} of {ranks.world}, local {ranks.local_rank}"
        line = f"{coordinates}, sum {int(total)}, threads {torch.get_num_threads()}, pid {os.getpid()}\n"
        os.write(1, line.encode())  # one write, so that the lines of two ranks stay apart
        if mode == "same":
            raise UserError("set a.b to 1")
        if ranks.rank == 1:
            _misbehave(mode)
        if mode in ("raise", "sleep"):
            time.sleep(100)
        elif mode in ("user", "kill", "exit"):
            dist.all_reduce(total)  # what a rank does when another is gone: wait in a collective
    return mode != "verdict"


def _misbehave(mode: str) -> None:
    if mode == "raise":
        raise RuntimeError("boom")
    if mode == "user":
        raise UserError("set a.b to 1")
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "exit":
        sys.exit(7)


if __name__ == "__main__":
    sys.exit(guarded(body, debug="--debug" in sys.argv))
