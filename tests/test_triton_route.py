"""The Triton route: under Triton's interpreter on a CPU (tests/conftest.py), compiled where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moelora_ops.kernels import native
from moelora_ops.kernels.triton import _sort
from moelora_ops.kernels.triton.route import route
from moelora_ops.routing import Routing
from moelora_ops.testing.cases import CASES, Case, Inputs
from moelora_ops.testing.routing_tables import Tables, assert_tables, expected_tables
from moelora_ops.testing.strategies import cases, seeds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZES = (1, 3, 7, 16, 64)
POISON = 0x5A5A5A5A

# Enough pairs per key that they are cut into several chunks, and several blocks of pairs in a chunk.
LONG = Case("long", num_tokens=200, num_experts=5, top_k=3, max_loras=3, adapters="zipf", experts="zipf", stray_ids=True)
LONG = LONG.like(hidden_size=1, intermediate_size=1, max_lora_rank=40, ranks=(40, 0, 17))


@pytest.fixture(autouse=True, scope="module")
def triton_on_poisoned_allocations():
    """Triton serves on any device; the buffer and scratch start as garbage, so that an entry nobody writes shows."""
    new_empty = Tensor.new_empty

    def garbage(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tensor = new_empty(self, *args, **kwargs)
        return tensor.fill_(POISON) if tensor.dtype == torch.int32 else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "new_empty", garbage)
        patch.setattr(native, "_ROUTE", None)
        yield


def arguments(inputs: Inputs, block_m: int, segment_m: int) -> dict[str, Any]:
    """Arguments of `route`, by name."""
    names = ("topk_ids", "token_lora_mapping", "lora_ranks", "adapter_enabled", "expert_map")
    case, given = inputs.case, {name: getattr(inputs, name) for name in names}
    sizes = {"num_experts": case.num_experts, "max_loras": case.max_loras, "max_rank": case.max_lora_rank}
    return {**given, **sizes, "block_m": block_m, "segment_m": segment_m}


def check(inputs: Inputs, block_m: int, segment_m: int, **changes: Any) -> Routing:
    kwargs = {**arguments(inputs, block_m, segment_m), **changes}
    routing = route(**kwargs)
    assert_tables(routing, expected_tables(**kwargs))
    return routing


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sorts_by_expert_and_slot(case: Case) -> None:
    """Every section up to its count is that of a construction group by group."""
    check(case.make(DEVICE), 4, 2)


@given(cases(), seeds, st.sampled_from(BLOCK_SIZES), st.sampled_from(BLOCK_SIZES))
@settings(max_examples=40, deadline=None)
def test_sorts_any_routing(case: Case, seed: int, block_m: int, segment_m: int) -> None:
    """The same for drawn sizes, stray ids, expert maps, disabled slots, ranks, id dtypes and layouts."""
    check(case.make(DEVICE, seed), block_m, segment_m)


@pytest.mark.parametrize("max_chunks", [2, 64])
def test_groups_across_chunks(max_chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where segments span chunks, and chunks several blocks of pairs."""
    monkeypatch.setattr(_sort, "MAX_CHUNKS", max_chunks)
    chunks = _sort.Chunks.of(LONG.num_pairs, LONG.num_experts * (LONG.max_loras + 1))
    assert chunks.count == min(max_chunks, 5) and (chunks.pairs > 2 * _sort.BLOCK_PAIRS) == (max_chunks == 2)
    check(LONG.make(DEVICE), 16, 8)


@pytest.mark.parametrize("num_experts, max_loras", [(300, 3), (1024, 7), (3, 400)])
def test_more_keys_than_pairs(num_experts: int, max_loras: int) -> None:
    """Hundreds of experts or slots for a few pairs."""
    check(LONG.like(num_tokens=8, num_experts=num_experts, max_loras=max_loras, ranks=()).make(DEVICE), 16, 16)


def test_ranks_are_clamped() -> None:
    """Below zero is zero, and beyond the pool's rank is the pool's rank."""
    inputs, ranks = LONG.make(DEVICE), torch.tensor([-3, 1000, 33], dtype=torch.int32, device=DEVICE)
    routing = check(inputs, 16, 8, lora_ranks=ranks)
    assert {slot for slot in range(3) if (Tables.of(routing).segment_blocks[:, 1] == slot).any()} == {1, 2}
    assert set(Tables.of(routing).tiles.tolist()) == {3, 4, 5, 6, 7, 8}


@pytest.mark.parametrize("sizes", [{"max_loras": 0}, {"max_rank": 0}], ids=["no-slots", "no-ranks"])
def test_without_adapters_there_are_no_segments(sizes: dict[str, int]) -> None:
    """No room for segment blocks or tiles, and rows sorted by expert alone."""
    routing = check(LONG.make(DEVICE), 16, 8, lora_ranks=None, **sizes)
    layout = routing.sizes
    assert layout.num_segment_blocks == 0 == layout.num_tiles and layout.size == layout.tiles_at == layout.segment_blocks_at
    assert (Tables.of(routing).row_tiles == 0).all()


def test_no_pairs() -> None:
    """Nothing to sort: counts of zero."""
    assert check(LONG.like(num_tokens=0).make(DEVICE), 16, 16).tables.tolist() == [0, 0, 0, 0]


def test_worked_example() -> None:
    """The example in the docstring of `Routing`."""
    topk_ids, mapping = torch.tensor([[2, 0], [2, 7], [0, 2]], device=DEVICE), torch.tensor([1, -1, 1], device=DEVICE)
    routing = route(
        topk_ids, mapping, num_experts=4, max_loras=2, max_rank=32, lora_ranks=None, adapter_enabled=None, expert_map=None,
        block_m=4, segment_m=4,
    )  # fmt: skip
    got = Tables.of(routing)
    assert routing.tables[:4].tolist() == [5, 2, 2, 4]
    assert got.order.tolist() == [1, 4, 2, 0, 5]
    assert got.row_tiles.tolist() == [[0, 2], [0, 2], [2, 2], [2, 4], [2, 4]]
    assert got.tiles.tolist() == [2, 3, 2, 3]
    assert got.expert_blocks.tolist() == [[0, 0, 2], [2, 2, 5]]
    assert got.segment_blocks.tolist() == [[0, 1, 0, 2], [2, 1, 3, 5]]
