"""Context parallelism: gradients and steps of plain transformers, wherever documents are cut, and what travels for it.

Pairs of family and mesh are chosen so that each way of cutting is met: keys and values in a ring, even (2) and uneven
(3); heads (Ulysses), repeated where there are fewer of keys (qwen3); both; windows, sinks, soft-caps, MLA; heads of
layers that carry state, several documents at once (mamba2); data ranks and tp beside it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.cases import (
    describe,
    open_engine,
    pairs,
    parity,
    parity_of_two_steps,
    saved_model,
    traced_parity,
    world_of,
)
from tests.support.pool import run
from tests.support.vision_zoo import vision_config, vision_tokenizer
from tests.support.zoo import tiny_config
from weft.config.rl_schema import RlAlgorithm
from weft.engine.batch.assigned_images import _DocumentImages, assign_images, plan_exchange
from weft.engine.batch.document import Document, DocumentMeta
from weft.engine.batch.rows import local_last_seen
from weft.engine.builder import ulysses_of_states
from weft.engine.engine import Engine
from weft.engine.losses.base import HeldOutLoss
from weft.engine.losses.policy import PolicyLoss
from weft.engine.selfcheck import context as context_check
from weft.engine.selfcheck.architecture import forget_checks
from weft.engine.selfcheck.context import check_context, choose_ulysses
from weft.engine.selfcheck.harness import STATE_TOLERANCE
from weft.engine.step_plan.plan import StepPlan, plan_step
from weft.errors import UserError
from weft.models import hf
from weft.models.flops import AttentionFacts, FlopFacts
from weft.models.mixer_shards import can_share_documents
from weft.models.train_module import TrainModule
from weft.ops import context
from weft.ops.attention_call import Bounds, Call, ContextRow
from weft.ops.communicator import (
    CPAxis,
    FeatureExchange,
    GroupCommunicator,
    MetaCommunicator,
    ThreadCommunicator,
    ThreadGroup,
)
from weft.ops.context import attend_in_context
from weft.ops.per_document import per_document
from weft.ops.shared_documents import SharedDocuments
from weft.parallel.cp.split import CPGroup, assign, spread, zigzag
from weft.parallel.mesh import local_shard

SHORT = {"step": {"max_tokens_per_device": 40}}  # weft verify makes rows shorter still, so that most documents are cut
CASES = [
    ("qwen3", "cp2u2"), ("gemma3_text", "cp4u2"), ("qwen3_moe", "2xcp2"), ("deepseek_v3", "cp2u2"), ("glm4", "cp3"),
    ("cohere2", "2x1xcp2"), ("gpt2", "cp2"), ("llama_tied", "cp2xtp2"), ("qwen3_next", "cp2u2"), ("bamba", "cp2u2"),
]  # fmt: skip
# The first three families run on such meshes, without a bug, in tests/verify/test_plants_on_meshes.py.
TABLE = [
    ("llama", "cp2"), ("gpt_oss", "cp2"), ("mamba2", "cp2u2"), ("bamba", "cp2u2xtp2"), ("gpt_oss", "cp2xtp2"),
    ("olmo3", "cp2"), ("olmo3", "cp4u2"), ("mamba2", "cp4u4"),
]  # fmt: skip
DEALT_WHOLE = [("recurrent_gemma", "cp2"), ("falcon", "cp2")]  # whose layers read positions, or whose rows are padded


@pytest.mark.covers("mesh.cp")
@pytest.mark.parametrize(("family", "mesh"), pairs(CASES, TABLE))
def test_steps_are_those_of_plain_transformers(family: str, mesh: str) -> None:
    verdict = run(world_of(mesh), parity_of_two_steps, saved_model(family), mesh, SHORT)[0]
    assert verdict.passed, describe(verdict)
    assert "were split over" in verdict.remarks[-1]


@pytest.mark.slow
@pytest.mark.table
def test_eight_ranks_on_three_axes() -> None:
    """Two replicas of two shards, each of two ranks that share documents: ROLL's example, fsdp 4 and ulysses 2."""
    verdict = run(8, parity_of_two_steps, saved_model("llama"), "2x2xcp2", SHORT, timeout=300)[0]
    assert verdict.passed, describe(verdict)
    assert "were split over" in verdict.remarks[-1]


KNOBS: dict[str, dict[str, Any]] = {
    "recompute and last": {"model": {"recompute": "full"}, "fsdp": {"reduce": "last"}},
    "scatter and offload": {"fsdp": {"reduce": "scatter", "cpu_offload": True}},
    "experts balanced": {"model": {"router_aux_loss": "document", "router_aux_loss_coef": 0.1}},
    "experts balanced by step": {"model": {"router_aux_loss": "step", "router_aux_loss_coef": 0.1}},
    "lora": {"lora": {"rank": 4}},
}


BALANCED_BY_STEP = "experts balanced by step"  # the suite has it on ep and cp: test_expert_parallel.py


@pytest.mark.parametrize("name", pairs([(k,) for k in KNOBS if k != BALANCED_BY_STEP], [(BALANCED_BY_STEP,)]))
def test_with_other_knobs(name: str) -> None:
    verdict = run(2, parity_of_two_steps, saved_model("qwen3_moe"), "cp2", SHORT | KNOBS[name])[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize(("family", "mesh", "sections"), [
    ("mamba", "cp2u2", {"lora": {"rank": 4, "targets": ("all-linear",)}}), ("mamba2", "pp2vxcp2", {}),
], ids=["adapters", "gradients of weights later"])  # fmt: skip
def test_layers_that_carry_state_with_other_knobs(family: str, mesh: str, sections: dict[str, Any]) -> None:
    """Slices of adapters; slices of weights, which are no leaves."""
    verdict = run(
        world_of(mesh), parity_of_two_steps, saved_model(family, num_hidden_layers=4), mesh, SHORT | sections
    )[0]
    assert verdict.passed, describe(verdict)
    assert "were split over" in verdict.remarks[-1]


@pytest.mark.table  # with shards, tp and pp layers are compiled in the suite
def test_with_compiled_layers() -> None:
    verdict = run(2, traced_parity, saved_model("qwen3"), "cp2u2", SHORT)[0]
    assert verdict.passed, describe(verdict)


@pytest.mark.parametrize(("family", "mesh"), DEALT_WHOLE, ids=map(" ".join, DEALT_WHOLE))
def test_documents_that_cannot_be_cut_are_dealt_whole(family: str, mesh: str) -> None:
    verdict = run(world_of(mesh), parity_of_two_steps, saved_model(family), mesh, {})[0]
    assert verdict.passed, describe(verdict)
    assert "not split" in verdict.remarks[-1]


# ---------------------------------------------------------------- bugs, planted


def balanced_by_parts(path: str) -> bool:
    """Whether the verdict is that all agrees, where experts are balanced by parts of documents."""
    with mock.patch.object(SharedDocuments, "complete", lambda self, values: values):
        verdict = parity(path, "cp2", SHORT | KNOBS["experts balanced"])
    return verdict is None or verdict.passed


def test_a_bug_is_seen() -> None:
    """Many more are in tests/verify/test_plants_on_meshes.py."""
    assert not run(2, balanced_by_parts, saved_model("qwen3_moe"))[0]


KEYS = context.ContextRow.build_keys


def keys_as_they_come(row: Any, *arguments: Any) -> Any:
    keys = KEYS(row, *arguments)
    return replace(keys, run=keys.run.sort()[0])


# ---------------------------------------------------------------- before it starts: documents of a small copy are cut

CUT = (
    "llama", "qwen3", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "cohere2", "gpt2",
    "olmo3", "glm4", "phi3_longrope", "mixtral", "granite", "glm4_moe",
)  # fmt: skip


@pytest.mark.parametrize(("family", "cp", "ulysses"), [("qwen2_5_vl", 2, 1), ("qwen3_vl", 2, 2), ("qwen2_vl", 4, 2)])
def test_documents_with_images_are_checked(family: str, cp: int, ulysses: int) -> None:
    config, parts, computing = vision_config(family, vision_tokenizer(family)), set[int](), set[int]()

    def counted(indices: Sequence[int], *args: Any) -> dict[str, Any]:
        fields, rank = assign_images(indices, *args), args[3]
        parts.add(rank)
        computing.update([] if fields["placeholder"] else [rank])
        return fields

    with mock.patch.object(context_check, "assign_images", counted):
        assert check_context(config, FlopFacts(1), cp, ulysses, 1, images=True) < 1e-5
    assert len(parts) == cp and len(computing) >= 2
    forget_checks()
    with mock.patch.object(FeatureExchange, "run", as_they_come), pytest.raises(UserError, match="differ"):
        check_context(config, FlopFacts(1), cp, ulysses, 1, images=True)


def as_they_come(exchange: FeatureExchange, features_FH: torch.Tensor) -> torch.Tensor:
    features = RUN(exchange, features_FH)
    return features.flip(0)


RUN = FeatureExchange.run


def checked(family: str, cp: int, ulysses: int) -> float:
    config = hf.without_noise(tiny_config(family))
    return check_context(config, FlopFacts(1), cp, ulysses, 1)


@pytest.mark.parametrize(("family", "cp", "ulysses"), [
    pytest.param(family, *sizes, marks=marks)
    for sizes, marks in (((4, 2), ()), ((2, 1), pytest.mark.table)) for family in CUT
])  # fmt: skip
def test_documents_of_a_small_copy_of_each_family_are_cut(family: str, cp: int, ulysses: int) -> None:
    """A ring of two, each of whose places are two ranks that exchange heads; and in the table a ring of two alone."""
    assert checked(family, cp, ulysses) < 5e-5


STATES = (
    "qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "minimax", "mamba", "mamba2", "nemotron_h", "bamba",
    "falcon_h1", "granitemoehybrid", "zamba2", "jamba", "lfm2", "lfm2_moe",
)  # fmt: skip


@pytest.mark.parametrize("family", STATES)
def test_documents_of_layers_that_carry_state_are_cut(family: str) -> None:
    """Each of two ranks computes whole documents for half of the heads. States amplify rounding, by how much depends on
    the processor: a tenth of what is refused is allowed."""
    assert checked(family, 2, 2) < STATE_TOLERANCE / 10


def mixers_share(family: str, cp: int, tp: int = 1) -> bool:
    module = TrainModule(hf.build_meta(tiny_config(family), dtype=torch.float32, attention="eager"))
    return all(can_share_documents(boundary.mixer, cp, tp) for boundary in module.mixers.values())


def test_states_are_shared_where_heads_divide() -> None:
    """qwen3_next has two heads of keys; recurrent_gemma reads positions; two norms of nemotron_h's groups on two ranks
    each of four would need smaller groups than cp."""
    assert mixers_share("qwen3_next", 2)
    assert not mixers_share("qwen3_next", 2, tp=2)
    assert not mixers_share("qwen3_next", 4)
    assert mixers_share("bamba", 2, tp=4)
    assert not mixers_share("nemotron_h", 4)
    assert not mixers_share("recurrent_gemma", 2)


def test_a_ring_is_refused_where_layers_carry_state() -> None:
    assert ulysses_of_states(None, 4, divides=True) == ulysses_of_states(4, 4, divides=True) == 4
    with pytest.raises(UserError, match=r"mesh\.ulysses=1: layers of this model have state.*null or 4"):
        ulysses_of_states(1, 4, divides=True)
    with pytest.raises(UserError, match=r"mesh\.ulysses=4 does not divide all heads.*mesh\.ulysses=null"):
        ulysses_of_states(4, 4, divides=False)


@pytest.mark.parametrize("family", ["llama4_text", "stablelm"])
def test_a_family_whose_attention_needs_whole_documents_is_refused_by_name(family: str) -> None:
    """Chunks that begin with the document; code that hands on positions alone."""
    with pytest.raises(UserError, match=rf"mesh\.cp: weft cannot cut documents of model_type '{family}'.*mesh\.cp=1"):
        checked(family, 2, 1)


def test_a_bug_is_seen_at_the_start() -> None:
    with (
        mock.patch.object(context.ContextRow, "build_keys", keys_as_they_come),
        pytest.raises(UserError, match="differ"),
    ):
        checked("llama", 2, 1)


def test_heads_that_cannot_be_exchanged_are_refused() -> None:
    config = tiny_config("llama")
    facts = FlopFacts(1, (AttentionFacts(6, 8),))
    with pytest.raises(UserError, match=r"mesh\.ulysses=4 does not divide the 6 attention heads of a rank"):
        check_context(config, facts, 4, 4, 1)


def test_ulysses_is_chosen_by_bytes() -> None:
    """All heads have keys of their own: heads cost less than keys. Few have: keys cost less."""
    facts = FlopFacts(1, (AttentionFacts(32, 128),))
    assert choose_ulysses(facts, tiny_config("llama", num_attention_heads=32, num_key_value_heads=32), 8, 1) == 8
    assert choose_ulysses(facts, tiny_config("llama", num_attention_heads=32, num_key_value_heads=8), 2, 1) == 1
    odd = FlopFacts(1, (AttentionFacts(9, 64),))
    assert (
        choose_ulysses(odd, tiny_config("llama", num_attention_heads=9, num_key_value_heads=9, hidden_size=72), 2, 1)
        == 1
    )


# ---------------------------------------------------------------- plans


def random_metas(source: random.Random, longest: int) -> list[DocumentMeta]:
    lengths = [source.choice([source.randint(1, 60), source.randint(1, longest)]) for _ in range(source.randint(1, 40))]
    return [DocumentMeta(n, 1.0, n, cost=60.0 * n + n * n) for n in lengths]


def check_plan(plan: StepPlan, budget: int) -> None:
    """Every token once, in the ranks of one group; what fits on a rank is whole."""
    parts: dict[int, list[tuple[int, int]]] = {}
    for k, micro_batch in enumerate(plan.rows):
        for rank, row in enumerate(micro_batch):
            pieces = plan.pieces[k][rank] if plan.pieces else [((0, plan.documents[i].read),) for i in row]
            assert sum(b - a for parts_of_document in pieces for a, b in parts_of_document) <= budget
            for document, parts_of_document in zip(row, pieces, strict=True):
                parts.setdefault(document, []).extend(parts_of_document)
    assert sorted(parts) == list(range(len(plan.documents)))
    for document, pieces in parts.items():
        length = plan.documents[document].read
        assert [t for a, b in sorted(pieces) for t in range(a, b)] == list(range(length))
        assert length > budget or pieces == [(0, length)]


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_random_plans_are_whole(ulysses: int) -> None:
    source, utilisation = random.Random(ulysses), []
    for _ in range(200):
        metas = random_metas(source, 4 * 128)
        plan = plan_step(metas, ranks=4, budget=128, ring=4 // ulysses, ulysses=ulysses)
        check_plan(plan, 128)
        utilisation.append(plan.utilisation)
    assert sum(utilisation) / len(utilisation) > 0.75


def test_groups_share_documents_among_themselves() -> None:
    metas = [DocumentMeta(n, 1.0, n) for n in (100, 90, 18, 12, 10)]
    plan = plan_step(metas, ranks=4, budget=64, ring=2)
    check_plan(plan, 64)
    assert plan.micro_batches == 1
    assert sorted(tuple(plan.shared_documents(0, rank)) for rank in range(4)) == [(0,), (0,), (1,), (1,)]


def test_the_ring_costs_each_member_the_same() -> None:
    assert zigzag(16, 2) == [[(0, 4), (12, 16)], [(4, 12)]]
    assert spread([(0, 4), (12, 16)], 2) == [[(0, 4)], [(12, 16)]]
    assert spread([(0, 3), (12, 16)], 3) == [[(0, 2)], [(2, 3), (12, 13)], [(13, 16)]]


def test_a_row_that_is_full_to_the_last_token() -> None:
    for ring, capacity in ((2, 5), (3, 7), (4, 9)):
        for missing in range(3):
            group = CPGroup(ring, 1, capacity)
            placed, unplaced = assign([ring * capacity - missing], [1], group)
            assert not unplaced
            assert max(sum(b - a for ranges in row.values() for a, b in ranges) for row in placed) <= capacity


def test_a_document_that_is_too_long_for_all_ranks() -> None:
    with pytest.raises(UserError, match=r"a row holds 100 on each of 2 ranks of mesh\.cp.*=150 or more"):
        plan_step([DocumentMeta(300, 1.0, 1)], ranks=2, budget=100, ring=2)


# ---------------------------------------------------------------- what travels


def bytes_sent(path: str, mesh: str, lengths: list[int], budget: int) -> tuple[int, float]:
    """(bytes that the ranks of cp send each other in one forward, loss)."""
    engine = open_engine(path, mesh, step={"max_tokens_per_device": budget})
    documents = {i: Document(torch.arange(n) % 90 + 3, torch.ones(n)) for i, n in enumerate(lengths)}
    plan, sent = engine.plan(engine.planner.metadata(documents.values())), [0]
    rank, exchange = engine.context.rank if engine.context else 0, GroupCommunicator.all_to_all

    def counting(self: GroupCommunicator, x: Any, counts: Any, received: Any) -> Any:
        local_rank = self.group.rank()
        sent[0] += sum(n for rank, n in enumerate(counts) if rank != local_rank) * x[:1].numel() * x.element_size()
        return exchange(self, x, counts, received)

    with mock.patch.object(GroupCommunicator, "all_to_all", counting):
        metrics = engine.evaluate(plan, documents, HeldOutLoss()).reduce(engine.mesh.loss_group)
    total = torch.tensor([float(sent[0])])
    torch.distributed.all_reduce(total)
    assert rank >= 0
    return int(total), metrics["loss"] or 0.0


@pytest.mark.covers("mesh.ulysses")
@pytest.mark.parametrize("mesh", ["cp2", "cp2u2"])
def test_bytes_that_travel_are_those_of_the_formula(mesh: str) -> None:
    """None where no document is cut. llama: 2 layers, heads of 16, 4 of queries and 2 of keys."""
    path, config = saved_model("llama"), tiny_config("llama")
    width = config.hidden_size // config.num_attention_heads
    heads, keys, layers = config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers
    sent_uncut, loss = run(2, bytes_sent, path, mesh, [65, 60, 40], 128)[0]
    sent_cut, same = run(2, bytes_sent, path, mesh, [65, 60, 40], 40)[0]
    assert sent_uncut == 0
    assert same == pytest.approx(loss, rel=1e-6)
    read = [64, 59]  # of those that are cut, without the last token, which predicts nothing
    if mesh == "cp2":  # one member has chunks 0 and 3 and gets the half between; the other gets the first quarter
        expected = sum(n / 2 + n / 4 for n in read) * 2 * keys * width
    else:  # half of the tokens of each rank, for half of the heads
        expected = sum(n / 2 for n in read) * 2 * (heads + keys) * width
    assert sent_cut == pytest.approx(expected * layers * 4, rel=0.05)


# ---------------------------------------------------------------- sums over documents


def sampled(documents: int) -> dict[int, Document]:
    generator = torch.Generator().manual_seed(3)
    lengths = [61, 9, 47, 22, 35][:documents]
    out = {}
    for index, n in enumerate(lengths):
        arrays = {"old_logprobs": -4 - torch.rand(n, generator=generator), "advantages": torch.full((n,), 1.0 - index)}
        arrays["correction"] = torch.ones(n)
        ids = torch.randint(3, 120, (n,), generator=generator)
        out[index] = Document(ids, (torch.arange(n) >= 5).float() / (n - 5), arrays=arrays)
    return out


def policy_step(path: str, mesh: str, policy_loss: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metrics, gradients) of one step of whole samples' ratios."""
    engine: Engine = open_engine(path, mesh, step={"max_tokens_per_device": 40 if "cp" in mesh else 128})
    documents = sampled(5)
    plan = engine.plan(engine.planner.metadata(documents.values()))
    loss = PolicyLoss(RlAlgorithm(policy_loss=policy_loss, loss_aggregation="sequence_mean"))
    metrics = engine.accumulate(plan, documents, loss)
    return metrics, dict(engine.gradients())


@pytest.mark.parametrize("policy_loss", ["gspo", "ppo_sequence"])
def test_ratios_of_whole_samples(policy_loss: str) -> None:
    """Their sums run over parts of documents on several ranks, and each sample counts once."""
    path = saved_model("qwen3")
    expected, gradients = run(1, policy_step, path, "1", policy_loss)[0]
    for mesh in ("cp2", "cp4u2"):
        metrics, actual = run(world_of(mesh), policy_step, path, mesh, policy_loss)[0]
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)
        largest = max(float(g.abs().max()) for g in gradients.values())
        for name, gradient in gradients.items():
            off = float((actual[name] - gradient).abs().max())
            assert off <= 1e-5 * max(float(gradient.abs().max()), 1e-3 * largest), name


def shapes(path: str, mesh: str) -> list[tuple[int, int]]:
    """(elements here, of all) of each parameter."""
    engine = open_engine(path, mesh)
    return [(local_shard(p).numel(), p.numel()) for p in engine.module.parameters()]


def test_its_ranks_shard_parameters() -> None:
    sizes = run(2, shapes, saved_model("llama"), "cp2")[0]
    assert all(local * 2 == of_all for local, of_all in sizes)


# ---------------------------------------------------------------- images beside documents that are cut


def test_images_behind_a_cut_document_see_no_later_tokens() -> None:
    """A row of six tokens of a cut document and two whole ones, whose images see all of themselves (gemma3): these have
    the attention that they have alone."""
    generator, cut, lengths = torch.Generator().manual_seed(0), 6, (7, 5)
    q, k, v = (torch.randn(1, 2, cut + 12, 8, generator=generator) for _ in range(3))
    seen_alone = torch.tensor([0, 3, 3, 3, 4, 5, 6, 7, 10, 10, 10, 11])  # images at 1 to 3 and at 8 to 10
    row = Bounds((cut, *lengths), last_seen=torch.cat([torch.arange(cut), cut + seen_alone]))
    call = Call(q, k, v, row, 0.3, None, None, None)
    axis = CPAxis(0, 2, 1, MetaCommunicator(2), None, None)
    shared = ContextRow(axis, (((0, 0, 6),), ((0, 6, 12),)), lengths)
    with mock.patch.object(context, "_shared", lambda call, *_: call.query_BHTD):
        actual = attend_in_context(call, shared, per_document)
    separate = replace(call, query_BHTD=q[:, :, cut:], key_BKTD=k[:, :, cut:], value_BKTE=v[:, :, cut:])
    expected = per_document(replace(separate, bounds=Bounds(lengths, last_seen=seen_alone)))
    assert torch.equal(actual[:, :, :cut], q[:, :, :cut])
    torch.testing.assert_close(actual[:, :, cut:], expected)


def test_the_last_token_that_an_image_shows_is_one_of_this_ranks_row() -> None:
    """The second rank has tokens 3 to 5 of a document of eight, and a whole one of four with an image at 1 and 2."""
    whole_row = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 11], dtype=torch.int32)
    local_tokens = torch.tensor([3, 4, 5, 8, 9, 10, 11])
    assert local_last_seen(whole_row, local_tokens, 2).tolist() == [0, 1, 2, 3, 5, 5, 6, 7, 8]


def test_images_of_a_cut_document_take_room_on_its_ranks() -> None:
    """Twelve tokens with images that take the room of eighteen leave one of ten on each of two ranks."""
    group = CPGroup(2, 1, 10)
    assert assign([12, 4], [12, 4], group, [18, 4])[1] == [1]
    assert assign([12, 4], [12, 4], group, [12, 4])[1] == []
    assert assign([12, 1], [12, 1], group, [18, 1])[1] == []


def images_of(index: int, owners: list[int], holders: list[int], features: list[int]) -> _DocumentImages:
    """A document of images alone: of each, who computes it, who has its tokens, and how many features it has."""
    owner, holder = (np.repeat(np.array(ranks), features) for ranks in (owners, holders))
    return _DocumentImages(index, [], [], np.array(owners), owner, holder, np.arange(sum(features)), sum(features))


@pytest.mark.parametrize("order", [[0, 2, 1], [0, 1, 2], [2, 0, 1], [1, 2, 0]], ids=str)
def test_features_of_several_documents_reach_the_tokens_of_their_images(order: list[int]) -> None:
    """Document 0 is cut: each rank computes an image, and the other has its tokens. Two whole ones are on rank 1, in
    any order of the row."""
    images = {0: images_of(0, [0, 1], [1, 0], [2, 3]), 1: images_of(1, [1], [1], [2]), 2: images_of(2, [1], [1], [4])}
    ranges: list[dict[int, list[tuple[int, int]]]] = [{0: [(2, 5)]}, {0: [(0, 2)], 1: [(0, 2)], 2: [(0, 4)]}]
    group = ThreadGroup(2)

    def exchanged(rank: int) -> list[int]:
        """The features of this rank's row. Feature f of document d is 100 d + f."""
        documents = [index for index in order if index in ranges[rank]]
        shown, axis = (
            [images[index] for index in documents],
            CPAxis(rank, 2, 1, ThreadCommunicator(group, rank), None, None),
        )
        tower = [
            100 * image.index + f for image in shown for f in range(len(image.owner_F)) if image.owner_F[f] == rank
        ]
        return plan_exchange(shown, documents, ranges[rank], axis).run(torch.tensor(tower)[:, None])[:, 0].tolist()

    with ThreadPoolExecutor(2) as threads:
        by_rank = list(threads.map(exchanged, range(2)))
    for rank, features in enumerate(by_rank):
        expected = [100 * d + f for d in order if d in ranges[rank] for a, b in ranges[rank][d] for f in range(a, b)]
        assert features == expected, rank
