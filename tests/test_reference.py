"""The reference against constructions that share no idea with it: loops over pairs, merged dense weights, lists."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moelora_ops import reference
from moelora_ops.testing.cases import CASES, MODELS, Case, Inputs
from moelora_ops.testing.oracle import exact, exact_experts
from moelora_ops.testing.strategies import cases, seeds

SMALL_MODELS = [model.scaled_down() for model in MODELS.values()]


def align_by_lists(inputs: Inputs, block_size: int) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """The alignment written from the contract's table, one group after another."""
    case, experts, slots = inputs.case, inputs.local_experts(), inputs.slots()
    num_pairs, num_experts = case.num_pairs, case.num_global_experts or case.num_experts
    capacity = math.ceil(min(num_pairs * block_size, num_pairs + num_experts * (block_size - 1)) / block_size) * block_size
    rows, blocks, lengths = [], [], []
    for slot in range(case.max_loras):
        row, block = [], []
        for expert in range(num_experts):
            group = [t * case.top_k + k for t in range(case.num_tokens) for k in range(case.top_k)
                     if slots[t] == slot and experts[t][k] == expert]  # fmt: skip
            group += [num_pairs] * (-len(group) % block_size)
            row += group
            block += [expert] * (len(group) // block_size)
        lengths.append(len(row))
        rows.append(row + [num_pairs] * (capacity - len(row)))
        blocks.append(block + [-1] * (capacity // block_size - len(block)))
    return rows, blocks, lengths


def activation_by_formula(gate: Tensor, up: Tensor | None, case: Case) -> Tensor:
    if up is not None and case.swiglu_limit is not None:
        limit = torch.tensor(case.swiglu_limit, dtype=torch.float64)
        gate, up = torch.minimum(gate, limit), torch.maximum(torch.minimum(up, limit), -limit)
    if case.activation == "swigluoai":
        return (up + 1) * gate / (1 + torch.exp(-case.swiglu_alpha * gate))
    value = {
        "silu": lambda: gate / (1 + torch.exp(-gate)),
        "gelu": lambda: 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))),
        "gelu_tanh": lambda: 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))),
        "relu2": lambda: torch.where(gate > 0, gate * gate, 0.0),
    }[case.activation]()
    return value if up is None else value * up


def merged_weights(inputs: Inputs, slot: int, expert: int) -> tuple[Tensor, Tensor]:
    """(gate rows then up rows [S * I, H], down [H, I]) of an expert in fp64 with the adapter merged in."""
    case, rank = inputs.case, inputs.case.max_lora_rank
    halves = [slice(0, None, 2), slice(1, None, 2)] if case.interleaved else None
    if halves is None:
        halves = [slice(s * case.intermediate_size, (s + 1) * case.intermediate_size) for s in range(case.num_slices)]
    w13 = torch.cat([inputs.w13[expert].double()[half] for half in halves])
    w2 = inputs.w2[expert].double().clone()
    if slot >= 0:
        r = case.ranks[slot] if case.ranks else rank
        outer = 0 if case.shared_outer else expert
        for s, half in enumerate(halves):
            a = inputs.lora_a13[slot, outer].double()[s * rank : s * rank + r]
            b = inputs.lora_b13[slot, expert].double()[half][:, :r]
            w13[s * case.intermediate_size : (s + 1) * case.intermediate_size] += b @ a
        w2 += inputs.lora_b2[slot, outer].double()[:, :r] @ inputs.lora_a2[slot, expert].double()[:r]
    return w13, w2


def experts_by_pairs(inputs: Inputs) -> Tensor:
    """The expert layer, one pair at a time through dense merged weights."""
    case, out = inputs.case, torch.zeros(inputs.hidden_states.shape, dtype=torch.float64)
    for t, (slot, chosen) in enumerate(zip(inputs.slots(), inputs.local_experts())):
        for k, expert in enumerate(chosen):
            if expert < 0:
                continue
            weight = inputs.topk_weights[t, k].double()
            w13, w2 = merged_weights(inputs, slot, expert)
            x = inputs.hidden_states[t].double() * (weight if case.apply_router_weight_on_input else 1)
            gu = w13 @ x
            if inputs.w13_bias is not None:
                bias = inputs.w13_bias[expert].double()
                gu += torch.cat([bias[0::2], bias[1::2]]) if case.interleaved else bias
            gate, up = gu.chunk(2) if case.gated else (gu, None)
            y = w2 @ activation_by_formula(gate, up, case)
            if inputs.w2_bias is not None:
                y += inputs.w2_bias[expert].double()
            out[t] += case.routed_scaling_factor * (y if case.apply_router_weight_on_input else weight * y)
    return out


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("case", [*CASES, *SMALL_MODELS], ids=str)
def test_align_is_what_the_contract_says(case: Case, block_size: int) -> None:
    """Each slot's pairs by expert, ascending, padded with P; experts of blocks, then -1; padded lengths."""
    inputs = case.make()
    args, kwargs = inputs.align(block_size)
    result = reference.moe_lora_align_block_size(*args, **kwargs)
    assert [t.dtype for t in result] == [torch.int32] * 3
    assert tuple(t.tolist() for t in result) == align_by_lists(inputs, block_size)


@given(cases(), seeds, st.sampled_from((1, 3, 8, 64)))
@settings(max_examples=60, deadline=None)
def test_align_is_what_the_contract_says_for_any_routing(case: Case, seed: int, block_size: int) -> None:
    """The same for drawn sizes, stray ids, expert maps and disabled slots."""
    inputs = case.make(seed=seed)
    args, kwargs = inputs.align(block_size)
    result = reference.moe_lora_align_block_size(*args, **kwargs)
    assert tuple(t.tolist() for t in result) == align_by_lists(inputs, block_size)


@pytest.mark.parametrize("case", [*CASES, *SMALL_MODELS], ids=str)
def test_experts_equal_merged_weights(case: Case) -> None:
    """The layer with adapters is the layer with W + B A in place of W, pair by pair."""
    inputs = case.make()
    torch.testing.assert_close(exact_experts(inputs), experts_by_pairs(inputs), rtol=1e-10, atol=1e-11)


@given(cases(), seeds)
@settings(max_examples=60, deadline=None)
def test_experts_equal_merged_weights_for_any_options(case: Case, seed: int) -> None:
    """The same for every combination of options."""
    inputs = case.make(seed=seed)
    torch.testing.assert_close(exact_experts(inputs), experts_by_pairs(inputs), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", [c for c in CASES if not c.interleaved], ids=str)
def test_delta_equals_dense_products(case: Case, weighted: bool) -> None:
    """Both projections: output[t, k] += [w] * B_s (A_s x) in each slice's columns, and nothing else changes."""
    inputs, rank = case.make(), case.max_lora_rank
    args, kwargs = inputs.align(4)
    aligned = reference.moe_lora_align_block_size(*args, **kwargs)
    for a, b, rows_per_input in (*[(*inputs.gate_up_lora(), case.top_k)], *[(*inputs.down_lora(), 1)]):
        width = b[0].shape[2]
        x = torch.randn(case.num_pairs // rows_per_input, a[0].shape[3]).to(case.dtype)
        output = torch.randn(case.num_tokens, case.top_k, 3 + len(b) * width + 2, dtype=torch.float64)
        expected = output.clone()
        for t, (slot, chosen) in enumerate(zip(inputs.slots(), inputs.local_experts())):
            for k, expert in enumerate(chosen):
                if slot < 0 or expert < 0:
                    continue
                r = case.ranks[slot] if case.ranks else rank
                for s in range(len(a)):
                    a_e, b_e = (w[slot, min(expert, w.shape[1] - 1)].double() for w in (a[s], b[s]))
                    delta = b_e[:, :r] @ a_e[:r] @ x[(t * case.top_k + k) // rows_per_input].double()
                    weight = inputs.topk_weights[t, k] if weighted else 1
                    expected[t, k, 3 + s * width : 3 + (s + 1) * width] += weight * delta
        call = (output, x, a, b, inputs.topk_weights, *aligned)
        exact(reference.fused_moe_lora, (call, dict(lora_ranks=inputs.lora_ranks, mul_routed_weight=weighted, offset=3)))
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)


def test_results_have_the_dtype_of_the_input() -> None:
    """Math is fp32 or wider inside; what comes out has the dtype of hidden_states."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        args, kwargs = CASES[0].like(dtype=dtype).make().experts()
        assert reference.fused_experts_lora(*args, **kwargs).dtype == dtype
