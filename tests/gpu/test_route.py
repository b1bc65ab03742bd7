"""Route on the GPU at real sizes: CUDA C++ and Triton write the tables of a stable sort, in every entry up to the counts."""

from __future__ import annotations

from typing import Any, Callable, Iterator

import pytest
import torch
from torch import Tensor

from moelora_ops.kernels import native
from moelora_ops.kernels.triton import route as module
from moelora_ops.kernels.triton.route import route
from moelora_ops.routing import Routing, RoutingSizes
from moelora_ops.testing.routing_tables import assert_tables, expected_tables

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# num_tokens, top_k, num_experts, max_loras, max_rank, block_m, segment_m
SIZES = [
    *((num_tokens, 1, 7, 3, 40, 4, 2) for num_tokens in (1, 2, 31, 32, 33, 511, 512, 513)),  # a warp, one CTA, a cluster
    (1, 8, 128, 8, 16, 16, 16),
    (4, 8, 128, 8, 16, 16, 16),
    (8, 8, 128, 8, 16, 16, 16),
    (4, 8, 2500, 800, 16, 16, 16),
    (33, 6, 60, 3, 12, 24, 7),
    (32, 8, 128, 0, 16, 16, 16),
    (32, 8, 128, 8, 0, 16, 16),
    (128, 8, 128, 8, 64, 1, 1),
    (512, 8, 128, 8, 16, 64, 16),
    (512, 8, 256, 64, 64, 64, 16),
    (2048, 8, 128, 8, 16, 128, 64),
    (2048, 8, 512, 8, 16, 64, 32),
    (4095, 4, 128, 32, 256, 33, 19),
    (8191, 8, 8, 1, 16, 128, 64),
    (8192, 8, 128, 8, 16, 128, 64),
    (25_000, 8, 128, 8, 128, 128, 64),
    (20_000, 10, 512, 8, 16, 128, 64),
    (65_000, 8, 64, 4, 16, 128, 64),
]
POPULARITIES = ("spread", "zipf", "one", "distinct")


def popular(kind: str, limit: int, *shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Ids below `limit` and, unless all are distinct, strays on both sides."""
    generator = torch.Generator("cuda").manual_seed(seed)
    numel = torch.Size(shape).numel()
    if kind == "distinct":
        return (torch.arange(numel, device="cuda") % max(limit, 1)).view(shape).to(dtype)
    ids = torch.randint(-2, limit + 2, (numel,), generator=generator, device="cuda")
    if kind == "zipf":
        share = torch.arange(1, limit + 2, device="cuda").double().reciprocal().cumsum(0)
        ids = torch.searchsorted(share, torch.rand(numel, generator=generator, device="cuda").double() * share[-1]) - 1
    elif kind == "one":
        ids = torch.where(torch.rand(numel, generator=generator, device="cuda") < 0.95, limit // 2, ids)
    return ids.view(shape).to(dtype)


def arguments(size: tuple[int, ...], kind: str = "spread", seed: int = 0, dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    num_tokens, top_k, num_experts, max_loras, max_rank, block_m, segment_m = size
    generator = torch.Generator("cuda").manual_seed(seed)
    ranks = torch.randint(-1, max_rank + 3, (max_loras,), generator=generator, device="cuda", dtype=torch.int32)
    return {
        "topk_ids": popular(kind, num_experts, num_tokens, top_k, seed=seed, dtype=dtype),
        "token_lora_mapping": popular(kind, max_loras, num_tokens, seed=seed + 1, dtype=dtype),
        "num_experts": num_experts,
        "max_loras": max_loras,
        "max_rank": max_rank,
        "lora_ranks": ranks,
        "adapter_enabled": None,
        "expert_map": None,
        "block_m": block_m,
        "segment_m": segment_m,
    }


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffer and scratch start as -1, which is NaN to a float."""
    new_empty = Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tensor = new_empty(self, *args, **kwargs)
        return tensor.fill_(-1) if tensor.dtype == torch.int32 else tensor

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


@pytest.fixture(params=["cuda-cpp", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`route` takes this backend or fails."""
    if request.param == "triton":
        monkeypatch.setattr(native, "_ROUTE", None)
    elif native._ROUTE is None:
        pytest.skip(f"_C_cuda: {native.CUDA_MISSING}")
    elif torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the CUDA C++ route needs a device with thread-block clusters")
    else:
        monkeypatch.setattr(module, "triton_route", _refuse)
    yield request.param


def _refuse(*_: Any) -> None:
    raise AssertionError("CUDA C++ did not serve this call")


def check(**kwargs: Any) -> Routing:
    routing = route(**kwargs)
    assert_tables(routing, expected_tables(**kwargs))
    return routing


@pytest.mark.parametrize("kind", POPULARITIES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tables_of_a_stable_sort(backend: str, size: tuple[int, ...], kind: str) -> None:
    """Every section at every size and popularity; so the two backends are equal to each other as well."""
    check(**arguments(size, kind))


@pytest.mark.parametrize("num_tokens", [3, 50, 700])
@pytest.mark.parametrize("flags", [torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_every_argument(backend: str, ids: torch.dtype, flags: torch.dtype, num_tokens: int) -> None:
    """Disabled slots, an expert map with experts elsewhere, either id type, no ranks, tensors with gaps."""
    kwargs = arguments((num_tokens, 12, 40, 5, 24, 16, 8), dtype=ids)
    kwargs["topk_ids"] = popular("spread", 64, num_tokens, 24, seed=2, dtype=ids)[:, ::2]
    if ids == torch.int64:
        kwargs["topk_ids"] = kwargs["topk_ids"] + (torch.arange(12, device="cuda") == 5) * 2**32  # valid once cut to 32 bits
    local = torch.arange(63, -1, -1, device="cuda")
    kwargs["expert_map"] = torch.where(local % 3 > 0, local, -1).to(ids)
    kwargs["adapter_enabled"] = torch.tensor([1, 1, 0, 1, -3, 1, 1, 1, 0, 1], device="cuda").to(flags)[::2]
    check(**kwargs)
    check(**{**kwargs, "lora_ranks": None, "adapter_enabled": None})
    check(**{**kwargs, "expert_map": kwargs["expert_map"][:0]})


@pytest.mark.parametrize("num_tokens", [1, 4, 8, 64, 65, 2048])
def test_replays_with_changed_inputs(backend: str, num_tokens: int) -> None:
    """Three routings in one graph, captured over no adapter at all, follow their inputs from replay to replay."""
    size = (num_tokens, 8, 128, 8, 32, 16, 16)
    calls = [{**arguments(size), "token_lora_mapping": torch.full((num_tokens,), -1, device="cuda")} for _ in range(3)]
    routings, graph = _capture(lambda: [route(**kwargs) for kwargs in calls])
    for replay in range(4):
        for i, kwargs in enumerate(calls):
            new = arguments(size, POPULARITIES[(replay + i) % 4], seed=10 * replay + i)
            for name in ("topk_ids", "token_lora_mapping", "lora_ranks"):
                kwargs[name].copy_(new[name])
            routings[i].tables.fill_(-1)
        graph.replay()
        for routing, kwargs in zip(routings, calls):
            assert_tables(routing, expected_tables(**kwargs))


def _capture(function: Callable[[], Any]) -> tuple[Any, torch.cuda.CUDAGraph]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return result, graph


def test_runs_on_the_current_stream(backend: str) -> None:
    """On a side stream it reads what that stream wrote, however late, and never waits for the device."""
    size = (2048, 8, 128, 8, 32, 16, 16)
    kwargs, late = arguments(size), arguments(size, "zipf", seed=7)
    route(**kwargs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for name in ("topk_ids", "token_lora_mapping", "lora_ranks"):
            kwargs[name].copy_(late[name])
        torch.cuda.set_sync_debug_mode("error")
        try:
            routing = route(**kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not stream.query()
    stream.synchronize()
    assert_tables(routing, expected_tables(**late))


@pytest.mark.parametrize("size", [(3, 8, 128, 8, 48, 3, 3), (60, 8, 128, 8, 48, 3, 3), (512, 8, 128, 8, 48, 64, 16)], ids=str)
def test_writes_its_buffer_alone(backend: str, size: tuple[int, ...]) -> None:
    """Nothing changes past the end of the tables, nor in them where the same call is made twice."""
    if backend == "triton":
        return  # its launcher takes the same buffer; the sanitizer watches it
    kwargs = arguments(size)
    num_tokens, top_k, num_experts, max_loras, max_rank, block_m, segment_m = size
    sizes = RoutingSizes.of(num_tokens * top_k, num_experts, max_loras, max_rank, block_m, segment_m)
    inputs = [kwargs[name] for name in ("topk_ids", "token_lora_mapping", "lora_ranks", "adapter_enabled", "expert_map")]
    buffers = [torch.full((sizes.size + 1024,), -1, dtype=torch.int32, device="cuda") for _ in range(2)]
    for buffer in buffers:
        assert native.route(*inputs, buffer[: sizes.size], sizes, dependent=True)
    assert (buffers[0][sizes.size :] == -1).all()
    assert torch.equal(*buffers)


def test_what_does_not_fit_a_cluster_is_left_to_triton() -> None:
    """More keys than a CTA's shared memory can count, more pairs than 16 bits can: served all the same."""
    check(**arguments((512, 8, 5000, 40, 16, 16, 16)))
    check(**arguments((100_000, 8, 64, 4, 16, 128, 64)))
