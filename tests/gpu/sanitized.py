"""Small calls of every GPU kernel, odd sizes and bad ids included, for `test_sanitizer.py` to run under compute-sanitizer."""

from __future__ import annotations

import torch
from torch import Tensor

import moelora_ops
from moelora_ops.kernels.triton import align
from moelora_ops.ops.fused_moe_lora_activation import OP as fused_moe_lora_activation


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def run(num_tokens: int, dtype: torch.dtype, *, gated: bool, interleaved: bool) -> None:
    T, K, E, L, R, H, I = num_tokens, 3, 5, 4, 12, 72, 40
    S = 2 if gated else 1
    topk_ids = torch.randint(-2, E + 3, (T, K), device="cuda")
    mapping = torch.randint(-2, L + 2, (T,), device="cuda", dtype=torch.int32)
    enabled = torch.tensor([1, 0, 1, 1], device="cuda", dtype=torch.int32)
    ranks = torch.tensor([12, 3, 0, 99], device="cuda", dtype=torch.int32)
    topk_weights = torch.rand(T, K, device="cuda")
    a13, b13 = randn(L, 1, S * R, H, dtype=dtype), randn(L, E, S * I, R, dtype=dtype)
    a2, b2 = randn(L, E, R, I, dtype=dtype), randn(L, 1, H, R, dtype=dtype)
    x = randn(T, H, dtype=dtype)
    moelora_ops.fused_experts_lora(
        x, randn(E, S * I, H, dtype=dtype), randn(E, H, I, dtype=dtype), topk_weights, topk_ids, mapping, a13, b13, a2, b2,
        lora_ranks=ranks, adapter_enabled=enabled, w13_bias=randn(E, S * I, dtype=dtype), w2_bias=randn(E, H, dtype=dtype),
        gated=gated, interleaved=interleaved, activation="silu" if gated else "relu2",
    )  # fmt: skip
    expert_map = torch.tensor([0, -1, 3, 9, 1], device="cuda")
    for function in (moelora_ops.moe_lora_align_block_size, align.moe_lora_align_block_size):
        routing = function(topk_ids, mapping, E, 16, L, adapter_enabled=enabled, expert_map=expert_map)
    output = randn(T, K, S * I + 3, dtype=dtype)
    halves = (list(a13.chunk(S, dim=2)), list(b13.chunk(S, dim=2)))
    moelora_ops.fused_moe_lora(output, x, *halves, topk_weights, *routing, lora_ranks=ranks, mul_routed_weight=True, offset=3)
    whole = output[..., : S * I].contiguous()
    fused_moe_lora_activation(
        whole, x, *halves, topk_weights, *routing, lora_ranks=ranks, activation="gelu" if gated else "relu2"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    for tokens in (1, 37, 700):  # one tile, odd rows, and the large tiles
        run(tokens, torch.bfloat16, gated=True, interleaved=tokens == 37)
    run(5, torch.float32, gated=False, interleaved=False)
    torch.cuda.synchronize()
    print("every kernel ran")
