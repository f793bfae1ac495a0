"""fsdp.cast_forward_inputs: who gets its inputs in the compute dtype, and who keeps them as the model made them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.cases import describe, open_engine, parity, parity_of_two_steps, saved_model
from tests.support.pool import run
from weft.engine.contract import check_contract
from weft.engine.describe import dtype_rows
from weft.engine.engine import Engine
from weft.engine.losses.base import CrossEntropy
from weft.errors import UserError
from weft.parallel.fsdp import InputCasts
from weft.verify.documents import awkward_steps
from weft.verify.harness import Verdict
from weft.verify.observed import to_documents

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_parity(family: str) -> None:
    sections = {"fsdp": {"cast_forward_inputs": ("model.layers.*", "lm_head")}, "model": {"recompute": "full"}}
    verdict = run(2, parity_of_two_steps, saved_model(family), "2", sections)[0]
    assert verdict.passed, describe(verdict)


def narrowed(path: str) -> Verdict | None:
    """Parity in fp32 where the hooks cast to bf16 all the same."""
    original = InputCasts.__init__

    def init(self: InputCasts, root: Any, patterns: Any, dtype: torch.dtype) -> None:
        original(self, root, patterns, BF16)

    with mock.patch.object(InputCasts, "__init__", init):
        return parity(path, "2", {"fsdp": {"cast_forward_inputs": ("model.embed_tokens", "*.mlp.act_fn")}})


def test_parity_sees_inputs_in_another_dtype() -> None:
    assert "gradients, every parameter" in run(2, narrowed, saved_model("llama"))[0].failed


# ---------------------------------------------------------------- effects


def step(engine: Engine) -> None:
    documents, metas = to_documents(engine, awkward_steps(128)[1])
    engine.accumulate(engine.plan(metas), documents, CrossEntropy())
    engine.apply(1e-3)


def inputs(path: str, patterns: tuple[str, ...]) -> tuple[dict[str, set[torch.dtype]], dict[str, str]]:
    """dtypes of the hidden states that each layer of a Mamba2 got, whose residual stream the model keeps in fp32."""
    engine = open_engine(path, "2", fsdp={"param_dtype": "bf16", "cast_forward_inputs": patterns})
    dtypes: dict[str, set[torch.dtype]] = {}
    for name, layer in engine.module.layers:

        def look(module: Any, args: Any, name: str = name) -> None:
            dtypes.setdefault(name, set()).update(a.dtype for a in args if isinstance(a, Tensor))

        layer.register_forward_pre_hook(look)
    step(engine)
    check_contract(engine)
    return dtypes, {row["use"]: row["note"] for row in dtype_rows(engine)}


@pytest.mark.covers("fsdp.cast_forward_inputs")
def test_inputs_of_the_named_modules_are_cast() -> None:
    path = saved_model("mamba2", residual_in_fp32=True)
    for dtypes, table in run(2, inputs, path, ()):
        assert dtypes == {"backbone.layers.0": {BF16}, "backbone.layers.1": {FP32}}
        assert "inputs" not in table
    for dtypes, table in run(2, inputs, path, ("backbone.layers.*",)):
        assert dtypes == {"backbone.layers.0": {BF16}, "backbone.layers.1": {BF16}}
        assert table["inputs"] == "cast for backbone.layers.*"


def test_tables_and_lists_are_cast_and_integers_are_not() -> None:
    module = torch.nn.ModuleDict({"a": torch.nn.Identity()})
    casts = InputCasts(module, ["a"], BF16)
    module["a"].forward = lambda *args, **kwargs: (args, kwargs)  # type: ignore[method-assign]
    ids = torch.ones(2, dtype=torch.long)
    args, kwargs = module["a"](ids, [torch.ones(1), (torch.ones(1, dtype=BF16), None)], table={"cos": torch.ones(1)})
    assert args[0] is ids
    assert (args[1][0].dtype, args[1][1][0].dtype, args[1][1][1]) == (BF16, BF16, None)
    assert kwargs["table"]["cos"].dtype == BF16
    assert casts.input_dtypes == {"a": {FP32, BF16}}


def nothing_to_cast(path: str) -> None:
    engine = open_engine(path, "1", fsdp={"cast_forward_inputs": ("model.embed_tokens",)})
    step(engine)
    with pytest.raises(UserError, match="model.embed_tokens got no floating-point input"):
        check_contract(engine)
    with pytest.raises(UserError, match=r"'model.layer.\*' matches no module; did you mean"):
        open_engine(path, "1", fsdp={"cast_forward_inputs": ("model.layer.*",)})


def test_what_has_no_effect_is_refused() -> None:
    run(1, nothing_to_cast, saved_model("llama"))
