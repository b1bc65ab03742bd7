"""Microseconds of the two sorts on a GPU: `python3 -m benchmarks.align`.

Align and route by CUDA C++ and by Triton, values checked first, over CUDA graphs of distinct routings; in the last column the
CPU time of one eager call of route. "empty" is a kernel that does next to nothing: what any launch in such a graph costs.
"""

from __future__ import annotations

import statistics
from typing import Any, Callable
from unittest import mock

import torch
from torch import Tensor

from moelora_ops import reference
from moelora_ops.kernels import native
from moelora_ops.kernels.triton import align as triton_align
from moelora_ops.kernels.triton.route import route
from moelora_ops.testing import timing
from moelora_ops.testing.routing_tables import assert_tables, expected_tables

TOP_K = 8
PAIRS = (8, 32, 64, 256, 512, 1024, 4096, 16384, 65536)
SETS = 20
COLUMNS = "E | L | P | bs | empty | align, C++ | align, Triton | route, C++ | route, Triton | route, CPU time"


def ids(num_pairs: int, num_experts: int, max_loras: int, seed: int) -> tuple[Tensor, Tensor]:
    """Top-k of random scores, and a random adapter a token."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(num_pairs // TOP_K, num_experts, generator=generator, device="cuda")
    mapping = torch.randint(0, max_loras, (num_pairs // TOP_K,), generator=generator, device="cuda", dtype=torch.int32)
    return scores.topk(TOP_K, dim=1).indices.int(), mapping


def by_triton(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The function on Triton's route."""

    def call(inputs: Any) -> Any:
        with mock.patch.object(native, "_ROUTE", None):
            return function(inputs)

    return call


def row(num_experts: int, max_loras: int, num_pairs: int) -> str:
    block = 16 if num_pairs <= 2048 else 64
    sets = [ids(num_pairs, num_experts, max_loras, seed) for seed in range(SETS)]
    ranks = torch.full((max_loras,), 16, dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"num_experts": num_experts, "max_loras": max_loras, "max_rank": 16, "lora_ranks": ranks}
    options |= {"adapter_enabled": None, "expert_map": None, "block_m": block, "segment_m": 16}
    align = native.op("moe_lora_align_block_size", "cuda")
    assert align is not None, native.CUDA_MISSING

    def routed(inputs: tuple[Tensor, Tensor]) -> Any:
        return route(*inputs, **options)

    for inputs in sets[:2]:
        want = reference.moe_lora_align_block_size(*inputs, num_experts, block, max_loras)
        for function in (align, triton_align.moe_lora_align_block_size):
            assert all(torch.equal(g, w) for g, w in zip(function(*inputs, num_experts, block, max_loras), want))
        for function in (routed, by_triton(routed)):
            assert_tables(function(inputs), expected_tables(*inputs, **options))
    one = torch.zeros(1, device="cuda")
    calls: dict[str, Callable[[Any], Any]] = {
        "empty": lambda _: one.add_(1),
        "align": lambda inputs: align(*inputs, num_experts, block, max_loras),
        "triton align": lambda inputs: triton_align.moe_lora_align_block_size(*inputs, num_experts, block, max_loras),
        "route": routed,
        "triton route": by_triton(routed),
    }
    samples = timing.samples_us({name: (call, sets) for name, call in calls.items()}, torch.device("cuda"))
    times = [f"{statistics.median(values):.1f}" for values in samples.values()]
    cells = [num_experts, max_loras, num_pairs, block, *times, f"{timing.host_us(lambda: routed(sets[0])):.1f}"]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds, top_k {TOP_K}, segments of 16 rows")
    print(f"| {COLUMNS} |\n|{' --- |' * (COLUMNS.count('|') + 1)}")
    for num_experts, max_loras in ((128, 8), (256, 64)):
        for num_pairs in PAIRS:
            print(row(num_experts, max_loras, num_pairs), flush=True)


if __name__ == "__main__":
    main()
