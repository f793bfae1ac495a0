"""The learning rate of every optimizer step, as a pure function of the step's number. Imports no torch.

Steps count from 1 to T = `total`; W is the number of warm-up steps. Step s <= W trains at lr x s / W. After that
p = clamp((s - W) / max(1, T - W), 0, 1), and the rate is lr x f, with m = min_lr_ratio:

    constant              f = 1
    linear                f = m + (1 - m) (1 - p)
    cosine                f = m + (1 - m) (1 + cos(pi p)) / 2
    cosine_with_restarts  f = m + (1 - m) (1 + cos(pi q)) / 2, where q is the fractional part of cycles x p: `cycles`
                          cosine decays, each from the peak; the last ends at m
    polynomial            f = m + (1 - m) (1 - p)^power
    inverse_sqrt          f = sqrt(t / (s - W + t)), with t = timescale, or else W, or 10000 without warm-up
    wsd       f = 1 until the last D = ceil(decay_ratio x T) steps (at most T - W of them), in which q runs from 0 to 1:
              linear   f = m + (1 - m) (1 - q)
              cosine   f = m + (1 - m) (1 + cos(pi q)) / 2
              1-sqrt   f = m + (1 - m) (1 - sqrt(q))         (Haegele et al. 2024, arXiv:2405.18392)

If W < T, every schedule except `constant`, `inverse_sqrt` and wsd with D = 0 reaches exactly lr x m at step T and stays
there. If transformers has a schedule with the same name, its factor at current_step = s equals f.
"""

from __future__ import annotations

import math

from weft.config.schema import ScheduleConfig

_TIMESCALE = 10_000  # transformers' default for inverse_sqrt without warm-up


def warmup_steps(config: ScheduleConfig, total: int) -> int:
    """Number of warm-up steps W of a run of `total` steps: warmup_steps, or ceil(warmup_ratio x total)."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return _ceil_share(config.warmup_ratio, total)


def decay_steps(config: ScheduleConfig, total: int) -> int:
    """Number of steps D of wsd's final decay. The decay begins no earlier than the end of the warm-up."""
    return min(_ceil_share(config.decay_ratio, total), max(0, total - warmup_steps(config, total)))


def learning_rate(step: int, total: int, lr: float, config: ScheduleConfig) -> float:
    """Learning rate of step `step` (from 1) in a run of `total` steps whose peak is `lr`."""
    assert step >= 1 and total >= 1, (step, total)
    warmup = warmup_steps(config, total)
    if warmup > total:
        step = min(step, total)  # after step `total` the rate of an unfinished warm-up stays constant
    if step <= warmup:
        return lr * step / warmup
    if config.name == "constant":
        return lr
    if config.name == "inverse_sqrt":
        timescale = config.timescale or warmup or _TIMESCALE
        return lr * math.sqrt(timescale / (step - warmup + timescale))
    if config.name == "wsd":
        decay = decay_steps(config, total)
        return lr * _fall(config.decay, _progress(step, total - decay, total), config.min_lr_ratio) if decay else lr
    progress = _progress(step, warmup, total)
    if config.name == "cosine_with_restarts":
        # Integer arithmetic: in floating point, cycles x progress at the start of a cycle may round to just below an
        # integer, and the step would count as the end of the previous cycle.
        if progress < 1.0:
            progress = (step - warmup) * config.cycles % (total - warmup) / (total - warmup)
        return lr * _fall("cosine", progress, config.min_lr_ratio)
    if config.name == "polynomial":
        return lr * _fall("linear", 1.0 - (1.0 - progress) ** config.power, config.min_lr_ratio)
    return lr * _fall(config.name, progress, config.min_lr_ratio)


def _progress(step: int, begin: int, end: int) -> float:
    """0 up to step `begin`, 1 from step `end` on."""
    return min(max((step - begin) / max(1, end - begin), 0.0), 1.0)


def _fall(shape: str, p: float, floor: float) -> float:
    """A curve from 1 at p = 0 to exactly `floor` at p = 1."""
    if shape == "linear":
        remaining = 1.0 - p
    elif shape == "cosine":
        # cos(pi) rounds to exactly -1, so the curve reaches the floor without a rounding error.
        remaining = (1.0 + math.cos(math.pi * p)) / 2.0
    else:
        assert shape == "1-sqrt", shape
        remaining = 1.0 - math.sqrt(p)
    return floor + (1.0 - floor) * remaining


def _ceil_share(ratio: float, total: int) -> int:
    # 0.07 x 100 is 7.000000000000001 in floating point; the result must be 7, not 8.
    return math.ceil(round(ratio * total, 9))
