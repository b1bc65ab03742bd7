"""The public op fused_experts_lora: the whole expert layer with each token's adapter inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from moelora_ops.testing.cases import CASES, MODELS, Case, Inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import assert_bitwise, assert_delta_close, exact_experts
from moelora_ops.testing.strategies import DTYPES, cases, judged, seeds

SMALL_MODELS = [model.scaled_down() for model in MODELS.values()]


def run(inputs: Inputs, *, adapters: bool = True, **changes: Any) -> Tensor:
    args, kwargs = inputs.experts(adapters=adapters)
    result: Tensor = torch.ops.moelora.fused_experts_lora(*args, **{**kwargs, **changes})
    return result


def check(inputs: Inputs) -> None:
    """Base and delta, each against the fp64 reference."""
    base, want_base = run(inputs, adapters=False), exact_experts(inputs, adapters=False)
    assert_close(base, want_base, TOLERANCES[inputs.case.dtype], what="base")
    assert_delta_close(run(inputs), base, exact_experts(inputs), want_base)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *SMALL_MODELS], ids=str)
def test_base_and_delta_match_the_reference(case: Case, dtype: torch.dtype) -> None:
    """out and its change by the adapters are the formula's, for each case and dtype."""
    check(case.like(dtype=dtype).make())


@given(cases(), seeds)
@settings(max_examples=150, deadline=None)
def test_any_arguments_match_the_reference(case: Case, seed: int) -> None:
    """The same for every combination of options, popularities, ranks, stray ids and layouts."""
    with judged():
        check(case.make(seed=seed))


@given(cases(), seeds)
@settings(max_examples=60, deadline=None)
def test_base_rows_keep_their_bits(case: Case, seed: int) -> None:
    """Rows without an adapter in a mixed batch are bitwise those of the call without adapters."""
    inputs = case.make(seed=seed)
    base = torch.tensor([slot < 0 for slot in inputs.slots()], dtype=torch.bool)
    assert_bitwise(run(inputs)[base], run(inputs, adapters=False)[base])


@given(cases(), seeds)
@settings(max_examples=40, deadline=None)
def test_ways_to_have_no_adapter(case: Case, seed: int) -> None:
    """No adapters, all -1, all out of range and all disabled are the same bits."""
    inputs = case.make(seed=seed)
    want, mapping = run(inputs, adapters=False), inputs.token_lora_mapping
    for name, ids in (("-1", -1), ("L", case.max_loras), ("far", 2**31 - 1), ("below", -5)):
        assert_bitwise(run(inputs.replace(token_lora_mapping=torch.full_like(mapping, ids))), want, f"mapping all {name}")
    for flags in (torch.int32, torch.bool):
        assert_bitwise(run(inputs, adapter_enabled=torch.zeros(case.max_loras, dtype=flags)), want, f"all disabled ({flags})")


@given(cases(), seeds)
@settings(max_examples=60, deadline=None)
def test_reads_nothing_that_is_not_its_own(case: Case, seed: int) -> None:
    """NaN in unused slots and experts, past each slot's rank and in rows that no expert takes changes no bit."""
    inputs = case.like(stray_ids=True).make(seed=seed)
    clean = run(inputs)
    assert not clean.isnan().any()
    assert_bitwise(run(inputs.poisoned()), clean)


@given(cases(), seeds)
@settings(max_examples=40, deadline=None)
def test_nan_stays_in_its_row(case: Case, seed: int) -> None:
    """A NaN in one token's input reaches that token's output and no other."""
    case = case.like(num_tokens=max(case.num_tokens, 2))
    inputs = case.make(seed=seed)
    clean, victim = run(inputs), seed % case.num_tokens
    inputs.hidden_states[victim] = torch.nan
    others = torch.arange(case.num_tokens) != victim
    got = run(inputs)
    assert_bitwise(got[others], clean[others])
    served = max(inputs.local_experts()[victim]) >= 0
    assert got[victim].isnan().all() if served else not got[victim].any()


@given(cases(), seeds)
@settings(max_examples=25, deadline=None)
def test_same_call_gives_the_same_bits(case: Case, seed: int) -> None:
    """Two calls on the same inputs agree in every bit."""
    inputs = case.make(seed=seed)
    assert_bitwise(run(inputs), run(inputs))


@given(cases(), seeds)
@settings(max_examples=25, deadline=None)
def test_inputs_are_only_read(case: Case, seed: int) -> None:
    """Every input keeps its bits; the output is fresh, contiguous, of the input's shape and dtype."""
    inputs = case.make(seed=seed)
    tensors = {k: v for k, v in vars(inputs).items() if isinstance(v, Tensor)}
    before = {k: v.clone() for k, v in tensors.items()}
    out = run(inputs)
    for name, tensor in tensors.items():
        assert_bitwise(tensor, before[name], name)
    assert out.is_contiguous() and out.shape == inputs.hidden_states.shape and out.dtype == case.dtype
    assert not out.numel() or out.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in tensors.values()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch_mates(dtype: torch.dtype) -> None:
    """A token alone gets what it gets in the batch, whatever path the batch size chooses."""
    inputs = Case("mates", num_tokens=70, num_experts=4, dtype=dtype, ranks=(16, 3, 8)).make()

    def rows(adapters: bool) -> Tensor:
        ones = []
        for t in range(70):
            at = {k: getattr(inputs, k)[t : t + 1] for k in ("hidden_states", "topk_ids", "topk_weights", "token_lora_mapping")}
            ones.append(run(inputs.replace(**at), adapters=adapters))
        return torch.cat(ones)

    # Base rows may differ by the tile choice, so the two bases are compared by value and only then taken off.
    alone, batch = (rows(True), rows(False)), (run(inputs), run(inputs, adapters=False))
    assert_close(alone[1], batch[1], TOLERANCES[dtype], what="base")
    adapted = torch.tensor([slot >= 0 for slot in inputs.slots()])
    delta = (batch[0].double() - batch[1].double())[adapted]
    assert_close((alone[0].double() - alone[1].double())[adapted], delta, TOLERANCES[dtype], what="delta")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 130])
def test_each_number_of_rows(num_tokens: int, dtype: torch.dtype) -> None:
    """Every batch size, so every tile and path that depends on it."""
    case = Case("rows", num_experts=4, hidden_size=72, intermediate_size=56, bias=True)
    check(case.like(num_tokens=num_tokens, dtype=dtype).make())


@pytest.mark.parametrize("rank", [1, 4, 8, 12, 20, 24, 48, 96, 128, 160, 256])
def test_each_rank(rank: int) -> None:
    """Any rank is served, alone and as one of several in a larger pool."""
    check(Case("rank", max_lora_rank=rank).make())
    check(Case("rank-in-pool", max_lora_rank=256, ranks=(rank, 256, 1)).make())


@pytest.mark.parametrize("kept", ["13", "2"])
def test_adapters_on_one_projection(kept: str) -> None:
    """With one pair of None only the other projection has a delta."""
    inputs = Case("one-sided", ranks=(16, 4, 9)).make()
    gone = {"13": ("lora_a2", "lora_b2"), "2": ("lora_a13", "lora_b13")}[kept]
    zeros = inputs.replace(**{name: torch.zeros_like(getattr(inputs, name)) for name in gone})
    none = inputs.replace(**dict.fromkeys(gone))
    assert_delta_close(run(none), run(inputs, adapters=False), exact_experts(zeros), exact_experts(inputs, adapters=False))


def test_gate_and_up_have_their_own_a() -> None:
    """Exchanging the two A's, or using one for both halves, changes the result by the size of the delta."""
    inputs = Case("halves", adapters="one").make()
    gate, up = inputs.lora_a13.chunk(2, dim=2)
    base, right = run(inputs, adapters=False), run(inputs)
    for wrong_a in (torch.cat([gate, gate], 2), torch.cat([up, up], 2), torch.cat([up, gate], 2)):
        wrong = run(inputs.replace(lora_a13=wrong_a))
        assert (wrong - right).square().mean() > 0.1 * (right - base).square().mean()


def test_interleaved_is_a_permutation_of_rows() -> None:
    """Rows gate, up, gate, ... of w13, its bias and lora_b13 mean what [gate | up] means; lora_a13 stays [gate | up]."""
    halves = Case("halves", bias=True, adapters="uniform").make()

    def zip_rows(tensor: Tensor, dim: int) -> Tensor:
        return torch.stack(tensor.chunk(2, dim=dim), dim=dim + 1).flatten(dim, dim + 1)

    zipped = halves.replace(
        case=halves.case.like(interleaved=True), w13=zip_rows(halves.w13, 1), w13_bias=zip_rows(halves.w13_bias, 1),
        lora_b13=zip_rows(halves.lora_b13, 2),
    )  # fmt: skip
    assert_close(run(zipped), run(halves), TOLERANCES[torch.float32])


def test_id_dtypes_mix() -> None:
    """int32 and int64 ids give the same bits, in any mixture."""
    inputs = Case("ids", num_global_experts=12, stray_ids=True, num_tokens=20).make()
    want = run(inputs)
    for name in ("topk_ids", "token_lora_mapping", "expert_map"):
        assert_bitwise(run(inputs.replace(**{name: getattr(inputs, name).long()})), want, f"int64 {name}")


def test_expert_parallel_ranks_add_up() -> None:
    """The partial results of two ranks with half of the experts each sum to the whole layer."""
    whole = Case("whole", num_experts=8, bias=True).make()
    total = torch.zeros_like(whole.hidden_states)
    for first in (0, 4):
        local = {n: getattr(whole, n)[first : first + 4] for n in ("w13", "w2", "w13_bias", "w2_bias")}
        local |= {n: getattr(whole, n)[:, first : first + 4] for n in ("lora_a13", "lora_b13", "lora_a2", "lora_b2")}
        here = torch.arange(8) - first
        here[(here < 0) | (here >= 4)] = -1
        total += run(whole.replace(**local, expert_map=here))
    assert_close(total, run(whole), TOLERANCES[torch.float32])


def test_ranks_are_clamped() -> None:
    """A rank above R is R, below 0 it is 0."""
    inputs = Case("clamped").make()
    clamped = run(inputs, lora_ranks=torch.tensor([16, 0, 5], dtype=torch.int32))
    assert_bitwise(run(inputs, lora_ranks=torch.tensor([2**31 - 1, -3, 5], dtype=torch.int32)), clamped)


def test_the_sum_is_rounded_once() -> None:
    """Weights, sum and scaling factor are applied in fp32: exact values that bf16 cannot hold on the way come out exact."""
    one = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    w2 = torch.cat([256 * one, 0.5 * one, -256 * one])  # relu2(1) = 1, so the pairs give 256, 0.5 and -256
    args = (one[0], one.expand(3, 1, 1), w2, torch.ones(1, 3), torch.tensor([[0, 1, 2]]), torch.tensor([-1]))
    options = dict(activation="relu2", gated=False, routed_scaling_factor=3.0)
    out = torch.ops.moelora.fused_experts_lora(*args, None, None, None, None, **options)
    assert out.item() == 1.5  # 256.5 is no bf16: a sum rounded after each pair gives 0
