"""The Triton align: under Triton's interpreter on a CPU (tests/conftest.py), compiled where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moelora_ops import reference
from moelora_ops.kernels.triton import _sort
from moelora_ops.kernels.triton.align import moe_lora_align_block_size
from moelora_ops.testing.cases import CASES, Case, Inputs
from moelora_ops.testing.oracle import assert_bitwise
from moelora_ops.testing.strategies import cases, seeds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
BLOCK_SIZES = (1, 3, 7, 16, 64)
POISON = 0x5A5A5A5A

# Enough pairs per key that they are cut into several chunks, and several blocks of pairs in a chunk.
LONG = Case("long", num_tokens=700, num_experts=5, top_k=3, max_loras=3, adapters="zipf", experts="zipf", stray_ids=True)
LONG = LONG.like(hidden_size=1, intermediate_size=1, max_lora_rank=1)


@pytest.fixture(autouse=True, scope="module")
def poisoned_allocations():
    """Outputs and scratch start as garbage, so that an element nobody writes shows."""
    new_empty = Tensor.new_empty

    def garbage(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tensor = new_empty(self, *args, **kwargs)
        return tensor.fill_(POISON) if tensor.dtype == torch.int32 else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "new_empty", garbage)
        yield


def check_align(topk_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    got = moe_lora_align_block_size(topk_ids, *args, **kwargs)
    for name, g, w in zip(NAMES, got, reference.moe_lora_align_block_size(topk_ids, *args, **kwargs)):
        assert_bitwise(g, w, name)
    return got


def check_case(inputs: Inputs, block_size: int) -> None:
    args, kwargs = inputs.align(block_size)
    check_align(*args, **kwargs)


def random_ids(num_tokens: int, top_k: int, num_experts: int, max_loras: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    topk_ids = torch.randint(-2, num_experts + 2, (num_tokens, top_k), generator=generator)
    mapping = torch.randint(-2, max_loras + 2, (num_tokens,), generator=generator)
    return topk_ids.to(DEVICE, torch.int32), mapping.to(DEVICE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_align_equals_the_reference(case: Case) -> None:
    """Every element of the three outputs is the reference's, and none is left as allocated."""
    check_case(case.make(DEVICE), 4)


@given(cases(), seeds, st.sampled_from(BLOCK_SIZES))
@settings(max_examples=40, deadline=None)
def test_align_equals_the_reference_for_any_routing(case: Case, seed: int, block_size: int) -> None:
    """The same for drawn sizes, stray ids, expert maps, disabled slots, id dtypes and layouts."""
    check_case(case.make(DEVICE, seed), block_size)


@pytest.mark.parametrize("block_size", [7, 64])
def test_align_across_chunks(block_size: int) -> None:
    """Groups that span chunks and blocks of pairs stay in pair order."""
    assert _sort.Chunks.of(LONG.num_pairs, LONG.max_loras * LONG.num_experts).count > 3
    check_case(LONG.make(DEVICE), block_size)


def test_align_counts_a_chunk_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of many blocks of pairs carries its cursors from one to the next."""
    monkeypatch.setattr(_sort, "MAX_CHUNKS", 2)
    assert _sort.Chunks.of(LONG.num_pairs, LONG.max_loras * LONG.num_experts).pairs > 2 * _sort.BLOCK_PAIRS
    check_case(LONG.make(DEVICE), 16)


def test_align_is_complete() -> None:
    """Each valid pair once, in its own slot's row, in a block of its own expert; all else is the sentinel."""
    inputs = LONG.like(num_tokens=60, disabled=(1,)).make(DEVICE)
    args, kwargs = inputs.align(4)
    sorted_token_ids, expert_ids, lengths = (t.tolist() for t in moe_lora_align_block_size(*args, **kwargs))
    slots, experts = inputs.slots(), inputs.local_experts()
    valid = {t * 3 + k: (slots[t], e) for t, row in enumerate(experts) for k, e in enumerate(row) if slots[t] >= 0 <= e}
    columns = [(pair, slot, c) for slot, row in enumerate(sorted_token_ids) for c, pair in enumerate(row)]
    placed = [(pair, (slot, expert_ids[slot][c // 4])) for pair, slot, c in columns if pair != 180]
    assert len(placed) == len(valid) > 20 and dict(placed) == valid
    assert all(c < lengths[slot] for pair, slot, c in columns if pair != 180) and lengths[1] == 0


def test_align_worked_example() -> None:
    """Four experts, two slots, blocks of four: the layout in numbers."""
    topk_ids, mapping = torch.tensor([[2, 0], [2, 7], [0, 2]], device=DEVICE), torch.tensor([1, -1, 1], device=DEVICE)
    rows, experts, lengths = moe_lora_align_block_size(topk_ids, mapping, 4, 4, 2)
    assert rows.tolist() == [[6] * 20, [1, 4, 6, 6, 0, 5] + [6] * 14]
    assert experts.tolist() == [[-1] * 5, [0, 2, -1, -1, -1]]
    assert lengths.tolist() == [0, 8]


@pytest.mark.parametrize("num_experts, max_loras", [(1025, 1), (205, 5), (1, 1025), (1024, 2), (2500, 8)])
def test_align_has_no_limit_on_keys(num_experts: int, max_loras: int) -> None:
    """More experts and slots than pairs: L * E = 1025 to 20,000."""
    topk_ids, mapping = random_ids(9, min(num_experts, 4), num_experts, max_loras)
    check_align(topk_ids, mapping, num_experts, 16, max_loras)


@pytest.mark.parametrize(
    "num_tokens, top_k, max_loras, block_size",
    [(0, 2, 3, 16), (5, 2, 0, 16), (1, 1, 1, 1), (2, 2, 1, 1000), (0, 1, 1, 2**40)],
)
def test_align_at_the_edges(num_tokens: int, top_k: int, max_loras: int, block_size: int) -> None:
    """No tokens, no slots, one of each, blocks far larger than the batch."""
    topk_ids, mapping = random_ids(num_tokens, top_k, 3, max_loras)
    check_align(topk_ids, mapping, 3, block_size, max_loras)


@pytest.mark.parametrize("flags", [torch.int32, torch.bool], ids=str)
def test_zero_disables_a_slot(flags: torch.dtype) -> None:
    """Any other value is on; flags may be more than slots, and apart in memory."""
    topk_ids, mapping = random_ids(60, 2, 4, 3)
    enabled = torch.tensor([-1, 5, 0, 5, 2, 5, 5], device=DEVICE).to(flags)[::2]
    _, _, lengths = check_align(topk_ids, mapping, 4, 4, 3, adapter_enabled=enabled)
    assert [n > 0 for n in lengths.tolist()] == [True, False, True]


def test_align_merges_experts_mapped_to_one() -> None:
    """Global experts with the same local id share a group; local ids out of range are skipped."""
    topk_ids, mapping = random_ids(30, 3, 6, 2)
    expert_map = torch.tensor([5, 1, 1, 6, -1, 2**20], device=DEVICE)
    _, experts, _ = check_align(topk_ids, mapping, 6, 4, 2, expert_map=expert_map)
    assert set(experts.flatten().tolist()) == {-1, 1, 5}
