"""Time of each Inductor rewrite, on and off: `python -m benchmarks.passes` prints one table, values checked first.

Medians of CUDA graphs over distinct weights, so that they are cold; Qwen3-30B-A3B's shape, bf16, 8 adapters of rank 16. The
eager form of LoRA gathers A and B for each pair, so that it is timed at small batches alone.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Sequence

import torch
from torch import Tensor, nn

import moelora_ops.compile
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.passes import Activated, Eager, Layer, batch

SHAPE = dict(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, max_loras=8, rank=16)
SETS = 4  # of weights; one set of base weights is 1.2 GB, of adapters 0.7
REPLAYS = 15


class Twice(nn.Module):
    """A model part that aligns for each projection by itself."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, mapping: Tensor) -> Tensor:
        ops, block = torch.ops.moelora, self.block
        weights, ids = block.route(x)
        output = x.new_zeros(len(x), block.top_k, block.w2.shape[1])
        for a in (block.lora_a1, block.lora_a2):
            table = block.align(ids, mapping)
            ops.fused_moe_lora(output, x[:, : a.shape[3]], [a], [block.lora_b2], weights, *table)
        return output


class Delta(Activated):
    """Delta and activation on a base that is an input of the graph's own making, cheap beside them."""

    def first_base(self, x: Tensor, ids: Tensor) -> Tensor:
        wide = self.w13.shape[1]
        return (x[:, None, :wide] * (0.01 * ids[..., None]).to(x.dtype)).contiguous()


class EagerDelta(Eager):
    """The eager delta alone, with the base as cheap as in `Delta`."""

    first_base = Delta.first_base


def graph_us(functions: list[Callable[[], Any]]) -> float:
    """Median time of one of the calls, captured one after the other."""
    for function in functions:
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(functions))
    return sorted(times)[len(times) // 2]


def measure(modules: list[Any], sizes: Sequence[int], names: tuple[str, ...]) -> tuple[dict[int, list[float]], int]:
    """Microseconds without and with a rewrite at each number of tokens, and how often it fired in the one graph."""
    times: dict[int, list[float]] = {num_tokens: [] for num_tokens in sizes}
    results: dict[int, Tensor] = {}
    fired = 0
    for on in (False, True):
        torch._dynamo.reset()
        handle = moelora_ops.compile.enable(*names) if on else None
        try:
            # One graph serves all sets and sizes: buffers are inputs of it.
            compiled = torch.compile(lambda module, x, mapping: module(x, mapping), fullgraph=True)
            for num_tokens in sizes:
                options = dict(hidden_size=SHAPE["hidden_size"], dtype=torch.bfloat16, device="cuda")
                inputs = [batch(num_tokens, seed=seed, **options) for seed in range(len(modules))]  # type: ignore[arg-type]
                for tensor in (t for pair in inputs for t in pair):
                    torch._dynamo.mark_dynamic(tensor, 0)
                calls = [lambda m=m, i=i: compiled(m, *i) for m, i in zip(modules, inputs)]
                result = calls[0]().float()
                assert_close(result, results.setdefault(num_tokens, result), TOLERANCES[torch.bfloat16])
                times[num_tokens].append(graph_us(calls))
        finally:
            if handle is not None:
                fired = sum(handle.fired.values())
                handle.disable()
    return times, fired


@torch.no_grad()
def main() -> None:
    begin = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, E=128 H=2048 I=768 K=8, L=8 r=16, {SETS} sets")
    print("| rewrite | T | off, us | on, us | gain | fired |\n|" + " --- |" * 6)
    rows: tuple[tuple[str, Callable[[], Any], tuple[int, ...]], ...] = (
        ("delta_activation", lambda: Delta("chunk", dtype=torch.bfloat16, device="cuda", **SHAPE), (8, 32, 512, 2048)),
        ("eager_lora", lambda: EagerDelta("einsum", dtype=torch.bfloat16, device="cuda", **SHAPE), (8, 32)),
        ("expert_layer", lambda: Layer("weight in the sum", dtype=torch.bfloat16, device="cuda", **SHAPE), (8, 32)),
        ("expert_layer", lambda: Layer("search", dtype=torch.bfloat16, device="cuda", **SHAPE), (32, 512)),
        ("shared_align", lambda: Twice(Activated("chunk", dtype=torch.bfloat16, device="cuda", **SHAPE)), (32, 2048)),
    )
    for name, make, sizes in rows:
        modules = [make() for _ in range(SETS)]
        times, fired = measure(modules, sizes, (name,))
        what = name if name != "expert_layer" else f"{name}, {'grouped' if modules[0].spelling == 'search' else 'gathered'}"
        for num_tokens, (off, on) in times.items():
            print(f"| {what} | {num_tokens} | {off:.1f} | {on:.1f} | {off / on:.2f} | {fired} |", flush=True)
        del modules
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
