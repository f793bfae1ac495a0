"""What the Engine promises beyond equal numbers: when it communicates, what it keeps, what it refuses to update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from tests.support.cases import ALL_GATHER, REDUCE_SCATTER, describe, open_engine, parity, saved_model, world_of
from tests.support.pool import run
from tests.support.zoo import tiny_config
from weft.engine.batch.document import Document
from weft.engine.engine import Engine, StepResult
from weft.engine.losses.base import Batch, CrossEntropy, LossOutput
from weft.parallel.fsdp import fsdp_modules
from weft.verify import reference, reference_optimizer
from weft.verify.documents import awkward_steps
from weft.verify.observed import to_documents

LAYERS = ("model.layers.0", "model.layers.1")
DOCUMENTS = [document for step in awkward_steps(128) for document in step]
BUDGET = 61  # several micro-batches on every mesh here


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in engine.gradients() if gradient is not None}


# ---------------------------------------------------------------- rows


def rows_of(path: str, balance: str) -> tuple[int, int, int]:
    """(tokens of all rows, those of all documents, documents) of a step."""
    engine = open_engine(path, "1", model={"router_aux_loss": balance}, step={"max_tokens_per_device": 512})
    documents, metas = to_documents(engine, [(ids, mask) for ids, mask in DOCUMENTS if len(ids) > 1])
    plan, row_sizes = engine.plan(metas), list[int]()
    engine.module.register_forward_pre_hook(lambda module, args: row_sizes.append(args[0].numel()))
    engine.accumulate(plan, documents, CrossEntropy())
    return sum(row_sizes), plan.totals.tokens, len(documents)


def test_no_forward_has_what_predicts_nothing() -> None:
    """The last token of each document; the balancing loss of experts counts it."""
    path = saved_model("qwen3_moe")
    ((read, tokens, documents),) = run(1, rows_of, path, "none")
    assert read == tokens - documents
    ((read, tokens, _),) = run(1, rows_of, path, "document")
    assert read == tokens


def apart_from_plain(path: str) -> list[float]:
    """How far logprobs are from plain transformers', for documents around the 32 tokens of the shorter rotary table."""
    engine = open_engine(path, "1", step={"max_tokens_per_device": 128})
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    deviations = []
    for length in (31, 32, 33, 34):
        ids = list(range(3, 3 + length))
        documents, metas = to_documents(engine, [(ids, [1] * len(ids))])
        read = engine.readout(engine.plan(metas), documents)[0]["logprob"]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
        deviations.append(float((read[1:] - logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]).abs().max()))
    return deviations


def test_a_rotary_table_is_that_of_the_whole_document() -> None:
    (deviations,) = run(1, apart_from_plain, saved_model("phi3_longrope"))
    assert max(deviations) < 1e-5, deviations


# ---------------------------------------------------------------- collectives


class Logging(CrossEntropy):
    """Marks in a log where each micro-batch's forward ends."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __call__(self, batch: Batch) -> LossOutput:
        self.log.append("forward")
        return super().__call__(batch)


@contextmanager
def logged(log: list[Any]) -> Iterator[None]:
    """(collective, ranks of its group) of every collective of FSDP's and weft's in the body."""
    names = (ALL_GATHER, REDUCE_SCATTER, "all_reduce")
    originals = {name: getattr(dist, name) for name in names}

    def watched(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            log.append((name, dist.get_world_size(options.get("group"))))
            return originals[name](*args, **options)

        return call

    for name in names:
        setattr(dist, name, watched(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def backward_collectives(
    path: str, mesh: str, sections: dict[str, dict[str, Any]]
) -> tuple[list[Counter[Any]], dict[str, Tensor]]:
    """The collectives from the end of each micro-batch's forward to the next one's, and the gradients."""
    engine = open_engine(path, mesh, step={"max_tokens_per_device": BUDGET}, **sections)
    documents, metas = to_documents(engine, DOCUMENTS)
    plan, log = engine.plan(metas), []
    with logged(log):
        engine.accumulate(plan, documents, Logging(log))
    ends = [index for index, entry in enumerate(log) if entry == "forward"]
    assert len(ends) == plan.micro_batches > 1
    metrics = log.pop()
    assert metrics == ("all_reduce", engine.ranks.world)
    parts = [Counter(log[a + 1 : b]) for a, b in zip(ends, [*ends[1:], None], strict=True)]
    return parts, gradients_of(engine)


@cache
def reduced(mesh: str, reduce: str) -> list[tuple[list[Counter[Any]], dict[str, Tensor]]]:
    return run(world_of(mesh), backward_collectives, saved_model("llama"), mesh, {"fsdp": {"reduce": reduce}})


UNITS = 4  # two layers, norm + head, root
# (reduce-scatters, all-reduces) of the micro-batches before the last, and of the last
REDUCTIONS = [
    ("2x2", "every", (UNITS, UNITS), (UNITS, UNITS)),
    ("2x2", "scatter", (UNITS, 0), (UNITS, UNITS)),
    ("2x2", "last", (0, 0), (UNITS, UNITS)),
    ("2", "every", (UNITS, 0), (UNITS, 0)),
    ("2", "scatter", (UNITS, 0), (UNITS, 0)),
    ("2", "last", (0, 0), (UNITS, 0)),
    ("2x1", "every", (0, UNITS), (0, UNITS)),
    ("2x1", "scatter", (0, 0), (0, UNITS)),
]


@pytest.mark.covers("fsdp.reduce")
@pytest.mark.parametrize(("mesh", "reduce", "before", "last"), REDUCTIONS)
def test_when_gradients_are_reduced(mesh: str, reduce: str, before: Any, last: Any) -> None:
    for parts, _ in reduced(mesh, reduce):
        counts = [(part[REDUCE_SCATTER, 2], part["all_reduce", 2]) for part in parts]
        assert counts == [before] * (len(parts) - 1) + [last]


@pytest.mark.parametrize("mesh", ["2x2", "2"])
def test_gradients_do_not_depend_on_when_they_are_reduced(mesh: str) -> None:
    (_, each_micro_batch), (_, scatter), (_, last) = (reduced(mesh, when)[0] for when in ("every", "scatter", "last"))
    largest = max(float(g.abs().max()) for g in each_micro_batch.values())
    for name, gradient in each_micro_batch.items():
        for gradient_later in (scatter[name], last[name]):
            torch.testing.assert_close(gradient_later, gradient, rtol=1e-5, atol=1e-6 * largest, msg=name)


# ---------------------------------------------------------------- what stays gathered


class Gathered(CrossEntropy):
    """Notes, between forward and backward, over how many ranks each unit's weights lie; 1: they are whole."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seen = engine, {}

    def __call__(self, batch: Batch) -> LossOutput:
        for module in fsdp_modules(self.engine.module):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is None:
                continue
            state = group._sharded_state.name
            between = group.post_forward_mesh_info.shard_mesh_size if state == "SHARDED_POST_FORWARD" else 0
            names = [name for name, child in self.engine.module.named_modules() if child is group.modules[0]]
            self.seen[names[0]] = {"UNSHARDED": 1, "SHARDED": self.engine.mesh.dp_shard}.get(state, between)
        return super().__call__(batch)


def gathered_after_forward(path: str, reshard: bool | int) -> dict[str, int]:
    engine = open_engine(path, "4", fsdp={"reshard_after_forward": reshard})
    documents, metas = to_documents(engine, DOCUMENTS)
    looking = Gathered(engine)
    engine.accumulate(engine.plan(metas), documents, looking)
    return looking.seen


@pytest.mark.covers("fsdp.reshard_after_forward")
@pytest.mark.parametrize(("reshard", "layers"), [(True, 4), (False, 1), (2, 2)])
def test_what_stays_gathered_after_forward(reshard: bool | int, layers: int) -> None:
    for counts in run(4, gathered_after_forward, saved_model("llama"), reshard):
        assert counts == {"": 1, "model.norm": 1, **dict.fromkeys(LAYERS, layers)}


@pytest.mark.parametrize(("reshard", "regathered"), [(True, {4: 2}), (False, {}), (2, {2: 2})])
def test_what_is_gathered_again_in_backward(reshard: bool | int, regathered: dict[int, int]) -> None:
    sections = {"fsdp": {"reshard_after_forward": reshard}}
    for parts, _ in run(4, backward_collectives, saved_model("llama"), "4", sections):
        last = {size: count for (name, size), count in parts[-1].items() if name == ALL_GATHER}
        assert last == regathered


# ---------------------------------------------------------------- recompute


def attention_calls(path: str, recompute: str) -> tuple[int, int, dict[str, Tensor]]:
    """(calls, rows, gradients)."""
    engine, calls = open_engine(path, "2", model={"recompute": recompute}, step={"max_tokens_per_device": BUDGET}), []
    for _, layer in engine.module.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    documents, metas = to_documents(engine, DOCUMENTS)
    plan = engine.plan(metas)
    engine.accumulate(plan, documents, CrossEntropy())
    return len(calls), plan.micro_batches, gradients_of(engine)


@pytest.mark.covers("model.recompute")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_recompute_runs_layers_twice_with_equal_gradients(family: str) -> None:
    path = saved_model(family)
    for plain, recomputed in zip(
        run(2, attention_calls, path, "none"), run(2, attention_calls, path, "full"), strict=True
    ):
        assert plain[0] == 2 * plain[1]
        assert recomputed[0] == 4 * recomputed[1]
        assert plain[2].keys() == recomputed[2].keys()
        assert all(torch.equal(plain[2][name], recomputed[2][name]) for name in plain[2])


# ---------------------------------------------------------------- units and placements


def units(path: str, mesh: str) -> tuple[list[str], set[str]]:
    """Names of the units, and of the parameters that the root keeps."""
    engine = open_engine(path, mesh)
    owned = {id(p) for unit in engine.units for module in unit.modules for p in module.parameters()}
    return [u.name for u in engine.units], {n for n, p in engine.module.named_parameters() if id(p) not in owned}


UNITS_OF = {
    "llama": ([*LAYERS, "model.norm + lm_head"], {"model.embed_tokens.weight"}),
    "llama_tied": ([*LAYERS], {"model.embed_tokens.weight", "model.norm.weight"}),
    "gpt2": (["transformer.h.0", "transformer.h.1"], {
        "transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"}),
    "gpt_oss": ([*LAYERS, "model.norm + lm_head"], {"model.embed_tokens.weight"}),
    "deepseek_v3": ([*LAYERS, "model.layers.2", "model.norm + lm_head"], {"model.embed_tokens.weight"}),
    "lfm2": ([*LAYERS, "model.layers.2"], {"model.embed_tokens.weight", "model.embedding_norm.weight"}),
    "phi": ([*LAYERS, "model.final_layernorm + lm_head"], {"model.embed_tokens.weight"}),
}  # fmt: skip


@pytest.mark.parametrize("family", UNITS_OF)
def test_units(family: str) -> None:
    assert run(1, units, saved_model(family), "1")[0] == UNITS_OF[family]


def test_layers_that_share_weights_stay_with_the_root() -> None:
    """zamba2 runs one attention block in several of its layers."""
    path = saved_model("zamba2")
    names, root = run(2, units, path, "2")[0]
    assert names == ["model.layers.0", "model.layers.2", "model.layers.4"]
    assert "model.layers.1.shared_transformer.self_attn.q_proj.weight" in root
    assert not any(name.startswith("model.layers.3.shared_transformer") for name in root)
    verdict = run(2, parity, path, "2", {})[0]
    assert verdict.passed, describe(verdict)


def placements(path: str, mesh: str) -> dict[str, Any]:
    engine = open_engine(path, mesh)
    tensors = dict(engine.module.named_parameters())
    assert all(isinstance(tensor, DTensor) for tensor in tensors.values())
    return {
        "rank": engine.mesh.loss_rank,
        "axes": {tensor.device_mesh.mesh_dim_names for tensor in tensors.values()},
        "placements": {tensor.placements for tensor in tensors.values()},
        "local": {name: tensor.to_local().detach().clone() for name, tensor in tensors.items()},
        "whole": {name: tensor.cpu() for name, tensor in engine.tensors()},
    }


@pytest.mark.covers("mesh.dp_replicate")
def test_hsdp_shards_within_a_replica_and_copies_over_replicas() -> None:
    ranks = run(4, placements, saved_model("llama"), "2x2")
    for number, facts in enumerate(ranks):
        assert facts["rank"] == number
        assert facts["axes"] == {("dp_replicate", "dp_shard")}
        assert facts["placements"] == {(Replicate(), Shard(0))}
    for name, weight in ranks[0]["whole"].items():
        first, second, third, fourth = (facts["local"][name] for facts in ranks)
        assert torch.equal(first, third) and torch.equal(second, fourth)  # dp_shard is the inner axis
        assert torch.equal(torch.cat([first, second]), weight)


@pytest.mark.covers("mesh.dp_shard")
def test_uneven_shards_add_up() -> None:
    ranks = run(3, placements, saved_model("llama"), "3")
    assert ranks[0]["placements"] == {(Shard(0),)}
    for name, weight in ranks[0]["whole"].items():
        assert torch.equal(torch.cat([facts["local"][name] for facts in ranks]), weight)


# ---------------------------------------------------------------- readouts

RATE = 1e-2


def readouts(path: str, mesh: str, steps: int) -> list[tuple[list[int], dict[int, dict[str, Tensor]]]]:
    """(documents this rank was dealt, their readouts) before training and after `steps` steps."""
    engine = open_engine(path, mesh, step={"max_tokens_per_device": BUDGET}, optimizer={"name": "sgd"})
    documents, metas = to_documents(engine, DOCUMENTS)
    plan, out = engine.plan(metas), []
    local = {index: documents[index] for index in engine.planner.local_documents(plan)}
    for training in (False, True):
        for _ in range(steps if training else 0):
            engine.accumulate(plan, local, CrossEntropy())
            assert not engine.apply(RATE).skipped
        out.append((engine.planner.local_documents(plan), engine.readout(plan, local, ("logprob", "entropy"))))
    return out


@pytest.mark.parametrize("mesh", ["1", "2", "3"])
def test_readouts_are_the_references_in_document_order(mesh: str) -> None:
    path, steps = saved_model("llama"), 3
    ranks = run(int(mesh), readouts, path, mesh, steps)
    plain = reference.Reference(path)
    plain.start(reference_optimizer.Optimizer("sgd").over(plain.named()))
    for stage in (0, 1):
        dealt = [part for rank in ranks for part in rank[stage][0]]
        assert sorted(dealt) == list(range(len(DOCUMENTS)))
        for needs, values in (rank[stage] for rank in ranks):
            assert list(values) == needs
            for index, readout in values.items():
                logprob, entropy = plain.logprobs(DOCUMENTS[index][0])
                torch.testing.assert_close(readout["logprob"], logprob, rtol=2e-5, atol=2e-5)
                torch.testing.assert_close(readout["entropy"], entropy, rtol=2e-5, atol=2e-5)
        for _ in range(steps):
            plain.step(DOCUMENTS, RATE)


def read_in_between(path: str, mesh: str, reshard: bool) -> bool:
    """Whether two engines agree of which one reads out between backward and the update, and after it."""
    engines = [open_engine(path, mesh, fsdp={"reshard_after_forward": reshard}) for _ in range(2)]
    documents, metas = to_documents(engines[0], DOCUMENTS)
    plan = engines[0].plan(metas)
    for _ in range(2):
        for index, engine in enumerate(engines):
            engine.accumulate(plan, documents, CrossEntropy())
            before = engine.readout(plan, documents) if index else {}
            assert not engine.apply(RATE).skipped
            after = engine.readout(plan, documents) if index else {}
            assert not any(
                torch.equal(before[i]["logprob"], after[i]["logprob"]) for i in before if len(documents[i]) > 1
            )
    return same(*map(state_of, engines))


@pytest.mark.parametrize(("mesh", "reshard"), [("1", True), ("2", False)])
def test_reading_out_disturbs_no_step(mesh: str, reshard: bool) -> None:
    assert all(run(int(mesh), read_in_between, saved_model("llama"), mesh, reshard))


def inference(path: str, mesh: str) -> dict[str, Any]:
    """An engine for inference in bf16 beside a training engine on the same ranks."""
    trainer = open_engine(path, mesh)
    engine = open_engine(
        path, mesh, purpose="inference", fsdp={"param_dtype": "bf16"}, step={"max_tokens_per_device": 96}
    )
    documents, metas = to_documents(engine, DOCUMENTS)
    refusals = {}
    for name, call in {
        "accumulate": lambda: engine.accumulate(engine.plan(metas), documents, CrossEntropy()),
        "apply": lambda: engine.apply(1e-3),
        "drop_gradients": engine.drop_gradients,
    }.items():
        with pytest.raises(AssertionError) as refusal:
            call()
        refusals[name] = str(refusal.value)
    return {
        "optimizer": engine.optimizer,
        "refusals": refusals,
        "training": engine.module.training,
        "dtypes": {p.dtype for p in engine.module.parameters()},
        "gradients": any(p.requires_grad for p in engine.module.parameters()),
        "values": engine.readout(engine.plan(metas), documents),
        "exact": trainer.readout(trainer.plan(metas), documents),
    }


@pytest.mark.parametrize("mesh", ["1", "2"])
def test_an_engine_for_inference_reads_out_and_has_nothing_to_train_with(mesh: str) -> None:
    results = run(int(mesh), inference, saved_model("llama"), mesh)
    for rank in results:
        assert rank["optimizer"] is None
        assert not rank["training"]
        assert not rank["gradients"]
        assert rank["dtypes"] == {torch.bfloat16}
        assert all("inference" in text for text in rank["refusals"].values()), rank["refusals"]
    values = {index: v["logprob"] for rank in results for index, v in rank["values"].items()}
    exact = {index: v["logprob"] for rank in results for index, v in rank["exact"].items()}
    assert sorted(values) == sorted(exact) == list(range(len(DOCUMENTS)))
    actual, reference = (torch.cat([logprobs[i] for i in sorted(logprobs)]) for logprobs in (values, exact))
    assert float((actual - reference).norm()) < 0.02 * float(reference.norm())


# ---------------------------------------------------------------- steps that are not finite


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Copies of this rank's weights and optimizer state."""
    assert engine.optimizer is not None
    out = {}
    for name, parameter in engine.module.named_parameters():
        out[name] = parameter.detach().to_local().clone()
        for key, value in engine.optimizer.state[parameter].items():
            out[f"{name}.{key}"] = (value.to_local() if isinstance(value, DTensor) else value).clone()
    return out


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def one_step(engine: Engine, documents: dict[int, Document], objective: CrossEntropy | None = None) -> StepResult:
    plan = engine.plan(engine.planner.metadata(documents.values()))
    engine.accumulate(plan, documents, objective or CrossEntropy())
    return engine.apply(1e-3)


def poisoned(path: str, mesh: str, bad: int, weight: float) -> dict[str, Any]:
    """A good step, one with a document of this weight, a good step; beside it a run of the two good ones."""
    engines = [open_engine(path, mesh, step={"max_tokens_per_device": BUDGET}) for _ in range(2)]
    documents, metas = to_documents(engines[0], DOCUMENTS)
    for engine in engines:
        assert not one_step(engine, documents).skipped
    before = state_of(engines[0])
    spoilt = Document(documents[bad].tokens, torch.full_like(documents[bad].weights, weight))
    result = one_step(engines[0], {**documents, bad: spoilt})
    unchanged = same(before, state_of(engines[0]))
    gradients = [name for name, gradient in engines[0].gradients() if gradient is not None]
    for engine in engines:
        assert not one_step(engine, documents).skipped
    places = [
        (rank, micro + 1)
        for micro, rows in enumerate(engines[0].plan(metas).rows)
        for rank, row in enumerate(rows)
        if bad in row
    ]
    return {
        "result": result, "kept": unchanged, "gradients": gradients, "places": places,
        "moved": not same(before, state_of(engines[0])), "forgotten": same(*map(state_of, engines)),
    }  # fmt: skip


@pytest.mark.parametrize(("mesh", "weight"), [("2", float("inf")), ("2x2", float("nan")), ("3", 3e38)])
def test_a_step_that_is_not_finite_leaves_no_trace(mesh: str, weight: float) -> None:
    bad = 5
    ranks = run(world_of(mesh), poisoned, saved_model("llama"), mesh, bad, weight)
    assert len({rank["result"].reason for rank in ranks}) == 1
    for facts in ranks:
        assert facts["result"].skipped
        assert facts["kept"] and facts["moved"] and facts["forgotten"]
        assert facts["gradients"] == []
    ((failing_rank, micro),) = ranks[0]["places"]
    reason = ranks[0]["result"].reason
    assert reason.startswith(f"loss is not finite: rank {failing_rank}, micro-batch {micro}, documents ")
    assert str(bad) in reason.partition("documents ")[2].split(", ")


class BadGradient(CrossEntropy):
    """A loss that is finite on every rank, and a gradient that is not on the last."""

    def __call__(self, batch: Batch) -> LossOutput:
        terms = super().__call__(batch)
        if dist.get_rank() < dist.get_world_size() - 1:
            return terms
        zero = batch.readouts["logprob"].sum() * 0.0
        return LossOutput(terms.loss_sum + zero.square().sqrt(), terms.metrics)


def bad_gradient(path: str) -> tuple[StepResult, bool]:
    engine = open_engine(path, "2")
    documents, _ = to_documents(engine, DOCUMENTS)
    one_step(engine, documents)
    before = state_of(engine)
    return one_step(engine, documents, BadGradient()), same(before, state_of(engine))


def test_a_gradient_that_is_not_finite_is_dropped_on_all_ranks() -> None:
    (first, first_kept), (second, second_kept) = run(2, bad_gradient, saved_model("llama"))
    assert first_kept and second_kept
    assert first.skipped and second.skipped
    assert first.reason == second.reason
    assert "gradient" in first.reason and "model.embed_tokens.weight" in first.reason


# ---------------------------------------------------------------- fresh weights, flags


def fresh(path: str, mesh: str, seed: int) -> dict[str, Tensor]:
    return {
        name: tensor.clone() for name, tensor in open_engine(path, mesh, model={"init": "random"}, seed=seed).tensors()
    }


@pytest.mark.covers("model.init")
def test_random_weights_depend_on_the_seed_and_not_on_the_mesh(tmp_path: Path) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path)  # and no weights
    path = str(tmp_path)
    (single_rank,) = run(1, fresh, path, "1", 3)
    for weights in (*run(2, fresh, path, "2", 3), *run(2, fresh, path, "2x1", 3)):
        assert same(weights, single_rank)
    (other_seed,) = run(1, fresh, path, "1", 4)
    assert not torch.equal(other_seed["model.embed_tokens.weight"], single_rank["model.embed_tokens.weight"])
    assert not torch.equal(
        other_seed["model.layers.1.mlp.experts.down_proj"], single_rank["model.layers.1.mlp.experts.down_proj"]
    )


def deterministic(path: str) -> list[Any]:
    """(flag, gradients) of an engine that asks for deterministic algorithms, and of the next, which does not."""
    out = []
    for setting in (True, False):
        engine = open_engine(path, "2", deterministic=setting)
        documents, metas = to_documents(engine, DOCUMENTS)
        engine.accumulate(engine.plan(metas), documents, CrossEntropy())
        out.append((torch.are_deterministic_algorithms_enabled(), gradients_of(engine)))
    return out


@pytest.mark.covers("train.deterministic")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_deterministic_sets_torchs_flag_and_the_next_engine_its_own(family: str) -> None:
    for (on, strict), (off, loose) in run(2, deterministic, saved_model(family)):
        assert (on, off) == (True, False)
        assert same(strict, loose)
