"""The sorts on the GPU at real sizes: CUDA C++ and Triton align, and route, equal plain torch in every bit."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import Tensor

from moelora_ops import reference
from moelora_ops.kernels import native
from moelora_ops.kernels.triton import align as triton_align
from moelora_ops.kernels.triton.route import route
from moelora_ops.routing import Routing, max_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Outputs = tuple[Tensor, Tensor, Tensor]
CUDA_CPP = native.op("moe_lora_align_block_size", "cuda")
BACKENDS = [
    pytest.param(triton_align.moe_lora_align_block_size, id="triton"),
    pytest.param(CUDA_CPP, id="cuda-cpp", marks=pytest.mark.skipif(CUDA_CPP is None, reason=f"_C_cuda: {native.CUDA_MISSING}")),
]
# num_tokens, top_k, num_experts, max_loras, block_size
SIZES = [
    (0, 8, 128, 8, 16),
    (1, 1, 1, 1, 1),
    (1, 8, 128, 8, 16),
    (7, 2, 8, 0, 16),
    (32, 8, 128, 8, 16),
    (33, 6, 60, 3, 24),
    (512, 8, 128, 8, 64),
    (2048, 8, 128, 8, 64),
    (8192, 8, 128, 8, 128),
    (8192, 2, 8, 8, 128),
    (4096, 8, 1024, 4, 16),
    (16, 8, 2500, 8, 16),
    (8192, 8, 20000, 1, 16),
    (3000, 1, 1, 1025, 7),
    (100_000, 8, 128, 8, 128),
    (100_000, 8, 2500, 8, 64),
]
POISON = 0x5A5A5A5A


def random_ids(
    num_tokens: int, top_k: int, num_experts: int, max_loras: int, *, seed: int = 0, skew: bool = False
) -> tuple[Tensor, Tensor]:
    """Ids with strays on both sides; with `skew` most pairs share one expert and one slot."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def ids(limit: int, *shape: int) -> Tensor:
        values = torch.randint(-2, limit + 2, shape, generator=generator, device="cuda")
        common = torch.rand(shape, generator=generator, device="cuda") < (0.9 if skew else 0)
        return torch.where(common, limit // 2, values).to(torch.int32)

    return ids(num_experts, num_tokens, top_k), ids(max_loras, num_tokens)


def poison_free_memory() -> None:
    """Leave garbage where the next allocations will lie."""
    blocks = [torch.full((2**n,), POISON, dtype=torch.int32, device="cuda") for n in range(8, 24) for _ in range(3)]
    del blocks


def check_align(backend: Callable[..., Outputs], *args: Any, **kwargs: Any) -> None:
    want = reference.moe_lora_align_block_size(*args, **kwargs)
    poison_free_memory()
    assert_same(backend(*args, **kwargs), want)


def assert_same(got: Outputs, want: Outputs) -> None:
    for name, g, w in zip(("sorted_token_ids", "expert_ids", "num_tokens_post_padded"), got, want):
        assert g.dtype == w.dtype and g.shape == w.shape, name
        assert torch.equal(g, w), f"{name}: {int((g != w).sum())} of {g.numel()} differ"


@pytest.mark.parametrize("skew", [False, True], ids=["spread", "skewed"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_align_equals_the_reference(backend: Callable[..., Outputs], size: tuple[int, ...], skew: bool) -> None:
    """Every element at every size; so the two backends are equal to each other as well."""
    num_tokens, top_k, num_experts, max_loras, block_size = size
    topk_ids, mapping = random_ids(num_tokens, top_k, num_experts, max_loras, skew=skew)
    check_align(backend, topk_ids, mapping, num_experts, block_size, max_loras)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flags", [torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_align_takes_every_argument(backend: Callable[..., Outputs], flags: torch.dtype, ids: torch.dtype) -> None:
    """Disabled slots, an expert map with experts elsewhere, either id type, tensors with gaps."""
    topk_ids, mapping = random_ids(500, 12, 64, 5)
    expert_map = torch.arange(63, -1, -1, device="cuda").where(torch.arange(64, device="cuda") % 3 > 0, -1)
    enabled = torch.tensor([1, 1, 0, 1, -3, 1, 1, 1, 0, 1], device="cuda").to(flags)
    if ids == torch.int64:
        topk_ids = topk_ids.long() + (torch.arange(12, device="cuda") == 5) * 2**32  # valid once cut to 32 bits
    args = (topk_ids.to(ids)[:, ::2], mapping.to(ids), 64, 16, 5)
    check_align(backend, *args, adapter_enabled=enabled[::2], expert_map=expert_map.to(ids))


@pytest.mark.parametrize("backend", BACKENDS)
def test_align_runs_on_the_current_stream(backend: Callable[..., Outputs]) -> None:
    """On a side stream it reads what that stream wrote, however late, and never waits for the device."""
    size = (2048, 8, 128, 8)
    topk_ids, mapping = random_ids(*size)
    late_ids, late_mapping = random_ids(*size, seed=1)
    want = reference.moe_lora_align_block_size(late_ids, late_mapping, 128, 64, 8)
    backend(topk_ids, mapping, 128, 64, 8)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        topk_ids.copy_(late_ids)
        mapping.copy_(late_mapping)
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = backend(topk_ids, mapping, 128, 64, 8)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not stream.query()
    stream.synchronize()
    assert_same(got, want)


@pytest.mark.parametrize("num_tokens", [1, 32, 2048])
@pytest.mark.parametrize("backend", BACKENDS)
def test_align_replays_with_changed_inputs(backend: Callable[..., Outputs], num_tokens: int) -> None:
    """Three calls in one graph, captured over no adapter at all, follow their inputs from replay to replay."""
    inputs = [without_adapters(num_tokens) for _ in range(3)]
    outputs, graph = capture(lambda: [backend(*ids, 128, 16, 8) for ids in inputs])
    for replay in range(4):
        want = []
        for i, (topk_ids, mapping) in enumerate(inputs):
            new_ids, new_mapping = random_ids(num_tokens, 8, 128, 8, seed=10 * replay + i, skew=replay == 2)
            topk_ids.copy_(new_ids)
            mapping.copy_(new_mapping)
            want.append(reference.moe_lora_align_block_size(topk_ids, mapping, 128, 16, 8))
            for tensor in outputs[i]:
                tensor.fill_(POISON)
        graph.replay()
        for g, w in zip(outputs, want):
            assert_same(g, w)


def without_adapters(num_tokens: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_tokens, 8, dtype=torch.int32, device="cuda"), torch.full((num_tokens,), -1, device="cuda")


def capture(function: Callable[[], Any]) -> tuple[Any, torch.cuda.CUDAGraph]:
    """Warm up on a side stream, then capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return result, graph


def expected_tables(
    expert: Tensor, slot: Tensor, max_loras: int, block_m: int, segment_m: int
) -> tuple[list[Tensor], list[Tensor]]:
    """(order, row_lora, segment_end) and (expert_blocks, segment_blocks) of the valid pairs, by a stable sort in torch."""
    key = torch.where(expert >= 0, expert * (max_loras + 1) + slot + 1, torch.iinfo(torch.int64).max)
    key, order = key.sort(stable=True)
    valid = int((expert >= 0).sum())
    key, order = key[:valid], order[:valid]
    row_expert, row_lora = key // (max_loras + 1), key % (max_loras + 1) - 1
    columns, tables = [order, row_lora], []
    for group, block, names in ((row_expert, block_m, [row_expert]), (key, segment_m, [row_expert, row_lora])):
        row = torch.arange(valid, device=key.device)
        first, end = torch.searchsorted(group, group), torch.searchsorted(group, group, right=True)
        opens = (row - first) % block == 0
        if len(names) == 2:
            columns.append(end)
            opens &= row_lora >= 0
        tables.append(torch.stack([*names, row, torch.minimum(row + block, end)], 1)[opens])
    return columns, tables


@pytest.mark.parametrize("skew", [False, True], ids=["spread", "skewed"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_route_equals_a_stable_sort(size: tuple[int, ...], skew: bool) -> None:
    """Rows and both block tables at every size."""
    num_tokens, top_k, num_experts, max_loras, block_m = size
    topk_ids, mapping = random_ids(num_tokens, top_k, num_experts, max_loras, skew=skew)
    poison_free_memory()
    got = route_of(topk_ids, mapping, num_experts, max_loras, block_m)
    check_route(got, topk_ids, mapping, num_experts, max_loras)


def route_of(topk_ids: Tensor, mapping: Tensor, num_experts: int, max_loras: int, block_m: int) -> Routing:
    sizes = {"num_experts": num_experts, "max_loras": max_loras, "block_m": block_m, "segment_m": 16}
    return route(topk_ids, mapping, adapter_enabled=None, expert_map=None, **sizes)


def check_route(got: Routing, topk_ids: Tensor, mapping: Tensor, num_experts: int, max_loras: int) -> None:
    num_pairs = topk_ids.numel()
    slot = reference.pair_slots(mapping, topk_ids.shape[1], max_loras, None)
    expert = reference.pair_experts(topk_ids, num_experts, None)
    columns, tables = expected_tables(expert, slot, max_loras, got.block_m, got.segment_m)
    for name, want in zip(("order", "row_lora", "segment_end"), columns):
        assert torch.equal(getattr(got, name)[: len(want)].long(), want), name
    segment_capacity = max_blocks(num_pairs, num_experts * max_loras, got.segment_m) if max_loras else 0
    capacities = (max_blocks(num_pairs, num_experts, got.block_m), segment_capacity)
    rests = ([-1, 0, 0], [-1, -1, 0, 0])
    for name, want, capacity, rest in zip(("expert_blocks", "segment_blocks"), tables, capacities, rests):
        table = getattr(got, name).long()
        assert len(table) == capacity >= len(want), name
        assert torch.equal(table[: len(want)], want), name
        assert (table[len(want) :] == torch.tensor(rest, device="cuda")).all(), name


@pytest.mark.parametrize("num_tokens", [1, 32, 2048])
def test_route_replays_with_changed_inputs(num_tokens: int) -> None:
    """Three routings in one graph, overlapping where the device launches dependents early, follow their inputs."""
    inputs = [without_adapters(num_tokens) for _ in range(3)]
    routings, graph = capture(lambda: [route_of(*ids, 128, 8, 16) for ids in inputs])
    for replay in range(4):
        for i, (topk_ids, mapping) in enumerate(inputs):
            new_ids, new_mapping = random_ids(num_tokens, 8, 128, 8, seed=10 * replay + i)
            topk_ids.copy_(new_ids)
            mapping.copy_(new_mapping)
            for tensor in (routings[i].order, routings[i].row_lora, routings[i].segment_end):
                tensor.fill_(POISON)
            for table in (routings[i].expert_blocks, routings[i].segment_blocks):
                table.fill_(POISON)
        graph.replay()
        for routing, ids in zip(routings, inputs):
            check_route(routing, *ids, 128, 8)
