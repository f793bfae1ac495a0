"""AdamW and SGD steps by hand, who is decayed in real families, and clipping on sharded gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.support import pool
from tests.support.zoo import tiny_config
from weft.config.schema import OptimizerConfig
from weft.engine.optim.groups import decays, describe_groups
from weft.engine.optim.optimizer import build_optimizer, clip_gradients, global_norm, set_learning_rate

# ---------------------------------------------------------------- decay


@pytest.mark.parametrize(
    ("name", "ndim", "expected"),
    [
        ("model.embed_tokens.weight", 2, True),
        ("lm_head.weight", 2, True),
        ("transformer.wpe.weight", 2, True),
        ("model.layers.0.mlp.experts.gate_up_proj", 3, True),
        ("transformer.h.0.attn.c_attn.weight", 2, True),  # GPT-2's Conv1D is a matrix
        ("vision.patch_embedding.conv.weight", 4, True),
        ("model.layers.0.conv.in_proj.weight", 2, True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", 2, False),
        ("model.layers.0.mlp.experts.down_proj_bias", 2, False),
        ("model.layers.1.mlp.gate.moe_statics.e_score_correction_bias", 2, False),
        ("model.layers.0.self_attn.q_norm.weight", 2, False),  # cohere: one row per head
        ("transformer.ln_f.weight", 1, False),
        ("transformer.h.0.ln_1.weight", 2, False),
        ("backbone.norm_f.weight", 1, False),
        ("model.layers.0.conv.conv.weight", 3, False),
        ("model.layers.0.temporal_block.conv_1d.weight", 3, False),
        ("backbone.layers.0.mixer.conv1d.weight", 3, False),
        ("backbone.layers.0.mixer.A_log", 2, False),
        ("model.layers.0.self_attn.sinks", 1, False),
        ("weight", 2, True),
        ("bias", 2, False),
    ],
)
def test_decay_rule(name: str, ndim: int, expected: bool) -> None:
    assert decays(name, ndim) is expected


_ATTENTION = "q_proj.weight k_proj.weight v_proj.weight o_proj.weight"
_MLP = "gate_proj.weight up_proj.weight down_proj.weight"
# family -> last two name parts of what is decayed, and of what is not
_SNAPSHOTS = {
    "llama": (
        f"embed_tokens.weight {_ATTENTION} {_MLP} lm_head.weight",
        "input_layernorm.weight post_attention_layernorm.weight norm.weight",
    ),
    "gemma2": (
        f"embed_tokens.weight {_ATTENTION} {_MLP}",
        "input_layernorm.weight post_attention_layernorm.weight pre_feedforward_layernorm.weight "
        "post_feedforward_layernorm.weight norm.weight",
    ),
    "gpt_oss": (
        f"embed_tokens.weight {_ATTENTION} router.weight experts.gate_up_proj experts.down_proj lm_head.weight",
        "self_attn.sinks q_proj.bias k_proj.bias v_proj.bias o_proj.bias router.bias experts.gate_up_proj_bias "
        "experts.down_proj_bias input_layernorm.weight post_attention_layernorm.weight norm.weight",
    ),
    "mamba2": (
        "embeddings.weight in_proj.weight out_proj.weight lm_head.weight",
        "norm.weight mixer.dt_bias mixer.A_log mixer.D conv1d.weight conv1d.bias norm_f.weight",
    ),
    "lfm2": (
        "embed_tokens.weight in_proj.weight out_proj.weight w1.weight w3.weight w2.weight "
        "q_proj.weight k_proj.weight v_proj.weight",
        "conv.weight operator_norm.weight ffn_norm.weight q_layernorm.weight k_layernorm.weight embedding_norm.weight",
    ),
    "gpt2": (
        "wte.weight wpe.weight c_attn.weight c_proj.weight c_fc.weight",
        "ln_1.weight ln_1.bias c_attn.bias c_proj.bias ln_2.weight ln_2.bias c_fc.bias ln_f.weight ln_f.bias",
    ),
    "qwen3_next": (
        f"embed_tokens.weight in_proj_qkvz.weight in_proj_ba.weight out_proj.weight gate.weight experts.gate_up_proj "
        f"experts.down_proj {_MLP} shared_expert_gate.weight {_ATTENTION} lm_head.weight",
        "linear_attn.dt_bias linear_attn.A_log conv1d.weight norm.weight input_layernorm.weight "
        "post_attention_layernorm.weight q_norm.weight k_norm.weight",
    ),
}


@pytest.mark.parametrize("family", _SNAPSHOTS)
def test_groups_of_real_families(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    named = list(model.named_parameters())
    rows = describe_groups(named, OptimizerConfig(weight_decay=0.3))
    for row, expected in zip(rows, _SNAPSHOTS[family], strict=True):
        assert {".".join(name.split(".")[-2:]) for name in row.examples} == set(expected.split())
    assert sum(row.elements for row in rows) == sum(p.numel() for _, p in named)
    assert [row.weight_decay for row in rows] == [0.3, 0.0]


def test_describe_groups_counts_what_trains_and_what_does_not() -> None:
    layers = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    layers[0].weight.requires_grad_(False)
    rows = describe_groups(layers.named_parameters(prefix="layers"), OptimizerConfig())
    counted = [(r.name, r.parameters, r.elements) for r in rows]
    assert counted == [("decayed", 1, 6), ("not decayed", 2, 4), ("frozen", 1, 6)]
    assert [r.examples for r in rows] == [("*.weight",), ("*.bias",), ("*.weight",)]


# ---------------------------------------------------------------- steps by hand


def two_steps(**keys: Any) -> tuple[float, float]:
    """A decayed and an undecayed weight, both 1, after gradients 2 and -1 at lr 0.1 and decay 0.5."""
    weight, bias = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1))
    named = [("layer.weight", weight), ("layer.bias", bias), ("layer.unused", nn.Parameter(torch.ones(1, 1)))]
    optimizer = build_optimizer(named, OptimizerConfig(lr=123.0, weight_decay=0.5, **keys))
    set_learning_rate(optimizer, 0.1)
    for gradient in (2.0, -1.0):
        weight.grad, bias.grad = torch.full((1, 1), gradient), torch.full((1,), gradient)
        optimizer.step()
    assert named[2][1].item() == 1.0 and named[2][1] not in optimizer.state  # no gradient: neither moved nor decayed
    return weight.item(), bias.item()


@pytest.mark.covers("optimizer.weight_decay", "optimizer.betas")
def test_adamw_by_hand() -> None:
    # Step 1: m = 0.2, v = 0.2, m^ = 2, v^ = 4, so the move is -0.1 x 2 / 2; the weight first shrinks by 1 - 0.1 x 0.5.
    # Step 2: m = 0.08, v = 0.24, m^ = 0.08 / 0.19, v^ = 0.24 / 0.0975, so the move is -0.1 x 0.2683695.
    decayed, undecayed = two_steps(betas=(0.9, 0.95), eps=1e-8)
    assert decayed == pytest.approx(0.95 * (0.95 - 0.1) - 0.02683695, abs=1e-6)
    assert undecayed == pytest.approx(0.9 - 0.02683695, abs=1e-6)


@pytest.mark.covers("optimizer.eps")
def test_adamw_eps_is_outside_the_root() -> None:
    decayed, undecayed = two_steps(betas=(0.0, 0.0), eps=1.0)  # m^ = g, v^ = g^2: moves of -0.1 x g / (|g| + 1)
    assert decayed == pytest.approx((0.95 - 0.1 * 2 / 3) * 0.95 + 0.1 / 2, abs=1e-6)
    assert undecayed == pytest.approx(1 - 0.1 * 2 / 3 + 0.1 / 2, abs=1e-6)


def test_sgd_by_hand() -> None:
    # 1 - 0.1 (2 + 0.5) = 0.75, then 0.75 - 0.1 (-1 + 0.375) = 0.8125; without decay 1 - 0.2 + 0.1.
    assert two_steps(name="sgd") == pytest.approx((0.8125, 0.9), abs=1e-6)


@pytest.mark.covers("optimizer.momentum")
def test_sgd_with_momentum_by_hand() -> None:
    # Buffers 2.5 then 0.9 x 2.5 - 0.625 = 1.625; without decay 2 then 0.8.
    assert two_steps(name="sgd", momentum=0.9) == pytest.approx((0.5875, 0.72), abs=1e-6)


def test_state_has_the_parameters_dtype() -> None:
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = build_optimizer([("weight", weight)], OptimizerConfig())
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype == torch.bfloat16


# ---------------------------------------------------------------- clipping, one process


def parameters_with(*gradients: Tensor | None) -> list[tuple[str, nn.Parameter]]:
    named = []
    for i, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(1) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = gradient
        named.append((f"p{i}", parameter))
    return named


@pytest.mark.covers("optimizer.max_grad_norm")
def test_clip_by_hand() -> None:
    named = parameters_with(torch.tensor([3.0, 0.0]), None, torch.tensor([[0.0], [4.0]]))
    assert clip_gradients(named, 1.0) == 5.0
    assert named[0][1].grad is not None and named[2][1].grad is not None
    assert named[0][1].grad.tolist() == pytest.approx([3 / 5.000001, 0.0])
    assert named[2][1].grad.flatten().tolist() == pytest.approx([0.0, 4 / 5.000001])


@pytest.mark.parametrize("max_norm", [None, 5.1])
def test_no_clipping_below_the_limit(max_norm: float | None) -> None:
    named = parameters_with(torch.tensor([3.0, 4.0]))
    assert clip_gradients(named, max_norm) == 5.0
    assert named[0][1].grad is not None and named[0][1].grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_clips_nothing(bad: float) -> None:
    named = parameters_with(torch.tensor([3.0, bad]), torch.tensor([4.0]))
    assert not math.isfinite(clip_gradients(named, 1.0))
    assert named[1][1].grad is not None and named[1][1].grad.item() == 4.0


def test_a_norm_with_large_elements_among_small_ones() -> None:
    """One accumulator in fp32 would lose the small ones: 2e-5 of the norm over 2^16 elements (torch 2.13 on a CPU)."""
    parameter = nn.Parameter(torch.zeros(1 << 18))
    parameter.grad = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    parameter.grad[::65536] *= 3000
    exact = float(parameter.grad.double().norm())
    assert abs(global_norm([("weight", parameter)]) / exact - 1) < 4e-6


def test_nothing_to_clip() -> None:
    assert clip_gradients([], 1.0) == 0.0
    assert clip_gradients(parameters_with(None), 1.0) == 0.0
    assert clip_gradients(parameters_with(torch.zeros(0, 3)), 1.0) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_clip_equals_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(shape).to(dtype) for shape in ((7, 5), (3,), (2, 3, 4), (5, 7))]
    gradients[3] = gradients[3].t()  # not contiguous
    parameters, reference = (
        parameters_with(*[g.clone() for g in gradients]),
        parameters_with(*[g.double() for g in gradients]),
    )
    expected = torch.nn.utils.clip_grad_norm_([p for _, p in reference], 0.5).item()
    assert clip_gradients(parameters, 0.5) == pytest.approx(expected, rel=1e-6)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float64: 1e-6}[dtype]
    for (_, p), (_, q) in zip(parameters, reference, strict=True):
        assert p.grad is not None and q.grad is not None and p.grad.dtype == dtype
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=tolerance, atol=1e-9)


def test_mixed_dtypes() -> None:
    named = parameters_with(torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16))
    assert clip_gradients(named, None) == 5.0


def test_the_norm_of_a_large_tensor() -> None:
    # torch's own fp32 norm is 4e-4 too small here, and 1e-2 at ten times the size.
    torch.manual_seed(0)
    gradient = torch.randn(10_000_000)
    exact = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
    assert clip_gradients(parameters_with(gradient), None) == pytest.approx(exact, rel=1e-6)


# ---------------------------------------------------------------- clipping and steps, sharded


class Small(nn.Module):
    """A matrix that divides by nothing, one with fewer rows than ranks, biases, a norm, and a parameter out of use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.second = nn.Linear(7, 2)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(torch.tanh(self.first(x))))  # type: ignore[no-any-return]


def small_model(names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[Small, Small]:
    """The same model twice, with gradients: sharded over a mesh of this shape, and plain."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain, sharded = Small(), Small()
    sharded.load_state_dict(plain.state_dict())
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for unit in (sharded.first, sharded.second, sharded.unused, sharded):
        fully_shard(unit, mesh=mesh)
    x = torch.randn(4, 5)
    for model in (plain, sharded):
        (3.0 * model(x).square().sum()).backward()
    return sharded, plain


def full_value(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip_and_step(names: tuple[str, ...], shape: tuple[int, ...], optimizer: str) -> None:
    """On every rank: norm, clipped gradients and two optimizer steps equal those of torch on the plain model."""
    sharded, plain = small_model(names, shape)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.7, foreach=False).item()
    assert expected > 0.7
    assert clip_gradients(sharded.named_parameters(), 0.7) == pytest.approx(expected, rel=1e-6)
    assert clip_gradients(sharded.named_parameters(), None) == pytest.approx(0.7, rel=1e-5)

    config = OptimizerConfig(name=optimizer, lr=0.01, weight_decay=0.2, momentum=0.9)  # type: ignore[arg-type]
    weft_optimizer = build_optimizer(sharded.named_parameters(), config)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.2},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), foreach=False)
        if optimizer == "adamw"
        else torch.optim.SGD(groups, lr=0.01, momentum=0.9, foreach=False)
    )
    for _ in range(2):
        weft_optimizer.step()
        reference.step()
    for (name, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None and p not in weft_optimizer.state, name
        else:
            assert p.grad is not None
            torch.testing.assert_close(full_value(p.grad), q.grad, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(full_value(p.detach()), q.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2), (4, 1), (1, 2)])
def test_sharded_clip_and_step(shape: tuple[int, ...], optimizer: str) -> None:
    names = ("dp_shard",) if len(shape) == 1 else ("dp_replicate", "dp_shard")
    pool.run(math.prod(shape), clip_and_step, names, shape, optimizer)


def clip_on_several_meshes(max_norm: float) -> float:
    """Four ranks, gradients on a mesh of 4, on one of 2 x 2 in five ways, on its second axis alone, and plain ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    cases: list[Any] = [
        (line, [Shard(0)]),
        (line, [Replicate()]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(0), Replicate()]),
        (grid, [Shard(0), Shard(1)]),
        (grid, [Shard(0), Shard(0)]),
        (grid, [Replicate(), Replicate()]),
        (grid["b"], [Shard(1)]),
        None,
    ]
    torch.manual_seed(0)
    parameters, full = [], []
    for i, case in enumerate(cases):
        value, gradient = torch.randn(5, 3), torch.randn(5, 3)
        full.append(gradient)
        if case is None:
            parameter, parameter_grad = nn.Parameter(value), gradient.clone()
        else:
            parameter = nn.Parameter(distribute_tensor(value, *case))
            parameter_grad = distribute_tensor(gradient.clone(), *case)  # a replica would share its memory
        parameter.grad = parameter_grad
        parameters.append((f"p{i}.weight", parameter))
    expected = torch.cat([g.flatten() for g in full]).norm().item()
    norm = clip_gradients(parameters, max_norm)
    assert norm == pytest.approx(expected, rel=1e-6)
    for (name, p), gradient in zip(parameters, full, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(full_value(p.grad), gradient * min(1.0, max_norm / (expected + 1e-6)), msg=name)
    for name in ("adamw", "sgd"):
        build_optimizer(parameters, OptimizerConfig(name=name)).step()  # type: ignore[arg-type]
    return norm


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_clip_on_several_meshes(max_norm: float) -> None:
    assert len(set(pool.run(4, clip_on_several_meshes, max_norm))) == 1


def clip_where_one_rank_is_bad() -> tuple[bool, bool]:
    sharded, _ = small_model(("dp_shard",), (2,))
    import torch.distributed as dist

    gradient = sharded.first.weight.grad
    assert gradient is not None
    local = gradient.to_local()  # type: ignore[attr-defined]
    if dist.get_rank() == 1:
        local[0, 0] = math.nan
    before = local.clone()
    finite = math.isfinite(clip_gradients(sharded.named_parameters(), 1e-3))
    return finite, torch.equal(local.nan_to_num(), before.nan_to_num())


def test_all_ranks_see_a_bad_gradient_of_one() -> None:
    assert pool.run(2, clip_where_one_rank_is_bad) == [(False, True)] * 2
