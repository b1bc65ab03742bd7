"""Timing as docs/measurements states it: CUDA graphs, weights cold in L2, medians, ceilings of this very device."""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor

REPLAYS = 12
WARM_UPS = 2
BURST = 4  # replays in a row
REST_S = 0.02
LEAST_GRAPH_US = 1000.0  # the 5 to 10 µs between an event and the start of a graph then weigh less than 1 %
MOST_ROUNDS = 32

# Per name: a function of one input, and the inputs it is called on in turn.
Calls = Mapping[str, tuple[Callable[[Any], Any], Sequence[Any]]]


def graph_us(function: Callable[[Any], Any], inputs: Sequence[Any]) -> float:
    """Median microseconds of one call, over replays of a graph that calls `function` on each of `inputs` in turn.

    Distinct inputs with distinct routings, whose weights together exceed the L2: each call finds its weights in HBM.
    """
    return statistics.median(samples_us({"": (function, inputs)}, torch.device("cuda"), rest=0.0)[""])


def samples_us(calls: Calls, device: torch.device, rest: float = REST_S) -> dict[str, list[float]]:
    """REPLAYS samples per name, each the mean microseconds of a call over its inputs.

    On a GPU each sample is the replay of a CUDA graph, elsewhere wall-clock time. A GPU rests for `rest` seconds before each
    burst of samples, whose first is dropped: kept busy, it lowers its clocks, and no ceiling was measured with those (H200,
    T = 16384: 2236 us in bursts, 2580 sustained). The names take turns, so that all of them see the same clocks.
    """
    runs = {name: _prepared(function, inputs, device) for name, (function, inputs) in calls.items()}
    on_gpu = device.type == "cuda"
    measure, burst = (_event_us, BURST) if on_gpu else (_wall_us, 1)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPLAYS // burst):
        for name, (run, count) in runs.items():
            if on_gpu and rest:
                torch.cuda.synchronize()
                time.sleep(rest)
            measure(run)
            samples[name] += [measure(run) / count for _ in range(burst)]
    return samples


def _prepared(function: Callable[[Any], Any], inputs: Sequence[Any], device: torch.device) -> tuple[Callable[[], Any], int]:
    """What to time, and how many calls of `function` it makes."""
    if device.type != "cuda":
        return lambda: [function(x) for x in inputs], len(inputs)
    with torch.cuda.stream(torch.cuda.Stream()):
        for x in inputs:  # Triton compiles on first use
            function(x)
    torch.cuda.synchronize()
    graph = _captured(function, inputs, 1)
    graph.replay()  # the first one also uploads it
    rounds = min(MOST_ROUNDS, math.ceil(LEAST_GRAPH_US / max(_event_us(graph.replay), 1.0)))
    if rounds > 1:
        graph = _captured(function, inputs, rounds)
    return graph.replay, rounds * len(inputs)


def _captured(function: Callable[[Any], Any], inputs: Sequence[Any], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for x in inputs:
                function(x)
    return graph


def _event_us(function: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _wall_us(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e6


def median_us(function: Callable[[], Any], device: torch.device) -> float:
    """Median microseconds of a call, without a graph."""
    measure = _event_us if device.type == "cuda" else _wall_us
    return statistics.median([measure(function) for _ in range(REPLAYS + WARM_UPS)][WARM_UPS:])


def host_us(function: Callable[[], Any], calls: int = 20, rounds: int = 9) -> float:
    """Microseconds of CPU time that an eager call costs, the device's work not waited for: the median of some rounds."""
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        samples.append(_wall_us(lambda: [function() for _ in range(calls)]) / calls)  # some hundred launches: no full queue
    return statistics.median(samples)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a copy of 4 GiB on a GPU, 128 MiB elsewhere; read plus written."""
    source = torch.empty(2**32 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_us(lambda: target.copy_(source), device) * 1e-6)


def matmul_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP per second of an 8192^3 product of random matrices on a GPU, in a burst; 1024^3 elsewhere."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / (median_us(lambda: a @ b, device) * 1e-6)


def cache_bytes(device: torch.device) -> int:
    """Size of the GPU's L2; 0 where it is not known."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def num_launches(function: Callable[[], Any]) -> int | None:
    """Nodes (kernels, fills, copies) of the CUDA graph of a call; None where this torch or driver cannot tell."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        function()
    count = ctypes.c_size_t()
    try:
        get_nodes = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes
    except (OSError, AttributeError):  # not NVIDIA's driver
        return None
    status = get_nodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    return count.value if status == 0 else None


def extra_bytes(function: Callable[[], Tensor]) -> int:
    """Bytes that a call asks of the allocator at its peak, beyond its inputs and its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = function()
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return int(peak - before - result.numel() * result.element_size())
