"""The public op moe_lora_align_block_size: values, completeness, limits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelora_ops import reference
from moelora_ops.testing.cases import CASES, Case, Inputs, strided
from moelora_ops.testing.oracle import assert_bitwise
from moelora_ops.testing.strategies import cases, seeds

align = torch.ops.moelora.moe_lora_align_block_size
BLOCK_SIZES = (1, 2, 3, 8, 16, 64, 100)
NAMES = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")


def check_equal(call: tuple) -> tuple:
    args, kwargs = call
    got, want = align(*args, **kwargs), reference.moe_lora_align_block_size(*args, **kwargs)
    for name, g, w in zip(NAMES, got, want):
        assert_bitwise(g, w, name)
        assert g.is_contiguous(), name
    return got


def check_complete(inputs: Inputs, block_size: int) -> None:
    """Each valid pair once, in its own slot's row, in a block of its own expert; all else is the sentinel."""
    args, kwargs = inputs.align(block_size)
    sorted_token_ids, expert_ids, lengths = align(*args, **kwargs)
    slots, experts, num_pairs = inputs.slots(), inputs.local_experts(), inputs.case.num_pairs
    pairs = [(t, k, slots[t], e) for t, row in enumerate(experts) for k, e in enumerate(row)]
    expected = {t * inputs.case.top_k + k: (slot, e) for t, k, slot, e in pairs if slot >= 0 and e >= 0}
    seen: dict[int, tuple[int, int]] = {}
    for slot, (row, blocks, length) in enumerate(zip(sorted_token_ids.tolist(), expert_ids.tolist(), lengths.tolist())):
        assert length % block_size == 0 and set(row[length:]) <= {num_pairs} and set(blocks[length // block_size :]) <= {-1}
        for column, pair in enumerate(row[:length]):
            if pair != num_pairs:
                assert pair not in seen, f"pair {pair} appears twice"
                seen[pair] = (slot, blocks[column // block_size])
    assert seen == expected


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case: Case, block_size: int) -> None:
    """Every element of the three outputs is the reference's."""
    check_equal(case.make().align(block_size))


@given(cases(), seeds, st.sampled_from(BLOCK_SIZES))
@settings(max_examples=150, deadline=None)
def test_equals_the_reference_for_any_routing(case: Case, seed: int, block_size: int) -> None:
    """The same for drawn sizes, stray ids, expert maps, disabled slots, id dtypes and layouts."""
    check_equal(case.make(seed=seed).align(block_size))


@given(cases(), seeds, st.sampled_from(BLOCK_SIZES))
@settings(max_examples=60, deadline=None)
def test_is_complete(case: Case, seed: int, block_size: int) -> None:
    """Each valid pair exactly once under its own slot and expert, sentinels elsewhere."""
    check_complete(case.make(seed=seed), block_size)


@given(cases(), seeds)
@settings(max_examples=25, deadline=None)
def test_same_call_gives_the_same_bits(case: Case, seed: int) -> None:
    """Two calls agree in every bit, in the order of pairs too."""
    args, kwargs = case.make(seed=seed).align(8)
    for name, first, second in zip(NAMES, align(*args, **kwargs), align(*args, **kwargs)):
        assert_bitwise(first, second, name)


@given(cases(), seeds)
@settings(max_examples=25, deadline=None)
def test_inputs_are_only_read(case: Case, seed: int) -> None:
    """No input changes and no output shares memory with one."""
    inputs = case.make(seed=seed)
    args, kwargs = inputs.align(4)
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    outputs = align(*args, **kwargs)
    for tensor, old in zip(tensors, before):
        assert_bitwise(tensor, old)
    pointers = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
    assert not pointers & {t.untyped_storage().data_ptr() for t in outputs if t.numel()}


@pytest.mark.parametrize("flags", [torch.int32, torch.bool], ids=str)
def test_disabled_slot_is_an_idle_slot(flags: torch.dtype) -> None:
    """A slot with enabled 0 gets the row of a slot that nobody uses; any other value is on; more flags than slots are fine."""
    topk_ids, mapping = torch.tensor([[0, 1], [2, 1], [3, 0]]), torch.tensor([0, 1, 2])
    for extra in ([], [1, 0]):
        enabled = torch.tensor([2, 0, 1, *extra]).to(flags)
        got = align(topk_ids, mapping, 4, 4, 3, adapter_enabled=enabled)
        want = align(topk_ids, torch.tensor([0, -1, 2]), 4, 4, 3)
        for name, g, w in zip(NAMES, got, want):
            assert_bitwise(g, w, name)
        assert got[2].tolist() == [8, 0, 8]


@pytest.mark.parametrize("ids", [(torch.int32, torch.int64), (torch.int64, torch.int32)], ids=str)
def test_id_dtypes_mix(ids: tuple[torch.dtype, torch.dtype]) -> None:
    """topk_ids, the mapping and the expert map may have either integer dtype, each its own."""
    inputs = Case("mixed-ids", num_global_experts=10, stray_ids=True).make()
    topk_ids, expert_map = inputs.topk_ids.to(ids[0]), inputs.expert_map.to(ids[1])
    mapping = inputs.token_lora_mapping.to(ids[1])
    check_equal(inputs.replace(topk_ids=topk_ids, token_lora_mapping=mapping, expert_map=expert_map).align(4))


def test_experts_mapped_to_one_are_one_group() -> None:
    """Several global ids with one local id share its blocks; local ids outside [0, num_experts) are not here."""
    topk_ids, expert_map = torch.tensor([[0, 1], [2, 4], [3, 1], [5, 0]]), torch.tensor([1, 1, 0, 9, -4, 1])
    rows, experts, lengths = check_equal(((topk_ids, torch.tensor([0, 0, 0, 0]), 6, 2, 1), {"expert_map": expert_map}))
    assert rows[0, :8].tolist() == [2, 8, 0, 1, 5, 6, 7, 8]
    assert experts[0, :4].tolist() == [0, 1, 1, 1] and lengths.tolist() == [8]


def test_gaps_in_the_inputs() -> None:
    """Transposed and sliced id tensors are read where they are."""
    topk_ids = torch.tensor([[3, 1, 2], [0, 2, 3]]).T
    mapping = strided(torch.tensor([1, 0, 1]))
    assert not topk_ids.is_contiguous() and not mapping.is_contiguous()
    check_equal(((topk_ids, mapping, 4, 2, 2), {"adapter_enabled": strided(torch.tensor([True, True, False]))}))


@pytest.mark.parametrize(
    "num_experts, max_loras", [(512, 3), (1024, 2), (41, 25), (1025, 1), (8192, 1), (256, 80), (5000, 4), (1, 1025)]
)
def test_no_limit_on_experts_and_slots(num_experts: int, max_loras: int) -> None:
    """L * E past 1024, 8192 and 20,000, with as many experts as serving engines refuse."""
    generator = torch.Generator().manual_seed(0)
    topk_ids = torch.randint(-1, num_experts + 1, (33, min(num_experts, 4)), generator=generator)
    mapping = torch.randint(-1, max_loras, (33,), generator=generator)
    check_equal(((topk_ids, mapping, num_experts, 16, max_loras), {}))


def test_many_tokens() -> None:
    """A long prefill: groups of many blocks, for every slot."""
    case = Case("long", num_tokens=3001, num_experts=16, top_k=4, max_loras=4, adapters="zipf", experts="zipf", stray_ids=True)
    inputs = dataclasses.replace(case, hidden_size=1, intermediate_size=1, max_lora_rank=1).make()
    check_equal(inputs.align(64))


@pytest.mark.parametrize("num_tokens, top_k, num_experts, block_size, columns", [
    (0, 2, 8, 16, 0), (0, 2, 100, 16, 0), (1, 1, 1, 1, 1), (1, 8, 128, 16, 128), (64, 8, 128, 16, 2432), (5, 3, 7, 10, 80),
    (3, 2, 4, 4, 20),
])  # fmt: skip
def test_capacity_is_the_contract_s(num_tokens: int, top_k: int, num_experts: int, block_size: int, columns: int) -> None:
    """EM = round_up(min(P * bs, P + E * (bs - 1)), bs), known without looking at the ids."""
    topk_ids, mapping = torch.zeros(num_tokens, top_k, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int32)
    shapes = [t.shape for t in align(topk_ids, mapping, num_experts, block_size, 2)]
    assert shapes == [(2, columns), (2, columns // block_size), (2,)]
