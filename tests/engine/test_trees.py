"""Where documents of a group part, how trees are dealt to rows, and how a row of them is laid out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from weft.engine.batch.document import Costs, Document, DocumentMeta, document_metadata
from weft.engine.batch.rows import Row, build_row
from weft.engine.step_plan.plan import StepPlan, plan_step
from weft.engine.step_plan.trees import depth_first, segments_of, tree_tokens

COSTS = Costs(lambda length: int(length > 1), float, lambda patches, pairs: (0.0, 0))


def group_of(*texts: str, group: int | None = 0) -> list[Document]:
    """Documents whose tokens are characters."""
    return [Document(torch.tensor([*text.encode()]), torch.ones(len(text)), group=group) for text in texts]


def metadata_of(documents: Sequence[Document]) -> list[DocumentMeta]:
    return document_metadata(documents, COSTS, lambda length: True)


def answers(prompt: int, answer: int, count: int, group: int = 0) -> list[Document]:
    """`count` answers to one prompt, which differ from their first token on."""
    draw = random.Random(group)
    start = [draw.randrange(1000) for _ in range(prompt)]
    texts = [[*start, 1000 + n, *(draw.randrange(1000) for _ in range(answer))] for n in range(count)]
    return [Document(torch.tensor(ids), torch.ones(len(ids)), group=group) for ids in texts]


def ends(meta: DocumentMeta) -> list[int]:
    return [node.end for node in meta.path]


# ---------------------------------------------------------------- paths


def test_paths_end_where_documents_part_and_where_one_ends() -> None:
    metas = metadata_of(group_of("abcdeX", "abcdX", "abX", "zzz", "abcdeY"))
    assert [ends(meta) for meta in metas] == [[2, 4, 5], [2, 4], [2], [], [2, 4, 5]]
    first, second = metas[0].path, metas[1].path
    assert first[:2] == second[:2] and first == metas[4].path
    assert [node.cost for node in first] == [2.0, 4.0, 5.0]


def test_the_last_token_of_a_document_parts_nothing() -> None:
    """No forward reads it, so that answers of one token are their prompt."""
    metas = metadata_of(group_of("abcX", "abcY", "abc"))
    assert [ends(meta) for meta in metas] == [[2, 3], [2, 3], [2]]


def test_only_members_of_a_group_share() -> None:
    separate = [*group_of("abcdef", group=0), *group_of("abcdef", group=1), *group_of("abcdef", group=None)]
    assert not any(meta.path for meta in metadata_of(separate))
    assert not any(meta.path for meta in document_metadata(group_of("abcd", "abcd"), COSTS))


def test_equal_tokens_at_other_positions_or_by_other_experts_are_not_shared() -> None:
    first, second = group_of("abcdef", "abcdef")
    moved = replace(second, positions=torch.arange(6) + 3)
    assert not any(meta.path for meta in metadata_of([first, moved]))
    routes = torch.zeros(6, 2, 1, dtype=torch.int16)
    changed = routes.clone()
    changed[3] = 1
    metas = metadata_of([replace(first, routes=routes), replace(second, routes=changed)])
    assert [ends(meta) for meta in metas] == [[3, 5], [3, 5]]


# ---------------------------------------------------------------- plans


def forwarded(plan: StepPlan) -> int:
    return sum(plan.row_tokens(k, r) for k in range(plan.micro_batches) for r in range(plan.ranks))


def test_a_prompt_is_forwarded_once() -> None:
    plan = plan_step(metadata_of(answers(50, 7, 8)), ranks=1, budget=200)
    assert plan.rows == ((tuple(range(8)),),)
    assert plan.tokens_forwarded == forwarded(plan) == 50 + 8 * 7
    assert plan.lengths == ((106,),) and plan.totals.tokens == 8 * 58
    assert plan.flops == 106.0


def test_a_tree_larger_than_a_row_is_split_the_fewest_times() -> None:
    plan = plan_step(metadata_of(answers(50, 10, 12)), ranks=1, budget=100)
    assert plan.micro_batches == 3  # 5 answers beside a prompt, in each but the last
    assert plan.tokens_forwarded == 3 * 50 + 12 * 10
    assert all(max(k) <= 100 for k in plan.lengths)


def test_a_tree_is_split_where_ranks_would_wait() -> None:
    plan = plan_step(metadata_of(answers(10, 30, 8)), ranks=2, budget=400)
    assert [len(row) for row in plan.rows[0]] == [4, 4]
    assert plan.tokens_forwarded == 2 * 10 + 8 * 30
    unsplit = plan_step(metadata_of([*answers(10, 30, 8), *answers(10, 30, 8, group=1)]), ranks=2, budget=400)
    assert unsplit.tokens_forwarded == 2 * (10 + 8 * 30)


def test_documents_stay_apart_where_sharing_saves_little() -> None:
    plan = plan_step(metadata_of(answers(3, 90, 4)), ranks=1, budget=400)
    assert plan.tokens_forwarded == 4 * 93 and plan.segments(0, 0) is None


def test_a_document_that_is_cut_leaves_its_tree() -> None:
    long = answers(60, 90, 1)[0]
    documents = [long, *(replace(d, tokens=torch.cat([long.tokens[:60], d.tokens[60:]])) for d in answers(60, 5, 4, 1))]
    plan = plan_step(metadata_of(documents), ranks=2, budget=100, ring=2)
    assert plan.shared_documents(0, 0) == [0]
    assert plan.tokens_forwarded == forwarded(plan) == 150 + 2 * (60 + 2 * 5)  # one half of the tree on each rank


def test_random_trees_fit_their_rows_and_hold_every_document_once() -> None:
    draw = random.Random(0)
    for seed in range(30):
        documents = [
            document for group in range(3) for document in answers(draw.randint(1, 60), draw.randint(1, 30), 5, group)
        ]
        metas = metadata_of(documents)
        plan = plan_step(metas, ranks=draw.randint(1, 3), budget=130, multiple=draw.choice([1, 2]))
        assert sorted(index for k in plan.rows for row in k for index in row) == list(range(len(documents))), seed
        for k, row_lengths in enumerate(plan.lengths):
            for rank, length in enumerate(row_lengths):
                segments, row = plan.segments(k, rank), plan.rows[k][rank]
                assert segments is None or segments.depth_first
                tokens = sum(metas[i].read for i in row) if segments is None else sum(segments.lengths)
                assert plan.row_tokens(k, rank) == tokens <= length <= 130
                assert segments is None or tokens == tree_tokens(plan.documents, row)


def test_parts_of_a_tree_in_one_row_are_neighbours() -> None:
    """Also where another tree was dealt to the row between them."""
    metas = metadata_of([*answers(20, 5, 4), *answers(20, 6, 2, group=1)])
    order = depth_first(metas, [0, 4, 1, 5, 2, 3])
    assert order == [0, 1, 2, 3, 4, 5]
    deep = metadata_of(group_of("abcdeX", "abzzY", "abcdfX", "abzzZ"))
    segments = segments_of([deep[index] for index in depth_first(deep, range(4))])
    assert segments is not None and segments.depth_first and segments.parents == (-1, 0, 1, 1, 0)


# ---------------------------------------------------------------- rows


def row_of(documents: Sequence[Document], padding: int = 0) -> Row:
    metas = metadata_of(documents)
    segments = segments_of(metas)
    assert segments is not None
    return build_row(
        range(len(documents)), dict(enumerate(documents)), read=[meta.read for meta in metas],
        length=sum(segments.lengths) + padding, layout="packed", every_token=True, segments=segments,
    )  # fmt: skip


def test_a_row_lays_out_segments_and_labels_documents() -> None:
    row = row_of(group_of("abcde", "abcXY", "abc"), padding=2)
    assert bytes(row.input_ids_BT[0, :-2].tolist()) == b"abcdX"
    assert row.position_ids_BT[0].tolist() == [0, 1, 2, 3, 3, 0, 1]
    assert row.bounds.lengths == (2, 1, 1, 1, 2) and row.real_tokens == 5
    assert bytes(row.targets_N.tolist()) == b"bcdebcXYbc"
    assert row.selected_N.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 0, 1]  # d and X are read at c
    assert row.document_N.tolist() == [0] * 4 + [1] * 4 + [2] * 2


def test_predictions_that_are_alike_are_read_once() -> None:
    row = row_of(group_of("abcde", "abcXY"))
    repeats = row.repeats
    assert repeats is not None
    predictions = list(zip(row.selected_N.tolist(), row.targets_N.tolist(), strict=True))
    assert [predictions[first] for first in repeats.first_U] == sorted(set(predictions))
    assert torch.equal(row.targets_N[repeats.first_U][repeats.distinct_N], row.targets_N)
    assert repeats.summed(torch.ones(8)).tolist() == [2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
