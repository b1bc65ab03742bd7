"""CPU time of an eager call of the layer op, and of its parts: `python3 -m benchmarks.host [--tokens 1 8 512]`, on a GPU.

Microseconds, the median of several rounds of calls whose work is not waited for. `op` is the dispatcher's entry without the
Python function around it; key, memory and list are the parts of a known call below the dispatcher.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Callable

import torch

import moelora_ops
from moelora_ops.kernels.triton import experts
from moelora_ops.kernels.triton.call import key_of
from moelora_ops.testing.cases import MODELS

ROUNDS, CALLS = 15, 40


def host_us(function: Callable[[], Any]) -> float:
    """Median microseconds of a call; the queue of the device does not fill."""
    samples = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        samples.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def parts(num_tokens: int, adapters: bool) -> dict[str, float]:
    """Name to microseconds, for Qwen3-30B-A3B with 8 adapters of rank 16."""
    inputs = MODELS["qwen3-30b-a3b"].like(num_tokens=num_tokens, max_loras=8).make("cuda")
    args, kwargs = inputs.experts(adapters=adapters)
    moelora_ops.fused_experts_lora(*args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}  # as the dispatcher hands them out
    key, addresses = key_of(args, kwargs)
    moelora_ops.fused_experts_lora(*args, **kwargs)
    call = experts.prepare(*args, **kwargs)
    plan = experts.make_plan(call)
    plan.run(call)
    result = {"call": host_us(lambda: moelora_ops.fused_experts_lora(*args, **kwargs))}
    with torch.inference_mode():
        result["inference"] = host_us(lambda: moelora_ops.fused_experts_lora(*args, **kwargs))
    with torch.no_grad():
        result["no_grad"] = host_us(lambda: moelora_ops.fused_experts_lora(*args, **kwargs))
        result["op"] = host_us(lambda: torch.ops.moelora.fused_experts_lora.default(*args, **kwargs))
        result["known"] = host_us(lambda: experts.run_known(args, kwargs))
        result["key"] = host_us(lambda: key_of(args, kwargs))
        result["lookup"] = host_us(lambda: experts._PLANS.get(key))
        x, shape = inputs.hidden_states, (plan.num_tokens, plan.hidden_size)
        result["memory"] = host_us(lambda: (x.new_empty(plan.scratch_numel), x.new_empty(*shape)))
        launches = plan.launches
        if launches is not None:
            scratch, out = x.new_empty(plan.scratch_numel), x.new_empty(*shape)
            stream = torch.cuda.current_stream().cuda_stream
            given = [*addresses, scratch.data_ptr(), out.data_ptr()]
            result["list"] = host_us(lambda: launches(stream, given))
        plan.launches, plan.listable = None, False
        result["one by one"] = host_us(lambda: plan.run(call))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 512])
    options = parser.parse_args()
    rows = {(t, lora): parts(t, lora) for t in options.tokens for lora in (True, False)}
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: microseconds of CPU time")
    print(f"{'T':>5} {'':8}" + "".join(f"{name:>12}" for name in names))
    for (num_tokens, lora), row in rows.items():
        cells = "".join(f"{row[name]:12.1f}" if name in row else f"{'-':>12}" for name in names)
        print(f"{num_tokens:>5} {'adapters' if lora else 'base':8}{cells}")


if __name__ == "__main__":
    main()
