"""The list of torch's bugs is that of the installed torch."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from weft import upstream
from weft.upstream import out_of_date

INSTALLED = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])


@pytest.mark.versions
def test_the_installed_torch_has_the_bugs_of_the_list() -> None:
    """If this fails, read the thread that is named, then widen `known` or remove the entry and what weft does."""
    assert out_of_date((INSTALLED[0], INSTALLED[1])) == []


def test_an_entry_says_when_it_is_gone_and_when_nobody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = dataclasses.replace(upstream.HSDP_OFFLOAD, present=lambda: False)
    monkeypatch.setattr(upstream, "BUGS", (fixed, upstream.GROUPED_MM_EMPTY))
    assert out_of_date((2, 13)) == [f"hsdp-offload-race: fixed in torch 2.13 ({fixed.url})"]
    nobody = f"grouped-mm-empty-groups: not checked for torch 2.16 ({upstream.GROUPED_MM_EMPTY.url})"
    assert out_of_date((2, 16))[1:] == [nobody]
