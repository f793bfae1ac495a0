"""Whether a teacher or a reference reads the trained model's tokens, which are compared by their ids."""

from __future__ import annotations

from pathlib import Path

from weft.data.encode import load_tokenizer
from weft.errors import UserError

_OF_TEACHER = (
    "Distributions over other tokens cannot be compared token by token; that would need a projection between "
    "vocabularies, which weft does not have. Choose a teacher of the same family, or train on texts that it writes "
    "(weft sft)."
)


def check_same_tokenizer(student: str, teacher: str, key: str, remedy: str = _OF_TEACHER) -> None:
    """Raise UserError unless every token of the student's tokenizer has the same id in the teacher's. The teacher's may
    have more; how many rows their heads have does not matter. student, teacher: paths. key: that names the teacher.
    remedy: what to do, which ends the error."""
    if student == teacher or not (_has_tokenizer(student) and _has_tokenizer(teacher)):
        return  # of a dry run before the download
    of_student, of_teacher = load_tokenizer(student).get_vocab(), load_tokenizer(teacher).get_vocab()
    mismatches = sorted((index, token) for token, index in of_student.items() if of_teacher.get(token) != index)
    if not mismatches:
        return
    index, token = mismatches[0]
    there = of_teacher.get(token)
    has = "lacks it" if there is None else f"has it as {there}"
    raise UserError(
        f"{key}: the tokenizer of {teacher} is another one than that of {student}: of {len(of_student)} tokens "
        f"{len(mismatches)} have another id or none, the first {token!r}, {index}, where that one {has}. "
        f"{remedy}"
    )


def _has_tokenizer(path: str) -> bool:
    """Whether a folder has one; a hub id counts as having one."""
    folder = Path(path)
    return not folder.is_dir() or any(folder.glob("*token*")) or any(folder.glob("vocab*"))
