"""The trainers that people come from, one file each: what weft calls what they know. Imports no torch."""

from __future__ import annotations

from weft.config.trainers.accelerate import ACCELERATE
from weft.config.trainers.automodel import AUTOMODEL
from weft.config.trainers.axolotl import AXOLOTL
from weft.config.trainers.llama_factory import LLAMA_FACTORY
from weft.config.trainers.miles import MILES
from weft.config.trainers.others import OTHERS
from weft.config.trainers.roll import ROLL
from weft.config.trainers.torchtitan import TORCHTITAN
from weft.config.trainers.torchtune import TORCHTUNE
from weft.config.trainers.trainer import Trainer
from weft.config.trainers.trl import TRL
from weft.config.trainers.verl import VERL

# Where two have as many names of a file, it is the first's.
TRAINERS: tuple[Trainer, ...] = (
    TRL, AXOLOTL, LLAMA_FACTORY, TORCHTUNE, VERL, ROLL, MILES, TORCHTITAN, AUTOMODEL, ACCELERATE,
)  # fmt: skip

__all__ = ["OTHERS", "TRAINERS", "Trainer"]
