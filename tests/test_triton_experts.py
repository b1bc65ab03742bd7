"""The Triton kernels of the layer op, under the interpreter: the same code that a GPU compiles, on tensors of the CPU.

Every call runs on scratch full of NaN: what a stage reads without an earlier one having written it reaches the result.
"""

from __future__ import annotations

from typing import Any, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moelora_ops.kernels import config
from moelora_ops.kernels.triton import experts
from moelora_ops.testing.cases import CASES, MODELS, Case, Inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import assert_bitwise, assert_delta_close, exact_experts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels")

TINY = Case("tiny", num_tokens=5, num_experts=4, hidden_size=24, intermediate_size=20, max_loras=2, ranks=(3, 16))
SEVERAL_TILES = [
    Case("segments-in-one-block", num_tokens=14, num_experts=1, top_k=1, max_loras=5, adapters="distinct"),
    Case("segments-across-blocks", num_tokens=37, num_experts=1, top_k=1, max_loras=2, adapters="zipf"),
    Case("split-k", num_tokens=2, num_experts=2, top_k=1, hidden_size=291, intermediate_size=70),
    Case("rank-tiles", num_tokens=3, num_experts=2, max_lora_rank=96, ranks=(96, 33, 32)),
]


def launch(inputs: Inputs, *, adapters: bool = True, **changes: Any) -> Tensor:
    args, kwargs = inputs.experts(adapters=adapters)
    return experts.fused_experts_lora(*args, **{**kwargs, **changes})


def check(case: Case) -> None:
    """Base and delta against the fp64 reference, with NaN wherever no result may look."""
    inputs = case.make()
    poisoned = inputs.poisoned()
    base, want_base = launch(poisoned, adapters=False), exact_experts(inputs, adapters=False)
    assert_close(base, want_base, TOLERANCES[case.dtype], what="base")
    assert_delta_close(launch(poisoned), base, exact_experts(inputs), want_base)


def assert_redone_close(actual: Tensor, expected: Tensor) -> None:
    """Rows of tiles done again, 16 columns a step and not 64, are the same but for their last bits.

    A tensor core adds 64 products as four times 16, so tests/gpu compares bits; the interpreter's matmul rounds differently.
    """
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Uninitialised floats are NaN; yields what was allocated, the output (and the interpreter's copies) apart."""
    allocated: list[Tensor] = []

    def poison(allocate: Any, record: list[Tensor]) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Tensor:
            tensor: Tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and tensor.numel():
                record.append(tensor.fill_(torch.nan))
            return tensor

        return wrapped

    monkeypatch.setattr(torch, "empty", poison(torch.empty, allocated))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like, []))
    monkeypatch.setattr(Tensor, "new_empty", poison(Tensor.new_empty, allocated))
    yield allocated


@pytest.mark.parametrize("case", [*CASES, *SEVERAL_TILES], ids=str)
def test_base_and_delta_match_the_reference(case: Case) -> None:
    """out and its change by the adapters are the formula's, for each case."""
    check(case)


@pytest.mark.parametrize("case", [TINY, TINY.like(bias=True, num_tokens=3)], ids=["plain", "bias"])
def test_half_precision(case: Case) -> None:
    """fp16 accumulates in fp32. (The interpreter computes bf16 wrongly; tests/gpu has it.)"""
    check(case.like(dtype=torch.float16))


@pytest.mark.parametrize("name", ["gpt-oss-20b", "llama-4-scout", "mixtral-8x7b", "nemotron-3-nano"])
def test_structure_of_real_models(name: str) -> None:
    """Activation, gating, layout, biases and scaling as real models combine them."""
    check(MODELS[name].scaled_down().like(dtype=torch.float32, num_tokens=3, num_experts=8))


@pytest.mark.parametrize("limit", [None, 0.4])
@pytest.mark.parametrize("gated, interleaved", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2", "swigluoai"])
def test_activations(activation: str, gated: bool, interleaved: bool, limit: float | None) -> None:
    """Each activation in each layout, with and without a limit."""
    if activation == "swigluoai" and not gated:
        return  # refused by the checks
    check(TINY.like(num_tokens=2, activation=activation, gated=gated, interleaved=interleaved, swiglu_limit=limit))


@pytest.mark.parametrize("projection", ["gate_up", "down"])
def test_adapters_on_one_projection(projection: str) -> None:
    """A pair of None leaves that projection alone and launches nothing for it."""
    inputs = TINY.like(num_tokens=4, adapters="uniform").make()
    missing = ("lora_a2", "lora_b2") if projection == "gate_up" else ("lora_a13", "lora_b13")
    inputs = inputs.replace(**dict.fromkeys(missing))
    base, want_base = launch(inputs, adapters=False), exact_experts(inputs, adapters=False)
    assert_delta_close(launch(inputs), base, exact_experts(inputs), want_base)


@pytest.mark.parametrize("rank", [1, 4, 8, 12, 20, 24, 48, 160, 256])
def test_ranks(rank: int) -> None:
    """Any rank of pool and adapter."""
    check(TINY.like(num_tokens=2, num_experts=2, adapters="uniform", max_lora_rank=rank, ranks=(rank, max(rank - 1, 1))))


def test_ranks_are_clamped() -> None:
    """A rank beyond the pool's or below zero reads nothing out of bounds, where NaN stands."""
    inputs = TINY.like(adapters="distinct", strided=True).make()
    got = launch(inputs.replace(lora_ranks=torch.tensor([17, -5], dtype=torch.int32)))
    assert got.isfinite().all()
    assert_bitwise(got, launch(inputs.replace(lora_ranks=torch.tensor([16, 0], dtype=torch.int32))))


def test_no_adapter_is_the_base_bit_for_bit() -> None:
    """All -1, all disabled, no slots, no ranks of their own: the same bits and, without slots, the same launches."""
    inputs = TINY.make()
    base = launch(inputs, adapters=False)
    nobody = torch.full_like(inputs.token_lora_mapping, -1)
    assert_bitwise(launch(inputs.replace(token_lora_mapping=nobody)), base, "all -1")
    assert_bitwise(launch(inputs, adapter_enabled=torch.zeros(2, dtype=torch.bool)), base, "all disabled")
    assert_bitwise(launch(inputs, lora_ranks=torch.zeros(2, dtype=torch.int32)), base, "rank 0")
    pool = {name: getattr(inputs, name)[:0] for name in ("lora_a13", "lora_b13", "lora_a2", "lora_b2")}
    assert_bitwise(launch(inputs.replace(**pool), lora_ranks=None), base, "no slots")


@pytest.mark.parametrize("block_m", [None, 64])
@pytest.mark.parametrize("weight_on_input", [False, True])
def test_rows_without_adapter_keep_their_bits(
    weight_on_input: bool, block_m: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a block shared with adapters whose B is NaN, rows of -1 and of other adapters are as if alone.

    Small tiles are done again where they are, large ones by a kernel of their own.
    """
    if block_m is not None:
        gemm, shrink = config.Gemm(block_m, 16, 16, 4, 1, tail_m=16), config.Shrink(16, 1, 4, 1)
        tiles = config.Experts(gemm, gemm, shrink, shrink, segment_m=16, combine_n=16)
        monkeypatch.setattr(config, "experts", lambda problem, device: tiles)
        monkeypatch.setattr(experts, "_PLANS", {})
    case = TINY.like(num_tokens=12, num_experts=1, top_k=1, bias=True, apply_router_weight_on_input=weight_on_input)
    inputs = case.make()
    clean, base = launch(inputs), launch(inputs, adapters=False)
    slots = torch.tensor(inputs.slots())
    assert {-1, 0, 1} == set(slots.tolist())
    inputs.lora_b13[0], inputs.lora_b2[0] = torch.nan, torch.inf
    got = launch(inputs)
    assert_bitwise(got[slots == -1], base[slots == -1], "base rows")
    assert_redone_close(got[slots == 1], clean[slots == 1])
    assert not got[slots == 0].isfinite().all(1).any()


def test_nan_stays_in_its_row() -> None:
    """A NaN in one token's input reaches that token alone."""
    inputs = TINY.like(num_experts=2, adapters="one").make()
    clean = launch(inputs)
    inputs.hidden_states[2] = torch.nan
    got, others = launch(inputs), torch.arange(5) != 2
    assert got[2].isnan().all()
    assert_redone_close(got[others], clean[others])


def test_same_call_gives_the_same_bits() -> None:
    """Twice the same, with a sum of splits in it."""
    inputs = SEVERAL_TILES[2].make()
    assert_bitwise(launch(inputs), launch(inputs))


def test_scratch_is_bounded_by_pairs(poisoned_scratch: list[Tensor]) -> None:
    """One buffer of act [P, I], rows [P, H], z of both projections and tables, two of them in one place: see `Plan`."""
    case = TINY.like(num_experts=16, max_loras=9, ranks=())
    inputs = case.make()
    del poisoned_scratch[:]
    launch(inputs)
    *compiled_with, scratch, out = poisoned_scratch
    assert [tuple(t.shape) for t in compiled_with] in ([], [(16,)])
    assert out.shape == (case.num_tokens, case.hidden_size)
    p, rank = case.num_pairs, case.max_lora_rank
    floats = p * (case.intermediate_size + max(2 * rank, rank + case.hidden_size))
    tables = 4 + p * (1 + 2 + 3 + 4 + 1)
    assert (floats + tables) * 4 <= scratch.numel() * 4 <= (floats + tables) * 4 + 4 * 256


def test_any_configuration_gives_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of all sizes, splits of K, and segment blocks wider or narrower than expert blocks."""
    gemm, wide, shrink = config.Gemm(16, 16, 16, 4, 1), config.Gemm(32, 64, 64, 4, 1), config.Shrink(16, 3, 4, 1)
    case = Case("configured", num_tokens=18, num_experts=2, hidden_size=50, intermediate_size=34, max_loras=2)
    for tiles in (
        config.Experts(gemm, gemm, shrink, shrink, segment_m=32, combine_n=16),
        config.Experts(wide, wide, shrink, shrink, segment_m=16, combine_n=64),
    ):
        monkeypatch.setattr(config, "experts", lambda problem, device, tiles=tiles: tiles)
        monkeypatch.setattr(experts, "_PLANS", {})
        check(case)


def test_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short last block of an expert goes through the smaller tile, a longer one through the whole."""
    gemms = (config.Gemm(64, 16, 32, 4, 2, tail_m=16), config.Gemm(64, 32, 32, 4, 2, tail_m=32))
    tiles = config.Experts(*gemms, config.Shrink(32, 1, 4, 2), config.Shrink(32, 1, 4, 2), segment_m=16, combine_n=32)
    monkeypatch.setattr(config, "experts", lambda problem, device: tiles)
    monkeypatch.setattr(experts, "_PLANS", {})
    for num_tokens in (11, 60, 77, 90):
        check(TINY.like(num_tokens=num_tokens, num_experts=1, top_k=1))


DIRECT = TINY.like(num_tokens=2, num_experts=16, top_k=2)


@pytest.mark.parametrize(
    "case",
    [
        DIRECT,
        DIRECT.like(num_tokens=1, adapters="none"),
        DIRECT.like(bias=True, activation="swigluoai", swiglu_limit=0.5, interleaved=True),
        DIRECT.like(gated=False, activation="relu2", routed_scaling_factor=2.5),
        DIRECT.like(apply_router_weight_on_input=True, shared_outer=True),
        DIRECT.like(num_global_experts=40, stray_ids=True, ids_dtype=torch.int64, disabled=(1,)),
        DIRECT.like(strided=True, bias=True, max_lora_rank=21, ranks=(3, 21)),
        DIRECT.like(max_lora_rank=160, ranks=(160, 65)),
        DIRECT.like(max_lora_rank=64, ranks=(64, 8), dtype=torch.float16),
    ],
    ids=["plain", "nobody", "gpt-oss", "ungated", "weight-on-input", "stray", "strided", "wide", "half"],
)
def test_few_pairs_need_no_routing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block for each pair, three launches: values, and the base's bits without an adapter."""
    monkeypatch.setattr(experts, "route", None)
    monkeypatch.setattr(experts, "_PLANS", {})
    check(case)
    inputs = case.make()
    nobody = inputs.replace(token_lora_mapping=torch.full_like(inputs.token_lora_mapping, -1))
    assert_bitwise(launch(nobody), launch(inputs, adapters=False))
    assert all(type(plan) is experts.DirectPlan for plan in experts._PLANS.values())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("group_m, merged", [(1, False), (3, False), (3, True)])
def test_copy_engine(interleaved: bool, group_m: int, merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights by descriptors, in grouped order, gate and up merged or not, at sizes that no tile divides."""
    more = {"tail_m": 16, "merged": True} if merged else {}
    gemms = (config.Gemm(64 if merged else 16, n, 32, 4, 2, group_m, True, **more) for n in (16, 32))
    tiles = config.Experts(*gemms, config.Shrink(32, 1, 4, 2), config.Shrink(32, 1, 4, 2), segment_m=16, combine_n=256)
    monkeypatch.setattr(config, "experts", lambda problem, device: tiles)
    monkeypatch.setattr(experts, "_PLANS", {})
    case = TINY.like(
        num_tokens=20, top_k=2, hidden_size=72, intermediate_size=40, max_loras=3, max_lora_rank=24, ranks=(3, 24, 16),
        interleaved=interleaved, dtype=torch.float16,
    )  # fmt: skip
    check(case)
    plans = experts._PLANS.values()
    assert all(plan.w13_descriptor and plan.w2_descriptor and plan.merged == merged for plan in plans)
