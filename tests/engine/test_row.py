"""weft.engine.batch.rows: positions of one and of three dimensions, and rows that are moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from weft.engine.batch.document import Document
from weft.engine.batch.rows import Row, RowBuilder, build_row
from weft.models import hf
from weft.ops.attention_call import BOUNDS_ARGUMENT


def document(length: int, positions: Tensor | None = None) -> Document:
    return Document(torch.arange(length) + 5, torch.ones(length), positions=positions)


def image(length: int, first: int) -> Tensor:
    """[3, T] as of a picture: time stands still while height and width go on."""
    grid = torch.arange(length)
    return torch.stack([torch.full((length,), first), first + grid // 4, first + grid % 4])


# The last token of each is not read.
MIXED = [document(6, image(6, 3)), document(4), document(5, torch.tensor([7, 7, 8, 8, 9]))]
READ = [5, 3, 4]


def row_of(documents: list[Document], layout: Any, length: int) -> Row:
    read = [max(1, len(d) - 1) for d in documents]
    return build_row(
        list(range(len(documents))), dict(enumerate(documents)), read=read, length=length, layout=layout,
        every_token=False,
    )  # fmt: skip


def text(*positions: int) -> Tensor:
    return torch.tensor(positions).repeat(3, 1)


def test_three_positions_for_each_token_packed() -> None:
    positions = row_of(MIXED, "packed", 15).position_ids_BT
    assert positions.shape == (3, 1, 15)
    expected = torch.cat([image(6, 3)[:, :5], text(0, 1, 2), text(7, 7, 8, 8), text(0, 1, 2)], dim=1)
    assert torch.equal(positions[:, 0], expected)


def test_three_positions_for_each_token_padded() -> None:
    positions = row_of(MIXED, "padded", 6).position_ids_BT
    assert positions.shape == (3, 3, 6)
    assert torch.equal(positions[:, 0], torch.cat([image(6, 3)[:, :5], text(5)], dim=1))
    assert torch.equal(positions[:, 1], text(0, 1, 2, 3, 4, 5))
    assert torch.equal(positions[:, 2], text(7, 7, 8, 8, 4, 5))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_one_position_for_each_token(layout: Any) -> None:
    """Without a document of three there is one, and a row without documents has it, too."""
    assert row_of(MIXED[1:], layout, 12).position_ids_BT.shape == ((1, 12) if layout == "packed" else (2, 12))
    assert row_of([], layout, 4).position_ids_BT.tolist() == ([[0, 1, 0, 1]] if layout == "packed" else [[0, 1, 2, 3]])


def test_padding_has_positions_that_some_document_has() -> None:
    """From 0, again and again, and never beyond the longest: some rotary tables depend on the longest of the row."""
    row = row_of([document(4), document(6)], "packed", 20)
    assert row.position_ids_BT.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, *(n % 5 for n in range(12))]]
    far = Document(torch.arange(4), torch.ones(4), positions=torch.tensor([90, 91, 92, 93]))
    assert row_of([far], "packed", 9).position_ids_BT.tolist() == [[90, 91, 92, 0, 1, 2, 0, 1, 2]]


@pytest.mark.parametrize(("layout", "length"), [("packed", 20), ("padded", 6)])
def test_padding_counts_for_no_token(layout: Any, length: int) -> None:
    assert row_of(MIXED, layout, length).real_tokens == sum(READ)
    assert row_of([], layout, length).real_tokens == 0


def test_negative_weights_are_trained() -> None:
    """A weight is any number but 0: one below takes a token's probability away."""
    document = Document(torch.arange(5), torch.tensor([9.0, -1.0, 0.0, 0.5, -2.0]))
    row = row_of([document], "packed", 5)
    assert row.targets_N.tolist() == [1, 3, 4] and row.weights_N.tolist() == [-1.0, 0.5, -2.0]
    assert row.selected_N.tolist() == [0, 2, 3]
    meta = document.meta()
    assert (meta.loss_tokens, meta.weight) == (3, -2.5)


def test_a_row_stays_where_it_is_on_the_cpu() -> None:
    row = row_of(MIXED, "packed", 12)
    assert row.to(torch.device("cpu")) is row
    empty = row_of([], "packed", 12)
    assert empty.arrays["whatever an objective asks for"].shape == (0,)


def test_what_a_row_shares_goes_with_it_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)  # which needs an accelerator
    row = row_of(MIXED, "packed", 12)
    row.bounds.firsts, row.bounds.context = (3, 0, 0), "the documents that ranks share"
    bounds = row.to(torch.device("meta")).bounds
    assert (bounds.lengths, bounds.firsts, bounds.context) == (
        row.bounds.lengths,
        row.bounds.firsts,
        row.bounds.context,
    )


def test_a_model_with_rotary_tables_of_three_positions_takes_them() -> None:
    """Qwen2-VL's text model: each document of a packed row as transformers' own attention has it alone."""
    config = transformers.Qwen2VLTextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3]}, use_cache=False,
    )  # fmt: skip
    hf.register_kernels()
    torch.manual_seed(0)
    model = transformers.Qwen2VLTextModel(config).eval()
    row = row_of(MIXED, "packed", 12)
    model.set_attn_implementation("weft_per_document")
    with torch.no_grad():
        outputs = model(
            input_ids=row.input_ids_BT, position_ids=row.position_ids_BT, **{BOUNDS_ARGUMENT: row.bounds}
        ).last_hidden_state[0]
        model.set_attn_implementation("eager")
        for document, output in zip(MIXED, outputs.split(READ), strict=True):
            positions = document.positions if document.positions is not None else torch.arange(4)
            three = (positions if positions.ndim == 2 else positions.repeat(3, 1))[:, None, : len(output)]
            expected = model(input_ids=document.tokens[None, : len(output)], position_ids=three).last_hidden_state[0]
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_documents_are_named_by_their_source_or_their_place() -> None:
    unused: Any = None
    builder = RowBuilder(1, (0, 1), None, "packed", False, False, unused, None, torch.nn.Identity())
    plan: Any = SimpleNamespace(rows_of_rank=lambda rank: [(2, 0), (1,)] if rank == 1 else [])
    documents: Any = {i: SimpleNamespace(source=source) for i, source in enumerate(["a.jsonl:7", None, "a.jsonl:9"])}
    assert builder.rows(plan, documents, False, False).sources == [["a.jsonl:9", "a.jsonl:7"], ["1"]]
