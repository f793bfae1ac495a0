"""Checks that a teacher or a reference has the trained model's tokens, because weft compares tokens by id."""

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
    have more tokens, and heads may have different numbers of rows. student, teacher: paths. key: the config key of the
    teacher. remedy: advice at the end of the error."""
    if student == teacher or not (_has_tokenizer(student) and _has_tokenizer(teacher)):
        return  # in a dry run, before the download
    of_student, of_teacher = load_tokenizer(student).get_vocab(), load_tokenizer(teacher).get_vocab()
    mismatches = sorted((index, token) for token, index in of_student.items() if of_teacher.get(token) != index)
    if not mismatches:
        return
    index, token = mismatches[0]
    teacher_id = of_teacher.get(token)
    has = "lacks it" if teacher_id is None else f"has it as {teacher_id}"
    raise UserError(
        f"{key}: the tokenizers of {teacher} and {student} differ: of {len(of_student)} tokens, {len(mismatches)} have "
        f"another id or none in {teacher}. The first is {token!r}, {index}: the other tokenizer {has}. {remedy}"
    )


def _has_tokenizer(path: str) -> bool:
    """Whether a folder has a tokenizer; always true for a hub id."""
    folder = Path(path)
    return not folder.is_dir() or any(folder.glob("*token*")) or any(folder.glob("vocab*"))
