"""Align on the GPU at real sizes: CUDA C++ and Triton equal plain torch in every bit."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import Tensor

from moelora_ops import reference
from moelora_ops.kernels import native
from moelora_ops.kernels.triton import align as triton_align

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
    # around the borders of one CTA, one cluster, 16-bit indices, and two launches
    (64, 8, 128, 8, 8),
    (65, 8, 128, 8, 8),
    (2049, 8, 128, 8, 64),
    (8191, 8, 16, 4, 64),
    (8192, 8, 128, 8, 16),
    (12_000, 8, 128, 8, 64),
    (65_000, 8, 32, 2, 128),
    (512, 8, 256, 64, 16),
    (40, 8, 512, 64, 1),
    (300, 7, 333, 11, 37),
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
