"""Timing on a GPU as docs/measurements states it: CUDA graphs, weights cold in L2, medians, ceilings of this very device."""

from __future__ import annotations

import statistics
from typing import Any, Callable, Sequence

import torch

REPLAYS = 12


def graph_us(function: Callable[[Any], Any], inputs: Sequence[Any]) -> float:
    """Median microseconds of one call, over replays of a graph that calls `function` once on each of `inputs`.

    Distinct inputs with distinct routings, whose weights together exceed the L2: each call finds its weights in HBM.
    """
    with torch.cuda.stream(torch.cuda.Stream()):
        for x in inputs:  # Triton compiles on first use
            function(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs:
            function(x)
    return event_us(graph.replay) / len(inputs)


def event_us(function: Callable[[], Any]) -> float:
    """Median microseconds between events around a call, after two warm-ups."""
    times = []
    for i in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy of 4 GiB, read plus written."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (event_us(lambda: target.copy_(source)) * 1e-6)


def matmul_rate(dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP per second of an 8192^3 product of random matrices, in a burst."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
    return 2 * 8192**3 / (event_us(lambda: a @ b) * 1e-6)
