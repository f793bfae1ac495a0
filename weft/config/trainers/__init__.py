"""The trainers that people come from, one file each: what weft calls what they know. Imports no torch."""

from __future__ import annotations

from weft.config.trainers.automodel import AUTOMODEL
from weft.config.trainers.miles import MILES
from weft.config.trainers.others import OTHERS
from weft.config.trainers.roll import ROLL
from weft.config.trainers.torchtitan import TORCHTITAN
from weft.config.trainers.trainer import Trainer
from weft.config.trainers.trl import TRL
from weft.config.trainers.verl import VERL

TRAINERS: tuple[Trainer, ...] = (TRL, VERL, ROLL, MILES, TORCHTITAN, AUTOMODEL)

__all__ = ["OTHERS", "TRAINERS", "Trainer"]
