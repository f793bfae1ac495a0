"""The keys that `weft distill` has in addition to the keys of `weft sft` (schema.py). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from weft.config.conditions import Unread
from weft.config.keys import key
from weft.config.ranges import AT_LEAST_1, INSIDE_0_1, POSITIVE, SHARE, Range
from weft.config.schema import FrozenRanksConfig, SftConfig

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
BASE, AVERAGE = "base", "average"  # teachers that are the student itself
DATA = "data"  # the teacher is given by lists of its most likely tokens, in columns of the rows
TOP_IDS, TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"  # the names of these columns


def is_served(teacher: str) -> bool:
    """Whether a teacher is the URL of a server."""
    return teacher.startswith(("http://", "https://"))


def is_opened(teacher: str) -> bool:
    """Whether a teacher is a model that weft opens in addition to the student."""
    return teacher not in (BASE, AVERAGE, DATA) and not is_served(teacher)


_NO_JSD = Unread(lambda c: c.distill.loss != "jsd", "only distill.loss=jsd reads it")
_AT_1 = Unread(lambda c: c.distill.temperature == 1.0, "distill.temperature is 1")
_STUDENT_ENGINE = Unread(
    lambda c: c.distill.teacher in (BASE, AVERAGE), "the teacher is the student itself, in the student's engine"
)
_NO_SERVER = Unread(lambda c: not c.distill.served, "no teacher is the URL of a server")
_NO_SAMPLES = Unread(lambda c: c.distill.on_policy == 0, "distill.on_policy is 0")
_NO_CACHE = Unread(lambda c: c.distill.cache == "off", "distill.cache is off")


@dataclass(frozen=True, kw_only=True)
class DistillSection:
    """The teacher of `weft distill`, and the distillation loss."""

    teacher: str | None = key(
        "A HuggingFace model directory or hub id with the same tokenizer, of any family, width and depth; `base`: the "
        "model under the student's adapters (lora.rank); `average`: the average of the student's weights "
        "(optimizer.ema_decay); `data`: lists of the teacher's most likely tokens in the rows' columns "
        "teacher_top_ids and teacher_top_logprobs; or the URL of a vLLM server that returns such lists, as in "
        "http://host:8000/v1.",
        None,
    )
    teachers: dict[str, str] | None = key(  # noqa: RUF009 - key() is dataclasses.field()
        "Several teachers by name, instead of distill.teacher, as in {math: org/math-7b, code: org/code-7b}. A row "
        "uses the teacher with the name of its source (data.sources), or the name in its column "
        "distill.teacher_column.",
        None,
    )
    teacher_column: str | None = key(
        "Column with the name of a row's teacher in distill.teachers. null: each source has a teacher.",
        None,
        unread=(Unread(lambda c: c.distill.teachers is None, "distill.teachers is not set"),),
    )
    top_k: int = key(
        "With a served teacher: number of most likely tokens to request (vLLM's --max-logprobs must be as large). All "
        "other tokens are one bin.",
        20,
        within=AT_LEAST_1,
        unread=(_NO_SERVER,),
    )
    served_model: str | None = key(
        "Name of the model on the server. null: its first model.", None, unread=(_NO_SERVER,)
    )
    loss: str = key(
        "Divergence of a token's distributions over the whole vocabulary: `forward_kl` KL(teacher || student), "
        "`reverse_kl` KL(student || teacher), `jsd` between them by distill.beta, or the import path of a function, "
        "as in my_losses:skewed. Its arguments are the student's and the teacher's log-probabilities, [tokens, "
        "vocabulary] each, and it returns the terms of a sum over the vocabulary.",
        "forward_kl",
    )
    beta: float = key(
        "With jsd: beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student.",
        0.5,
        within=INSIDE_0_1,
        unread=(_NO_JSD,),
    )
    temperature: float = key(
        "Divide the logits of both models by this before they are compared; cross entropy uses 1.", 1.0, within=POSITIVE
    )
    temperature_squared: bool = key(
        "Multiply the divergence by distill.temperature squared (Hinton et al. 2015), so that the size of its "
        "gradient does not depend on the temperature.",
        False,
        unread=(_AT_1,),
    )
    alpha: float = key(
        "Share of cross entropy in the loss: alpha x cross entropy + (1 - alpha) x divergence.",
        0.0,
        within=Range(lambda v: 0 <= v < 1, "from 0 to below 1 (weft sft trains on cross entropy alone)"),
    )
    on_policy: float = key(
        "Share of each step's documents whose last answer the student samples, instead of the data's answer (GKD's "
        "lambda; arXiv:2306.13649). `weft rl` with rl.teacher also supports rewards, and engines in separate "
        "processes.",
        0.0,
        within=SHARE,
    )
    max_new_tokens: int = key(
        "With on_policy: maximum length of a sampled answer.", 256, within=AT_LEAST_1, unread=(_NO_SAMPLES,)
    )
    sampling_temperature: float = key(
        "With on_policy: the student's sampling temperature; the divergence uses distill.temperature.",
        1.0,
        within=POSITIVE,
        unread=(_NO_SAMPLES,),
    )
    cache: Literal["off", "disk"] = key(
        "`disk`: write the teacher's last hidden states to distill.cache_dir, and read them in later epochs and runs, "
        "on any mesh. Their size is trained tokens x width x bytes of the dtype; weft prints it at the start.",
        "off",
    )
    cache_dir: str = key(
        "Folder of these hidden states, shared by all ranks. A row with other tokens, weights or another teacher is "
        "an error.",
        "teacher_cache",
        unread=(_NO_CACHE,),
    )

    @property
    def named(self) -> tuple[str, ...]:
        """All teachers, in order."""
        if self.teachers is not None:
            return tuple(self.teachers.values())
        return () if self.teacher is None else (self.teacher,)

    @property
    def served(self) -> bool:
        """Whether a teacher is a server."""
        return any(map(is_served, self.named))


@dataclass(frozen=True, kw_only=True)
class DistillTeacherConfig(FrozenRanksConfig):
    """The engines of distill.teacher or distill.teachers: a separate engine without training for each."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig(SftConfig):
    """The config of `weft distill`, one field per section."""

    command: ClassVar[str] = "distill"

    distill: DistillSection = field(default_factory=DistillSection)
    teacher: DistillTeacherConfig = field(default_factory=DistillTeacherConfig, metadata={"unread": (_STUDENT_ENGINE,)})

    @property
    def row_options(self) -> dict[str, Any]:
        distill, by_column = self.distill, self.distill.teacher_column is not None
        names = tuple(distill.teachers or ())
        listed = tuple(name for name, teacher in (distill.teachers or {}).items() if teacher == DATA)
        return {
            **super().row_options,
            "teachers": names if by_column else (),
            "teacher_column": distill.teacher_column or "",
            "listed": "all" if distill.teacher == DATA else listed,
        }
