"""Losses: the interface of a class (base.py), and the losses of weft."""

from weft.engine.losses.base import Batch as Batch
from weft.engine.losses.base import CrossEntropy as CrossEntropy
from weft.engine.losses.base import Loss as Loss
from weft.engine.losses.base import LossOutput as LossOutput
