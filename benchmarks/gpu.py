"""The three ops on a GPU against their floors: `python3 -m benchmarks.gpu`.

One row a cell: microseconds of one expert layer without and with adapters, routing included, and their ratios to

    floor base = max(bytes of the active experts / copy bandwidth, FLOPs / matmul rate)
    floor LoRA = floor base + bytes of the active (adapter, expert) pairs' A and B / copy bandwidth

with both ceilings measured in the same run. Values are checked against the fp64 reference first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import moelora_ops
from moelora_ops.testing.cases import MODELS, Case, Inputs
from moelora_ops.testing.numerics import TOLERANCES, assert_close
from moelora_ops.testing.oracle import assert_delta_close, exact_experts
from moelora_ops.testing.timing import copy_bandwidth, graph_us, matmul_rate

CELLS = (
    *(("qwen3-30b-a3b", tokens, 8, 16) for tokens in (1, 8, 32, 128, 512, 2048, 8192)),
    ("qwen3-30b-a3b", 32, 16, 64),
    ("qwen3-30b-a3b", 512, 16, 64),
    *(("qwen3-235b-a22b-tp4", tokens, 8, 16) for tokens in (1, 32, 512)),
    *(("mixtral-8x7b", tokens, 8, 16) for tokens in (1, 16, 128, 2048)),
)
COLUMNS = "model | T | L | r | floor base | base | x floor | floor LoRA | LoRA | x floor"
COLUMNS += " | LoRA / base | all -1 / base | align | delta"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="Qwen3-30B shape with T up to 512 only")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(f"copy {bandwidth / 1e12:.2f} TB/s, matmul {rate / 1e12:.0f} TFLOP/s; microseconds, one layer, routing included")
    print(f"| {COLUMNS} |\n|{' --- |' * (COLUMNS.count('|') + 1)}")
    for name, num_tokens, max_loras, rank in CELLS:
        if quick and (name != "qwen3-30b-a3b" or num_tokens > 512 or rank != 16):
            continue
        case = MODELS[name].like(num_tokens=num_tokens, max_loras=max_loras, max_lora_rank=rank)
        print(row(case, bandwidth, rate), flush=True)


def row(case: Case, bandwidth: float, rate: float) -> str:
    """Check one cell, time it, and put it in a line."""
    inputs = case.make("cuda")
    if case.num_tokens <= 512:  # the fp64 reference of the large cells takes longer than everything else
        check(inputs)
    batches = [rerouted(inputs, seed) for seed in range(6 if case.num_tokens <= 1024 else 2)]
    floors = [floor_us(batch, bandwidth, rate) for batch in batches]
    floor_base, floor_lora = (sum(f[i] for f in floors) / len(floors) for i in (0, 1))
    idle = [batch.replace(token_lora_mapping=torch.full_like(batch.token_lora_mapping, -1)) for batch in batches]
    base = graph_us(lambda batch: experts(batch, adapters=False), batches)
    lora = graph_us(experts, batches)
    quiet = graph_us(experts, idle)
    align = graph_us(lambda batch: moelora_ops.moe_lora_align_block_size(*batch.align()[0]), batches)
    calls = [(batch, moelora_ops.moe_lora_align_block_size(*batch.align()[0]), output_of(batch)) for batch in batches]
    delta = graph_us(gate_up_delta, calls)
    cells = [case.name, case.num_tokens, case.max_loras, case.max_lora_rank]
    cells += [f"{floor_base:.1f}", f"{base:.1f}", f"{base / floor_base:.2f}", f"{floor_lora:.1f}", f"{lora:.1f}"]
    cells += [f"{lora / floor_lora:.2f}", f"{lora / base:.2f}", f"{quiet / base:.2f}", f"{align:.1f}", f"{delta:.1f}"]
    return f"| {' | '.join(map(str, cells))} |"


def experts(inputs: Inputs, *, adapters: bool = True) -> Tensor:
    args, kwargs = inputs.experts(adapters=adapters)
    return moelora_ops.fused_experts_lora(*args, **kwargs)


def output_of(inputs: Inputs) -> Tensor:
    """Room for the first projection of every pair."""
    return inputs.w13.new_zeros(inputs.case.num_tokens, inputs.case.top_k, inputs.w13.shape[1])


def gate_up_delta(call: tuple[Inputs, Sequence[Tensor], Tensor]) -> None:
    """The delta op on the first projection."""
    inputs, routing, output = call
    slices: Any = inputs.gate_up_lora()
    moelora_ops.fused_moe_lora(output, inputs.hidden_states, *slices, inputs.topk_weights, *routing)


def check(inputs: Inputs) -> None:
    tolerance = TOLERANCES[inputs.case.dtype]
    base, want_base = experts(inputs, adapters=False), exact_experts(inputs, adapters=False)
    assert_close(base, want_base, tolerance, what="base")
    assert_delta_close(experts(inputs), base, exact_experts(inputs), want_base)


def rerouted(inputs: Inputs, seed: int) -> Inputs:
    """The same weights with other tokens; a random adapter a token up to T = 512, requests of 256 tokens above."""
    case = inputs.case
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.randn(case.num_tokens, case.num_experts, generator=generator, device="cuda")
    weights, ids = scores.softmax(-1).topk(case.top_k, dim=1)
    requests = case.num_tokens if case.num_tokens <= 512 else -(-case.num_tokens // 256)
    slots = torch.randint(0, case.max_loras, (requests,), generator=generator, device="cuda", dtype=torch.int32)
    x = torch.randn(inputs.hidden_states.shape, generator=generator, device="cuda").to(case.dtype)
    return inputs.replace(
        hidden_states=x,
        topk_weights=weights,
        topk_ids=ids.int(),
        token_lora_mapping=slots.repeat_interleave(-(-case.num_tokens // requests))[: case.num_tokens],
    )


def floor_us(inputs: Inputs, bandwidth: float, rate: float) -> tuple[float, float]:
    """(base, LoRA) microseconds that no kernel can beat."""
    experts = inputs.topk_ids.long()
    weights = sum(w[0].numel() * w.element_size() for w in (inputs.w13, inputs.w2))
    flops = 2 * inputs.case.num_pairs * sum(w[0].numel() for w in (inputs.w13, inputs.w2))
    base = max(experts.unique().numel() * weights / bandwidth, flops / rate)
    lora = (inputs.lora_a13, inputs.lora_b13, inputs.lora_a2, inputs.lora_b2)
    pairs = (inputs.token_lora_mapping.long()[:, None] * inputs.case.num_experts + experts).unique().numel()
    return base * 1e6, (base + pairs * sum(t[0, 0].numel() * t.element_size() for t in lora) / bandwidth) * 1e6


if __name__ == "__main__":
    main()
