"""What a call of each op costs on a CPU before its work begins: `python -m benchmarks.dispatch [--rounds 60]`.

All arguments are given and there is no token, so that next to nothing is computed. Microseconds of CPU time on one thread
(which leaves out what other processes take): the median over rounds of the mean of a round. `torch.ops` is the op itself,
`function` the one of `moelora_ops`; both below inference_mode, no_grad, and with gradients enabled but not asked for.
aten.add_ of one element and aten.addmm without rows are measured in between, in each round, for a scale.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from contextlib import nullcontext
from typing import Any, Callable

import torch

import moelora_ops
from moelora_ops.kernels import native
from moelora_ops.testing.cases import Case

CALLS = 100
MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": nullcontext,
}


def calls() -> dict[str, tuple[Any, Any, tuple[Any, ...], dict[str, Any]]]:
    """Name to (op, function, arguments, keyword arguments), every argument given and none with its default."""
    case = Case("dispatch", num_tokens=0, bias=True)
    inputs = case.make()
    ranks = torch.full((case.max_loras,), 4, dtype=torch.int32)
    ids = dict(adapter_enabled=torch.ones_like(ranks), expert_map=torch.arange(case.num_experts, dtype=torch.int32))
    align, _ = inputs.align(8)
    a, b = inputs.gate_up_lora()
    output = torch.zeros(0, case.top_k, 1 + 2 * case.intermediate_size)
    aligned = moelora_ops.moe_lora_align_block_size(*align, **ids)
    delta = (output, inputs.hidden_states, a, b, inputs.topk_weights, *aligned)
    experts, options = inputs.experts()
    options |= dict(activation="gelu", interleaved=True, swiglu_alpha=1.5, swiglu_limit=7.0, routed_scaling_factor=2.0)
    options |= dict(gated=True, apply_router_weight_on_input=True, lora_ranks=ranks, **ids)
    ops = torch.ops.moelora
    return {
        "moe_lora_align_block_size": (
            ops.moe_lora_align_block_size.default, moelora_ops.moe_lora_align_block_size, align, ids,
        ),
        "fused_moe_lora": (
            ops.fused_moe_lora.default, moelora_ops.fused_moe_lora, delta,
            dict(lora_ranks=ranks, mul_routed_weight=True, offset=1),
        ),
        "fused_experts_lora": (ops.fused_experts_lora.default, moelora_ops.fused_experts_lora, experts, options),
    }  # fmt: skip


def once(function: Any, args: Any, kwargs: Any) -> float:
    """Mean microseconds of a call, of this thread's CPU time."""
    start = time.thread_time()
    for _ in range(CALLS):
        function(*args, **kwargs)
    return (time.thread_time() - start) / CALLS * 1e6


def measure(rounds: int) -> dict[str, float]:
    """Column to median microseconds; all columns take turns, so that they see the same machine."""
    one, rows, weight = torch.zeros(1), torch.zeros(0, 64), torch.zeros(64, 64)
    columns: dict[str, tuple[Any, Any, Any, Any]] = {}
    for mode, context in MODES.items():
        columns[f"aten.add_ {mode}"] = (torch.ops.aten.add_.Tensor, (one, one), {}, context)
        columns[f"aten.addmm {mode}"] = (torch.ops.aten.addmm.default, (weight[0], rows, weight), {}, context)
        for name, (op, function, args, kwargs) in calls().items():
            columns[f"{name} torch.ops {mode}"] = (op, args, kwargs, context)
            columns[f"{name} function {mode}"] = (function, args, kwargs, context)
    samples: dict[str, list[float]] = {name: [] for name in columns}
    for _ in range(rounds + 1):
        for name, (function, args, kwargs, context) in columns.items():
            with context():
                samples[name].append(once(function, args, kwargs))
    return {name: statistics.median(times[1:]) for name, times in samples.items()}  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.rounds)
    print(f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()},", end=" ")
    print(f"C++ kernels: {native.CPU_MISSING or 'yes'}; microseconds of a call")
    print(f"{'':36}" + "".join(f"{mode:>12}" for mode in MODES))
    for name in dict.fromkeys(column.rpartition(" ")[0] for column in found):
        print(f"{name:36}" + "".join(f"{found[f'{name} {mode}']:12.1f}" for mode in MODES))


if __name__ == "__main__":
    main()
