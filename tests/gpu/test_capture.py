"""Whole decoders in CUDA graphs: captured once, they follow every adapter mix, swap and rank, whoever shares their memory.

A captured step has the bits of the eager one (the kernels are the same), and in fp32 the values of the fp64 twin. Before each
replay the memory that belongs to the graphs is full of NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from moelora_ops import FusedMoEWithLoRA, LoraPool
from moelora_ops.testing.adapters import random_adapter
from moelora_ops.testing.decoder import WAYS, Decoder, DecoderSizes, exact_twin, step_inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import assert_bitwise

SIZES = DecoderSizes(
    num_layers=3, hidden_size=256, intermediate_size=128, num_experts=16, top_k=4, num_heads=8, num_kv_heads=4, head_dim=32,
    vocabulary=256, num_rows=32, max_length=64, max_loras=4, max_rank=16, device="cuda",
)  # fmt: skip
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
BOTH_WAYS = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def load(sizes: DecoderSizes, pool: LoraPool, slot: int, rank: int, *, seed: int) -> None:
    pool.load(random_adapter(sizes.geometry, rank, seed=seed, dtype=sizes.dtype), slot)


class Step:
    """A step of a decoder on inputs at fixed addresses, and the experts that it took."""

    def __init__(self, model: Decoder, inputs: tuple[Tensor, ...]) -> None:
        self.model, self.inputs = model, inputs
        shape = (model.sizes.num_layers, len(inputs[0]), model.sizes.top_k)
        self.ids = torch.zeros(shape, dtype=torch.int32, device="cuda")

    def __call__(self) -> Tensor:
        logits, ids = self.model(*self.inputs)
        self.ids.copy_(ids)
        return logits

    def set(self, *values: Tensor) -> None:
        for fixed, value in zip(self.inputs, values, strict=True):
            fixed.copy_(value)

    def without_adapters(self) -> Tensor:
        *others, slots = self.inputs
        logits, _ = self.model(*others, torch.full_like(slots, -1))
        return logits


def changes(sizes: DecoderSizes, pool: LoraPool) -> list[Callable[[], None]]:
    """What happens to a pool between the steps of a loop: from empty to full, swapped, other ranks, switched off, unloaded."""
    return [
        lambda: None,
        lambda: load(sizes, pool, 0, rank=16, seed=0),
        lambda: load(sizes, pool, 3, rank=4, seed=1),
        lambda: load(sizes, pool, 0, rank=1, seed=2),
        lambda: load(sizes, pool, 1, rank=12, seed=3),
        lambda: pool.disable(3),
        lambda: load(sizes, pool, 2, rank=8, seed=4),
        lambda: pool.enable(3),
        lambda: pool.unload(0),
        lambda: load(sizes, pool, 0, rank=16, seed=5),
    ]


@DTYPES
@BOTH_WAYS
@pytest.mark.parametrize("num_tokens", [1, 16])
def test_decode_loop(num_tokens: int, way: str, dtype: torch.dtype, capture: Any) -> None:
    """Captured once, with an empty pool and every token at -1; then greedy steps with other mixes, adapters and ranks each."""
    sizes = replace(SIZES, dtype=dtype)
    pool = sizes.pool()
    model, twin = Decoder(sizes, pool, WAYS[way]), exact_twin(sizes, pool)
    step = Step(model, step_inputs(sizes, num_tokens))
    step.inputs[3].fill_(-1)
    graph = capture(step)
    step.inputs[2].zero_()
    with_delta = 0
    for number, change in enumerate(changes(sizes, pool)):
        change()
        slots = torch.arange(num_tokens, device="cuda") + number
        step.inputs[3].copy_(slots % (sizes.max_loras + 1) - 1)
        base = step.without_adapters()
        logits = graph.replay()
        ids = step.ids.clone()
        assert_bitwise(logits, step(), f"step {number}")
        assert_bitwise(ids, step.ids, f"experts of step {number}")
        live = torch.tensor([pool.is_enabled(l) if l >= 0 else False for l in step.inputs[3].tolist()], device="cuda")
        assert_bitwise(logits[~live], base[~live], f"rows without adapter, step {number}")
        moved = (logits - base).abs().amax(1) > 0.05
        assert moved[live].all(), f"step {number}: a delta is missing"
        with_delta += int(live.sum())
        if dtype == torch.float32:
            want, _ = twin(*step.inputs, given_ids=ids)
            assert_close(logits, want, TOLERANCES[dtype], what=f"step {number}")
        step.inputs[0].copy_(logits.argmax(-1))
        step.inputs[2].add_(1)
    assert with_delta > 0


@BOTH_WAYS
def test_graphs_that_share_memory(way: str, capture: Any) -> None:
    """Graphs of other batch sizes, decode and prefill, in one memory pool, replayed in turns: scratch of one is another's."""
    sizes = replace(SIZES, dtype=torch.bfloat16)
    pool = sizes.pool()
    model, memory = Decoder(sizes, pool, WAYS[way]), torch.cuda.graph_pool_handle()
    steps = [Step(model, step_inputs(sizes, num_tokens)) for num_tokens in (1, 4, 32, 16)]
    graphs = [capture(step, pool=memory) for step in steps]
    for number, change in enumerate(changes(sizes, pool)):
        change()
        for index in (number % 4, (number + 1) % 4, number % 4, (number + 2) % 4):
            step = steps[index]
            step.set(*step_inputs(sizes, len(step.inputs[0]), seed=number + index))
            assert_bitwise(graphs[index].replay(), step(), f"graph {index}, round {number}")


@BOTH_WAYS
def test_prefill_by_buckets(way: str, capture: Any) -> None:
    """Prompts padded to the bucket: the values of the exact length, and whatever the padding holds, the same bits.

    Padding has slot -1 and, by its row, experts -1.
    """
    sizes, buckets = SIZES, (8, 64)
    pool = sizes.pool()
    model, twin = Decoder(sizes, pool, WAYS[way]), exact_twin(sizes, pool)
    memory, steps, graphs = torch.cuda.graph_pool_handle(), {}, {}
    for size in buckets:
        steps[size] = Step(model, tuple(torch.zeros(size, dtype=torch.int64, device="cuda") for _ in range(4)))
        graphs[size] = capture(steps[size], pool=memory)
    for slot in range(sizes.max_loras):
        load(sizes, pool, slot, rank=4 * slot + 4, seed=slot)
    generator = torch.Generator("cuda").manual_seed(0)
    for row, (length, slot) in enumerate([(5, 1), (64, 0), (1, 3), (8, -1), (37, 2), (9, 3)]):
        size = next(size for size in buckets if length <= size)
        step, live = steps[size], torch.arange(size, device="cuda") < length
        place = torch.arange(size, device="cuda")
        outputs = []
        for _ in range(2):
            tokens = torch.randint(0, sizes.vocabulary, (size,), generator=generator, device="cuda")
            if outputs:
                tokens[:length] = step.inputs[0][:length]
            rows = torch.where(live, row, sizes.num_rows)
            step.set(tokens, rows, torch.where(live, place, 0), torch.where(live, slot, -1))
            outputs.append(graphs[size].replay()[:length])
        assert_bitwise(*outputs, f"length {length}, other padding")
        assert (step.ids[:, length:] == -1).all()
        want, _ = twin(*(t[:length] for t in step.inputs), given_ids=step.ids[:, :length])
        assert_close(outputs[0], want, TOLERANCES[torch.float32], what=f"length {length}")


def test_warmup_is_enough(capture: Any) -> None:
    """After `warmup` a layer of sizes that nobody has run is captured without a call before, at any batch size."""
    sizes = replace(SIZES, hidden_size=192, intermediate_size=96, num_experts=12, dtype=torch.bfloat16)
    pool = sizes.pool()
    w13, w2 = torch.randn(12, 192, 192).cuda().bfloat16() / 14, torch.randn(12, 192, 96).cuda().bfloat16() / 10
    layer = FusedMoEWithLoRA(w13, w2, pool.layer(0))
    layer.warmup(64, top_k=sizes.top_k)
    for num_tokens in (1, 5, 64):
        x = torch.randn(num_tokens, 192, device="cuda", dtype=torch.bfloat16)
        weights, ids = torch.rand(num_tokens, 12, device="cuda").topk(sizes.top_k)
        args = (x, weights, ids.int(), torch.arange(num_tokens, device="cuda", dtype=torch.int32) % 5 - 1)
        pool.unload(0)
        torch.cuda.synchronize()
        graph = capture(lambda: layer(*args), warm_up=False)
        load(sizes, pool, 0, rank=16, seed=num_tokens)
        args[3].zero_()
        assert_bitwise(graph.replay(), layer(*args), f"T = {num_tokens}")


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each graph that `mode="reduce-overhead"` records."""
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    found: list[Any] = []
    record = CUDAGraphTreeManager.record_function

    def counted(self: Any, inputs: Any, function_id: Any) -> Any:
        found.append(function_id)
        return record(self, inputs, function_id)

    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", counted)
    return found


@BOTH_WAYS
def test_reduce_overhead(way: str, recordings: list[Any]) -> None:
    """PyTorch's own graphs: one recording per batch size; swaps, mixes and ranks record and compile nothing, and are seen.

    The only inputs copied into a replay are the four of the step: neither the pool nor the cache is.
    """
    torch._dynamo.reset()
    counters.clear()
    pool = SIZES.pool()
    model, twin = Decoder(SIZES, pool, WAYS[way]), exact_twin(SIZES, pool)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")

    def check(num_tokens: int, seed: int, *, adapters: bool = True) -> None:
        inputs = step_inputs(SIZES, num_tokens, seed=seed)
        if not adapters:
            inputs[3].fill_(-1)
        torch.compiler.cudagraph_mark_step_begin()
        logits, ids = (t.clone() for t in compiled(*inputs))
        want, _ = twin(*inputs, given_ids=ids)
        # three layers by Inductor's approximations of exp and rsqrt: the adapters are under test here, not the last bits
        assert_close(logits, want, TOLERANCES[torch.float16], what=f"T = {num_tokens}, seed {seed}")

    sizes = (4, 16)
    for seed in range(3):  # a warm-up, the recording, a replay; the pool is empty
        for num_tokens in sizes:
            check(num_tokens, seed, adapters=False)
    assert len(recordings) == len(sizes) == counters["stats"]["unique_graphs"]
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] == 4 * len(sizes)
    for number, change in enumerate(changes(SIZES, pool)):
        change()
        for num_tokens in sizes:
            check(num_tokens, seed=10 + number)
    assert len(recordings) == len(sizes) == counters["stats"]["unique_graphs"]
    assert counters["inductor"]["cudagraph_skips"] == 0
    check(7, seed=0)
    check(7, seed=1)
    assert len(recordings) == len(sizes) + 1, "the counter sees what another batch size records"
    torch._dynamo.reset()
